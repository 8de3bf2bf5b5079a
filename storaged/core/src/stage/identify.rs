//! Who says hello. A job is opened by its newest token, and belongs to its first. The record of a change is proved by the very token that
//! is said: a retired one has left its consent in it, the new one opens it. So a forged record is seen through, whoever tells it.

use std::collections::BTreeSet;

use storaged_wire::local::Role;
use storaged_wire::peer::{OrderKey, PeerMessage};
use storaged_wire::{
    ConsentKey, JobKeys, Namespace, NodeName, Owner, Refusal, RefusalCode, RunId, Succession,
};

use crate::api::{ConnId, DurablePolicy, Output, QueryId, Trust, Viewer};
use crate::context::Context;
use crate::place::wrong_token;
use crate::stage::TrainerHello;
use crate::successions::{
    EarlyHello, Greeting, SaidHello, SaidToken, SuccessionWait, WordOfChanges,
};

/// Who it is, and by which keys the durable tier is believed.
pub(super) struct Identity {
    pub owner: Owner,
    /// None for an operator whose node has none.
    pub keys: Option<JobKeys>,
    /// None for an operator who reads without the token that opens the job.
    pub said: Option<SaidToken>,
}

impl Context {
    /// Lets somebody in. Of a name that this node does not know the durable tier is asked first, and peers that are still to come after a
    /// start: the token may be its newest, and not that of its owner, or a retired one.
    pub(crate) fn greeted(&mut self, said: SaidHello) -> Result<Option<TrainerHello>, Refusal> {
        let namespace = self.viewer(said.id.conn).resolve(&said.namespace)?;
        let is_known = self.has_heard_of(&namespace);
        let without_tier = self.setup.durable == DurablePolicy::Absent;
        let all_have_told = self.settled();
        if is_known || without_tier && all_have_told {
            return self.hello(&said, &[], WordOfChanges::Heard);
        }
        let greeting = Greeting {
            said,
            namespace: namespace.clone(),
            since: self.now,
            found: without_tier.then(Vec::new),
            tier: if without_tier {
                WordOfChanges::Heard
            } else {
                WordOfChanges::Missing
            },
            waiting_for: BTreeSet::new(),
        };
        let errand = SuccessionWait::Hello(greeting);
        if without_tier {
            let query = QueryId(self.fresh());
            self.successions.errands.insert(query, errand);
        } else {
            self.find_successions(namespace, errand, None);
        }
        if !all_have_told {
            let peers: Vec<NodeName> = self.believed_peers().cloned().collect();
            peers.iter().for_each(|peer| self.greetings_ask(peer));
        }
        Ok(None)
    }

    /// Whether a run of a job was opened, as this node knows. What was only promised nobody has told more of.
    pub(crate) fn has_heard_of(&self, namespace: &Namespace) -> bool {
        self.fence_of(namespace) > RunId::ZERO
    }

    /// Asks a peer that has come up for what it knows of the jobs of hellos and requests that wait. What it tells of itself comes before its answer.
    pub(crate) fn greetings_ask(&mut self, node: &NodeName) {
        if !self.is_believed(node) {
            return;
        }
        let mut asked = Vec::new();
        for (query, namespace, waiting_for) in self.successions.awaiting_peers() {
            if waiting_for.insert(node.clone()) {
                asked.push((query.0, namespace.clone()));
            }
        }
        for (query, namespace) in asked {
            self.send(node, PeerMessage::RunQuery { query, namespace });
        }
    }

    /// Asks peers again that have not answered: the first question may have come before their end of the link was up.
    pub(crate) fn greetings_ask_again(&mut self) {
        let mut asked = Vec::new();
        for (query, namespace, waiting_for) in self.successions.awaiting_peers() {
            let silent = waiting_for.iter();
            asked.extend(silent.map(|node| (node.clone(), query.0, namespace.clone())));
        }
        for (node, query, namespace) in asked {
            self.send(&node, PeerMessage::RunQuery { query, namespace });
        }
    }

