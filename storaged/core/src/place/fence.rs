//! What a node knows of the runs of a namespace. A *promise* keeps a number for whoever wants to open it and fences
//! nothing; a *fence* is a run that was opened, and refuses every lower one. Nothing is ordered by a clock.
//! How a run is opened is in `open_run`; what becomes of a trainer whose run is unknown here in `unknown_run`.

use storaged_wire::peer::{CheckpointKey, Fence, HighMark, NamedRun, PeerMessage, PromiseOutcome};
use storaged_wire::{Namespace, NodeName, Owner, Refusal, RefusalCode, RunId, Step};

use crate::api::{FalseStatement, Now};
use crate::catalog::{Claim, NamespaceTable};
use crate::context::Context;
use crate::limits;
use crate::pins::key_at;
use crate::place::Runs;

/// What a run is to this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunStanding {
    /// A newer one was opened.
    Fenced,
    /// It was opened, or is being opened.
    Known,
    /// Nobody has told of it.
    Unknown,
}

impl Context {
    pub(crate) fn fence_of(&self, namespace: &Namespace) -> RunId {
        self.namespaces
            .get(namespace)
            .map_or(RunId::ZERO, |table| table.fence)
    }

    fn promise_of(&self, namespace: &Namespace) -> RunId {
        self.namespaces
            .get(namespace)
            .map_or(RunId::ZERO, |table| table.promised)
    }

    /// What this node knows of a run. Below a promise that is not a fence yet a run still counts.
    pub(crate) fn standing(&self, namespace: &Namespace, run: RunId) -> RunStanding {
        let fence = self.fence_of(namespace);
        if run < fence {
            RunStanding::Fenced
        } else if self.is_opened(namespace, run) || self.is_told_of(namespace, run) {
            RunStanding::Known
        } else {
            RunStanding::Unknown
        }
    }

    /// Whether it is the newest run that was opened. One that was only promised lets nobody in: who was refused it would open it by saying
    /// that he is one of its trainers.
    fn is_opened(&self, namespace: &Namespace, run: RunId) -> bool {
        if planted!("promised_runs_are_known") {
            return self.is_agreed(namespace, run);
        }
        run > RunId::ZERO && run == self.fence_of(namespace)
    }

    /// Whether a run is the newest that was opened or promised, as enough nodes say. Only such a run may fence others off.
    pub(crate) fn is_agreed(&self, namespace: &Namespace, run: RunId) -> bool {
        let known = [self.fence_of(namespace), self.promise_of(namespace)];
        run > RunId::ZERO && known.contains(&run)
    }

    /// Whether some peer says that it was opened. Its trainers are let in, which costs nobody anything; it ends no other run.
    fn is_told_of(&self, namespace: &Namespace, run: RunId) -> bool {
        let words = self.namespaces.get(namespace).map(|table| &table.words);
        let mut words = words.into_iter().flat_map(|words| words.values());
        run > RunId::ZERO && words.any(|word| word.fence == Some(run))
    }

    /// The highest number that a run of this namespace is known to have, opened, promised or of a checkpoint. Of one that is only the word of
    /// a node a number counts that is near: a new run must stay above all that was saved, and one forged manifest must not use up what is left.
    pub(crate) fn highest_number(&self, namespace: &Namespace) -> u64 {
        let of_job = || {
            let keys = self.checkpoints.keys();
            keys.filter(|key| key.namespace == *namespace)
        };
        let proven = of_job().filter(|key| self.is_held_or_safe(key));
        let proven = proven.map(|key| key.run.number()).next_back();
        let known = self.fence_of(namespace).max(self.promise_of(namespace));
        let known = known.number().max(proven.unwrap_or(0));
        let is_near = |number: &u64| {
            *number <= known.saturating_add(limits::RUN_SKIP_MAX) || planted!("one_word_skips_far")
        };
        let told = of_job().map(|key| key.run.number()).filter(is_near);
        told.max().unwrap_or(0).max(known)
    }

    /// Whether a checkpoint is more than the word of one node: something of it is here, or enough nodes call it safe.
    fn is_held_or_safe(&self, key: &CheckpointKey) -> bool {
        let checkpoint = self.checkpoints.get(key);
        checkpoint.is_some_and(|c| c.state >= self.safe_state() || c.has_blocks())
    }

