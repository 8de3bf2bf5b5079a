//! A trainer that comes with a run that nobody here has heard of. It may have been opened while this node was away, so
//! the peers and the durable tier are asked, for a bounded time; a run that nobody opened counts for nothing and fences
//! nobody.

use std::collections::BTreeSet;

use storaged_wire::local::Reply;
use storaged_wire::peer::{Fence, PeerMessage};
use storaged_wire::{NodeName, Owner, Refusal, RefusalCode};

use super::fence::{RunStanding, wrong_token};
use crate::api::{
    ClaimedRun, ConnId, DurableFault, DurablePolicy, Now, Output, QueryId, RequestId,
    RunsWithoutTier,
};
use crate::context::Context;
use crate::limits;
use crate::place::Runs;
use crate::stage::TrainerHello;
use crate::successions::WordOfChanges;

/// A hello that waits for somebody who knows its run.
#[derive(Debug, Clone)]
pub(crate) struct WaitingHello {
    pub id: RequestId,
    pub hello: TrainerHello,
    waiting_for: BTreeSet<NodeName>,
    tier: TierSearch,
    pub deadline: Now,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum TierSearch {
    Running,
    /// It does not know the run, or there is no tier.
    Over,
    Failed(DurableFault),
    /// It has newer runs, up to this number. That counts if no node remembers better: an attempt that has failed may have
    /// left its claim.
    Superseded(u64),
    /// It has the run, and has not said whether the token of its job was changed.
    WithoutChanges,
}

impl TierSearch {
    /// Why it has said nothing.
    fn fault(&self) -> Option<String> {
        match self {
            Self::Running => Some("no answer in time".into()),
            Self::Failed(fault) => Some(fault.to_string()),
            Self::WithoutChanges => Some("no word of changed tokens".into()),
            Self::Over | Self::Superseded(_) => None,
        }
    }
}

impl Runs {
    /// A trainer whose run is unknown here waits, if there is one.
    pub(crate) fn hellos_wait(
        &mut self,
        id: RequestId,
        unknown: Option<TrainerHello>,
        since: Now,
        cx: &mut Context,
    ) {
        if let Some(hello) = unknown {
            self.hello_waits(id, hello, since, cx);
        }
    }

    fn hello_waits(&mut self, id: RequestId, hello: TrainerHello, since: Now, cx: &mut Context) {
        let query = QueryId(cx.fresh());
        let tier = match cx.setup.durable {
            DurablePolicy::Absent => TierSearch::Over,
            _ => TierSearch::Running,
        };
        if tier == TierSearch::Running {
            let (namespace, run) = (hello.namespace.clone(), hello.run);
            cx.out.push(Output::FindRun {
                query,
                namespace,
                run,
            });
        }
        let waiting = WaitingHello {
            id,
            hello,
            waiting_for: BTreeSet::new(),
            tier,
            deadline: since.plus(limits::RUN_CONFIRM_MS),
        };
        self.hellos.insert(query, waiting);
        for peer in cx.peers.keys().cloned().collect::<Vec<_>>() {
            self.hellos_ask(&peer, cx);
        }
        self.advance_hellos(cx);
    }

    /// Asks a peer for what it knows of the runs that are waited for.
    pub(crate) fn hellos_ask(&mut self, node: &NodeName, cx: &mut Context) {
        let queries: Vec<QueryId> = self.hellos.keys().copied().collect();
        for query in queries {
            let Some(waiting) = self.hellos.get_mut(&query) else {
                continue;
            };
            if waiting.waiting_for.insert(node.clone()) {
                let (query, namespace) = (query.0, waiting.hello.namespace.clone());
                cx.send(node, PeerMessage::RunQuery { query, namespace });
            }
        }
    }

    pub(crate) fn forget_peer(&mut self, node: &NodeName) {
        for proposal in self.proposals.values_mut() {
            proposal.forget_peer(node);
        }
        for waiting in self.hellos.values_mut() {
            waiting.waiting_for.remove(node);
        }
    }

    pub(crate) fn forget_hellos(&mut self, conn: ConnId) {
        self.hellos.retain(|_, waiting| waiting.id.conn != conn);
    }

    pub(crate) fn fence_told(
        &mut self,
        from: &NodeName,
        query: QueryId,
        fence: Option<Fence>,
        cx: &mut Context,
    ) {
        if let Some(fence) = fence {
            cx.learn_fence(from, fence);
        }
        if let Some(waiting) = self.hellos.get_mut(&query) {
            waiting.waiting_for.remove(from);
        }
        cx.greeting_told(from, query);
        self.asking_told(from, query, cx);
        self.advance_hellos(cx);
    }

