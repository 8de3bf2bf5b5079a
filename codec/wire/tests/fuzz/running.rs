//! Messages of a session that runs.

use storaged_wire::SessionId;
use storaged_wire::peer::{MemberTally, PeerMessage};

use super::samples::link_tally;

pub fn messages_while_it_runs() -> Vec<PeerMessage> {
    let session = SessionId::new(7);
    vec![
        PeerMessage::Finished {
            session,
            tally: MemberTally::default(),
        },
        PeerMessage::Progress {
            session,
            tally: MemberTally {
                elapsed_ms: 1000,
                stripes: 3,
                links: vec![link_tally("a"), link_tally("b")],
            },
        },
        PeerMessage::Close {
            session,
            kept: true,
        },
    ]
}
