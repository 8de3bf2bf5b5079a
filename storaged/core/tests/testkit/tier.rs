//! The durable tier: shards, manifests and claimed runs. How long it takes and what fails a scene says; what it then holds,
//! lists and gives back is the same in all of them. What an upload reads, it reads from the slot when its end is decided: a
//! slot that was given to others meanwhile makes a wrong object, which no upload may call done.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_codec::Digest;
use storaged_core::{
    Authorship, ClaimFault, ClaimedRun, DurableFault, DurableListing, FoundSuccessions, Input,
    Leftovers, QueryId, SetAside, SetAsideCause, SlotShard, SuccessionFault, Trust, UploadBase,
    UploadTally,
};
use storaged_wire::peer::{CheckpointKey, HighMark};
use storaged_wire::{
    ConsentKey, DurableStep, Enclosures, JobKeys, ManifestBytes, ManifestKey, Namespace, Owner,
    Rank, Rotation, RunId, SharedBytes, SlotId, Step, Succession,
};

use super::process::{Payload, Pid, digests};
use super::scene::Scene;
use super::world::{Event, World};

/// A listing names so many manifests of a namespace, as the real tier's does.
pub const LISTED: usize = 4;

/// What the tier does for a node.
#[derive(Debug, Clone)]
pub enum Task {
    Upload(Upload),
    Publish(Publication),
    List(QueryId, Listed),
    Fetch(Arc<ManifestBytes>, Rank, SlotId),
    Claim(QueryId, Claim),
    Record(Namespace, Owner, RunId),
    Find(QueryId, Namespace, RunId),
    Successions(QueryId, Namespace, Option<Trust>),
    Succeed(QueryId, Box<Rotation>, ManifestKey),
}

#[derive(Debug, Clone)]
pub struct Upload {
    pub manifest: Arc<ManifestBytes>,
    pub rank: Rank,
    pub shard: SlotShard,
    pub base: Option<UploadBase>,
    pub leftovers: Leftovers,
}

/// What is to be listed, and for whom.
#[derive(Debug, Clone)]
pub struct Listed {
    pub namespace: Namespace,
    pub step: Option<Step>,
    pub trust: Trust,
}

/// A manifest is to be written, behind what it names.
#[derive(Debug, Clone)]
pub struct Publication {
    pub manifest: Arc<ManifestBytes>,
    pub enclosures: Enclosures,
    pub authorship: Authorship,
}

/// A run's number is asked for.
#[derive(Debug, Clone)]
pub struct Claim {
    pub namespace: Namespace,
    pub owner: Owner,
    pub consent: Option<ConsentKey>,
    pub above: u64,
    pub identity: u64,
}

/// How a task goes.
#[derive(Debug)]
pub enum Course {
    /// What it comes to is decided when it begins.
    Decided {
        lasts_ms: u64,
        fault: Option<DurableFault>,
    },
    /// What it comes to is decided when it ends.
    Open { lasts_ms: u64 },
    /// It never ends.
    Hangs,
}

impl Course {
    pub fn well(lasts_ms: u64) -> Self {
        let fault = None;
        Self::Decided { lasts_ms, fault }
    }

    pub fn fails(lasts_ms: u64, fault: DurableFault) -> Self {
        let fault = Some(fault);
        Self::Decided { lasts_ms, fault }
    }
}

#[derive(Debug, Clone)]
pub struct Work {
    pid: Pid,
    task: Task,
}

/// A manifest in the tier, and since when.
#[derive(Debug, Clone)]
pub struct Published {
    pub at: u64,
    pub manifest: Arc<ManifestBytes>,
    pub enclosures: Enclosures,
    pub authorship: Authorship,
}

impl Published {
    /// What the manifest names, by digest.
    fn named(&self) -> impl Iterator<Item = (Digest, SharedBytes)> {
        let record = self.manifest.manifest();
        let Enclosures {
            schema,
            torch_metadata,
        } = self.enclosures.clone();
        let all = [
            (&record.schema, schema),
            (&record.torch_metadata, torch_metadata),
        ];
        let named = all.map(|(enclosed, bytes)| Some((enclosed.to_fetch()?.digest, bytes)));
        named.into_iter().flatten()
    }
}

/// A shard in the tier: its bytes, where there are any, and digests.
#[derive(Debug, Clone)]
struct Object {
    bytes: Vec<u8>,
    leaves: Arc<[Digest]>,
}

