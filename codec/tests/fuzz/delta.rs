//! Delta records and chains. VCDIFF is taken apart by C code that is given only what a digest vouches for, so a damaged
//! record of that kind is parsed and not decoded; sound ones make the round trip.

use bolero::check;
use storaged_codec::delta::{
    Arithmetic, Basis, Coder, DeltaError, DirtyMap, ElementSize, Encoding, Kind, Level, Record,
    compact, rebuild,
};
use storaged_codec::{ChunkSize, Digest, leaf_digest};

use crate::damage::{Damage, damaged};
use crate::{ITERATIONS, noise};

/// Where the chunk of the sound records begins, and its bytes.
const START: usize = 512;
const LENGTH: usize = 709;

fn encodings() -> Vec<Encoding> {
    let mut all = vec![Encoding::Packed, Encoding::Raw];
    all.extend(cfg!(feature = "moved").then_some(Encoding::Moved));
    for element in ElementSize::ALL {
        all.push(Encoding::Difference(element, Arithmetic::Xor));
        all.push(Encoding::Difference(element, Arithmetic::Subtract));
    }
    all
}

fn shard() -> Vec<u8> {
    noise(1, START + LENGTH + 300)
}

fn whole(bytes: &[u8]) -> Basis<'_> {
    Basis { start: 0, bytes }
}

/// A chunk that makes planes of all sorts: equal, sparse and noisy ones.
fn chunk() -> Vec<u8> {
    let mut chunk = shard()[START..START + LENGTH].to_vec();
    for (at, byte) in chunk.iter_mut().enumerate() {
        match at % 4 {
            1 => *byte = byte.wrapping_add((at % 3) as u8),
            2 if at % 64 == 2 => *byte ^= 0x80,
            3 => *byte = (at * 89) as u8,
            _ => {}
        }
    }
    chunk
}

/// A record of each encoding with what it holds.
fn sound() -> Vec<(Vec<u8>, Vec<u8>)> {
    let (old, mut all) = (shard(), Vec::new());
    let mut coder = Coder::new().expect("memory for the contexts");
    for encoding in encodings().into_iter().chain([Encoding::Clean]) {
        let same = &old[START..START + LENGTH];
        let chunk = match encoding {
            Encoding::Clean => same.to_vec(),
            Encoding::Moved => [b"moved", &same[..LENGTH - 5]].concat(),
            Encoding::Packed => b"again and ".repeat(71)[..LENGTH].to_vec(),
            _ => chunk(),
        };
        let mut record = Vec::new();
        let basis = Some(whole(&old));
        let coded = coder.encode(encoding, START as u64, &chunk, basis, &mut record);
        assert_eq!(coded, Ok(()), "{encoding:?}");
        all.push((record, chunk));
    }
    all
}

/// Decodes bytes that may be anything; nothing for VCDIFF.
fn decoded(coder: &mut Coder, bytes: &[u8], old: &[u8]) -> Option<Result<Vec<u8>, DeltaError>> {
    let record = match Record::parse(bytes) {
        Ok(record) => record,
        Err(error) => return Some(Err(error)),
    };
    assert!(record.length() <= 4 << 20);
    if let Some(needs) = record.needs() {
        assert!(needs.start <= needs.end && needs.end - needs.start <= 12 << 20);
    }
    if record.encoding() == Encoding::Moved {
        return None;
    }
    let mut out = vec![0xEE; record.length()];
    let outcome = coder.decode(&record, Some(whole(old)), &mut out);
    Some(outcome.map(|()| out))
}

/// Damage that the lengths in the header know of, so that it reaches what unpacks.
fn payload_damaged(record: &[u8], damages: &[Damage]) -> Vec<u8> {
    let (header, payload) = record.split_at(20);
    let payload = damaged(&payload[4..], damages);
    let length = (payload.len() as u32).to_le_bytes();
    [header, &length, &payload].concat()
}

