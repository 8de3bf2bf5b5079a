//! Saving: slots that are mapped once and reused for every step.

use std::sync::Arc;

use storaged_arena::{Mapping, Slot};
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::{Rank, RunId, SlotId, Step, WorldSize};

use crate::client::{Answer, Client, ConnectOptions, Welcome, unexpected};
use crate::error::ClientError;
use crate::patience::Patience;

/// Page tables of so many bytes are filled at once: some 50 ms.
const PAGES_AT_ONCE_BYTES: usize = 32 << 20;

/// Slots that stay mapped: more than a rank fills in turn.
const MAPPINGS_MAX: usize = 8;

/// One rank of one run, saving.
#[derive(Debug)]
pub struct Trainer {
    client: Client,
    welcome: Welcome,
    run: RunId,
    /// The slots that were used last, the latest at the end.
    mappings: Vec<(SlotId, Arc<Mapping>)>,
}

/// A slot to fill.
#[derive(Debug, Clone)]
pub struct StagedSlot {
    slot: SlotId,
    mapping: Arc<Mapping>,
}

impl StagedSlot {
    /// Which slot: the same number means the same memory as before, with what was last written there.
    pub fn id(&self) -> SlotId {
        self.slot
    }

    /// The memory.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Copies bytes to their offset.
    ///
    /// # Errors
    /// [`ClientError::Slot`] if they do not fit.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<(), ClientError> {
        Ok(self.mapping.copy_in(offset, bytes)?)
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
            mappings: Vec::new(),
        })
    }

    /// From now on answers without a time of their own may take this long, and this ends waits early.
    pub fn be_patient(&mut self, patience: Patience) {
        self.client.be_patient(patience);
    }

    /// What the daemon said of itself.
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
        let known = self.mappings.iter().position(|(known, _)| *known == slot);
        let mapping = match (known, fd) {
            (Some(at), _) => self.mappings.remove(at).1,
            (None, Some(fd)) => {
                let mapping = Mapping::unfilled(&Slot::adopt(fd)?)?;
                self.fill_pages(&mapping)?;
                Arc::new(mapping)
            }
            (None, None) => {
                let expected = "a descriptor with the slot";
                return Err(unexpected("acquire slot", expected, &reply));
            }
        };
        // The daemon may have dropped any of them, and their memory stays as long as it is mapped: keep a few.
        let spare = (self.mappings.len() + 1).saturating_sub(MAPPINGS_MAX);
        self.mappings.drain(..spare);
        self.mappings.push((slot, mapping.clone()));
        Ok(StagedSlot { slot, mapping })
    }

    /// Fills the page tables of a new mapping, so that no page fault costs time later: piece by piece, because this
    /// takes seconds for a large one.
    fn fill_pages(&self, mapping: &Mapping) -> Result<(), ClientError> {
        for start in (0..mapping.length()).step_by(PAGES_AT_ONCE_BYTES) {
            if self.client.patience().is_called_away() {
                let request = "acquire slot";
                return Err(ClientError::CalledAway { request });
            }
            mapping.fill(start, PAGES_AT_ONCE_BYTES);
        }
        Ok(())
    }

    /// Seals the first `length` bytes as this rank's shard at `step`: nothing may change any more.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the shard is too long, the step not newer, or the run fenced off.
    pub fn seal(&mut self, slot: &StagedSlot, step: Step, length: u64) -> Result<(), ClientError> {
        let slot = slot.slot;
        self.client
            .done("seal slot", &Request::SealSlot { slot, step, length })
    }

    /// Gives a slot back unused.
    ///
    /// # Errors
    /// [`ClientError`] if the daemon cannot be told.
    pub fn release(&mut self, slot: &StagedSlot) -> Result<(), ClientError> {
        self.client
            .done("release slot", &Request::ReleaseSlot { slot: slot.slot })
    }

    /// From one rank per step: describes the checkpoint, which commits once every rank has sealed.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if this rank has not sealed the step.
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
        self.client.done("commit", &request)
    }
}
