//! What would be lost, or left half done, if this node stopped now and its RAM went with it. A daemon that is told to stop
//! sees to it first, as far as its time reaches (`node.leave_within`): uploads that nobody else can finish, the manifest of a
//! checkpoint whose shards are all in the durable tier, and the coding of what was just committed. It needs no trainers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use storaged_wire::drain::DrainOrder;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{CheckpointState, ManifestBytes, Namespace, Refusal, RefusalCode, SlotId};

use crate::api::{Output, RequestId, Viewer};
use crate::catalog::{Checkpoint, Sealing, SlotUse, Upload};
use crate::context::Context;
use crate::limits;

/// Something that only this node can finish, or that is lost with it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Unfinished {
    /// Trainers of this job fill slots here.
    Filling {
        namespace: Namespace,
        slots: BTreeSet<SlotId>,
    },
    /// Sealed here; other ranks' shards have not been heard of yet.
    Uncommitted { key: CheckpointKey },
    /// The newest of its job, and not coded yet.
    Uncoded { key: CheckpointKey },
    /// Shards of this node that are owed to the durable tier.
    NotCopied { key: CheckpointKey, shards: usize },
    /// This is a home node, and the manifest is not in the durable tier.
    Unpublished { key: CheckpointKey },
}

impl Unfinished {
    /// The checkpoint, if there is one already.
    pub fn key(&self) -> Option<&CheckpointKey> {
        match self {
            Self::Filling { .. } => None,
            Self::Uncommitted { key }
            | Self::Uncoded { key }
            | Self::NotCopied { key, .. }
            | Self::Unpublished { key } => Some(key),
        }
    }
}

/// What a daemon that leaves waits for once it is too late for last saves: what had begun by then, or a job that trains on would keep it.
#[derive(Debug, Default)]
pub struct LastWork {
    /// Slots that were being filled then, as long as they are; and once they are not, what had begun by then.
    filled: Option<BTreeSet<SlotId>>,
    waited_for: Option<BTreeSet<CheckpointKey>>,
}

impl LastWork {
    /// What is waited for, of all that is unfinished now. It is asked from that time on.
    pub fn of(&mut self, mut unfinished: Vec<Unfinished>) -> Vec<Unfinished> {
        let mut filling = BTreeSet::new();
        for one in &unfinished {
            if let Unfinished::Filling { slots, .. } = one {
                filling.extend(slots.iter().copied());
            }
        }
        let filled = self.filled.get_or_insert_with(|| filling.clone());
        filled.retain(|slot| filling.contains(slot));
        if !filled.is_empty() {
            return unfinished;
        }
        let begun = || unfinished.iter().filter_map(Unfinished::key).cloned();
        let waited_for = self.waited_for.get_or_insert_with(|| begun().collect());
        unfinished.retain(|one| one.key().is_some_and(|key| waited_for.contains(key)));
        unfinished
    }
}

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = |key: &CheckpointKey| {
            let CheckpointKey {
                namespace,
                run,
                step,
            } = key;
            format!("{namespace}: step {step} of run {run}")
        };
        match self {
            Self::Filling { namespace, slots } => {
                write!(f, "{namespace}: trainers are filling {} slots", slots.len())
            }
            Self::Uncommitted { key } => write!(f, "{} is not committed", step(key)),
            Self::Uncoded { key } => write!(f, "{} is not coded", step(key)),
            Self::NotCopied { key, shards } => write!(
                f,
                "{}: {shards} shards of this node are not in the durable tier",
                step(key)
            ),
            Self::Unpublished { key } => {
                write!(f, "{}: its manifest is not in the durable tier", step(key))
            }
        }
    }
}

/// Of a drain: anybody who trains here could end the node.
pub fn not_an_operator() -> Refusal {
    let detail = "expected an operator, got a connection that is not by the operator's socket (admin.socket): drain there";
    Refusal::new(RefusalCode::WrongUser, detail)
}

impl Context {
    /// An operator ends this node in order. When it ends, what becomes of its place and how far it is are the driver's.
    pub(crate) fn drain(&mut self, id: RequestId, order: DrainOrder) -> Result<(), Refusal> {
        if self.viewer(id.conn) != Viewer::Operator {
            return Err(not_an_operator());
        }
        self.begin_drain();
        self.out.push(Output::Drain { id, order });
        Ok(())
    }

    /// See the module. In order: what is at risk first.
    pub(crate) fn unfinished(&self) -> Vec<Unfinished> {
        let checkpoints = self.checkpoints.values();
        let of_checkpoints = checkpoints.filter_map(|c| self.unfinished_of(c));
        self.filling_here()
            .into_iter()
            .chain(of_checkpoints)
            .collect()
    }

