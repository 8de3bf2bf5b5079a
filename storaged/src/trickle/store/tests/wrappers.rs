//! The wrappers: retries get through faults and end in bounded time, the throttle holds its rate.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::super::{
    FakeStore, FaultPlan, Faulty, RetryPolicy, Retrying, Store, StoreError, Throttled,
};
use super::{key, pattern, randomness, upload};

fn patient(plan: FaultPlan, seed: u64, attempts_max: u32) -> Retrying {
    let faulty = Faulty::new(Arc::new(FakeStore::new()), plan, seed);
    let policy = RetryPolicy {
        attempts_max,
        ..RetryPolicy::default()
    };
    Retrying::new(Arc::new(faulty), policy, randomness())
}

#[tokio::test(start_paused = true)]
async fn retries_get_through_failures_and_lost_answers() {
    let plan = FaultPlan {
        fail_per_mille: 200,
        lose_answer_per_mille: 200,
        ..FaultPlan::default()
    };
    for seed in 0..50 {
        let store = patient(plan, seed, 20);
        let bytes = pattern(20_000, seed);
        upload(&store, &key("shard"), &bytes).await.unwrap();
        store
            .put_new(&key("manifest"), Bytes::from_static(b"m"))
            .await
            .unwrap();
        assert_eq!(store.get(&key("shard"), None).await.unwrap(), bytes);
        assert_eq!(store.get(&key("manifest"), None).await.unwrap(), "m");
    }
}

#[tokio::test(start_paused = true)]
async fn retries_are_bounded() {
    let plan = FaultPlan {
        fail_per_mille: 1000,
        ..FaultPlan::default()
    };
    let started = Instant::now();
    let error = patient(plan, 1, 6).length(&key("shard")).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    assert!(
        started.elapsed() < Duration::from_secs(30),
        "{:?}",
        started.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_call_that_hangs_ends_at_its_limit() {
    // One byte per second: far slower than what counts as alive.
    let slow = Throttled::new(Arc::new(FakeStore::new()), 1);
    let policy = RetryPolicy {
        attempts_max: 2,
        ..RetryPolicy::default()
    };
    let store = Retrying::new(Arc::new(slow), policy, randomness());
    let error = store
        .put_new(&key("a"), pattern(5000, 1))
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Timeout { .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_full_store_is_an_error_at_once_and_keeps_what_is_older() {
    let plan = FaultPlan {
        full_after_bytes: Some(10_000),
        ..FaultPlan::default()
    };
    let store = patient(plan, 1, 6);
    store
        .put_new(&key("older"), pattern(9_000, 1))
        .await
        .unwrap();
    let started = Instant::now();
    let error = store
        .put_new(&key("newer"), pattern(2_000, 2))
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error}");
    assert_eq!(started.elapsed(), Duration::ZERO);
    assert_eq!(
        store.get(&key("older"), None).await.unwrap(),
        pattern(9_000, 1)
    );
}

#[tokio::test]
async fn a_faulty_store_truncates_and_flips_as_its_seed_says() {
    let memory = Arc::new(FakeStore::new());
    let bytes = pattern(1000, 1);
    memory.put_new(&key("a"), bytes.clone()).await.unwrap();
    let flips = FaultPlan {
        flip_per_mille: 1000,
        ..FaultPlan::default()
    };
    let read = async |seed| {
        let store = Faulty::new(Arc::<FakeStore>::clone(&memory), flips, seed);
        store.get(&key("a"), None).await.unwrap()
    };
    let (one, again, other) = (read(1).await, read(1).await, read(2).await);
    assert_eq!(one, again);
    assert_ne!(one, other);
    let changed = one
        .iter()
        .zip(&bytes)
        .map(|(a, b)| (a ^ b).count_ones())
        .sum::<u32>();
    assert_eq!(changed, 1);
    let truncates = FaultPlan {
        truncate_per_mille: 1000,
        ..FaultPlan::default()
    };
    let error = Faulty::new(memory, truncates, 1)
        .get(&key("a"), None)
        .await
        .unwrap_err();
    assert!(
        matches!(error, StoreError::Truncated { expected: 1000, .. }),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_throttle_holds_its_rate() {
    let store = Arc::new(Throttled::new(Arc::new(FakeStore::new()), 1_000_000));
    let started = Instant::now();
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..10u64 {
        let store = Arc::clone(&store);
        writers.spawn(async move {
            store
                .put_new(&key(&format!("w/{writer}")), pattern(500_000, writer))
                .await
        });
    }
    while let Some(joined) = writers.join_next().await {
        joined.unwrap().unwrap();
    }
    let seconds = started.elapsed().as_secs_f64();
    assert!((4.9..5.2).contains(&seconds), "{seconds}");
}