    /// The durable tier has looked for a claim of the run.
    pub(crate) fn run_found(
        &mut self,
        query: QueryId,
        outcome: Result<ClaimedRun, DurableFault>,
        cx: &mut Context,
    ) {
        let Some(waiting) = self.hellos.get_mut(&query) else {
            return;
        };
        waiting.tier = match outcome {
            Ok(ClaimedRun::Superseded { newest }) => TierSearch::Superseded(newest),
            // It says whose the run is, and has not said whether that token was changed: a retired one would come back, and the newest one be
            // a stranger's. Peers may tell.
            Ok(ClaimedRun::Newest(_)) if cx.lacks_word_of_changes(&waiting.hello) => {
                TierSearch::WithoutChanges
            }
            Ok(ClaimedRun::Unknown | ClaimedRun::Newest(_)) => TierSearch::Over,
            Err(ref fault) => TierSearch::Failed(fault.clone()),
        };
        if let Ok(ClaimedRun::Newest(owner)) = outcome
            && waiting.tier == TierSearch::Over
            && let Some(waiting) = self.hellos.remove(&query)
        {
            cx.hello_confirmed(waiting, owner);
        }
        self.advance_hellos(cx);
    }

    /// Answers the hellos whose run is known by now, or that have waited long enough.
    pub(crate) fn advance_hellos(&mut self, cx: &mut Context) {
        for query in self.hellos.keys().copied().collect::<Vec<_>>() {
            let Some(waiting) = self.hellos.get(&query) else {
                continue;
            };
            let hello = &waiting.hello;
            let asked_all = waiting.waiting_for.is_empty() && waiting.tier != TierSearch::Running;
            // Fewer than a majority may all have been away when it was opened.
            let is_majority =
                cx.peers.len() + 1 >= cx.majority() || planted!("unknown_to_a_minority");
            let over = (asked_all && cx.settled() && is_majority) || waiting.deadline <= cx.now;
            let unknown = cx.standing(&hello.namespace, hello.run) == RunStanding::Unknown;
            if unknown && !over {
                continue;
            }
            let Some(mut waiting) = self.hellos.remove(&query) else {
                continue;
            };
            // Who opened the run is told before by which token the job is opened since.
            if !unknown && waiting.awaits_changes(cx) {
                self.hellos.insert(query, waiting);
                continue;
            }
            let outcome = if !unknown {
                cx.admit(waiting.id, waiting.hello)
            } else {
                Err(not_confirmed(&waiting, cx))
            };
            if let Err(refusal) = outcome {
                cx.reply(waiting.id, Reply::Refused(refusal));
            }
        }
    }
}

impl WaitingHello {
    /// Whether peers may have yet to tell of a change: of the newest token, which is a stranger's until then, or of that of another one for
    /// this. Whoever has answered has told before of what it knew when its link came up. It is waited
    /// for a moment.
    fn awaits_changes(&mut self, cx: &mut Context) -> bool {
        let have_answered = self.waiting_for.is_empty();
        if have_answered && cx.check_waiting(self.id, &mut self.hello).is_ok() {
            return false;
        }
        self.deadline = self.deadline.min(cx.now.plus(limits::CHANGE_WAIT_MS));
        cx.now < self.deadline
    }
}

impl Context {
    fn lacks_word_of_changes(&self, hello: &TrainerHello) -> bool {
        let tier = hello.early.as_ref().map(|early| early.tier);
        tier == Some(WordOfChanges::Missing) && !self.has_heard_of(&hello.namespace)
    }

