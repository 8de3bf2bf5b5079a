//! Checkpoints leave the tier: first a mark that says so, then the manifest, then the rest, last the marks. Whatever
//! interrupts this, what is left is no checkpoint, and the next removal goes on with it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use storaged_core::{Curation, CurationFault, DurableFault, Removed, Trust};
use storaged_wire::local::{Keep, PinnedOnes, Removal};
use storaged_wire::{Manifest, ManifestBytes, Namespace, Owner, Rank, RunId, Step};

use super::increment::records_object;
use super::index::{Indexed, Mark, StepKey, mark_key, read_bases};
use super::listing::Depth;
use super::packed::packed_object;
use super::store::{KeyPrefix, ObjectKey, PartBytes};
use super::{MANIFEST_OBJECT, Trickle, object, object_at, shard_object};

/// Objects removed at once.
const REMOVALS_AT_ONCE: usize = 16;
/// How long the tier is asked to forget an upload that was stopped.
const DROP_LIMIT: Duration = Duration::from_secs(60);

impl Trickle {
    /// Does what a person asks.
    ///
    /// # Errors
    /// Why not.
    pub async fn curate(
        &self,
        namespace: &Namespace,
        owner: Owner,
        curation: &Curation,
    ) -> Result<Removed, CurationFault> {
        self.check_owner_of(namespace, owner).await?;
        match curation {
            Curation::Keep { run, step, keep } => {
                let place = self.find(namespace, *run, *step).await?;
                match keep {
                    Keep::Pin => self.mark(namespace, place, Mark::Pinned, "").await?,
                    Keep::Unpin => self.unmark(namespace, place, Mark::Pinned).await?,
                }
                Ok(Removed::default())
            }
            Curation::Remove {
                removal,
                spared,
                pinned,
            } => {
                let index = self.index(namespace).await?;
                let places = self.places_to_remove(namespace, &index, removal).await?;
                check_ended(&places, *spared)?;
                if *pinned == PinnedOnes::Spared {
                    check_unpinned(&index, &places)?;
                }
                self.check_unneeded(namespace, &index, &places).await?;
                self.remove(namespace, places).await
            }
        }
    }

    async fn check_owner_of(
        &self,
        namespace: &Namespace,
        owner: Owner,
    ) -> Result<(), CurationFault> {
        let listing = self
            .list_to(Depth::Manifests, namespace, None, &Trust::Anything)
            .await?;
        let other = |found: Owner| found != owner;
        if listing
            .manifests
            .iter()
            .any(|one| other(one.manifest().owner))
        {
            Err(CurationFault::WrongOwner)
        } else {
            Ok(())
        }
    }

    /// The place of a checkpoint: of the newest run that has the step, if none is named.
    async fn find(
        &self,
        namespace: &Namespace,
        run: Option<RunId>,
        step: Step,
    ) -> Result<StepKey, CurationFault> {
        let listing = self.list(namespace, Some(step), &Trust::Anything).await?;
        let mut places = listing
            .manifests
            .iter()
            .map(|one| StepKey::of(one.manifest()));
        let found = places.find(|place| run.is_none_or(|run| run == place.run));
        found.ok_or_else(|| {
            CurationFault::NoSuch(format!(
                "expected a checkpoint of step {step} in the durable tier, got none"
            ))
        })
    }

    /// The same, or else the place of what is left of that step without a manifest.
    async fn find_left(
        &self,
        namespace: &Namespace,
        run: Option<RunId>,
        step: Step,
    ) -> Result<StepKey, CurationFault> {
        let missing = match self.find(namespace, run, step).await {
            Err(CurationFault::NoSuch(missing)) => missing,
            outcome => return outcome,
        };
        let mut runs = self.run_folders(namespace).await?;
        runs.retain(|it| run.is_none_or(|run| run == *it));
        runs.sort_unstable();
        for run in runs.into_iter().rev() {
            let place = StepKey { run, step };
            if self.is_anything_left(namespace, place).await? {
                return Ok(place);
            }
        }
        Err(CurationFault::NoSuch(missing))
    }

    async fn is_anything_left(
        &self,
        namespace: &Namespace,
        place: StepKey,
    ) -> Result<bool, DurableFault> {
        let folder = format!("{namespace}/run-{}/step-{}", place.run, place.step);
        let left = self.store.list(&KeyPrefix::folder(folder.parse()?)).await?;
        Ok(!left.is_empty())
    }

