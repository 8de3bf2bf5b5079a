//! What a parity chunk must be before it is kept: its fingerprint is the combination of those of the chunks that it
//! protects. This is what makes a parity set *verified* when it is made, whoever computed it and on what basis.

use std::sync::Arc;

use storaged_codec::{Fingerprint, fingerprint};
use storaged_wire::peer::SessionFault;

/// The fingerprints of a parity set.
#[derive(Debug)]
pub(crate) struct ParityCheck {
    expected: Arc<[Fingerprint]>,
}

impl ParityCheck {
    /// Of a set of this many stripes.
    pub fn new(expected: Arc<[Fingerprint]>, stripes: usize) -> Result<Self, SessionFault> {
        if expected.len() == stripes {
            Ok(Self { expected })
        } else {
            // Without them nothing can be verified, and what is not is not kept.
            Err(SessionFault::NoBlocks)
        }
    }

    /// Whether these are the bytes of a stripe's chunk, and their fingerprint if they are.
    pub fn bytes(&self, stripe: u64, bytes: &[u8]) -> Result<Fingerprint, SessionFault> {
        let print = fingerprint(bytes);
        self.print(stripe, Some(print)).map(|()| print)
    }

    /// Whether a chunk that had this fingerprint when it was kept, or none of zeros, is that of a stripe.
    pub fn print(&self, stripe: u64, kept: Option<Fingerprint>) -> Result<(), SessionFault> {
        let expected = usize::try_from(stripe)
            .ok()
            .and_then(|at| self.expected.get(at));
        let expected = *expected.ok_or(SessionFault::NoBlocks)?;
        let got = kept.unwrap_or(Fingerprint::ZERO);
        if got == expected {
            Ok(())
        } else {
            Err(SessionFault::WrongResult(format!(
                "expected the parity of stripe {stripe} to have the fingerprint {expected:?}, got {got:?}"
            )))
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;
    use std::ops::Range;

    use storaged_codec::{ChunkSize, engine};
    use storaged_core::{ParityId, SessionPurpose, SessionWork, Sink, Source, Urgency};
    use storaged_plan::StripedPlan;
    use storaged_plan::{CodingPlan, Coefficients};
    use storaged_wire::{NodeName, SessionId};

    use super::*;
    use crate::encode::{BlockSink, BlockState, Blocks, Proof};
    use crate::keep::NoStore;
    use crate::memory::Memory;

    pub(crate) const CHUNK: usize = 4096;

    /// Parity of a lane of this content: with one data node it is the content itself, times one.
    pub(crate) struct Lane {
        pub(crate) bytes: Vec<u8>,
    }

    impl Lane {
        pub(crate) fn new(seed: u8, length: usize) -> Self {
            let byte = |at: usize| (at * 7 + at / 256) as u8 ^ seed;
            Self {
                bytes: (0..length).map(byte).collect(),
            }
        }

        pub(crate) fn work(
            &self,
            set: u64,
            basis: Option<u64>,
            stripes: Vec<Range<u64>>,
        ) -> SessionWork {
            let coefficients = Coefficients::new(vec![vec![1]]).unwrap();
            let plan = StripedPlan::uniform(CodingPlan::chain(&coefficients), 1);
            let node = NodeName::new("n0").unwrap();
            SessionWork {
                leader: node.clone(),
                session: SessionId::new(set),
                purpose: SessionPurpose::Encode,
                urgency: Urgency::Background,
                plan: Arc::new(plan),
                members: vec![node; 2].into(),
                member: 1,
                chunk: ChunkSize::new(CHUNK as u32).unwrap(),
                lane_length: self.bytes.len() as u64,
                stripes,
                source: None,
                keep: Some(Sink::Parity {
                    set: ParityId(set),
                    basis: basis.map(ParityId),
                    prints: self.bytes.chunks(CHUNK).map(fingerprint).collect(),
                }),
                carried: Vec::new(),
                proofs: BTreeMap::new(),
            }
        }

        pub(crate) fn stripes(&self) -> u64 {
            self.bytes.len().div_ceil(CHUNK) as u64
        }

        pub(crate) fn chunk(&self, stripe: u64) -> &[u8] {
            let chunk = self.bytes.chunks(CHUNK).nth(stripe as usize);
            chunk.unwrap_or_default()
        }

        /// What a source of this content sends on a basis.
        pub(crate) fn difference(&self, old: &Lane, stripe: u64) -> Vec<u8> {
            let mut new = self.chunk(stripe).to_vec();
            let both = new.len().min(old.chunk(stripe).len());
            engine().xor(&mut new[..both], &old.chunk(stripe)[..both]);
            new
        }

        pub(crate) fn is_held(&self, memory: &Memory, set: u64) -> bool {
            (0..self.stripes()).all(|stripe| {
                let mut out = vec![0; self.chunk(stripe).len()];
                let source = Source::Parity { set: ParityId(set) };
                match memory
                    .read(&source, stripe, Proof::Reader, &mut out)
                    .unwrap()
                {
                    BlockState::Clean => self.chunk(stripe).iter().all(|byte| *byte == 0),
                    BlockState::Dirty => out == self.chunk(stripe),
                }
            })
        }
    }

    fn memory() -> Memory {
        Memory::new(Arc::new(NoStore))
    }

    pub(crate) fn begin(
        memory: &Memory,
        work: &SessionWork,
    ) -> Result<Box<dyn BlockSink>, SessionFault> {
        memory.begin_keep(work.keep.as_ref().unwrap(), work)
    }

    pub(crate) fn all(lane: &Lane) -> Vec<Range<u64>> {
        std::iter::once(0..lane.stripes()).collect()
    }

    pub(crate) fn put_all(memory: &Memory, lane: &Lane, set: u64) {
        let keep = begin(memory, &lane.work(set, None, all(lane))).unwrap();
        (0..lane.stripes()).for_each(|s| keep.put(s, Some(lane.chunk(s))).unwrap());
        assert!(lane.is_held(memory, set));
    }

    fn is_wrong(outcome: Result<(), SessionFault>) -> bool {
        matches!(outcome, Err(SessionFault::WrongResult(_)))
    }

    #[test]
    fn wrong_parity_is_not_kept() {
        let (memory, lane) = (memory(), Lane::new(1, 3 * CHUNK + 9));
        let keep = begin(&memory, &lane.work(1, None, all(&lane))).unwrap();
        for stripe in 0..4 {
            let mut wrong = lane.chunk(stripe).to_vec();
            wrong[5] ^= 0x10;
            assert!(is_wrong(keep.put(stripe, Some(&wrong))));
            assert!(
                is_wrong(keep.put(stripe, None)),
                "a clean flag is no way around"
            );
        }
        assert_eq!(memory.parity_bytes(), 0);
        (0..4).for_each(|stripe| keep.put(stripe, Some(lane.chunk(stripe))).unwrap());
        assert!(lane.is_held(&memory, 1));
    }

    #[test]
    fn a_stripe_that_should_have_moved_is_found_before_anything_is_done() {
        let (memory, old) = (memory(), Lane::new(1, 4 * CHUNK));
        put_all(&memory, &old, 1);
        let mut new = Lane::new(1, 4 * CHUNK);
        new.bytes[2 * CHUNK] ^= 1;
        // Somebody says that nothing has changed.
        assert!(is_wrong(
            begin(&memory, &new.work(2, Some(1), vec![])).map(drop)
        ));
        let moved = std::iter::once(2..3).collect();
        let keep = begin(&memory, &new.work(2, Some(1), moved)).unwrap();
        // Or that what moves is no difference.
        assert!(is_wrong(keep.put(2, None)));
        keep.put(2, Some(&new.difference(&old, 2))).unwrap();
        assert!(new.is_held(&memory, 2) && old.is_held(&memory, 1));
    }

    #[test]
    fn of_a_set_that_is_put_back_part_by_part_only_what_is_there_must_be_right() {
        let (memory, lane) = (memory(), Lane::new(1, 4 * CHUNK));
        let some = |range: Range<u64>| std::iter::once(range).collect::<Vec<_>>();
        let keep = begin(&memory, &lane.work(1, None, some(1..3))).unwrap();
        (1..3).for_each(|stripe| keep.put(stripe, Some(lane.chunk(stripe))).unwrap());
        drop(keep);
        let mut rest = lane.work(1, None, vec![0..1, 3..4]);
        rest.carried = some(1..3);
        let keep = begin(&memory, &rest).unwrap();
        for stripe in [0, 3] {
            keep.put(stripe, Some(lane.chunk(stripe))).unwrap();
        }
        assert!(lane.is_held(&memory, 1));
        // What is said to be there and is not is found at once.
        let mut lying = lane.work(2, None, some(0..1));
        lying.carried = some(1..2);
        assert!(begin(&memory, &lying).is_err());
    }

    /// Two sets share a chunk: it is counted once, and found in both.
    #[test]
    fn parity_is_scrubbed_against_what_it_was_and_what_its_data_says() {
        let (memory, lane) = (memory(), Lane::new(1, 3 * CHUNK));
        put_all(&memory, &lane, 1);
        let prints: Vec<Fingerprint> = lane.bytes.chunks(CHUNK).map(fingerprint).collect();
        let scrub = |set: u64, prints: &[Fingerprint]| {
            let tally = memory.scrub_parity(ParityId(set), 0..3, Some(prints));
            tally.map(|tally| (tally.rotten, tally.known))
        };
        assert_eq!(scrub(1, &prints), Ok((vec![], 0)));
        // The data says otherwise: the chunk, or what it was kept with, is wrong.
        let mut others = prints.clone();
        others[1] = prints[0];
        assert_eq!(scrub(1, &others), Ok((vec![1], 0)));
        let keep = begin(&memory, &lane.work(2, Some(1), vec![])).unwrap();
        drop(keep);
        assert_eq!(scrub(2, &others), Ok((vec![1], 1)), "it was found in set 1");
        assert!(scrub(3, &prints).is_err(), "no such set");
    }

    #[test]
    fn without_a_fingerprint_per_stripe_nothing_is_kept() {
        let (memory, lane) = (memory(), Lane::new(1, 2 * CHUNK));
        let mut work = lane.work(1, None, all(&lane));
        work.lane_length += 1;
        let refused = begin(&memory, &work).map(drop);
        assert_eq!(refused, Err(SessionFault::NoBlocks));
    }

    /// The chunks at the end of a lane that becomes shorter and longer again have no parity of the older step in them.
    #[test]
    fn a_lane_may_shrink_and_grow() {
        let (memory, sizes) = (memory(), [4 * CHUNK, CHUNK + 100, 2 * CHUNK - 7, 4 * CHUNK]);
        let lanes: Vec<Lane> = (1..)
            .zip(sizes)
            .map(|(seed, size)| Lane::new(seed, size))
            .collect();
        put_all(&memory, &lanes[0], 0);
        for (set, pair) in (1..).zip(lanes.windows(2)) {
            let [old, new] = pair else {
                unreachable!("windows of two")
            };
            let keep = begin(&memory, &new.work(set, Some(set - 1), all(new))).unwrap();
            for stripe in 0..new.stripes() {
                keep.put(stripe, Some(&new.difference(old, stripe)))
                    .unwrap();
            }
            assert!(new.is_held(&memory, set), "step {set}");
        }
    }
}
