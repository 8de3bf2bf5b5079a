//! Tests of the executor: whole sessions of many members in one process, over in-memory streams and RAM.

mod beside;
mod bounds;
mod broken;
mod coding;
mod hostile;
mod links;
mod lying;
mod meters;
mod rate;
mod striped;
mod world;
