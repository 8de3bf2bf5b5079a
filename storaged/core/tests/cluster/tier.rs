//! The small cluster's durable tier: it holds what was published, and lists it as a test says.

use std::collections::BTreeMap;
use std::sync::Arc;

use storaged_core::{ClaimFault, ClaimedRun, DurableFault, DurableListing, Input, Output};
use storaged_wire::{Digest, ManifestBytes, Namespace, RunId, Step};

use super::{Cluster, Event};

/// What an upload takes.
const UPLOAD_MS: u64 = 20;

/// How a listing goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listing {
    /// It is there after so many milliseconds.
    After(u64),
    /// It fails after so many milliseconds.
    FailsAfter(u64),
    /// It never ends.
    Hangs,
}

/// Whether what is uploaded is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Uploads {
    Taken,
    Refused,
    /// They never end.
    Hang,
}

pub struct Tier {
    pub listing: Listing,
    pub uploads: Uploads,
    /// Published manifests, oldest first.
    pub manifests: Vec<Arc<ManifestBytes>>,
    /// The highest number of a run that was claimed, by namespace.
    pub claimed: BTreeMap<Namespace, u64>,
}

impl Default for Tier {
    fn default() -> Self {
        Self {
            listing: Listing::After(20),
            uploads: Uploads::Taken,
            manifests: Vec::new(),
            claimed: BTreeMap::new(),
        }
    }
}

/// A listing without a step names so many of a namespace, as the real tier does.
const LISTED: usize = 4;

impl Tier {
    fn listing(&self, step: Option<Step>) -> DurableListing {
        let is_it = |m: &&Arc<ManifestBytes>| step.is_none_or(|step| m.manifest().step == step);
        let newest_run = self.manifests.last().map(|newest| newest.manifest().run);
        let listed = self.manifests.iter().rev().filter(is_it).take(LISTED);
        let manifests: Vec<_> = listed.cloned().collect();
        DurableListing {
            newest_run,
            manifests,
            set_aside: Vec::new(),
        }
    }

    fn claim(&mut self, namespace: Namespace, above: u64, identity: u64) -> RunId {
        let claimed = self.claimed.entry(namespace).or_default();
        *claimed = (*claimed).max(above) + 1;
        RunId::with_identity(*claimed, identity)
    }
}

impl Cluster {
    pub(super) fn perform_durable(&mut self, node: usize, generation: u64, output: Output) {
        let Some(tier) = &mut self.tier else {
            panic!("nobody asked for {output:?}");
        };
        let (after, input) = match output {
            Output::Upload { manifest, rank, .. } => {
                let manifest = manifest.name();
                let outcome = match tier.uploads {
                    Uploads::Taken => Ok(()),
                    Uploads::Hang => return,
                    Uploads::Refused => Err(DurableFault::Denied("read-only file system".into())),
                };
                let uploaded = Input::Uploaded {
                    manifest,
                    rank,
                    outcome,
                };
                (UPLOAD_MS, uploaded)
            }
            Output::Publish { manifest } => {
                let name: Digest = manifest.name();
                tier.manifests.push(manifest);
                let outcome = Ok(());
                let published = Input::Published {
                    manifest: name,
                    outcome,
                };
                (UPLOAD_MS, published)
            }
            Output::ListDurable { query, step, .. } => {
                let (after, outcome) = match tier.listing {
                    Listing::After(ms) => (ms, Ok(tier.listing(step))),
                    Listing::FailsAfter(ms) => {
                        (ms, Err(DurableFault::Unavailable("503 slow down".into())))
                    }
                    Listing::Hangs => return,
                };
                (after, Input::DurableListed { query, outcome })
            }
            // The simulation has tiers that give shards back; here it only matters that one was asked.
            Output::Fetch { slot, .. } => {
                self.fetches += 1;
                let outcome = Err(DurableFault::Unavailable("503 slow down".into()));
                (UPLOAD_MS, Input::Fetched { slot, outcome })
            }
            Output::StopUpload { .. } => return,
            Output::ClaimRun {
                query,
                namespace,
                above,
                identity,
                ..
            } => {
                let (after, outcome) = match tier.listing {
                    Listing::After(ms) => (ms, Ok(tier.claim(namespace, above, identity))),
                    Listing::FailsAfter(ms) => {
                        let fault = DurableFault::Unavailable("503 slow down".into());
                        (ms, Err(ClaimFault::Durable(fault)))
                    }
                    Listing::Hangs => return,
                };
                (after, Input::RunClaimed { query, outcome })
            }
            Output::FindRun { query, .. } => {
                let outcome = Ok(ClaimedRun::Unknown);
                (UPLOAD_MS, Input::RunFound { query, outcome })
            }
            Output::RecordRun { namespace, run, .. } => {
                let outcome = Ok(());
                let recorded = Input::RunRecorded {
                    namespace,
                    run,
                    outcome,
                };
                (UPLOAD_MS, recorded)
            }
            other => panic!("nobody asked for {other:?}"),
        };
        self.at(self.now + after, Event::Input(node, generation, input));
    }
}
