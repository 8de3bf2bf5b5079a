//! A node that says anything to anybody at any time, beside what its decisions say: forged and replayed, of right and wrong
//! checkpoints, with numbers up to their limits. It holds no rank, and fails no more than m-1 others fail with it: what it says
//! must cost nobody a checkpoint, a job or memory.
//!
//! It says every kind of message (`kinds`, `lies`), of what it knows and of what is made up (`known`). For some seconds it keeps to a few
//! kinds: what one of them sets up the next one uses; and of what its own decisions say it swallows some.

mod blocks;
mod kinds;
mod known;
mod lies;

use std::collections::{BTreeMap, VecDeque};

use storaged_codec::Digest;
use storaged_core::{Audit, Note, Shown, Viewer};
use storaged_wire::CheckpointState;
use storaged_wire::peer::{CheckpointKey, PeerMessage};

use self::kinds::kind_of;
pub use self::kinds::{KINDS, Kind};
use self::known::{Address, Heard, remember};
use super::world::{Scripted, World};
use crate::testkit::{Event, namespace};

/// It says something new about so often, in milliseconds.
const SPEAKS_EVERY_MS: u64 = 60;
/// So long it keeps to a few kinds, and up to so much longer.
const MOOD_MS: u64 = 3_000;
const MOOD_MORE_MS: u64 = 20_000;
/// After one lie in so many what others hold is looked at.
const LOOKED_AT_ONE_IN: u64 = 32;
/// One lie in so many it says to all.
const SAID_TO_ALL_ONE_IN: u64 = 8;
/// Kinds that it keeps to, at most.
const FAVOURITES_MAX: u64 = 6;
/// Kinds that its own decisions do not get to say, at most.
const SWALLOWED_MAX: u64 = 12;

/// Whether it says what cannot be, too. After a few of these nobody believes it any more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Manner {
    #[default]
    Reckless,
    /// It is believed to the end.
    Careful,
}

/// What became of what it said.
#[derive(Debug, Default)]
pub struct Byzantine {
    pub said: u64,
    /// How often it said something of each kind.
    pub said_of: BTreeMap<Kind, u64>,
    /// How often that was an answer, or of a session that there is.
    pub answered: u64,
    /// How often honest nodes named it.
    pub named: u64,
    /// When honest nodes knew a step to be protected that they had not known before; where the one parity of some lane is its own
    /// to make, to be committed.
    pub safe_at: Vec<u64>,
    newest_committed: Option<CheckpointKey>,
    /// The last messages of each kind, to it and from it.
    heard: BTreeMap<Kind, VecDeque<Heard>>,
    /// Parcels that it has told of.
    served: BTreeMap<Digest, Vec<u8>>,
    /// What it says now; all kinds where there are none.
    favourites: Vec<Kind>,
    /// What its own decisions do not get to say now.
    swallowed: Vec<Kind>,
    mood_until: u64,
    manner: Manner,
    is_speaking: bool,
    is_silent: bool,
}

impl World {
    fn byzantine(&self) -> Option<usize> {
        self.scene.limits.byzantine
    }

    /// Nodes that say what is so.
    pub fn honest(&self) -> Vec<usize> {
        let all = 0..self.scene.limits.nodes;
        all.filter(|node| Some(*node) != self.byzantine()).collect()
    }

    /// It speaks, and will again.
    pub(super) fn byzantine_speaks(&mut self) {
        let Some(by) = self.byzantine().filter(|_| !self.scene.byzantine.is_silent) else {
            return;
        };
        let wait = 1 + self.random(2 * SPEAKS_EVERY_MS);
        self.after(wait, Event::Scene(Scripted::Lie));
        let honest = self.honest();
        if self.random(LOOKED_AT_ONE_IN) == 0 {
            self.honest_blocks_are_right();
        }
        let to = self.one_of(&honest);
        if !self.is_up(by) || !self.is_linked(by, to) {
            return;
        }
        let lies = self.lies(Address { by, to });
        // What all members of a session hear begins it.
        let hearers = match self.random(SAID_TO_ALL_ONE_IN) {
            0 => honest,
            _ => vec![to],
        };
        for message in lies {
            for to in &hearers {
                self.byzantine_says(Address { by, to: *to }, message.clone());
            }
        }
    }

    fn byzantine_says(&mut self, at: Address, message: PeerMessage) {
        let byzantine = &mut self.scene.byzantine;
        byzantine.said += 1;
        *byzantine.said_of.entry(kind_of(&message)).or_default() += 1;
        byzantine.is_speaking = true;
        self.post(at.by, at.to, message);
        self.scene.byzantine.is_speaking = false;
    }

    /// Whether others never hear what its own decisions say.
    pub(super) fn byzantine_swallows(&self, from: usize, message: &PeerMessage) -> bool {
        let byzantine = &self.scene.byzantine;
        let is_its_own = self.byzantine() == Some(from) && !byzantine.is_speaking;
        is_its_own && byzantine.swallowed.contains(&kind_of(message))
    }

    fn lies(&mut self, at: Address) -> Vec<PeerMessage> {
        if self.scene.byzantine.mood_until == 0 {
            self.scene.byzantine.manner = self.one_of(&[Manner::Reckless, Manner::Careful]);
        }
        if self.now >= self.scene.byzantine.mood_until {
            self.byzantine_changes_its_mood();
        }
        match self.random(40) {
            0 => vec![self.lies_of_many_jobs(at)],
            1 | 2 => self.lies_of_a_whim(at),
            3..=6 => self.lies_of_a_forged_step(at),
            7 | 8 => self.lies_of_an_undone_session(at),
            9..=12 => self.says_again(),
            _ => {
                let favourites = self.scene.byzantine.favourites.clone();
                let kind = match favourites.is_empty().then_some(KINDS) {
                    Some(all) => self.one_of(all),
                    None => self.one_of(&favourites),
                };
                self.lie_of_kind(at, kind).into_iter().collect()
            }
        }
    }