#[derive(Debug, Default)]
pub struct Tier {
    shards: BTreeMap<(Digest, Rank), Object>,
    pub published: BTreeMap<CheckpointKey, Published>,
    claims: BTreeMap<(Namespace, u64), (RunId, Owner)>,
    /// Changes of tokens, in the order in which they came.
    pub successions: Vec<Succession>,
    /// Uploads that could be written against a base.
    pub increments: u64,
    /// How often it was asked for a shard.
    pub fetches: u64,
    /// Shards of which something may lie there.
    begun: BTreeSet<(CheckpointKey, Rank)>,
    /// What was expected there of those whose uploads began, one after the other.
    pub expected: Vec<Leftovers>,
}

impl Tier {
    /// The newest of a namespace.
    pub fn newest(&self, namespace: &Namespace) -> Option<&CheckpointKey> {
        let mut all = self.published.keys();
        all.rfind(|key| key.namespace == *namespace)
    }

    pub fn claim_of(&self, namespace: &Namespace, number: u64) -> Option<RunId> {
        let claim = self.claims.get(&(namespace.clone(), number));
        claim.map(|(run, _)| *run)
    }

    pub fn record(&mut self, namespace: Namespace, owner: Owner, run: RunId) {
        let place = (namespace, run.number());
        self.claims.entry(place).or_insert((run, owner));
    }

    fn claimed(&self, namespace: &Namespace) -> impl Iterator<Item = (u64, Owner)> {
        let all = self.claims.iter();
        let of_it = all.filter(move |((of, _), _)| of == namespace);
        of_it.map(|((_, number), (_, owner))| (*number, *owner))
    }

    /// The first number that nobody has claimed, above every folder and what the node knows.
    fn claim(&mut self, claim: Claim) -> Result<RunId, ClaimFault> {
        let Claim {
            namespace,
            owner,
            consent,
            above,
            identity,
        } = claim;
        let all = self.successions.iter();
        let mut of_it = all.filter(|it| it.namespace == namespace);
        if consent.is_some_and(|consent| of_it.any(|it| it.retires(&consent))) {
            return Err(ClaimFault::WrongOwner);
        }
        if self.claimed(&namespace).any(|(_, known)| known != owner) {
            return Err(ClaimFault::WrongOwner);
        }
        let folder = self.newest(&namespace).map(|key| key.run.number());
        let numbers = self.claimed(&namespace).map(|(number, _)| number);
        let highest = numbers.chain(folder).max().unwrap_or(0);
        // Above the last number there is none: the tier claims the last one again, as a lying one might.
        let number = highest.max(above).saturating_add(1);
        let run = RunId::with_identity(number, identity);
        self.claims.insert((namespace, number), (run, owner));
        Ok(run)
    }

    /// What is known of a run: its own claim, and the newest of its namespace.
    fn find(&self, namespace: &Namespace, run: RunId) -> ClaimedRun {
        let numbers = self.claimed(namespace).map(|(number, _)| number);
        let newest = numbers.max().unwrap_or(0);
        match self.claims.get(&(namespace.clone(), run.number())) {
            Some((known, _)) if *known == run && newest > run.number() => {
                ClaimedRun::Superseded { newest }
            }
            Some((known, owner)) if *known == run => ClaimedRun::Newest(*owner),
            _ => ClaimedRun::Unknown,
        }
    }

    /// What was there at some time, newest first: of it what the asker's key is that of.
    fn list(&self, wanted: &Listed, until: u64) -> DurableListing {
        let Listed {
            namespace,
            step,
            trust,
        } = wanted;
        let of_it = (self.published.iter())
            .filter(|(key, it)| key.namespace == *namespace && it.at <= until)
            .rev();
        let refused = |it: &Published| match trust {
            Trust::Anything => false,
            Trust::Job { owner, keys, .. } => {
                it.manifest.manifest().owner == *owner && !is_authentic(it, keys)
            }
            Trust::Nothing { .. } => true,
        };
        let newest_run = of_it.clone().next().map(|(key, _)| key.run);
        let asked = of_it.filter(|(key, _)| step.is_none_or(|step| key.step == step));
        let (aside, asked): (Vec<_>, Vec<_>) = asked.partition(|(_, it)| refused(it));
        let listed: Vec<&Published> = asked.into_iter().take(LISTED).map(|(_, it)| it).collect();
        let newest = listed.first().map(|it| &it.manifest);
        let authentic = newest.filter(|_| matches!(trust, Trust::Job { .. }));
        DurableListing {
            authentic: authentic.map(|it| DurableStep {
                run: it.manifest().run,
                step: it.manifest().step,
                manifest: it.name(),
            }),
            newest_run,
            manifests: listed.iter().map(|it| it.manifest.clone()).collect(),
            enclosures: listed.iter().flat_map(|it| it.named()).collect(),
            set_aside: aside
                .into_iter()
                .map(|(key, _)| SetAside {
                    run: key.run,
                    step: key.step,
                    cause: SetAsideCause::Forged,
                    reason: "not its key".into(),
                })
                .collect(),
        }
    }

