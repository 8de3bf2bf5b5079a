//! Delta records: what goes in comes out, in every encoding; damage is an error; choices follow link and content.

use proptest::prelude::*;
use storaged_codec::delta::{
    Arithmetic, Basis, ChainError, Coder, CostModel, DeltaError, DeltaWriter, DirtyMap,
    ElementSize, Encoding, Kind, Level, LinkRate, Processor, RECORD_HEADER_BYTES, Record, compact,
    rebuild,
};
use storaged_codec::{ChunkSize, Digest, leaf_digest};

/// Pseudo-random bytes that are the same in every run.
fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Numbers as training has them: each moves a little.
fn numbers(count: usize, seed: u64) -> (Vec<u8>, Vec<u8>) {
    let random = noise(count * 4, seed);
    let (mut old, mut new) = (Vec::new(), Vec::new());
    for four in random.as_chunks::<4>().0 {
        let [a, b, c, _] = four.map(|byte| f32::from(byte) / 255.0 - 0.5);
        let number = a * 0.04 + b * 0.001;
        old.extend_from_slice(&number.to_le_bytes());
        new.extend_from_slice(&(number + c * 0.0003).to_le_bytes());
    }
    (old, new)
}

fn four(arithmetic: Arithmetic) -> Encoding {
    Encoding::Difference(ElementSize::new(4).unwrap(), arithmetic)
}

fn encodings() -> Vec<Encoding> {
    let mut all = vec![Encoding::Packed, Encoding::Raw];
    all.extend(cfg!(feature = "moved").then_some(Encoding::Moved));
    for element in ElementSize::ALL {
        all.push(Encoding::Difference(element, Arithmetic::Xor));
        all.push(Encoding::Difference(element, Arithmetic::Subtract));
    }
    all
}

fn whole(bytes: &[u8]) -> Basis<'_> {
    Basis { start: 0, bytes }
}

fn encoded(encoding: Encoding, start: u64, new: &[u8], basis: Basis<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    let outcome = Coder::new()
        .unwrap()
        .encode(encoding, start, new, Some(basis), &mut out);
    outcome.unwrap_or_else(|error| panic!("{encoding:?}: {error}"));
    out
}

fn decoded(record: &[u8], basis: Option<Basis<'_>>) -> Result<Vec<u8>, DeltaError> {
    let record = Record::parse(record)?;
    let mut out = vec![0xEE; record.length()];
    Coder::new()?.decode(&record, basis, &mut out)?;
    Ok(out)
}

#[test]
fn a_clean_chunk_known_by_its_digest_gets_the_same_record() {
    let bytes = vec![7; 4096];
    let basis = Basis {
        start: 8192,
        bytes: &bytes,
    };
    let (mut read, mut known) = (Vec::new(), Vec::new());
    let mut coder = Coder::new().unwrap();
    coder
        .encode(Encoding::Clean, 8192, &bytes, Some(basis), &mut read)
        .unwrap();
    Coder::encode_clean(8192..12288, &mut known).unwrap();
    assert_eq!(read, known);
    assert!(Coder::encode_clean(0..(4 << 20) + 1, &mut known).is_err());
    assert_eq!(read, known, "a refusal leaves the output as it was");
}

#[test]
fn every_encoding_gives_back_every_length() {
    let mut coder = Coder::new().unwrap();
    for length in (0..300).chain([4095, 4096, 65_536, 65_543]) {
        let (old, new) = (noise(length, 1), noise(length, 2));
        let basis = Basis {
            start: 1000,
            bytes: &old,
        };
        for encoding in encodings() {
            let mut record = Vec::new();
            match coder.encode(encoding, 1000, &new, Some(basis), &mut record) {
                Err(DeltaError::NotMoved) if encoding == Encoding::Moved => continue,
                outcome => outcome.unwrap(),
            }
            let back = decoded(&record, Some(basis)).unwrap();
            assert_eq!(back, new, "{encoding:?} {length}");
        }
        let clean = encoded(Encoding::Clean, 1000, &old, basis);
        assert_eq!(clean.len(), RECORD_HEADER_BYTES);
        assert_eq!(decoded(&clean, Some(basis)).unwrap(), old);
    }
}

