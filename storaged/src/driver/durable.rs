//! What the driver does in the durable tier: each task runs by itself, and its end comes back as an input.

use std::ops::Range;
use std::sync::Arc;

use storaged_core::{
    Authorship, DurableFault, Input, Leftovers, Output, QueryId, SlotShard, TierNews, Trust,
    UploadBase,
};
use storaged_wire::{Enclosures, ManifestBytes, Namespace, Rank, SlotId, Step};
use tokio::sync::mpsc;

use super::said::say_copied;
use super::{Daemon, RunningUpload};
use crate::trickle::{NotFetched, SetAsideBase, Trickle};

impl Daemon {
    /// Begins a task in the durable tier, if there is one.
    pub(super) fn perform_durable(&mut self, output: Output) {
        let Some(trickle) = self.trickle.clone() else {
            return;
        };
        match output {
            Output::Upload {
                manifest,
                rank,
                shard,
                base,
                leftovers,
            } => {
                let place = (manifest.name(), rank);
                let upload = self.upload(trickle, manifest, rank, shard, base, leftovers);
                self.uploads.retain(|_, upload| !upload.task.is_finished());
                self.uploads.insert(place, upload);
            }
            Output::StopUpload { manifest, rank } => {
                if let Some(upload) = self.uploads.remove(&(manifest, rank)) {
                    stop_upload(trickle, upload, rank);
                }
            }
            Output::Withdraw { manifest, rank } => {
                let upload = self.uploads.remove(&(manifest.name(), rank));
                withdraw(trickle, upload, manifest, rank);
            }
            Output::Publish {
                manifest,
                enclosures,
                authorship,
            } => self.publish(trickle, manifest, enclosures, authorship),
            other => self.consult(trickle, other),
        }
    }

    fn upload(
        &self,
        trickle: Arc<Trickle>,
        manifest: Arc<ManifestBytes>,
        rank: Rank,
        shard: SlotShard,
        base: Option<UploadBase>,
        leftovers: Leftovers,
    ) -> RunningUpload {
        let ops = self.ops.clone();
        let whose = manifest.clone();
        let task = self.when_done(async move {
            let copied = trickle.upload(&manifest, rank, &shard, base.as_ref(), leftovers);
            let copied = copied.await;
            ops.metrics.observe_upload(&copied);
            if let Ok(copied) = &copied {
                say_copied(manifest.manifest(), rank, copied);
            }
            let outcome = copied.map(|copied| copied.tally());
            Input::Uploaded {
                manifest: manifest.name(),
                rank,
                outcome,
            }
        });
        RunningUpload {
            manifest: whose,
            task,
        }
    }

    fn publish(
        &self,
        trickle: Arc<Trickle>,
        manifest: Arc<ManifestBytes>,
        enclosures: Enclosures,
        authorship: Authorship,
    ) {
        let ops = self.ops.clone();
        self.when_done(async move {
            let outcome = trickle.publish(&manifest, &enclosures, &authorship).await;
            if outcome.is_err() {
                ops.metrics.observe_unpublished();
            } else {
                let manifest = manifest.clone();
                tokio::spawn(async move {
                    let record = manifest.manifest();
                    let owner = record.owner;
                    let trust = match authorship.keys {
                        Some(keys) => Trust::Job {
                            owner,
                            keys,
                            known: authorship.predecessor,
                        },
                        None => Trust::Nothing { owner },
                    };
                    trickle.tidy(&record.namespace, record.run, &trust).await;
                });
            }
            Input::Published {
                manifest: manifest.name(),
                outcome,
            }
        });
    }

    fn list(
        &self,
        trickle: Arc<Trickle>,
        query: QueryId,
        namespace: Namespace,
        step: Option<Step>,
        trust: Trust,
    ) {
        let ops = self.ops.clone();
        self.when_done(async move {
            let outcome = trickle.list(&namespace, step, &trust).await;
            if let Ok(listing) = &outcome {
                ops.metrics.observe_set_aside(&listing.set_aside);
            }
            Input::DurableListed { query, outcome }
        });
    }

