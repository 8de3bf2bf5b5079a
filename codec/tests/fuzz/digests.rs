//! Digests and the small records of this crate: text, CBOR, chunks of any place and length.

use bolero::check;
use storaged_codec::{ChunkSize, Digest, Geometry, LeafHasher, Unchecked, leaf_digest};

use crate::ITERATIONS;
use crate::damage::{Damage, damaged};

/// Decodes and, if that goes, writes again and decodes once more to the same.
fn round_trip<T>(bytes: &[u8]) -> Option<T>
where
    T: for<'b> minicbor::Decode<'b, ()> + minicbor::Encode<()> + PartialEq + std::fmt::Debug,
{
    let value: T = minicbor::decode(bytes).ok()?;
    let written = minicbor::to_vec(&value).expect("writing to memory");
    let again: T = minicbor::decode(&written).expect("what was just written");
    assert_eq!(again, value);
    Some(value)
}

fn small_records(bytes: &[u8]) {
    round_trip::<Digest>(bytes);
    round_trip::<Vec<Digest>>(bytes);
    if let Some(geometry) = round_trip::<Geometry>(bytes) {
        assert!(geometry.k() >= 1 && geometry.m() >= 1 && geometry.n() <= 255);
    }
    if let Some(chunk) = round_trip::<ChunkSize>(bytes) {
        assert!(chunk.bytes().is_power_of_two() && (4096..=4 << 20).contains(&chunk.bytes()));
    }
}

#[test]
fn any_bytes_are_small_records_or_errors() {
    check!().with_iterations(ITERATIONS).for_each(small_records);
}

#[test]
fn damaged_small_records_are_sound_or_errors() {
    let geometry = Geometry::new(8, 2).expect("valid");
    let chunk = ChunkSize::new(1 << 16).expect("valid");
    let leaf = leaf_digest(b"x", 0);
    let sound = [
        minicbor::to_vec(geometry),
        minicbor::to_vec(chunk),
        minicbor::to_vec(leaf),
        minicbor::to_vec(vec![leaf; 3]),
    ]
    .map(|bytes| bytes.expect("writing to memory"));
    check!()
        .with_iterations(2 * ITERATIONS)
        .with_type::<(u8, Vec<Damage>)>()
        .for_each(|(which, damages)| {
            small_records(&damaged(&sound[usize::from(which % 4)], damages));
        });
}

#[test]
fn any_text_is_a_digest_or_an_error() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(String, [u8; 32], Vec<Damage>)>()
        .for_each(|(text, bytes, damages)| {
            let _ = text.parse::<Digest>();
            let digest = Digest::from_bytes(bytes);
            assert_eq!(digest.to_string().parse(), Ok(digest));
            let text = damaged(digest.to_string().as_bytes(), damages);
            let text = String::from_utf8_lossy(&text);
            if let Ok(other) = text.parse::<Digest>() {
                assert_eq!(other.to_string(), text.to_lowercase());
            }
        });
}

#[test]
fn only_a_chunk_in_its_place_is_handed_out() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(Vec<u8>, u64, u64, Vec<Damage>)>()
        .for_each(|(chunk, index, other, damages)| {
            let leaf = leaf_digest(chunk, *index);
            let found = damaged(chunk, damages);
            let same = found == *chunk && index == other;
            let verified = Unchecked::new(found).verify(&leaf, *other);
            assert_eq!(verified.is_ok(), same);
            if let Ok(checked) = verified {
                assert_eq!((checked.bytes(), checked.leaf()), (&chunk[..], leaf));
            }
        });
}

#[test]
fn a_leaf_does_not_depend_on_how_its_chunk_is_cut() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(Vec<u8>, u64, u8)>()
        .for_each(|(chunk, index, piece)| {
            let mut hasher = LeafHasher::new(*index);
            let pieces = chunk.chunks(usize::from(*piece).max(1));
            pieces.for_each(|piece| hasher.update(piece));
            assert_eq!(hasher.finish(), leaf_digest(chunk, *index));
        });
}

#[test]
fn chunks_of_any_length_tile_it() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(u32, u64, u64)>()
        .for_each(|(size, length, index)| {
            let _ = ChunkSize::new(*size);
            let chunk = ChunkSize::new(4096 << (size % 11)).expect("valid");
            let count = chunk.count(*length);
            let range = chunk.range(*index, *length);
            assert!(range.start <= range.end && range.end <= *length);
            assert_eq!(range.is_empty(), *index >= count);
            if let Some(last) = count.checked_sub(1) {
                assert_eq!(chunk.range(last, *length).end, *length);
            }
        });
}