    pub(crate) fn awaits_copies(&self) -> bool {
        let mut checkpoints = self.checkpoints.values();
        checkpoints.any(|checkpoint| self.is_due(checkpoint))
    }

    fn filling_here(&self) -> Vec<Unfinished> {
        let mut filling: BTreeMap<&Namespace, BTreeSet<SlotId>> = BTreeMap::new();
        for (id, slot) in &self.slots {
            if matches!(slot.used_for, SlotUse::Held(_)) {
                filling.entry(&slot.namespace).or_default().insert(*id);
            }
        }
        let filling = filling.into_iter();
        let filling = filling.map(|(namespace, slots)| Unfinished::Filling {
            namespace: namespace.clone(),
            slots,
        });
        filling.collect()
    }

    fn unfinished_of(&self, checkpoint: &Checkpoint) -> Option<Unfinished> {
        let key = checkpoint.key.clone();
        let Some(manifest) = &checkpoint.manifest else {
            return self.uncommitted(checkpoint);
        };
        if self.is_due(checkpoint) {
            return self.owed_by_this(checkpoint, manifest);
        }
        let is_coded = checkpoint.state >= self.safe_state();
        // A coding node stays too: without it the others would wait until it is given up, and copy what is not coded. And so
        // does a home node that holds nothing of it: without home nodes nobody writes the manifest.
        let is_mine = self.stakeholders(manifest).contains(self.me());
        let is_owed = self.wants_durable(checkpoint)
            && checkpoint.owing.given_up.is_none()
            && checkpoint.state < CheckpointState::Durable;
        let can_be = || self.gone_nodes(manifest).is_empty();
        let counts = is_owed || self.is_newest(checkpoint) && can_be();
        let waits = !planted!("uncoded_steps_left")
            && !is_coded
            && is_mine
            && counts
            && checkpoint.no_room.is_none();
        waits.then_some(Unfinished::Uncoded { key })
    }

    fn uncommitted(&self, checkpoint: &Checkpoint) -> Option<Unfinished> {
        // What nobody has said anything new of will not be committed within the time that is left either.
        let is_fresh = self.now.since(checkpoint.news_at) < limits::LEAVING_NEWS_MS;
        let is_home = checkpoint.homes.contains(self.me());
        let collects =
            is_home && (!checkpoint.announced.is_empty() || checkpoint.sealing == Sealing::Running);
        let is_mine = collects || !checkpoint.shards.is_empty();
        let key = checkpoint.key.clone();
        (is_fresh && is_mine && self.is_newest(checkpoint))
            .then_some(Unfinished::Uncommitted { key })
    }

    /// What this node has to do for a checkpoint that is on its way to the durable tier.
    fn owed_by_this(
        &self,
        checkpoint: &Checkpoint,
        manifest: &ManifestBytes,
    ) -> Option<Unfinished> {
        let key = checkpoint.key.clone();
        let shards = checkpoint.shards.values();
        let shards = shards.filter(|shard| shard.upload != Upload::Done).count();
        if shards > 0 {
            return Some(Unfinished::NotCopied { key, shards });
        }
        let mut entries = manifest.manifest().shards.iter();
        let is_stuck = entries.any(|shard| {
            !checkpoint.shards_durable.contains(&shard.rank) && self.cannot_come(checkpoint, shard)
        });
        let mut homes = checkpoint.homes.iter();
        // Any home node may be the last that is up; where none is, the step does not become durable, and that is said.
        let is_home = checkpoint.homes.contains(self.me()) && !is_stuck;
        let nobody = !checkpoint.shards.is_empty() && !homes.any(|home| self.is_up(home));
        (is_home || nobody).then_some(Unfinished::Unpublished { key })
    }

