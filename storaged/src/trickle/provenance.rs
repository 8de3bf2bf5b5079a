//! Who wrote a checkpoint: `storaged.provenance` in its folder, with a MAC under the key of its job. It is written right before the
//! manifest, and names the checkpoint that was durable before, so that one that somebody removes is missed. What has a wrong MAC is
//! never used; what has none is used as `trickle.require_mac` says.

use bytes::Bytes;
use futures::FutureExt;
use storaged_codec::Digest;
use storaged_core::{Authorship, DurableFault, SetAsideCause, Trust};
use storaged_wire::peer::CheckpointKey;
use storaged_wire::provenance::IndexDigest;
use storaged_wire::{DurableStep, JobKeys, ManifestBytes, Namespace, Provenance};

use super::index::{IndexReader, StepKey};
use super::store::{ObjectKey, StoreError};
use super::{MANIFEST_OBJECT, Trickle, object, object_at};

/// The record's name within a checkpoint's folder.
pub(super) const PROVENANCE_OBJECT: &str = "storaged.provenance";
/// Older checkpoints that are looked at for the one that was durable before.
const BEFORE_MAX: usize = 16;
/// Older checkpoints that are asked for a MAC before one without is used, and how many at once.
const ASKED_MAX: usize = 4096;
const ASKED_AT_ONCE: usize = 32;

/// Whether a checkpoint without a MAC is used. Releases before MACs wrote none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RequireMac {
    /// Never.
    Always,
    /// Only if no older one of its job has a MAC: its job began to write them later.
    #[default]
    AfterFirst,
    /// Yes.
    Never,
}

/// What is known of a checkpoint that lies in the tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Standing {
    /// Its job wrote it, after this one.
    Authentic(Option<DurableStep>),
    /// It has no MAC.
    WithoutMac,
    /// It says that it is of another owner.
    Foreign,
    /// Nobody asked who wrote it.
    NotAsked,
    /// It is not used, for this reason.
    Refused(SetAsideCause, String),
}

/// What the MAC of an increment's checkpoint says of its index, which tells how records are taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IndexStanding {
    Authentic,
    Unproven,
}

impl Trickle {
    /// Writes who publishes a checkpoint; nothing if nobody who answered knows the job's key.
    pub(super) async fn put_provenance(
        &self,
        manifest: &ManifestBytes,
        authorship: &Authorship,
        increments: Vec<IndexDigest>,
    ) -> Result<(), DurableFault> {
        let record = manifest.manifest();
        let Some(keys) = &authorship.keys else {
            tracing::warn!(namespace = %record.namespace, run = %record.run, step = %record.step,
                "published without a MAC: no node that answers has had a trainer of this job since it started; readers want \
                 trickle.require_mac = \"never\" for it, if an older step has one");
            return Ok(());
        };
        let place = CheckpointKey::of(record);
        let before = self.newest_before(&place, keys).await?;
        let provenance = Provenance {
            version: Provenance::VERSION,
            manifest: manifest.name(),
            key: place,
            predecessor: authorship.predecessor.max(before),
            increments,
        };
        let at = object(record, PROVENANCE_OBJECT)?;
        let bytes = Bytes::from(provenance.to_object(&keys.newest));
        match self.store.put_new(&at, bytes.clone()).await {
            Err(StoreError::AlreadyExists { .. }) => {}
            outcome => return Ok(outcome?),
        }
        // Another home node may be at it too, or have been: what readers accept stays, also if this node is the one that comes late, with a
        // key that was retired meanwhile.
        let there = self.store.get(&at, None).await?;
        let there = Provenance::from_object(&there, &keys.newest)
            .and_then(|it| it.for_checkpoint(manifest.name(), &provenance.key));
        if there.is_ok_and(|it| it.increments == provenance.increments) {
            return Ok(());
        }
        self.check_key(&record.namespace, &keys.newest).await?;
        self.put_mine(&at, bytes).await
    }

