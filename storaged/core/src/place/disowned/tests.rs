//! Commits that were made up, and true ones whose owners are slow to say that they hold them.

use std::collections::BTreeSet;
use std::sync::Arc;

use storaged_codec::digest;
use storaged_wire::peer::UnowedCause;
use storaged_wire::{EnclosuresHeld, ManifestBytes, Rank};

use super::*;
use crate::api::{Input, Now, Output};
use crate::node::Node;
use crate::testkit::{committed, hear, last_of, manifest, name};

/// Node `e` and a commit that it was told of as one of its home nodes. It has no rank of the job, nor have `c` and `d`.
struct Told {
    node: Node,
    commit: Arc<ManifestBytes>,
    /// The other home nodes.
    others: Vec<String>,
    said: Vec<Output>,
}

impl Told {
    fn of_made_up_commit() -> Self {
        Self::of_commit_by(&["a", "b"])
    }

    /// These have its shards.
    fn of_commit_by(owners: &[&str]) -> Self {
        let members = [owners, &["c", "d", "e"]].concat();
        let node = last_of(&members, owners.len(), 2);
        let mut all = (1..).map(|step| {
            let sealed = manifest(step, owners, &["c", "e"], 4096, digest(b"any"));
            Arc::new(sealed.seal().expect("a sound manifest"))
        });
        let homes = |sealed: &ManifestBytes| {
            let key = CheckpointKey::of(sealed.manifest());
            node.context().homes_of(&key)
        };
        // The one that tells of it holds no shard.
        let is_its = |sealed: &Arc<ManifestBytes>| {
            let homes = homes(sealed);
            ["d", "e"].iter().all(|it| homes.contains(&name(it)))
        };
        let commit = all.find(is_its).expect("a step");
        let others = homes(&commit).into_iter().filter(|it| *it != name("e"));
        let others = others.map(|it| it.as_str().to_owned()).collect();
        let mut told = Self {
            node,
            commit,
            others,
            said: Vec::new(),
        };
        let message = committed(&told.commit);
        told.hears(1, "d", message);
        told.ticks(&[limits::UNCONFIRMED_MS]);
        told
    }

    fn hears(&mut self, at: u64, from: &str, message: PeerMessage) {
        self.said.extend(hear(&mut self.node, at, from, message));
    }

    fn hears_from_all(&mut self, at: u64, from: &[&str], message: &PeerMessage) {
        for from in from {
            self.hears(at, from, message.clone());
        }
    }

    /// At these seconds.
    fn ticks(&mut self, at: &[u64]) {
        for at in at {
            self.said.extend(self.node.handle(Now(*at), Input::Tick));
        }
    }

    fn goes_down(&mut self, at: u64, peer: &str) {
        let node = name(peer);
        self.node.handle(Now(at), Input::PeerDown { node });
    }

    /// Long enough to be forgotten, if it is.
    fn waits(&mut self) {
        let seconds: Vec<u64> = (33..40).map(|second| second * 1_000).collect();
        self.ticks(&seconds);
    }

    fn state(&self) -> Option<CheckpointState> {
        let key = CheckpointKey::of(self.commit.manifest());
        Some(self.node.context().checkpoints.get(&key)?.state)
    }

    fn is_kept(&self) -> bool {
        self.state() == Some(CheckpointState::Committed)
    }

    fn denied(&self) -> PeerMessage {
        PeerMessage::Unowed {
            manifest: self.commit.name(),
            cause: UnowedCause::Retired,
        }
    }

    fn stored(&self) -> PeerMessage {
        PeerMessage::ManifestStored {
            manifest: self.commit.name(),
            state: CheckpointState::Committed,
            bears: 0,
        }
    }

    fn held(&self, shards: Vec<Rank>) -> PeerMessage {
        PeerMessage::Held {
            manifest: self.commit.name(),
            version: 1,
            shards,
            parity: Vec::new(),
            enclosures: EnclosuresHeld::All,
        }
    }

    /// Whom it has said this to.
    fn said_to(&self, wanted: &PeerMessage) -> BTreeSet<&str> {
        let sent = self.said.iter().filter_map(|output| match output {
            Output::Send { to, message } if message == wanted => Some(to.as_str()),
            _ => None,
        });
        sent.collect()
    }
}

