//! What one suite's world has beside what all have: who acts in it, and how its network, its executors and its durable tier
//! behave. All that a scene does not say goes well and at once.

use std::fmt::Debug;

use storaged_core::{Curation, DurableFault, Input, Note, RequestId, SessionTally, Setup};
use storaged_wire::local::Reply;
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{NodeName, Rank, SlotId};

use super::names::{known_index, name};
use super::process::{Payload, Pid};
use super::run_registry::Answer;
use super::sessions::{End, Failed, Key, Pacing, Participants};
use super::tier::{Course, Task};
use super::world::World;

#[allow(unused_variables, reason = "a scene says what it wants to say")]
pub trait Scene: Sized {
    /// What happens in this scene alone.
    type Event: Debug;

    const PAYLOAD: Payload;

    fn happens(world: &mut World<Self>, event: Self::Event);

    // Nodes.

    /// What of a node's configuration is otherwise than usual.
    fn sets_up(world: &mut World<Self>, node: usize, setup: &mut Setup);

    /// The generation of the n-th process that is started.
    fn generation(world: &mut World<Self>, count: u64) -> u64 {
        count
    }

    /// By which name the others know a node: that of its place in the cluster.
    fn name_of(world: &World<Self>, node: usize) -> NodeName {
        name(node)
    }

    /// Which node another one takes for the one of a name, if any: names may be made up, and places filled by others.
    fn named(world: &World<Self>, by: usize, name: &NodeName) -> Option<usize> {
        known_index(name).filter(|node| *node < world.processes.len())
    }

    /// A process has started.
    fn started(world: &mut World<Self>, node: usize) {
        world.dial_all(node);
    }

    /// A process will be told what an effect came to.
    fn will_hear(world: &mut World<Self>, pid: Pid, input: &Input) {}

    fn noted(world: &mut World<Self>, node: usize, note: Note) {
        world.notes.push((world.now, node, note));
    }

    fn replied(
        world: &mut World<Self>,
        pid: Pid,
        id: RequestId,
        reply: Reply,
        slot: Option<SlotId>,
    ) {
        world.replies.insert(id, reply);
    }

    /// Milliseconds that an effect on a node itself takes.
    fn effect_takes(world: &mut World<Self>) -> u64 {
        1
    }

    /// Milliseconds that reading a checkpoint takes; none if that never ends.
    fn check_takes(world: &mut World<Self>, usual_ms: u64) -> Option<u64> {
        Some(usual_ms)
    }

    // The network.

    /// When a connection is tried after one end has started.
    fn dials_after(world: &mut World<Self>, from: usize, to: usize) -> u64 {
        1
    }

    /// When `from` finds out that the process at the other end is gone.
    fn finds_out_after(world: &mut World<Self>, from: usize, gone: usize) -> u64 {
        0
    }

    fn dial(world: &mut World<Self>, from: usize, to: usize) {
        world.dial_once(from, to);
    }

    /// A node has given a connection up.
    fn parted(world: &mut World<Self>, from: usize, to: usize) {}

    /// Milliseconds that a message takes; none if it is lost.
    fn way(world: &mut World<Self>, from: usize, to: usize, message: &PeerMessage) -> Option<u64> {
        Some(1)
    }

    // Sessions.

    fn pacing(world: &World<Self>) -> Pacing;

    /// How long a session runs that makes all stripes at its end.
    fn session_lasts(world: &mut World<Self>, key: &Key) -> u64 {
        1
    }

    /// What keeps members that have all begun from each other.
    fn cannot_begin(world: &mut World<Self>, members: &Participants) -> Option<Failed> {
        None
    }

    /// How a session ends whose time is over.
    fn session_ends(world: &mut World<Self>, key: &Key, members: &Participants) -> End {
        End::Whole
    }

    /// Of the stripes of a session that is cut short, how many are done.
    fn stripes_done(world: &mut World<Self>, key: &Key, stripes: u64) -> u64 {
        0
    }

    /// When a member hears of an end that all hear of within `ms`.
    fn told_after(world: &mut World<Self>, ms: u64) -> u64 {
        ms
    }

    /// What a member has seen of a session that went well.
    fn tally(
        world: &World<Self>,
        key: &Key,
        members: &Participants,
        member: usize,
    ) -> SessionTally {
        SessionTally {
            bytes: members[&member].work.lane_length,
            elapsed_ms: 5,
            ..SessionTally::default()
        }
    }

    /// What a node sends in a session may be something else.
    fn sends(world: &mut World<Self>, node: usize, members: &Participants, sums: &mut [Vec<u8>]) {}

    // The registry.

    /// How it answers a node that asks for a run's number.
    fn registry_answers(world: &mut World<Self>, node: usize) -> Answer {
        Answer::After(1)
    }

    // The durable tier.

    /// An operator pins or removes what is there; nothing comes of it where a scene says nothing.
    fn curates(world: &mut World<Self>, pid: Pid, id: RequestId, curation: Curation) {}

    fn tier_course(world: &mut World<Self>, by: Pid, task: &Task) -> Course {
        Course::well(1)
    }

    /// What is wrong with the tier when a task ends of which that was open.
    fn tier_fault(world: &mut World<Self>, task: &Task) -> Option<DurableFault> {
        None
    }

    /// A manifest is published, and the tier lacks so many of its shards.
    fn publishes(world: &mut World<Self>, key: &CheckpointKey, absent: usize) {
        assert_eq!(absent, 0, "the manifest is written last: {key:?}");
    }

    /// A copy begins that looks for nothing in the tier, and one of the same shard had begun before.
    fn overlooks(world: &mut World<Self>, pid: Pid, key: &CheckpointKey, rank: Rank) {
        panic!("what lies in the tier is looked for: rank {rank} of {key:?} by {pid:?}");
    }

    /// What was published later is not listed.
    fn listed_until(world: &World<Self>) -> u64 {
        world.now
    }
}
