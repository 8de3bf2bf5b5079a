//! Strangers who ask for a run of a job at a node that was cut off when it was opened: they claim no name there, whoever gives the numbers.

use storaged_core::RunsWithoutTier;
use storaged_wire::local::Reply;

use super::world::{Mood, World, namespace};
use crate::testkit::{Answer, OTHER, TOKEN};

const AWAY: usize = 2;

fn asks(world: &mut World, token: &[u8]) -> Reply {
    world.asks_for_run_within(8_000, AWAY, &namespace(), token)
}

/// A job that was opened while one node was cut off.
fn opened_elsewhere(mut world: World) -> World {
    world.run_for(40_000);
    world.cut(&[AWAY], &[0, 1]);
    world.opened(0);
    world
}

fn stranger_is_refused(world: &mut World) {
    let reply = asks(world, OTHER);
    assert!(matches!(reply, Reply::Refused(_)), "{reply:?}");
}

fn owner_opens_a_run(world: &mut World) {
    world.mend();
    world.run_for(10_000);
    let reply = asks(world, TOKEN);
    assert!(matches!(reply, Reply::RunOpened { .. }), "{reply:?}");
}

#[test]
fn they_claim_no_name_while_the_registry_is_away() {
    for answer in [Answer::Away, Answer::Fails(20)] {
        let mut world = opened_elsewhere(World::with_registry(3, Mood::Absent, 1));
        world.registry_answers_so(answer, &[AWAY]);
        stranger_is_refused(&mut world);
        world.registry_answers_so(Answer::After(5), &[AWAY]);
        owner_opens_a_run(&mut world);
    }
}

#[test]
fn they_claim_no_name_while_the_tier_is_away() {
    for without in [RunsWithoutTier::Allowed, RunsWithoutTier::Refused] {
        for mood in [Mood::Fails, Mood::Hangs] {
            let world = World::with(3, Mood::Answers(20), 1, without);
            let mut world = opened_elsewhere(world);
            world.scene.tier = mood;
            stranger_is_refused(&mut world);
            world.scene.tier = Mood::Answers(20);
            owner_opens_a_run(&mut world);
        }
    }
}
