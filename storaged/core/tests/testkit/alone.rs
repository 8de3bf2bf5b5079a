//! A node that is driven alone: what it wants is not done but looked at.

use storaged_core::{
    ConnId, FoundSuccessions, Input, Node, Note, Now, Output, Preparation, QueryId, RequestId,
    Setup,
};
use storaged_wire::local::{Reply, Request};
use storaged_wire::peer::PeerMessage;
use storaged_wire::{KeptNamespace, KeptRecord, NodeName, SlotId};

pub struct Alone {
    pub node: Node,
    pub now: u64,
    asked: u64,
}

/// What a node wants after one input.
#[derive(Debug)]
pub struct Wanted(Vec<Output>);

impl Alone {
    pub fn new(setup: Setup) -> Self {
        Self {
            node: Node::new(setup).expect("groups"),
            now: 0,
            asked: 0,
        }
    }

    /// One input, and what it leads to at once.
    pub fn handle(&mut self, input: Input) -> Wanted {
        Wanted(self.node.handle(Now(self.now), input))
    }

    pub fn ask(&mut self, conn: ConnId, request: Request) -> Wanted {
        let index = self.asked;
        self.asked += 1;
        let id = RequestId { conn, index };
        self.handle(Input::Request { id, request })
    }

    /// Says hello; the tier knows of no change of the job's token.
    pub fn greet(&mut self, conn: ConnId, hello: Request) -> Option<Reply> {
        let wanted = self.ask(conn, hello);
        let asked = wanted.0.iter().find_map(|output| match output {
            Output::FindSuccessions { query, .. } => Some(*query),
            _ => None,
        });
        let Some(query) = asked else {
            return wanted.reply();
        };
        let outcome = Ok(FoundSuccessions::default());
        let found = Input::SuccessionsFound { query, outcome };
        self.handle(found).reply()
    }

    pub fn hear(&mut self, from: &NodeName, message: PeerMessage) -> Wanted {
        let from = from.clone();
        self.handle(Input::Message { from, message })
    }
}

impl Wanted {
    /// Messages to other nodes.
    pub fn sent(&self) -> impl Iterator<Item = (&NodeName, &PeerMessage)> {
        self.0.iter().filter_map(|output| match output {
            Output::Send { to, message } => Some((to, message)),
            _ => None,
        })
    }

    /// What is to be prepared; what came of it may lead to more.
    pub fn take_preparations(&mut self) -> Vec<Preparation> {
        let is_one = |output: &mut Output| matches!(output, Output::Prepare(_));
        let taken = self
            .0
            .extract_if(.., is_one)
            .filter_map(|output| match output {
                Output::Prepare(work) => Some(work),
                _ => None,
            });
        taken.collect()
    }

    pub fn and(&mut self, more: Self) {
        self.0.extend(more.0);
    }

    pub fn reply(&self) -> Option<Reply> {
        self.0.iter().find_map(|output| match output {
            Output::Reply { reply, .. } => Some(reply.clone()),
            _ => None,
        })
    }

    pub fn notes(&self) -> impl Iterator<Item = &Note> {
        self.0.iter().filter_map(|output| match output {
            Output::Note(note) => Some(note),
            _ => None,
        })
    }

    /// What is to be kept of a job, as it is said last.
    pub fn kept_job(&self) -> Option<&KeptNamespace> {
        self.0.iter().rev().find_map(|output| match output {
            Output::Keep(KeptRecord::Namespace(job)) => Some(&**job),
            _ => None,
        })
    }

    /// The tier is to be listed.
    pub fn listing(&self) -> Option<QueryId> {
        self.0.iter().find_map(|output| match output {
            Output::ListDurable { query, .. } => Some(*query),
            _ => None,
        })
    }

    /// A slot is to be made.
    pub fn created(&self) -> Option<SlotId> {
        self.0.iter().find_map(|output| match output {
            Output::CreateSlot { slot, .. } => Some(*slot),
            _ => None,
        })
    }

    /// A shard is to be read from the tier.
    pub fn fetched(&self) -> Option<SlotId> {
        self.0.iter().find_map(|output| match output {
            Output::Fetch { slot, .. } => Some(*slot),
            _ => None,
        })
    }
}
