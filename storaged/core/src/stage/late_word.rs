//! Requests about a job that this node does not know, or has forgotten. Whoever asks was let in by any token: peers say first by which one the
//! job is opened, and so does the durable tier if it was silent at the hello. Otherwise a retired token would read, or remove, what peers hold,
//! or what is durable as soon as the tier is back, and the newest one would be a stranger's for as long as it stays connected.

use std::collections::BTreeSet;

use storaged_wire::local::Request;
use storaged_wire::peer::PeerMessage;
use storaged_wire::verdict::VERDICT_MIN_MS;
use storaged_wire::{NodeName, Refusal, RefusalCode};

use super::rotate::is_of_job;
use crate::api::{ConnId, Output, QueryId, RequestId};
use crate::catalog::Attached;
use crate::context::Context;
use crate::limits;
use crate::place::wrong_token;
use crate::successions::{HeldRequest, LateWord, SuccessionWait, WordOfChanges};
use crate::trickle::durable_unavailable;

/// For how long whoever asks waits, where that is said.
fn limit_of(request: &mut Request) -> Option<u32> {
    // Whoever asks for a verdict waits for so long, whatever it says.
    let least = match request {
        Request::Verdict { .. } => VERDICT_MIN_MS,
        _ => 0,
    };
    request.timeout_mut().map(|said| least.max(*said))
}

impl Context {
    /// Whether others have yet to say whether the token was changed by which somebody is connected.
    pub(crate) fn lacks_word_for(&self, conn: ConnId, request: &Request) -> bool {
        let is_about_job = is_of_job(request) || matches!(request, Request::List { .. });
        let attached = self.conns.get(&conn).filter(|_| is_about_job);
        let Some(attached) = attached.filter(|it| !self.has_heard_of(&it.namespace)) else {
            return false;
        };
        // A run is promised by rules of its own once peers have told.
        let asks_peers = !matches!(request, Request::OpenRun { .. });
        let has_peers =
            self.believed_peers().next().is_some() && !planted!("forgotten_jobs_are_read_unasked");
        asks_peers && has_peers || self.lacks_word_of_tier(attached)
    }

    fn lacks_word_of_tier(&self, attached: &Attached) -> bool {
        let tier = attached.early.as_ref().map(|early| early.tier);
        tier == Some(WordOfChanges::Missing) && !planted!("silent_tiers_are_asked_once")
    }

    pub(crate) fn hold(&mut self, id: RequestId, mut request: Request) {
        let Some(attached) = self.conns.get(&id.conn) else {
            return;
        };
        let namespace = attached.namespace.clone();
        let asks_tier = self.lacks_word_of_tier(attached);
        let word = if asks_tier {
            LateWord::Awaited
        } else {
            LateWord::Unneeded
        };
        let peers: BTreeSet<NodeName> = self.believed_peers().cloned().collect();
        let held = HeldRequest {
            id,
            deadline: limit_of(&mut request).map_or_else(
                || self.now.plus(limits::SUCCESSION_WAIT_MS),
                |ms| self.answer_by(ms),
            ),
            request,
            namespace: namespace.clone(),
            since: self.now,
            word,
            waiting_for: peers.clone(),
        };
        let query = QueryId(self.fresh());
        let errand = SuccessionWait::Request(Box::new(held));
        self.successions.errands.insert(query, errand);
        for peer in &peers {
            let (query, namespace) = (query.0, namespace.clone());
            self.send(peer, PeerMessage::RunQuery { query, namespace });
        }
        if asks_tier {
            self.out.push(Output::FindSuccessions {
                query,
                namespace,
                trust: None,
            });
        }
    }

    /// Requests that go on now. Of a job that peers know they have told, and it waits for no tier that hangs.
    pub(crate) fn take_held(&mut self) -> Vec<HeldRequest> {
        let now = self.now;
        let known = self.awaited_and_known();
        self.successions.take_held(|held| {
            held.is_over(now) || known.contains(&held.namespace) && held.have_peers_told(now)
        })
    }

    /// Whether a request that was held may go on. Of a job that peers have told of meanwhile they have told by which token it is opened.
    pub(crate) fn hears_late(&mut self, held: &HeldRequest) -> Result<(), Refusal> {
        let attached = self.attached(held.id)?.clone();
        let namespace = &attached.namespace;
        if *namespace != held.namespace {
            return Err(wrong_token(&held.namespace));
        }
        self.check_not_retired(namespace, attached.said)?;
        // Otherwise a retired token would do as it likes by saying that it has no time.
        let is_hurried = !held.have_peers_told(self.now) && !self.has_heard_of(namespace);
        if is_hurried && !planted!("who_is_in_a_hurry_is_let_in") {
            let text = format!(
                "expected all nodes that are up to say in time by which token {namespace} is opened: try again with more time"
            );
            return Err(Refusal::new(RefusalCode::TimedOut, text));
        }
        let Some(early) = attached.early else {
            return Ok(());
        };
        let LateWord::Found(records) = &held.word else {
            let is_unneeded = matches!(held.word, LateWord::Unneeded);
            if is_unneeded || held.needs_no_tier() || self.has_heard_of(namespace) {
                return Ok(());
            }
            if let LateWord::Failed(fault) = &held.word {
                return Err(durable_unavailable(namespace, fault));
            }
            return Err(Refusal::new(
                RefusalCode::DurableUnavailable,
                format!(
                    "expected the durable tier, or a node that knows {namespace}, to say in time by which token it is opened, got no answer: try again"
                ),
            ));
        };
        let identity =
            self.identify(held.id.conn, namespace, &early.token, &early.role, records)?;
        self.keys_said(held.id.conn, namespace, &identity);
        if let Some(attached) = self.conns.get_mut(&held.id.conn) {
            (attached.owner, attached.said) = (identity.owner, identity.said);
            if let Some(early) = &mut attached.early {
                early.tier = WordOfChanges::Heard;
            }
        }
        Ok(())
    }
}
