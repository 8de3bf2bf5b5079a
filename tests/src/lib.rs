//! What the whole-system tests share: a cluster of real processes, and clients that save and restore.

pub mod beyond;
pub mod clients;
pub mod etcd;
pub mod holder;
pub mod hostile;
pub mod kubernetes;
pub mod peer;
pub mod registries;
pub mod rolling;
pub mod sim;
pub mod system;
