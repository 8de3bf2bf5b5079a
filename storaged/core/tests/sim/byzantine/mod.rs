//! A node that says anything to anybody at any time, beside what its decisions say: forged and replayed, of right and wrong
//! checkpoints, with numbers up to their limits. It holds no rank, and fails no more than m-1 others fail with it: what it says
//! must cost nobody a checkpoint, a job or memory.

use storaged_codec::{ChunkSize, Digest, digest};
use storaged_core::{Audit, Note, Viewer};
use storaged_plan::groups;
use storaged_wire::failed::{FailedRestart, NamespaceFailures};
use storaged_wire::local::DurableWish;
use storaged_wire::manifest::GroupEntry;
use storaged_wire::peer::{
    CheckpointKey, Fence, HighMark, Holding, Lane, NamedRun, NamespaceMark, PeerMessage,
    PromiseOutcome, SealedShard, SessionFault, UnowedCause,
};
use storaged_wire::pins::{NamespacePins, Pin, PinDoubt};
use storaged_wire::provenance::KeyTold;
use storaged_wire::{
    CheckpointState, Enclosed, Enclosure, EnclosuresHeld, Manifest, ManifestKey, Namespace, Rank,
    RunId, SessionId, ShardEntry, Step, WorldSize,
};

use super::world::{Scripted, World};
use crate::testkit::{
    CHUNK_BYTES, Event, TOKEN, drop_order, geometry, given_at, members, name, namespace, owner,
};

/// It says something new about so often, in milliseconds.
const SPEAKS_EVERY_MS: u64 = 60;
/// Messages of others that it says again.
const OVERHEARD_MAX: usize = 64;
/// Jobs that it makes up.
const JOBS: u64 = 100_000;

