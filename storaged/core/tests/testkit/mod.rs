//! The world around the decisions, once for all tests of the core and for its benches: a cluster of processes, a network, an
//! executor of outputs, a durable tier and clients.
//!
//! A `World` has nodes, and events in order of time. Whatever a node wants is done in one place (`executor`): a slot is
//! made, a shard digested, a session run (`sessions` its life, `stripes` its sums), a message carried (`network`), the tier
//! asked (`tier`), a request answered (`clients`). Outputs of nodes that are driven alone, without a world, are looked at
//! in `alone`.
//!
//! What differs between suites is a `Scene`: how true to life its payload is (real bytes, or digests that were made up),
//! what takes how long, what breaks, and who acts in it. A scene has state and events of its own; its actors are methods of
//! `World<ThatScene>`.
//!
//! | suite | scene | payload | sessions | links | tier |
//! | --- | --- | --- | --- | --- | --- |
//! | `simulation` | `sim/`, job or month | bytes | at their end, some break | delay, loss, cuts, pauses | weather |
//! | `testsuite`, but for what follows | `testsuite/cluster/` | digests | stripe by stripe | to the millisecond | as a test says |
//! | `testsuite`, `runs` | `testsuite/runs/` | digests | at once | delay, cuts, silence | as a test says |
//! | `testsuite`, `handle` | `testsuite/handle/` | digests | at once | in order | well |
//! | fuzzing (`tests/fuzz/`) | `src/node/` | digests | as an input says | cut and joined by moves | as moves say |
#![allow(dead_code, reason = "each suite uses a part of it")]
#![allow(unused_imports, reason = "each suite uses a part of it")]

mod alone;
mod clients;
mod executor;
mod names;
mod network;
mod process;
mod queue;
mod requests;
mod run_registry;
mod scene;
mod sessions;
mod setup;
mod stripes;
mod tier;
mod trace;
mod world;

pub use alone::{Alone, Wanted};
pub use names::{OTHER, TOKEN, index, known_index, members, name, namespace, owner};
pub use process::{Payload, Pid, Process, Unheld, digests, made_up_digests};
pub use requests::{
    TORCH_METADATA, acquire_slot, commit_step, drop_order, given_at, hello, hello_by, open_early,
    open_shard, open_without_own, plan_newest, schema_of, verdict_on,
};
pub use run_registry::{Answer, RunRegistry};
pub use scene::Scene;
pub use sessions::{
    Block, End, Failed, Key, Pacing, Participant, Participants, encodes, missed, repairs, silent,
    stripes,
};
pub use setup::{CHUNK_BYTES, geometry, setup};
pub use tier::{Course, LISTED, Task, Tier};
pub use world::{Event, World};