    /// What a removal means, the newest first; an error if that is nothing.
    async fn places_to_remove(
        &self,
        namespace: &Namespace,
        index: &[Indexed],
        removal: &Removal,
    ) -> Result<Vec<StepKey>, CurationFault> {
        let (places, what) = match removal {
            Removal::Step { run, step } => {
                let one = index.iter().find(|one| {
                    one.place.step == *step && run.is_none_or(|run| run == one.place.run)
                });
                let place = match one {
                    Some(one) => one.place,
                    None => self.find_left(namespace, *run, *step).await?,
                };
                (vec![place], format!("step {step}"))
            }
            Removal::Run { run } => {
                let places = self.places_of(namespace, index, Some(*run)).await?;
                (places, format!("run {run}"))
            }
            Removal::All => {
                let places = self.places_of(namespace, index, None).await?;
                (places, "any run".into())
            }
        };
        if places.is_empty() {
            Err(CurationFault::NoSuch(format!(
                "expected checkpoints of {what} in the durable tier, got none: nothing was removed; check the name of the job and the run"
            )))
        } else {
            Ok(places)
        }
    }

    async fn remove(
        &self,
        namespace: &Namespace,
        places: Vec<StepKey>,
    ) -> Result<Removed, CurationFault> {
        let mut removed = Removed::default();
        // The newest first: an increment goes before what it builds on.
        for place in places {
            removed.objects += self.remove_step(namespace, place).await?;
            removed.checkpoints += 1;
        }
        Ok(removed)
    }

    /// All checkpoints and leftovers of one run or of all, the newest first.
    async fn places_of(
        &self,
        namespace: &Namespace,
        index: &[Indexed],
        run: Option<RunId>,
    ) -> Result<Vec<StepKey>, DurableFault> {
        let wanted = |place: &StepKey| run.is_none_or(|run| run == place.run);
        let mut places: BTreeSet<StepKey> = index.iter().map(|one| one.place).collect();
        for run in self.run_folders(namespace).await? {
            places.extend(self.step_folders(namespace, run).await?);
        }
        Ok(places.into_iter().rev().filter(wanted).collect())
    }

    pub(super) async fn run_folders(
        &self,
        namespace: &Namespace,
    ) -> Result<Vec<RunId>, DurableFault> {
        let under = KeyPrefix::folder(namespace.as_str().parse()?);
        let names = self.store.list_folders(&under).await?;
        let run = |name: &String| name.strip_prefix("run-")?.parse().ok();
        Ok(names.iter().filter_map(run).collect())
    }

    pub(super) async fn step_folders(
        &self,
        namespace: &Namespace,
        run: RunId,
    ) -> Result<Vec<StepKey>, DurableFault> {
        let under = KeyPrefix::folder(format!("{namespace}/run-{run}").parse()?);
        let names = self.store.list_folders(&under).await?;
        let step = |name: &String| name.strip_prefix("step-")?.parse().ok().map(Step::new);
        let places = names.iter().filter_map(step);
        Ok(places.map(|step| StepKey { run, step }).collect())
    }

    /// A checkpoint that an increment builds on goes only with it.
    async fn check_unneeded(
        &self,
        namespace: &Namespace,
        index: &[Indexed],
        places: &[StepKey],
    ) -> Result<(), CurationFault> {
        let going: BTreeSet<StepKey> = places.iter().copied().collect();
        for (above, bases) in self.bases_in(namespace, index).await? {
            let needed = bases.iter().find(|base| going.contains(base));
            if let Some(base) = needed.filter(|_| !going.contains(&above)) {
                return Err(CurationFault::Needed(format!(
                    "expected a checkpoint that nothing builds on, got {base}, on which the increment of {above} builds: remove that one first"
                )));
            }
        }
        Ok(())
    }

    /// What the increments of an index build on.
    pub(super) async fn bases_in(
        &self,
        namespace: &Namespace,
        index: &[Indexed],
    ) -> Result<BTreeMap<StepKey, Vec<StepKey>>, DurableFault> {
        let mut all = BTreeMap::new();
        for one in index {
            if !one.is_entry() || !one.has(Mark::Increment) {
                continue;
            }
            let says = self.said(namespace, one.place, Mark::Increment).await?;
            all.insert(one.place, read_bases(&says));
        }
        Ok(all)
    }

