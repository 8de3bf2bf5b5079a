//! Runs in the durable tier. A number is claimed by creating `NAMESPACE/.storaged/runs/NUMBER`, which only one can; a
//! number that has a folder counts as taken too, whoever began it and whether it was finished or not.

use storaged_core::{ClaimFault, ClaimedRun, DurableFault, Trust};
use storaged_wire::claim::RunClaim;
use storaged_wire::{ConsentKey, Namespace, Owner, RunId, decode, encode};

use super::fault::damaged;
use super::store::{KeyPrefix, ObjectKey, StoreError};
use super::{Trickle, in_order};

/// Claims that are tried one after the other before the tier counts as one that lies.
const CLAIMS_MAX: u32 = 256;

/// What the tier knows of a namespace's runs.
#[derive(Debug)]
struct KnownRuns {
    /// The highest number, of a folder or a claim.
    highest: u64,
    /// The highest number that was claimed.
    claimed: Option<u64>,
}

impl Trickle {
    /// Claims the first number above `above` and above every one that is taken.
    ///
    /// # Errors
    /// Why no run was given.
    pub async fn claim_run(
        &self,
        namespace: &Namespace,
        owner: Owner,
        consent: Option<&ConsentKey>,
        above: u64,
        identity: u64,
    ) -> Result<RunId, ClaimFault> {
        if let Some(consent) = consent {
            let current = self.check_current(namespace, consent).await;
            current.map_err(|fault| match fault {
                DurableFault::TokenChanged(_) => ClaimFault::WrongOwner,
                other => ClaimFault::Durable(other),
            })?;
        }
        let known = self
            .known_runs(namespace)
            .await
            .map_err(ClaimFault::Durable)?;
        self.check_owner(namespace, owner, &known).await?;
        let mut run = RunId::with_identity(known.highest.max(above), identity);
        for _ in 0..CLAIMS_MAX {
            let next = run.next_number().ok_or_else(|| no_number(namespace))?;
            run = RunId::with_identity(next, identity);
            match self.put_claim(namespace, owner, run).await {
                Ok(()) => return Ok(run),
                Err(DurableFault::Conflict(_)) => {
                    self.check_claim(namespace, owner, next).await?;
                }
                Err(fault) => return Err(ClaimFault::Durable(fault)),
            }
        }
        let text = format!("expected a free run number of {namespace} below {run}, got none");
        Err(ClaimFault::Durable(DurableFault::Conflict(text)))
    }

