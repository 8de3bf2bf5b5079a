//! `Node::handle` with whatever may come. An input is a cluster (`shape`) and moves in it (`moves`): honest jobs (`jobs`), lies
//! (`lies`) and everything that happens to nodes, in the world that all tests of the core share (`scene`). What must hold is in
//! `oracle`; the world itself sees to it that the budget is kept, that manifests are whole, and that nothing is in use twice.

mod frames;
mod jobs;
mod lies;
mod moves;
mod oracle;
mod scene;
pub mod seeds;
mod shape;

pub use frames::{control, control_seeds, kept_by_a_node, local, local_seeds};
use scene::Cluster;
use shape::Shape;

/// What is to be answered within this time after the last move is waited for.
const REST_MS: u64 = 32_000;

/// The target.
pub fn node(bytes: &[u8]) {
    let (shape, moves) = Shape::read(bytes);
    Cluster::begin(shape).play_all(moves);
}
