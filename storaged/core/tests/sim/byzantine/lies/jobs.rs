//! Lies of whole jobs and nodes: who trains, what may go, which tokens and keys there are, and who ends.

use storaged_wire::failed::{FailedRestart, NamespaceFailures};
use storaged_wire::peer::{CheckpointKey, DropAnswer, DropOrder, PeerMessage};
use storaged_wire::pins::{NamespacePins, Pin, PinAnswer, PinDoubt};
use storaged_wire::provenance::{KeyTold, KeyWanted};
use storaged_wire::succession::{RecordSource, RetiredKey, Rotated, SEAL_BYTES, TokenStanding};
use storaged_wire::{ManifestKey, Rotation};

use super::super::super::world::World;
use super::super::kinds::Kind;
use super::super::known::Address;
use super::OWN_TOKEN;
use crate::testkit::{TOKEN, drop_order, given_at, namespace, owner};

impl World {
    /// That the job has trainers at it, or has none, and that jobs have which nobody has.
    pub(super) fn lie_of_trainers(&mut self) -> PeerMessage {
        let count = self.random(3) * self.random(100);
        PeerMessage::Attached((0..count).map(|_| self.some_job()).collect())
    }

    pub(super) fn lie_of_an_eviction(&mut self, at: Address) -> PeerMessage {
        let key = self.some_key(at.by);
        let durable = self.random(2) == 0;
        PeerMessage::Evicted {
            up_to: key.mark(),
            namespace: key.namespace,
            durable,
        }
    }

    /// What is asked for in the name of the job's owner, whose token it has never heard.
    fn some_order(&mut self, at: Address) -> DropOrder {
        let plain = drop_order(namespace(), self.random(200));
        match self.random(3) {
            0 => plain,
            1 => given_at(at.by, OWN_TOKEN, plain),
            // One that somebody with the token has given elsewhere, as it was heard.
            _ => {
                let honest = self.honest();
                given_at(self.one_of(&honest), TOKEN, plain)
            }
        }
    }

    pub(super) fn lie_of_an_order(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Drop(self.some_order(at))
    }

    pub(super) fn question_of_an_order(&mut self, at: Address) -> PeerMessage {
        PeerMessage::CheckOrder {
            query: self.limit_number(),
            order: Box::new(self.some_order(at)),
        }
    }

    pub(super) fn lie_of_a_checked_order(&mut self, at: Address) -> PeerMessage {
        let is_proven = self.random(4) > 0;
        PeerMessage::OrderChecked {
            query: self.some_query(at, Kind::CheckOrder),
            is_proven,
        }
    }

    pub(super) fn lie_of_a_dropped_job(&mut self, at: Address) -> PeerMessage {
        let freed = DropAnswer::Freed {
            bytes: self.limit_number(),
            checkpoints: self.limit_number() as u32,
        };
        let refused = DropAnswer::Refused(self.some_reason());
        PeerMessage::Dropped {
            query: self.some_query(at, Kind::Drop),
            answer: self.one_of(&[freed, refused]),
        }
    }

    /// Of some step, as often as a node can have missed it or never.
    fn some_pin(&mut self, key: &CheckpointKey) -> Pin {
        let changes = match self.random(3) {
            0 => u32::MAX,
            changes => changes as u32,
        };
        Pin {
            run: key.run,
            step: key.step,
            pinned: self.random(3) > 0,
            changes,
            doubt: (self.random(2) == 0).then_some(PinDoubt::Undecided),
        }
    }

    pub(super) fn lie_of_a_pin(&mut self, at: Address) -> PeerMessage {
        let key = self.some_key(at.by);
        let query = (self.random(2) == 0).then_some(9);
        let of = NamespacePins {
            pins: vec![self.some_pin(&key)],
            namespace: key.namespace,
            owner: self.some_owner(),
        };
        PeerMessage::Pins(query, of)
    }

    pub(super) fn lie_of_a_noted_pin(&mut self, at: Address) -> PeerMessage {
        let no_room = PinAnswer::NoRoom(self.some_reason());
        let query = self.some_query(at, Kind::Pins);
        let answer = self.one_of(&[PinAnswer::Noted, PinAnswer::NotHere, no_room]);
        PeerMessage::PinNoted(query, answer)
    }

    /// Of the job that a restart is offered again from a step, and of others whatever can be said. That a restart failed from a step of
    /// the job would have it passed over (docs/SECURITY.md).
    pub(super) fn lie_of_a_failed_restart(&mut self, at: Address) -> PeerMessage {
        let CheckpointKey {
            namespace: of,
            run,
            step,
        } = self.some_key(at.by);
        let others = self.limit_number() as u32;
        let times = if of == namespace() { 0 } else { others };
        PeerMessage::FailedRestarts(vec![NamespaceFailures {
            namespace: of,
            owner: self.some_owner(),
            failed: vec![FailedRestart {
                run,
                step,
                times,
                wait_ms: (self.random(2) == 0).then(|| self.limit_number()),
                changes: self.limit_number() as u32,
            }],
        }])
    }

    pub(super) fn lie_of_a_drain(&mut self) -> PeerMessage {
        let turn = self.limit_number();
        PeerMessage::Draining { turn }
    }

    pub(super) fn lie_of_a_noted_drain(&mut self) -> PeerMessage {
        PeerMessage::DrainNoted {
            turn: (self.random(2) == 0).then(|| self.limit_number()),
        }
    }

    pub(super) fn question_of_a_key(&mut self) -> PeerMessage {
        PeerMessage::KeyWanted(KeyWanted {
            namespace: self.some_job(),
            owner: self.some_owner(),
        })
    }

    pub(super) fn lie_of_a_key(&mut self) -> PeerMessage {
        let of = self.some_job();
        let key = ManifestKey::of_token(&of, OWN_TOKEN);
        let retired = RetiredKey { key, up_to: None };
        PeerMessage::KeyTold(KeyTold {
            namespace: of,
            owner: self.some_owner(),
            key,
            retired: (self.random(2) == 0).then(|| vec![retired]),
        })
    }

    pub(super) fn lie_of_a_removal(&mut self) -> PeerMessage {
        PeerMessage::DurableRemoved {
            namespace: self.some_job(),
            owner: self.some_owner(),
        }
    }

    /// That the job's token was changed, by who never had it.
    pub(super) fn lie_of_a_changed_token(&mut self, at: Address) -> Option<PeerMessage> {
        let key = self.some_key(at.by);
        let standing = TokenStanding {
            durable: (self.random(2) == 0).then(|| key.mark()),
            namespace: key.namespace,
            succession: None,
        };
        let seal = [self.random(256) as u8; SEAL_BYTES];
        let made = Rotation::new(&standing, OWN_TOKEN, b"the next token of its own", seal);
        let Rotation {
            mut succession,
            keys,
        } = made.ok()?;
        succession.owner = self.one_of(&[succession.owner, owner()]);
        succession.number = match self.random(3) {
            0 => self.limit_number() as u32,
            _ => succession.number,
        };
        Some(PeerMessage::Rotated(Box::new(Rotated {
            succession,
            keys: (self.random(2) == 0).then_some(keys),
            source: self.one_of(&[None, Some(RecordSource::Own), Some(RecordSource::Told)]),
        })))
    }
}
