//! A daemon ends and the next one goes on with its memory, as another process would be given it.

use storaged_core::Source;

use super::*;
use crate::encode::{BlockState, Blocks, Proof};
use crate::keep::RecordingStore;
use crate::verify::tests::{CHUNK, Lane, all, begin, put_all};

/// The first daemon, and a table of a set of it.
struct Before {
    memory: Memory,
    store: Arc<RecordingStore>,
    lane: Lane,
}

impl Before {
    /// It holds set 1, whose third chunk is all zeros and whose last is short.
    fn new() -> Self {
        let store = Arc::new(RecordingStore::default());
        let memory = Memory::new(store.clone());
        let mut lane = Lane::new(1, 3 * CHUNK + 9);
        lane.bytes[2 * CHUNK..3 * CHUNK].fill(0);
        let keep = begin(&memory, &lane.work(1, None, all(&lane))).unwrap();
        for stripe in 0..4 {
            let block = (stripe != 2).then(|| lane.chunk(stripe));
            keep.put(stripe, block).unwrap();
        }
        drop(keep);
        Self {
            memory,
            store,
            lane,
        }
    }

    fn table(&self, set: u64) -> ParityTable {
        let table = self.memory.parity_table(ParityId(set)).unwrap();
        ParityTable::decode(&table.encode()).unwrap()
    }

    /// Ends the first daemon. The next one has its descriptors.
    fn end(self) -> (Memory, Arc<RecordingStore>, Lane) {
        drop(self.memory);
        let memory = Memory::new(self.store.clone());
        let refused = memory.adopt(self.store.duplicates());
        assert!(refused.is_empty(), "{refused:?}");
        (memory, self.store, self.lane)
    }
}

fn segments(store: &RecordingStore) -> usize {
    let names = store.names().into_iter();
    names
        .filter(|name| matches!(name, KeptName::Parity(_)))
        .count()
}

fn change(table: &ParityTable, row: usize, change: impl Fn(&mut ParityRow)) -> ParityTable {
    let mut changed = table.clone();
    change(changed.rows[row].as_mut().unwrap());
    changed
}

#[test]
fn the_next_daemon_reads_the_same_parity() {
    let before = Before::new();
    let (table, bytes) = (before.table(1), before.memory.parity_bytes());
    assert_eq!(table.rows.iter().flatten().count(), 3);
    let (memory, store, lane) = before.end();
    memory.adopt_parity(ParityId(5), &table).unwrap();
    memory.drop_unclaimed();
    assert!(lane.is_held(&memory, 5));
    assert_eq!(memory.parity_bytes(), bytes);
    assert_eq!(memory.parity_table(ParityId(5)), Some(table));
    let (read, fault) = memory.check_parity(ParityId(5), 0..4);
    assert_eq!((read, fault), (bytes, None));
    // What comes next is put beside it, and on it.
    let next = Lane::new(9, 3 * CHUNK);
    let keep = begin(&memory, &next.work(6, Some(5), all(&next))).unwrap();
    for stripe in 0..3 {
        let difference = next.difference(&lane, stripe);
        keep.put(stripe, Some(&difference)).unwrap();
    }
    drop(keep);
    assert!(next.is_held(&memory, 6) && lane.is_held(&memory, 5));
    memory.drop_parity(ParityId(5));
    memory.drop_parity(ParityId(6));
    assert_eq!((memory.parity_bytes(), segments(&store)), (0, 0));
}

#[test]
fn a_flipped_byte_is_found() {
    let before = Before::new();
    let table = before.table(1);
    let place = table.rows[1].unwrap().place;
    drop(before.memory);
    let kept = before.store.duplicates().into_iter();
    let mut kept = kept.filter(|(name, _)| *name == KeptName::Parity(place.segment.into()));
    let segment = Segment::reopen(kept.next().unwrap().1, Instant::now()).unwrap();
    let mut cell = segment.adopt(place.cell).unwrap();
    let mut bytes = [0; 78];
    cell.read(&mut bytes).unwrap();
    bytes[77] ^= 4;
    cell.write(&bytes).unwrap();
    cell.leave();
    drop(segment);
    let memory = Memory::new(before.store.clone());
    memory.adopt(before.store.duplicates());
    memory.adopt_parity(ParityId(1), &table).unwrap();
    let source = Source::Parity { set: ParityId(1) };
    let mut out = vec![0; CHUNK];
    assert_eq!(
        memory.read(&source, 0, Proof::Reader, &mut out),
        Ok(BlockState::Dirty)
    );
    assert!(memory.read(&source, 1, Proof::Reader, &mut out).is_err());
    assert!(memory.check_parity(ParityId(1), 0..4).1.is_some());
}

