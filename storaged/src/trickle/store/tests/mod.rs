//! Tests of the durable tier: one conformance suite, and what is special to each back end.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::{
    Directory, FileIoConfig, ObjectKey, PartBytes, PartNumber, SeededRandomness, Store, StoreError,
};

mod cloud;
mod config;
mod conformance;
mod directory;
mod encrypted;
mod hostile;
mod s3;
mod s3_chain;
mod s3_objects;
mod wrappers;

fn key(text: &str) -> ObjectKey {
    text.parse().unwrap()
}

/// Bytes that differ at every position and for every seed.
fn pattern(length: usize, seed: u64) -> Bytes {
    let mut bytes = vec![0; length];
    blake3::Hasher::new()
        .update(&seed.to_le_bytes())
        .finalize_xof()
        .fill(&mut bytes);
    bytes.into()
}

fn randomness() -> Arc<SeededRandomness> {
    Arc::new(SeededRandomness::new(7))
}

async fn directory(root: &Path, io: FileIoConfig) -> Directory {
    Directory::open(root, io.into(), randomness())
        .await
        .unwrap()
}

fn part_bytes(store: &dyn Store) -> PartBytes {
    PartBytes::new(store.limits().part_bytes_min.max(4096), &store.limits()).unwrap()
}

/// Writes a whole object by parts.
async fn upload(store: &dyn Store, key: &ObjectKey, bytes: &Bytes) -> Result<(), StoreError> {
    let size = part_bytes(store);
    let mut upload = store.begin(key, size).await?;
    for number in 0..size.parts_of(bytes.len() as u64) {
        let part = PartNumber(number as u32);
        let state = store
            .put_part(&upload, part, part_of(bytes, size, part))
            .await?;
        upload.note(part, state);
    }
    store.complete(&upload, bytes.len() as u64).await
}

fn part_of(bytes: &Bytes, size: PartBytes, part: PartNumber) -> Bytes {
    let start = part.0 as usize * size.get() as usize;
    bytes.slice(start..bytes.len().min(start + size.get() as usize))
}
