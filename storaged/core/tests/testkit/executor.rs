//! What each output of a node does in the world. Nothing else in the tests performs outputs; a node that is driven alone has
//! its outputs looked at (`alone`).

use storaged_codec::{Digest, Fingerprint, fingerprint};
use storaged_core::{CheckPart, DigestTally, Input, Output, ScrubPiece, ScrubTally, Unread};
use storaged_wire::SlotId;
use storaged_wire::local::Reply;

use super::process::{Payload, Pid, digests, made_up_digests, with_root};
use super::run_registry::Asked;
use super::scene::Scene;
use super::sessions::Key;
use super::setup::CHUNK_BYTES;
use super::tier::{Claim, Listed, Publication, Task, Upload};
use super::world::World;

impl<S: Scene> World<S> {
    pub(super) fn perform(&mut self, pid: Pid, output: Output) {
        let task = match output {
            Output::Upload {
                manifest,
                rank,
                shard,
                base,
                leftovers,
            } => Task::Upload(Upload {
                manifest,
                rank,
                shard,
                base,
                leftovers,
            }),
            Output::Publish {
                manifest,
                enclosures,
                authorship,
            } => Task::Publish(Publication {
                manifest,
                enclosures,
                authorship,
            }),
            Output::ListDurable {
                query,
                namespace,
                step,
                trust,
            } => Task::List(
                query,
                Listed {
                    namespace,
                    step,
                    trust,
                },
            ),
            Output::Fetch {
                manifest,
                rank,
                slot,
                ..
            } => {
                self.sessions.nothing_fills(pid, slot);
                Task::Fetch(manifest, rank, slot)
            }
            Output::ClaimRun {
                query,
                namespace,
                owner,
                consent,
                above,
                identity,
            } => {
                let claim = Claim {
                    namespace,
                    owner,
                    consent,
                    above,
                    identity,
                };
                Task::Claim(query, claim)
            }
            Output::RecordRun {
                namespace,
                owner,
                run,
            } => Task::Record(namespace, owner, run),
            Output::FindRun {
                query,
                namespace,
                run,
            } => Task::Find(query, namespace, run),
            asked @ (Output::FindSuccessions { .. } | Output::Succeed { .. }) => of_tokens(asked),
            asked @ Output::RegisterRun { .. } => return self.ask_registry(pid, asked),
            other => return self.perform_here(pid, other),
        };
        self.tier_begins(pid, task);
    }

    fn ask_registry(&mut self, pid: Pid, asked: Output) {
        if let Output::RegisterRun {
            query,
            namespace,
            run,
        } = asked
        {
            let asked = Asked {
                query,
                namespace,
                run,
            };
            self.register(pid, asked);
        }
    }

    /// All that neither the durable tier nor the registry is asked for.
    fn perform_here(&mut self, pid: Pid, output: Output) {
        let takes_ms = S::effect_takes(self);
        match output {
            Output::Reply {
                id,
                reply,
                descriptor,
            } => {
                if let Reply::SlotGranted { slot, .. } = reply {
                    self.sessions.nothing_reads(pid, slot);
                    self.ram(pid.node).leaves.remove(&slot);
                }
                S::replied(self, pid, id, reply, descriptor);
            }
            Output::Send { to, message } => {
                // Whoever is lied to may send to nodes that there are none of.
                if let Some(to) = S::named(self, pid.node, &to) {
                    self.post(pid.node, to, message);
                }
            }
            Output::CreateSlot { slot, bytes } => {
                if S::PAYLOAD == Payload::Bytes {
                    let memory = vec![0; bytes as usize];
                    self.ram(pid.node).slots.insert(slot, memory);
                }
                self.back(pid, takes_ms, Input::SlotCreated { slot });
            }
            Output::DropSlot { slot, .. } => self.ram(pid.node).drop_slot(slot),
            Output::DropParity { set } => {
                self.sessions.nothing_makes(pid, set);
                self.ram(pid.node).parity.remove(&set);
            }
            Output::Digest { slot, length, .. } => {
                let digested = self.digest(pid, slot, length);
                self.back(pid, takes_ms, digested);
            }
            Output::Run(work) => self.session_begins(pid, work, takes_ms),
            Output::Hasten { leader, session } => {
                self.hasten(pid, Key { leader, session });
            }
            Output::Stop { leader, session } => {
                self.stop_session(pid, &Key { leader, session }, takes_ms);
            }
            Output::Check { query, parts } => {
                if let Some(takes_ms) = S::check_takes(self, takes_ms) {
                    let checks = parts.iter().map(|part| self.check(pid, part));
                    let outcomes = checks.collect();
                    self.back(pid, takes_ms, Input::Checked { query, outcomes });
                }
            }
            Output::Scrub { query, piece } => {
                let outcome = self.scrub(pid, &piece);
                self.back(pid, takes_ms, Input::Scrubbed { query, outcome });
            }
            Output::Prepare(work) => {
                self.back(pid, takes_ms, Input::Prepared(work.run()));
            }
            Output::Note(note) => S::noted(self, pid.node, note),
            Output::Keep(record) => self.ram(pid.node).keep(record),
            Output::Forget(name) => {
                let kept = self.ram(pid.node).kept.remove(&name);
                assert!(
                    kept.is_some(),
                    "{pid:?} forgets {name:?}, which is not kept"
                );
            }
            // What is in the tier by then stays there, and its end is told late: both happen.
            Output::StopUpload { .. } | Output::Withdraw { .. } => {}
            Output::Curate { id, curation, .. } => S::curates(self, pid, id, curation),
            // When the daemon ends a test says.
            Output::Drain { .. } => {}
            other => panic!("{other:?} is for the tier"),
        }
    }

