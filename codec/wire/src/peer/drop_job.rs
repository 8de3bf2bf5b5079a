//! That a job's checkpoints leave the RAM of all nodes, and how a node knows that somebody who has the job's token says so. The owner,
//! which is named too, stands in every manifest: by it alone any node of the cluster could have each other one let a running job go.

use std::fmt;

use minicbor::bytes::ByteArray;
use minicbor::{Decode, Encode};

use crate::framing::encode;
use crate::ids::{Namespace, NodeName, Owner};
use crate::provenance::token_key;

/// The key of orders to a job, made of its first token: whoever changes the token has both, so that nodes which heard either of them have
/// one key. A node keeps it with what it knows of the job and tells it to nobody.
#[derive(Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(transparent)]
pub struct OrderKey(#[n(0)] ByteArray<32>);

impl OrderKey {
    /// That of a job's first token. That of an empty token everybody can make.
    pub fn of_token(namespace: &Namespace, token: &[u8]) -> Self {
        let context = "storaged 2026-11 job token orders";
        Self(ByteArray::from(token_key(context, namespace, token)))
    }

    /// Proves an order that this node gives.
    pub fn prove(&self, order: &DropOrder, by: NodeName) -> OrderProof {
        let mac = ByteArray::from(*self.mac(order, &by).as_bytes());
        OrderProof { by, mac }
    }

    /// Whether an order comes from who holds the token, as it was given.
    pub fn has_proven(&self, order: &DropOrder) -> bool {
        let proof = order.proof.as_ref();
        // Compared in constant time.
        proof.is_some_and(|it| self.mac(order, &it.by) == blake3::Hash::from_bytes(*it.mac))
    }

    fn mac(&self, order: &DropOrder, by: &NodeName) -> blake3::Hash {
        let DropOrder {
            query,
            namespace,
            owner,
            force,
            proof: _,
        } = order;
        let bytes = encode(&("storaged drop order", query, namespace, owner, force, by));
        blake3::keyed_hash(&self.0, &bytes)
    }
}

impl fmt::Debug for OrderKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OrderKey(..)")
    }
}

/// That an order comes from who holds the job's token.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct OrderProof {
    /// The node where it was given. It counts from that one alone: all others hear it too, and could say it again.
    #[n(0)]
    pub by: NodeName,
    /// Of the order and this node, under the [`OrderKey`] of the job.
    #[n(1)]
    pub mac: ByteArray<32>,
}

/// Drops a job's checkpoints from the RAM of whoever gets it.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct DropOrder {
    /// To be named in the answer.
    #[n(0)]
    pub query: u64,
    /// The job.
    #[n(1)]
    pub namespace: Namespace,
    /// In whose name.
    #[n(2)]
    pub owner: Owner,
    /// Also if it has trainers.
    #[n(3)]
    pub force: bool,
    /// None from an older node, and where nobody has said the job's token.
    #[n(4)]
    pub proof: Option<OrderProof>,
}

/// What a node did with a [`DropOrder`].
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum DropAnswer {
    /// It held so much, and does not any more.
    #[n(0)]
    Freed {
        #[n(0)]
        bytes: u64,
        #[n(1)]
        checkpoints: u32,
    },
    /// Nothing, for this reason.
    #[n(1)]
    Refused(#[n(0)] String),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(namespace: &str) -> DropOrder {
        DropOrder {
            query: 7,
            namespace: Namespace::new(namespace).expect("a name"),
            owner: Owner::of_token(b"token"),
            force: true,
            proof: None,
        }
    }

    fn by(name: &str) -> NodeName {
        NodeName::new(name).expect("a name")
    }

    /// Every part of it counts, and nobody proves it by another token or for another job.
    #[test]
    fn an_order_is_proven_as_it_was_given_and_by_its_token_alone() {
        let plain = order("job");
        let key = OrderKey::of_token(&plain.namespace, b"token");
        assert!(!key.has_proven(&plain), "without a proof");
        let proof = Some(key.prove(&plain, by("a")));
        let given = DropOrder { proof, ..plain };
        assert!(key.has_proven(&given));
        let changed = [
            DropOrder {
                query: 8,
                ..given.clone()
            },
            DropOrder {
                force: false,
                ..given.clone()
            },
            DropOrder {
                owner: Owner::of_token(b"other"),
                ..given.clone()
            },
            DropOrder {
                namespace: order("other").namespace,
                ..given.clone()
            },
        ];
        assert!(!changed.iter().any(|it| key.has_proven(it)));
        let mut passed_on = given.clone();
        passed_on.proof.as_mut().expect("a proof").by = by("b");
        assert!(!key.has_proven(&passed_on));
        for (job, token) in [("job", "other token"), ("other", "token")] {
            let name = Namespace::new(job).expect("a name");
            assert!(!OrderKey::of_token(&name, token.as_bytes()).has_proven(&given));
        }
    }
}
