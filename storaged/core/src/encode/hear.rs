//! What peers say of sessions.

use storaged_wire::NodeName;
use storaged_wire::peer::PeerMessage;

use super::session::Closing;
use super::{Beginning, Sessions};
use crate::context::Context;
use crate::limits;

impl Sessions {
    /// Hears a message about sessions; any other comes back.
    pub(crate) fn hear(
        &mut self,
        from: &NodeName,
        message: PeerMessage,
        cx: &mut Context,
    ) -> Option<PeerMessage> {
        match message {
            PeerMessage::Propose(record) => self.proposed(from, record, cx),
            PeerMessage::Ready { session, stripes } => {
                self.member_ready(from, session, stripes, cx);
            }
            PeerMessage::RepairAwaited { leader, session } => {
                self.repair_awaited(from, &leader, session, cx);
            }
            PeerMessage::Preparing { session } => self.member_preparing(from, session, cx),
            PeerMessage::TableQuery(place) => self.table_asked(from, place, cx),
            PeerMessage::TablePage { place, page } => self.table_told(from, place, page, cx),
            PeerMessage::Failed { session, fault } => self.member_failed(from, session, fault, cx),
            PeerMessage::Begin {
                session,
                stripes,
                shape,
            } => self.begin(from, session, Beginning { stripes, shape }, cx),
            PeerMessage::Finished { session, tally } => {
                self.member_progress(from, session, tally, cx);
                self.member_finished(from, session, cx);
            }
            PeerMessage::Progress { session, tally } => {
                self.member_progress(from, session, tally, cx);
            }
            PeerMessage::Close { session, kept } => {
                let closing = if kept {
                    Closing::Done
                } else {
                    Closing::BrokenOff
                };
                self.close(from, session, closing, cx);
            }
            PeerMessage::Holdings {
                query: limits::REPAIR_QUERY,
                holdings,
                ..
            } => self.holdings_told(from, &holdings, cx),
            other => return Some(other),
        }
        None
    }
}
