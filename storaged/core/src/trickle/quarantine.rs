//! Whether the durable tier answers, and checkpoints in it that proved damaged: found here or at a peer, they are set aside
//! by all.

use std::collections::BTreeSet;

use storaged_wire::peer::{CheckpointKey, HighMark, PeerMessage};
use storaged_wire::{Digest, KeptDamage, KeptNamespace, ManifestBytes, Namespace, NodeName, Step};

use super::health::{Damaged, FoundBy, plain};
use crate::api::{
    DurableFault, DurableListing, DurablePolicy, Note, SetAside, SetAsideCause, TierNews, Viewer,
};
use crate::context::Context;
use crate::limits;
use crate::stage::cut;

impl Context {
    /// The tier answered, or did not. Said once, when that changes.
    pub(crate) fn tier_answered(&mut self, fault: Option<&DurableFault>) {
        if fault.is_some_and(|fault| !fault.is_of_tier()) {
            return;
        }
        if let Some(DurableFault::Misconfigured(_)) = fault {
            self.tier.misconfigured_at = Some(self.now);
        }
        if fault.is_none() && self.is_misconfigured() {
            return;
        }
        let before = self.tier_fault().map(DurableFault::name);
        self.tier.fault = fault.cloned();
        self.note_tier(before);
    }

    fn note_tier(&mut self, before: Option<&'static str>) {
        let fault = self.tier_fault().cloned();
        if fault.as_ref().map(DurableFault::name) != before {
            self.note(Note::DurableState { fault });
        }
    }

    pub(crate) fn tier_heard(&mut self, news: TierNews) {
        match news {
            // It is opened, as it is configured, or was not.
            TierNews::Opened(outcome) => {
                self.tier.misconfigured_at = None;
                self.tier_answered(outcome.err().as_ref());
            }
            TierNews::Writes(outcome) => {
                let before = self.tier_fault().map(DurableFault::name);
                self.tier.unwritten = outcome.err();
                self.note_tier(before);
            }
            TierNews::Damaged(manifest, fault) => self.quarantine(&manifest, &fault),
        }
    }

    /// Whether it was found a moment ago that the tier is configured wrongly. What needs no key goes well where one is missing, and
    /// comes between.
    fn is_misconfigured(&self) -> bool {
        let is_told = matches!(self.tier.fault, Some(DurableFault::Misconfigured(_)));
        let found_at = self.tier.misconfigured_at.filter(|_| is_told);
        found_at.is_some_and(|at| self.now.since(at) < limits::MISCONFIGURED_FOR_MS)
    }

    /// Why what it holds cannot be read, if it cannot.
    pub(crate) fn tier_read_fault(&self) -> Option<&DurableFault> {
        self.tier.fault.as_ref()
    }

    /// What it said when it last failed, if it has not answered since, or that it does not answer.
    pub fn tier_fault(&self) -> Option<&DurableFault> {
        self.tier.fault.as_ref().or(self.tier.unwritten.as_ref())
    }

    /// A restore here found a checkpoint in the tier damaged: every node is told, so that the next plan anywhere leaves
    /// it out, also where the tier took no marker.
    pub(crate) fn quarantine(&mut self, manifest: &ManifestBytes, fault: &DurableFault) {
        let record = manifest.manifest();
        let key = CheckpointKey::of(record);
        let (name, reason) = (manifest.name(), fault.to_string());
        let is_marked = !matches!(fault, DurableFault::DamagedUnmarked(_));
        self.keeping.touch_job(&key.namespace);
        if let Some(known) = self.tier.quarantined.get_mut(&name) {
            known.is_marked |= is_marked;
        }
        self.send_all(&PeerMessage::Quarantined {
            manifest: name,
            key: key.clone(),
            reason: reason.clone(),
        });
        let damaged = Damaged {
            key,
            reason,
            found: FoundBy::Here,
            is_marked,
            at: self.now,
        };
        self.note_quarantine(name, damaged);
    }

    /// A peer found a checkpoint in the tier damaged.
    pub(crate) fn learn_quarantine(
        &mut self,
        from: &NodeName,
        name: Digest,
        key: CheckpointKey,
        reason: String,
    ) {
        let damaged = Damaged {
            key,
            reason: format!("{from} found: {}", cut(&reason)),
            found: FoundBy::Peer(from.clone()),
            is_marked: false,
            at: self.now,
        };
        self.note_quarantine(name, damaged);
    }

    /// A peer that has just started knows nothing of what was found damaged here, and the tier may have taken no marker:
    /// it is told before it can be asked for a plan.
    pub(crate) fn tell_quarantined(&mut self, to: &NodeName) {
        let known = self.tier.quarantined.iter();
        let mut mine: Vec<_> = known
            .filter(|(_, damaged)| damaged.found == FoundBy::Here)
            .map(|(name, damaged)| (*name, damaged.clone()))
            .collect();
        // The last ones, oldest first: of one peer no more are kept there, and the first that it told of go.
        mine.sort_by_key(|(_, damaged)| damaged.at);
        let before = mine.len().saturating_sub(limits::QUARANTINED_PER_PEER_MAX);
        for (manifest, Damaged { key, reason, .. }) in mine.into_iter().skip(before) {
            let message = PeerMessage::Quarantined {
                manifest,
                key,
                reason,
            };
            self.send(to, message);
        }
    }

