//! For how long whoever asks waits.

use std::time::Duration;

use super::Request;
use crate::failed::FailureReport;

impl Request {
    /// For how many milliseconds whoever asks waits for the answer, where that is said.
    pub const fn timeout_mut(&mut self) -> Option<&mut u32> {
        match self {
            Self::OpenRun { timeout_ms }
            | Self::AcquireSlot { timeout_ms, .. }
            | Self::Wait { timeout_ms, .. }
            | Self::Plan { timeout_ms, .. }
            | Self::OpenShard { timeout_ms, .. }
            | Self::FollowShard { timeout_ms, .. }
            | Self::Verify { timeout_ms, .. }
            | Self::Drop { timeout_ms, .. }
            | Self::Verdict { timeout_ms }
            | Self::PlanDrill { timeout_ms, .. }
            | Self::RestartFailed(FailureReport { timeout_ms, .. }) => Some(timeout_ms),
            _ => None,
        }
    }

    /// The same request, of a caller who has waited already and waits no longer than this.
    #[must_use]
    pub fn within(mut self, left: Duration) -> Self {
        let left = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
        if let Some(timeout_ms) = self.timeout_mut() {
            *timeout_ms = left.min(*timeout_ms);
        }
        self
    }
}
