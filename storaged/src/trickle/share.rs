//! What a tenant's uploads have of the way to the tier. The tier takes a few parts at once: tenants put theirs in turn, so that the one
//! with ten thousand shards to copy holds up the one with one shard for a part, and not for all of them. A tenant may have a rate of its own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use storaged_core::DurableFault;
use storaged_wire::{Namespace, TenantName};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::fault::local;
use super::store::ByteRate;

/// Shards of a tenant that are copied at once: each has a few parts in RAM.
const SHARDS_AT_ONCE: usize = 2;
/// Parts that the tier takes at once.
pub(super) const PUTS_AT_ONCE: usize = 10;

/// Bytes per second that tenants upload at most, of those that have a limit.
pub type TenantRates = BTreeMap<Option<TenantName>, u64>;

/// The uploads of all tenants.
#[derive(Debug)]
pub(super) struct UploadShares {
    /// First come, first served; a tenant has one part among those that wait.
    parts: Semaphore,
    rates: BTreeMap<Option<String>, u64>,
    tenants: Mutex<BTreeMap<Option<String>, Arc<TenantUploads>>>,
}

/// Those of one.
#[derive(Debug)]
pub(super) struct TenantUploads {
    pub shards: Semaphore,
    /// One permit: whose part waits for the tier to take it.
    next: Semaphore,
    rate: Option<ByteRate>,
}

impl UploadShares {
    pub fn new(rates: &TenantRates) -> Self {
        let named = |tenant: &Option<TenantName>| tenant.as_ref().map(ToString::to_string);
        let rates = rates.iter().map(|(tenant, rate)| (named(tenant), *rate));
        Self {
            parts: Semaphore::new(PUTS_AT_ONCE),
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
                next: Semaphore::new(1),
                rate: rate.map(ByteRate::new),
            })
        };
        let uploads = tenants.entry(tenant.clone());
        uploads.or_insert_with(begin).clone()
    }

    /// Waits until a part of so many bytes may go to the tier; it is there once the permit is dropped.
    pub async fn turn(
        &self,
        job: &Namespace,
        bytes: usize,
    ) -> Result<SemaphorePermit<'_>, DurableFault> {
        let uploads = self.of(job);
        if let Some(rate) = &uploads.rate {
            rate.pay(bytes).await;
        }
        let _next = uploads.next.acquire().await.map_err(local)?;
        self.parts.acquire().await.map_err(local)
    }
}