proptest! {
    #[test]
    fn differences_undo_themselves(
        pairs in prop::collection::vec((any::<u8>(), any::<u8>()), 0..2000),
        encoding in prop::sample::select(encodings()),
    ) {
        let (old, new): (Vec<u8>, Vec<u8>) = pairs.into_iter().unzip();
        let mut record = Vec::new();
        let mut coder = Coder::new().unwrap();
        let outcome = coder.encode(encoding, 0, &new, Some(whole(&old)), &mut record);
        if outcome != Err(DeltaError::NotMoved) {
            prop_assert_eq!(outcome, Ok(()));
            prop_assert_eq!(decoded(&record, Some(whole(&old))).unwrap(), new);
        }
    }

    #[test]
    fn no_bytes_make_a_record_that_panics(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        // VCDIFF is C code and is given only what a digest vouches for.
        kind in prop::sample::select(vec![0u8, 1, 3, 4]),
        element in prop::sample::select(vec![0u8, 1, 2, 4, 8]),
        length in 0u32..300,
    ) {
        if bytes.get(1) != Some(&2) {
            let _ = decoded(&bytes, None);
        }
        if bytes.len() >= RECORD_HEADER_BYTES {
            let payload = (bytes.len() - RECORD_HEADER_BYTES) as u32;
            bytes[..4].copy_from_slice(&[1, kind, element, 0]);
            bytes[4..8].copy_from_slice(&length.to_le_bytes());
            bytes[8..16].fill(0);
            bytes[16..20].copy_from_slice(&length.to_le_bytes());
            bytes[20..24].copy_from_slice(&payload.to_le_bytes());
            let _ = decoded(&bytes, Some(whole(&[3; 300])));
        }
    }
}

#[test]
fn every_cut_and_every_flipped_header_bit_is_noticed() {
    let (old, new) = numbers(2000, 4);
    let basis = whole(&old);
    for encoding in [four(Arithmetic::Subtract), Encoding::Packed, Encoding::Raw] {
        let record = encoded(encoding, 0, &new, basis);
        for length in (0..record.len()).step_by(7) {
            assert!(decoded(&record[..length], Some(basis)).is_err(), "{length}");
        }
        for bit in 0..RECORD_HEADER_BYTES * 8 {
            let mut flipped = record.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            if let Ok(other) = decoded(&flipped, Some(basis)) {
                let same = leaf_digest(&other, 0) == leaf_digest(&new, 0);
                assert!(!same, "bit {bit} of {encoding:?}");
            }
        }
    }
}

#[test]
fn what_a_record_lacks_is_said() {
    let (old, new) = numbers(1000, 5);
    let record = encoded(four(Arithmetic::Subtract), 0, &new, whole(&old));
    let none = decoded(&record, None);
    assert_eq!(none, Err(DeltaError::NoBasis("difference")));
    let half = decoded(&record, Some(whole(&old[..100])));
    assert!(matches!(half, Err(DeltaError::Basis { .. })));
    let (mut out, mut coder) = (vec![9], Coder::new().unwrap());
    let outcome = coder.encode(Encoding::Clean, 0, &new, Some(whole(&old)), &mut out);
    assert_eq!(outcome, Err(DeltaError::NotClean));
    assert_eq!(out, [9], "a failed record leaves nothing behind");
    let long = vec![0; (4 << 20) + 1];
    let outcome = coder.encode(Encoding::Raw, 0, &long, None, &mut out);
    assert!(matches!(outcome, Err(DeltaError::TooLong { .. })));
    assert_eq!(ElementSize::new(3), Err(DeltaError::ElementSize(3)));
}

#[test]
fn training_numbers_shrink_and_subtraction_beats_xor() {
    let (old, new) = numbers(65_536, 6);
    let length = |encoding| encoded(encoding, 0, &new, whole(&old)).len();
    let subtract = length(four(Arithmetic::Subtract));
    let xor = length(four(Arithmetic::Xor));
    let packed = length(Encoding::Packed);
    assert!(subtract < xor && xor < packed, "{subtract} {xor} {packed}");
    assert!(subtract * 100 < new.len() * 80, "{subtract}");
}

#[test]
#[cfg(feature = "moved")]
fn content_that_moved_over_a_chunks_edge_is_found_in_the_basis_around_it() {
    let old = noise(200_000, 7);
    let mut new = old.clone();
    new.splice(50..50, [1, 2, 3, 4, 5]);
    let chunk = &new[65_536..131_072];
    let record = encoded(Encoding::Moved, 65_536, chunk, whole(&old));
    assert!(record.len() < 1000, "{}", record.len());
    assert_eq!(decoded(&record, Some(whole(&old))).unwrap(), chunk);
    assert_eq!(Record::parse(&record).unwrap().needs(), Some(0..200_000));
}

