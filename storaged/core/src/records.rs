//! What a node keeps about checkpoints beside their bytes: manifests, schemas and metadata, digests and fingerprints of chunks, and
//! parcels. At 48 bytes per chunk of 256 KiB they are a five-thousandth of the data, which for eight ranks of 40 GB and
//! three slots is 190 MB: left out of the budget, they would take the node above the memory that it was given.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::size_of;

use storaged_codec::Fingerprint;
use storaged_wire::Digest;

use crate::budget::{RecordBytes, TenantRecords, tenant_of};
use crate::catalog::{Checkpoint, LocalShard};
use crate::context::Context;

impl Context {
    /// Once a second: what lies above [`crate::limits::RECORDS_FREE_BYTES`] counts in the budget.
    pub(crate) fn count_records(&mut self) {
        let counted = self.records_by_tenant();
        self.budget.set_records(counted);
    }

    /// Whose they are: a tenant's all that its checkpoints name, also where another one's name the same.
    fn records_by_tenant(&self) -> RecordBytes {
        let mut counted = RecordBytes::default();
        let mut named: BTreeMap<&str, Named> = BTreeMap::new();
        for checkpoint in self.checkpoints.values() {
            let tenant = tenant_of(&checkpoint.key.namespace);
            let others = record_bytes(checkpoint);
            counted.add(
                tenant,
                TenantRecords {
                    descriptions: 0,
                    others,
                },
            );
            let names = named.entry(tenant).or_default();
            let enclosures = checkpoint.named().into_iter().map(|it| it.digest);
            names.enclosures.extend(enclosures);
            let notices = checkpoint.parcels.values().map(|(name, _)| *name);
            names.notices.extend(notices);
        }
        let parcels = self.parcels.lengths();
        let parcel = |name: &Digest| parcels.get(name).copied().unwrap_or(0);
        for (tenant, names) in &named {
            let enclosure = |name| self.enclosures.length(name) + parcel(name);
            let records = TenantRecords {
                descriptions: names.enclosures.iter().map(enclosure).sum(),
                others: names.notices.iter().map(parcel).sum(),
            };
            counted.add(tenant, records);
        }
        let is_named = |name: &Digest| named.values().any(|names| names.has(name));
        for (_, by, bytes) in self.enclosures.given_by().filter(|it| !is_named(it.0)) {
            match by {
                Some(tenant) => counted.add(
                    tenant,
                    TenantRecords {
                        descriptions: bytes,
                        others: 0,
                    },
                ),
                None => counted.of_nobody += bytes,
            }
        }
        let others = parcels.iter().filter(|(name, _)| !is_named(name));
        counted.of_nobody += others.map(|(_, bytes)| bytes).sum::<u64>();
        counted
    }
}

/// What the checkpoints of a tenant name.
#[derive(Default)]
struct Named {
    enclosures: BTreeSet<Digest>,
    notices: BTreeSet<Digest>,
}

impl Named {
    fn has(&self, name: &Digest) -> bool {
        self.enclosures.contains(name) || self.notices.contains(name)
    }
}

/// Bytes that a checkpoint takes beside its blocks, as far as they grow with its ranks and their lengths.
fn record_bytes(checkpoint: &Checkpoint) -> u64 {
    let manifest = checkpoint.manifest.as_ref();
    let manifest = manifest.map_or(0, |manifest| manifest.bytes().len());
    let own = checkpoint.shards.values().map(table_bytes);
    let digests = checkpoint.leaves.values().map(|it| size_of_val(&**it));
    let prints = checkpoint.prints.values().map(|it| size_of_val(&**it));
    let all = own.chain(digests).chain(prints);
    (manifest + all.sum::<usize>()) as u64
}

fn table_bytes(shard: &LocalShard) -> usize {
    let digests = shard.digests.as_ref().map_or(0, |(leaves, _)| leaves.len());
    digests * size_of::<Digest>() + shard.prints.len() * size_of::<Fingerprint>()
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;
    use storaged_wire::peer::PeerMessage;
    use storaged_wire::{Enclosed, SharedBytes};

    use crate::api::{Input, Now};
    use crate::limits::{RECORDS_FREE_BYTES, TABLES_FREE_BYTES};
    use crate::testkit::{hear, last_of, manifest};

    #[test]
    fn what_is_kept_of_checkpoints_counts_in_the_budget_above_the_allowance() {
        let mut node = last_of(&["a", "b", "c"], 2, 1);
        let before = node.budget_free();
        for (step, schema) in [(1, 1 << 20), (2, RECORDS_FREE_BYTES as usize)] {
            let mut manifest = manifest(step, &["a", "b"], &["c"], 5, digest(b"any"));
            manifest.version = 2;
            manifest.schema = Enclosed::Inline(vec![7; schema].into());
            manifest.torch_metadata = Enclosed::Inline(SharedBytes::default());
            let manifest = manifest.seal().expect("a sound manifest");
            let committed = PeerMessage::Committed {
                manifest: manifest.shared(),
                durable: storaged_wire::local::DurableWish::Never,
            };
            hear(&mut node, step, "a", committed);
            node.handle(Now(2_000 * step), Input::Tick);
            let (taken, records) = (before - node.budget_free(), node.ledger().records);
            assert!(records >= schema as u64, "{records} after step {step}");
            let counted = records.saturating_sub(TABLES_FREE_BYTES);
            assert_eq!(counted > 0, step == 2);
            // Parity of the five bytes may be reserved too.
            assert!((counted..counted + 64).contains(&taken), "{taken}");
        }
    }
}
