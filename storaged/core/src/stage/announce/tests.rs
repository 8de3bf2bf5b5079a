//! What is announced is noted, and a checkpoint is given up only when nothing new is heard of it.

use storaged_codec::digest;
use storaged_plan::homes;
use storaged_wire::local::DurableWish;
use storaged_wire::peer::Fence;
use storaged_wire::{Enclosure, Generation, Rank, RunId, Step};

use super::*;
use crate::api::{Input, Output};
use crate::node::Node;
use crate::testkit::{hear, job, last_of, name, owner, prepared, sent};

/// The last of four nodes and a step whose home nodes, which are two, suit the test.
fn node_and_step(suit: impl Fn(&[NodeName]) -> bool) -> (Node, CheckpointKey) {
    let mut node = last_of(&["a", "b", "c", "d"], 2, 1);
    let fence = Fence {
        namespace: job(),
        owner: owner(),
        run: RunId::new(1),
        promised: RunId::new(1),
    };
    hear(&mut node, 1, "a", PeerMessage::Fences(vec![fence]));
    let members = node.context().setup.members.clone();
    let key = |step| CheckpointKey {
        namespace: job(),
        run: RunId::new(1),
        step: Step::new(step),
    };
    let suits = |key: &CheckpointKey| suit(&homes(&members, key, 2));
    let key = (1..).map(key).find(suits).expect("some step");
    (node, key)
}

/// Whether the last node is among these.
fn is_home(homes: &[NodeName]) -> bool {
    homes.contains(&name("d"))
}

fn announced(key: &CheckpointKey, ranks: &[u32], digesting: u32) -> PeerMessage {
    let shard = |rank: &u32| SealedShard {
        rank: Rank::new(*rank),
        length: 5,
        root: digest(&rank.to_le_bytes()),
    };
    PeerMessage::ShardsSealed {
        key: key.clone(),
        owner: owner(),
        world_size: WorldSize::new(3).expect("ranks"),
        shards: ranks.iter().map(shard).collect(),
        digesting,
    }
}

/// The name of an announcement.
fn name_of_all(key: &CheckpointKey, ranks: &[u32]) -> Option<Digest> {
    match announced(key, ranks, 0) {
        PeerMessage::ShardsSealed { shards, .. } => Some(name_of(&shards)),
        _ => None,
    }
}

/// What a home node answers to an announcement.
fn noted(outputs: Vec<Output>) -> Option<(Option<Digest>, u32)> {
    sent(outputs).into_iter().find_map(|message| match message {
        PeerMessage::SealedNoted {
            shards, quiet_ms, ..
        } => Some((shards, quiet_ms)),
        _ => None,
    })
}

/// Time passes, a second at a time; why the checkpoint was given up meanwhile, if it was.
fn passes(node: &mut Node, seconds: std::ops::Range<u64>) -> Option<String> {
    seconds.map(|at| at * 1_000).find_map(|at| {
        let outputs = node.handle(Now(at), Input::Tick);
        sent(outputs).into_iter().find_map(|message| match message {
            PeerMessage::Abandoned { reason, .. } => Some(reason),
            _ => None,
        })
    })
}

#[test]
fn a_home_node_notes_what_each_node_has_announced() {
    let (mut node, key) = node_and_step(is_home);
    let both = name_of_all(&key, &[0, 1]);
    let first = hear(&mut node, 10, "a", announced(&key, &[0, 1], 0));
    assert_eq!(noted(first), Some((both, 0)));
    // Said again it is no news.
    let again = hear(&mut node, 500, "a", announced(&key, &[0, 1], 0));
    assert_eq!(noted(again), Some((both, 490)));
    let waits = hear(&mut node, 900, "a", announced(&key, &[], 0));
    assert_eq!(noted(waits), Some((both, 890)));
}

/// Ranks that a home node has heard of.
fn collected(node: &Node, key: &CheckpointKey) -> Vec<u32> {
    let ranks = node.context().checkpoints[key].announced.keys();
    ranks.map(|rank| rank.get()).collect()
}

