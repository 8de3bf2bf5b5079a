//! What peers, tiers and clients say that is not so: things that were said before, samples of every message there is, and both
//! with names, digests and numbers that were seen elsewhere.

use storaged_core::{Input, QueryId, Viewer};
use storaged_wire::drain::{DrainOrder, PlaceAfter};
use storaged_wire::failed::FailureReport;
use storaged_wire::local::{BoardKind, Keep, LiveRun, PinnedOnes, Removal, Request, Role};
use storaged_wire::peer::PeerMessage;
use storaged_wire::{Rank, SlotId, Step, TenantName};

use super::scene::{Cluster, tier_fault};
use crate::samples;
use crate::testkit::name;
use crate::twist::Twist;

impl Cluster {
    /// A peer says again what somebody has said, to the same node or another one.
    pub fn say_again(&mut self, twist: Twist) {
        let past = &self.scene.past;
        let Some((to, from, message)) = past.messages.get(twist.pick(past.messages.len())) else {
            return;
        };
        let nodes = self.processes.len();
        let to = if twist.how() >= 192 {
            (to + 1) % nodes
        } else {
            *to
        };
        let from = if twist.how() >= 224 {
            name(twist.choose(nodes))
        } else {
            from.clone()
        };
        let message = twist.twist(message, &past.seen);
        self.hears(to, Input::Message { from, message });
    }

    /// A peer says something that it was never asked for.
    pub fn say_anything(&mut self, node: usize, which: u8, twist: Twist) {
        let mut all = samples::checkpoint_messages();
        all.extend(samples::session_messages());
        let from = name((node + 1 + twist.pick(3)) % self.processes.len());
        let message = &all[usize::from(which) % all.len()];
        // Twice: a sample names nothing that there is.
        let seen = &self.scene.past.seen;
        let known = Twist::of([twist.at() as u8, 0, twist.with() as u8, 4]);
        let message: PeerMessage = known.twist(&twist.twist(message, seen), seen);
        self.hears(node, Input::Message { from, message });
    }

    /// Something comes in from outside: what it tells of is told of, and whoever says it has a name that is not the node's own.
    fn hears(&mut self, to: usize, input: Input) {
        if let Input::Message { from, message } = &input {
            if *from == name(to) {
                return;
            }
            if let PeerMessage::Committed { manifest, .. } = message {
                self.scene.oracle.tells_of(manifest);
            }
        }
        self.tell(to, input);
    }

    /// A client asks again, on its connection, something like what was asked.
    pub fn ask_again(&mut self, twist: Twist) {
        let past = &self.scene.past;
        let Some((_, conn, request)) = past.requests.get(twist.pick(past.requests.len())) else {
            return;
        };
        let (conn, request) = (*conn, twist.twist(request, &past.seen));
        self.request(conn, request);
    }

    /// Some client asks something that was not asked before.
    pub fn ask_anything(&mut self, job: usize, node: usize, twist: Twist) {
        let viewer = match twist.how() % 4 {
            0 => Viewer::Operator,
            1 => Viewer::Tenant(TenantName::new("red").ok()),
            _ => {
                let namespace = &self.scene.jobs[job].namespace;
                Viewer::Tenant(namespace.tenant().and_then(|it| TenantName::new(it).ok()))
            }
        };
        let conn = self.open(node, viewer);
        if twist.how() % 8 != 7 {
            let namespace = self.scene.jobs[job].namespace.clone();
            self.request(conn, crate::testkit::hello(namespace, Role::Reader));
            self.run_for(3);
        }
        let request = self.some_request(job, node, twist);
        self.request(conn, request);
    }