#[test]
fn any_bytes_are_a_record_or_an_error() {
    let old = shard();
    check!()
        .with_iterations(ITERATIONS)
        .for_each(|bytes: &[u8]| {
            let mut coder = Coder::new().expect("memory for the contexts");
            let _ = decoded(&mut coder, bytes, &old);
            let _ = Record::parse(bytes).map(|record| coder.decode(&record, None, &mut []));
        });
}

#[test]
fn a_damaged_record_gives_an_error_or_a_chunk_of_its_length() {
    let (old, sound) = (shard(), sound());
    check!()
        .with_iterations(4 * ITERATIONS)
        .with_type::<(u8, Vec<Damage>)>()
        .for_each(|(which, damages)| {
            let mut coder = Coder::new().expect("memory for the contexts");
            let (record, _) = &sound[usize::from(*which) % sound.len()];
            let bytes = match which >> 6 {
                0 => damaged(record, damages),
                _ => payload_damaged(record, damages),
            };
            let Some(Ok(chunk)) = decoded(&mut coder, &bytes, &old) else {
                return;
            };
            // Whatever came out can be written again the same way, and comes back.
            let record = Record::parse(&bytes).expect("it was a record before");
            let start = record.needs().map_or(0, |needs| needs.start);
            let (mut again, basis) = (Vec::new(), Some(whole(&old)));
            let coded = coder.encode(record.encoding(), start, &chunk, basis, &mut again);
            assert_eq!(coded, Ok(()));
            assert_eq!(decoded(&mut coder, &again, &old), Some(Ok(chunk)));
        });
}

#[test]
fn every_header_number_may_be_anything() {
    let (old, sound) = (shard(), sound());
    check!()
        .with_iterations(4 * ITERATIONS)
        .with_type::<(u8, [u8; 4], u32, u64, u32, Vec<u8>)>()
        .for_each(|(which, first, length, start, needs, payload)| {
            let mut coder = Coder::new().expect("memory for the contexts");
            let (record, _) = &sound[usize::from(*which) % sound.len()];
            // Most numbers near what they may be, so that not all fail at the first check.
            let near = |number: u32| {
                if number & 1 == 0 {
                    number >> 12
                } else {
                    number
                }
            };
            let mut bytes = match first[1] & 3 {
                0 => vec![1, first[1] % 6, first[2] % 9, first[3] % 3],
                _ => record[..4].to_vec(),
            };
            let length = match first[2] & 1 {
                0 => near(*length),
                _ => LENGTH as u32,
            };
            bytes.extend(length.to_le_bytes());
            let start = match first[0] >> 6 {
                0 => START as u64,
                1 => u64::MAX - (start >> 52),
                _ => start >> (first[0] & 63),
            };
            bytes.extend(start.to_le_bytes());
            let needs = if needs & 2 == 0 { length } else { near(*needs) };
            bytes.extend(needs.to_le_bytes());
            let payload = if first[0] & 1 == 0 {
                payload
            } else {
                &record[24..]
            };
            bytes.extend((payload.len() as u32).to_le_bytes());
            bytes.extend_from_slice(payload);
            let _ = decoded(&mut coder, &bytes, &old);
        });
}

#[test]
fn what_is_written_comes_back() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(u8, u32, Vec<u8>, Vec<Damage>)>()
        .for_each(|(which, start, old, damages)| {
            let mut coder = Coder::new().expect("memory for the contexts");
            let all = encodings();
            let encoding = all[usize::from(*which) % all.len()];
            let mut new = damaged(old, damages);
            if matches!(encoding, Encoding::Difference(..)) {
                new.resize(old.len(), 7);
            }
            let start = u64::from(*start);
            let basis = Some(Basis { start, bytes: old });
            let mut bytes = vec![1, 2, 3];
            match coder.encode(encoding, start, &new, basis, &mut bytes) {
                Err(DeltaError::NotMoved) if encoding == Encoding::Moved => {
                    assert_eq!(bytes, [1, 2, 3]);
                }
                outcome => {
                    assert_eq!(outcome, Ok(()));
                    let record = Record::parse(&bytes[3..]).expect("a record");
                    let mut out = vec![0; record.length()];
                    assert_eq!(coder.decode(&record, basis, &mut out), Ok(()));
                    assert_eq!(out, new);
                }
            }
        });
}

