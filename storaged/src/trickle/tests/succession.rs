//! Changes of a job's token in the tier: who may make them, and what is in the tier when they come.

use storaged_core::{ClaimFault, SuccessionFault};
use storaged_wire::succession::{SEAL_BYTES, TokenStanding};
use storaged_wire::{ConsentKey, Rotation, encode};

use super::*;

const NEW: &[u8] = b"the token that comes next";
const OTHER: &[u8] = b"the token of somebody else";

fn job() -> Namespace {
    Namespace::new("job").unwrap()
}

/// A change from the job's token, made when this was known to be durable.
fn rotation(old: &[u8], new: &[u8]) -> Rotation {
    let standing = TokenStanding {
        namespace: job(),
        succession: None,
        durable: None,
    };
    Rotation::new(&standing, old, new, [5; SEAL_BYTES]).unwrap()
}

fn consent(token: &[u8]) -> ConsentKey {
    ConsentKey::of_token(&job(), token)
}

fn believing(keys: JobKeys) -> Trust {
    Trust::Job {
        owner: Owner::of_token(TOKEN),
        keys,
        known: None,
    }
}

#[tokio::test(start_paused = true)]
async fn what_became_durable_meanwhile_is_signed_again_and_the_old_token_gets_nothing() {
    let mut world = World::new(0, Packing::None);
    let (saved, _) = world.save(10, noise(1, 1000), None).await;
    let rotation = rotation(TOKEN, NEW);
    let key = job_keys().newest;
    world.trickle.succeed(&rotation, &key).await.unwrap();
    let trust = believing(rotation.keys.clone());
    let listing = world.trickle.list(&job(), None, &trust).await.unwrap();
    assert_eq!(listing.manifests.len(), 1, "{:?}", listing.set_aside);
    let owner = Owner::of_token(TOKEN);
    let (name, by) = (job(), consent(TOKEN));
    let claimed = world.trickle.claim_run(&name, owner, Some(&by), 0, 1);
    assert_eq!(claimed.await, Err(ClaimFault::WrongOwner));
    let (name, by) = (job(), consent(NEW));
    let claimed = world.trickle.claim_run(&name, owner, Some(&by), 0, 1);
    assert!(claimed.await.is_ok());
    // A node that has not heard of it says no step durable that the new token could not read.
    let refused = world.publish(&saved, &by_job()).await.unwrap_err();
    assert!(
        matches!(refused, DurableFault::TokenChanged(_)),
        "{refused}"
    );
}

#[tokio::test(start_paused = true)]
async fn objects_of_others_hide_no_change_however_many_they_are() {
    let mut world = World::new(0, Packing::None);
    world.save(10, noise(1, 1000), None).await;
    let rotation = rotation(TOKEN, NEW);
    let key = job_keys().newest;
    world.trickle.succeed(&rotation, &key).await.unwrap();
    // The record itself under other numbers is none either.
    let copy = encode(&rotation.succession);
    let junk = (40..140).map(|number| (number, b"no record".to_vec()));
    for (number, bytes) in junk.chain([(2, copy)]) {
        let at = format!("job/.storaged/successions/{number:020}");
        let at = at.parse().unwrap();
        let put = world.store.put_new(&at, bytes.into());
        put.await.unwrap();
    }
    let found = world.trickle.find_successions(&job(), None).await.unwrap();
    assert_eq!(found.records, [rotation.succession]);
}

#[tokio::test(start_paused = true)]
async fn the_first_change_of_a_number_stays_and_forged_ones_are_passed_over() {
    let mut world = World::new(0, Packing::None);
    world.save(10, noise(1, 1000), None).await;
    let key = job_keys().newest;
    let mut forged = rotation(OTHER, NEW).succession;
    forged.owner = Owner::of_token(TOKEN);
    for (name, bytes) in [("9", encode(&forged)), ("8", b"no record".to_vec())] {
        let at = format!("job/.storaged/successions/0000000000000000000{name}");
        world
            .store
            .put_new(&at.parse().unwrap(), bytes.into())
            .await
            .unwrap();
    }
    assert_eq!(
        world
            .trickle
            .list(&job(), None, &of_job())
            .await
            .unwrap()
            .manifests
            .len(),
        1
    );
    let first = rotation(TOKEN, NEW);
    let there = world.trickle.succeed(&first, &key).await.unwrap();
    assert_eq!(there, first.succession);
    let again = world.trickle.succeed(&first, &key).await.unwrap();
    assert_eq!(again, first.succession);
    let another = world.trickle.succeed(&rotation(TOKEN, OTHER), &key).await;
    assert_eq!(
        another,
        Err(SuccessionFault::Another(Box::new(first.succession)))
    );
    let stranger = world.trickle.succeed(&rotation(OTHER, NEW), &key).await;
    assert_eq!(stranger, Err(SuccessionFault::WrongOwner));
}
