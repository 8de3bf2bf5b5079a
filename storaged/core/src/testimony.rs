//! What is made of what peers say. A peer that says what cannot be is named and counted; one that no sound node would say is a
//! proof, and after [`limits::PROOFS_MAX`] of them nothing is believed that it alone says, until its daemon is restarted. Its
//! blocks are still read: their digests prove them. (docs/decisions/2026-11-23-what-peers-may-say.md)

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::peer::PeerMessage;
use storaged_wire::{Namespace, NodeName, RunId};

use crate::api::{FalseStatement, Note, Now, Severity};
use crate::catalog::{Claim, NamespaceTable, Word};
use crate::context::Context;
use crate::limits;

/// What peers have said that cannot be, and how much they have made this node keep.
#[derive(Debug, Default)]
pub(crate) struct Testimony {
    of: BTreeMap<NodeName, PeerRecord>,
}

/// Of one incarnation of a peer.
#[derive(Debug, Default)]
struct PeerRecord {
    said: BTreeMap<&'static str, u64>,
    proofs: u32,
    /// Jobs that this node knows because it alone told of them first.
    jobs: BTreeSet<Namespace>,
    /// Checkpoints that were given up on its word in this stretch of time.
    ended: u32,
    ended_since: Now,
}

impl Testimony {
    /// Another daemon runs there now.
    pub fn forget(&mut self, node: &NodeName) {
        self.of.remove(node);
    }

    /// Whether what it says counts.
    pub fn is_believed(&self, node: &NodeName) -> bool {
        let record = self.of.get(node);
        planted!("liars_stay_believed")
            || record.is_none_or(|record| record.proofs < limits::PROOFS_MAX)
    }

    /// How many of its statements cannot be so.
    pub fn false_statements(&self, node: &NodeName) -> u64 {
        let record = self.of.get(node);
        record.map_or(0, |record| record.said.values().sum())
    }

    fn count(&mut self, node: &NodeName, statement: FalseStatement) {
        let record = self.of.entry(node.clone()).or_default();
        let said = record.said.entry(statement.name()).or_default();
        *said = said.saturating_add(1);
        if statement.severity() == Severity::Proof {
            record.proofs = record.proofs.saturating_add(1);
        }
    }

    /// Whether a checkpoint may be given up on this peer's word: so many in a minute, so that the saves of a job go on.
    fn may_end(&mut self, node: &NodeName, now: Now) -> bool {
        let record = self.of.entry(node.clone()).or_default();
        if now.since(record.ended_since) >= limits::ENDS_HEARD_EVERY_MS {
            (record.ended, record.ended_since) = (0, now);
        }
        record.ended = record.ended.saturating_add(1);
        record.ended <= limits::ENDS_HEARD_MAX || planted!("ends_without_number")
    }

    /// Whether one more job may be kept that this peer tells of.
    fn may_bring(&mut self, node: &NodeName, job: &Namespace) -> bool {
        let record = self.of.entry(node.clone()).or_default();
        if record.jobs.len() >= limits::JOBS_PER_PEER_MAX && !planted!("jobs_without_number") {
            return record.jobs.contains(job);
        }
        record.jobs.insert(job.clone());
        true
    }

    /// A job is forgotten: it was nobody's.
    pub fn forget_job(&mut self, job: &Namespace) {
        for record in self.of.values_mut() {
            record.jobs.remove(job);
        }
    }
}

impl Context {
    /// Whether what a node says counts: this one, or a peer that has not been found to say what cannot be.
    pub(crate) fn is_believed(&self, node: &NodeName) -> bool {
        self.testimony.is_believed(node)
    }

    /// A peer has said what cannot be: it is named, and told of it only by being ignored.
    pub(crate) fn is_false(&mut self, from: &NodeName, statement: FalseStatement) {
        if from == self.me() {
            return;
        }
        let before = self.is_believed(from);
        self.testimony.count(from, statement);
        self.note(Note::FalseStatement {
            node: from.clone(),
            statement,
        });
        if before && !self.is_believed(from) {
            self.note(Note::Disbelieved { node: from.clone() });
            self.forget_words_of(from);
        }
    }