    /// A peer has answered a hello that waits.
    pub(crate) fn greeting_told(&mut self, from: &NodeName, query: QueryId) {
        let mut waiting = self.successions.awaiting_peers();
        if let Some((.., waiting_for)) = waiting.find(|(asked, ..)| *asked == query) {
            waiting_for.remove(from);
        }
    }

    /// A peer is gone, and answers nothing.
    pub(crate) fn greetings_forget(&mut self, node: &NodeName) {
        for (.., waiting_for) in self.successions.awaiting_peers() {
            waiting_for.remove(node);
        }
    }

    /// Hellos of which all have said what they know, or that have waited long enough. Of a job that peers know they say who opens it, as
    /// they say it of every job that this node knows: such a hello waits for no tier that hangs.
    pub(crate) fn take_greetings(&mut self) -> Vec<Greeting> {
        let (now, all_are_up) = (self.now, self.settled());
        let known = self.awaited_and_known();
        self.successions.take_greetings(|greeting| {
            let is_found = greeting.found.is_some() || known.contains(&greeting.namespace);
            let have_answered = is_found && greeting.waiting_for.is_empty();
            greeting.until() <= now || have_answered && all_are_up
        })
    }

    /// The jobs that hellos and requests wait for, of which peers have told meanwhile.
    pub(super) fn awaited_and_known(&self) -> BTreeSet<Namespace> {
        let awaited = self.successions.awaited_jobs();
        awaited
            .filter(|job| self.has_heard_of(job))
            .cloned()
            .collect()
    }

    pub(super) fn find_successions(
        &mut self,
        namespace: Namespace,
        errand: SuccessionWait,
        trust: Option<Trust>,
    ) {
        let query = QueryId(self.fresh());
        self.successions.errands.insert(query, errand);
        self.out.push(Output::FindSuccessions {
            query,
            namespace,
            trust,
        });
    }

    /// Whom a token speaks for; the durable tier has these records besides those that are known here.
    pub(super) fn identify(
        &mut self,
        conn: ConnId,
        namespace: &Namespace,
        token: &[u8],
        role: &Role,
        found: &[Succession],
    ) -> Result<Identity, Refusal> {
        let known = self.owner_of(namespace);
        let credential = Owner::of_token(token);
        let consent = ConsentKey::of_token(namespace, token);
        let orders = OrderKey::of_token(namespace, token);
        let said = SaidToken {
            credential,
            consent,
            orders,
        };
        let reads_all = *role == Role::Reader && self.viewer(conn) == Viewer::Operator;
        let mut candidates = self.successions_of(namespace, found);
        if self.adopts_what_retires(&candidates, said) {
            if !reads_all || known.is_none() {
                return Err(token_changed(namespace));
            }
            return Ok(self.reads_all(namespace, known.unwrap_or(credential)));
        }
        candidates.sort_by_key(|it| std::cmp::Reverse(it.number));
        for one in candidates {
            if let Ok(opened) = one.open(token)
                && self.may_follow(&one, |credential| opened.has_retired(credential))
            {
                let owner = one.owner;
                let orders = opened.order_key(namespace).unwrap_or(said.orders);
                let said = SaidToken { orders, ..said };
                self.adopt_succession(one);
                let (keys, said) = (Some(opened.keys), Some(said));
                return Ok(Identity { owner, keys, said });
            }
        }
        let is_first = known.is_none_or(|owner| owner == credential);
        if reads_all && !is_first {
            return Ok(self.reads_all(namespace, known.unwrap_or(credential)));
        }
        if !is_first {
            return Err(wrong_token(namespace));
        }
        // The owner's own token has let it go to nobody: whatever says so was forged.
        if known.is_some() {
            self.successions.forget_job(namespace);
        }
        Ok(Identity {
            owner: credential,
            keys: Some(JobKeys::of_token(namespace, token)),
            said: Some(said),
        })
    }

