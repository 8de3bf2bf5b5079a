//! What is stored for years must not change: the field, both matrices, leaves and roots, against the files in
//! `golden/`. Where a definition is short it stands here again, so that a digest is not all there is to go by.

use storaged_codec::{
    ChunkSize, CodingMatrix, Digest, Geometry, digest, engines, leaf_digest, root_digest,
};

use crate::{cauchy, noise, vandermonde};

fn golden(text: &str) -> Digest {
    text.trim().parse().expect("the golden file is a digest")
}

/// Every product of two elements, the left one slower.
fn products(mut row: impl FnMut(u8) -> Vec<u8>) -> Vec<u8> {
    (0..=255).flat_map(&mut row).collect()
}

#[test]
fn the_field_is_as_committed() {
    let elements: Vec<u8> = (0..=255).collect();
    // Powers of x, reduced by x^8 + x^4 + x^3 + x^2 + 1: 2 is a generator, so they are all elements but zero.
    let mut powers = vec![1u8];
    while powers.len() < 255 {
        let last = powers[powers.len() - 1];
        let carry = if last >= 0x80 { 0x1D } else { 0 };
        powers.push((last << 1) ^ carry);
    }
    let log = |element: u8| powers.iter().position(|power| *power == element);
    let product = |a, b| match (log(a), log(b)) {
        (Some(a), Some(b)) => powers[(a + b) % 255],
        _ => 0,
    };
    let defined = products(|a| elements.iter().map(|b| product(a, *b)).collect());
    let pinned = golden(include_str!("../../golden/field-11d.digest"));
    assert_eq!(digest(&defined), pinned);
    for engine in engines() {
        let got = products(|a| {
            let mut row = vec![0; 256];
            engine.fold(&mut [&mut row], &[a], &elements);
            row
        });
        assert_eq!(digest(&got), pinned, "{}", engine.name());
    }
}

/// Every geometry of at most 32 blocks, and some at the limit.
fn geometries() -> impl Iterator<Item = (usize, usize)> {
    let small = (2..=32).flat_map(|n| (1..n).map(move |k| (k, n - k)));
    small.chain([(32, 2), (128, 127), (200, 55), (254, 1), (1, 254)])
}

/// k, m and the parity rows of each geometry.
fn written(matrix: impl Fn(usize, usize) -> CodingMatrix) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (k, m) in geometries() {
        let matrix = matrix(k, m);
        bytes.extend([k as u8, m as u8]);
        (0..m).for_each(|j| bytes.extend_from_slice(matrix.parity_row(j)));
    }
    bytes
}

#[test]
fn the_matrices_are_as_committed() {
    let pinned = golden(include_str!("../../golden/matrices-cauchy.digest"));
    assert_eq!(digest(&written(cauchy)), pinned);
    let pinned = golden(include_str!("../../golden/matrices-vandermonde.digest"));
    assert_eq!(digest(&written(vandermonde)), pinned);
}

#[test]
fn the_cauchy_matrix_is_its_definition() {
    for (k, m) in geometries() {
        let matrix = cauchy(k, m);
        for (j, i) in (0..m).flat_map(|j| (0..k).map(move |i| (j, i))) {
            // c[j][i] times ((k + j) ^ i) is one.
            let mut one = [0];
            let pair = (matrix.coefficient(j, i), ((k + j) ^ i) as u8);
            engines()[0].fold(&mut [&mut one], &[pair.0], &[pair.1]);
            assert_eq!(one, [1], "row {j}, column {i} of {k}+{m}");
        }
    }
}

#[test]
fn leaves_and_roots_are_as_committed() {
    let chunk = ChunkSize::new(4096).expect("a power of two");
    let shard = noise(1, 3 * 4096 + 100);
    let leaves: Vec<Digest> = (0..)
        .zip(shard.chunks(chunk.bytes()))
        .map(|(index, bytes)| leaf_digest(bytes, index))
        .collect();
    let root = root_digest(&leaves, shard.len() as u64, chunk);
    for (index, leaf) in leaves.iter().enumerate() {
        let mut hasher = blake3::Hasher::new_derive_key("storaged 2026-11 chunk");
        hasher.update(&(index as u64).to_le_bytes());
        hasher.update(&shard[index * 4096..shard.len().min((index + 1) * 4096)]);
        assert_eq!(leaf.as_bytes(), hasher.finalize().as_bytes());
    }
    let mut hasher = blake3::Hasher::new_derive_key("storaged 2026-11 shard");
    hasher.update(&(shard.len() as u64).to_le_bytes());
    hasher.update(&4096u64.to_le_bytes());
    leaves.iter().for_each(|leaf| {
        hasher.update(leaf.as_bytes());
    });
    assert_eq!(root.as_bytes(), hasher.finalize().as_bytes());
    assert_eq!(root, golden(include_str!("../../golden/root.digest")));
}

#[test]
fn a_root_tells_order_length_and_chunk_size_apart() {
    let size = |bytes| ChunkSize::new(bytes).expect("a power of two");
    let leaves = [leaf_digest(b"a", 0), leaf_digest(b"b", 1)];
    let swapped = [leaves[1], leaves[0]];
    let root = root_digest(&leaves, 5000, size(4096));
    for other in [
        root_digest(&swapped, 5000, size(4096)),
        root_digest(&leaves, 5001, size(4096)),
        root_digest(&leaves, 5000, size(8192)),
        root_digest(&leaves[..1], 5000, size(4096)),
        root_digest(&[], 0, size(4096)),
    ] {
        assert_ne!(root, other);
    }
}

#[test]
fn no_geometry_beyond_the_field_is_valid() {
    for (k, m) in [
        (0, 1),
        (1, 0),
        (255, 1),
        (1, 255),
        (128, 128),
        (usize::MAX, 2),
    ] {
        assert!(Geometry::new(k, m).is_err(), "{k}+{m}");
    }
}