#[test]
fn sets_that_share_chunks_share_them_again() {
    let before = Before::new();
    let mut next = Lane::new(1, 3 * CHUNK + 9);
    next.bytes[2 * CHUNK..3 * CHUNK].fill(0);
    next.bytes[CHUNK] ^= 1;
    let moved = std::iter::once(1..2).collect();
    let keep = begin(&before.memory, &next.work(2, Some(1), moved)).unwrap();
    let difference = next.difference(&before.lane, 1);
    keep.put(1, Some(&difference)).unwrap();
    drop(keep);
    let (tables, bytes) = (
        [before.table(1), before.table(2)],
        before.memory.parity_bytes(),
    );
    let (memory, _, lane) = before.end();
    memory.adopt_parity(ParityId(1), &tables[0]).unwrap();
    memory.adopt_parity(ParityId(2), &tables[1]).unwrap();
    memory.drop_unclaimed();
    assert_eq!(memory.parity_bytes(), bytes, "each chunk once");
    memory.drop_parity(ParityId(1));
    assert!(next.is_held(&memory, 2), "it has the chunks of both");
    assert!(!lane.is_held(&memory, 2));
    assert_eq!(memory.parity_bytes(), 2 * CHUNK as u64 + 9);
}

#[test]
fn a_table_that_is_wrong_about_one_chunk_claims_none() {
    let before = Before::new();
    let table = before.table(1);
    let (memory, store, lane) = before.end();
    let refused = |table: &ParityTable| memory.adopt_parity(ParityId(1), table).unwrap_err();
    let unknown = change(&table, 3, |row| row.place.segment = 77);
    assert!(matches!(refused(&unknown), AdoptError::NoSegment(77)));
    let outside = change(&table, 3, |row| row.place.cell = u32::MAX);
    assert!(matches!(refused(&outside), AdoptError::Segment(_)));
    let long = change(&table, 3, |row| row.length = CHUNK as u32 + 1);
    assert!(matches!(refused(&long), AdoptError::Length { .. }));
    let first = table.rows[0].unwrap();
    let twice = change(&table, 3, |row| row.place = first.place);
    assert!(matches!(refused(&twice), AdoptError::Differs(_)));
    assert_eq!(memory.parity_bytes(), 0);
    // None of them took or freed what another table is right about.
    memory.adopt_parity(ParityId(1), &table).unwrap();
    assert!(lane.is_held(&memory, 1));
    assert!(matches!(refused(&table), AdoptError::SetExists(_)));
    let other_print = change(&table, 0, |row| row.print = Fingerprint::ZERO);
    let differs = memory.adopt_parity(ParityId(2), &other_print);
    assert!(matches!(differs, Err(AdoptError::Differs(_))));
    memory.drop_unclaimed();
    assert_eq!(segments(&store), 1);
}

#[test]
fn slots_come_back_and_what_nobody_claims_is_freed() {
    let before = Before::new();
    let (first, second) = (SlotId::new(1), SlotId::new(2));
    for id in [first, second] {
        before.memory.create_slot(id, 8192).unwrap();
        let slot = before.memory.slot(id).unwrap();
        slot.write_at(100, &[id.get() as u8; 50]).unwrap();
    }
    let (memory, store, _) = before.end();
    assert!(memory.slot(first).is_none(), "not claimed yet");
    assert_eq!(memory.adopt_slot(first).unwrap(), 8192);
    assert!(matches!(
        memory.adopt_slot(first),
        Err(AdoptError::NoSlot(_))
    ));
    let mut out = [0; 50];
    memory.slot(first).unwrap().read_at(100, &mut out).unwrap();
    assert_eq!(out, [1; 50]);
    assert_eq!(store.names().len(), 3);
    memory.drop_unclaimed();
    assert_eq!(store.names(), [KeptName::Slot(first)]);
    assert!(memory.adopt_slot(second).is_err());
    memory.drop_slot(first);
    assert_eq!(store.names(), []);
    // Numbers of segments go on where the earlier daemon ended.
    let lane = Lane::new(3, CHUNK);
    put_all(&memory, &lane, 1);
    assert_eq!(store.names(), [KeptName::Parity(1)]);
}

#[test]
fn descriptors_of_other_things_are_refused_or_given_back() {
    let store = Arc::new(RecordingStore::default());
    let memory = Memory::new(store.clone());
    let fd = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let slot = SlotId::new(1);
    let refused = memory.adopt(vec![
        (KeptName::Slot(slot), fd()),
        (KeptName::Parity(3), fd()),
        (KeptName::Parity(1 << 40), fd()),
        (KeptName::Journal(0), fd()),
    ]);
    assert_eq!(refused.len(), 4);
    memory.drop_unclaimed();
    put_all(&memory, &Lane::new(3, CHUNK), 1);
    assert_eq!(store.names(), [KeptName::Parity(4)]);
}