    /// What it has said counts no more.
    fn forget_words_of(&mut self, node: &NodeName) {
        let now = self.now;
        self.forget_vouchers(node);
        for checkpoint in self.checkpoints.values_mut() {
            checkpoint.told.remove(node);
            checkpoint.standing.let_go(node);
            checkpoint.standing.forget(node, now);
        }
        for table in self.namespaces.values_mut() {
            table.words.remove(node);
            table.rivals.remove(node);
        }
        self.forget_commits_of(node);
        self.recount_blocks_on(node);
        self.weigh_all();
    }

    /// Whether a checkpoint may be given up because this peer says so.
    pub(crate) fn may_end(&mut self, from: &NodeName) -> bool {
        let now = self.now;
        from == self.me() || self.testimony.may_end(from, now)
    }

    /// Whether a peer may tell of this job: it is known here, or not too many are only known from that peer.
    pub(crate) fn may_tell_of(&mut self, from: &NodeName, job: &Namespace) -> bool {
        if self.owner_of(job).is_some() || from == self.me() {
            return true;
        }
        let may = self.testimony.may_bring(from, job);
        if !may {
            self.is_false(from, FalseStatement::TooMuch);
        }
        may
    }

    /// Whether a job is somebody's as one peer says, and in no other way: nothing of it is here or was promised here. A liar that is
    /// asked for a new job would have it otherwise, at all nodes.
    pub(crate) fn is_hearsay(&self, job: &Namespace, table: &NamespaceTable) -> bool {
        let is_told = table.fence == RunId::ZERO && table.granted == RunId::ZERO;
        is_told
            && words_of_opened(table) < self.words_needed()
            && !self.has_checkpoints(job)
            && !planted!("one_word_claims_a_name")
    }

    /// Whether nobody here knows of a job but as one peer says.
    pub(crate) fn is_only_told(&self, job: &Namespace) -> bool {
        let table = self.namespaces.get(job);
        table.is_some_and(|it| it.claim != Claim::Boards && self.is_hearsay(job, it))
            && !planted!("told_names_fill_a_tenant")
    }

    /// Peers that are up, and whose answers are worth waiting for.
    pub(crate) fn believed_peers(&self) -> impl Iterator<Item = &NodeName> {
        let peers = self.peers.keys();
        peers.filter(|it| self.is_believed(it) || planted!("liars_are_waited_for"))
    }

    /// So many peers must say what none of them can prove: two, of which one is sound, unless there is only one.
    pub(crate) fn words_needed(&self) -> usize {
        let peers = self.believed_peers();
        if planted!("one_word_is_enough") {
            return 1;
        }
        peers.take(limits::WORDS_NEEDED).count().max(1)
    }
}

/// How many say that a run of the job was opened. What they say of promises claims no name: it would outlive these.
pub(crate) fn words_of_opened(table: &NamespaceTable) -> usize {
    let words = table.words.values();
    let is_opened =
        |it: &&Word| it.fence > Some(RunId::ZERO) || planted!("promise_words_claim_names");
    words.filter(is_opened).count()
}

/// Whether a message counts though its sender is not believed: what it asks for, blocks that their digests prove, and what trainers
/// on its node do.
pub(crate) fn needs_no_belief(message: &PeerMessage) -> bool {
    !matches!(
        message,
        PeerMessage::Fences(_)
            | PeerMessage::RaiseFence { .. }
            | PeerMessage::RunAnswer { .. }
            | PeerMessage::RunPromised { .. }
            | PeerMessage::Committed { .. }
            | PeerMessage::ManifestStored { .. }
            | PeerMessage::Abandoned { .. }
            | PeerMessage::Superseded { .. }
            | PeerMessage::Protected { .. }
            | PeerMessage::Durable { .. }
            | PeerMessage::Held { .. }
            | PeerMessage::HeldNoted { .. }
            | PeerMessage::SealedNoted { .. }
            | PeerMessage::Unowed { .. }
            | PeerMessage::DurableFailed { .. }
            | PeerMessage::Quarantined { .. }
            | PeerMessage::NoRoom { .. }
            | PeerMessage::Marks(_)
            | PeerMessage::Evicted { .. }
            | PeerMessage::Drop(_)
            | PeerMessage::OrderChecked { .. }
            | PeerMessage::FailedRestarts(_)
            | PeerMessage::Pins(..)
            | PeerMessage::PinNoted(..)
            | PeerMessage::Draining { .. }
            | PeerMessage::KeyTold(_)
            | PeerMessage::DurableRemoved { .. }
    )
}

#[cfg(test)]
mod tests;
