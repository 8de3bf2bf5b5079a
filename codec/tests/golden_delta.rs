//! Delta records that were written once must be read for ever: those in `golden/delta/` still give their chunk. What is
//! written today may differ where zstd or xdelta3 has a say, and must not where neither has.

use std::fs;
use std::path::PathBuf;

use storaged_codec::delta::{
    Arithmetic, Basis, Coder, DeltaError, ElementSize, Encoding, Kind, Record,
};
use storaged_codec::{Digest, leaf_digest};

/// Bytes of the chunk: whole elements of eight bytes and three more.
const LENGTH: usize = 1035;
/// Where the chunk begins in its shard.
const START: u64 = 4096;

/// The basis: numbers that look random, by a generator that is only here.
fn basis() -> Vec<u8> {
    let mut state = 20_261_121u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..LENGTH).map(|_| next()).collect()
}

/// The chunk that each kind of record holds.
fn chunk(kind: Kind) -> Vec<u8> {
    let old = basis();
    match kind {
        Kind::Clean => old,
        // Each fourth byte moves a little, as numbers do in a step.
        Kind::Difference => {
            let moved = |(at, byte): (usize, &u8)| byte.wrapping_add(u8::from(at % 4 == 1) * 3);
            old.iter().enumerate().map(moved).collect()
        }
        Kind::Moved => {
            let mut new = b"inserted".to_vec();
            new.extend_from_slice(&old[..LENGTH - 8]);
            new
        }
        Kind::Packed => b"words and words ".repeat(65)[..LENGTH].to_vec(),
        Kind::Raw => old.iter().map(|byte| !byte).collect(),
    }
}

fn records() -> Vec<(String, Encoding)> {
    let mut all = vec![
        ("clean".into(), Encoding::Clean),
        ("moved".into(), Encoding::Moved),
        ("packed".into(), Encoding::Packed),
        ("raw".into(), Encoding::Raw),
    ];
    for element in ElementSize::ALL {
        let encoding = |arithmetic| Encoding::Difference(element, arithmetic);
        all.push((
            format!("difference-xor-{element}"),
            encoding(Arithmetic::Xor),
        ));
        all.push((
            format!("difference-subtract-{element}"),
            encoding(Arithmetic::Subtract),
        ));
    }
    all
}

fn path(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden/delta");
    folder.join(format!("{name}.record"))
}

/// Whether this build writes it.
fn can_be_written(encoding: Encoding) -> bool {
    cfg!(feature = "moved") || encoding != Encoding::Moved
}

fn written(encoding: Encoding) -> Vec<u8> {
    let (old, mut out) = (basis(), Vec::new());
    let basis = Basis {
        start: START,
        bytes: &old,
    };
    let chunk = chunk(encoding.kind());
    let coded = Coder::new().and_then(|mut coder| {
        let basis = Some(basis);
        coder.encode(encoding, START, &chunk, basis, &mut out)
    });
    coded.unwrap_or_else(|error| panic!("{encoding:?}: {error}"));
    out
}

#[test]
fn stored_records_give_their_chunks() {
    let old = basis();
    let basis = Basis {
        start: START,
        bytes: &old,
    };
    for (name, encoding) in records() {
        let stored = fs::read(path(&name)).expect("the golden record is there");
        let record = Record::parse(&stored).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(record.encoding(), encoding, "{name}");
        let mut out = vec![0xEE; record.length()];
        let decoded =
            Coder::new().and_then(|mut coder| coder.decode(&record, Some(basis), &mut out));
        if cfg!(not(feature = "moved")) && encoding == Encoding::Moved {
            assert_eq!(decoded, Err(DeltaError::MovedNotBuilt));
            continue;
        }
        assert_eq!(decoded, Ok(()), "{name}");
        assert!(out == chunk(encoding.kind()), "{name}");
    }
}

#[test]
fn the_chunks_of_the_stored_records_are_pinned() {
    let all: Vec<u8> = Kind::ALL.into_iter().flat_map(chunk).collect();
    let pinned: Digest = include_str!("../golden/delta/chunks.digest")
        .trim()
        .parse()
        .expect("the golden file is a digest");
    assert_eq!(leaf_digest(&all, 0), pinned);
}

#[test]
fn records_that_no_library_shapes_are_written_as_ever() {
    for name in ["clean", "raw"] {
        let stored = fs::read(path(name)).expect("the golden record is there");
        let known = records();
        let (_, encoding) = known
            .iter()
            .find(|(other, _)| other == name)
            .expect("a kind of record");
        assert!(written(*encoding) == stored, "{name}");
    }
    // Of the others the header, save the length of the payload.
    let known = records().into_iter();
    for (name, encoding) in known.filter(|(_, encoding)| can_be_written(*encoding)) {
        let stored = fs::read(path(&name)).expect("the golden record is there");
        assert_eq!(written(encoding)[..20], stored[..20], "{name}");
    }
}

/// Writes the files anew: only for a new version of the records, whose old files stay beside.
#[test]
#[ignore = "writes golden files"]
fn write_the_golden_records() {
    for (name, encoding) in records() {
        fs::write(path(&name), written(encoding)).expect("the folder can be written");
    }
}
