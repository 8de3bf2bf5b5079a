//! What peers say to plans, openings and verifications.

use std::sync::Arc;

use storaged_wire::peer::PeerMessage;
use storaged_wire::{ManifestBytes, NodeName};

use super::Restores;
use super::plan::PeerHoldings;
use crate::api::QueryId;
use crate::context::Context;

impl Restores {
    /// Hears a message about restores; any other comes back.
    pub(crate) fn hear(
        &mut self,
        from: &NodeName,
        message: PeerMessage,
        cx: &mut Context,
    ) -> Option<PeerMessage> {
        match message {
            PeerMessage::HoldingsQuery { query, namespace } => {
                cx.holdings_asked(from, query, &namespace);
            }
            PeerMessage::Holdings {
                query,
                owner,
                holdings,
                mark,
                copied,
            } => {
                let told = PeerHoldings {
                    owner,
                    holdings: &holdings,
                    mark,
                    copied,
                };
                self.plan_learns(from, QueryId(query), told, cx);
            }
            PeerMessage::Marks(marks) => cx.learn_marks(from, marks),
            PeerMessage::FailedRestarts(all) => cx.learn_failed(from, all),
            PeerMessage::ManifestQuery { query, manifest } => {
                self.manifest_asked(from, query, manifest, cx);
            }
            PeerMessage::ManifestAnswer { query, manifest } => {
                let manifest = manifest.and_then(|bytes| ManifestBytes::parse(bytes).ok());
                let manifest = manifest.map(Arc::new);
                self.manifest_answered(from, query.map(QueryId), manifest, cx);
            }
            PeerMessage::VerifyQuery { query, manifest } => {
                self.verify_asked(from, query, manifest, cx);
            }
            PeerMessage::VerifyAnswer { query, parts } => {
                self.verify_answered(from, QueryId(query), parts, cx);
            }
            other => return Some(other),
        }
        None
    }
}
