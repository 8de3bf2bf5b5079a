//! What the tier holds of a namespace: from one page of its index and the newest manifests that it names. Checkpoints of
//! older releases, which are in no index, are found by their folders.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use futures::FutureExt;
use storaged_core::{DurableFault, DurableListing, SetAside, SetAsideCause, Trust};
use storaged_wire::{DurableStep, Manifest, ManifestBytes, Namespace, RunId, Step};

use super::fault::damaged;
use super::index::{IndexReader, Indexed, Mark, StepKey, read_bases};
use super::provenance::Standing;
use super::store::{KeyPrefix, ObjectKey, StoreError};
use super::{MANIFEST_OBJECT, Trickle, object_at, read_manifest_object};

/// Manifests that a listing reads, newest first: a damaged newest one must not hide the next.
const LISTED_MAX: usize = 4;
/// Manifests of other owners after which the token counts as another job's.
const FOREIGN_MAX: usize = 16;
/// Folders of runs that are in no index and that a listing looks into.
const OLD_RUNS_MAX: usize = 64;

/// What is read of each checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Depth {
    /// Its manifest.
    Manifests,
    /// And what that names, without which nobody could read the shards.
    Whole,
}

/// A listing as it grows.
struct Search<'a> {
    namespace: &'a Namespace,
    step: Option<Step>,
    depth: Depth,
    trust: &'a Trust,
    listing: DurableListing,
    /// What those that the job wrote name as the ones before them, and how many of those that were found are newer.
    before: Vec<(DurableStep, u32)>,
    /// Of another owner, or said to be.
    foreign: Vec<Arc<ManifestBytes>>,
    /// What the index names, whether it can be used or not.
    indexed: BTreeSet<StepKey>,
}

/// What became of a candidate.
enum Candidate {
    Sound(Arc<ManifestBytes>, Standing),
    /// Its manifest is not there: it is being published, or its upload was abandoned.
    Unpublished,
    Unusable(String),
    /// It may be forged.
    Refused(SetAsideCause, String),
}

impl Search<'_> {
    fn is_full(&self) -> bool {
        self.listing.manifests.len() >= LISTED_MAX || self.foreign.len() >= FOREIGN_MAX
    }

    fn wants(&self, place: StepKey) -> bool {
        self.step.is_none_or(|step| step == place.step)
    }

    fn saw(&mut self, run: RunId) {
        self.listing.newest_run = self.listing.newest_run.max(Some(run));
    }

    fn add(&mut self, place: StepKey, candidate: Candidate) {
        match candidate {
            Candidate::Sound(manifest, Standing::Foreign) => self.foreign.push(manifest),
            Candidate::Sound(manifest, Standing::Authentic(before)) => {
                let found = Some(DurableStep {
                    run: place.run,
                    step: place.step,
                    manifest: manifest.name(),
                });
                self.listing.authentic = self.listing.authentic.max(found);
                self.listing.manifests.push(manifest);
                let newer = self.listing.manifests.len() as u32;
                self.before.extend(before.map(|before| (before, newer)));
            }
            Candidate::Sound(manifest, _) => self.listing.manifests.push(manifest),
            Candidate::Unpublished => {}
            Candidate::Refused(cause, reason) => {
                tracing::warn!(namespace = %self.namespace, run = %place.run, step = %place.step, reason,
                    "a checkpoint in the durable tier is not used: it may be forged");
                self.set_aside(place, cause, reason);
            }
            Candidate::Unusable(reason) => {
                tracing::warn!(namespace = %self.namespace, run = %place.run, step = %place.step, reason,
                    "a checkpoint in the durable tier cannot be used");
                self.set_aside(place, SetAsideCause::Unusable, reason);
            }
        }
    }

    /// Of another owner: forged, where there is something that the job wrote; else the token is that of another job.
    fn judge_foreign(&mut self) {
        if self.listing.manifests.is_empty() {
            self.listing.manifests.append(&mut self.foreign);
        }
        for manifest in std::mem::take(&mut self.foreign) {
            let reason = "it says that it belongs to another token".to_owned();
            let refused = Candidate::Refused(SetAsideCause::Forged, reason);
            self.add(StepKey::of(manifest.manifest()), refused);
        }
    }

    fn set_aside(&mut self, place: StepKey, cause: SetAsideCause, reason: String) {
        let StepKey { run, step } = place;
        self.listing.set_aside.push(SetAside {
            run,
            step,
            cause,
            reason,
        });
    }
}

