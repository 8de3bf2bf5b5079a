//! Increments that save nothing. Where nearly every stripe moves anyhow, as in dense training with AdamW, the basis only
//! costs: each source reads and digests the old chunk beside the new one, and each keeper reads its old parity. Then the
//! lane is encoded in full.

use storaged_wire::SessionId;
use storaged_wire::peer::SessionKind;

use super::session::{LedSession, SessionGoal};
use crate::context::Context;
use crate::encode::Sessions;
use crate::limits;

impl LedSession {
    /// Whether this is an increment on a basis of which hardly a stripe is left as it was.
    pub(super) fn is_in_full_but_for_the_name(&self) -> bool {
        let on_a_basis = matches!(
            &self.record.kind,
            SessionKind::Encode { basis: Some(_), .. }
        );
        let moved = self.needs.changed().map_or(0, |changed| changed.count());
        let clean = self.stripe_count.saturating_sub(moved);
        on_a_basis
            && self.purpose == SessionGoal::Encode
            && clean <= self.stripe_count / limits::CLEAN_SHARE_WORTH_A_BASIS
    }
}

impl Sessions {
    /// Calls a session off before it has begun, and leads its lane in full.
    pub(super) fn lead_without_delta(&mut self, session: SessionId, cx: &mut Context) {
        let Some(led) = self.led.get(&session) else {
            return;
        };
        let place = led.place();
        self.interrupt_led(session, cx);
        if let Some(progress) = self.lanes.get_mut(&place) {
            progress.in_full = true;
        }
        self.lead_lanes(cx);
    }
}