    fn fetch(
        &self,
        trickle: Arc<Trickle>,
        manifest: Arc<ManifestBytes>,
        rank: Rank,
        slot: SlotId,
        ranges: Vec<Range<u64>>,
        trust: Trust,
    ) {
        let inputs = self.inputs.clone();
        self.when_done(async move {
            let fetched = trickle.fetch(&manifest, rank, slot, &ranges, &trust);
            let outcome = match fetched.await {
                Ok(leaves) => Ok(leaves),
                Err(not_fetched) => Err(tell_bases(not_fetched, &inputs).await),
            };
            Input::Fetched { slot, outcome }
        });
    }

    /// Reads the tier or changes what it says of runs and checkpoints.
    fn consult(&self, trickle: Arc<Trickle>, output: Output) {
        match output {
            Output::ListDurable {
                query,
                namespace,
                step,
                trust,
            } => self.list(trickle, query, namespace, step, trust),
            Output::Curate {
                id,
                namespace,
                owner,
                curation,
            } => drop(self.when_done(async move {
                let outcome = trickle.curate(&namespace, owner, &curation).await;
                Input::Curated { id, outcome }
            })),
            Output::ClaimRun {
                query,
                namespace,
                owner,
                consent,
                above,
                identity,
            } => drop(self.when_done(async move {
                let claimed =
                    trickle.claim_run(&namespace, owner, consent.as_ref(), above, identity);
                let outcome = claimed.await;
                Input::RunClaimed { query, outcome }
            })),
            Output::RecordRun {
                namespace,
                owner,
                run,
            } => drop(self.when_done(async move {
                let outcome = trickle.record_run(&namespace, owner, run).await;
                Input::RunRecorded {
                    namespace,
                    run,
                    outcome,
                }
            })),
            Output::FindRun {
                query,
                namespace,
                run,
            } => drop(self.when_done(async move {
                let outcome = trickle.find_run(&namespace, run).await;
                Input::RunFound { query, outcome }
            })),
            Output::Fetch {
                manifest,
                rank,
                slot,
                ranges,
                trust,
            } => self.fetch(trickle, manifest, rank, slot, ranges, trust),
            other => self.ask_of_tokens(trickle, other),
        }
    }

    /// Reads or writes changes of jobs' tokens.
    fn ask_of_tokens(&self, trickle: Arc<Trickle>, output: Output) {
        match output {
            Output::FindSuccessions {
                query,
                namespace,
                trust,
            } => drop(self.when_done(async move {
                let found = trickle.find_successions(&namespace, trust.as_ref());
                let outcome = found.await;
                Input::SuccessionsFound { query, outcome }
            })),
            Output::Succeed {
                query,
                rotation,
                retired,
            } => drop(self.when_done(async move {
                let outcome = trickle.succeed(&rotation, &retired).await;
                let outcome = outcome.map(Box::new);
                Input::Succeeded { query, outcome }
            })),
            _ => {}
        }
    }
}

/// The decisions hear of bases that were set aside before they hear that the shard did not come: the plan that follows passes them over.
async fn tell_bases(not_fetched: NotFetched, inputs: &mpsc::Sender<Input>) -> DurableFault {
    for SetAsideBase { manifest, fault } in not_fetched.bases {
        let news = TierNews::Damaged(manifest, fault);
        let _ = inputs.send(Input::DurableState(news)).await;
    }
    not_fetched.fault
}

/// What an upload has begun in the tier is there once it has ended.
async fn end_upload(upload: &mut RunningUpload) {
    upload.task.abort();
    let _ = (&mut upload.task).await;
}

fn stop_upload(trickle: Arc<Trickle>, mut upload: RunningUpload, rank: Rank) {
    tokio::spawn(async move {
        end_upload(&mut upload).await;
        trickle.drop_upload(&upload.manifest, rank).await;
    });
}

/// As [`stop_upload`], of an upload that may have come to its end.
fn withdraw(
    trickle: Arc<Trickle>,
    upload: Option<RunningUpload>,
    manifest: Arc<ManifestBytes>,
    rank: Rank,
) {
    tokio::spawn(async move {
        if let Some(mut upload) = upload {
            end_upload(&mut upload).await;
        }
        trickle.withdraw(&manifest, rank).await;
    });
}
