//! Tables that many messages carry at once: on the wire an array like any other.

use std::fmt::{self, Debug, Formatter};
use std::ops::Deref;
use std::sync::Arc;

use minicbor::decode::{Decoder, Error as DecodeError};
use minicbor::encode::{Encoder, Error as EncodeError, Write};
use minicbor::{Decode, Encode};

/// Entries of which every copy is the same memory. A shard's table has 32 bytes for each of its chunks, and a thousand readers may be told it at once.
#[derive(Clone, PartialEq, Eq)]
pub struct SharedTable<T>(Arc<[T]>);

impl<T> Deref for SharedTable<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Debug> Debug for SharedTable<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T> From<Arc<[T]>> for SharedTable<T> {
    fn from(entries: Arc<[T]>) -> Self {
        Self(entries)
    }
}

impl<T> From<Vec<T>> for SharedTable<T> {
    fn from(entries: Vec<T>) -> Self {
        Self(entries.into())
    }
}

impl<C, T: Encode<C>> Encode<C> for SharedTable<T> {
    fn encode<W: Write>(
        &self,
        encoder: &mut Encoder<W>,
        context: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        encoder.array(self.0.len() as u64)?;
        self.0
            .iter()
            .try_for_each(|entry| entry.encode(encoder, context))
    }
}

impl<'b, C, T: Decode<'b, C>> Decode<'b, C> for SharedTable<T> {
    fn decode(decoder: &mut Decoder<'b>, context: &mut C) -> Result<Self, DecodeError> {
        Vec::decode(decoder, context).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_an_array_on_the_wire_and_its_copies_are_one_memory() {
        let entries: Arc<[u32]> = vec![1, 2, 300].into();
        let table = SharedTable::from(entries.clone());
        assert_eq!(table.clone().as_ptr(), entries.as_ptr());
        let sent = minicbor::to_vec(&table).unwrap();
        assert_eq!(sent, minicbor::to_vec(entries.to_vec()).unwrap());
        assert_eq!(minicbor::decode::<SharedTable<u32>>(&sent).unwrap(), table);
    }
}
