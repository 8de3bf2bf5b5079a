//! What peers say of checkpoints: how far they are, what of them is where, and what may go.

use storaged_wire::peer::PeerMessage;
use storaged_wire::{CheckpointState, NodeName};

use super::announce::Announcement;
use super::lifetime::Remains;
use crate::catalog::{Description, Noted, Told};
use crate::context::Context;
use crate::limits::REPAIR_QUERY;
use crate::place::Blocks;

impl Context {
    /// Hears a message about what all machines share; any other comes back.
    pub(crate) fn hear(&mut self, from: &NodeName, message: PeerMessage) -> Option<PeerMessage> {
        self.hear_of_commit(from, message)
            .and_then(|message| self.hear_of_state(from, message))
            .and_then(|message| self.hear_parcel(from, message))
            .and_then(|message| self.hear_of_drains(from, message))
            .and_then(|message| self.hear_of_keys(from, message))
    }

    fn hear_of_commit(&mut self, from: &NodeName, message: PeerMessage) -> Option<PeerMessage> {
        match message {
            PeerMessage::ShardsSealed {
                key,
                owner,
                world_size,
                shards,
                digesting,
            } => {
                let announcement = Announcement {
                    key,
                    owner,
                    world_size,
                    shards,
                    digesting,
                };
                self.shards_announced(from, announcement);
            }
            PeerMessage::SealedNoted {
                key,
                shards,
                description,
                quiet_ms,
            } => {
                let noted = Noted {
                    shards,
                    description,
                    at: self.now,
                };
                self.noted(from, &key, noted, u64::from(quiet_ms));
            }
            PeerMessage::Description {
                key,
                owner,
                world_size,
                schema,
                torch_metadata,
                durable,
                epoch,
            } => {
                let description = Description::new(schema, torch_metadata, durable, epoch);
                self.described(from, key, owner, world_size, description);
            }
            PeerMessage::Committed { manifest, durable } => {
                self.commit_told(from, manifest, durable);
            }
            PeerMessage::ManifestStored {
                manifest,
                state,
                bears,
            } => self.manifest_stored(from, manifest, Told { state, bears }),
            PeerMessage::Abandoned { key, reason } => self.abandoned_told(from, &key, &reason),
            PeerMessage::Superseded { key, reason } => self.superseded(from, &key, &reason),
            PeerMessage::NoRoom {
                manifest,
                node,
                reason,
            } => self.no_room_told(from, manifest, node, &reason),
            PeerMessage::Attached(namespaces) => self.attached_told(from, namespaces),
            PeerMessage::Evicted {
                namespace,
                up_to,
                durable,
            } => {
                let remains = if durable {
                    Remains::DurableCopy
                } else {
                    Remains::Nothing
                };
                self.evicted_elsewhere(&namespace, up_to, remains);
            }
            other => return Some(other),
        }
        None
    }

    fn hear_of_state(&mut self, from: &NodeName, message: PeerMessage) -> Option<PeerMessage> {
        match message {
            PeerMessage::Protected { manifest, bears } => {
                let state = CheckpointState::Protected;
                self.told_state(from, manifest, state, Some(bears));
            }
            PeerMessage::Durable { manifest } => {
                self.told_state(from, manifest, CheckpointState::Durable, None);
            }
            PeerMessage::Held {
                manifest,
                version,
                shards,
                parity,
                enclosures,
            } => {
                let blocks = Blocks {
                    shards: shards.into_iter().collect(),
                    parity: parity.into_iter().collect(),
                    enclosures,
                };
                self.held(from, manifest, version, blocks);
            }
            PeerMessage::HeldNoted { manifest, version } => {
                self.held_noted(from, manifest, version)
            }
            PeerMessage::Owed { manifest, done } => self.owed(from, manifest, done),
            PeerMessage::Unowed { manifest, cause } => self.unowed(from, manifest, cause),
            PeerMessage::DurableFailed { manifest, reason } => {
                self.durable_failed(from, manifest, reason)
            }
            PeerMessage::Quarantined {
                manifest,
                key,
                reason,
            } => self.learn_quarantine(from, manifest, key, reason),
            PeerMessage::Holdings {
                query: REPAIR_QUERY,
                ref holdings,
                ..
            } => {
                self.hear_of_holdings(from, holdings);
                return Some(message);
            }
            PeerMessage::Holdings {
                query,
                ref holdings,
                ..
            } if self.hear_what_home_has(from, query, holdings) => {}
            other => return Some(other),
        }
        None
    }
}
