//! Who was let in while nobody could say by which token the job is opened: the durable tier was silent, and no node that is up knows the job.
//! The tier is asked again before the next request. Otherwise a retired token would read, or remove, what is durable as soon as the tier is
//! back, and the newest one would be a stranger's for as long as it stays connected.

use storaged_wire::local::Request;
use storaged_wire::{Refusal, RefusalCode};

use super::rotate::is_of_job;
use crate::api::{ConnId, RequestId};
use crate::context::Context;
use crate::successions::{HeldRequest, LateWord, SuccessionWait, WordOfChanges};

/// Whether it neither reads nor changes what is durable. A run of a job that nobody knows has rules of its own for a tier that is away, and a
/// job that may be opened without it has its boards.
fn needs_no_tier(request: &Request) -> bool {
    matches!(request, Request::OpenRun { .. } | Request::Board { .. })
}

impl Context {
    /// Whether the tier has yet to say whether the token was changed by which somebody is connected.
    pub(crate) fn lacks_word_for(&self, conn: ConnId, request: &Request) -> bool {
        let is_about_job = is_of_job(request) || matches!(request, Request::List { .. });
        let Some(attached) = self.conns.get(&conn).filter(|_| is_about_job) else {
            return false;
        };
        let tier = attached.early.as_ref().map(|early| early.tier);
        let is_missing = tier == Some(WordOfChanges::Missing);
        let is_known = self.has_heard_of(&attached.namespace);
        is_missing && !is_known && !planted!("silent_tiers_are_asked_once")
    }

    pub(crate) fn hold(&mut self, id: RequestId, request: Request) {
        let Some(attached) = self.conns.get(&id.conn) else {
            return;
        };
        let namespace = attached.namespace.clone();
        let held = HeldRequest {
            id,
            request,
            since: self.now,
            word: LateWord::Awaited,
        };
        let errand = SuccessionWait::Request(Box::new(held));
        self.find_successions(namespace, errand, None);
    }

    /// Whether a request that was held may go on. Of a job that peers have told of meanwhile they have told by which token it is opened.
    pub(crate) fn hears_late(&mut self, held: &HeldRequest) -> Result<(), Refusal> {
        let attached = self.attached(held.id)?.clone();
        let Some(early) = attached.early else {
            return Ok(());
        };
        let namespace = &attached.namespace;
        let LateWord::Found(records) = &held.word else {
            if needs_no_tier(&held.request) || self.has_heard_of(namespace) {
                return Ok(());
            }
            return Err(Refusal::new(
                RefusalCode::DurableUnavailable,
                format!(
                    "expected the durable tier, or a node that knows {namespace}, to say by which token it is opened, got neither: try again"
                ),
            ));
        };
        let identity =
            self.identify(held.id.conn, namespace, &early.token, &early.role, records)?;
        self.keys_said(held.id.conn, namespace, identity.owner, identity.keys);
        if let Some(attached) = self.conns.get_mut(&held.id.conn) {
            (attached.owner, attached.said) = (identity.owner, identity.said);
            if let Some(early) = &mut attached.early {
                early.tier = WordOfChanges::Heard;
            }
        }
        Ok(())
    }
}
