//! Lists with an entry per block of a stripe: longer ones are refused before memory is taken for them, so that a frame of
//! two-byte names cannot become thirty times its size.

use minicbor::decode::{self, Decode, Decoder};
use minicbor::encode::{self, Encode, Encoder, Write};

/// The most blocks of a stripe.
const BLOCKS_MAX: usize = 255;

#[allow(clippy::ptr_arg, reason = "the derived code passes the field")]
pub(crate) fn encode<C, T: Encode<C>, W: Write>(
    list: &Vec<T>,
    e: &mut Encoder<W>,
    c: &mut C,
) -> Result<(), encode::Error<W::Error>> {
    list.encode(e, c)
}

pub(crate) fn decode<'b, C, T: Decode<'b, C>>(
    d: &mut Decoder<'b>,
    c: &mut C,
) -> Result<Vec<T>, decode::Error> {
    let mut list = Vec::new();
    for entry in d.array_iter_with(c)? {
        if list.len() == BLOCKS_MAX {
            return Err(decode::Error::message(
                "expected at most 255 entries, one per block of a stripe, got more",
            ));
        }
        list.push(entry?);
    }
    Ok(list)
}
