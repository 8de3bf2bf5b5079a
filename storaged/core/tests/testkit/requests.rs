//! What clients ask, where nothing of it is out of the ordinary.

use storaged_wire::local::{DurableWish, LOCAL_VERSION, Request, Role, Rung};
use storaged_wire::peer::{DropOrder, OrderKey};
use storaged_wire::{Digest, Namespace, Rank, Step};

use super::names::{TOKEN, name, owner};

/// How every connection of a client begins.
pub fn hello(namespace: Namespace, role: Role) -> Request {
    hello_by(namespace, TOKEN, role)
}

/// The same by another token.
pub fn hello_by(namespace: Namespace, token: &[u8], role: Role) -> Request {
    Request::Hello {
        version: LOCAL_VERSION,
        namespace,
        token: token.to_vec().into(),
        role,
    }
}

/// The order to drop a job in its owner's name, as anybody can write it.
pub fn drop_order(namespace: Namespace, query: u64) -> DropOrder {
    DropOrder {
        query,
        namespace,
        owner: owner(),
        force: true,
        proof: None,
    }
}

/// The same as somebody gives it at a node who has this token.
pub fn given_at(node: usize, token: &[u8], order: DropOrder) -> DropOrder {
    let key = OrderKey::of_token(&order.namespace, token);
    let proof = Some(key.prove(&order, name(node)));
    DropOrder { proof, ..order }
}

pub const fn acquire_slot(bytes: u64, timeout_ms: u32) -> Request {
    Request::AcquireSlot { bytes, timeout_ms }
}

/// What a trainer says of any step for stock readers.
pub const TORCH_METADATA: &[u8] = &[9; 170];

/// What it says of a step's tensors: the same for some steps in a row.
pub fn schema_of(step: Step) -> Vec<u8> {
    vec![(step.get() / 4) as u8; 410]
}

pub fn commit_step(step: Step, durable: DurableWish) -> Request {
    Request::Commit {
        step,
        schema: schema_of(step).into(),
        torch_metadata: TORCH_METADATA.to_vec().into(),
        durable,
    }
}

/// What a restart would get, and nothing older.
pub const fn plan_newest(timeout_ms: u32) -> Request {
    Request::Plan {
        step: None,
        timeout_ms,
        allow_older: false,
    }
}

/// What a launcher should make of a restart.
pub const fn verdict_on(timeout_ms: u32) -> Request {
    Request::Verdict { timeout_ms }
}

/// All of a shard, from wherever it is best read.
pub fn open_shard(manifest: Digest, rank: Rank, timeout_ms: u32) -> Request {
    Request::OpenShard {
        manifest,
        rank,
        ranges: Vec::new(),
        timeout_ms,
        without: None,
        withheld: None,
        early: None,
    }
}

/// The same for a reader who takes it while it comes.
pub fn open_early(manifest: Digest, rank: Rank, timeout_ms: u32) -> Request {
    let mut open = open_shard(manifest, rank, timeout_ms);
    if let Request::OpenShard { early, .. } = &mut open {
        *early = Some(true);
    }
    open
}

/// The same for a reader who has found its own node's copy wrong.
pub fn open_without_own(manifest: Digest, rank: Rank, timeout_ms: u32) -> Request {
    let mut open = open_shard(manifest, rank, timeout_ms);
    if let Request::OpenShard { without, .. } = &mut open {
        *without = Some(Rung::OwnRam);
    }
    open
}
