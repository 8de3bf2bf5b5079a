//! Manifests: from a peer, whose name for them is not known yet, or from the durable tier.

use bolero::check;
use storaged_codec::digest;
use storaged_wire::manifest::ManifestError;
use storaged_wire::{Manifest, ManifestBytes, decode, encode};

use crate::damage::{Damage, damaged};
use crate::{ITERATIONS, samples};

/// Reads bytes; a manifest that comes out holds together and can be sealed again.
fn parsed(bytes: &[u8]) {
    let Ok(read) = ManifestBytes::parse(bytes.to_vec()) else {
        return;
    };
    let manifest = read.manifest();
    assert_eq!((read.bytes(), read.name()), (bytes, digest(bytes)));
    assert_eq!(manifest.shards.len(), manifest.world_size.get() as usize);
    let lengths = manifest.shards.iter().map(|shard| u128::from(shard.length));
    assert_eq!(u128::from(manifest.length()), lengths.sum());
    let sealed = manifest.clone().seal().expect("it held together before");
    let again = ManifestBytes::verify(sealed.bytes().to_vec(), sealed.name());
    assert_eq!(again.expect("what was just sealed"), sealed);
}

#[test]
fn any_bytes_are_a_manifest_or_an_error() {
    check!().with_iterations(ITERATIONS).for_each(parsed);
}

#[test]
fn damaged_manifests_hold_together_or_are_errors() {
    let sound = encode(&samples::manifest());
    parsed(&sound);
    assert!(ManifestBytes::parse(sound.clone()).is_ok());
    check!()
        .with_iterations(8 * ITERATIONS)
        .with_type::<Vec<Damage>>()
        .for_each(|damages| {
            let bytes = damaged(&sound, damages);
            parsed(&bytes);
            let named = ManifestBytes::verify(bytes.clone(), digest(&sound));
            assert_eq!(named.is_ok(), bytes == sound);
        });
}

#[test]
fn any_fields_hold_together_or_are_an_error() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(u16, u8, Vec<(u32, u64)>, Vec<(u8, u8)>)>()
        .for_each(|(version, ranks, shards, groups)| {
            let mut manifest: Manifest = samples::manifest();
            if version & 7 == 0 {
                manifest.version = *version;
            }
            if let Some(length) = shards.first() {
                manifest.shards[0].length = length.1;
            }
            if ranks & 1 == 0 {
                let entry = manifest.shards[0].clone();
                let entry = |(at, (rank, length)): (usize, &(u32, u64))| {
                    let mut entry = entry.clone();
                    let rank = if ranks & 2 == 0 { at as u32 } else { *rank };
                    entry.rank = storaged_wire::Rank::new(rank);
                    entry.length = *length;
                    entry
                };
                manifest.shards = shards.iter().enumerate().map(entry).collect();
                let count = manifest.shards.len().max(1) as u32;
                manifest.world_size = storaged_wire::WorldSize::new(count).expect("few ranks");
            }
            if let Some((data, coding)) = groups.first() {
                let names = |count: u8| {
                    let name = |i| samples::node(["a", "b", "c", "d", "e"][usize::from(i % 5)]);
                    (0..count % 8).map(name).collect()
                };
                manifest.groups[0].data = names(*data);
                manifest.groups[0].coding = names(*coding);
            }
            let bytes = encode(&manifest);
            let read: Manifest = decode("manifest", &bytes).expect("what was just written");
            assert_eq!(read, manifest);
            match manifest.seal() {
                Ok(sealed) => parsed(sealed.bytes()),
                Err(error) => {
                    let told = matches!(
                        error,
                        ManifestError::Inconsistent(_) | ManifestError::Version { .. }
                    );
                    assert!(told && ManifestBytes::parse(bytes).is_err());
                }
            }
        });
}