impl Trickle {
    /// What the tier holds of a namespace: the newest sound manifests, and the newest run seen. With a step: those of
    /// that step, also damaged ones.
    ///
    /// # Errors
    /// Why the tier could not be asked. A manifest that cannot be read for such a reason ends the listing too: an older
    /// one must not be taken for the newest.
    pub async fn list(
        &self,
        namespace: &Namespace,
        step: Option<Step>,
        trust: &Trust,
    ) -> Result<DurableListing, DurableFault> {
        self.list_to(Depth::Whole, namespace, step, trust).await
    }

    /// The same, without what the manifests name where that is not needed.
    pub(super) async fn list_to(
        &self,
        depth: Depth,
        namespace: &Namespace,
        step: Option<Step>,
        trust: &Trust,
    ) -> Result<DurableListing, DurableFault> {
        let mut search = Search {
            namespace,
            step,
            depth,
            trust,
            listing: DurableListing::default(),
            before: Vec::new(),
            foreign: Vec::new(),
            indexed: BTreeSet::new(),
        };
        let mut reader = IndexReader::new(self, namespace)?;
        while !search.is_full()
            && let Some(page) = reader.next().await?
        {
            self.search_page(&mut search, &page).await?;
        }
        if !search.is_full() {
            self.search_folders(&mut search).await?;
        }
        if search.listing.newest_run.is_none() {
            self.store.check_place().await?;
        }
        search.judge_foreign();
        if step.is_none() {
            self.look_for_missing(&mut search).await?;
        }
        let mut listing = search.listing;
        let place = |manifest: &ManifestBytes| StepKey::of(manifest.manifest());
        listing
            .manifests
            .sort_by_key(|manifest| std::cmp::Reverse(place(manifest)));
        listing
            .set_aside
            .sort_by_key(|one| std::cmp::Reverse((one.run, one.step)));
        Ok(listing)
    }

    async fn search_page(
        &self,
        search: &mut Search<'_>,
        page: &[Indexed],
    ) -> Result<(), DurableFault> {
        search.indexed.extend(page.iter().map(|one| one.place));
        if let Some(newest) = page.first() {
            search.saw(newest.place.run);
        }
        let mut waiting: VecDeque<Indexed> = page.iter().cloned().collect();
        waiting.retain(|one| one.is_entry() && search.wants(one.place));
        while !search.is_full() && !waiting.is_empty() {
            let mut batch: Vec<Indexed> = Vec::new();
            while batch.len() < LISTED_MAX - search.listing.manifests.len()
                && let Some(one) = waiting.pop_front()
            {
                if one.has(Mark::Quarantined) && search.step.is_none() {
                    let namespace = search.namespace;
                    let reason = self.said(namespace, one.place, Mark::Quarantined).await?;
                    search.set_aside(one.place, SetAsideCause::Quarantined, reason);
                } else {
                    batch.push(one);
                }
            }
            let mut asked = Vec::new();
            for one in &batch {
                asked.push(self.candidate(search, one).boxed());
            }
            let candidates = futures::future::try_join_all(asked).await?;
            let places = batch.iter().map(|one| one.place);
            self.add_all(search, places.zip(candidates).collect())
                .await?;
        }
        Ok(())
    }