    fn check_key(&self, namespace: &Namespace, key: &ManifestKey) -> Result<(), DurableFault> {
        let of_it = |it: &&Succession| it.namespace == *namespace;
        let mut of_it = self.successions.iter().filter(of_it);
        if of_it.any(|it| it.retires_key(key)) {
            return Err(DurableFault::TokenChanged("use the new one".into()));
        }
        Ok(())
    }

    fn find_successions(
        &self,
        namespace: Namespace,
        trust: Option<Trust>,
        until: u64,
    ) -> FoundSuccessions {
        let all = self.successions.iter();
        let records = all.filter(|it| it.namespace == namespace).cloned();
        let listed = |trust| {
            let step = None;
            let wanted = Listed {
                namespace: namespace.clone(),
                step,
                trust,
            };
            self.list(&wanted, until).authentic
        };
        FoundSuccessions {
            records: records.collect(),
            newest: trust.and_then(listed),
        }
    }

    fn succeed(&mut self, rotation: Rotation) -> Result<Succession, SuccessionFault> {
        let Rotation { succession, .. } = rotation;
        let is_same = |it: &&Succession| {
            it.namespace == succession.namespace && it.number == succession.number
        };
        match self.successions.iter().find(is_same) {
            Some(there) if there.credential != succession.credential => {
                Err(SuccessionFault::Another(Box::new(there.clone())))
            }
            Some(there) => Ok(there.clone()),
            None => {
                self.successions.push(succession.clone());
                Ok(succession)
            }
        }
    }

    /// Shards of a manifest that are not there.
    fn absent(&self, manifest: &ManifestBytes) -> usize {
        let name = manifest.name();
        let shards = manifest.manifest().shards.iter();
        let absent = shards.filter(|shard| !self.shards.contains_key(&(name, shard.rank)));
        absent.count()
    }

    fn publish(&mut self, at: u64, publication: Publication) {
        let Publication {
            manifest,
            enclosures,
            authorship,
        } = publication;
        let whole = Enclosures::of(manifest.manifest(), &enclosures);
        assert_eq!(whole.as_ref(), Ok(&enclosures), "what it names is whole");
        let key = CheckpointKey::of(manifest.manifest());
        let published = Published {
            at,
            manifest,
            enclosures,
            authorship,
        };
        // Who wrote it is written again, the manifest is not.
        let authorship = published.authorship.clone();
        self.published.entry(key).or_insert(published).authorship = authorship;
    }
}

/// Whether one of the keys has authenticated it, and may have.
fn is_authentic(it: &Published, keys: &JobKeys) -> bool {
    let Some(by) = it.authorship.keys.as_ref().map(|keys| keys.newest) else {
        return false;
    };
    let record = it.manifest.manifest();
    let (run, step) = (record.run, record.step);
    let counts = |up_to: Option<HighMark>| up_to >= Some(HighMark { run, step });
    let mut retired = keys.retired.iter();
    by == keys.newest || retired.any(|one| one.key == by && counts(one.up_to))
}

impl<S: Scene> World<S> {
    pub(super) fn tier_begins(&mut self, pid: Pid, task: Task) {
        match &task {
            Task::Upload(upload) => self.upload_begins(pid, upload),
            Task::Fetch(..) => self.tier.fetches += 1,
            _ => {}
        }
        match S::tier_course(self, pid, &task) {
            Course::Decided { lasts_ms, fault } => {
                let input = self.outcome(pid, task, fault);
                self.back(pid, lasts_ms, input);
            }
            Course::Open { lasts_ms } => {
                let work = Box::new(Work { pid, task });
                self.after(lasts_ms, Event::Tier(work));
            }
            Course::Hangs => {}
        }
    }

    pub(super) fn tier_ends(&mut self, Work { pid, task }: Work) {
        if self.lives(pid) {
            let fault = S::tier_fault(self, &task);
            let input = self.outcome(pid, task, fault);
            self.feed(pid, input);
        }
    }

