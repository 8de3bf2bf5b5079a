//! That a job's checkpoints leave the RAM of all nodes, and how a node knows that somebody who has the job's token says so. The owner,
//! which is named too, stands in every manifest: by it alone any node of the cluster could have each other one let a running job go.

use std::fmt;

use minicbor::bytes::ByteArray;
use minicbor::{Decode, Encode};

use crate::framing::encode;
use crate::ids::{Generation, Namespace, NodeName, Owner};
use crate::provenance::token_key;
use crate::run::RunId;

/// The key of orders that a job's token gives. A node keeps it with what it knows of the job and tells it to nobody.
#[derive(Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(transparent)]
pub struct OrderKey(#[n(0)] ByteArray<32>);

impl OrderKey {
    /// That of whoever holds `token`. That of an empty token everybody can make.
    pub fn of_token(namespace: &Namespace, token: &[u8]) -> Self {
        let context = "storaged 2026-11 job token orders";
        Self(ByteArray::from(token_key(context, namespace, token)))
    }

    /// Proves an order of this moment.
    pub fn prove(&self, order: &DropOrder, issue: OrderIssue) -> OrderProof {
        let mac = ByteArray::from(*self.mac(order, &issue).as_bytes());
        OrderProof { issue, mac }
    }

    /// Whether an order comes from who holds the token, as it was given.
    pub fn has_proven(&self, order: &DropOrder) -> bool {
        let proof = order.proof.as_ref();
        // Compared in constant time.
        proof.is_some_and(|it| self.mac(order, &it.issue) == blake3::Hash::from_bytes(*it.mac))
    }

    fn mac(&self, order: &DropOrder, issue: &OrderIssue) -> blake3::Hash {
        let DropOrder {
            query,
            namespace,
            owner,
            force,
            proof: _,
        } = order;
        let bytes = encode(&("storaged drop order", query, namespace, owner, force, issue));
        blake3::keyed_hash(&self.0, &bytes)
    }
}

impl fmt::Debug for OrderKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OrderKey(..)")
    }
}

/// When an order was given: no two orders are alike, and what was heard of one is of no use once the job has begun anew.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct OrderIssue {
    /// Where it was given.
    #[n(0)]
    pub by: NodeName,
    /// Which start of that node's daemon.
    #[n(1)]
    pub generation: Generation,
    /// The newest run of the job that was known there.
    #[n(2)]
    pub run: RunId,
}

/// That an order comes from who holds the job's token.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct OrderProof {
    /// When it was given.
    #[n(0)]
    pub issue: OrderIssue,
    /// Of the order and its issue, under the [`OrderKey`] of the job.
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

    fn issue(generation: u64) -> OrderIssue {
        OrderIssue {
            by: NodeName::new("a").expect("a name"),
            generation: Generation::new(generation),
            run: RunId::new(3),
        }
    }

    /// Every part of it counts, and nobody proves it by another token or for another job.
    #[test]
    fn an_order_is_proven_as_it_was_given_and_by_its_token_alone() {
        let plain = order("job");
        let key = OrderKey::of_token(&plain.namespace, b"token");
        assert!(!key.has_proven(&plain), "without a proof");
        let proof = Some(key.prove(&plain, issue(1)));
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
        let mut later = given.clone();
        later.proof.as_mut().expect("a proof").issue = issue(2);
        assert!(!key.has_proven(&later));
        for (job, token) in [("job", "other token"), ("other", "token")] {
            let name = Namespace::new(job).expect("a name");
            assert!(!OrderKey::of_token(&name, token.as_bytes()).has_proven(&given));
        }
    }
}