    /// Runs of older releases have no index: their folders are looked into, the newest first.
    async fn search_folders(&self, search: &mut Search<'_>) -> Result<(), DurableFault> {
        let namespace = search.namespace;
        let folder: ObjectKey = namespace.as_str().parse()?;
        let names = self
            .store
            .list_folders(&KeyPrefix::folder(folder.clone()))
            .await?;
        let run = |name: &String| name.strip_prefix("run-")?.parse::<RunId>().ok();
        let mut runs: Vec<RunId> = names.iter().filter_map(run).collect();
        runs.sort_by(|a, b| b.cmp(a));
        if let Some(newest) = runs.first() {
            search.saw(*newest);
        }
        let indexed: BTreeSet<RunId> = search.indexed.iter().map(|place| place.run).collect();
        runs.retain(|run| !indexed.contains(run));
        for run in runs.into_iter().take(OLD_RUNS_MAX) {
            let steps = folder.join(&format!("run-{run}"))?;
            let names = self.store.list_folders(&KeyPrefix::folder(steps)).await?;
            let step = |name: &String| name.strip_prefix("step-")?.parse().ok().map(Step::new);
            let mut steps: Vec<Step> = names.iter().filter_map(step).collect();
            steps.sort_by(|a, b| b.cmp(a));
            for step in steps {
                let place = StepKey { run, step };
                if search.is_full() {
                    return Ok(());
                }
                if search.wants(place) {
                    let candidate = self.in_folder(search, place).await?;
                    self.add_all(search, vec![(place, candidate)]).await?;
                }
            }
        }
        Ok(())
    }

    async fn candidate(
        &self,
        search: &Search<'_>,
        one: &Indexed,
    ) -> Result<Candidate, DurableFault> {
        let namespace = search.namespace;
        let candidate = self.manifest_of(search, one.place).await?;
        if one.has(Mark::Full) || !matches!(candidate, Candidate::Sound(..)) {
            return Ok(candidate);
        }
        let says = self.said(namespace, one.place, Mark::Increment).await?;
        for base in read_bases(&says) {
            let key = object_at(namespace, base.run, base.step, MANIFEST_OBJECT)?;
            if self.length(&key).await?.is_none() {
                return Ok(Candidate::Unusable(format!(
                    "it is an increment that builds on {base}, which is gone"
                )));
            }
        }
        Ok(candidate)
    }

    async fn in_folder(
        &self,
        search: &Search<'_>,
        place: StepKey,
    ) -> Result<Candidate, DurableFault> {
        let candidate = self.manifest_of(search, place).await?;
        let Candidate::Sound(manifest, _) = &candidate else {
            return Ok(candidate);
        };
        match self.bases_are_there(manifest).await {
            Err(DurableFault::Damaged(reason) | DurableFault::NotPlain(reason)) => {
                Ok(Candidate::Unusable(reason))
            }
            outcome => outcome.map(|()| candidate),
        }
    }

    async fn manifest_of(
        &self,
        search: &Search<'_>,
        place: StepKey,
    ) -> Result<Candidate, DurableFault> {
        let namespace = search.namespace;
        match self.find_manifest(namespace, place.run, place.step).await {
            Ok(Some(manifest)) => self.judged(manifest, search.trust).await,
            Ok(None) => Ok(Candidate::Unpublished),
            Err(DurableFault::Damaged(reason) | DurableFault::NotPlain(reason)) => {
                Ok(Candidate::Unusable(format!("{MANIFEST_OBJECT}: {reason}")))
            }
            Err(fault) => Err(fault),
        }
    }

    /// Who wrote it decides whether it is used.
    async fn judged(
        &self,
        manifest: ManifestBytes,
        trust: &Trust,
    ) -> Result<Candidate, DurableFault> {
        let standing = self.standing(&manifest, trust).await?;
        match standing {
            Standing::Refused(cause, reason) => Ok(Candidate::Refused(cause, reason)),
            Standing::WithoutMac => match self.why_mac_is_missed(&manifest, trust).await? {
                Some(reason) => Ok(Candidate::Refused(SetAsideCause::WithoutMac, reason)),
                None => {
                    let record = manifest.manifest();
                    tracing::info!(namespace = %record.namespace, run = %record.run, step = %record.step,
                        "a checkpoint in the durable tier has no MAC, and is used");
                    Ok(Candidate::Sound(Arc::new(manifest), standing))
                }
            },
            Standing::Authentic(_) | Standing::Foreign | Standing::NotAsked => {
                Ok(Candidate::Sound(Arc::new(manifest), standing))
            }
        }
    }