    fn outcome(&mut self, pid: Pid, task: Task, fault: Option<DurableFault>) -> Input {
        let may = fault.map_or(Ok(()), Err);
        match task {
            Task::Upload(upload) => Input::Uploaded {
                manifest: upload.manifest.name(),
                rank: upload.rank,
                outcome: may
                    .and_then(|()| self.take_shard(pid, &upload))
                    .map(|()| UploadTally::default()),
            },
            Task::Publish(publication) => Input::Published {
                manifest: publication.manifest.name(),
                outcome: may.and_then(|()| self.publish(publication)),
            },
            Task::List(query, listed) => {
                let until = S::listed_until(self);
                let outcome = may.map(|()| self.tier.list(&listed, until));
                Input::DurableListed { query, outcome }
            }
            Task::Fetch(manifest, rank, slot) => {
                let outcome = may.and_then(|()| self.give_shard(pid, &manifest, rank, slot));
                Input::Fetched { slot, outcome }
            }
            Task::Claim(query, claim) => {
                let may = may.map_err(ClaimFault::Durable);
                let outcome = may.and_then(|()| self.tier.claim(claim));
                Input::RunClaimed { query, outcome }
            }
            Task::Record(namespace, owner, run) => Input::RunRecorded {
                namespace: namespace.clone(),
                run,
                outcome: may.map(|()| self.tier.record(namespace, owner, run)),
            },
            Task::Find(query, namespace, run) => {
                let outcome = may.map(|()| self.tier.find(&namespace, run));
                Input::RunFound { query, outcome }
            }
            Task::Successions(query, namespace, trust) => {
                let until = S::listed_until(self);
                let found = || self.tier.find_successions(namespace, trust, until);
                let outcome = may.map(|()| found());
                Input::SuccessionsFound { query, outcome }
            }
            Task::Succeed(query, rotation, _) => {
                let may = may.map_err(SuccessionFault::Durable);
                let outcome = may.and_then(|()| self.tier.succeed(*rotation));
                let outcome = outcome.map(Box::new);
                Input::Succeeded { query, outcome }
            }
        }
    }

    /// An upload has its slot. An increment builds on what is in the tier, and what it is written against is still in RAM.
    fn upload_begins(&mut self, pid: Pid, upload: &Upload) {
        let key = CheckpointKey::of(upload.manifest.manifest());
        let is_first = self.tier.begun.insert((key.clone(), upload.rank));
        self.tier.expected.push(upload.leftovers);
        if !is_first && upload.leftovers == Leftovers::None {
            S::overlooks(self, pid, &key, upload.rank);
        }
        if S::PAYLOAD != Payload::Bytes {
            return;
        }
        let slots = &self.ram(pid.node).slots;
        assert!(slots.contains_key(&upload.shard.slot), "it has its slot");
        let Some(base) = &upload.base else { return };
        let slot = slots[&base.shard.slot][..base.shard.length as usize].to_vec();
        self.tier.increments += 1;
        let key = CheckpointKey::of(base.manifest.manifest());
        let durable = self.tier.published.get(&key);
        assert_eq!(
            durable.map(|it| it.manifest.name()),
            Some(base.manifest.name()),
            "a base is in the durable tier"
        );
        let object = &self.tier.shards[&(base.manifest.name(), upload.rank)];
        assert_eq!(slot, object.bytes, "a base is whole");
    }

    fn publish(&mut self, publication: Publication) -> Result<(), DurableFault> {
        let manifest = &publication.manifest;
        let absent = self.tier.absent(manifest);
        S::publishes(self, &CheckpointKey::of(manifest.manifest()), absent);
        let namespace = manifest.manifest().namespace.clone();
        let keys = publication.authorship.keys.clone();
        self.tier.publish(self.now, publication);
        keys.map_or(Ok(()), |keys| self.tier.check_key(&namespace, &keys.newest))
    }

    fn take_shard(&mut self, pid: Pid, upload: &Upload) -> Result<(), DurableFault> {
        let shard = &upload.shard;
        let bytes = match S::PAYLOAD {
            Payload::Digests => Vec::new(),
            Payload::Bytes => {
                let slot = self.ram(pid.node).slots.get(&shard.slot);
                let bytes = slot.map(|slot| slot[..shard.length as usize].to_vec());
                let whole = bytes.filter(|bytes| digests(bytes).0 == shard.leaves);
                let changed = || DurableFault::Local("the shard changed under the upload".into());
                whole.ok_or_else(changed)?
            }
        };
        let place = (upload.manifest.name(), upload.rank);
        let leaves = shard.leaves.clone();
        self.tier.shards.insert(place, Object { bytes, leaves });
        Ok(())
    }

    fn give_shard(
        &mut self,
        pid: Pid,
        manifest: &ManifestBytes,
        rank: Rank,
        slot: SlotId,
    ) -> Result<Arc<[Digest]>, DurableFault> {
        let object = self.tier.shards.get(&(manifest.name(), rank)).cloned();
        let absent = || DurableFault::Damaged("no such object".into());
        let Object { bytes, leaves } = object.ok_or_else(absent)?;
        let process = self.ram(pid.node);
        process.leaves.insert(slot, leaves.clone());
        if S::PAYLOAD == Payload::Bytes {
            let gone = || DurableFault::Local("the slot is gone".into());
            let room = process.slots.get_mut(&slot).ok_or_else(gone)?;
            room[..bytes.len()].copy_from_slice(&bytes);
        }
        Ok(leaves)
    }
}
