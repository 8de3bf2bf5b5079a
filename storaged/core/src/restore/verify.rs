//! Checking a checkpoint: every live node that has a part of it reads the part and compares digests.

use std::collections::BTreeSet;
use std::sync::Arc;

use storaged_plan::lanes_of;
use storaged_wire::local::{Reply, VerifiedPart, VerifyReport};
use storaged_wire::peer::{CheckpointKey, Lane, PeerMessage};
use storaged_wire::{Digest, Enclosure, ManifestBytes, NodeName, Rank, Refusal, Step};

use super::plan::SurveyPurpose;
use crate::api::{CheckPart, Now, Output, QueryId, RequestId};
use crate::context::Context;
use crate::limits;
use crate::restore::Restores;

/// A check under way: of this node's parts for somebody, or of a whole checkpoint.
#[derive(Debug, Clone)]
pub(crate) enum VerifyWork {
    /// Reading this node's parts.
    Parts {
        asked_by: NodeName,
        query: u64,
        parts: Vec<VerifiedPart>,
        deadline: Now,
    },
    /// Collecting everybody's.
    Whole {
        id: RequestId,
        manifest: Arc<ManifestBytes>,
        waiting_for: BTreeSet<NodeName>,
        parts: Vec<VerifiedPart>,
        deadline: Now,
    },
}

impl VerifyWork {
    pub fn id(&self) -> Option<RequestId> {
        match self {
            Self::Parts { .. } => None,
            Self::Whole { id, .. } => Some(*id),
        }
    }
}

impl Restores {
    pub(crate) fn verify(
        &mut self,
        id: RequestId,
        step: Option<Step>,
        timeout_ms: u32,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        self.survey_for(id, step, timeout_ms, SurveyPurpose::Verify, cx)
    }

    /// Asks everybody who should hold a part of it to read that. Who has not answered at the caller's limit is named in the
    /// report: a node that hangs must not keep what the others found.
    pub(crate) fn start_verify(
        &mut self,
        id: RequestId,
        manifest: Arc<ManifestBytes>,
        deadline: Now,
        cx: &mut Context,
    ) {
        let query = QueryId(cx.fresh());
        let concerned = cx.stakeholders(&manifest);
        let up: BTreeSet<NodeName> = concerned
            .into_iter()
            .filter(|node| cx.is_up(node))
            .collect();
        let name = manifest.name();
        let work = VerifyWork::Whole {
            id,
            manifest,
            waiting_for: up.clone(),
            parts: Vec::new(),
            deadline,
        };
        self.verifies.insert(query, work);
        if up.is_empty() {
            self.finish_verify(query, cx);
        }
        for node in up {
            cx.send(
                &node,
                PeerMessage::VerifyQuery {
                    query: query.0,
                    manifest: name,
                },
            );
        }
    }

    pub(crate) fn verify_asked(
        &mut self,
        from: &NodeName,
        query: u64,
        name: Digest,
        cx: &mut Context,
    ) {
        if *from != *cx.me() && !self.may_check_one_more_for(from) {
            return;
        }
        let me = cx.me().clone();
        let (mut parts, mut checks) = cx.enclosure_parts(name);
        if let Some(checkpoint) = cx.checkpoint_named(name) {
            for (rank, local) in &checkpoint.shards {
                if let Some(shard) = local.sealed() {
                    let what = shard_part(*rank);
                    parts.push(VerifiedPart {
                        node: me.clone(),
                        what,
                        bytes: shard.length,
                        fault: None,
                    });
                    checks.push(CheckPart::Shard(shard));
                }
            }
            for ((lane, index), set) in &checkpoint.parity {
                let what = parity_part(*lane, *index);
                parts.push(VerifiedPart {
                    node: me.clone(),
                    what,
                    bytes: 0,
                    fault: None,
                });
                checks.push(CheckPart::Parity(*set));
            }
        }
        let own = QueryId(cx.fresh());
        let deadline = cx.now.plus(limits::REQUEST_MAX_MS);
        let asked_by = from.clone();
        self.verifies.insert(
            own,
            VerifyWork::Parts {
                asked_by,
                query,
                parts,
                deadline,
            },
        );
        cx.out.push(Output::Check {
            query: own,
            parts: checks,
        });
    }

