//! Lies of runs: which there are, who may open them, and which were opened.

use storaged_wire::peer::{Fence, NamedRun, PeerMessage, PromiseOutcome};
use storaged_wire::{Owner, RunId};

use super::super::super::world::World;
use super::super::kinds::Kind;
use super::super::known::Address;
use super::OWN_TOKEN;
use crate::testkit::owner;

/// Identities of runs that it says to be open, and of those that it asks for. Said to be open as well, what it was promised would end the
/// job (docs/SECURITY.md): no run is both.
const SAID_TO_BE_OPEN: u64 = 0;
const ASKED_FOR: u64 = 9;
const IDENTITIES: u64 = 9;

impl World {
    /// Of a number a little above those that there are, or far out.
    fn some_run(&mut self, at: Address, identities: u64) -> RunId {
        let known = self.some_key(at.by).run.number();
        let number = match self.random(3) {
            0 => known.saturating_add(1 + self.random(3)),
            1 => known,
            _ => self.limit_number(),
        };
        RunId::with_identity(number, identities + self.random(IDENTITIES))
    }

    /// The job's owner, or somebody else.
    pub(super) fn some_owner(&mut self) -> Owner {
        match self.random(8) {
            0 => Owner::of_token(OWN_TOKEN),
            _ => owner(),
        }
    }

    fn some_named_run(&mut self, at: Address, identities: u64) -> NamedRun {
        NamedRun {
            namespace: self.some_job(),
            owner: self.some_owner(),
            run: self.some_run(at, identities),
        }
    }

    pub(super) fn some_fence(&mut self, at: Address) -> Fence {
        let NamedRun {
            namespace,
            owner,
            run,
        } = self.some_named_run(at, SAID_TO_BE_OPEN);
        let promised = match self.random(2) {
            0 => run,
            _ => self.some_run(at, SAID_TO_BE_OPEN),
        };
        Fence {
            namespace,
            owner,
            run,
            promised,
        }
    }

    /// Fences of so many jobs that nobody has.
    pub(in super::super) fn lies_of_many_jobs(&mut self, at: Address) -> PeerMessage {
        let fence = self.some_fence(at);
        let jobs = (0..200).map(|_| Fence {
            namespace: self.made_up_job(),
            ..fence.clone()
        });
        PeerMessage::Fences(jobs.collect())
    }

    /// A run that it asks for and gives up again.
    pub(in super::super) fn lies_of_a_whim(&mut self, at: Address) -> Vec<PeerMessage> {
        let (query, run) = (self.random(200), self.some_named_run(at, ASKED_FOR));
        let wish = PeerMessage::PromiseRun {
            query,
            run: run.clone(),
        };
        vec![wish, PeerMessage::WithdrawRun(run)]
    }

    pub(super) fn lie_of_a_wish(&mut self, at: Address) -> PeerMessage {
        PeerMessage::PromiseRun {
            query: self.random(200),
            run: self.some_named_run(at, ASKED_FOR),
        }
    }

    pub(super) fn lie_of_a_withdrawn_run(&mut self, at: Address) -> PeerMessage {
        PeerMessage::WithdrawRun(self.some_named_run(at, ASKED_FOR))
    }

    /// To whoever has asked it for one, as often as not.
    pub(super) fn lie_of_a_promise(&mut self, at: Address) -> PeerMessage {
        let asked = self.heard(Kind::PromiseRun, |it| it.from == at.to);
        let (query, run) = match asked.map(|it| it.message) {
            Some(PeerMessage::PromiseRun { query, run }) if self.random(4) > 0 => (query, run.run),
            _ => (self.random(200), self.some_run(at, SAID_TO_BE_OPEN)),
        };
        let highest = match self.random(2) {
            0 if !self.is_careful() => self.limit_number(),
            _ => run.number().saturating_add(self.random(9)),
        };
        let outcome = self.one_of(&[
            PromiseOutcome::Promised,
            PromiseOutcome::Taken { highest },
            PromiseOutcome::WrongOwner,
        ]);
        PeerMessage::RunPromised {
            query,
            run,
            outcome,
        }
    }

    pub(super) fn lie_of_an_opened_run(&mut self, at: Address) -> PeerMessage {
        PeerMessage::RaiseFence {
            query: self.random(200),
            run: self.some_named_run(at, SAID_TO_BE_OPEN),
        }
    }

    pub(super) fn lie_of_a_raised_fence(&mut self, at: Address) -> PeerMessage {
        let query = self.some_query(at, Kind::RaiseFence);
        PeerMessage::FenceRaised { query }
    }

    pub(super) fn question_of_a_run(&mut self) -> PeerMessage {
        PeerMessage::RunQuery {
            query: self.limit_number(),
            namespace: self.some_job(),
        }
    }

    /// About the job that it was asked for, or another one.
    pub(super) fn lie_of_a_run(&mut self, at: Address) -> PeerMessage {
        let query = self.some_query(at, Kind::RunQuery);
        let fence = (self.random(4) > 0).then(|| self.some_fence(at));
        PeerMessage::RunAnswer { query, fence }
    }
}