    pub(crate) fn check_fence(&self, namespace: &Namespace, run: RunId) -> Result<(), Refusal> {
        let fence = self.fence_of(namespace);
        if run >= fence || planted!("older_run_let_in") {
            return Ok(());
        }
        Err(Refusal::new(
            RefusalCode::OlderRun,
            format!(
                "expected run {fence} or newer of {namespace}, got run {run}: a newer run of the job has started, this one must end"
            ),
        ))
    }

    fn fence_record(&self, namespace: &Namespace) -> Option<Fence> {
        let table = self.namespaces.get(namespace);
        // Told, a table that boards alone have made would be an owner's at whoever asked.
        let is_told = |table: &&NamespaceTable| {
            table.claim == Claim::Held && !self.is_hearsay(namespace, table)
        };
        let table = table.filter(is_told)?;
        Some(Fence {
            namespace: namespace.clone(),
            owner: table.owner,
            run: table.fence,
            promised: table.promised,
        })
    }

    /// Fences off runs below `run`, and lets the peers know.
    pub(crate) fn raise_fence(&mut self, namespace: &Namespace, owner: Owner, run: RunId) {
        let table = self.namespace_table(namespace, owner);
        if run <= table.fence {
            return;
        }
        table.fence = run;
        table.opened.run_begins();
        table.promised_to.forget_up_to(run);
        let Some(fence) = self.fence_record(namespace) else {
            return;
        };
        self.send_all(&PeerMessage::Fences(vec![fence]));
        self.tell_succession_of(namespace);
        self.end_fenced_trainers(namespace);
    }

    /// Somebody wants to open a run. A node that has just started has not heard yet what its peers know: it says
    /// nothing, and is asked again.
    pub(crate) fn promise_asked(&mut self, from: &NodeName, query: u64, asked: NamedRun) {
        let known = self.checks_run(from, asked.run) && self.may_tell_of(from, &asked.namespace);
        if !self.settled() || !known || self.skips_too_far(from, &asked) {
            return;
        }
        let outcome = self.promise(from, &asked);
        if outcome == PromiseOutcome::WrongOwner && self.fence_of(&asked.namespace) > RunId::ZERO {
            self.tell_owner(from, &asked.namespace);
        }
        let message = PeerMessage::RunPromised {
            query,
            run: asked.run,
            outcome,
        };
        self.send(from, message);
    }

    /// Whether one peer alone asks for a number far above all that are known here: promised, it and all below it would be used up.
    fn skips_too_far(&self, from: &NodeName, asked: &NamedRun) -> bool {
        let most = self.highest_number(&asked.namespace);
        let most = most.saturating_add(limits::RUN_WISH_MAX);
        from != self.me() && asked.run.number() > most && !planted!("one_wish_skips_far")
    }

    /// Keeps a number for one proposer: it is above every number known here, or kept for this very run already.
    fn promise(&mut self, from: &NodeName, asked: &NamedRun) -> PromiseOutcome {
        if self.check_owner(&asked.namespace, asked.owner).is_err() {
            return PromiseOutcome::WrongOwner;
        }
        if self.is_promised_here(asked) {
            self.note_promise(from, asked);
            return PromiseOutcome::Promised;
        }
        let highest = self.highest_number(&asked.namespace);
        let is_equal = asked.run.number() == highest;
        if asked.run.number() <= highest && !(is_equal && planted!("equal_run_promised")) {
            return PromiseOutcome::Taken { highest };
        }
        if planted!("promising_fences") {
            self.raise_fence(&asked.namespace, asked.owner, asked.run);
        }
        if !planted!("promises_forgotten") {
            let table = self.namespace_table(&asked.namespace, asked.owner);
            (table.promised, table.granted) = (asked.run, asked.run);
            self.note_promise(from, asked);
        }
        PromiseOutcome::Promised
    }

    /// Whether this node itself has promised a run, or it is open. What a peer has promised only keeps its number from
    /// everybody: were it consent, then of two runs of one number a node could be in the majority of both.
    fn is_promised_here(&self, asked: &NamedRun) -> bool {
        let is_told = |table: &NamespaceTable| {
            let mut words = table.words.values();
            words.any(|word| word.promised == Some(asked.run))
                && planted!("peers_promise_is_consent")
        };
        let table = self.namespaces.get(&asked.namespace);
        table.is_some_and(|it| asked.run == it.fence || asked.run == it.granted || is_told(it))
    }