    fn note_quarantine(&mut self, name: Digest, damaged: Damaged) {
        let (key, reason) = (damaged.key.clone(), damaged.reason.clone());
        let known = self.tier.quarantined.get(&name);
        let is_known = |it: &Damaged| it.found == FoundBy::Here || damaged.found != FoundBy::Here;
        if known.is_some_and(is_known) {
            return;
        }
        self.forget_damaged_for(&damaged.found);
        self.tier.quarantined.insert(name, damaged);
        self.show_damaged(key.clone(), reason.clone());
        self.note(Note::Quarantined { key, reason });
    }

    /// Makes room for one more. One peer is remembered of a few: else one that lies would have all forgotten that others have found.
    fn forget_damaged_for(&mut self, found: &FoundBy) {
        let known = &self.tier.quarantined;
        let oldest = |which: &dyn Fn(&Damaged) -> bool| {
            let some = known.iter().filter(|(_, it)| which(it));
            some.min_by_key(|(_, it)| it.at).map(|(name, _)| *name)
        };
        let of_same = known.values().filter(|it| it.found == *found).count();
        let is_peers = *found != FoundBy::Here && !planted!("damage_is_told_without_end");
        let goes = if is_peers && of_same >= limits::QUARANTINED_PER_PEER_MAX {
            oldest(&|it| it.found == *found)
        } else if known.len() >= limits::QUARANTINED_MAX {
            oldest(&|it| it.found != FoundBy::Here).or_else(|| oldest(&|_| true))
        } else {
            None
        };
        let Some(gone) = goes.and_then(|name| self.tier.quarantined.remove(&name)) else {
            return;
        };
        let mut left = self.tier.quarantined.values();
        if !left.any(|it| it.key == gone.key) {
            self.tier.damaged.remove(&gone.key);
        }
        self.keeping.touch_job(&gone.key.namespace);
    }

    /// Copies of a job that were found damaged here and of which the tier has no mark, for the daemon that starts next. What has one needs
    /// nobody's memory, and goes with the mark.
    pub(crate) fn kept_damage(&self, namespace: &Namespace) -> Option<Vec<KeptDamage>> {
        let is_kept = |it: &Damaged| {
            it.found == FoundBy::Here && !it.is_marked && it.key.namespace == *namespace
        };
        let known = self.tier.quarantined.iter();
        let mut own: Vec<_> = known.filter(|(_, damaged)| is_kept(damaged)).collect();
        own.sort_by_key(|(_, damaged)| damaged.at);
        let before = own.len().saturating_sub(limits::QUARANTINED_KEPT_MAX);
        let last = own.into_iter().skip(before);
        let kept = last.map(|(name, damaged)| KeptDamage {
            manifest: *name,
            run: damaged.key.run,
            step: damaged.key.step,
            reason: cut(&damaged.reason).to_owned(),
        });
        let kept: Vec<KeptDamage> = kept.collect();
        (!kept.is_empty()).then_some(kept)
    }

    /// An earlier daemon of this node found it.
    pub(crate) fn recover_damage(&mut self, job: &KeptNamespace) {
        let kept = job.damaged.iter().flatten();
        for found in kept.take(limits::QUARANTINED_KEPT_MAX) {
            let key = CheckpointKey {
                namespace: job.namespace.clone(),
                run: found.run,
                step: found.step,
            };
            let damaged = Damaged {
                key: key.clone(),
                reason: found.reason.clone(),
                found: FoundBy::Here,
                is_marked: false,
                at: self.now,
            };
            self.forget_damaged_for(&FoundBy::Here);
            self.tier.quarantined.insert(found.manifest, damaged);
            self.show_damaged(key, found.reason.clone());
        }
    }

    /// An operator says that copies of a step are sound: what was found here or heard of peers is forgotten. What is marked in the tier stays
    /// so. Gives those of which something was known.
    pub(crate) fn lift_damage(&mut self, namespace: &Namespace, step: Step) -> BTreeSet<HighMark> {
        let is_of = |key: &CheckpointKey| key.namespace == *namespace && key.step == step;
        let known = self.tier.quarantined.values();
        let known = known.filter(|it| is_of(&it.key));
        let lifted: BTreeSet<HighMark> = known.map(|it| it.key.mark()).collect();
        if !lifted.is_empty() {
            self.tier.quarantined.retain(|_, it| !is_of(&it.key));
            self.tier.damaged.retain(|key, _| !is_of(key));
        }
        lifted
    }

    fn show_damaged(&mut self, key: CheckpointKey, reason: String) {
        let damaged = &mut self.tier.damaged;
        if damaged.len() >= limits::QUARANTINED_MAX {
            damaged.pop_first();
        }
        damaged.entry(key).or_insert(reason);
    }

