//! What peers say of runs.

use storaged_wire::NodeName;
use storaged_wire::peer::PeerMessage;

use super::Runs;
use crate::api::QueryId;
use crate::context::Context;

impl Runs {
    /// Hears a message about runs; any other comes back.
    pub(crate) fn hear(
        &mut self,
        from: &NodeName,
        message: PeerMessage,
        cx: &mut Context,
    ) -> Option<PeerMessage> {
        match message {
            PeerMessage::Fences(fences) => self.learn_fences(from, fences, cx),
            PeerMessage::PromiseRun { query, run } => cx.promise_asked(from, query, run),
            PeerMessage::RunPromised {
                query,
                run,
                outcome,
            } => self.run_promised(from, QueryId(query), run, outcome, cx),
            PeerMessage::WithdrawRun(run) => cx.run_withdrawn(from, &run),
            PeerMessage::RaiseFence { query, run } => self.fence_rises(from, query, &run, cx),
            PeerMessage::FenceRaised { query } => self.fence_raised(from, QueryId(query), cx),
            PeerMessage::RunQuery { query, namespace } => cx.fence_asked(from, query, &namespace),
            PeerMessage::RunAnswer { query, fence } => {
                self.fence_told(from, QueryId(query), fence, cx);
            }
            other => return Some(other),
        }
        None
    }
}