    /// What a peer says of the runs of a namespace. A run ends others only if this node has promised it itself, or another peer says
    /// the same: a majority has promised every run that was opened.
    pub(crate) fn learn_fence(&mut self, from: &NodeName, fence: Fence) {
        let Fence {
            namespace,
            owner,
            run,
            promised,
        } = fence;
        let checked = self.checks_run(from, run) && self.checks_run(from, promised);
        if !checked || !self.may_tell_of(from, &namespace) {
            return;
        }
        let known = self.told_owner_of(&namespace);
        if known.is_some_and(|known| known != owner)
            || self.has_boards_of_another(&namespace, owner)
        {
            let fence = Fence {
                namespace,
                owner,
                run,
                promised,
            };
            return self.learn_rival(from, fence);
        }
        let table = self.namespace_table(&namespace, owner);
        let word = table.words.entry(from.clone()).or_default();
        word.fence = word.fence.max(Some(run));
        word.promised = word.promised.max(Some(promised));
        self.judge_runs(&namespace, owner);
    }

    /// A peer calls a job another owner's than this node does. If enough say so of one that was opened, and what is known here is only that
    /// somebody wanted to open it, it is that owner's: who asked for a run where the job had been forgotten would keep him out
    /// for as long as promises are remembered.
    fn learn_rival(&mut self, from: &NodeName, told: Fence) {
        let namespace = told.namespace.clone();
        let owner = told.owner;
        let is_unopened =
            self.fence_of(&namespace) == RunId::ZERO && !self.has_checkpoints(&namespace);
        if !is_unopened || told.run == RunId::ZERO || planted!("promises_claim_names") {
            return;
        }
        let needed = self.words_needed();
        let Some(table) = self.namespaces.get_mut(&namespace) else {
            return;
        };
        table.rivals.insert(from.clone(), told);
        table.rivals.retain(|node, _| self.peers.contains_key(node));
        let words = table.rivals.values();
        if words.filter(|rival| rival.owner == owner).count() < needed {
            return self.ask_for_owner(&namespace);
        }
        let rivals = std::mem::take(&mut table.rivals);
        // A number that was promised stays: two runs never have the same one.
        let promised = table.promised;
        self.drop_boards(&namespace);
        self.namespaces.remove(&namespace);
        self.keys.forget_job(&namespace);
        for (node, fence) in rivals.into_iter().filter(|(_, it)| it.owner == owner) {
            self.learn_fence(&node, fence);
        }
        let table = self.namespace_table(&namespace, owner);
        table.promised = table.promised.max(promised);
    }

    /// Asks all peers whose a job is. They say it unasked only when a link comes up. One that says so again and again has them asked now and then.
    pub(crate) fn ask_for_owner(&mut self, namespace: &Namespace) {
        let now = self.now;
        let Some(table) = self.namespaces.get_mut(namespace) else {
            return;
        };
        let is_lately = |at: Now| now.since(at) < limits::PROMISE_MAX_MS;
        if table.owner_asked.is_some_and(is_lately) {
            return;
        }
        table.owner_asked = Some(now);
        let (query, namespace) = (self.fresh(), namespace.clone());
        self.send_all(&PeerMessage::RunQuery { query, namespace });
    }

    /// Whether anything of a job's checkpoints is known.
    pub(crate) fn has_checkpoints(&self, namespace: &Namespace) -> bool {
        let first = key_at(
            namespace,
            HighMark {
                run: RunId::ZERO,
                step: Step::new(0),
            },
        );
        let mut later = self.checkpoints.range(first..);
        later
            .next()
            .is_some_and(|(key, _)| key.namespace == *namespace)
    }

    /// Takes what enough nodes say of the runs of a namespace.
    fn judge_runs(&mut self, namespace: &Namespace, owner: Owner) {
        let needed = self.words_needed();
        let most = self.most_told_by(needed, namespace);
        let Some(table) = self.namespaces.get(namespace) else {
            return;
        };
        let granted = table.granted;
        let words = || table.words.values();
        let is_near = |run: &RunId| run.number() <= most;
        let promised = agreed(words().filter_map(|word| word.promised), needed);
        let promised = promised.filter(is_near);
        let mut fence = agreed(words().filter_map(|word| word.fence), needed).filter(is_near);
        // A run that this node has promised itself, though it has promised a higher one since.
        let is_promised = |run: &RunId| {
            let is_below = table.promised_to.has(*run) && !planted!("lower_promises_are_lost");
            *run == granted || is_below
        };
        let opened = words().filter_map(|word| word.fence).filter(is_promised);
        fence = fence.max(opened.max());
        self.raise_fence(namespace, owner, fence.unwrap_or(RunId::ZERO));
        let table = self.namespace_table(namespace, owner);
        table.promised = table.promised.max(promised.unwrap_or(RunId::ZERO));
    }

