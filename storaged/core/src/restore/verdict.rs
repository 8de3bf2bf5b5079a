//! The verdict on a restart: the same survey as a plan's, and what a launcher should make of it. A plan refuses to go back unasked;
//! a verdict says what can be had all the same, that it goes back, and for whom it would be worth to wait.

use storaged_wire::peer::{CheckpointKey, HighMark};
use storaged_wire::plan::{PassedOverCause, RestorePlan, ShardSource, Source, Unrestorable};
use storaged_wire::verdict::{ExpectedTime, Reason, ReasonCode, RestartVerdict, Verdict};
use storaged_wire::{Manifest, NodeName, Refusal};

use super::offer::{Hidden, Newest, key_of, listed};
use super::plan::{SurveyInProgress, TierListing};
use super::waiting::HadNow;
use crate::context::Context;
use crate::failed_steps::Quarantine;

/// Shards by where they come from.
#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    in_place: usize,
    elsewhere: usize,
    decoded: usize,
    durable: usize,
}

impl Tally {
    fn of(offer: &RestorePlan, manifest: &Manifest) -> Self {
        let mut tally = Self::default();
        for shard in &offer.shards {
            match &shard.source {
                Source::Ram(node) if is_in_place(manifest, shard, node) => tally.in_place += 1,
                Source::Ram(_) => tally.elsewhere += 1,
                Source::Decode(_) => tally.decoded += 1,
                Source::Durable => tally.durable += 1,
            }
        }
        tally
    }

    fn verdict(self) -> Verdict {
        if self.durable > 0 {
            Verdict::RestartFromDurable
        } else if self.elsewhere + self.decoded > 0 && !planted!("decoded_is_in_place") {
            Verdict::Recover
        } else {
            Verdict::RecoverInPlace
        }
    }

    fn reasons(self) -> Vec<Reason> {
        let all = self.in_place + self.elsewhere + self.decoded + self.durable;
        let of = |code, shards: usize, text: &str| {
            (shards > 0).then(|| reason(code, format!("{shards} of {all} shards {text}")))
        };
        if self.in_place == all {
            let text = format!("all {all} shards are in the RAM of the nodes that sealed them");
            return vec![reason(ReasonCode::AllInPlace, text)];
        }
        let some = [
            of(
                ReasonCode::ShardsElsewhere,
                self.elsewhere,
                "are in the RAM of other nodes than those that sealed them",
            ),
            of(
                ReasonCode::ShardsDecoded,
                self.decoded,
                "are decoded from survivors of their groups",
            ),
            of(
                ReasonCode::ShardsDurable,
                self.durable,
                "are in the durable tier alone",
            ),
        ];
        some.into_iter().flatten().collect()
    }
}

/// What can be had, and what that makes of the restart.
struct Judged {
    offer: RestorePlan,
    verdict: Verdict,
    reasons: Vec<Reason>,
    expected: Vec<ExpectedTime>,
}

impl Context {
    pub(super) fn verdict(&self, plan: &SurveyInProgress) -> Result<RestartVerdict, Refusal> {
        self.check_planner(plan)?;
        let Newest {
            offer,
            mut passed_over,
        } = self.newest(plan);
        let newest_seen = self.newest_seen(plan);
        let judged = offer.and_then(|offer| self.judged(plan, offer));
        let key = judged.as_ref().map(|judged| key_of(&judged.offer));
        note_unheld(newest_seen, key.as_ref(), &mut passed_over);
        // Anything is better than a step that has failed before.
        let had = judged
            .as_ref()
            .zip(key.as_ref())
            .filter(|(_, key)| self.quarantine_of(plan, key.mark()) == Quarantine::None);
        let waiting = self.waiting_gains(
            plan,
            had.map(|(judged, key)| HadNow {
                key,
                verdict: judged.verdict,
            }),
        );
        let last_resort = key
            .as_ref()
            .filter(|key| self.quarantine_of(plan, key.mark()) != Quarantine::None);
        let (mut reasons, verdict) = match &judged {
            Some(judged) => (judged.reasons.clone(), judged.verdict),
            None => (vec![self.why_nothing(plan)], Verdict::Impossible),
        };
        reasons.extend(last_resort.map(|key| self.why_again(key)));
        reasons.extend(self.doubts(plan, key.as_ref()));
        let (plan_offered, expected) = judged.map(|judged| (judged.offer, judged.expected)).unzip();
        Ok(RestartVerdict {
            namespace: plan.namespace.clone(),
            verdict,
            reasons,
            plan: plan_offered,
            expected: expected.unwrap_or_default(),
            newest_seen,
            passed_over,
            waiting,
        })
    }