    /// As often as not it says everything.
    fn byzantine_changes_its_mood(&mut self) {
        let count = match self.random(2) {
            0 => 0,
            _ => 1 + self.random(FAVOURITES_MAX),
        };
        self.scene.byzantine.favourites = (0..count).map(|_| self.one_of(KINDS)).collect();
        let swallowed = match self.random(4) {
            0 => 1 + self.random(SWALLOWED_MAX),
            _ => 0,
        };
        self.scene.byzantine.swallowed = (0..swallowed).map(|_| self.one_of(KINDS)).collect();
        self.scene.byzantine.mood_until = self.now + MOOD_MS + self.random(MOOD_MORE_MS);
    }

    /// Something that it was told, or has said before.
    fn says_again(&mut self) -> Vec<PeerMessage> {
        let kinds: Vec<Kind> = self.scene.byzantine.heard.keys().copied().collect();
        if kinds.is_empty() {
            return Vec::new();
        }
        let kind = self.one_of(&kinds);
        let heard = self.heard(kind, |_| true);
        heard.into_iter().map(|it| it.message).collect()
    }

    /// What it hears it may say again, and what it has told of it sends.
    pub(super) fn passes_byzantine(&mut self, from: usize, to: usize, message: &PeerMessage) {
        let Some(by) = self
            .byzantine()
            .filter(|by| [from, to].contains(by) && from != to)
        else {
            return;
        };
        let heard = Heard {
            from,
            message: message.clone(),
        };
        let all = self.scene.byzantine.heard.entry(kind_of(message));
        remember(all.or_default(), heard);
        if let PeerMessage::ParcelQuery(place) = message
            && to == by
        {
            let at = Address { by, to: from };
            self.sends_its_parcel(at, *place);
        }
    }

    /// What honest nodes say is so, is.
    pub(super) fn honest_states_are_true(&mut self, node: usize, note: &Note) {
        if self.byzantine().is_none_or(|by| by == node) {
            return;
        }
        let Note::State { key, state } = note else {
            return;
        };
        if matches!(state, CheckpointState::Protected | CheckpointState::Durable) {
            self.scene.job.was_sealed_whole(key);
        }
        if *state == CheckpointState::Durable {
            assert!(
                self.tier.published.contains_key(key),
                "n{node} takes {key:?} for durable at {} ms, and it is not",
                self.now
            );
        }
        if self.scene.limits.m == 1 {
            let is_new = self.scene.byzantine.newest_committed.as_ref() < Some(key);
            if is_new && self.scene.job.is_sealed_whole(key) {
                self.scene.byzantine.newest_committed = Some(key.clone());
                self.scene.byzantine.safe_at.push(self.now);
            }
        } else if *state == CheckpointState::Protected {
            let newest = self.scene.newest.get(state);
            if newest < Some(key) {
                self.scene.byzantine.safe_at.push(self.now);
            }
        }
    }

    /// It says no more, and the job ends: what is left of both after a while.
    pub fn byzantine_ends(&mut self) {
        let every = self.scene.byzantine.safe_at.len();
        let last = self.scene.byzantine.safe_at.last().copied();
        assert!(
            every > 20 && last.is_some_and(|at| at + 60_000 > self.now),
            "saves go on: {every} were safe, the last at {last:?} of {}",
            self.now
        );
        self.scene.byzantine.is_silent = true;
        self.scene.byzantine.swallowed.clear();
        self.job_ends();
        if let Some(by) = self.byzantine() {
            self.crash(by);
        }
        self.run_for(100_000);
        for node in self.honest() {
            self.made_up_commits_are_forgotten(node);
            let process = self.processes[node].as_ref().expect("it is up");
            let Audit {
                held,
                creating,
                restoring,
                unowned_bytes,
                sessions,
                requests,
                parts,
                ..
            } = process.node.audit();
            let left = [held, creating, restoring, sessions, requests, parts];
            assert_eq!((left, unowned_bytes), ([0; 6], 0), "left on n{node}");
            let jobs = process.node.ledger().jobs;
            assert!(jobs < 4_000, "{jobs} jobs are remembered on n{node}");
            let status = process.node.status_json(&Viewer::Operator).len();
            assert!(status < 100_000, "the status of n{node} has {status} bytes");
        }
    }

    /// A commit of which nobody has sealed anything stays nowhere: it would be coded in vain, and take the place of the true one of its step.
    fn made_up_commits_are_forgotten(&self, node: usize) {
        let process = self.processes[node].as_ref().expect("it is up");
        let is_bare = |it: &Shown| {
            let has_blocks = !(it.shards.is_empty() && it.parity.is_empty());
            it.state == CheckpointState::Committed && it.manifest.is_some() && !has_blocks
        };
        let is_true = |key: &CheckpointKey| {
            key.namespace == namespace() && self.scene.job.is_sealed_whole(key)
        };
        let shown = process.node.shown().into_iter();
        let left: Vec<Shown> = shown
            .filter(|it| is_bare(it) && !is_true(&it.key))
            .collect();
        assert!(
            left.is_empty(),
            "made-up commits are left on n{node}: {left:?}"
        );
    }
}
