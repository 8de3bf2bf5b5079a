//! What the liar has to lie with: what its own node shows, what it hears of others and is asked by them, and what is made up.
//! A lie about what nobody knows is ignored; one about a step, a session or a question that there is, is not.

use std::collections::VecDeque;

use storaged_codec::{Digest, digest};
use storaged_wire::local::DurableWish;
use storaged_wire::peer::{CheckpointKey, Lane, LinkTally, MemberTally, PeerMessage, SessionFault};
use storaged_wire::shape::{EncodeShape, StripeMap};
use storaged_wire::{
    CheckpointState, EnclosuresHeld, Manifest, ManifestBytes, Namespace, NodeName, Rank, RunId,
    SessionId, Step, WorldSize, decode,
};

use super::super::world::World;
use super::Manner;
use super::kinds::Kind;
use crate::testkit::{name, namespace};

/// Messages of each kind that it remembers of each node.
const HEARD_MAX: usize = 8;
/// Jobs that it makes up.
const JOBS: u64 = 100_000;

/// A message, and who has said it to whom.
#[derive(Debug, Clone)]
pub(super) struct Heard {
    pub from: usize,
    pub message: PeerMessage,
}

/// Who lies, and to whom.
#[derive(Debug, Clone, Copy)]
pub(super) struct Address {
    pub by: usize,
    pub to: usize,
}

/// The last of a kind from each node: were they counted together, its own would push out what it is asked.
pub(super) fn remember(all: &mut VecDeque<Heard>, heard: Heard) {
    let is_of_same = |it: &Heard| it.from == heard.from;
    if all.iter().filter(|it| is_of_same(it)).count() >= HEARD_MAX
        && let Some(first) = all.iter().position(is_of_same)
    {
        all.remove(first);
    }
    all.push_back(heard);
}

/// The number by which a question is answered.
fn query_of(message: &PeerMessage) -> Option<u64> {
    match message {
        PeerMessage::PromiseRun { query, .. }
        | PeerMessage::RaiseFence { query, .. }
        | PeerMessage::RunQuery { query, .. }
        | PeerMessage::HoldingsQuery { query, .. }
        | PeerMessage::ManifestQuery { query, .. }
        | PeerMessage::VerifyQuery { query, .. }
        | PeerMessage::CheckOrder { query, .. } => Some(*query),
        PeerMessage::Drop(order) => Some(order.query),
        PeerMessage::Pins(query, _) => *query,
        _ => None,
    }
}

