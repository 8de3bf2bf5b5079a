//! Plans run on real bytes, against the engine's own answer.

mod encoding;
mod execute;
mod levels;
mod regrouping;
mod repairing;
mod stripes;
mod trace;