    /// Checkpoints that newer ones name as those before them, and that are gone without the retention's doing.
    async fn look_for_missing(&self, search: &mut Search<'_>) -> Result<(), DurableFault> {
        let keep_last = self.limits.retention.keep_last;
        for (before, newer) in std::mem::take(&mut search.before) {
            let (run, step) = (before.run, before.step);
            let place = StepKey { run, step };
            let may_go = keep_last.is_some_and(|last| newer >= last);
            if may_go || search.indexed.contains(&place) {
                continue;
            }
            let key = object_at(search.namespace, run, step, MANIFEST_OBJECT)?;
            if self.length(&key).await.is_ok_and(|it| it.is_none()) {
                tracing::warn!(namespace = %search.namespace, %run, %step,
                    "a checkpoint is gone from the durable tier, which the next one names as the one before it: removed by an \
                     operator, or by somebody else who may write there");
                let reason = "the next one names it as the one before".to_owned();
                search.set_aside(place, SetAsideCause::Missing, reason);
            }
        }
        Ok(())
    }

    /// Adds candidates, newest first, each with what its manifest names. Steps of one structure name the same, which is read once.
    async fn add_all(
        &self,
        search: &mut Search<'_>,
        candidates: Vec<(StepKey, Candidate)>,
    ) -> Result<(), DurableFault> {
        let sound = candidates
            .iter()
            .filter_map(|(_, candidate)| match candidate {
                Candidate::Sound(manifest, _) => Some(manifest.manifest()),
                Candidate::Unpublished | Candidate::Unusable(_) | Candidate::Refused(..) => None,
            });
        let sound: Vec<&Manifest> = sound.filter(|_| search.depth == Depth::Whole).collect();
        let mut found = self.named_by(&sound, &search.listing.enclosures).await?;
        if found.has_faults() && search.step.is_some() {
            // One step was asked for. Others may name the same.
            let newest = Box::pin(self.list(search.namespace, None, search.trust)).await?;
            found.take_from(&newest.enclosures);
        }
        let mut judged = Vec::new();
        for (place, candidate) in candidates {
            let fault = match &candidate {
                Candidate::Sound(manifest, _) => found.fault_of(manifest.manifest()),
                Candidate::Unpublished | Candidate::Unusable(_) | Candidate::Refused(..) => None,
            };
            judged.push(match fault {
                Some(reason) => (
                    place,
                    self.without_named(search.namespace, place, reason).await?,
                ),
                None => (place, candidate),
            });
        }
        search.listing.enclosures.extend(found.bytes);
        for (place, candidate) in judged {
            search.add(place, candidate);
        }
        Ok(())
    }

    /// What its manifest names is not there, or not what it should be. What is being removed goes behind its manifest, and is not
    /// damaged.
    async fn without_named(
        &self,
        namespace: &Namespace,
        place: StepKey,
        reason: String,
    ) -> Result<Candidate, DurableFault> {
        let key = object_at(namespace, place.run, place.step, MANIFEST_OBJECT)?;
        match self.length(&key).await? {
            Some(_) => Ok(Candidate::Unusable(reason)),
            None => Ok(Candidate::Unpublished),
        }
    }

    /// The manifest of a folder; none if there is none.
    pub(super) async fn find_manifest(
        &self,
        namespace: &Namespace,
        run: RunId,
        step: Step,
    ) -> Result<Option<ManifestBytes>, DurableFault> {
        let key = object_at(namespace, run, step, MANIFEST_OBJECT)?;
        let bytes = match self.store.get(&key, None).await {
            Err(StoreError::NotFound { .. }) => return Ok(None),
            outcome => outcome?,
        };
        let manifest = read_manifest_object(&bytes)?;
        let record = manifest.manifest();
        let in_place = record.namespace == *namespace && record.run == run && record.step == step;
        if in_place {
            Ok(Some(manifest))
        } else {
            Err(damaged(format!(
                "it is of run {} step {} of {}",
                record.run, record.step, record.namespace
            )))
        }
    }

    pub(super) async fn manifest_at(
        &self,
        namespace: &Namespace,
        run: RunId,
        step: Step,
    ) -> Result<ManifestBytes, DurableFault> {
        let found = self.find_manifest(namespace, run, step).await?;
        found.ok_or_else(|| {
            damaged(format!(
                "no manifest of run {run} step {step} of {namespace}"
            ))
        })
    }
}