    fn digest(&mut self, pid: Pid, slot: SlotId, length: u64) -> Input {
        let (leaves, prints, root) = match S::PAYLOAD {
            Payload::Bytes => {
                let bytes = &self.ram(pid.node).slots[&slot][..length as usize];
                let prints = bytes.chunks(CHUNK_BYTES as usize).map(fingerprint);
                let (leaves, root) = digests(bytes);
                (leaves, prints.collect(), root)
            }
            Payload::Digests => {
                self.digested += 1;
                let made_up = made_up_digests(&self.digested.to_string(), length);
                let ram = self.ram(pid.node);
                let inherited = ram.inherited.remove(&slot);
                // What a session has put there, or nobody has looked at yet.
                let there = inherited.or_else(|| ram.leaves.get(&slot).cloned());
                let (leaves, root) = there.map_or(made_up, |leaves| with_root(leaves, length));
                // Nothing is computed of them, so that any fingerprint will do.
                let prints = leaves.iter().map(|_: &Digest| Fingerprint::ZERO);
                let prints = prints.collect();
                self.ram(pid.node).leaves.insert(slot, leaves.clone());
                (leaves, prints, root)
            }
        };
        Input::Digested {
            slot,
            leaves,
            prints,
            root,
            tally: DigestTally::default(),
        }
    }

    fn scrub(&mut self, pid: Pid, piece: &ScrubPiece) -> Result<ScrubTally, Unread> {
        let ram = self.ram(pid.node);
        let (chunks, rotten): (_, Vec<u64>) = match piece {
            ScrubPiece::Shard { shard, chunks } => {
                let there = match (S::PAYLOAD, ram.slots.get(&shard.slot)) {
                    (Payload::Bytes, bytes) => {
                        bytes.map(|bytes| digests(&bytes[..shard.length as usize]).0)
                    }
                    (Payload::Digests, _) => ram.leaves.get(&shard.slot).cloned(),
                };
                let there = there.ok_or(Unread::Gone)?;
                let is_rotten = |at: &u64| there[*at as usize] != shard.leaves[*at as usize];
                (chunks, chunks.clone().filter(is_rotten).collect())
            }
            ScrubPiece::Parity {
                set,
                stripes,
                prints,
                ..
            } => {
                let prints = prints.as_ref().filter(|_| S::PAYLOAD == Payload::Bytes);
                let is_rotten = |at: &u64| {
                    let wrong = prints
                        .zip(ram.parity.get(set))
                        .is_some_and(|(prints, bytes)| {
                            let expected = prints[(*at - stripes.start) as usize];
                            fingerprint(&bytes[*at as usize]) != expected
                        });
                    wrong || ram.rotten_parity.contains(&(*set, *at))
                };
                (stripes, stripes.clone().filter(is_rotten).collect())
            }
        };
        self.scrubbed
            .entry(pid.node)
            .or_default()
            .push(piece.clone());
        Ok(ScrubTally {
            bytes: (chunks.end - chunks.start) * u64::from(CHUNK_BYTES),
            rotten,
            known: 0,
        })
    }

    fn check(&self, pid: Pid, part: &CheckPart) -> (u64, Option<String>) {
        let process = self.processes[pid.node].as_ref().expect("it is up");
        match part {
            CheckPart::Shard(shard) if S::PAYLOAD == Payload::Bytes => {
                let bytes = &process.slots[&shard.slot][..shard.length as usize];
                let same = digests(bytes).0 == shard.leaves;
                (shard.length, (!same).then(|| "wrong digest".into()))
            }
            CheckPart::Shard(shard) => (shard.length, None),
            CheckPart::Parity(_) => (0, None),
            CheckPart::Enclosure { name, bytes } => {
                let fault = name.prove(bytes).err();
                (name.length, fault.map(|fault| fault.to_string()))
            }
        }
    }
}

fn of_tokens(asked: Output) -> Task {
    match asked {
        Output::FindSuccessions {
            query,
            namespace,
            trust,
        } => Task::Successions(query, namespace, trust),
        Output::Succeed {
            query,
            rotation,
            retired,
        } => Task::Succeed(query, Box::new(rotation), retired),
        other => panic!("{other:?} is not of tokens"),
    }
}