    /// Whoever is not answered waits for as long as its caller does, and calls this node's parts unread.
    fn may_check_one_more_for(&self, peer: &NodeName) -> bool {
        let is_for_it = |work: &&VerifyWork| matches!(work, VerifyWork::Parts { asked_by, .. } if asked_by == peer);
        let for_it = self.verifies.values().filter(is_for_it);
        for_it.count() < limits::CHECKS_PER_PEER_MAX || planted!("checks_without_number")
    }

    /// The driver read this node's parts; for parity it also says how many bytes there were.
    pub(crate) fn checked(
        &mut self,
        query: QueryId,
        outcomes: Vec<(u64, Option<String>)>,
        cx: &mut Context,
    ) {
        let Some(VerifyWork::Parts {
            asked_by,
            query,
            mut parts,
            ..
        }) = self.verifies.remove(&query)
        else {
            return;
        };
        for (part, (bytes, fault)) in parts.iter_mut().zip(outcomes) {
            part.bytes = bytes;
            part.fault = fault;
        }
        cx.send(&asked_by, PeerMessage::VerifyAnswer { query, parts });
    }

    pub(crate) fn verify_answered(
        &mut self,
        from: &NodeName,
        query: QueryId,
        told: Vec<VerifiedPart>,
        cx: &mut Context,
    ) {
        let Some(VerifyWork::Whole {
            waiting_for, parts, ..
        }) = self.verifies.get_mut(&query)
        else {
            return;
        };
        if waiting_for.remove(from) {
            // Of what others hold they say themselves what is wrong with it.
            let is_its_own = |part: &VerifiedPart| part.node == *from;
            let told = told.into_iter();
            parts.extend(told.filter(|it| is_its_own(it) || planted!("others_parts_are_told")));
        }
        if waiting_for.is_empty() {
            self.finish_verify(query, cx);
        }
    }

    fn finish_verify(&mut self, query: QueryId, cx: &mut Context) {
        let Some(VerifyWork::Whole {
            id,
            manifest,
            waiting_for,
            mut parts,
            ..
        }) = self.verifies.remove(&query)
        else {
            return;
        };
        let mut unread = missing(&manifest, &parts);
        if waiting_for.is_empty() {
            let homes = cx.homes_of(&CheckpointKey::of(manifest.manifest()));
            unread.extend(
                homes
                    .first()
                    .map_or_else(Vec::new, |home| missing_enclosures(&manifest, &parts, home)),
            );
        }
        for part in &mut unread {
            if waiting_for.contains(&part.node) {
                part.fault = Some(UNREAD.into());
            }
        }
        parts.extend(unread);
        parts.sort_by(|a, b| (&a.node, &a.what).cmp(&(&b.node, &b.what)));
        let step = manifest.manifest().step;
        let report = VerifyReport {
            manifest: manifest.name(),
            step,
            parts,
        };
        cx.reply(id, Reply::Verified(report));
    }

    pub(crate) fn verifies_forget(&mut self, node: &NodeName, cx: &mut Context) {
        let hit: Vec<QueryId> = self.verifies.keys().copied().collect();
        for query in hit {
            let gone = match self.verifies.get_mut(&query) {
                Some(VerifyWork::Whole {
                    waiting_for, parts, ..
                }) => {
                    if waiting_for.remove(node) {
                        let fault = Some("went down while it was checking".into());
                        let what = "its parts".into();
                        parts.push(VerifiedPart {
                            node: node.clone(),
                            what,
                            bytes: 0,
                            fault,
                        });
                    }
                    waiting_for.is_empty()
                }
                _ => false,
            };
            if gone {
                self.finish_verify(query, cx);
            }
        }
    }

    pub(crate) fn verifies_deadline(&self) -> impl Iterator<Item = Now> {
        self.verifies.values().map(|work| match work {
            VerifyWork::Whole { deadline, .. } | VerifyWork::Parts { deadline, .. } => *deadline,
        })
    }