/// A clock by which everything takes no time.
fn frozen() -> f64 {
    0.0
}

fn writer(rate: f64) -> DeltaWriter {
    let model = CostModel::new(LinkRate::new(rate).unwrap(), Processor::WHOLE);
    DeltaWriter::new(model, None).unwrap()
}

#[test]
fn the_writer_takes_the_encoding_that_fits_the_content() {
    let chunk = 64 << 10;
    let (old, new) = numbers(chunk, 8);
    let text = b"words and words ".repeat(chunk / 4);
    let cases: [(&str, &[u8], &[u8], Kind); 4] = [
        ("clean", &old, &old, Kind::Clean),
        ("numbers", &old, &new, Kind::Difference),
        ("text", &old, &text, Kind::Packed),
        ("noise", &old, &noise(4 * chunk, 11), Kind::Raw),
    ];
    for (what, old, new, kind) in cases {
        let mut writer = writer(1e6);
        for (index, block) in new.chunks(chunk).enumerate() {
            let (start, mut out) = ((index * chunk) as u64, Vec::new());
            let choice = writer.write(start, block, Some(whole(old)), &mut frozen, &mut out);
            let choice = choice.unwrap();
            assert_eq!(choice.encoding.kind(), kind, "{what}, chunk {index}");
            assert_eq!(decoded(&out, Some(whole(old))).unwrap(), block);
            assert_eq!(choice.got.bytes as usize, out.len());
        }
        assert_eq!(writer.tallies()[&kind].chunks, 4);
    }
}

#[test]
#[cfg(not(feature = "moved"))]
fn a_build_without_vcdiff_says_so_and_writes_something_else() {
    let old = noise(256 << 10, 12);
    let mut new = old.clone();
    new.splice(100..100, [7; 13]);
    let (mut writer, mut out) = (writer(1e6), Vec::new());
    let block = &new[..64 << 10];
    let choice = writer.write(0, block, Some(whole(&old)), &mut frozen, &mut out);
    assert_eq!(choice.unwrap().encoding.kind(), Kind::Raw);
    assert_eq!(decoded(&out, Some(whole(&old))).unwrap(), block);
    let (mut coder, before) = (Coder::new().unwrap(), out.clone());
    let outcome = coder.encode(Encoding::Moved, 0, block, Some(whole(&old)), &mut out);
    assert_eq!(outcome, Err(DeltaError::MovedNotBuilt));
    assert_eq!(out, before, "a failed record leaves nothing behind");
    let text = DeltaError::MovedNotBuilt.to_string();
    assert!(text.contains("`moved`"), "{text}");
}

#[test]
#[cfg(feature = "moved")]
fn the_writer_finds_moved_content() {
    let old = noise(256 << 10, 12);
    let mut new = old.clone();
    new.splice(100..100, [7; 13]);
    let (mut writer, mut out) = (writer(1e6), Vec::new());
    let block = &new[..64 << 10];
    let choice = writer.write(0, block, Some(whole(&old)), &mut frozen, &mut out);
    assert_eq!(choice.unwrap().encoding, Encoding::Moved);
    assert_eq!(decoded(&out, Some(whole(&old))).unwrap(), block);
}

#[test]
fn a_fast_link_gets_raw_chunks() {
    let (old, new) = numbers(64 << 10, 13);
    let mut ticks = 0.0;
    let mut slow_processor = || {
        ticks += 1.0;
        ticks
    };
    let mut writer = writer(1e12);
    for _ in 0..20 {
        let mut out = Vec::new();
        let choice = writer.write(0, &new, Some(whole(&old)), &mut slow_processor, &mut out);
        assert_eq!(choice.unwrap().encoding, Encoding::Raw);
    }
}

fn leaves(shard: &[u8]) -> Vec<Digest> {
    let chunks = (0..).zip(shard.chunks(CHUNK));
    chunks
        .map(|(index, block)| leaf_digest(block, index))
        .collect()
}

const CHUNK: usize = 4096;