    /// Whom an early hello speaks for, now that the job is known. The refusal is that of who is a stranger all the same.
    pub(super) fn identify_again(
        &mut self,
        conn: ConnId,
        namespace: &Namespace,
        early: &EarlyHello,
    ) -> Result<(Owner, Option<SaidToken>), Refusal> {
        let identity = self.identify(conn, namespace, &early.token, &early.role, &[])?;
        self.keys_said(conn, namespace, &identity);
        Ok((identity.owner, identity.said))
    }

    /// Whether a token that was said a while ago was let go meanwhile, as the record of the change itself proves.
    pub(crate) fn check_not_retired(
        &mut self,
        namespace: &Namespace,
        said: Option<SaidToken>,
    ) -> Result<(), Refusal> {
        let Some(said) = said.filter(|_| !planted!("retired_tokens_wait_for_new_runs")) else {
            return Ok(());
        };
        let known = self.successions_of(namespace, &[]);
        if self.adopts_what_retires(&known, said) {
            return Err(token_changed(namespace));
        }
        Ok(())
    }

    /// Whether one of these records lets the token go that was said, which proves it.
    fn adopts_what_retires(&mut self, records: &[Succession], said: SaidToken) -> bool {
        let by = records.iter().find(|it| it.retires(&said.consent));
        if let Some(by) = by {
            self.adopt_if_it_follows(by.clone(), said);
        }
        by.is_some()
    }

    /// An operator reads in the owner's name, by whichever token he says.
    fn reads_all(&self, namespace: &Namespace, owner: Owner) -> Identity {
        Identity {
            owner,
            keys: self.keys.of_job(namespace).cloned(),
            said: None,
        }
    }

    fn successions_of(&self, namespace: &Namespace, found: &[Succession]) -> Vec<Succession> {
        let known = self.owner_of(namespace);
        let all = self.successions.candidates(namespace).chain(found);
        let of_it = all.filter(|it| it.namespace == *namespace);
        let of_it = of_it.filter(|it| known.is_none_or(|owner| owner == it.owner));
        of_it.cloned().collect()
    }

    /// Whether a record may take the place of what holds: it comes later, and from who had the token that opens the job here. Anybody can
    /// consent in a token of his own.
    fn may_follow(&self, one: &Succession, comes_from: impl Fn(Owner) -> bool) -> bool {
        if planted!("lower_succession_counts") {
            return true;
        }
        let before = self.successions.proven(&one.namespace);
        let opens = before.map_or(one.owner, |before| before.credential);
        let is_later = before.is_none_or(|before| one.number > before.number);
        before == Some(one) || is_later && comes_from(opens)
    }

    /// By a token that was said here, and has been let go in it.
    pub(super) fn adopt_if_it_follows(&mut self, one: Succession, by: SaidToken) {
        if !one.retires(&by.consent) {
            return;
        }
        let had = |credential| credential == by.credential;
        let is_known = self.owner_of(&one.namespace) == Some(one.owner);
        if is_known && self.may_follow(&one, had) {
            self.adopt_succession(one);
        }
    }

    /// A record holds from now on.
    pub(super) fn adopt_succession(&mut self, succession: Succession) {
        let namespace = succession.namespace.clone();
        if self.successions.proven(&namespace) == Some(&succession) {
            return;
        }
        let keys = self.keys.of_job(&namespace);
        if keys.is_some_and(|keys| !succession.is_under(&keys.newest)) {
            self.keys.jobs.remove(&namespace);
        }
        self.keys.asked.remove(&namespace);
        self.successions.prove(succession);
        self.keeping.touch_job(&namespace);
    }
}

pub(super) fn token_changed(namespace: &Namespace) -> Refusal {
    Refusal::new(
        RefusalCode::WrongToken,
        format!(
            "the token of {namespace} was changed for another one: use the new one (STORAGED_TOKEN_FILE)"
        ),
    )
}