    fn hello_confirmed(&mut self, waiting: WaitingHello, owner: Owner) {
        let WaitingHello { id, mut hello, .. } = waiting;
        let outcome = self.check_waiting(id, &mut hello).and_then(|()| {
            if owner == hello.owner {
                self.admit(id, hello)
            } else {
                Err(wrong_token(&hello.namespace))
            }
        });
        if let Err(refusal) = outcome {
            self.reply(id, Reply::Refused(refusal));
        }
    }
}

/// Why a trainer is not let in whose run nobody who has answered knows.
fn not_confirmed(waiting: &WaitingHello, cx: &Context) -> Refusal {
    let hello = &waiting.hello;
    let is_remembered = cx.has_heard_of(&hello.namespace);
    let allowed = cx.setup.runs_without_tier == RunsWithoutTier::Allowed;
    match (&waiting.tier, waiting.tier.fault()) {
        (TierSearch::Superseded(newest), _) => older_run(hello, *newest),
        (TierSearch::WithoutChanges, Some(fault)) if !is_remembered => not_asked(hello, &fault),
        // A job whose run is called unknown opens another one: it must not for a moment in which the tier was slow.
        (_, Some(fault)) if !is_remembered && !allowed => not_asked(hello, &fault),
        _ => unknown_run(hello),
    }
}

fn not_asked(hello: &TrainerHello, fault: &str) -> Refusal {
    Refusal::new(
        RefusalCode::DurableUnavailable,
        format!(
            "expected the durable tier, or a node that remembers {}, to say whether run {} was opened, got no node that does and from the tier: {fault}; try again when it answers",
            hello.namespace, hello.run
        ),
    )
}

fn unknown_run(hello: &TrainerHello) -> Refusal {
    Refusal::new(
        RefusalCode::UnknownRun,
        format!(
            "expected a run of {} that was opened, got run {}, of which no node that is up has heard: open a run and use the one that is given",
            hello.namespace, hello.run
        ),
    )
}

fn older_run(hello: &TrainerHello, newest: u64) -> Refusal {
    Refusal::new(
        RefusalCode::OlderRun,
        format!(
            "expected run {newest} or newer of {}, got run {}: the durable tier has newer runs of the job, this one must end",
            hello.namespace, hello.run
        ),
    )
}

#[cfg(test)]
mod tests {
    use storaged_wire::local::{LOCAL_VERSION, Request, Role};
    use storaged_wire::{Generation, Rank, RunId, WorldSize};

    use super::*;
    use crate::api::Input;
    use crate::node::Node;
    use crate::testkit::{TOKEN, hear, job, last_of, name, owner};

    const LONG_AFTER_THE_START: u64 = limits::JOIN_MAX_MS;

    /// The last of three nodes, to which nobody is linked any more.
    fn cut_off() -> Node {
        let mut node = last_of(&["a", "b", "c"], 2, 1);
        for peer in ["a", "b"] {
            let node_down = Input::PeerDown { node: name(peer) };
            node.handle(Now(LONG_AFTER_THE_START), node_down);
        }
        node
    }

    fn replies(outputs: Vec<Output>) -> Vec<Reply> {
        let replies = outputs.into_iter().filter_map(|output| match output {
            Output::Reply { reply, .. } => Some(reply),
            _ => None,
        });
        replies.collect()
    }

    fn hello(node: &mut Node) -> Vec<Reply> {
        let id = RequestId {
            conn: ConnId(1),
            index: 0,
        };
        let request = Request::Hello {
            version: LOCAL_VERSION,
            namespace: job(),
            token: TOKEN.to_vec().into(),
            role: Role::Trainer {
                run: RunId::new(2),
                rank: Rank::new(0),
                world_size: WorldSize::new(2).expect("ranks"),
            },
        };
        replies(node.handle(
            Now(LONG_AFTER_THE_START + 1),
            Input::Request { id, request },
        ))
    }

    /// It was opened while this node's links were down, and a link comes up before the trainer has waited long.
    #[test]
    fn a_node_that_is_cut_off_does_not_say_that_nobody_has_heard_of_a_run() {
        let mut node = cut_off();
        assert_eq!(hello(&mut node), []);
        let at = LONG_AFTER_THE_START + 2;
        let generation = Generation::new(1);
        let node_up = Input::PeerUp {
            node: name("a"),
            generation,
        };
        node.handle(Now(at), node_up);
        let fence = Fence {
            namespace: job(),
            owner: owner(),
            run: RunId::new(2),
            promised: RunId::new(2),
        };
        let told = hear(&mut node, at, "a", PeerMessage::Fences(vec![fence]));
        let mut said = replies(told);
        // It may have yet to tell of a changed token, and answers nothing.
        assert_eq!(said, []);
        let end = at + limits::CHANGE_WAIT_MS;
        said.extend(replies(node.handle(Now(end), Input::Tick)));
        assert!(matches!(&said[..], [Reply::Welcome { .. }]), "{said:?}");
    }

    #[test]
    fn it_says_so_at_the_end_of_the_time() {
        let mut node = cut_off();
        assert_eq!(hello(&mut node), []);
        let end = LONG_AFTER_THE_START + 1 + limits::RUN_CONFIRM_MS;
        assert_eq!(replies(node.handle(Now(end - 1), Input::Tick)), []);
        let said = replies(node.handle(Now(end), Input::Tick));
        let code = said.iter().find_map(|reply| match reply {
            Reply::Refused(refusal) => Some(refusal.code),
            _ => None,
        });
        assert_eq!(code, Some(RefusalCode::UnknownRun));
    }
}
