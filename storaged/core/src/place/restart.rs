//! Whether this node may be restarted now without losing anything: asked by whoever rolls a cluster, before each node.

use storaged_wire::drain::StepAfterDrain;
use storaged_wire::local::{Bears, KeptFor, Reply};
use storaged_wire::{CheckpointState, Namespace, Refusal};

use super::drain::GoneFirst;
use super::lost::Denials;
use crate::api::{RequestId, Viewer};
use crate::catalog::Checkpoint;
use crate::context::Context;

impl Context {
    pub(crate) fn restart_safe(
        &mut self,
        id: RequestId,
        bears: Option<u32>,
    ) -> Result<(), Refusal> {
        let objections = self.restart_objections(bears, &self.viewer(id.conn));
        self.reply(id, Reply::RestartSafe(objections));
        Ok(())
    }

    /// What speaks against it, a line per namespace. `bears` are the node losses that must be bearable before; without a
    /// number one more than this node's own, where m allows it. That a checkpoint is durable does not make up for them, unless
    /// `bears` is 0: all nodes could go one after the other, and leave the restart to the tier.
    pub fn restart_objections(&self, bears: Option<u32>, viewer: &Viewer) -> Vec<String> {
        if !self.settled() {
            return vec!["this node is still linking up with its peers".into()];
        }
        let objections = self.jobs_with_checkpoints().into_iter();
        objections
            .filter_map(|namespace| {
                let why = self.restart_objection(namespace, bears)?;
                // That there is one is said to everybody: who restarts the node loses it.
                let line = |name| format!("{name}: {why}");
                let name = viewer.name_of(namespace);
                Some(name.map_or_else(|| "a job of another tenant".into(), line))
            })
            .collect()
    }

    /// Of each job what speaks against the end of this node, where it holds something of that step.
    pub fn ends_with_this_node(&self, bears: Option<u32>) -> Vec<String> {
        // Before its links are up it would count nothing on anybody.
        if !self.settled() {
            return Vec::new();
        }
        let jobs = self.jobs_with_checkpoints().into_iter();
        let steps = jobs.filter_map(|job| self.newest_to_restore(job));
        let held = steps.filter(|c| c.has_blocks());
        let lines = held.filter_map(|c| {
            let why = self.objection_because_of(c, bears)?;
            Some(format!("{}: {why}", c.key.namespace))
        });
        lines.collect()
    }

    /// Of each job's newest step, where it is coded, what it bears once this node has gone, and those that are drained before it with it.
    pub fn after_drain(&self) -> Vec<StepAfterDrain> {
        let jobs = self.jobs_with_checkpoints().into_iter();
        let steps = jobs.filter_map(|job| self.newest_to_restore(job));
        let after = steps.filter_map(|newest| {
            let now = self.bears(newest)?;
            let first = newest.manifest.as_ref();
            let first = first.map_or_else(GoneFirst::default, |it| self.gone_first(it));
            let gone = u32::from(newest.has_blocks()).saturating_add(first.count());
            let losses = now.losses.saturating_sub(gone);
            Some(StepAfterDrain {
                key: newest.key.clone(),
                bears: Bears { losses, ..now },
                state: newest.state,
            })
        });
        after.collect()
    }

    fn restart_objection(&self, namespace: &Namespace, bears: Option<u32>) -> Option<String> {
        let newest = self.newest_to_restore(namespace)?;
        let pinned = self.pinned_here(namespace).into_iter();
        let pinned = pinned.filter_map(|key| self.checkpoints.get(&key));
        let pinned = pinned.filter(|c| c.key != newest.key && c.manifest.is_some());
        let all = std::iter::once(newest).chain(pinned);
        all.into_iter()
            .find_map(|c| self.objection_because_of(c, bears))
    }

    /// The newest step of a job that is as safe as can be, or else that is committed.
    fn newest_to_restore(&self, namespace: &Namespace) -> Option<&Checkpoint> {
        let mut of_it = self.checkpoints.values().rev();
        match self.newest_safe(namespace) {
            Some(newest) => Some(&self.checkpoints[&newest]),
            None => of_it.find(|c| c.key.namespace == *namespace && c.manifest.is_some()),
        }
    }

    /// What the loss of this node would do to a step.
    fn objection_because_of(&self, newest: &Checkpoint, bears: Option<u32>) -> Option<String> {
        let (run, step) = (newest.key.run, newest.key.step);
        let copied = self.objection_to_copy(newest);
        let Some(counted) = self.bears(newest) else {
            let because = copied?;
            return Some(format!(
                "step {step} of run {run} is not coded and {because}"
            ));
        };
        let wanted = bears.unwrap_or(2).min(counted.of);
        let first = newest.manifest.as_ref();
        let first = first.map_or_else(GoneFirst::default, |it| self.gone_first(it));
        // This node's own loss is one already: at zero the durable tier must have a copy.
        let least = wanted.max(1).saturating_add(first.count());
        if counted.losses >= least || (wanted == 0 && copied.is_none()) {
            return None;
        }
        let waits = self.why_not_yet(&newest.key);
        let lost = self.loss_in_words(newest);
        let pinned = if self.is_pinned(&newest.key) {
            "; it is pinned: `storaged unpin` takes it out of account"
        } else {
            ""
        };
        let tier = match (wanted, copied) {
            (0, Some(because)) => format!("; it {because}"),
            (_, Some(_)) => String::new(),
            (_, None) => "; it is durable: bears 0 goes by the durable tier alone".into(),
        };
        Some(format!(
            "step {step} of run {run} bears {} of {} losses, expected {least}{waits}{lost}{first}{tier}{pinned}",
            counted.losses, counted.of,
        ))
    }