    fn is_newest(&self, checkpoint: &Checkpoint) -> bool {
        let mut others = self.checkpoints.values();
        !others.any(|other| {
            other.key.namespace == checkpoint.key.namespace
                && other.key > checkpoint.key
                && other.manifest.is_some()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use storaged_codec::digest;
    use storaged_wire::local::DurableWish;
    use storaged_wire::peer::{Fence, PeerMessage, SealedShard};
    use storaged_wire::{Rank, RunId, Step, WorldSize};

    use super::*;
    use crate::api::{DurablePolicy, Input, Now};
    use crate::node::Node;
    use crate::testkit::{hear, hear_from_all, job, last_with_tier, manifest, name, owner};

    fn committed(step: u64, durable: DurablePolicy) -> (Node, Arc<ManifestBytes>) {
        let sealed = manifest(step, &["a", "b"], &["d", "c"], 4096, digest(b"shard"));
        let sealed = Arc::new(sealed.seal().expect("a sound manifest"));
        let mut node = last_with_tier(&["a", "b", "d", "c"], 2, 2, durable);
        let told = PeerMessage::Committed {
            manifest: sealed.bytes().to_vec().into(),
            durable: DurableWish::Policy,
        };
        hear_from_all(&mut node, 1, &told);
        (node, sealed)
    }

    fn is_home(node: &Node, sealed: &ManifestBytes) -> bool {
        let key = CheckpointKey::of(sealed.manifest());
        let cx = node.context();
        cx.homes_of(&key).contains(cx.me())
    }

    #[test]
    fn a_coding_node_stays_until_the_step_is_coded_or_nodes_are_gone() {
        for is_gone in [false, true] {
            let (mut node, sealed) = committed(1, DurablePolicy::Absent);
            let key = CheckpointKey::of(sealed.manifest());
            assert_eq!(node.unfinished(), [Unfinished::Uncoded { key }]);
            if is_gone {
                node.handle(Now(2), Input::PeerDown { node: name("a") });
                node.handle(Now(60_000), Input::Tick);
            } else {
                let (manifest, bears) = (sealed.name(), 1);
                let protected = PeerMessage::Protected { manifest, bears };
                hear_from_all(&mut node, 2, &protected);
            }
            assert_eq!(node.unfinished(), []);
        }
    }

    #[test]
    fn a_home_node_stays_until_the_manifest_is_in_the_tier() {
        let mut seen = BTreeSet::new();
        for step in 1..30 {
            let (mut node, sealed) = committed(step, DurablePolicy::Every(1));
            let (name, bears) = (sealed.name(), 1);
            let protected = PeerMessage::Protected {
                manifest: name,
                bears,
            };
            hear_from_all(&mut node, 2, &protected);
            node.handle(Now(2_000), Input::Tick);
            let key = CheckpointKey::of(sealed.manifest());
            let expected =
                Vec::from_iter(is_home(&node, &sealed).then_some(Unfinished::Unpublished { key }));
            assert_eq!(node.unfinished(), expected, "step {step}");
            seen.insert(expected.len());
            let durable = PeerMessage::Durable { manifest: name };
            hear_from_all(&mut node, 3_000, &durable);
            assert_eq!(node.unfinished(), [], "step {step}");
        }
        assert_eq!(seen.len(), 2, "home nodes and others");
    }

    fn key(step: u64) -> CheckpointKey {
        CheckpointKey {
            namespace: job(),
            run: RunId::new(1),
            step: Step::new(step),
        }
    }

    /// The first step of which these are the home nodes.
    fn step_at_home(node: &Node, homes: &[&str]) -> u64 {
        let is_there = |step: &u64| {
            let found = node.context().homes_of(&key(*step));
            found.iter().all(|home| homes.contains(&home.as_str()))
        };
        (1..1_000).find(is_there).expect("some step is")
    }

    #[test]
    fn a_home_node_without_blocks_stays_for_what_it_collects_and_commits() {
        let members = ["a", "b", "c", "d", "e"];
        let mut node = last_with_tier(&members, 2, 1, DurablePolicy::Every(1));
        let fence = Fence {
            namespace: job(),
            owner: owner(),
            run: RunId::new(1),
            promised: RunId::new(1),
        };
        hear(&mut node, 1, "a", PeerMessage::Fences(vec![fence]));
        let step = step_at_home(&node, &["d", "e"]);
        let sealed = PeerMessage::ShardsSealed {
            key: key(step),
            owner: owner(),
            world_size: WorldSize::new(2).expect("two"),
            digesting: 0,
            shards: vec![SealedShard {
                rank: Rank::new(0),
                length: 5,
                root: digest(b"x"),
            }],
        };
        hear(&mut node, 10, "a", sealed);
        let key = key(step);
        let expected = Unfinished::Uncommitted { key: key.clone() };
        assert_eq!(node.unfinished(), [expected]);
        let sealed = manifest(step, &["a", "b"], &["c"], 4096, digest(b"shard"));
        let sealed = sealed.seal().expect("a sound manifest");
        let committed = PeerMessage::Committed {
            manifest: sealed.bytes().to_vec().into(),
            durable: DurableWish::Policy,
        };
        hear(&mut node, 20, "d", committed);
        assert_eq!(node.unfinished(), [Unfinished::Uncoded { key }]);
    }
}
