//! What will happen, in order of time; and numbers that follow from a seed.

use std::collections::BTreeMap;

/// Events of one time happen in the order in which they were planned.
#[derive(Debug)]
pub struct Queue<E> {
    events: BTreeMap<(u64, u64), E>,
    planned: u64,
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self {
            events: BTreeMap::new(),
            planned: 0,
        }
    }
}

impl<E> Queue<E> {
    pub fn plan(&mut self, time: u64, event: E) {
        self.planned += 1;
        self.events.insert((time, self.planned), event);
    }

    pub fn next_at(&self) -> Option<u64> {
        self.events.keys().next().map(|(time, _)| *time)
    }

    pub fn pop(&mut self) -> Option<(u64, E)> {
        let ((time, _), event) = self.events.pop_first()?;
        Some((time, event))
    }

    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Such events happen so much later.
    pub fn postpone(&mut self, ms: u64, is_late: impl Fn(&E) -> bool) {
        let late: Vec<_> = (self.events)
            .extract_if(.., |_, event| is_late(event))
            .collect();
        for ((time, _), event) in late {
            self.plan(time + ms, event);
        }
    }
}

/// SplitMix64.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }
}