/// Two levels of three chunks each, as records and leaves.
struct Chain {
    shards: [Vec<u8>; 2],
    records: [Vec<Vec<u8>>; 2],
    leaves: [Vec<Digest>; 2],
}

fn chain(chunk: ChunkSize) -> Chain {
    let base = noise(3, 2 * chunk.bytes() + 900);
    let mut next = base.clone();
    next.iter_mut().step_by(5).for_each(|byte| *byte ^= 1);
    let mut coder = Coder::new().expect("memory for the contexts");
    let subtract = Encoding::Difference(ElementSize::ALL[2], Arithmetic::Subtract);
    let mut records = |shard: &[u8], encoding, basis: Option<Basis<'_>>| {
        let places = (0..)
            .step_by(chunk.bytes())
            .zip(shard.chunks(chunk.bytes()));
        let record = |(start, block): (u64, &[u8])| {
            let mut record = Vec::new();
            let coded = coder.encode(encoding, start, block, basis, &mut record);
            coded.map(|()| record).expect("a record")
        };
        places.map(record).collect::<Vec<_>>()
    };
    let leaves = |shard: &[u8]| {
        let blocks = (0..).zip(shard.chunks(chunk.bytes()));
        blocks.map(|(at, block)| leaf_digest(block, at)).collect()
    };
    Chain {
        records: [
            records(&base, Encoding::Packed, None),
            records(&next, subtract, Some(whole(&base))),
        ],
        leaves: [leaves(&base), leaves(&next)],
        shards: [base, next],
    }
}

#[test]
fn a_damaged_chain_never_gives_another_shard() {
    let chunk = ChunkSize::new(4096).expect("a power of two");
    let chain = chain(chunk);
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(u8, u8, u64, Vec<Damage>)>()
        .for_each(|(which, many, length, damages)| {
            let mut coder = Coder::new().expect("memory for the contexts");
            let mut records = chain.records.clone();
            let (level, at) = (usize::from(which % 2), usize::from(which / 2 % 3));
            let damage = if which & 64 == 0 {
                damaged
            } else {
                payload_damaged
            };
            records[level][at] = damage(&records[level][at], damages);
            let moved = |record: &Vec<u8>| {
                Record::parse(record).is_ok_and(|record| record.encoding().kind() == Kind::Moved)
            };
            if records.iter().flatten().any(moved) {
                return;
            }
            let level = |at: usize| Level {
                length: match many {
                    0..3 => *length,
                    _ => chain.shards[at].len() as u64,
                },
                records: &records[at][..records[at].len() - usize::from(*many == 4)],
                leaves: &chain.leaves[at],
            };
            let levels = [level(0), level(1)];
            if let Ok(shard) = rebuild(&mut coder, chunk, &levels) {
                assert!(
                    shard == chain.shards[1],
                    "another shard with the same digests"
                );
                let compacted = compact(&mut coder, chunk, &levels).expect("it was rebuilt");
                let base = Level {
                    records: &compacted,
                    ..levels[1]
                };
                assert_eq!(rebuild(&mut coder, chunk, &[base]), Ok(shard));
            }
        });
}

#[test]
fn dirty_maps_take_any_marks_and_lengths() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(u16, u16, Vec<u64>)>()
        .for_each(|(chunks, others, marks)| {
            let (chunks, others) = (usize::from(*chunks), usize::from(*others));
            let mut map = DirtyMap::clean(chunks);
            marks.iter().for_each(|mark| map.mark(*mark as usize));
            marks.iter().for_each(|mark| map.mark(*mark as usize % 70));
            let listed: Vec<usize> = map.iter().collect();
            assert_eq!(listed.len(), map.count());
            assert!(listed.iter().all(|at| *at < chunks && map.is_dirty(*at)));
            let mut union = DirtyMap::clean(others);
            assert_eq!(union.union(&map).is_ok(), chunks == others);
        });
}