#[test]
fn a_commit_that_its_owners_disown_is_forgotten_by_a_home() {
    let mut told = Told::of_made_up_commit();
    told.ticks(&[32_000]);
    let (manifest, done) = (told.commit.name(), Vec::new());
    let asked = told.said_to(&PeerMessage::Owed { manifest, done });
    assert!(asked.is_superset(&BTreeSet::from(["a", "b"])), "{asked:?}");
    told.hears_from_all(32_100, &["a", "b"], &told.denied());
    // Nobody holds anything, and no other home node tells it.
    told.hears(32_100, "c", told.held(Vec::new()));
    told.waits();
    assert_eq!(told.state(), None);
    let is_end = |output: &Output| {
        let Output::Send { message, .. } = output else {
            return false;
        };
        matches!(message, PeerMessage::Abandoned { .. })
    };
    assert!(!told.said.iter().any(is_end), "the true one would end");
    let heard = told.said_to(&told.denied());
    let others: BTreeSet<&str> = told.others.iter().map(String::as_str).collect();
    assert_eq!(heard, others);
}

/// A home node that was told of it later tells of it until it has forgotten it too.
#[test]
fn a_disowned_commit_is_not_taken_again_at_once() {
    let mut told = Told::of_made_up_commit();
    told.ticks(&[32_000]);
    told.hears_from_all(32_100, &["a", "b"], &told.denied());
    told.waits();
    let message = committed(&told.commit);
    told.hears(40_000, "d", message.clone());
    told.hears(70_000, "d", message.clone());
    assert_eq!(told.state(), None);
    told.hears(100_000, "d", message);
    assert!(told.is_kept());
}

#[test]
fn one_owner_that_denies_a_commit_costs_nobody_that_commit() {
    let mut told = Told::of_made_up_commit();
    told.ticks(&[32_000]);
    told.hears(32_100, "a", told.denied());
    told.waits();
    assert!(told.is_kept());
}

/// It was told of it when it had just started.
#[test]
fn an_owner_that_has_heard_of_a_commit_since_denies_it_no_more() {
    let mut told = Told::of_made_up_commit();
    told.ticks(&[32_000]);
    told.hears_from_all(32_100, &["a", "b"], &told.denied());
    told.hears(32_200, "b", told.stored());
    told.waits();
    assert!(told.is_kept());
}

/// They may be back with their shards.
#[test]
fn owners_that_are_down_disown_nothing() {
    let mut told = Told::of_made_up_commit();
    told.hears_from_all(31_000, &["a", "b"], &told.denied());
    told.goes_down(31_100, "a");
    told.waits();
    assert!(told.is_kept());
}

/// It has not been told of it yet.
#[test]
fn an_owner_that_has_just_come_up_disowns_nothing() {
    let mut told = Told::of_made_up_commit();
    told.goes_down(30_500, "b");
    let generation = storaged_wire::Generation::new(2);
    let node = name("b");
    let input = Input::PeerUp { node, generation };
    told.node.handle(Now(31_000), input);
    told.hears_from_all(32_100, &["a", "b"], &told.denied());
    told.waits();
    assert!(told.is_kept());
    let later: Vec<u64> = (40..46).map(|second| second * 1_000).collect();
    told.ticks(&later);
    assert_eq!(told.state(), None);
}

#[test]
fn a_commit_that_a_home_node_calls_protected_is_not_forgotten() {
    let mut told = Told::of_made_up_commit();
    told.ticks(&[32_000]);
    let (manifest, bears) = (told.commit.name(), 2);
    told.hears(32_050, "d", PeerMessage::Protected { manifest, bears });
    told.hears_from_all(32_100, &["a", "b"], &told.denied());
    told.waits();
    assert!(told.is_kept());
}

/// Of two that hold their shards one is sound, and a sound one has sealed nothing of a commit that was made up.
#[test]
fn a_commit_that_two_owners_hold_shards_of_is_not_forgotten() {
    for (holders, is_kept) in [(1, false), (2, true)] {
        let owners = ["a", "b", "b2"];
        let mut told = Told::of_commit_by(&owners);
        told.ticks(&[32_000]);
        let (holding, denying) = owners.split_at(holders);
        for (rank, from) in (0..).zip(holding) {
            told.hears(32_050, from, told.held(vec![Rank::new(rank)]));
        }
        told.hears(32_050, "c", told.held(Vec::new()));
        told.hears_from_all(32_100, denying, &told.denied());
        told.waits();
        assert_eq!(told.is_kept(), is_kept, "{holders} hold shards");
    }
}