/// The link to a daemon of "a" comes up.
fn up(generation: u64) -> Input {
    Input::PeerUp {
        node: name("a"),
        generation: Generation::new(generation),
    }
}

#[test]
fn what_a_node_announced_before_it_was_restarted_does_not_count() {
    let (mut node, key) = node_and_step(is_home);
    hear(&mut node, 10, "a", announced(&key, &[0, 1], 0));
    hear(&mut node, 20, "b", announced(&key, &[2], 0));
    node.handle(Now(500), up(2));
    assert_eq!(collected(&node, &key), [2]);
    // As many as before, and not the same.
    hear(&mut node, 600, "a", announced(&key, &[0], 1));
    assert_eq!(collected(&node, &key), [0, 2]);
    let other = hear(&mut node, 700, "a", announced(&key, &[1], 0));
    assert_eq!(noted(other), Some((name_of_all(&key, &[1]), 0)));
    assert_eq!(
        collected(&node, &key),
        [1, 2],
        "all that it has is what it says"
    );
}

/// As it mostly is: its link ends with the daemon, and another daemon comes up later.
#[test]
fn what_a_node_announced_before_it_was_down_counts_only_if_it_is_the_same_daemon() {
    for (generation, counts) in [(1, vec![0, 1, 2]), (2, vec![2])] {
        let (mut node, key) = node_and_step(is_home);
        hear(&mut node, 10, "a", announced(&key, &[0, 1], 0));
        hear(&mut node, 20, "b", announced(&key, &[2], 0));
        node.handle(Now(500), Input::PeerDown { node: name("a") });
        node.handle(Now(700), up(generation));
        assert_eq!(collected(&node, &key), counts, "{generation}");
    }
}

/// A home node that seals manifests beside its decisions, and has heard of a step all but its rank 2, which "b" has.
fn node_that_lacks_one_shard() -> (Node, CheckpointKey) {
    let (mut node, key) = node_and_step(is_home);
    node.context_mut().setup.messages.inline = 0;
    hear(&mut node, 10, "a", announced(&key, &[0, 1], 0));
    let nothing = Enclosure::of(b"");
    let described = Description::new(nothing, nothing, DurableWish::Never, 1);
    let known = node.context_mut().checkpoints.get_mut(&key);
    known.expect("it is known").description = Some(described);
    (node, key)
}

/// Some node says something; the manifest that is to be sealed because of that.
fn to_seal(node: &mut Node, at: u64, from: &str, message: PeerMessage) -> Option<Output> {
    let from = name(from);
    work_in(node.handle(Now(at), Input::Message { from, message }))
}

fn work_in(outputs: Vec<Output>) -> Option<Output> {
    let is_work = |output: &Output| matches!(output, Output::Prepare(_));
    outputs.into_iter().find(is_work)
}

/// Meanwhile a daemon that announced a part of it ends.
#[test]
fn what_a_node_announced_before_it_was_restarted_does_not_count_while_a_manifest_is_sealed() {
    let commits = |restarts: bool, announces_again: Option<&[u32]>| -> Option<usize> {
        let (mut node, key) = node_that_lacks_one_shard();
        let work = to_seal(&mut node, 20, "b", announced(&key, &[2], 0));
        let work = work.expect("it is sealed");
        if restarts {
            node.handle(Now(500), Input::PeerDown { node: name("a") });
            node.handle(Now(700), up(2));
        }
        if let Some(ranks) = announces_again {
            let more = to_seal(&mut node, 800, "a", announced(&key, ranks, 0));
            assert!(more.is_none(), "it is being sealed already");
        }
        prepared(&mut node, Now(900), vec![work]);
        let manifest = node.context().checkpoints[&key].manifest.as_ref();
        manifest.map(|manifest| manifest.manifest().shards.len())
    };
    assert_eq!(commits(false, None), Some(3));
    assert_eq!(commits(true, None), None, "two of its shards are nowhere");
    assert_eq!(commits(true, Some(&[1])), None, "one is nowhere");
    assert_eq!(commits(true, Some(&[0, 1])), Some(3), "its RAM outlived it");
}

