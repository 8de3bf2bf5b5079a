//! Frames as they come from a socket or a link, to a node that does its work: what a connection sends is read as the daemon reads it,
//! and what can be read is asked or said.

use storaged_core::{ConnId, Input, Viewer};
use storaged_wire::framing::{
    FIRST_REQUEST_BYTES_MAX, FRAME_PREFIX_BYTES, LOCAL_FRAME_BYTES_MAX, body_length, frame,
};
use storaged_wire::local::{DurableWish, Request, Role};
use storaged_wire::peer::PeerMessage;
use storaged_wire::{Rank, RunId, Step, WorldSize, decode, encode};

use super::moves::{Kind, move_bytes};
use super::scene::Cluster;
use super::shape::Shape;
use crate::records::next_frame;
use crate::testkit::{acquire_slot, commit_step, hello, name, namespace, plan_newest};
use crate::twist::Twist;
use crate::{Inputs, samples};

/// Frames of one input that are read.
const FRAMES_MAX: usize = 64;

/// One node by itself, with a durable tier.
const ALONE: [u8; 8] = [4, 5, 1, 0, 0, 0, 0, 0];
/// Three nodes, (2,1), with a durable tier and small messages.
const THREE: [u8; 8] = [0, 0, 1, 0, 0x80, 0, 1, 0];

/// Whether a connection has said hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Greeted {
    NotYet,
    Yes,
}

/// The next request as the socket's reader takes it: within its length, which the first bytes say.
fn next_request(bytes: &[u8], greeted: Greeted) -> Option<(&[u8], &[u8])> {
    let (prefix, rest) = bytes.split_first_chunk::<FRAME_PREFIX_BYTES>()?;
    let length = body_length(*prefix, LOCAL_FRAME_BYTES_MAX).ok()?;
    let is_early = greeted == Greeted::NotYet && length > FIRST_REQUEST_BYTES_MAX;
    let most = Request::bytes_max(rest.get(..length.min(16))?);
    let fits = length <= most && !is_early;
    fits.then(|| rest.split_at_checked(length)).flatten()
}

/// The target of local sockets: what one connection after the other sends to a daemon.
pub fn local(bytes: &[u8]) {
    let mut cluster = Cluster::begin(Shape::of(ALONE));
    let (mut conn, mut greeted) = (connect(&mut cluster), Greeted::NotYet);
    let mut rest = bytes;
    for _ in 0..FRAMES_MAX {
        let Some((body, after)) = next_request(rest, greeted) else {
            break;
        };
        rest = after;
        match decode::<Request>("request", body) {
            Ok(request) => {
                reads_again(&request);
                if matches!(request, Request::Hello { .. }) {
                    greeted = Greeted::Yes;
                }
                cluster.request(conn, request);
                cluster.run_for(20);
            }
            // As after a request that is none: the client comes again.
            Err(_) => {
                cluster.hang_up(conn);
                (conn, greeted) = (connect(&mut cluster), Greeted::NotYet);
            }
        }
    }
    cluster.comes_to_rest();
}

fn connect(cluster: &mut Cluster) -> ConnId {
    cluster.open(0, Viewer::Tenant(None))
}

/// A request is written as it was read, and what is written is within the length that its first bytes allow.
fn reads_again(request: &Request) {
    let written = encode(request);
    let again = decode::<Request>("request", &written);
    assert_eq!(again.as_ref(), Ok(request));
    let most = Request::bytes_max(&written[..written.len().min(16)]);
    assert!(written.len() <= most, "{} of {most} bytes", written.len());
}

/// The target of control streams: a peer says something to a node of three at work, and whatever follows goes on.
pub fn control(bytes: &[u8]) {
    let mut cluster = Cluster::begin(Shape::of(THREE));
    cluster.save(0, Twist::of([0, 0, 1, 0]));
    cluster.run_for(2_000);
    let mut rest = bytes;
    for _ in 0..FRAMES_MAX {
        let Some((body, after)) = next_frame(rest) else {
            break;
        };
        rest = after;
        // As the driver does with what cannot be read: it is counted against the peer, and the link goes on.
        if let Ok(message) = decode::<PeerMessage>("message", body) {
            cluster.scene.oracle.sends(&message);
            let from = name(1);
            cluster.tell(0, Input::Message { from, message });
            cluster.run_for(5);
        }
    }
    cluster.save(0, Twist::of([0, 0, 0, 0]));
    cluster.run_for(5_000);
    cluster.comes_to_rest();
}

/// What clients send: a job's whole life, and every request by itself.
pub fn local_seeds() -> Inputs {
    let timeout_ms = 5_000;
    let trainer = Role::Trainer {
        run: RunId::new(1),
        rank: Rank::new(0),
        world_size: WorldSize::new(1).expect("one rank"),
    };
    let slot = storaged_wire::SlotId::new(1);
    let step = Step::new(1);
    let life = [
        hello(namespace(), Role::Reader),
        Request::OpenRun { timeout_ms },
        hello(namespace(), trainer),
        acquire_slot(10_000, 1_000),
        Request::SealSlot {
            slot,
            step,
            length: 10_000,
        },
        commit_step(step, DurableWish::Required),
        plan_newest(1_000),
        Request::Status,
    ];
    let life: Vec<u8> = life.iter().flat_map(frame).collect();
    let mut seeds = vec![("life".to_owned(), life)];
    for (at, request) in samples::requests().iter().enumerate() {
        let greeted = frame(&hello(namespace(), Role::Reader));
        let bytes = [greeted, frame(request)].concat();
        seeds.push((format!("request-{at}"), bytes));
    }
    seeds
}

/// Every message there is, and those that honest nodes have sent one another.
pub fn control_seeds() -> Inputs {
    let mut messages = samples::checkpoint_messages();
    messages.extend(samples::session_messages());
    let mut cluster = Cluster::begin(Shape::of(THREE));
    cluster.save(0, Twist::of([0, 0, 1, 0]));
    cluster.run_for(2_000);
    let sent = cluster.scene.past.messages.iter();
    messages.extend(sent.map(|(_, _, message)| message.clone()));
    let some = messages.chunks(4).enumerate().map(|(at, some)| {
        let bytes = some.iter().flat_map(frame).collect();
        (format!("messages-{at}"), bytes)
    });
    some.collect()
}

/// What a node has kept once a job has saved.
pub fn kept_by_a_node() -> Vec<storaged_wire::KeptRecord> {
    let mut cluster = Cluster::begin(Shape::of(THREE));
    let moves = [
        move_bytes(Kind::Save, 0, [0, 0, 1, 0]),
        move_bytes(Kind::Pass, 5, [0; 4]),
    ];
    cluster.play_all(&moves.concat());
    cluster.ram(0).kept.values().cloned().collect()
}
