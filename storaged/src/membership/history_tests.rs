//! Registries that were emptied, put back from an older copy, or written by somebody else, under simulated time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::registry::name_of_number;
use storaged_wire::Namespace;

use super::tests::{arrival, entering, full, lost, name};
use super::*;

/// What etcd does, and what operators do to it.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    records: Mutex<BTreeMap<u64, Bytes>>,
    runs: Mutex<BTreeMap<Namespace, Arc<Shelf>>>,
}

impl Shelf {
    /// Somebody replaces all that is there.
    pub fn put_back(&self, rosters: &[&Roster]) {
        let records = rosters.iter().map(|it| (it.epoch, it.bytes().into()));
        *self.records.lock().unwrap_or_else(PoisonError::into_inner) = records.collect();
    }

    /// The records of a namespace's runs.
    pub fn runs(&self, namespace: &Namespace) -> Arc<Self> {
        let mut runs = self.runs.lock().unwrap();
        runs.entry(namespace.clone()).or_default().clone()
    }

    /// Somebody changes or deletes what is there.
    pub fn change(&self, with: impl FnOnce(&mut BTreeMap<u64, Bytes>)) {
        with(&mut self.records.lock().unwrap());
    }

    pub fn epochs(&self) -> Vec<u64> {
        let records = self.records.lock().unwrap();
        records.keys().copied().collect()
    }

    fn at(&self, epoch: Option<u64>) -> Option<NumberedRecord> {
        let records = self.records.lock().unwrap();
        let epoch = epoch.or_else(|| records.keys().last().copied())?;
        records.get(&epoch).map(|bytes| NumberedRecord {
            name: name_of_number(epoch),
            bytes: bytes.clone(),
        })
    }
}

#[async_trait]
impl NumberedRecords for Shelf {
    fn runs_of(&self, namespace: &Namespace) -> Arc<dyn NumberedRecords> {
        self.runs(namespace)
    }

    async fn record(&self, epoch: u64) -> Result<Option<NumberedRecord>, RegistryError> {
        Ok(self.at(Some(epoch)))
    }

    async fn newest(&self) -> Result<Option<NumberedRecord>, RegistryError> {
        Ok(self.at(None))
    }

    async fn create(&self, epoch: u64, record: Bytes) -> Result<Proposal, RegistryError> {
        let mut records = self.records.lock().unwrap();
        let there = records.entry(epoch).or_insert_with(|| record.clone());
        let is_own = *there == record;
        Ok(if is_own {
            Proposal::Taken
        } else {
            Proposal::Outrun
        })
    }

    async fn check_place(&self) -> Result<(), RegistryError> {
        Ok(())
    }
}

pub(super) fn shelf(rosters: &[&Roster]) -> (Arc<Shelf>, Registry) {
    let shelf = Arc::new(Shelf::default());
    shelf.put_back(rosters);
    (shelf.clone(), Registry::new(shelf))
}

/// Epochs 1 to 3, in the last of which `b` was lost.
fn three_epochs() -> [Roster; 3] {
    let both = full(&["a", "b"]);
    let one = match Roster::empty("c".into(), 2).arrive(&arrival("a")) {
        Arrived::Propose(one) => *one,
        other => panic!("{other:?}"),
    };
    let lost = lost(&both, "b");
    [one, both, lost]
}

#[tokio::test(start_paused = true)]
async fn spares_found_no_cluster_in_a_registry_that_was_emptied() {
    let [one, both, lost] = three_epochs();
    let (shelf, registry) = shelf(&[&one, &both]);
    let spares = ["d", "e"].map(|node| {
        let entering = entering(&registry, node, 2);
        tokio::spawn(async move { enter(&entering, |_| ()).await.unwrap() })
    });
    tokio::time::sleep(Duration::from_secs(5)).await;
    shelf.put_back(&[]);
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(shelf.epochs(), [0; 0], "nobody proposes anything");
    shelf.put_back(&[&one, &both, &lost]);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(spares.iter().filter(|it| it.is_finished()).count(), 1);
}

/// The copy that was put back ends before the last epoch, and others went on from there.
fn another_way_on() -> (Roster, Vec<Roster>) {
    let [one, both, known] = three_epochs();
    let other = lost(&both, "a");
    let next = other.arrive(&arrival("d"));
    let Arrived::Propose(next) = next else {
        panic!("{next:?}");
    };
    (known, vec![one, both, other, *next])
}

#[tokio::test(start_paused = true)]
async fn a_roster_that_does_not_go_on_from_the_known_one_is_not_taken() {
    let (known, there) = another_way_on();
    let (_, registry) = shelf(&there.iter().collect::<Vec<_>>());
    let error = registry.newer_than(&known).await.unwrap_err();
    assert!(
        matches!(error, RegistryError::GoneBack { known: 3, .. }),
        "{error}"
    );
    let newest = registry.newer_than(&there[2]).await.unwrap();
    assert_eq!(newest.as_ref(), there.last());
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_started_again_believes_no_other_way_on() {
    let (known, there) = another_way_on();
    let (shelf, registry) = shelf(&there.iter().collect::<Vec<_>>());
    let again = Entering {
        remembered: Some(known.clone()),
        ..entering(&registry, "a", 2)
    };
    let mut said = String::new();
    let entered = enter(&again, |waits| said = waits.to_string())
        .await
        .unwrap();
    assert_eq!((entered.roster, entered.place), (known, name("a")));
    assert!(said.contains("gone back"), "{said}");
    assert_eq!(shelf.epochs(), [1, 2, 3, 4]);
}

#[tokio::test]
async fn a_record_after_which_none_can_come_is_refused() {
    let mut last = full(&["a", "b"]);
    last.epoch = u64::MAX;
    let mut worn = full(&["a", "b"]);
    worn.places[0].term = u64::MAX;
    for roster in [last, worn] {
        let (_, registry) = shelf(&[&roster]);
        let error = registry.newest().await.unwrap_err();
        assert!(matches!(error, RegistryError::Roster { .. }), "{error}");
    }
}

/// It remembers its place from before, and has seen since that another node has it, in this life or the one before.
#[tokio::test(start_paused = true)]
async fn a_node_that_was_replaced_takes_no_place_while_the_registry_is_away() {
    let known = full(&["a", "b", "c"]);
    let replaced = known
        .vacated(&name("a"), Comeback::Refused, "broken")
        .expect("a place");
    let (shelf, registry) = shelf(&[&known, &replaced]);
    let folder = tempfile::tempdir().expect("a folder");
    let memory = Remembered::at(folder.path().join("roster"));
    memory.write(&known);
    for life in 0..2 {
        let again = Entering {
            remembered: memory.read(),
            memory: Some(memory.clone()),
            ..entering(&registry, "a", 3)
        };
        let mut said = Vec::new();
        let enters = enter(&again, |waits| {
            said.push(waits.to_string());
            shelf.put_back(&[]);
        });
        let entered = tokio::time::timeout(Duration::from_secs(60), enters).await;
        assert!(entered.is_err(), "{life}: {entered:?}");
        assert_eq!(said[0].contains("admit"), life == 0, "{said:?}");
        assert!(said[1 - life].contains("gone back"), "{said:?}");
    }
}