/// What became of what it said.
#[derive(Debug, Default)]
pub struct Byzantine {
    pub said: u64,
    /// How often honest nodes named it.
    pub named: u64,
    /// When honest nodes knew a step to be protected that they had not known before; where the one parity of some lane is its own
    /// to make, to be committed.
    pub safe_at: Vec<u64>,
    newest_committed: Option<CheckpointKey>,
    overheard: Vec<PeerMessage>,
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
        let to = honest[self.random(honest.len() as u64) as usize];
        if !self.is_up(by) || !self.is_linked(by, to) {
            return;
        }
        for message in self.lies(by) {
            self.scene.byzantine.said += 1;
            self.post(by, to, message);
        }
    }

    /// What it hears it may say again. Of what its decisions say it swallows some.
    pub(super) fn passes_byzantine(&mut self, from: usize, to: usize, message: &PeerMessage) {
        if self.byzantine() == Some(to) && from != to && self.random(4) == 0 {
            let overheard = &mut self.scene.byzantine.overheard;
            if overheard.len() >= OVERHEARD_MAX {
                overheard.remove(0);
            }
            overheard.push(message.clone());
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
        self.job_ends();
        if let Some(by) = self.byzantine() {
            self.crash(by);
        }
        self.run_for(100_000);
        for node in self.honest() {
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

    fn limit_number(&mut self) -> u64 {
        match self.random(7) {
            0 => 0,
            1 => u64::MAX,
            2 => u64::MAX - 1,
            3 => 1 << 48,
            4 => u64::from(u32::MAX),
            _ => self.random(1_000),
        }
    }

    /// A checkpoint that is there, as it knows, or one that is not.
    fn some_key(&mut self, by: usize) -> CheckpointKey {
        let shown = self.ram(by).node.shown();
        let real: Vec<CheckpointKey> = shown.into_iter().map(|it| it.key).collect();
        if !real.is_empty() && self.random(4) > 0 {
            return real[self.random(real.len() as u64) as usize].clone();
        }
        let ahead = self.random(20);
        let newest = real.last().cloned();
        match newest.filter(|_| ahead.is_multiple_of(2)) {
            Some(newest) => CheckpointKey {
                step: Step::new(newest.step.get().saturating_add(ahead)),
                ..newest
            },
            None => CheckpointKey {
                namespace: namespace(),
                run: RunId::new(self.limit_number()),
                step: Step::new(self.limit_number()),
            },
        }
    }

    fn some_manifest_name(&mut self, by: usize) -> Digest {
        let shown = self.ram(by).node.shown();
        let names: Vec<Digest> = shown.into_iter().filter_map(|it| it.manifest).collect();
        match names.len() as u64 {
            0 => digest(b"nothing"),
            count => names[self.random(count) as usize],
        }
    }

    /// A manifest of its own making, sound in itself.
    fn forged(&mut self, key: &CheckpointKey) -> Option<(Digest, PeerMessage)> {
        let limits = self.scene.limits;
        let all = groups(&members(limits.nodes), geometry(limits.k, limits.m)).ok()?;
        let seed = self.random(1 << 30);
        let data: Vec<_> = all.iter().flat_map(|it| it.data.clone()).collect();
        let ranks = (0u32..).zip(&data).take(limits.ranks as usize);
        let shards: Vec<ShardEntry> = ranks
            .map(|(rank, node)| ShardEntry {
                rank: Rank::new(rank),
                node: node.clone(),
                length: 3_000,
                root: digest(&seed.to_le_bytes()),
            })
            .collect();
        let holds = |group: &storaged_plan::Group| {
            shards.iter().any(|shard| group.data.contains(&shard.node))
        };
        let groups = all.iter().filter(|group| holds(group));
        let manifest = Manifest {
            version: Manifest::VERSION,
            namespace: key.namespace.clone(),
            owner: owner(),
            run: key.run,
            step: key.step,
            world_size: WorldSize::new(u32::try_from(shards.len()).ok()?).ok()?,
            epoch: 1,
            geometry: geometry(limits.k, limits.m),
            chunk: ChunkSize::new(CHUNK_BYTES).ok()?,
            groups: groups
                .map(|group| GroupEntry {
                    data: group.data.clone(),
                    coding: group.coding.clone(),
                })
                .collect(),
            shards,
            schema: Enclosed::nothing(),
            torch_metadata: Enclosed::nothing(),
        };
        let sealed = manifest.seal().ok()?;
        let message = PeerMessage::Committed {
            manifest: sealed.bytes().to_vec().into(),
            durable: DurableWish::Policy,
        };
        Some((sealed.name(), message))
    }

    fn lies(&mut self, by: usize) -> Vec<PeerMessage> {
        match self.random(5) {
            0 => self.lies_of_states(by),
            1 => self.lies_of_runs(by),
            2 => self.lies_of_ends(by),
            3 => vec![self.lie_of_an_order(by)],
            _ => self.other_lies(by),
        }
    }

    fn lies_of_states(&mut self, by: usize) -> Vec<PeerMessage> {
        let (manifest, key) = (self.some_manifest_name(by), self.some_key(by));
        let bears = self.random(4) as u32;
        let mark = HighMark {
            run: key.run,
            step: key.step,
        };
        match self.random(7) {
            0 => vec![PeerMessage::Durable { manifest }],
            1 => vec![PeerMessage::Protected { manifest, bears }],
            2 | 3 => {
                let Some((manifest, committed)) = self.forged(&key) else {
                    return Vec::new();
                };
                let protected = PeerMessage::Protected { manifest, bears };
                vec![committed, protected, PeerMessage::Durable { manifest }]
            }
            4 => vec![PeerMessage::Marks(vec![NamespaceMark {
                namespace: key.namespace,
                owner: owner(),
                mark,
            }])],
            5 => vec![PeerMessage::Held {
                manifest,
                version: bears,
                shards: (0..self.scene.limits.ranks).map(Rank::new).collect(),
                parity: vec![(Lane { group: 0, index: 0 }, bears)],
                enclosures: EnclosuresHeld::All,
            }],
            _ => vec![PeerMessage::Holdings {
                query: self.random(100),
                owner: Some(owner()),
                holdings: vec![Holding {
                    manifest,
                    key,
                    state: CheckpointState::Durable,
                    shards: (0..self.scene.limits.ranks).map(Rank::new).collect(),
                    parity: Vec::new(),
                    enclosures: EnclosuresHeld::All,
                }],
                mark: Some(mark),
                copied: Some(mark),
            }],
        }
    }

    fn lies_of_runs(&mut self, by: usize) -> Vec<PeerMessage> {
        let known = self.some_key(by).run.number();
        let number = match self.random(3) {
            0 => known.saturating_add(1 + self.random(3)),
            _ => self.limit_number(),
        };
        let run = RunId::with_identity(number, self.random(9));
        let query = self.random(200);
        let fence = Fence {
            namespace: namespace(),
            owner: owner(),
            run,
            promised: run,
        };
        let named = NamedRun {
            namespace: namespace(),
            owner: owner(),
            run,
        };
        // Said to be open as well, what it was promised would end the job (docs/SECURITY.md): no run that it raises is one that it asks for.
        let asked_for = NamedRun {
            run: RunId::with_identity(number, 9 + self.random(9)),
            ..named.clone()
        };
        let highest = self.limit_number();
        match self.random(9) {
            0 => vec![PeerMessage::Fences(vec![fence])],
            1 => vec![PeerMessage::RunAnswer {
                query,
                fence: Some(fence),
            }],
            2 => vec![PeerMessage::RaiseFence { query, run: named }],
            3 => vec![PeerMessage::RunPromised {
                query,
                run,
                outcome: PromiseOutcome::Taken { highest },
            }],
            4 => vec![PeerMessage::RunPromised {
                query,
                run,
                outcome: PromiseOutcome::WrongOwner,
            }],
            5 => vec![PeerMessage::FenceRaised { query }],
            6 => vec![PeerMessage::PromiseRun {
                query,
                run: asked_for,
            }],
            7 => {
                let run = asked_for.clone();
                let wish = PeerMessage::PromiseRun { query, run };
                vec![wish, PeerMessage::WithdrawRun(asked_for)]
            }
            _ => {
                let jobs = (0..200).map(|_| self.random(JOBS));
                let jobs: Vec<u64> = jobs.collect();
                let made_up = |job| Fence {
                    namespace: Namespace::new(format!("made-up-{job}")).expect("a name"),
                    ..fence.clone()
                };
                vec![PeerMessage::Fences(jobs.into_iter().map(made_up).collect())]
            }
        }
    }

    fn lies_of_ends(&mut self, by: usize) -> Vec<PeerMessage> {
        let (manifest, key) = (self.some_manifest_name(by), self.some_key(by));
        let reason = || "because".to_owned();
        let at = HighMark {
            run: key.run,
            step: key.step,
        };
        vec![match self.random(8) {
            0 => PeerMessage::Abandoned {
                key,
                reason: reason(),
            },
            1 => PeerMessage::Superseded {
                key,
                reason: reason(),
            },
            2 => PeerMessage::Evicted {
                namespace: namespace(),
                up_to: at,
                durable: self.random(2) == 0,
            },
            3 => PeerMessage::Unowed {
                manifest,
                cause: match self.random(2) {
                    0 => UnowedCause::Retired,
                    _ => UnowedCause::GivenUp(reason()),
                },
            },
            4 => PeerMessage::Quarantined {
                manifest,
                key,
                reason: reason(),
            },
            5 => PeerMessage::DurableFailed {
                manifest,
                reason: "x".repeat(5_000),
            },
            6 => self.lie_of_a_pin(key),
            _ => PeerMessage::FailedRestarts(vec![NamespaceFailures {
                namespace: namespace(),
                owner: owner(),
                failed: vec![FailedRestart {
                    run: key.run,
                    step: key.step,
                    times: 0,
                    wait_ms: None,
                    changes: u32::MAX,
                }],
            }]),
        }]
    }

    /// What is asked for in the name of the job's owner, whose token it has never heard.
    fn lie_of_an_order(&mut self, by: usize) -> PeerMessage {
        let query = self.random(200);
        let honest = self.honest();
        let giver = honest[self.random(honest.len() as u64) as usize];
        let plain = drop_order(namespace(), query);
        let order = match self.random(2) {
            0 => given_at(by, b"a token of its own", plain),
            _ => plain,
        };
        match self.random(7) {
            0 | 1 => PeerMessage::Drop(order),
            // One that somebody with the token has given, as it was heard.
            6 => {
                let plain = drop_order(namespace(), self.random(200));
                PeerMessage::Drop(given_at(giver, TOKEN, plain))
            }
            2 => PeerMessage::CheckOrder {
                query,
                order: Box::new(order),
            },
            3 => PeerMessage::OrderChecked {
                query,
                is_proven: true,
            },
            4 => PeerMessage::DurableRemoved {
                namespace: namespace(),
                owner: owner(),
            },
            _ => PeerMessage::KeyTold(KeyTold {
                namespace: namespace(),
                owner: owner(),
                key: ManifestKey::of_token(&namespace(), b"a token of its own"),
                retired: None,
            }),
        }
    }

    /// Of some step, as often as a node can have missed it or never.
    fn lie_of_a_pin(&mut self, key: CheckpointKey) -> PeerMessage {
        let changes = match self.random(3) {
            0 => u32::MAX,
            changes => changes as u32,
        };
        let pin = Pin {
            run: key.run,
            step: key.step,
            pinned: self.random(3) > 0,
            changes,
            doubt: (self.random(2) == 0).then_some(PinDoubt::Undecided),
        };
        let query = (self.random(2) == 0).then_some(9);
        let of = NamespacePins {
            namespace: key.namespace,
            owner: owner(),
            pins: vec![pin],
        };
        PeerMessage::Pins(query, of)
    }

    fn other_lies(&mut self, by: usize) -> Vec<PeerMessage> {
        let (manifest, key) = (self.some_manifest_name(by), self.some_key(by));
        let session = SessionId::new(self.random(300));
        let world = WorldSize::new(1 + self.random(9) as u32).expect("ranks");
        let version = self.random(9) as u32;
        vec![match self.random(11) {
            0 => PeerMessage::HeldNoted { manifest, version },
            1 => PeerMessage::ManifestStored {
                manifest,
                state: CheckpointState::Durable,
                bears: version,
            },
            2 => PeerMessage::SealedNoted {
                key,
                shards: Some(manifest),
                description: Some(manifest),
                quiet_ms: 0,
            },
            3 => PeerMessage::ShardsSealed {
                key,
                owner: owner(),
                world_size: world,
                shards: vec![SealedShard {
                    rank: Rank::new(version),
                    length: self.limit_number(),
                    root: manifest,
                }],
                digesting: 1,
            },
            4 => PeerMessage::Description {
                key,
                owner: owner(),
                world_size: world,
                schema: Enclosure::of(b"schema"),
                torch_metadata: Enclosure::of(b"metadata"),
                durable: DurableWish::Policy,
                epoch: self.limit_number(),
            },
            5 => PeerMessage::NoRoom {
                manifest,
                node: name(by),
                reason: "x".repeat(5_000),
            },
            6 => PeerMessage::Parcel {
                parcel: digest(&self.random(1 << 20).to_le_bytes()),
                length: self.limit_number(),
                relay: None,
            },
            7 => PeerMessage::Finished {
                session,
                tally: storaged_wire::peer::MemberTally::default(),
            },
            8 => PeerMessage::Close {
                session,
                kept: version.is_multiple_of(2),
            },
            9 => PeerMessage::Failed {
                session,
                fault: SessionFault::Corrupt("it is not what it was".into()),
            },
            _ => {
                let overheard = self.scene.byzantine.overheard.clone();
                match overheard.len() as u64 {
                    0 => return Vec::new(),
                    count => overheard[self.random(count) as usize].clone(),
                }
            }
        }]
    }
}