    /// Removes a checkpoint, or what is left of one; gives the number of objects.
    pub(super) async fn remove_step(
        &self,
        namespace: &Namespace,
        place: StepKey,
    ) -> Result<u64, DurableFault> {
        self.unpublish(namespace, place).await?;
        let folder = format!("{namespace}/run-{}/step-{}", place.run, place.step);
        let under = KeyPrefix::folder(folder.parse()?);
        let dropped = self.drop_unfinished(&under).await;
        let entries = self.store.list(&under).await?;
        let keys: Vec<ObjectKey> = entries.into_iter().map(|entry| entry.key).collect();
        for some in keys.chunks(REMOVALS_AT_ONCE) {
            let mut removals = Vec::new();
            for key in some {
                removals.push(self.store.delete(key));
            }
            futures::future::try_join_all(removals).await?;
        }
        if dropped.is_err() {
            // A full tier has room now.
            self.drop_unfinished(&under).await?;
        }
        for mark in [Mark::Full, Mark::Increment, Mark::Pinned, Mark::Quarantined] {
            self.store
                .delete(&mark_key(namespace, place, mark)?)
                .await?;
        }
        self.unmark(namespace, place, Mark::Removing).await?;
        tracing::info!(%namespace, run = %place.run, step = %place.step, objects = keys.len() + 1,
            "removed from the durable tier");
        Ok(keys.len() as u64 + 1)
    }

    /// From now on the step is no checkpoint.
    async fn unpublish(&self, namespace: &Namespace, place: StepKey) -> Result<(), DurableFault> {
        match self.mark(namespace, place, Mark::Removing, "").await {
            Ok(()) => {}
            // It takes no mark. Without its manifest the step is no checkpoint either, and has made room.
            Err(DurableFault::Full(reason)) => {
                tracing::info!(%namespace, run = %place.run, step = %place.step, reason,
                    "removed without a mark: the durable tier is full");
            }
            Err(fault) => return Err(fault),
        }
        let manifest = object_at(namespace, place.run, place.step, MANIFEST_OBJECT)?;
        Ok(self.store.delete(&manifest).await?)
    }

    /// An upload that was stopped leaves nothing unfinished in the tier, if the tier answers in time. What is left all the
    /// same goes with what an older run has abandoned.
    pub async fn drop_upload(&self, manifest: &ManifestBytes, rank: Rank) {
        let record = manifest.manifest();
        let dropped = tokio::time::timeout(DROP_LIMIT, self.drop_unfinished_of(record, rank));
        let fault = match dropped.await {
            Ok(Ok(())) => return,
            Ok(Err(fault)) => fault.to_string(),
            Err(_) => format!("no answer within {DROP_LIMIT:?}"),
        };
        tracing::info!(namespace = %record.namespace, run = %record.run, step = %record.step, %rank, fault,
            "what a stopped upload has left in the durable tier stays there for now");
    }

    async fn drop_unfinished_of(&self, record: &Manifest, rank: Rank) -> Result<(), DurableFault> {
        let names = [
            shard_object(rank),
            packed_object(rank),
            records_object(rank),
        ];
        let mine: Result<Vec<ObjectKey>, _> =
            names.iter().map(|name| object(record, name)).collect();
        let mine = mine?;
        let folder = format!(
            "{}/run-{}/step-{}",
            record.namespace, record.run, record.step
        );
        let mut keys = self
            .store
            .unfinished(&KeyPrefix::folder(folder.parse()?))
            .await?;
        keys.retain(|key| mine.contains(key));
        self.give_up(keys).await
    }

    async fn drop_unfinished(&self, under: &KeyPrefix) -> Result<(), DurableFault> {
        self.give_up(self.store.unfinished(under).await?).await
    }

    async fn give_up(&self, keys: Vec<ObjectKey>) -> Result<(), DurableFault> {
        for key in keys {
            let limits = self.store.limits();
            let any = PartBytes::new(limits.part_bytes_min.max(1), &limits)?;
            // Beginning anew gives up whatever was unfinished.
            let upload = self.store.begin(&key, any).await?;
            self.store.abort(&upload).await?;
        }
        Ok(())
    }
}

/// What somebody has pinned does not go.
fn check_unpinned(index: &[Indexed], places: &[StepKey]) -> Result<(), CurationFault> {
    let pinned = |one: &&Indexed| one.has(Mark::Pinned) && places.contains(&one.place);
    match index.iter().find(pinned) {
        None => Ok(()),
        Some(one) => Err(CurationFault::Pinned(format!(
            "expected checkpoints that nobody has pinned, got {}: unpin it first (`storaged unpin`), or remove it all the \
             same (`--pinned`); nothing was removed",
            one.place
        ))),
    }
}

/// What a job's next restart hangs on does not go while it trains.
fn check_ended(places: &[StepKey], spared: Option<RunId>) -> Result<(), CurationFault> {
    let lives = |place: &&StepKey| spared.is_some_and(|spared| place.run >= spared);
    match places.iter().find(lives) {
        None => Ok(()),
        Some(place) => Err(CurationFault::Live(format!(
            "expected checkpoints of runs that have ended, got {place} of the newest run, whose trainers are connected: \
             end them first, or remove it all the same (`--live`)"
        ))),
    }
}