    /// A listing has been read: what it says of a namespace is what there is.
    pub(crate) fn damaged_listed(&mut self, namespace: &Namespace, listing: &DurableListing) {
        let damaged = &mut self.tier.damaged;
        damaged.retain(|key, _| key.namespace != *namespace);
        let set_aside = listing.set_aside.iter();
        let quarantined = set_aside.filter(|one| one.cause == SetAsideCause::Quarantined);
        for one in quarantined {
            let key = CheckpointKey {
                namespace: namespace.clone(),
                run: one.run,
                step: one.step,
            };
            self.show_damaged(key, one.reason.clone());
        }
    }

    /// Damaged checkpoints of the tier in the status, as far as this node knows.
    pub(crate) fn damaged_json(&self, viewer: &Viewer) -> String {
        let damaged = self.tier.damaged.iter().filter_map(|(key, reason)| {
            let namespace = viewer.name_of(&key.namespace)?;
            Some(format!(
                r#"{{"namespace":"{namespace}","run":"{}","step":{},"reason":"{}"}}"#,
                key.run,
                key.step,
                plain(reason)
            ))
        });
        damaged.collect::<Vec<_>>().join(",")
    }

    /// A listing without what this node knows to be damaged.
    pub(crate) fn without_quarantined(&self, mut listing: DurableListing) -> DurableListing {
        let DurableListing {
            manifests,
            set_aside,
            ..
        } = &mut listing;
        manifests.retain(|manifest| match self.set_aside(manifest) {
            Some(one) => {
                set_aside.push(one);
                false
            }
            None => true,
        });
        listing
    }

    /// A listing with the newest checkpoint that this node knows to have been durable, should the tier not have it: somebody has
    /// removed it, or has put an earlier state of the tier in place of the newest.
    pub(crate) fn with_missing(
        &mut self,
        namespace: &Namespace,
        mut listing: DurableListing,
    ) -> DurableListing {
        if let Some(newest) = listing.authentic {
            self.remember_mac(namespace, newest);
        }
        let Some(known) = self.keys.durable(namespace) else {
            return listing;
        };
        let place = (known.run, known.step);
        let of = |one: &SetAside| (one.run, one.step) == place;
        let newest = listing.manifests.first().map(|it| it.manifest());
        let is_listed = newest.is_some_and(|newest| (newest.run, newest.step) >= place)
            || listing.set_aside.iter().any(of)
            || planted!("rollback_not_said");
        if !is_listed {
            listing.set_aside.push(SetAside {
                run: known.run,
                step: known.step,
                cause: SetAsideCause::Missing,
                reason: "this node knows that it was durable".into(),
            });
        }
        listing
    }

    /// Why a plan leaves a checkpoint in the tier out, unless its step was asked for.
    fn set_aside(&self, manifest: &ManifestBytes) -> Option<SetAside> {
        let record = manifest.manifest();
        let damaged = self.tier.quarantined.get(&manifest.name())?;
        Some(SetAside {
            run: record.run,
            step: record.step,
            cause: SetAsideCause::Quarantined,
            reason: damaged.reason.clone(),
        })
    }

    /// The tier in the status: null where there is none.
    pub(crate) fn tier_json(&self) -> String {
        match (self.setup.durable, self.tier_fault()) {
            (DurablePolicy::Absent, _) => "null".into(),
            (_, None) => r#"{"state":"ready"}"#.into(),
            (_, Some(fault)) => {
                let text = plain(&fault.to_string());
                format!(r#"{{"state":"{}","fault":"{text}"}}"#, fault.name())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Now;
    use crate::testkit::{job, last_of};

    fn manifest(step: u64) -> ManifestBytes {
        let root = storaged_codec::digest(b"any");
        let manifest = crate::testkit::manifest(step, &["a", "b"], &["c"], 5, root);
        manifest.seal().expect("a sound manifest")
    }

    fn unmarked() -> DurableFault {
        DurableFault::DamagedUnmarked("digest mismatch".into())
    }

    /// A later restore finds it once more, and the tier can be written by then.
    #[test]
    fn what_gets_a_mark_after_all_is_kept_no_longer() {
        let mut node = last_of(&["a", "b", "c"], 2, 1);
        let context = node.context_mut();
        context.quarantine(&manifest(7), &unmarked());
        assert!(context.kept_damage(&job()).is_some());
        let marked = DurableFault::Damaged("digest mismatch".into());
        context.quarantine(&manifest(7), &marked);
        assert_eq!(context.kept_damage(&job()), None);
        context.quarantine(&manifest(7), &unmarked());
        assert_eq!(context.kept_damage(&job()), None, "the mark is there");
    }

    #[test]
    fn the_last_of_many_are_kept_oldest_first() {
        let mut node = last_of(&["a", "b", "c"], 2, 1);
        let context = node.context_mut();
        let most = limits::QUARANTINED_KEPT_MAX as u64;
        for step in 1..=most + 3 {
            context.now = Now(1_000 * step);
            context.quarantine(&manifest(step), &unmarked());
        }
        let kept = context.kept_damage(&job()).unwrap_or_default();
        let steps: Vec<u64> = kept.iter().map(|it| it.step.get()).collect();
        assert_eq!(steps, (4..=most + 3).collect::<Vec<u64>>());
    }
}
