//! Proposals that come before the manifest they are about. A home node tells everyone of a commit at once, and the first
//! who hears of it may lead a session at once; its proposal then overtakes the manifest on its way to another member.
//! That member waits a moment: to refuse would cost the lane a whole retry.

use storaged_wire::NodeName;
use storaged_wire::peer::{PeerMessage, SessionFault, SessionRecord};

use crate::io::Now;
use crate::limits;
use crate::node::Node;

/// A proposal that waits for its manifest.
#[derive(Debug, Clone)]
pub(crate) struct EarlyProposal {
    leader: NodeName,
    record: SessionRecord,
    until: Now,
}

impl Node {
    /// Keeps a proposal for later; says whether there was room.
    pub(super) fn keep_early(&mut self, leader: &NodeName, record: &SessionRecord) -> bool {
        let of_leader = self.early.iter().filter(|early| early.leader == *leader);
        if of_leader.count() >= limits::SESSIONS_LED_MAX {
            return false;
        }
        self.early.push(EarlyProposal {
            leader: leader.clone(),
            record: record.clone(),
            until: self.now.plus(limits::EARLY_PROPOSAL_MS),
        });
        true
    }

    /// Takes up proposals whose manifest has come.
    pub(crate) fn take_up_early(&mut self) {
        let known =
            |node: &Self, early: &EarlyProposal| node.by_name.contains_key(&early.record.manifest);
        while let Some(at) = (0..self.early.len()).find(|at| known(self, &self.early[*at])) {
            let EarlyProposal { leader, record, .. } = self.early.remove(at);
            self.proposed(&leader, record);
        }
    }

    /// Refuses those that have waited long enough.
    pub(crate) fn expire_early(&mut self) {
        let now = self.now;
        let (late, waiting) = std::mem::take(&mut self.early)
            .into_iter()
            .partition(|early: &EarlyProposal| early.until <= now);
        self.early = waiting;
        for EarlyProposal { leader, record, .. } in late {
            let session = record.session;
            let fault = SessionFault::NoManifest;
            self.send(&leader, PeerMessage::Failed { session, fault });
        }
    }

    /// Drops those of a leader that has ended them or is gone.
    pub(super) fn forget_early(&mut self, over: impl Fn(&NodeName, &SessionRecord) -> bool) {
        self.early
            .retain(|early| !over(&early.leader, &early.record));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use storaged_codec::{ChunkSize, Digest, Geometry, digest};
    use storaged_wire::local::DurableWish;
    use storaged_wire::manifest::GroupEntry;
    use storaged_wire::peer::{Lane, SessionKind};
    use storaged_wire::{
        Generation, Manifest, ManifestBytes, Namespace, Owner, Rank, RunId, SessionId, ShardEntry,
        Step, WorldSize,
    };

    use super::*;
    use crate::io::{Input, Output};
    use crate::node::{DurableForm, DurablePolicy, Setup};
    use crate::place::Member;

    fn name(name: &str) -> NodeName {
        NodeName::new(name).expect("a name")
    }

    /// The shard of `a`, with parity on `b` and `c`.
    fn manifest() -> Arc<ManifestBytes> {
        let manifest = Manifest {
            version: Manifest::VERSION,
            namespace: Namespace::new("job").expect("a name"),
            owner: Owner::of_token(b"t"),
            run: RunId::new(1),
            step: Step::new(1),
            world_size: WorldSize::new(1).expect("one rank"),
            epoch: 1,
            geometry: Geometry::new(1, 2).expect("a geometry"),
            chunk: ChunkSize::new(65_536).expect("a size"),
            shards: vec![ShardEntry {
                rank: Rank::new(0),
                node: name("a"),
                length: 5,
                root: digest(b"hello"),
            }],
            groups: vec![GroupEntry {
                data: vec![name("a")],
                coding: vec![name("b"), name("c")],
            }],
            schema: Vec::new().into(),
            torch_metadata: Vec::new().into(),
        };
        Arc::new(manifest.seal().expect("a sound manifest"))
    }

    /// `c`, with links to the others.
    fn member() -> Node {
        let members = ["a", "b", "c"].map(|node| Member {
            name: name(node),
            failure_domain: node.into(),
        });
        let mut node = Node::new(Setup {
            name: name("c"),
            generation: Generation::new(1),
            members: members.into(),
            geometry: Geometry::new(1, 2).ok(),
            chunk: ChunkSize::new(65_536).expect("a size"),
            slots_per_rank: 2,
            budget: 64 << 20,
            link_rates: crate::encode::LinkRates::default(),
            durable: DurablePolicy::OnRequest,
            durable_form: DurableForm::Full,
        })
        .expect("groups");
        for peer in ["a", "b"] {
            let generation = Generation::new(1);
            let up = Input::PeerUp {
                node: name(peer),
                generation,
            };
            node.handle(Now(0), up);
        }
        node
    }

    fn says(node: &mut Node, at: u64, from: &str, message: PeerMessage) -> Vec<PeerMessage> {
        let from = name(from);
        sent(node.handle(Now(at), Input::Message { from, message }))
    }

    fn sent(outputs: Vec<Output>) -> Vec<PeerMessage> {
        let sent = outputs.into_iter().filter_map(|output| match output {
            Output::Send { message, .. } => Some(message),
            _ => None,
        });
        sent.collect()
    }

    fn proposal(session: u64, manifest: Digest) -> PeerMessage {
        let lane = Lane { group: 0, index: 0 };
        PeerMessage::Propose(SessionRecord {
            session: SessionId::new(session),
            manifest,
            kind: SessionKind::Encode { lane, basis: None },
        })
    }

    fn refused(messages: &[PeerMessage]) -> usize {
        let refusal = |message: &&PeerMessage| {
            matches!(
                message,
                PeerMessage::Failed {
                    fault: SessionFault::NoManifest,
                    ..
                }
            )
        };
        messages.iter().filter(refusal).count()
    }

    #[test]
    fn a_proposal_before_its_manifest_is_taken_up_when_that_comes() {
        let (mut node, manifest) = (member(), manifest());
        assert_eq!(says(&mut node, 1, "b", proposal(7, manifest.name())), []);
        let committed = PeerMessage::Committed {
            manifest: manifest.bytes().to_vec().into(),
            durable: DurableWish::Policy,
        };
        let answers = says(&mut node, 2, "a", committed);
        let ready = |message: &PeerMessage| matches!(message, PeerMessage::Ready { session, .. } if *session == SessionId::new(7));
        assert!(answers.iter().any(ready), "{answers:?}");
    }

    #[test]
    fn a_manifest_that_never_comes_is_told_of_in_time_and_only_so_many_wait() {
        let mut node = member();
        let unknown = digest(b"no such manifest");
        let many = limits::SESSIONS_LED_MAX as u64 + 1;
        let at_once =
            (0..many).flat_map(|session| says(&mut node, 1, "b", proposal(session, unknown)));
        assert_eq!(refused(&at_once.collect::<Vec<_>>()), 1);
        let close = PeerMessage::Close {
            session: SessionId::new(0),
            kept: false,
        };
        says(&mut node, 2, "b", close);
        let late = sent(node.handle(Now(limits::EARLY_PROPOSAL_MS + 2_000), Input::Tick));
        assert_eq!(refused(&late), limits::SESSIONS_LED_MAX - 1);
        assert!(node.early.is_empty());
    }
}