    /// The newest checkpoint in the tier that is older than this one and of its job.
    async fn newest_before(
        &self,
        place: &CheckpointKey,
        keys: &JobKeys,
    ) -> Result<Option<DurableStep>, DurableFault> {
        let mut reader = IndexReader::new(self, &place.namespace)?;
        let mine = StepKey {
            run: place.run,
            step: place.step,
        };
        let page = reader.next().await?.unwrap_or_default();
        let older = page
            .iter()
            .filter(|one| one.is_entry() && one.place < mine)
            .take(BEFORE_MAX);
        for one in older {
            let found = self.written_at(&place.namespace, one.place, keys).await?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// The checkpoint that a folder holds, if its job wrote it and it is published.
    async fn written_at(
        &self,
        namespace: &Namespace,
        place: StepKey,
        keys: &JobKeys,
    ) -> Result<Option<DurableStep>, DurableFault> {
        let manifest = object_at(namespace, place.run, place.step, MANIFEST_OBJECT)?;
        if self.length(&manifest).await.is_ok_and(|it| it.is_none()) {
            return Ok(None);
        }
        let at = object_at(namespace, place.run, place.step, PROVENANCE_OBJECT)?;
        let Some(bytes) = self.read_provenance(&at).await? else {
            return Ok(None);
        };
        let read = keys.read(&bytes).ok();
        let read = read.filter(|it| {
            it.key.namespace == *namespace && (it.key.run, it.key.step) == (place.run, place.step)
        });
        Ok(read.map(|it| DurableStep {
            run: it.key.run,
            step: it.key.step,
            manifest: it.manifest,
        }))
    }

    /// An object that cannot be one counts as one that is forged, not as one that is not there.
    pub(super) async fn read_provenance(
        &self,
        at: &ObjectKey,
    ) -> Result<Option<Vec<u8>>, DurableFault> {
        match self.store.get(at, None).await {
            Ok(bytes) => Ok(Some(bytes.to_vec())),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(StoreError::NotPlain { .. }) => Ok(Some(Vec::new())),
            Err(error) => Err(error.into()),
        }
    }

    /// Who wrote a checkpoint that lies in the tier.
    pub(super) async fn standing(
        &self,
        manifest: &ManifestBytes,
        trust: &Trust,
    ) -> Result<Standing, DurableFault> {
        let record = manifest.manifest();
        let owner = match trust {
            Trust::Anything => return Ok(Standing::NotAsked),
            Trust::Job { owner, .. } | Trust::Nothing { owner } => *owner,
        };
        if record.owner != owner {
            return Ok(Standing::Foreign);
        }
        let at = object(record, PROVENANCE_OBJECT)?;
        let Some(bytes) = self.read_provenance(&at).await? else {
            return Ok(Standing::WithoutMac);
        };
        let Trust::Job { keys, .. } = trust else {
            let reason = "say it (--token-file, STORAGED_TOKEN_FILE)".to_owned();
            return Ok(Standing::Refused(SetAsideCause::Unchecked, reason));
        };
        let place = CheckpointKey::of(record);
        Ok(match keys.read_of(&bytes, manifest.name(), &place) {
            Ok(read) => Standing::Authentic(read.predecessor),
            Err(error) => Standing::Refused(SetAsideCause::Forged, format!("{at}: {error}")),
        })
    }

    /// Why a checkpoint without a MAC is not used; none if it is.
    pub(super) async fn why_mac_is_missed(
        &self,
        manifest: &ManifestBytes,
        trust: &Trust,
    ) -> Result<Option<String>, DurableFault> {
        let record = manifest.manifest();
        match (self.limits.require_mac, trust) {
            (RequireMac::Never, _) | (_, Trust::Anything) => Ok(None),
            (RequireMac::Always, _) => Ok(Some(missed("trickle.require_mac is \"always\""))),
            (RequireMac::AfterFirst, Trust::Nothing { .. }) => {
                Ok(Some(missed("the job's token is not known here")))
            }
            (
                RequireMac::AfterFirst,
                Trust::Job {
                    known: Some(known), ..
                },
            ) if (known.run, known.step) <= (record.run, record.step) => {
                Ok(Some(missed(&format!(
                    "run {} step {}, which this node knows, has one",
                    known.run, known.step
                ))))
            }
            (RequireMac::AfterFirst, Trust::Job { keys, .. }) => {
                self.written_with_mac_before(&record.namespace, StepKey::of(record), keys)
                    .await
            }
        }
    }

    async fn written_with_mac_before(
        &self,
        namespace: &Namespace,
        place: StepKey,
        keys: &JobKeys,
    ) -> Result<Option<String>, DurableFault> {
        let mut reader = IndexReader::new(self, namespace)?;
        let mut left = ASKED_MAX;
        while let Some(page) = reader.next().await? {
            let older: Vec<StepKey> = page
                .iter()
                .filter(|one| one.is_entry() && one.place < place)
                .map(|one| one.place)
                .collect();
            for some in older.chunks(ASKED_AT_ONCE) {
                if left < some.len() {
                    let text = format!("more than {ASKED_MAX} older ones would have to be read");
                    return Ok(Some(missed(&text)));
                }
                left -= some.len();
                let asked = some
                    .iter()
                    .map(|place| self.written_at(namespace, *place, keys).boxed());
                let found = futures::future::try_join_all(asked).await?;
                if let Some(older) = found.into_iter().flatten().next() {
                    let text = format!(
                        "run {} step {}, which is older, has one",
                        older.run, older.step
                    );
                    return Ok(Some(missed(&text)));
                }
            }
        }
        Ok(None)
    }

    /// Whether a checkpoint counts when older ones are to go: a forged one must not take the place of a sound one.
    pub(super) async fn counts(
        &self,
        namespace: &Namespace,
        place: StepKey,
        trust: &Trust,
    ) -> Result<bool, DurableFault> {
        match trust {
            Trust::Job { keys, .. } if self.limits.require_mac != RequireMac::Never => {
                let found = self.written_at(namespace, place, keys).await?;
                Ok(found.is_some())
            }
            _ => {
                let at = object_at(namespace, place.run, place.step, MANIFEST_OBJECT)?;
                Ok(self.length(&at).await?.is_some())
            }
        }
    }

    /// Whether the index of an increment is the one that its job has written.
    pub(super) async fn index_standing(
        &self,
        manifest: &ManifestBytes,
        rank: storaged_wire::Rank,
        index: Digest,
        trust: &Trust,
    ) -> Result<IndexStanding, DurableFault> {
        if self.limits.require_mac == RequireMac::Never && *trust != Trust::Anything {
            let standing = self.standing(manifest, trust).await?;
            if standing == Standing::WithoutMac {
                return Ok(IndexStanding::Authentic);
            }
        }
        let Trust::Job { keys, .. } = trust else {
            return Ok(IndexStanding::Unproven);
        };
        let record = manifest.manifest();
        let at = object(record, PROVENANCE_OBJECT)?;
        let bytes = self.read_provenance(&at).await?.unwrap_or_default();
        let place = CheckpointKey::of(record);
        let read = keys.read_of(&bytes, manifest.name(), &place);
        Ok(match read.ok().and_then(|it| it.index_of(rank)) {
            Some(known) if known == index => IndexStanding::Authentic,
            _ => IndexStanding::Unproven,
        })
    }
}

fn missed(why: &str) -> String {
    format!(
        "{why}; a release before MACs wrote it, or somebody who may write in the tier: trickle.require_mac = \"never\" accepts it"
    )
}