/// Whoever errs or lies announces another shard each time that a manifest is made.
#[test]
fn a_manifest_is_not_made_anew_without_end() {
    let (mut node, key) = node_that_lacks_one_shard();
    let of_length = |length: u64| {
        let mut message = announced(&key, &[2], 0);
        if let PeerMessage::ShardsSealed { shards, .. } = &mut message {
            shards[0].length = length;
        }
        message
    };
    let mut work = to_seal(&mut node, 20, "b", of_length(20));
    for at in 21..40 {
        let Some(Output::Prepare(making)) = work else {
            assert!(!node.context().checkpoints.contains_key(&key), "given up");
            return;
        };
        to_seal(&mut node, at, "b", of_length(at));
        work = work_in(node.handle(Now(at), Input::Prepared(making.run())));
    }
    panic!("it is made anew without end");
}

#[test]
fn a_node_that_was_stopped_or_cut_off_listens_before_it_gives_a_step_up() {
    let (mut node, key) = node_and_step(is_home);
    hear(&mut node, 10, "a", announced(&key, &[0, 1], 0));
    assert_eq!(passes(&mut node, 1..100), None);
    // It is stopped for a minute.
    assert_eq!(passes(&mut node, 160..169), None);
    let homes = homes(&node.context().setup.members, &key, 2);
    let other = homes.into_iter().find(|home| home.as_str() != "d");
    let other = other.expect("there are two");
    let generation = Generation::new(1);
    node.handle(
        Now(169_100),
        Input::PeerDown {
            node: other.clone(),
        },
    );
    let node_up = Input::PeerUp {
        node: other,
        generation,
    };
    node.handle(Now(169_200), node_up);
    assert_eq!(passes(&mut node, 170..179), None);
    assert!(passes(&mut node, 180..183).is_some());
}

#[test]
fn a_home_node_that_knows_nothing_of_it_does_not_note_that_somebody_waits() {
    let (mut node, key) = node_and_step(is_home);
    let waits = hear(&mut node, 10, "a", announced(&key, &[], 0));
    assert_eq!(noted(waits), None);
}

#[test]
fn a_step_is_given_up_after_two_minutes_without_news_and_not_while_a_shard_is_digested() {
    let (mut node, key) = node_and_step(is_home);
    hear(&mut node, 10, "a", announced(&key, &[0, 1], 0));
    // The third rank's node is digesting for five minutes.
    for minute in 0..5u64 {
        let from = 60 * minute + 1;
        assert_eq!(passes(&mut node, from..from + 60), None);
        let at = (from + 60) * 1_000;
        hear(&mut node, at, "b", announced(&key, &[], 1));
    }
    // Then it is silent.
    assert_eq!(passes(&mut node, 302..430), None);
    let reason = passes(&mut node, 430..434).expect("it is given up");
    assert!(
        reason.contains("120 s") && reason.contains("missing"),
        "{reason}"
    );
}

#[test]
fn a_shard_that_comes_after_two_minutes_without_news_commits_nothing() {
    let (mut node, key) = node_and_step(is_home);
    hear(&mut node, 10, "a", announced(&key, &[0, 1], 0));
    let late = hear(&mut node, 120_010, "b", announced(&key, &[2], 0));
    assert_eq!(noted(late), None, "another home node may be giving it up");
    assert!(passes(&mut node, 121..132).is_some());
}

