//! What a leader says when a session begins: how the blocks come together, and which stripes move.

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};

/// How the blocks of an encode come together. Sources are numbered in coding order, without blocks of zeros.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum EncodeShape {
    /// One after the other; an empty order means every source in every place in turn.
    #[n(0)]
    Chain {
        #[cbor(n(0), with = "crate::blocks")]
        order: Vec<u32>,
    },
    /// Every source has at most `fan_in` others behind it; the order as of a chain.
    #[n(1)]
    Tree {
        #[n(0)]
        fan_in: u32,
        #[cbor(n(1), with = "crate::blocks")]
        order: Vec<u32>,
    },
    /// Every stripe is gathered by one of these sources, in turn, which sends each sum to its coding node.
    #[n(2)]
    GatherAtSources {
        #[cbor(n(0), with = "crate::blocks")]
        roots: Vec<u32>,
    },
    /// Every stripe is gathered by one of the coding nodes, in turn, which sends the other sums on.
    #[n(3)]
    GatherAtKeepers,
}

/// How the blocks of a repair come together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum RepairShape {
    /// One chain carries the sums of all wanted blocks; the survivors stand in the order in which they are named.
    #[n(0)]
    Chain,
    /// Every stripe is gathered by one survivor, in turn, which sends each wanted block to its node.
    #[n(1)]
    Gather,
    /// The one wanted block is computed by its own node from blocks as they are, each checked before it is used.
    #[n(2)]
    Direct,
}

/// One bit per stripe of a lane, the first one in the lowest bit of the first byte; bits beyond the last are zero.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct StripeMap {
    /// How many stripes it speaks of.
    #[n(0)]
    pub stripes: u64,
    /// The bits.
    #[n(1)]
    pub bits: ByteVec,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::PeerMessage;
    use crate::{SessionId, decode, encode};

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn begin(shape: Option<EncodeShape>) -> PeerMessage {
        let stripes = shape.as_ref().map(|_| StripeMap {
            stripes: 9,
            bits: vec![0x81, 1].into(),
        });
        PeerMessage::Begin {
            session: SessionId::new(7),
            stripes,
            shape,
        }
    }

    #[test]
    fn the_bytes_of_a_beginning_are_pinned() {
        for (shape, expected) in [
            (None, "820b81 07"),
            (
                Some(EncodeShape::Chain { order: vec![] }),
                "820b83 07 820942 8101 82008180",
            ),
            (
                Some(EncodeShape::Tree {
                    fan_in: 3,
                    order: vec![1, 0],
                }),
                "820b83 07 820942 8101 820182 03820100",
            ),
            (
                Some(EncodeShape::GatherAtSources { roots: vec![2, 3] }),
                "820b83 07 820942 8101 82028182 0203",
            ),
            (
                Some(EncodeShape::GatherAtKeepers),
                "820b83 07 820942 8101 820380",
            ),
        ] {
            let message = begin(shape);
            let bytes = encode(&message);
            assert_eq!(decode::<PeerMessage>("message", &bytes).unwrap(), message);
            assert_eq!(hex(&bytes), expected.replace(' ', ""), "{message:?}");
        }
        let shapes = [RepairShape::Chain, RepairShape::Gather, RepairShape::Direct];
        assert_eq!(hex(&encode(&shapes)), "83000102");
    }
}
