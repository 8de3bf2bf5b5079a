//! Which checkpoints the tier keeps. Without a word in the configuration: all of them. Retention runs where a checkpoint
//! was just published, so that there is always a newer whole one than any that goes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use storaged_core::{DurableFault, Trust};
use storaged_wire::{Namespace, RunId, Step};
use tokio::time::Instant;

use super::index::{Indexed, Mark, StepKey};
use super::store::{KeyPrefix, ObjectKey};
use super::{MANIFEST_OBJECT, RequireMac, Trickle, object_at};

/// How long what is left of a step that the job has passed by must not have changed, by this daemon's clock. Nothing of
/// it can become a checkpoint that would be kept; an upload that runs all the same is not cut off.
const LEFT_BEHIND_AFTER: Duration = Duration::from_secs(600);

/// What the configuration says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retention {
    /// So many of the newest whole checkpoints are kept; none for all.
    pub keep_last: Option<u32>,
    /// Steps that are multiples of this are kept beside them.
    pub keep_every: Option<u64>,
    /// What an older run has begun and not finished goes once it has not changed for so long.
    pub abandoned_after: Option<Duration>,
}

/// Unfinished checkpoints that were seen, since when, and what they were then.
#[derive(Debug, Default)]
pub(super) struct Sightings(Mutex<BTreeMap<(Namespace, StepKey), Sighting>>);

/// Since when, and how many objects and bytes there were.
type Sighting = (Instant, u64, u64);

impl Sightings {
    /// How long a folder has looked like this.
    fn unchanged(
        &self,
        namespace: &Namespace,
        place: StepKey,
        objects: u64,
        bytes: u64,
    ) -> Duration {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let one = seen
            .entry((namespace.clone(), place))
            .or_insert((now, objects, bytes));
        if (one.1, one.2) != (objects, bytes) {
            *one = (now, objects, bytes);
        }
        now - one.0
    }

    fn forget(&self, namespace: &Namespace, place: StepKey) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.remove(&(namespace.clone(), place));
    }
}

impl Retention {
    /// Whether `keep_every` wants a step.
    fn keeps_step(&self, step: Step) -> bool {
        let every = self.keep_every.filter(|every| *every > 0);
        every.is_some_and(|every| step.get().is_multiple_of(every))
    }
}

/// What goes, the newest first, given which of the newest are whole: only what is older than all of those that
/// `keep_last` counts, and never what something that stays builds on.
fn doomed(
    retention: &Retention,
    index: &[Indexed],
    last: &[StepKey],
    bases: &BTreeMap<StepKey, Vec<StepKey>>,
) -> Vec<StepKey> {
    let Some(oldest) = last.iter().min() else {
        return Vec::new();
    };
    let stays = |one: &Indexed| {
        one.place >= *oldest
            || one.has(Mark::Pinned)
            || retention.keeps_step(one.place.step) && one.is_entry() && !one.has(Mark::Quarantined)
    };
    let kept: BTreeSet<StepKey> = index
        .iter()
        .filter(|one| stays(one))
        .map(|one| one.place)
        .collect();
    let needed: BTreeSet<StepKey> = kept
        .iter()
        .filter_map(|place| bases.get(place))
        .flatten()
        .copied()
        .collect();
    let goes = |place: &StepKey| !kept.contains(place) && !needed.contains(place);
    index.iter().map(|one| one.place).filter(goes).collect()
}

impl Trickle {
    /// After a publication: what the retention does not keep goes. One at a time; what fails is tried after the next.
    pub async fn tidy(&self, namespace: &Namespace, run: RunId, trust: &Trust) {
        let Ok(_turn) = self.tidying.try_lock() else {
            return;
        };
        let kept = self.retain(namespace, run, trust).await;
        let cleared = self.clear_abandoned(namespace, run).await;
        if let Err(fault) = kept.and(cleared) {
            tracing::warn!(%namespace, %fault, "removing older checkpoints from the durable tier failed; it is tried again after the next one");
        }
    }

    async fn retain(
        &self,
        namespace: &Namespace,
        run: RunId,
        trust: &Trust,
    ) -> Result<(), DurableFault> {
        let retention = &self.limits.retention;
        let Some(keep_last) = retention.keep_last else {
            return Ok(());
        };
        // What may be forged must not take the place of what is sound, and here nothing tells them apart.
        if matches!(trust, Trust::Nothing { .. }) && self.limits.require_mac != RequireMac::Never {
            return Ok(());
        }
        // The copy that is being written may build on the one before the newest.
        let keep_last = keep_last.max(1) + u32::from(self.limits.increments > 0);
        let index = self.index(namespace).await?;
        let mut last = Vec::new();
        for one in &index {
            if !one.is_entry() || one.has(Mark::Quarantined) {
                continue;
            }
            if last.len() as u32 >= keep_last {
                break;
            }
            if self.counts(namespace, one.place, trust).await? {
                last.push(one.place);
            }
        }
        if (last.len() as u32) < keep_last {
            return Ok(());
        }
        let bases = self.bases_in(namespace, &index).await?;
        for place in doomed(retention, &index, &last, &bases) {
            self.remove_step(namespace, place).await?;
        }
        let Some(oldest) = last.iter().min().filter(|oldest| oldest.run == run) else {
            return Ok(());
        };
        self.clear_left_behind(namespace, *oldest, &index, &bases)
            .await
    }

