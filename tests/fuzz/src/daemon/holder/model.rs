//! What a holder must have after all that was said to it, and what it must answer.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;

use storaged::keep::holder::Reaction;
use storaged::keep::message::{
    HeldCount, HoldAnswer, HoldOrder, HolderName, KeeperIdentity, ToHolder,
};

use super::said::Comes;

/// So many names are held at most: few, so that tables get full.
pub const ROOM: usize = 6;

/// Names, and the index of the file that is held by each.
pub type Names = BTreeMap<String, usize>;

/// The keeper that must be attached.
struct ExpectedKeeper {
    connection: u64,
    identity: KeeperIdentity,
    anew: Option<Names>,
    missed: usize,
}

/// The daemon that was named last.
struct NamedDaemon {
    keeper: KeeperIdentity,
    number: u32,
    /// While it runs.
    life: Option<UnixStream>,
}

/// What a holder must have.
#[derive(Default)]
pub struct Expected {
    pub names: Names,
    attached: Option<ExpectedKeeper>,
    daemon: Option<NamedDaemon>,
    /// What the keeper that is attached must have been told unasked.
    pub told: Option<HoldAnswer>,
}

impl Expected {
    pub fn is_attached(&self, connection: u64) -> bool {
        let attached = self.attached.as_ref();
        attached.is_some_and(|it| it.connection == connection)
    }

    /// What must come of a datagram.
    pub fn take(&mut self, connection: u64, body: &[u8], comes: Comes) -> Reaction {
        match (HoldOrder::decode(body), comes) {
            (Some(HoldOrder::Attach(keeper)), Comes::Nothing) => self.attach(connection, keeper),
            (Some(HoldOrder::Release), Comes::Nothing) => self.release(),
            (Some(HoldOrder::Who), Comes::Nothing) => {
                let attached = self.attached.as_ref();
                Reaction::Part(attached.map(|it| HoldAnswer::Busy(it.identity.process)))
            }
            // Nothing else is heard of who is not attached.
            _ if !self.is_attached(connection) => Reaction::Part(None),
            (Some(order), comes) => self.heed(order, comes),
            (None, comes) => self.change(body, &comes),
        }
    }

    fn attach(&mut self, connection: u64, identity: KeeperIdentity) -> Reaction {
        let other = self.attached.as_ref().map(|it| it.identity);
        let running = self.daemon.as_ref().filter(|it| it.life.is_some());
        if let Some(other) = other.filter(|it| *it != identity) {
            return Reaction::Part(Some(HoldAnswer::Busy(other.process)));
        }
        if let Some(running) = running.filter(|it| it.keeper != identity) {
            return Reaction::Part(Some(HoldAnswer::Busy(running.number)));
        }
        self.attached = Some(ExpectedKeeper {
            connection,
            identity,
            anew: None,
            missed: 0,
        });
        Reaction::None
    }

    /// Refused while a daemon runs, or a keeper is attached whose own has not ended.
    fn release(&mut self) -> Reaction {
        let has_ended = |of: KeeperIdentity| {
            let daemon = self.daemon.as_ref().filter(|it| it.keeper == of);
            daemon.is_some_and(|it| it.life.is_none())
        };
        let running = self.daemon.as_ref().filter(|it| it.life.is_some());
        let busy = match &self.attached {
            Some(keeper) if has_ended(keeper.identity) => None,
            Some(keeper) => Some(keeper.identity.process),
            None => running.map(|it| it.number),
        };
        if let Some(process) = busy {
            return Reaction::Part(Some(HoldAnswer::Busy(process)));
        }
        let answer = HoldAnswer::Released(self.names.len());
        self.told = self.attached.is_some().then_some(answer);
        self.names.clear();
        Reaction::Part(Some(answer))
    }

    /// Any other order, of the keeper that is attached.
    fn heed(&mut self, order: HoldOrder, comes: Comes) -> Reaction {
        let Some(attached) = &mut self.attached else {
            return Reaction::Part(None);
        };
        match (order, comes) {
            (HoldOrder::Anew, Comes::Nothing) => {
                attached.anew = Some(Names::new());
                attached.missed = 0;
                Reaction::None
            }
            (HoldOrder::Count, Comes::Nothing) => self.count(),
            (HoldOrder::Daemon(number), Comes::File(_)) => self.name_daemon(number, None),
            (HoldOrder::Daemon(number), Comes::Daemon(life)) => {
                self.name_daemon(number, Some(life))
            }
            _ => self.miss(),
        }
    }

    fn name_daemon(&mut self, number: u32, life: Option<UnixStream>) -> Reaction {
        let keeper = self.attached.as_ref().map(|it| it.identity);
        self.daemon = keeper.map(|keeper| NamedDaemon {
            keeper,
            number,
            life,
        });
        Reaction::None
    }

    fn count(&mut self) -> Reaction {
        let Some(attached) = &mut self.attached else {
            return Reaction::Part(None);
        };
        let missed = std::mem::take(&mut attached.missed);
        let before = match attached.anew.take() {
            Some(anew) => std::mem::replace(&mut self.names, anew),
            None => self.names.clone(),
        };
        let is_freed = |(name, file): &(&String, &usize)| self.names.get(*name) != Some(*file);
        let freed = before.iter().filter(is_freed).count();
        let held = self.names.len();
        Reaction::Say(if missed > 0 {
            HoldAnswer::Lacks(missed)
        } else {
            HoldAnswer::Holds(HeldCount { held, freed })
        })
    }

    /// What is no order is a change of what is held, or comes to nothing.
    fn change(&mut self, body: &[u8], comes: &Comes) -> Reaction {
        let Some(attached) = &mut self.attached else {
            return Reaction::Part(None);
        };
        let names = attached.anew.as_mut().unwrap_or(&mut self.names);
        match (ToHolder::decode(body), comes) {
            (Some(ToHolder::Store(name)), Comes::File(file)) => {
                if names.len() == ROOM && !names.contains_key(name.as_str()) {
                    return self.miss();
                }
                names.insert(name.to_string(), *file);
            }
            (Some(ToHolder::Remove(name)), Comes::Nothing) => {
                names.remove(name.as_str());
            }
            (Some(ToHolder::List), Comes::Nothing) => {
                let named = self.names.keys().filter_map(|name| HolderName::new(name));
                return Reaction::List(named.collect());
            }
            _ => return self.miss(),
        }
        Reaction::None
    }

    /// Its keeper hears of it at the next count.
    pub fn miss(&mut self) -> Reaction {
        if let Some(attached) = &mut self.attached {
            attached.missed += 1;
        }
        Reaction::None
    }

    /// The daemon that was named last ends.
    pub fn end_daemon(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            daemon.life = None;
        }
    }

    pub fn end(&mut self, connection: u64) {
        if self.is_attached(connection) {
            self.attached = None;
        }
    }
}