    fn judged(&self, plan: &SurveyInProgress, offer: RestorePlan) -> Option<Judged> {
        let manifest = plan.survey.manifests.get(&offer.manifest)?.manifest();
        let tally = Tally::of(&offer, manifest);
        Some(Judged {
            verdict: tally.verdict(),
            reasons: tally.reasons(),
            expected: self.slowest(manifest, &offer.shards),
            offer,
        })
    }

    /// The newest committed step that anybody has heard of.
    fn newest_seen(&self, plan: &SurveyInProgress) -> Option<HighMark> {
        let keys = plan.survey.keys.values().map(CheckpointKey::mark);
        let set_aside = plan.survey.set_aside.iter().map(|one| HighMark {
            run: one.run,
            step: one.step,
        });
        keys.chain(set_aside).chain(self.bar(plan)).max()
    }

    fn why_nothing(&self, plan: &SurveyInProgress) -> Reason {
        let was_read = matches!(plan.tier, TierListing::Absent | TierListing::Read);
        let is_first = self.newest_seen(plan).is_none() && was_read && self.majority_answered(plan);
        if is_first || planted!("a_loss_is_a_first_start") {
            let text = format!(
                "nobody who answered has heard of a checkpoint of {}: a first start, or another STORAGED_NAMESPACE",
                plan.namespace
            );
            return reason(ReasonCode::NothingSaved, text);
        }
        let text = format!(
            "nothing that was saved of {} is restorable from what answered",
            plan.namespace
        );
        reason(ReasonCode::NothingRestorable, text)
    }

    fn why_again(&self, key: &CheckpointKey) -> Reason {
        let text = format!(
            "nothing but step {} of run {} is restorable, and restarts from it have failed before",
            key.step, key.run
        );
        reason(ReasonCode::LastResort, text)
    }

    /// What speaks against taking what was found for the newest.
    fn doubts(&self, plan: &SurveyInProgress, found: Option<&CheckpointKey>) -> Vec<Reason> {
        let mut doubts = Vec::new();
        let hidden = self.hidden(plan, found);
        if let Some(hidden) = hidden {
            doubts.push(self.behind(plan, hidden));
        }
        let silent = self.silent(plan);
        if !silent.is_empty() {
            doubts.push(silence(&silent));
        }
        // A step that restarts fail from is taken for want of a better one, which the tier may have.
        let is_last_resort =
            found.is_some_and(|key| self.quarantine_of(plan, key.mark()) != Quarantine::None);
        let unread = match &plan.tier {
            TierListing::Unreadable(fault) => Some(fault.to_string()),
            TierListing::Unasked | TierListing::Asked
                if found.is_none() || is_last_resort || hidden.is_some() =>
            {
                Some("no answer in time".into())
            }
            _ => None,
        };
        doubts.extend(unread.map(|fault| {
            let text = format!(
                "the durable tier, which may hold {} step, could not be read: {fault}",
                if is_last_resort {
                    "a better"
                } else {
                    "a newer"
                }
            );
            reason(ReasonCode::DurableUnreadable, text)
        }));
        doubts
    }

    fn behind(&self, plan: &SurveyInProgress, hidden: Hidden) -> Reason {
        match hidden {
            Hidden::Known(bar) => {
                let text = format!(
                    "step {} of run {} was protected and is not whole among what answered: a load goes back behind it only if that is \
                     allowed (`allow_older`)",
                    bar.step, bar.run
                );
                reason(ReasonCode::GoesBack, text)
            }
            Hidden::Unknown { members } => {
                let text = format!(
                    "{} of {members} nodes answered, which is no majority: others may hold a newer step, and a load takes what was found \
                     only if that is allowed (`allow_older`)",
                    plan.answered.len()
                );
                reason(ReasonCode::TooFewAnswered, text)
            }
        }
    }
}

/// Whether a shard is at the node that sealed it.
fn is_in_place(manifest: &Manifest, shard: &ShardSource, at: &NodeName) -> bool {
    let entry = manifest.shard(shard.rank);
    entry.is_some_and(|entry| entry.node == *at)
}

