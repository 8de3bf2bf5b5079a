//! The bytes of what members measure, and the bounds of lists.

use super::*;
use crate::{decode, encode};

fn tally(links: usize) -> MemberTally {
    let link = LinkTally {
        node: NodeName::new("a").expect("a name"),
        bytes: 300,
        waiting_ms: 5,
    };
    MemberTally {
        elapsed_ms: 1000,
        stripes: 3,
        links: vec![link; links],
    }
}

#[test]
fn the_bytes_of_what_a_member_measured_are_pinned() {
    for (number, message) in [
        (
            12,
            PeerMessage::Finished {
                session: SessionId::new(7),
                tally: tally(1),
            },
        ),
        (
            24,
            PeerMessage::Progress {
                session: SessionId::new(7),
                tally: tally(1),
            },
        ),
    ] {
        let bytes = encode(&message);
        assert_eq!(decode::<PeerMessage>("message", &bytes).unwrap(), message);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let number = if number < 24 {
            format!("{number:02x}")
        } else {
            format!("18{number:02x}")
        };
        let expected = format!("82{number} 8207 83 1903e8 03 81 83 6161 19012c 05");
        assert_eq!(hex, expected.replace(' ', ""), "{message:?}");
    }
}

#[test]
fn more_links_than_a_stripe_has_blocks_are_refused() {
    let with = |links| PeerMessage::Progress {
        session: SessionId::new(7),
        tally: tally(links),
    };
    assert!(decode::<PeerMessage>("message", &encode(&with(255))).is_ok());
    let error = decode::<PeerMessage>("message", &encode(&with(256))).unwrap_err();
    assert!(format!("{error:?}").contains("at most 255"), "{error:?}");
}