    pub(crate) fn expire_verifies(&mut self, cx: &mut Context) {
        let now = cx.now;
        for query in self.verifies.keys().copied().collect::<Vec<_>>() {
            match self.verifies.get(&query) {
                Some(VerifyWork::Whole { deadline, .. }) if *deadline <= now => {
                    self.finish_verify(query, cx)
                }
                Some(VerifyWork::Parts { deadline, .. }) if *deadline <= now => {
                    self.verifies.remove(&query);
                }
                _ => {}
            }
        }
    }
}

/// Of a part whose node has not answered: it may be sound.
const UNREAD: &str =
    "not read within the time given: its node is slow or hangs; give more time, or look at it";

fn shard_part(rank: Rank) -> String {
    format!("shard of rank {rank}")
}

fn parity_part(lane: Lane, index: u32) -> String {
    format!("parity {index} of group {} lane {}", lane.group, lane.index)
}

impl Context {
    /// What a manifest names, as far as it is here, and how that is checked.
    fn enclosure_parts(&self, name: Digest) -> (Vec<VerifiedPart>, Vec<CheckPart>) {
        let manifest = self.manifest_named(name);
        let named = manifest.iter().flat_map(|it| named_parts(it));
        let here = named.filter_map(|(what, name)| {
            let bytes = self.enclosures.get(name.digest)?;
            let part = VerifiedPart {
                node: self.me().clone(),
                what: what.into(),
                bytes: name.length,
                fault: None,
            };
            Some((part, CheckPart::Enclosure { name, bytes }))
        });
        here.unzip()
    }
}

/// What a manifest names, and what a report calls it.
fn named_parts(manifest: &ManifestBytes) -> impl Iterator<Item = (&'static str, Enclosure)> {
    let record = manifest.manifest();
    let all = [
        ("schema", record.schema.to_fetch()),
        ("torch metadata", record.torch_metadata.to_fetch()),
    ];
    all.into_iter()
        .filter_map(|(what, name)| Some((what, name?)))
}

/// What a manifest names and no node told of: its home nodes should hold it.
fn missing_enclosures(
    manifest: &ManifestBytes,
    told: &[VerifiedPart],
    home: &NodeName,
) -> Vec<VerifiedPart> {
    let is_told = |what: &str| told.iter().any(|part| part.what == what);
    let untold = named_parts(manifest).filter(|(what, _)| !is_told(what));
    untold
        .map(|(what, _)| VerifiedPart {
            node: home.clone(),
            what: what.into(),
            bytes: 0,
            fault: Some("expected on the home nodes, found on none that answered".into()),
        })
        .collect()
}

/// Parts that the manifest expects of a node and that it did not tell of.
fn missing(manifest: &ManifestBytes, told: &[VerifiedPart]) -> Vec<VerifiedPart> {
    let known: BTreeSet<(&NodeName, &str)> = told
        .iter()
        .map(|part| (&part.node, part.what.as_str()))
        .collect();
    let shards = manifest.manifest().shards.iter();
    let shards = shards.map(|shard| (&shard.node, shard_part(shard.rank)));
    let lanes = lanes_of(manifest).into_iter();
    let parity = lanes.flat_map(|lane| {
        let group = &manifest.manifest().groups[lane.group as usize];
        let coding = (0u32..).zip(&group.coding);
        coding.map(move |(index, node)| (node, parity_part(lane, index)))
    });
    let expected = shards.chain(parity);
    expected
        .filter(|(node, what)| !known.contains(&(*node, what.as_str())))
        .map(|(node, what)| VerifiedPart {
            node: node.clone(),
            what,
            bytes: 0,
            fault: Some("expected here, not found: its node is down or has lost it".into()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;

    use super::*;
    use crate::testkit::{hear, last_of};

    #[test]
    fn one_peer_has_only_so_many_steps_read_at_once() {
        let mut node = last_of(&["a", "b"], 1, 1);
        let manifest = digest(b"any");
        let mut read = 0;
        for query in 0..200 {
            let asked = hear(
                &mut node,
                10,
                "a",
                PeerMessage::VerifyQuery { query, manifest },
            );
            let checks = asked.iter().filter(|it| matches!(it, Output::Check { .. }));
            read += checks.count();
        }
        assert_eq!(read, limits::CHECKS_PER_PEER_MAX);
    }
}