    fn some_request(&mut self, job: usize, node: usize, twist: Twist) -> Request {
        let it = &self.scene.jobs[job];
        let (run, step) = (it.run, Step::new(it.step.saturating_sub(twist.with() % 3)));
        let timeout_ms = 1_000 + 100 * u32::from(twist.how());
        let namespace = it.namespace.clone();
        let some = twist.with() % 2 == 1;
        let pinned = some.then_some(PinnedOnes::Too);
        match twist.at() % 20 {
            0 => Request::Status,
            1 => Request::RestartSafe {
                bears: some.then_some(twist.with() as u32 % 4),
            },
            2 => Request::List {
                namespace: some.then_some(namespace),
            },
            3 => Request::Drop {
                force: some,
                timeout_ms,
            },
            4 => Request::Verify {
                step: some.then_some(step),
                timeout_ms,
            },
            5 => Request::Keep {
                run: run.filter(|_| some),
                step,
                keep: Keep::Pin,
            },
            6 => Request::Remove(Removal::Step { run, step }, LiveRun::Spared, pinned),
            7 => Request::Remove(Removal::All, LiveRun::Too, pinned),
            8 | 9 => Request::RestartFailed(FailureReport {
                run: run.filter(|_| some),
                step,
                timeout_ms,
            }),
            10 => Request::LiftQuarantine { step },
            11 | 12 => Request::Drain(DrainOrder {
                within_ms: timeout_ms,
                place: PlaceAfter::GivenUp,
                bears: some.then_some(2),
            }),
            13 | 14 => Request::Board {
                rank: Rank::new(twist.how().into()),
                kind: BoardKind::Steps,
                bytes: twist.with() * 10_000,
            },
            15 => Request::ReleaseSlot {
                slot: self.some_slot(node, twist),
            },
            16 => Request::SealSlot {
                slot: self.some_slot(node, twist),
                step,
                length: twist.number(),
            },
            17 => self.some_opened(twist),
            _ => {
                let all = samples::requests();
                let seen = &self.scene.past.seen;
                twist.twist(&all[twist.choose(all.len())], seen)
            }
        }
    }

    fn some_slot(&self, node: usize, twist: Twist) -> SlotId {
        let process = self.processes[node].as_ref();
        let slots = process.map(|process| process.leaves.keys().copied().collect::<Vec<_>>());
        let slots = slots.unwrap_or_default();
        let slot = slots.get(twist.choose(slots.len())).copied();
        slot.unwrap_or(SlotId::new(twist.number()))
    }

    /// A shard of a manifest that went by, whosever it is.
    fn some_opened(&self, twist: Twist) -> Request {
        let all: Vec<_> = self
            .scene
            .oracle
            .manifests()
            .map(|(name, _)| *name)
            .collect();
        let Some(manifest) = all.get(twist.choose(all.len())) else {
            return Request::Status;
        };
        let rank = Rank::new(twist.how().into());
        crate::testkit::open_shard(*manifest, rank, 9_000)
    }

    /// The tier or the registry answers again, to somebody else, late, or otherwise.
    pub fn tier_says_again(&mut self, twist: Twist) {
        let past = &self.scene.past.answers;
        let Some((node, input)) = past.get(twist.pick(past.len())).cloned() else {
            return;
        };
        let nodes = self.processes.len();
        let node = if twist.how() >= 192 {
            (node + 1) % nodes
        } else {
            node
        };
        let input = if twist.how().is_multiple_of(2) {
            input
        } else {
            otherwise(input, twist)
        };
        self.soon(node, input);
    }
}

/// The same question, answered otherwise.
fn otherwise(input: Input, twist: Twist) -> Input {
    let fault = tier_fault(twist.with() as u8);
    let query = QueryId(twist.with());
    match input {
        Input::Uploaded { manifest, rank, .. } => Input::Uploaded {
            manifest,
            rank,
            outcome: Err(fault),
        },
        Input::Published { manifest, .. } => Input::Published {
            manifest,
            outcome: Err(fault),
        },
        Input::DurableListed { outcome, .. } => Input::DurableListed {
            query,
            outcome: outcome.map(|mut listing| {
                listing.manifests.reverse();
                listing.enclosures.clear();
                listing
            }),
        },
        Input::Fetched { slot, .. } => Input::Fetched {
            slot,
            outcome: Err(fault),
        },
        Input::RunClaimed { outcome, .. } => Input::RunClaimed { query, outcome },
        Input::RunFound { outcome, .. } => Input::RunFound { query, outcome },
        Input::RunRegistered { run, outcome, .. } => Input::RunRegistered {
            query,
            run,
            outcome,
        },
        other => other,
    }
}
