//! What holds of an increment's index that can be read.

use storaged_codec::digest;
use storaged_wire::IncrementIndex;

/// Reads bytes; an index that comes out holds together, its places lie one behind the other, and it is written as the same.
pub fn holds_together(bytes: &[u8]) {
    let object = [bytes, digest(bytes).as_bytes()].concat();
    let Ok(index) = IncrementIndex::from_object(&object) else {
        return;
    };
    assert_eq!(index.ends.len(), index.digests.len());
    assert!(index.ends.windows(2).all(|pair| pair[0] < pair[1]));
    assert!((1..=IncrementIndex::DEPTH_MAX).contains(&index.depth));
    let count = index.ends.len() as u64;
    let whole = index.place(&(0..count)).map(|place| place.end);
    assert_eq!(whole, index.ends.last().copied());
    assert_eq!(index.place(&(count..count + 1)), None);
    let again = IncrementIndex::from_object(&index.to_object());
    assert_eq!(again.expect("what was just written"), index);
}