    /// Steps of this run that have no manifest, and are older than all that `keep_last` counts: were one finished now, it
    /// would go at once. Nodes that have given up a step withdraw their shards; this is for those that cannot any more.
    async fn clear_left_behind(
        &self,
        namespace: &Namespace,
        oldest: StepKey,
        index: &[Indexed],
        bases: &BTreeMap<StepKey, Vec<StepKey>>,
    ) -> Result<(), DurableFault> {
        let indexed: BTreeSet<StepKey> = index.iter().map(|one| one.place).collect();
        let needed: BTreeSet<StepKey> = bases.values().flatten().copied().collect();
        let mut places = self.step_folders(namespace, oldest.run).await?;
        places.retain(|place| {
            let is_passed = *place < oldest && !self.limits.retention.keeps_step(place.step);
            is_passed && !indexed.contains(place) && !needed.contains(place)
        });
        for place in places {
            self.remove_unchanged(namespace, place, LEFT_BEHIND_AFTER)
                .await?;
        }
        Ok(())
    }

    /// Removes what is left of a step without a manifest, if it has not changed for so long.
    async fn remove_unchanged(
        &self,
        namespace: &Namespace,
        place: StepKey,
        after: Duration,
    ) -> Result<(), DurableFault> {
        let manifest = object_at(namespace, place.run, place.step, MANIFEST_OBJECT)?;
        if self.length(&manifest).await?.is_some() {
            return Ok(());
        }
        let folder = format!("{namespace}/run-{}/step-{}", place.run, place.step);
        let entries = self.store.list(&KeyPrefix::folder(folder.parse()?)).await?;
        let bytes = entries.iter().map(|entry| entry.length).sum();
        let unchanged = self
            .sightings
            .unchanged(namespace, place, entries.len() as u64, bytes);
        if unchanged >= after {
            self.remove_step(namespace, place).await?;
            self.sightings.forget(namespace, place);
        }
        Ok(())
    }

    /// What runs before this one left unfinished. A live upload is never touched: its run is the newest, or its folder
    /// still changes.
    async fn clear_abandoned(&self, namespace: &Namespace, run: RunId) -> Result<(), DurableFault> {
        let Some(after) = self.limits.retention.abandoned_after else {
            return Ok(());
        };
        let unfinished = self.unfinished_of(namespace).await?;
        // A run whose first upload was stopped has no folder.
        let mut runs: BTreeSet<RunId> = unfinished.iter().map(|place| place.run).collect();
        runs.extend(self.run_folders(namespace).await?);
        for older in runs {
            if older.number() >= run.number() {
                continue;
            }
            let folders = self.step_folders(namespace, older).await?;
            let mut places: BTreeSet<StepKey> = folders.into_iter().collect();
            places.extend(unfinished.iter().filter(|place| place.run == older));
            for place in places {
                self.remove_unchanged(namespace, place, after).await?;
            }
        }
        Ok(())
    }

    /// Places whose shards have begun, and may have left no object yet.
    async fn unfinished_of(
        &self,
        namespace: &Namespace,
    ) -> Result<BTreeSet<StepKey>, DurableFault> {
        let under = KeyPrefix::folder(namespace.as_str().parse()?);
        let prefix = under.text();
        let keys = self.store.unfinished(&under).await?;
        let place = |key: &ObjectKey| {
            let rest = key.as_str().strip_prefix(&prefix)?;
            let (run, rest) = rest.strip_prefix("run-")?.split_once('/')?;
            let (step, _) = rest.strip_prefix("step-")?.split_once('/')?;
            let (run, step) = (run.parse().ok()?, Step::new(step.parse().ok()?));
            Some(StepKey { run, step })
        };
        Ok(keys.iter().filter_map(place).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(step: u64) -> StepKey {
        StepKey {
            run: RunId::new(1),
            step: Step::new(step),
        }
    }

    fn one(step: u64, marks: &[Mark]) -> Indexed {
        Indexed {
            place: place(step),
            marks: marks.to_vec(),
        }
    }

    fn steps(places: &[StepKey]) -> Vec<u64> {
        places.iter().map(|place| place.step.get()).collect()
    }

    #[test]
    fn the_last_the_nth_the_pinned_and_their_bases_stay() {
        let index = [
            one(110, &[Mark::Full]),
            one(100, &[Mark::Full]),
            one(90, &[Mark::Increment, Mark::Pinned]),
            one(80, &[Mark::Increment]),
            one(70, &[Mark::Full]),
            one(60, &[Mark::Full]),
            one(50, &[Mark::Full]),
            one(40, &[Mark::Full]),
            one(25, &[Mark::Full, Mark::Quarantined]),
        ];
        let retention = Retention {
            keep_last: Some(2),
            keep_every: Some(25),
            abandoned_after: None,
        };
        let bases = BTreeMap::from([
            (place(90), vec![place(80), place(70)]),
            (place(80), vec![place(70)]),
        ]);
        let gone = doomed(&retention, &index, &[place(110), place(100)], &bases);
        assert_eq!(steps(&gone), [60, 40, 25]);
        assert_eq!(doomed(&retention, &index, &[], &bases), []);
    }

    #[test]
    fn what_is_newer_than_the_counted_ones_stays_whatever_it_is() {
        let index = [
            one(120, &[Mark::Full]),
            one(110, &[Mark::Full, Mark::Quarantined]),
            one(100, &[Mark::Full]),
            one(90, &[Mark::Full]),
        ];
        let retention = Retention {
            keep_last: Some(1),
            ..Retention::default()
        };
        let gone = doomed(&retention, &index, &[place(100)], &BTreeMap::new());
        assert_eq!(steps(&gone), [90]);
    }
}
