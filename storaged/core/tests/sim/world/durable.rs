//! What the durable tier of a simulated world does.

use super::*;

impl World {
    /// Runs in the durable tier; any other output comes back.
    pub(super) fn perform_runs(
        &mut self,
        node: usize,
        (generation, delay): (u64, u64),
        output: Output,
    ) -> Option<Output> {
        match output {
            Output::ClaimRun {
                query,
                owner,
                above,
                identity,
                ..
            } => {
                let claimed = self.claims.keys().next_back().copied().unwrap_or(0);
                let number = claimed.max(above) + 1;
                let run = RunId::with_identity(number, identity);
                self.claims.insert(number, (run, owner));
                let outcome = Ok(run);
                let input = Input::RunClaimed { query, outcome };
                self.back(node, generation, 20 + delay, input);
            }
            Output::RecordRun {
                namespace,
                owner,
                run,
            } => {
                self.claims.entry(run.number()).or_insert((run, owner));
                let input = Input::RunRecorded {
                    namespace,
                    run,
                    outcome: Ok(()),
                };
                self.back(node, generation, 20 + delay, input);
            }
            Output::FindRun { query, run, .. } => {
                let newest = self.claims.keys().next_back().copied().unwrap_or(0);
                let outcome = Ok(match self.claims.get(&run.number()) {
                    Some((known, _)) if *known == run && newest > run.number() => {
                        ClaimedRun::Superseded { newest }
                    }
                    Some((known, owner)) if *known == run => ClaimedRun::Newest(*owner),
                    _ => ClaimedRun::Unknown,
                });
                let input = Input::RunFound { query, outcome };
                self.back(node, generation, 20 + delay, input);
            }
            other => return Some(other),
        }
        None
    }

    /// Copies in the durable tier; any other output comes back.
    pub(super) fn perform_copies(
        &mut self,
        node: usize,
        (generation, delay): (u64, u64),
        output: Output,
    ) -> Option<Output> {
        match output {
            Output::Upload {
                manifest,
                rank,
                shard,
                base,
            } => {
                if let Some(base) = &base {
                    self.increments += 1;
                    self.check_base(node, rank, base);
                }
                let bytes = self.ram(node).slots[&shard.slot][..shard.length as usize].to_vec();
                let outcome = match self.random(5) {
                    0 => Err(DurableFault::Unavailable("made to fail".into())),
                    _ => {
                        self.durable_shards.insert((manifest.name(), rank), bytes);
                        Ok(())
                    }
                };
                let input = Input::Uploaded {
                    manifest: manifest.name(),
                    rank,
                    outcome,
                };
                self.back(node, generation, 50 + delay, input);
            }
            // What is in the tier by then stays there, and its end is told late: both happen.
            Output::StopUpload { .. } => {}
            Output::Publish { manifest } => {
                let record = manifest.manifest();
                for shard in &record.shards {
                    assert!(
                        self.durable_shards
                            .contains_key(&(manifest.name(), shard.rank)),
                        "the manifest is written last"
                    );
                }
                self.durable
                    .insert((record.run, record.step), manifest.clone());
                let input = Input::Published {
                    manifest: manifest.name(),
                    outcome: Ok(()),
                };
                self.back(node, generation, delay, input);
            }
            other => return Some(other),
        }
        None
    }

    /// What is read from the durable tier; any other output comes back.
    pub(super) fn perform_reads(
        &mut self,
        node: usize,
        (generation, delay): (u64, u64),
        output: Output,
    ) -> Option<Output> {
        match output {
            Output::ListDurable { query, .. } => {
                let listing = DurableListing {
                    manifests: self.durable.values().rev().take(4).cloned().collect(),
                    newest_run: self.durable.keys().next_back().map(|(run, _)| *run),
                    set_aside: Vec::new(),
                };
                self.back(
                    node,
                    generation,
                    20 + delay,
                    Input::DurableListed {
                        query,
                        outcome: Ok(listing),
                    },
                );
            }
            Output::Fetch {
                manifest,
                rank,
                slot,
                ..
            } => {
                let bytes = self.durable_shards[&(manifest.name(), rank)].clone();
                let (leaves, _) = digests(&bytes);
                self.ram(node).slots.get_mut(&slot).unwrap()[..bytes.len()].copy_from_slice(&bytes);
                self.back(
                    node,
                    generation,
                    50 + delay,
                    Input::Fetched {
                        slot,
                        outcome: Ok(leaves),
                    },
                );
            }
            other => return Some(other),
        }
        None
    }
}