    /// Claims a run that was opened without the tier. If the number is somebody else's meanwhile, it is taken all the
    /// same, and the two are told apart by their identities.
    ///
    /// # Errors
    /// Why the tier did not take it.
    pub async fn record_run(
        &self,
        namespace: &Namespace,
        owner: Owner,
        run: RunId,
    ) -> Result<(), DurableFault> {
        match self.put_claim(namespace, owner, run).await {
            Err(DurableFault::Conflict(reason)) => {
                tracing::warn!(%namespace, %run, reason, "another run of this number was claimed first");
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Whose run it is, if this very run was claimed, and whether newer ones were.
    ///
    /// # Errors
    /// Why the tier could not be asked.
    pub async fn find_run(
        &self,
        namespace: &Namespace,
        run: RunId,
    ) -> Result<ClaimedRun, DurableFault> {
        let claim = self.claim_of(namespace, run.number()).await?;
        let Some(claim) = claim.filter(|claim| claim.run == run) else {
            return Ok(ClaimedRun::Unknown);
        };
        let newest = self.known_runs(namespace).await?.highest;
        Ok(if newest > run.number() {
            ClaimedRun::Superseded { newest }
        } else {
            ClaimedRun::Newest(claim.owner)
        })
    }

    async fn put_claim(
        &self,
        namespace: &Namespace,
        owner: Owner,
        run: RunId,
    ) -> Result<(), DurableFault> {
        let key = claim_key(namespace, run.number())?;
        let claim = RunClaim::new(namespace.clone(), owner, run);
        Ok(self.store.put_new(&key, encode(&claim).into()).await?)
    }

    async fn claim_of(
        &self,
        namespace: &Namespace,
        number: u64,
    ) -> Result<Option<RunClaim>, DurableFault> {
        let key = claim_key(namespace, number)?;
        let bytes = match self.store.get(&key, None).await {
            Ok(bytes) => bytes,
            Err(StoreError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        match decode::<RunClaim>("claim", &bytes) {
            Ok(claim) if claim.version == RunClaim::VERSION && claim.namespace == *namespace => {
                Ok(Some(claim))
            }
            Ok(claim) => Err(damaged(format!(
                "{key}: expected a claim of {namespace} in version {}, got one of {} in version {}",
                RunClaim::VERSION,
                claim.namespace,
                claim.version
            ))),
            Err(error) => Err(damaged(format!("{key}: {error}"))),
        }
    }

    /// The highest numbers that are taken. An empty place is believed only if it is the place that was opened.
    async fn known_runs(&self, namespace: &Namespace) -> Result<KnownRuns, DurableFault> {
        self.store.check_place().await?;
        let folder: ObjectKey = namespace.as_str().parse()?;
        let folders = self.store.list_folders(&KeyPrefix::folder(folder)).await?;
        let claims: ObjectKey = format!("{namespace}/.storaged/runs").parse()?;
        let claims = self.store.list(&KeyPrefix::folder(claims)).await?;
        let claimed = claims
            .iter()
            .filter_map(|entry| claim_number(namespace, &entry.key))
            .max();
        let begun = folders.iter().filter_map(|name| folder_number(name)).max();
        Ok(KnownRuns {
            highest: claimed.max(begun).unwrap_or(0),
            claimed,
        })
    }

    /// Whether the tier knows a job, and as somebody else's.
    ///
    /// # Errors
    /// That it does not belong to whoever asks, or why the tier could not be asked.
    pub(super) async fn check_job(
        &self,
        namespace: &Namespace,
        owner: Owner,
    ) -> Result<(), ClaimFault> {
        let known = self.known_runs(namespace).await;
        let known = known.map_err(ClaimFault::Durable)?;
        self.check_owner(namespace, owner, &known).await
    }

    /// A namespace in the tier belongs to whoever made the newest claim; before the first claim, to whoever saved there.
    async fn check_owner(
        &self,
        namespace: &Namespace,
        owner: Owner,
        known: &KnownRuns,
    ) -> Result<(), ClaimFault> {
        if let Some(number) = known.claimed {
            return self.check_claim(namespace, owner, number).await;
        }
        if known.highest == 0 {
            return Ok(());
        }
        let listed = self.list(namespace, None, &Trust::Anything).await;
        let listed = listed.map_err(ClaimFault::Durable)?;
        let newest = listed
            .manifests
            .first()
            .map(|manifest| manifest.manifest().owner);
        check_owner(newest, owner)
    }

    async fn check_claim(
        &self,
        namespace: &Namespace,
        owner: Owner,
        number: u64,
    ) -> Result<(), ClaimFault> {
        let claim = self.claim_of(namespace, number).await;
        let claim = claim.map_err(ClaimFault::Durable)?;
        check_owner(claim.map(|claim| claim.owner), owner)
    }
}

/// Whether it is whom the tier knows, if it knows anybody.
fn check_owner(known: Option<Owner>, owner: Owner) -> Result<(), ClaimFault> {
    if known.is_none_or(|known| known == owner) {
        Ok(())
    } else {
        Err(ClaimFault::WrongOwner)
    }
}

fn no_number(namespace: &Namespace) -> ClaimFault {
    let text = format!(
        "expected a run folder of {namespace} with a number below {}, got that one, which no daemon made: remove it",
        u64::MAX
    );
    ClaimFault::Durable(DurableFault::Damaged(text))
}

/// Below the namespace, where no reader of checkpoints looks; padded, so that listings come in order.
fn claim_key(namespace: &Namespace, number: u64) -> Result<ObjectKey, StoreError> {
    format!("{namespace}/.storaged/runs/{}", in_order(number)).parse()
}

fn claim_number(namespace: &Namespace, key: &ObjectKey) -> Option<u64> {
    let rest = key.as_str().strip_prefix(namespace.as_str())?;
    rest.strip_prefix("/.storaged/runs/")?.parse().ok()
}

fn folder_number(name: &str) -> Option<u64> {
    let run: RunId = name.strip_prefix("run-")?.parse().ok()?;
    Some(run.number())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::*;
    use crate::keep::NoStore;
    use crate::memory::Memory;
    use crate::trickle::store::{self, FaultPlan, Store};
    use crate::trickle::{Packing, RequireMac, Retention, TrickleLimits};

    fn namespace() -> Namespace {
        Namespace::new("job").unwrap()
    }

    fn over(store: Arc<dyn Store>) -> Arc<Trickle> {
        let memory = Arc::new(Memory::new(Arc::new(NoStore)));
        let limits = TrickleLimits {
            part_bytes: 1 << 20,
            in_flight_bytes: 64 << 20,
            rate: None,
            packing: Packing::None,
            increments: 0,
            retention: Retention::default(),
            require_mac: RequireMac::default(),
        };
        Arc::new(Trickle::new(store, memory, limits))
    }

    fn mine() -> Owner {
        Owner::of_token(b"mine")
    }

    async fn put(store: &Arc<dyn Store>, key: &str) {
        let key = key.parse().unwrap();
        store.put_new(&key, b"x"[..].into()).await.unwrap();
    }

    #[tokio::test]
    async fn a_number_is_above_every_folder_and_claim() {
        let store: Arc<dyn Store> = Arc::new(store::FakeStore::new());
        let trickle = over(store.clone());
        let claim = |above, identity| trickle.claim_run(&NAMESPACE, mine(), None, above, identity);
        static NAMESPACE: std::sync::LazyLock<Namespace> = std::sync::LazyLock::new(namespace);
        assert_eq!(claim(0, 1).await, Ok(RunId::with_identity(1, 1)));
        assert_eq!(claim(0, 2).await, Ok(RunId::with_identity(2, 2)));
        assert_eq!(claim(6, 3).await, Ok(RunId::with_identity(7, 3)));
        put(&store, "job/run-9/step-5/__0_0.distcp").await;
        assert_eq!(claim(0, 4).await, Ok(RunId::with_identity(10, 4)));
        put(&store, "job/run-20-00f3a9c1d2e4b5a6/step-5/__0_0.distcp").await;
        put(&store, "job/run-nonsense/step-5/x").await;
        put(&store, "other/run-99/step-5/x").await;
        assert_eq!(claim(0, 5).await, Ok(RunId::with_identity(21, 5)));
        let found = trickle.find_run(&NAMESPACE, RunId::with_identity(21, 5));
        assert_eq!(found.await, Ok(ClaimedRun::Newest(mine())));
        let other = trickle.find_run(&NAMESPACE, RunId::with_identity(21, 6));
        assert_eq!(other.await, Ok(ClaimedRun::Unknown));
        let older = trickle.find_run(&NAMESPACE, RunId::with_identity(7, 3));
        assert_eq!(older.await, Ok(ClaimedRun::Superseded { newest: 21 }));
    }

    #[tokio::test]
    async fn of_many_claims_at_once_every_one_gets_its_own_number() {
        let trickle = over(Arc::new(store::FakeStore::new()));
        let claims = (1..=32).map(|identity| {
            let trickle = trickle.clone();
            tokio::spawn(async move {
                trickle
                    .claim_run(&namespace(), mine(), None, 0, identity)
                    .await
            })
        });
        let mut numbers = BTreeSet::new();
        for claim in claims.collect::<Vec<_>>() {
            numbers.insert(claim.await.unwrap().unwrap().number());
        }
        assert_eq!(numbers, (1..=32).collect());
    }

    #[tokio::test]
    async fn another_token_gets_none() {
        let trickle = over(Arc::new(store::FakeStore::new()));
        trickle
            .claim_run(&namespace(), mine(), None, 0, 1)
            .await
            .unwrap();
        let other = Owner::of_token(b"other");
        let refused = trickle.claim_run(&namespace(), other, None, 0, 2).await;
        assert_eq!(refused, Err(ClaimFault::WrongOwner));
    }

    #[tokio::test]
    async fn a_forged_last_folder_is_said_and_overflows_nothing() {
        let store: Arc<dyn Store> = Arc::new(store::FakeStore::new());
        put(&store, &format!("job/run-{}/step-1/x", u64::MAX)).await;
        let refused = over(store)
            .claim_run(&namespace(), mine(), None, 0, 1)
            .await;
        let Err(ClaimFault::Durable(DurableFault::Damaged(text))) = refused else {
            panic!("expected a fault, got {refused:?}");
        };
        assert!(text.contains("remove it"), "{text}");
    }

    #[tokio::test]
    async fn a_store_that_cannot_be_read_is_no_empty_one() {
        let plan = FaultPlan {
            fail_per_mille: 1000,
            ..FaultPlan::default()
        };
        let faulty = store::Faulty::new(Arc::new(store::FakeStore::new()), plan, 1);
        let refused = over(Arc::new(faulty))
            .claim_run(&namespace(), mine(), None, 0, 1)
            .await;
        assert!(
            matches!(refused, Err(ClaimFault::Durable(_))),
            "{refused:?}"
        );
    }

    #[tokio::test]
    async fn what_was_opened_without_the_tier_is_recorded_once() {
        let trickle = over(Arc::new(store::FakeStore::new()));
        let run = RunId::with_identity(4, 9);
        trickle.record_run(&namespace(), mine(), run).await.unwrap();
        trickle.record_run(&namespace(), mine(), run).await.unwrap();
        let twin = RunId::with_identity(4, 8);
        trickle
            .record_run(&namespace(), mine(), twin)
            .await
            .unwrap();
        let found = trickle.find_run(&namespace(), run).await;
        assert_eq!(found, Ok(ClaimedRun::Newest(mine())));
        let next = trickle.claim_run(&namespace(), mine(), None, 0, 5).await;
        assert_eq!(next, Ok(RunId::with_identity(5, 5)));
    }
}
