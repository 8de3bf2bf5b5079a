//! Which machines a cluster is made of, where that changes while jobs run. What nodes must agree on is one small record, the
//! [`Roster`], of which each version, an *epoch*, is created in an object store, etcd or Kubernetes by whoever comes first: the store settles races
//! (`If-None-Match`, an exclusive link, a transaction, a POST), and no consensus of our own is needed.
//!
//! The roster has *places*. A place keeps its name, and the groups are made of places, so that nothing moves when another machine
//! takes one: to the decisions it is the same member, back without its memory. (Cassandra's `replace_address` and the numbers of
//! Ceph's OSDs do it likewise.)
//!
//! Order of reading: `roster` (the record and what may change in it), `cordon` (nodes that are given nothing new), `seats` (groups that follow from those before), `registry` (where it lies: `objects`, `etcd`, `kubernetes`; `https` asks the latter two, `packed` makes long records fit), `cluster_name` (whose it is), `run_records` (runs, which lie there too), `remembered` (the node's own copy), `enter` (how a node gets a place), `twin` (another machine with its name),
//! `follow` (how a running node keeps up, and gives up places of lost ones).

mod cluster_name;
mod cordon;
#[cfg(test)]
mod cordon_tests;
mod enter;
mod etcd;
mod follow;
#[cfg(test)]
mod follow_tests;
#[cfg(test)]
mod history_tests;
mod https;
mod kubernetes;
mod objects;
mod packed;
mod registry;
mod remembered;
mod roster;
mod run_records;
#[cfg(test)]
mod run_tests;
mod seats;
#[cfg(test)]
mod seats_tests;
#[cfg(test)]
mod tests;
mod twin;

pub use cluster_name::{ClusterName, ClusterNameError};
pub use cordon::Cordoning;
pub use enter::{Entered, Entering, Waits, enter};
pub use etcd::{EtcdConfig, EtcdError, EtcdRecords};
pub use follow::{Change, Following, Sight, follow};
pub use https::RegistryFileError;
pub use kubernetes::{
    ApiAccess, ApiServer, KubernetesConfig, KubernetesError, KubernetesRecords, NodeLabels, PodEnd,
};
pub use objects::ObjectRecords;
pub use registry::{NumberedRecord, NumberedRecords, Proposal, Registry, RegistryError};
pub use remembered::Remembered;
pub use roster::{Arrival, Arrived, ChangeError, Comeback, PLACES_MAX, Place, Roster, RosterError};
pub use twin::{Dialled, Presence, Twin};