impl World {
    /// One of so many.
    pub(super) fn one_of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.random(all.len() as u64) as usize].clone()
    }

    /// Something of a kind that was said lately, and of which this holds.
    pub(super) fn heard(&mut self, kind: Kind, which: impl Fn(&Heard) -> bool) -> Option<Heard> {
        let all = self.scene.byzantine.heard.get(&kind)?;
        let some: Vec<Heard> = all.iter().filter(|it| which(it)).cloned().collect();
        (!some.is_empty()).then(|| self.one_of(&some))
    }

    /// The number of a question that the node has asked which hears the answer, or of none.
    pub(super) fn some_query(&mut self, at: Address, kind: Kind) -> u64 {
        let asked = |it: &Heard| it.from == at.to && query_of(&it.message).is_some();
        let asked = self.heard(kind, asked).filter(|_| self.random(4) > 0);
        match asked.and_then(|it| query_of(&it.message)) {
            Some(query) => {
                self.scene.byzantine.answered += 1;
                query
            }
            None if self.random(8) == 0 => self.limit_number(),
            None => self.random(200),
        }
    }

    /// A session that this node leads, or one that it has never heard of.
    pub(super) fn some_session(&mut self, leader: usize) -> SessionId {
        let led = self.heard(Kind::Propose, |it| it.from == leader);
        if let Some(Heard {
            message: PeerMessage::Propose(record),
            ..
        }) = led.filter(|_| self.random(4) > 0)
        {
            self.scene.byzantine.answered += 1;
            return record.session;
        }
        match self.random(4) {
            0 => SessionId::new(self.limit_number()),
            _ => SessionId::new(self.random(300)),
        }
    }

    pub(super) fn is_careful(&self) -> bool {
        self.scene.byzantine.manner == Manner::Careful
    }

    /// Numbers above the highest that runs have are nobody's.
    pub(super) fn limit_number(&mut self) -> u64 {
        let choices = if self.is_careful() { 4 } else { 7 };
        match choices - 1 - self.random(choices) {
            6 => u64::MAX - 1,
            5 => u64::MAX,
            4 => 1 << 48,
            3 => (1 << 48) - 64,
            2 => u64::from(u32::MAX),
            1 => 0,
            _ => self.random(1_000),
        }
    }

    /// A checkpoint that is there, as it knows, or one that is not.
    pub(super) fn some_key(&mut self, by: usize) -> CheckpointKey {
        let shown = self.ram(by).node.shown();
        let real: Vec<CheckpointKey> = shown.into_iter().map(|it| it.key).collect();
        if !real.is_empty() && self.random(4) > 0 {
            return self.one_of(&real);
        }
        let ahead = self.random(20);
        let newest = real.last().cloned();
        match newest.filter(|_| ahead.is_multiple_of(2)) {
            Some(newest) => CheckpointKey {
                step: Step::new(newest.step.get().saturating_add(ahead)),
                ..newest
            },
            None => CheckpointKey {
                namespace: self.some_job(),
                run: RunId::new(self.limit_number()),
                step: Step::new(self.limit_number()),
            },
        }
    }

    pub(super) fn some_manifest_name(&mut self, by: usize) -> Digest {
        let shown = self.ram(by).node.shown();
        let names: Vec<Digest> = shown.into_iter().filter_map(|it| it.manifest).collect();
        if names.is_empty() || self.random(16) == 0 {
            return self.some_digest();
        }
        self.one_of(&names)
    }

    /// Of nothing that there is.
    pub(super) fn some_digest(&mut self) -> Digest {
        digest(&self.random(1 << 20).to_le_bytes())
    }

    /// A manifest that is one, of the parcels that its own node has read.
    pub(super) fn some_true_manifest(&mut self, by: usize) -> Option<Manifest> {
        let told = self.heard(Kind::Parcel, |_| true)?;
        let PeerMessage::Parcel { parcel, .. } = told.message else {
            return None;
        };
        let bytes = self.ram(by).node.parcel(parcel)?;
        match decode::<PeerMessage>("message", &bytes).ok()? {
            PeerMessage::Committed { manifest, .. } => {
                let sealed = ManifestBytes::parse(manifest).ok()?;
                Some(sealed.manifest().clone())
            }
            _ => None,
        }
    }

    /// The job, or one that is made up.
    pub(super) fn some_job(&mut self) -> Namespace {
        match self.random(4) {
            0 => self.made_up_job(),
            _ => namespace(),
        }
    }

    pub(super) fn made_up_job(&mut self) -> Namespace {
        let job = self.random(JOBS);
        Namespace::new(format!("made-up-{job}")).expect("a name")
    }

    /// A node, or one that there is not.
    pub(super) fn some_node(&mut self) -> NodeName {
        match self.random(self.scene.limits.nodes as u64 + 1) as usize {
            node if node < self.scene.limits.nodes => name(node),
            _ => name(99),
        }
    }

    pub(super) fn some_nodes(&mut self) -> Vec<NodeName> {
        let count = self.random(4);
        (0..count).map(|_| self.some_node()).collect()
    }

    pub(super) fn some_rank(&mut self) -> Rank {
        let choices = if self.is_careful() { 1 } else { 8 };
        match self.random(choices) {
            1 => Rank::new(u32::MAX),
            2 => Rank::new(self.random(9) as u32),
            _ => Rank::new(self.random(u64::from(self.scene.limits.ranks)) as u32),
        }
    }

    /// All ranks, or some.
    pub(super) fn some_ranks(&mut self) -> Vec<Rank> {
        match self.random(3) {
            0 => vec![self.some_rank()],
            _ => (0..self.scene.limits.ranks).map(Rank::new).collect(),
        }
    }

    pub(super) fn some_world(&mut self) -> WorldSize {
        let ranks = match self.random(2) {
            0 if !self.is_careful() => 1 + self.random(9) as u32,
            _ => self.scene.limits.ranks,
        };
        WorldSize::new(ranks).expect("ranks")
    }

    pub(super) fn some_lane(&mut self) -> Lane {
        match self.random(8) {
            0 => Lane {
                group: u32::MAX,
                index: u32::MAX,
            },
            _ => Lane {
                group: self.random(2) as u32,
                index: self.random(2) as u32,
            },
        }
    }

    pub(super) fn some_blocks(&mut self) -> Vec<u32> {
        let all = self.scene.limits.k + self.scene.limits.m + 1;
        let count = self.random(all as u64);
        (0..count).map(|_| self.random(all as u64) as u32).collect()
    }

    pub(super) fn some_state(&mut self) -> CheckpointState {
        self.one_of(&[
            CheckpointState::Staged,
            CheckpointState::Committed,
            CheckpointState::Protected,
            CheckpointState::Durable,
            CheckpointState::Retired,
        ])
    }

    pub(super) fn some_wish(&mut self) -> DurableWish {
        self.one_of(&[
            DurableWish::Policy,
            DurableWish::Required,
            DurableWish::Never,
        ])
    }

    pub(super) fn some_enclosures(&mut self) -> EnclosuresHeld {
        self.one_of(&[EnclosuresHeld::NotAll, EnclosuresHeld::All])
    }

    pub(super) fn some_reason(&mut self) -> String {
        match self.random(4) {
            0 => "x".repeat(5_000),
            _ => "because".to_owned(),
        }
    }

    pub(super) fn some_tally(&mut self) -> MemberTally {
        let links = self.random(3);
        let link = |world: &mut Self| LinkTally {
            node: world.some_node(),
            bytes: world.limit_number(),
            waiting_ms: world.limit_number(),
        };
        MemberTally {
            elapsed_ms: self.limit_number(),
            stripes: self.limit_number(),
            links: (0..links).map(|_| link(self)).collect(),
        }
    }

    pub(super) fn some_stripes(&mut self) -> Option<StripeMap> {
        let (stripes, bytes) = match self.random(4) {
            0 => return None,
            1 => (self.limit_number(), self.random(9)),
            _ => (1 + self.random(9), 2),
        };
        let bits: Vec<u8> = (0..bytes).map(|_| self.random(256) as u8).collect();
        let bits = bits.into();
        Some(StripeMap { stripes, bits })
    }

    pub(super) fn some_shape(&mut self) -> Option<EncodeShape> {
        let order = self.some_blocks();
        match self.random(5) {
            0 => None,
            1 => Some(EncodeShape::Chain { order }),
            2 => {
                let fan_in = self.limit_number() as u32;
                Some(EncodeShape::Tree { fan_in, order })
            }
            3 => Some(EncodeShape::GatherAtSources { roots: order }),
            _ => Some(EncodeShape::GatherAtKeepers),
        }
    }

    pub(super) fn some_fault(&mut self) -> SessionFault {
        let (node, reason) = (self.some_node(), self.some_reason());
        match self.random(10) {
            0 => SessionFault::NoManifest,
            1 => SessionFault::NoBlocks,
            2 => SessionFault::NoBasis,
            3 => SessionFault::NoRoom(reason),
            4 => SessionFault::Corrupt(reason),
            5 => SessionFault::Neighbour { node, reason },
            6 => SessionFault::WrongResult(reason),
            7 => SessionFault::Aborted,
            8 => SessionFault::WrongBytes { node, reason },
            _ => SessionFault::Unproven { node, reason },
        }
    }
}