    /// The highest number that counts of what so many say. While only one peer is up its word does, and must not use up what is left.
    fn most_told_by(&self, words: usize, namespace: &Namespace) -> u64 {
        if words >= limits::WORDS_NEEDED || planted!("the_only_peer_skips_far") {
            return limits::RUN_NUMBER_MAX;
        }
        let known = self.highest_number(namespace);
        known.saturating_add(limits::RUN_SKIP_MAX)
    }

    /// Whether a run has a number that may be given out.
    pub(crate) fn checks_run(&mut self, from: &NodeName, run: RunId) -> bool {
        let number = run.number();
        let is_one = number <= limits::RUN_NUMBER_MAX || planted!("runs_without_limit");
        if !is_one {
            self.is_false(from, FalseStatement::RunOutOfRange { number });
        }
        is_one
    }

    /// A peer asks for what is known of the runs of a job. That its token was changed comes before the answer, and whose the job is before
    /// that: a peer that has forgotten the job would let a trainer in by the token that was let go.
    pub(crate) fn fence_asked(&mut self, from: &NodeName, query: u64, namespace: &Namespace) {
        let fence = self.fence_record(namespace);
        if fence.is_some() && !self.what_to_tell(namespace).is_empty() {
            self.tell_owner(from, namespace);
        }
        self.send(from, PeerMessage::RunAnswer { query, fence });
    }

    /// Whose a job is, and by which token it is opened since.
    pub(super) fn tell_owner(&mut self, to: &NodeName, namespace: &Namespace) {
        let Some(fence) = self.fence_record(namespace) else {
            return;
        };
        self.send(to, PeerMessage::Fences(vec![fence]));
        let changes = self.what_to_tell(namespace);
        changes.into_iter().for_each(|told| self.send(to, told));
    }
}

impl Runs {
    /// A run was opened.
    pub(crate) fn fence_rises(
        &mut self,
        from: &NodeName,
        query: u64,
        opened: &NamedRun,
        cx: &mut Context,
    ) {
        if !cx.checks_run(from, opened.run) {
            return;
        }
        let is_its = cx.check_owner(&opened.namespace, opened.owner).is_ok();
        // Of another owner's run as well: what is known here may only have been promised.
        cx.learn_fence(
            from,
            Fence {
                namespace: opened.namespace.clone(),
                owner: opened.owner,
                run: opened.run,
                promised: opened.run,
            },
        );
        if is_its {
            cx.send(from, PeerMessage::FenceRaised { query });
        }
        self.advance_hellos(cx);
    }

    /// What a peer that has just come up may not know.
    pub(crate) fn greet(&mut self, node: &NodeName, cx: &mut Context) {
        let namespaces: Vec<Namespace> = cx.namespaces.keys().cloned().collect();
        let fences: Vec<Fence> = namespaces
            .iter()
            .filter_map(|namespace| cx.fence_record(namespace))
            .filter(|known| known.run.max(known.promised) > RunId::ZERO)
            .collect();
        for fences in fences.chunks(limits::FENCES_MAX) {
            cx.send(node, PeerMessage::Fences(fences.to_vec()));
        }
        self.withdraw_at(node, cx);
        self.advance_proposals(cx);
        self.hellos_ask(node, cx);
    }

    pub(crate) fn learn_fences(&mut self, from: &NodeName, fences: Vec<Fence>, cx: &mut Context) {
        for fence in fences {
            cx.learn_fence(from, fence);
        }
        self.advance_hellos(cx);
    }
}

/// The highest that so many say, or more.
fn agreed<T: Ord>(said: impl Iterator<Item = T>, needed: usize) -> Option<T> {
    let mut said: Vec<T> = said.collect();
    said.sort();
    let at = said.len().checked_sub(needed.max(1))?;
    said.into_iter().nth(at)
}

pub(crate) fn wrong_token(namespace: &Namespace) -> Refusal {
    Refusal::new(
        RefusalCode::WrongToken,
        format!(
            "namespace {namespace} belongs to another job token: set STORAGED_TOKEN to the token that opens it"
        ),
    )
}
