//! Saving: slots that are mapped once and reused for every step.

use std::sync::Arc;

use storaged_arena::{Mapping, Slot, SlotMemory};
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::{Rank, RefusalCode, RunId, SlotId, Step, WorldSize};

use crate::client::Client;
use crate::connection::{Answer, ConnectOptions, Welcome, unexpected};
use crate::error::ClientError;
use crate::patience::Patience;

/// Slots that stay mapped: more than a rank fills in turn.
const MAPPINGS_MAX: usize = 8;

/// One rank of one run, saving. Where its daemon is restarted or upgraded, the next call connects again as the same rank of the same run. Only
/// the save that was being filled fails, with [`ClientError::SlotLost`] or [`ClientError::Broken`].
#[derive(Debug)]
pub struct Trainer {
    client: Client,
    welcome: Welcome,
    run: RunId,
    /// The slots that were used last, the latest at the end. All are of the daemon that `welcome` is of: another one's numbers mean other
    /// memory.
    mapped: Vec<Mapped>,
    /// How many were mapped.
    mapped_ever: u64,
    /// The step that was sealed last, and the connection on which it was.
    sealed: Option<(Step, u64)>,
}

/// A slot's memory.
#[derive(Debug, Clone)]
struct Mapped {
    slot: SlotId,
    number: u64,
    memory: Arc<SlotMemory>,
}

/// A slot to fill.
#[derive(Debug, Clone)]
pub struct StagedSlot {
    mapped: Mapped,
    /// The connection for which the daemon holds it.
    connection: Option<u64>,
}

impl StagedSlot {
    /// The daemon's number of it. Another daemon, after a restart, may give the same number to other memory.
    pub fn id(&self) -> SlotId {
        self.mapped.slot
    }

    /// Which memory, of all that this trainer has mapped: the same number means the same memory as before, with what was last written there,
    /// also after a restart of the daemon.
    pub fn memory_number(&self) -> u64 {
        self.mapped.number
    }

    /// The memory.
    pub fn memory(&self) -> &SlotMemory {
        &self.mapped.memory
    }

    /// Where it is mapped.
    pub fn mapping(&self) -> &Mapping {
        self.memory().mapping()
    }

    /// Copies bytes to their offset.
    ///
    /// # Errors
    /// [`ClientError::Slot`] if they do not fit.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<(), ClientError> {
        Ok(self.memory().copy_in(offset, bytes)?)
    }

    /// Makes all of a new slot ready now, for a save that comes later: its first copy is as fast as the others then. Ends early if
    /// `is_called_away` says so.
    ///
    /// # Errors
    /// [`ClientError::CalledAway`] if it did.
    pub fn get_ready(&self, is_called_away: impl FnMut() -> bool) -> Result<(), ClientError> {
        if self.memory().map_pages(is_called_away) {
            return Ok(());
        }
        let request = "getting a slot ready";
        Err(ClientError::CalledAway { request })
    }
}

impl Trainer {
    /// Connects as `rank` of `run`.
    ///
    /// # Errors
    /// [`ClientError`] if the daemon is not there or refuses the run, the token or the world size.
    pub fn connect(
        options: ConnectOptions,
        run: RunId,
        rank: Rank,
        world_size: WorldSize,
    ) -> Result<Self, ClientError> {
        Self::connect_with(options, run, rank, world_size, Patience::default())
    }

    /// Like [`Trainer::connect`], within the caller's patience, which the connection keeps.
    ///
    /// # Errors
    /// As `connect`.
    pub fn connect_with(
        mut options: ConnectOptions,
        run: RunId,
        rank: Rank,
        world_size: WorldSize,
        patience: Patience,
    ) -> Result<Self, ClientError> {
        options.role = Role::Trainer {
            run,
            rank,
            world_size,
        };
        let (client, welcome) = Client::connect_with(&options, patience)?;
        Ok(Self {
            client,
            welcome,
            run,
            mapped: Vec::new(),
            mapped_ever: 0,
            sealed: None,
        })
    }

    /// From now on answers without a time of their own may take this long, and this ends waits early.
    pub fn be_patient(&mut self, patience: Patience) {
        self.client.be_patient(patience);
    }

    /// What the daemon said of itself when a slot was acquired last, or at first.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// The run it saves for.
    pub fn run(&self) -> RunId {
        self.run
    }