#[test]
fn dirty_maps_say_what_changed() {
    let old = noise(20_000, 14);
    let mut new = old.clone();
    new[5000] ^= 1;
    new.extend_from_slice(&[1; 100]);
    let map = DirtyMap::from_bytes(&old, &new, ChunkSize::new(CHUNK as u32).unwrap());
    assert_eq!(map, DirtyMap::from_digests(&leaves(&old), &leaves(&new)));
    assert_eq!(map.iter().collect::<Vec<_>>(), [1, 4]);
    assert_eq!((map.len(), map.count(), map.is_empty()), (5, 2, false));
    assert!(map.is_dirty(1) && !map.is_dirty(2) && !map.is_dirty(99));
    let mut union = DirtyMap::clean(5);
    union.mark(0);
    union.mark(1000);
    union.union(&map).unwrap();
    assert_eq!(union.iter().collect::<Vec<_>>(), [0, 1, 4]);
    assert!(union.union(&DirtyMap::clean(6)).is_err());
}

/// Steps of a shard that grows, as a chain.
struct Chain {
    shards: Vec<Vec<u8>>,
    records: Vec<Vec<Vec<u8>>>,
    leaves: Vec<Vec<Digest>>,
}

fn chain() -> Chain {
    let mut shards = vec![noise(50_000, 20)];
    for step in 1..5usize {
        let mut next = shards[step - 1].clone();
        for at in (step..next.len()).step_by(7000 * step) {
            next[at] = next[at].wrapping_add(1);
        }
        next.extend_from_slice(&noise(step * 1000, step as u64));
        shards.push(next);
    }
    let records = (0..shards.len()).map(|step| {
        let basis = step.checked_sub(1).map(|below| whole(&shards[below]));
        let (mut writer, mut records) = (writer(1e6), Vec::new());
        for (index, block) in shards[step].chunks(CHUNK).enumerate() {
            let (start, mut out) = ((index * CHUNK) as u64, Vec::new());
            let choice = writer.write(start, block, basis, &mut frozen, &mut out);
            choice.unwrap();
            records.push(out);
        }
        records
    });
    Chain {
        records: records.collect(),
        leaves: shards.iter().map(|shard| leaves(shard)).collect(),
        shards,
    }
}

impl Chain {
    fn levels(&self) -> Vec<Level<'_>> {
        let level = |step: usize| Level {
            length: self.shards[step].len() as u64,
            records: &self.records[step],
            leaves: &self.leaves[step],
        };
        (0..self.shards.len()).map(level).collect()
    }
}

fn rebuilt(levels: &[Level<'_>]) -> Result<Vec<u8>, ChainError> {
    let chunk = ChunkSize::new(CHUNK as u32).unwrap();
    rebuild(&mut Coder::new().unwrap(), chunk, levels)
}

#[test]
fn a_chain_gives_every_step_and_compacts_to_one_level() {
    let chain = chain();
    let levels = chain.levels();
    for count in 1..=levels.len() {
        let got = rebuilt(&levels[..count]).unwrap();
        assert!(got == chain.shards[count - 1], "step {count}");
    }
    let chunk = ChunkSize::new(CHUNK as u32).unwrap();
    let records = compact(&mut Coder::new().unwrap(), chunk, &levels).unwrap();
    let base = Level {
        records: &records,
        ..levels[4]
    };
    assert!(rebuilt(&[base]).unwrap() == chain.shards[4]);
}

#[test]
fn a_wrong_chain_is_an_error_that_names_the_place() {
    let mut chain = chain();
    assert_eq!(rebuilt(&[]), Err(ChainError::Levels { most: 64, got: 0 }));
    let many = rebuilt(&[chain.levels()[0]; 65]);
    assert_eq!(many, Err(ChainError::Levels { most: 64, got: 65 }));
    let headless = rebuilt(&chain.levels()[1..]);
    assert!(matches!(headless, Err(ChainError::Record { level: 0, .. })));
    let gap = rebuilt(&[chain.levels()[0], chain.levels()[2]]);
    let named = matches!(
        gap,
        Err(ChainError::Digest { level: 1, .. } | ChainError::Record { level: 1, .. })
    );
    assert!(named, "a missing level gives no shard");
    let payload = chain.records[2]
        .iter_mut()
        .find(|record| record.len() > 100);
    *payload.unwrap().last_mut().unwrap() ^= 1;
    let damaged = rebuilt(&chain.levels());
    let named = matches!(
        damaged,
        Err(ChainError::Digest { level: 2, .. } | ChainError::Record { level: 2, .. })
    );
    assert!(named, "a damaged record gives no shard");
    chain.records[3].pop();
    let short = rebuilt(&chain.levels()[..4]);
    assert!(short.is_err());
}