fn silence(silent: &[NodeName]) -> Reason {
    let text = format!("not answered: {}", listed(silent));
    reason(ReasonCode::NodesSilent, text)
}

fn reason(code: ReasonCode, text: String) -> Reason {
    Reason { code, text }
}

/// A step that was protected and that nobody who answered holds anything of is passed over too.
fn note_unheld(
    newest: Option<HighMark>,
    found: Option<&CheckpointKey>,
    passed_over: &mut Vec<Unrestorable>,
) {
    let Some(newest) = newest else {
        return;
    };
    let is_named = passed_over
        .iter()
        .any(|one| (one.run, one.step) == (newest.run, newest.step));
    if is_named || found.is_some_and(|found| found.mark() >= newest) {
        return;
    }
    passed_over.insert(
        0,
        Unrestorable {
            run: newest.run,
            step: newest.step,
            reason: "it was protected, and nobody who answered holds anything of it".into(),
            cause: Some(PassedOverCause::NobodyHasIt),
            copy: None,
        },
    );
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;
    use storaged_wire::local::{LOCAL_VERSION, Reply, Request, Role};
    use storaged_wire::peer::{Holding, Lane, PeerMessage};
    use storaged_wire::verdict::{HeldBasis, VERDICT_MIN_MS};
    use storaged_wire::{CheckpointState, EnclosuresHeld, ManifestBytes, Rank, RunId, Step};

    use super::*;
    use crate::api::{ConnId, Input, Now, Output, RequestId};
    use crate::node::Node;
    use crate::testkit::{TOKEN, hear, job, last_of, name, owner, unknown_to_peers};

    /// What `a` and `b` saved at step 7, with parity on `c`, and this root of every shard.
    fn manifest(content: &[u8]) -> ManifestBytes {
        let manifest = crate::testkit::manifest(7, &["a", "b"], &["c"], 5, digest(content));
        manifest.seal().expect("a sound manifest")
    }

    fn ask(node: &mut Node, index: u64, request: Request) -> Vec<Output> {
        let conn = ConnId(1);
        let id = RequestId { conn, index };
        let outputs = node.handle(Now(1_000), Input::Request { id, request });
        unknown_to_peers(node, Now(1_000), outputs)
    }

    /// `d`, which codes nothing, asks all about a restart; the number of the question.
    fn asks(node: &mut Node) -> u64 {
        let hello = Request::Hello {
            version: LOCAL_VERSION,
            namespace: job(),
            token: TOKEN.to_vec().into(),
            role: Role::Reader,
        };
        ask(node, 0, hello);
        let asked = ask(node, 1, Request::Verdict { timeout_ms: 500 });
        let query = asked.iter().find_map(|output| match output {
            Output::Send {
                message: PeerMessage::HoldingsQuery { query, .. },
                ..
            } => Some(*query),
            _ => None,
        });
        query.expect("all are asked")
    }

    fn holds(node: &mut Node, query: u64, from: &str, holding: Holding, manifest: &ManifestBytes) {
        let told = PeerMessage::Holdings {
            query,
            owner: Some(owner()),
            holdings: vec![holding],
            mark: None,
            copied: None,
        };
        hear(node, 1_001, from, told);
        let manifest = Some(manifest.bytes().to_vec().into());
        let query = Some(query);
        hear(
            node,
            1_002,
            from,
            PeerMessage::ManifestAnswer { query, manifest },
        );
    }

    fn holding(manifest: &ManifestBytes, state: CheckpointState) -> Holding {
        Holding {
            manifest: manifest.name(),
            key: CheckpointKey {
                namespace: job(),
                run: RunId::new(1),
                step: Step::new(7),
            },
            state,
            shards: Vec::new(),
            parity: Vec::new(),
            enclosures: EnclosuresHeld::All,
        }
    }

    /// The verdict at the end of the time.
    fn given(node: &mut Node) -> RestartVerdict {
        let end = 1_000 + u64::from(VERDICT_MIN_MS);
        let outputs = node.handle(Now(end), Input::Tick);
        let verdict = outputs.into_iter().find_map(|output| match output {
            Output::Reply {
                reply: Reply::Verdict(verdict),
                ..
            } => Some(verdict),
            _ => None,
        });
        verdict.expect("a verdict")
    }

    /// Nobody knows whether a coding node has its parity before somebody says that the step was protected.
    #[test]
    fn parity_of_a_step_that_was_never_protected_is_not_waited_for() {
        let manifest = manifest(b"any");
        for (state, of, basis) in [
            (CheckpointState::Committed, vec!["b"], HeldBasis::Sealed),
            (CheckpointState::Protected, vec!["b", "c"], HeldBasis::Coded),
        ] {
            let mut node = last_of(&["a", "b", "c", "d"], 2, 1);
            let query = asks(&mut node);
            let mut on_a = holding(&manifest, state);
            on_a.shards = vec![Rank::new(0)];
            holds(&mut node, query, "a", on_a, &manifest);
            let verdict = given(&mut node);
            assert_eq!(verdict.verdict, Verdict::Impossible);
            let [gain, ..] = verdict.waiting.as_slice() else {
                panic!("{verdict:?}");
            };
            let named: Vec<&str> = gain.returning[0].of.iter().map(NodeName::as_str).collect();
            assert_eq!((named, gain.returning[0].basis), (of, basis), "{gain}");
        }
    }

    /// Shards count for the manifest that they are held for: two of one step never make a whole between them.
    #[test]
    fn shards_of_two_manifests_of_one_step_are_not_put_together() {
        let (one, other) = (manifest(b"one"), manifest(b"other"));
        let mut node = last_of(&["a", "b", "c", "d"], 2, 1);
        let query = asks(&mut node);
        let mut on_a = holding(&one, CheckpointState::Committed);
        on_a.shards = vec![Rank::new(0)];
        holds(&mut node, query, "a", on_a, &one);
        let mut on_b = holding(&other, CheckpointState::Committed);
        on_b.shards = vec![Rank::new(1)];
        holds(&mut node, query, "b", on_b, &other);
        let nothing = PeerMessage::Holdings {
            query,
            owner: Some(owner()),
            holdings: Vec::new(),
            mark: None,
            copied: None,
        };
        let outputs = hear(&mut node, 1_003, "c", nothing);
        let reply = outputs.into_iter().find_map(|output| match output {
            Output::Reply {
                reply: Reply::Verdict(verdict),
                ..
            } => Some(verdict),
            _ => None,
        });
        let verdict = reply.expect("all have answered");
        assert_eq!(verdict.verdict, Verdict::Impossible, "{verdict:?}");
        assert_eq!(verdict.passed_over.len(), 2, "{verdict:?}");
        assert_eq!(verdict.waiting, [], "both have answered");
    }

    /// The names of a condition, as a person reads it.
    #[test]
    fn a_gain_reads_as_a_sentence() {
        let of = |nodes: &[&str]| nodes.iter().map(|node| name(node)).collect();
        let gain = |any, nodes| storaged_wire::verdict::WaitingGain {
            at: HighMark {
                run: RunId::new(1),
                step: Step::new(160),
            },
            verdict: Verdict::Recover,
            returning: vec![storaged_wire::verdict::Returning {
                any,
                of: of(nodes),
                basis: HeldBasis::Sealed,
            }],
        };
        let said = |any, nodes| gain(any, nodes).to_string();
        for (said, expected) in [
            (said(1, &["n3"]), "if n3 returns, RAM intact"),
            (said(1, &["n2", "n3"]), "if n2 or n3 returns, RAM intact"),
            (said(2, &["n2", "n3"]), "if n2 and n3 return, RAM intact"),
            (
                said(2, &["n2", "n3", "n4"]),
                "if 2 of n2, n3, n4 return, RAM intact",
            ),
        ] {
            assert!(said.starts_with("step 160 of run "), "{said}");
            assert!(said.ends_with(expected), "{said}");
        }
    }

    #[test]
    fn lanes_are_told_apart_by_what_they_lack() {
        // One lane's parity does not serve another lane.
        let manifest = manifest(b"any");
        let mut node = last_of(&["a", "b", "c", "d"], 2, 1);
        let query = asks(&mut node);
        let mut on_c = holding(&manifest, CheckpointState::Protected);
        on_c.parity = vec![(Lane { group: 0, index: 1 }, 0)];
        holds(&mut node, query, "c", on_c, &manifest);
        let verdict = given(&mut node);
        let [gain] = verdict.waiting.as_slice() else {
            panic!("{verdict:?}");
        };
        assert_eq!(gain.verdict, Verdict::RecoverInPlace, "{gain}");
        assert_eq!(gain.returning[0].any, 2, "{gain}");
    }
}
