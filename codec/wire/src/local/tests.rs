//! Requests as they are read out of a frame.

use super::*;
use crate::encode;

#[test]
fn a_commit_keeps_the_bytes_of_its_frame() {
    let request = Request::Commit {
        step: Step::new(3),
        schema: vec![7; 1 << 20].into(),
        torch_metadata: vec![8; 100].into(),
        durable: DurableWish::Never,
    };
    let body = encode(&request);
    let place = body.as_ptr_range();
    let read = Request::read(body).expect("it is one");
    assert_eq!(read, request);
    let Request::Commit { schema, .. } = read else {
        panic!("{read:?}");
    };
    assert!(place.contains(&schema.as_ptr()));
}

#[test]
fn other_requests_and_what_is_none_are_read_as_ever() {
    assert_eq!(Request::read(encode(&Request::Status)), Ok(Request::Status));
    let commit = Request::Commit {
        step: Step::new(3),
        schema: vec![7; 10].into(),
        torch_metadata: vec![].into(),
        durable: DurableWish::Never,
    };
    let whole = encode(&commit);
    let trailing = Request::read([&whole[..], &[0]].concat());
    assert!(matches!(trailing, Err(WireError::Trailing { .. })));
    for length in 0..whole.len() {
        assert!(Request::read(whole[..length].to_vec()).is_err());
    }
}