#[test]
fn a_home_node_does_not_give_up_what_another_one_hears_of() {
    let (mut node, key) = node_and_step(is_home);
    hear(&mut node, 10, "a", announced(&key, &[0], 0));
    let other = homes(&node.context().setup.members, &key, 2);
    let other = other.into_iter().find(|home| home.as_str() != "d");
    let other = other.expect("there are two");
    // It tells the other one in turn, once it has waited for long.
    let outputs = (1..35).flat_map(|at| node.handle(Now(at * 1_000), Input::Tick));
    let told = outputs.filter(|output| match output {
        Output::Send { to, message } => {
            *to == other && matches!(message, PeerMessage::SealedNoted { .. })
        }
        _ => false,
    });
    assert_eq!(told.count(), 1);
    let news = PeerMessage::SealedNoted {
        key: key.clone(),
        shards: None,
        description: None,
        quiet_ms: 2_000,
    };
    assert_eq!(passes(&mut node, 35..110), None);
    hear(&mut node, 110_000, other.as_str(), news.clone());
    assert_eq!(passes(&mut node, 111..238), None);
    assert!(passes(&mut node, 238..240).is_some());
    // Whoever is no home of it has no say.
    let (mut node, key) = node_and_step(is_home);
    hear(&mut node, 10, "a", announced(&key, &[0], 0));
    let homes = homes(&node.context().setup.members, &key, 2);
    let stranger = ["a", "b", "c"]
        .into_iter()
        .find(|it| !homes.contains(&name(it)));
    hear(
        &mut node,
        110_000,
        stranger.expect("not all are homes"),
        news,
    );
    assert!(passes(&mut node, 111..132).is_some());
}

#[test]
fn what_is_noted_is_not_said_again_until_the_home_node_is_restarted() {
    let (mut node, key) = node_and_step(|homes| !is_home(homes));
    let shard = LocalShard {
        slot: storaged_wire::SlotId::new(1),
        length: 5,
        chunk: crate::testkit::chunk(),
        digests: Some(([digest(b"x")].into(), digest(b"root"))),
        prints: [].into(),
        readers: Default::default(),
        upload: crate::catalog::Upload::Idle,
        sealed_at: Now(10),
    };
    node.handle(Now(10), Input::Tick);
    let world_size = WorldSize::new(3).expect("ranks");
    let checkpoint = node
        .context_mut()
        .checkpoint_entry(&key, owner(), world_size);
    checkpoint.shards.insert(Rank::new(0), shard);
    let home = checkpoint.homes[0].clone();
    let said = |node: &mut Node, at: u64| -> Vec<usize> {
        let outputs = node.handle(Now(at), Input::Tick);
        let to_home = outputs.into_iter().filter_map(|output| match output {
            Output::Send { to, message } if to == home => Some(message),
            _ => None,
        });
        let announced = to_home.filter_map(|message| match message {
            PeerMessage::ShardsSealed { shards, .. } => Some(shards.len()),
            _ => None,
        });
        announced.collect()
    };
    assert_eq!(said(&mut node, 1_100), [1]);
    assert_eq!(said(&mut node, 2_200), [1], "nobody has noted it");
    let shards = node.context().checkpoints[&key].sealed_shards();
    let note = PeerMessage::SealedNoted {
        key: key.clone(),
        shards: Some(name_of(&shards)),
        description: None,
        quiet_ms: 0,
    };
    hear(&mut node, 2_300, home.as_str(), note.clone());
    let quiet: Vec<Vec<usize>> = (3..7).map(|at| said(&mut node, at * 1_100)).collect();
    assert_eq!(quiet.concat(), Vec::<usize>::new());
    // From time to time it says that it waits, and is answered.
    assert_eq!(said(&mut node, 7_700), [0]);
    hear(&mut node, 7_800, home.as_str(), note);
    node.handle(Now(7_900), Input::PeerDown { node: home.clone() });
    let generation = Generation::new(2);
    let node_up = Input::PeerUp {
        node: home.clone(),
        generation,
    };
    node.handle(Now(8_000), node_up);
    assert_eq!(said(&mut node, 8_900), [1], "it knows nothing any more");
}
