//! Names of nodes and of the job, as all worlds have them.

use storaged_plan::Member;
use storaged_wire::{Namespace, NodeName, Owner};

/// The token that namespaces belong to.
pub const TOKEN: &[u8] = b"a token of tests";
/// Somebody else's.
pub const OTHER: &[u8] = b"the token of somebody else";

pub fn name(node: usize) -> NodeName {
    NodeName::new(format!("n{node}")).unwrap()
}

pub fn index(name: &NodeName) -> usize {
    known_index(name).expect("the name of a node")
}

/// The number of a node; none of a name that is made up.
pub fn known_index(name: &NodeName) -> Option<usize> {
    name.as_str().strip_prefix('n')?.parse().ok()
}

/// The nodes of a cluster, each a failure domain of its own.
pub fn members(nodes: usize) -> Vec<Member> {
    let member = |node| Member {
        name: name(node),
        failure_domain: format!("n{node}"),
        cordon: Default::default(),
        seat: None,
    };
    (0..nodes).map(member).collect()
}

pub fn namespace() -> Namespace {
    Namespace::new("job").unwrap()
}

pub fn owner() -> Owner {
    Owner::of_token(TOKEN)
}
