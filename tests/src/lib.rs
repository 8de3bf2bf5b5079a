//! What the whole-system tests share: a cluster of real processes, and clients that save and restore.

pub mod clients;
pub mod etcd;
pub mod hostile;
pub mod kubernetes;
pub mod registries;
pub mod sim;
pub mod system;
