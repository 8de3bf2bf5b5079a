//! Runs in a registry: each number is given once, whoever asks and whatever was lost or put back.

use std::sync::Arc;

use storaged_core::Registration;
use storaged_wire::{Namespace, RunId};

use super::history_tests::shelf;
use super::tests::full;
use super::*;

const TAKEN: fn(u64) -> Registration = |highest| Registration::Taken { highest };

fn run(number: u64, identity: u64) -> RunId {
    RunId::with_identity(number, identity)
}

fn job() -> Namespace {
    Namespace::new("job").unwrap()
}

#[tokio::test]
async fn a_number_is_one_runs_and_none_is_given_below_the_newest() {
    let roster = full(&["a", "b"]);
    let (_, registry) = shelf(&[&roster]);
    let register = async |run| registry.register_run(&roster, &job(), run).await.unwrap();
    assert_eq!(register(run(1, 7)).await, Registration::Registered);
    assert_eq!(register(run(1, 8)).await, TAKEN(1));
    // Its answer was lost.
    assert_eq!(register(run(1, 7)).await, Registration::Registered);
    // Nodes or the durable tier remember higher ones.
    assert_eq!(register(run(9, 8)).await, Registration::Registered);
    for number in [1, 2, 8, 9] {
        assert_eq!(register(run(number, 7)).await, TAKEN(9), "{number}");
    }
    let other = Namespace::new("tenant~job").unwrap();
    let others = registry.register_run(&roster, &other, run(1, 7)).await;
    assert_eq!(others.unwrap(), Registration::Registered);
}

#[tokio::test]
async fn of_many_that_ask_for_a_number_at_once_one_gets_it() {
    let roster = full(&["a", "b"]);

    let store = crate::trickle::store::FakeStore::new();
    let registry = Registry::new(Arc::new(ObjectRecords::new(Arc::new(store))));
    assert_eq!(registry.propose(&roster).await.unwrap(), Proposal::Taken);
    let asked = (1..=16).map(|identity| {
        let (registry, roster) = (registry.clone(), roster.clone());
        tokio::spawn(async move {
            registry
                .register_run(&roster, &job(), run(1, identity))
                .await
        })
    });
    let mut given = 0;
    for one in asked.collect::<Vec<_>>() {
        match one.await.unwrap().unwrap() {
            Registration::Registered => given += 1,
            Registration::Taken { highest } => assert_eq!(highest, 1),
        }
    }
    assert_eq!(given, 1);
}

#[tokio::test]
async fn a_registry_that_has_forgotten_the_roster_gives_no_run() {
    let [before, known] = [full(&["a"]), full(&["a", "b"])];
    let (shelf, registry) = shelf(&[&before, &known]);
    assert!(before.epoch < known.epoch);
    shelf.put_back(&[&before]);
    let refused = registry.register_run(&known, &job(), run(1, 7)).await;
    assert!(
        matches!(refused, Err(RegistryError::GoneBack { .. })),
        "{refused:?}"
    );
    assert!(shelf.runs(&job()).epochs().is_empty());
}

#[tokio::test]
async fn what_is_no_run_is_named_and_overwritten_by_nobody() {
    let roster = full(&["a", "b"]);
    let mut texts = vec![
        "".to_owned(),
        "{}".into(),
        "{\"version\":2,\"namespace\":\"job\",\"run\":\"1\"}".into(),
    ];
    for (namespace, run) in [("other", "3-00000000000000ff"), ("job", "4"), ("job", "x")] {
        texts.push(format!(
            r#"{{"version":1,"namespace":"{namespace}","run":"{run}"}}"#
        ));
    }
    for text in texts {
        let (shelf, registry) = shelf(&[&roster]);
        let runs = shelf.runs(&job());
        runs.change(|records| drop(records.insert(3, text.clone().into())));
        let refused = registry.register_run(&roster, &job(), run(4, 7)).await;
        assert!(
            matches!(refused, Err(RegistryError::Run { .. })),
            "{text}: {refused:?}"
        );
        assert_eq!(runs.epochs(), [3], "{text}");
    }
}
