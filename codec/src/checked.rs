//! Bytes with a digest as a type: [`Unchecked`] gives nothing away but by [`Unchecked::verify`], and [`Checked`] comes
//! from nowhere else, so a function that takes `Checked` bytes cannot be handed wrong ones.

use thiserror::Error;

use crate::digest::{Digest, leaf_digest};

/// The bytes of a chunk as they came from memory, a peer or a disk: not to be looked at.
///
/// ```
/// use storaged_codec::{Unchecked, leaf_digest};
/// let leaf = leaf_digest(b"weights", 3);
/// let checked = Unchecked::new(b"weights".to_vec()).verify(&leaf, 3)?;
/// assert_eq!(checked.bytes(), b"weights");
/// // The same bytes in another place are the wrong bytes.
/// assert!(Unchecked::new(b"weights").verify(&leaf, 4).is_err());
/// # Ok::<(), storaged_codec::WrongBytes>(())
/// ```
///
/// There is no way around it:
///
/// ```compile_fail,E0599
/// storaged_codec::Unchecked::new(vec![1]).bytes();
/// ```
/// ```compile_fail,E0599
/// storaged_codec::Unchecked::new(vec![1]).as_ref();
/// ```
/// ```compile_fail,E0616
/// storaged_codec::Unchecked::new(vec![1]).bytes;
/// ```
/// ```compile_fail,E0614
/// *storaged_codec::Unchecked::new(vec![1]);
/// ```
/// ```compile_fail,E0423
/// storaged_codec::Checked(vec![1]);
/// ```
/// ```compile_fail,E0451
/// let leaf = storaged_codec::leaf_digest(&[], 0);
/// storaged_codec::Checked { bytes: vec![1], leaf, index: 0 };
/// ```
#[derive(Clone)]
pub struct Unchecked<T> {
    bytes: T,
}

/// The bytes of a chunk that has its digest.
#[derive(Clone, Debug)]
pub struct Checked<T> {
    bytes: T,
    leaf: Digest,
    index: u64,
}

/// Bytes that are not the chunk they should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("digest mismatch in chunk {index}: expected {}, got {got}", wanted(*expected))]
pub struct WrongBytes {
    /// The chunk's place.
    pub index: u64,
    /// Its digest; none where the table ends before it.
    pub expected: Option<Digest>,
    /// The digest of the bytes.
    pub got: Digest,
}

fn wanted(expected: Option<Digest>) -> String {
    expected.map_or_else(|| "no such chunk".into(), |leaf| leaf.to_string())
}

impl<T> std::fmt::Debug for Unchecked<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unchecked").finish_non_exhaustive()
    }
}

impl<T: AsRef<[u8]>> Unchecked<T> {
    /// Bytes from outside. They must be nobody else's to write to: shared memory has to be copied first.
    pub fn new(bytes: T) -> Self {
        Self { bytes }
    }

    /// How many bytes there are.
    pub fn length(&self) -> usize {
        self.bytes.as_ref().len()
    }

    /// The bytes, if they are chunk `index` with the digest `leaf`.
    ///
    /// # Errors
    /// [`WrongBytes`] if they are not. The bytes are gone then.
    pub fn verify(self, leaf: &Digest, index: u64) -> Result<Checked<T>, WrongBytes> {
        let got = leaf_digest(self.bytes.as_ref(), index);
        if got != *leaf {
            return Err(WrongBytes {
                index,
                expected: Some(*leaf),
                got,
            });
        }
        Ok(Checked {
            bytes: self.bytes,
            leaf: got,
            index,
        })
    }

    /// The same with the digest that a table has for the chunk.
    ///
    /// # Errors
    /// [`WrongBytes`] also if the table ends before it.
    pub fn verify_in(self, leaves: &[Digest], index: u64) -> Result<Checked<T>, WrongBytes> {
        let leaf = usize::try_from(index).ok().and_then(|at| leaves.get(at));
        match leaf {
            Some(leaf) => self.verify(leaf, index),
            None => Err(WrongBytes {
                index,
                expected: None,
                got: leaf_digest(self.bytes.as_ref(), index),
            }),
        }
    }
}

impl<T> Checked<T> {
    /// The digest that the bytes have.
    pub fn leaf(&self) -> Digest {
        self.leaf
    }

    /// Which chunk it is.
    pub fn index(&self) -> u64 {
        self.index
    }

    /// What holds the bytes.
    pub fn into_inner(self) -> T {
        self.bytes
    }
}

impl<T: AsRef<[u8]>> Checked<T> {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

impl<T: AsRef<[u8]>> AsRef<[u8]> for Checked<T> {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::digest;

    #[test]
    fn only_the_chunk_in_its_place_comes_out() {
        let leaf = leaf_digest(&[1, 2, 3], 5);
        let checked = Unchecked::new(vec![1, 2, 3]).verify(&leaf, 5);
        let checked = checked.expect("it is the chunk");
        assert_eq!(checked.leaf(), leaf);
        assert_eq!(checked.as_ref(), [1, 2, 3]);
        assert_eq!(checked.into_inner(), [1, 2, 3]);
        for (bytes, index) in [
            (&[1, 2][..], 5),
            (&[1, 2, 3, 0], 5),
            (&[1, 2, 4], 5),
            (&[1, 2, 3], 6),
        ] {
            let wrong = Unchecked::new(bytes).verify(&leaf, index);
            let wrong = wrong.expect_err("it is not the chunk");
            assert_eq!((wrong.index, wrong.expected), (index, Some(leaf)));
            assert_eq!(wrong.got, leaf_digest(bytes, index));
        }
        assert!(
            Unchecked::new([1, 2, 3])
                .verify(&digest(&[1, 2, 3]), 5)
                .is_err()
        );
    }

    #[test]
    fn a_table_has_the_digests_of_its_chunks_and_of_no_more() {
        let leaves = [leaf_digest(&[1], 0), leaf_digest(&[2], 1)];
        let checked = Unchecked::new([2]).verify_in(&leaves, 1);
        assert_eq!(checked.expect("it is the chunk").index(), 1);
        let wrong = Unchecked::new([2]).verify_in(&leaves, 0);
        assert_eq!(wrong.expect_err("another chunk").expected, Some(leaves[0]));
        let beyond = Unchecked::new([2]).verify_in(&leaves, 2);
        let beyond = beyond.expect_err("there is no such chunk");
        assert_eq!(beyond.expected, None);
        assert!(
            beyond
                .to_string()
                .contains("chunk 2: expected no such chunk")
        );
    }

    #[test]
    fn what_is_unchecked_does_not_print_its_bytes() {
        let unchecked = Unchecked::new(b"secret".to_vec());
        assert_eq!(unchecked.length(), 6);
        assert_eq!(format!("{unchecked:?}"), "Unchecked { .. }");
    }
}