    /// Gets a slot of at least `bytes`, waiting up to `timeout_ms` for one to be free.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the budget is full or all slots stay in use.
    pub fn acquire(&mut self, bytes: u64, timeout_ms: u32) -> Result<StagedSlot, ClientError> {
        let request = Request::AcquireSlot { bytes, timeout_ms };
        let answer = Answer::After(timeout_ms);
        let (reply, fd) = self.client.call("acquire slot", &request, answer)?;
        let Reply::SlotGranted { slot, .. } = reply else {
            return Err(unexpected("acquire slot", "a slot", &reply));
        };
        self.meet_daemon();
        let known = self.mapped.iter().position(|known| known.slot == slot);
        let mapped = match (known, fd) {
            (Some(at), _) => self.mapped.remove(at),
            (None, Some(fd)) => self.map(slot, Slot::adopt(fd)?)?,
            (None, None) => {
                let expected = "a descriptor with the slot";
                return Err(unexpected("acquire slot", expected, &reply));
            }
        };
        // The daemon may have dropped any of them: keep a few.
        let spare = (self.mapped.len() + 1).saturating_sub(MAPPINGS_MAX);
        self.mapped.drain(..spare);
        self.mapped.push(mapped.clone());
        let connection = self.client.connection().number();
        Ok(StagedSlot { mapped, connection })
    }

    /// Another daemon than before never gives what the earlier one gave. As long as it is mapped here, its memory would stay.
    fn meet_daemon(&mut self) {
        let Some(welcome) = self.client.connection().welcome() else {
            return;
        };
        if welcome.generation != self.welcome.generation {
            self.mapped.clear();
        }
        self.welcome = welcome.clone();
    }

    fn map(&mut self, slot: SlotId, file: Slot) -> Result<Mapped, ClientError> {
        let memory = Arc::new(SlotMemory::new(file)?);
        self.mapped_ever += 1;
        let number = self.mapped_ever;
        Ok(Mapped {
            slot,
            number,
            memory,
        })
    }

    /// Whether the daemon holds the slot for this connection still.
    fn is_held(&self, slot: &StagedSlot) -> bool {
        slot.connection.is_some() && slot.connection == self.client.connection().number()
    }

    /// Seals the first `length` bytes as this rank's shard at `step`: nothing may change any more. Of a new slot a thread then maps the pages
    /// for the saves to come.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the shard is too long, the step not newer, or the run fenced off; [`ClientError::SlotLost`] if the
    /// connection broke since the slot was acquired.
    pub fn seal(&mut self, slot: &StagedSlot, step: Step, length: u64) -> Result<(), ClientError> {
        let request = "seal slot";
        let Some(connection) = slot.connection.filter(|_| self.is_held(slot)) else {
            return Err(ClientError::SlotLost { request });
        };
        let (memory, slot) = (&slot.mapped.memory, slot.id());
        let seal = Request::SealSlot { slot, step, length };
        self.client.done(request, &seal)?;
        memory.map_pages_behind();
        self.sealed = Some((step, connection));
        Ok(())
    }

    /// Gives a slot back unused. The daemon has taken it back already where the connection broke since it was acquired.
    ///
    /// # Errors
    /// [`ClientError`] if the daemon cannot be told.
    pub fn release(&mut self, slot: &StagedSlot) -> Result<(), ClientError> {
        if !self.is_held(slot) {
            return Ok(());
        }
        let release = Request::ReleaseSlot { slot: slot.id() };
        match self.client.done("release slot", &release) {
            Err(ClientError::Broken { .. }) => Ok(()),
            told => told,
        }
    }

    /// From one rank per step: describes the checkpoint, which commits once every rank has sealed.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if this rank has not sealed the step; [`ClientError::SlotLost`] if it has, and the daemon was restarted before it
    /// had digested the shard.
    pub fn commit(
        &mut self,
        step: Step,
        schema: Vec<u8>,
        torch_metadata: Vec<u8>,
        durable: DurableWish,
    ) -> Result<(), ClientError> {
        let request = Request::Commit {
            step,
            schema: schema.into(),
            torch_metadata: torch_metadata.into(),
            durable,
        };
        let told = self.client.done("commit", &request);
        let is_lost = |connection| self.client.connection().number() != Some(connection);
        match told {
            Err(ClientError::Refused(refusal))
                if refusal.code == RefusalCode::WrongSlot
                    && self
                        .sealed
                        .is_some_and(|(sealed, on)| sealed == step && is_lost(on)) =>
            {
                Err(ClientError::SlotLost { request: "commit" })
            }
            told => told,
        }
    }
}
