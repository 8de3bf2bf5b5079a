//! What a tenant's uploads have of the way to the tier: in memory an equal part of the room for parts, so that the one with ten thousand
//! shards to copy holds up the one with one shard for a part, and not for all of them; and a rate of its own, if it has one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use storaged_core::DurableFault;
use storaged_wire::{Namespace, TenantName};
use tokio::sync::Semaphore;

use super::fault::local;
use super::room::{CopyRoom, PiecePlace};
use super::store::ByteRate;

/// Shards of a tenant that are copied at once: those that are packed, and increments, are made by a thread each.
const SHARDS_AT_ONCE: usize = 2;

/// Bytes per second that tenants upload at most, of those that have a limit.
pub type TenantRates = BTreeMap<Option<TenantName>, u64>;

/// The uploads of all tenants.
#[derive(Debug)]
pub(super) struct UploadShares {
    room: Arc<CopyRoom>,
    rates: BTreeMap<Option<String>, u64>,
    tenants: Mutex<BTreeMap<Option<String>, Arc<TenantUploads>>>,
}

/// Those of one.
#[derive(Debug)]
pub(super) struct TenantUploads {
    pub shards: Semaphore,
    /// One permit: whoever gives up waiting has paid for no more than one part.
    paying: Semaphore,
    rate: Option<ByteRate>,
}

/// A part that may be made and sent.
#[derive(Debug)]
pub(super) struct Turn {
    _place: PiecePlace,
    uploads: Arc<TenantUploads>,
    paid: u64,
}

/// When a part is paid for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Payment {
    /// Before it takes memory.
    First,
    /// Once it is known that it has to be sent.
    IfSent,
}

impl UploadShares {
    /// With so many bytes of memory.
    pub fn new(bytes: u64, rates: &TenantRates) -> Self {
        let named = |tenant: &Option<TenantName>| tenant.as_ref().map(ToString::to_string);
        let rates = rates.iter().map(|(tenant, rate)| (named(tenant), *rate));
        Self {
            room: CopyRoom::new(bytes),
            rates: rates.collect(),
            tenants: Mutex::default(),
        }
    }

    /// The uploads of a job's tenant.
    pub fn of(&self, job: &Namespace) -> Arc<TenantUploads> {
        let tenant = job.tenant().map(str::to_owned);
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = || {
            let rate = self.rates.get(&tenant).copied();
            Arc::new(TenantUploads {
                shards: Semaphore::new(SHARDS_AT_ONCE),
                paying: Semaphore::new(1),
                rate: rate.map(ByteRate::new),
            })
        };
        let uploads = tenants.entry(tenant.clone());
        uploads.or_insert_with(begin).clone()
    }

    /// Waits until a part of at most so many bytes may be read into memory and sent.
    pub async fn turn(
        &self,
        job: &Namespace,
        bytes: u64,
        payment: Payment,
    ) -> Result<Turn, DurableFault> {
        let uploads = self.of(job);
        let paid = match payment {
            Payment::First => bytes,
            Payment::IfSent => 0,
        };
        uploads.pay(paid).await?;
        let place = self.room.take(job, bytes).await;
        Ok(Turn {
            _place: place,
            uploads,
            paid,
        })
    }

    /// See [`CopyRoom::taken`].
    #[cfg(test)]
    pub fn taken(&self) -> (u64, usize) {
        self.room.taken()
    }
}

impl TenantUploads {
    /// Whether it has one of its own.
    pub fn has_rate(&self) -> bool {
        self.rate.is_some()
    }

    async fn pay(&self, bytes: u64) -> Result<(), DurableFault> {
        let Some(rate) = self.rate.as_ref().filter(|_| bytes > 0) else {
            return Ok(());
        };
        let _paying = self.paying.acquire().await.map_err(local)?;
        rate.pay(bytes as usize).await;
        Ok(())
    }
}

impl Turn {
    /// So many bytes are to be sent: more than were paid for, or fewer.
    pub async fn settle(&mut self, bytes: u64) -> Result<(), DurableFault> {
        if let (Some(rate), true) = (&self.uploads.rate, bytes < self.paid) {
            rate.give_back(self.paid - bytes);
        }
        self.uploads.pay(bytes.saturating_sub(self.paid)).await?;
        self.paid = bytes;
        Ok(())
    }

    /// They were there already.
    pub async fn not_needed(mut self) -> Result<(), DurableFault> {
        self.settle(0).await
    }
}