    /// Of a step that no wait makes whole again, as far as this node counts its blocks: who rolls a cluster would wait for it.
    fn loss_in_words(&self, newest: &Checkpoint) -> String {
        // Who has copied what to the tier is told to home nodes alone.
        let is_home = self.homes_of(&newest.key).contains(self.me());
        if newest.state == CheckpointState::Durable || !is_home {
            return String::new();
        }
        let lost = self.lost_shard(newest, Denials::Ignored);
        lost.map_or_else(String::new, |shard| {
            format!(
                "; it is lost: the shard of rank {} is on no node, cannot be decoded and is not in the durable tier. A restart goes back to \
                 an older step, if there is one (`storaged plan` says which). It is so until a newer step is protected",
                shard.rank
            )
        })
    }

    /// Why a checkpoint's copy in the durable tier cannot be counted on, if it cannot: a tier that is away may come back too
    /// late, or without it.
    fn objection_to_copy(&self, checkpoint: &Checkpoint) -> Option<String> {
        match (checkpoint.state, self.tier_read_fault()) {
            (CheckpointState::Durable, None) => None,
            (CheckpointState::Durable, Some(fault)) => {
                Some(format!("cannot be read in the durable tier: {fault}"))
            }
            _ => Some("is not in the durable tier".into()),
        }
    }

    /// Every committed checkpoint here with what it bears, for metrics.
    pub fn standings(&self) -> Vec<Standings> {
        let committed = self.checkpoints.values().filter(|c| c.manifest.is_some());
        committed.map(|c| self.standings_of(c)).collect()
    }

    fn standings_of(&self, checkpoint: &Checkpoint) -> Standings {
        let bears = self.bears(checkpoint);
        Standings {
            namespace: checkpoint.key.namespace.clone(),
            state: checkpoint.state,
            bears: bears.map(|bears| bears.losses),
            bears_full: bears.map(|bears| bears.of),
            owed: self.is_due(checkpoint),
            kept_for: self.kept_for(checkpoint),
        }
    }
}

/// A committed checkpoint as it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standings {
    /// Its job.
    pub namespace: Namespace,
    /// How far it came.
    pub state: CheckpointState,
    /// Node losses that it survives now; none where nothing is coded.
    pub bears: Option<u32>,
    /// And with all blocks in place.
    pub bears_full: Option<u32>,
    /// It is kept for its way to the durable tier.
    pub owed: bool,
    /// Why it is here though a newer one has made it needless.
    pub kept_for: Option<KeptFor>,
}

#[cfg(test)]
mod tests {
    use storaged_wire::Generation;

    use crate::api::{Input, Now, Viewer};
    use crate::limits::{JOIN_GRACE_MS, JOIN_MAX_MS, JOIN_QUIET_MS};
    use crate::node::Node;
    use crate::testkit::{alone_of, name};

    const NODES: usize = 100;

    /// The last of many members, to which one peer after the other links up, the first at once.
    fn joined(node: &mut Node, peers: usize, every_ms: u64) -> u64 {
        for peer in 0..peers {
            let joins = Input::PeerUp {
                node: name(&format!("n{peer:02}")),
                generation: Generation::new(1),
            };
            node.handle(Now(peer as u64 * every_ms), joins);
        }
        (peers as u64 - 1) * every_ms
    }

    fn is_settled(node: &mut Node, at: u64) -> bool {
        node.handle(Now(at), Input::Tick);
        node.restart_objections(None, &Viewer::Operator).is_empty()
    }

    #[test]
    fn nobody_is_missed_while_one_peer_after_the_other_joins() {
        let mut node = alone_of(NODES);
        let last = joined(&mut node, NODES / 2, JOIN_QUIET_MS / 2);
        assert!(last > 2 * JOIN_GRACE_MS, "long after the grace");
        assert!(!is_settled(&mut node, last + JOIN_QUIET_MS - 1));
        assert!(is_settled(&mut node, last + JOIN_QUIET_MS));
    }

    #[test]
    fn nodes_that_are_started_one_by_one_are_not_waited_for() {
        let mut node = alone_of(NODES);
        let every_ms = JOIN_QUIET_MS - 1;
        let last = joined(&mut node, 31, every_ms);
        assert!(last < JOIN_MAX_MS && !is_settled(&mut node, last));
        assert!(is_settled(&mut node, JOIN_MAX_MS));
    }

    #[test]
    fn a_peer_that_comes_and_goes_is_not_waited_for_again() {
        let mut node = alone_of(NODES);
        let last = joined(&mut node, 3, 1);
        for at in (last..JOIN_GRACE_MS).step_by(500) {
            let (n, generation) = (name("n00"), Generation::new(1));
            node.handle(Now(at), Input::PeerDown { node: n.clone() });
            node.handle(
                Now(at),
                Input::PeerUp {
                    node: n,
                    generation,
                },
            );
        }
        assert!(is_settled(&mut node, JOIN_GRACE_MS));
    }
}
