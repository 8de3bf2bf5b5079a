//! A run of a job that this node does not know, or has forgotten. Peers are asked before anything is promised: they tell whose the job is
//! and by which token it is opened since. Promised in the name of the newest token itself, the job would be another one's here for good.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::peer::PeerMessage;
use storaged_wire::{Namespace, NodeName, Refusal};

use super::fence::wrong_token;
use super::proposal::Phase;
use crate::api::{DurablePolicy, Now, QueryId, RunAuthority};
use crate::context::Context;
use crate::limits;
use crate::place::Runs;

/// Whom a proposal has asked, and when first.
#[derive(Debug, Clone)]
pub(super) struct Asking {
    begun: Now,
    asked: BTreeMap<NodeName, Now>,
    answered: BTreeSet<NodeName>,
}

/// Whether whoever asks for a run is the owner of the job, as far as anybody has told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WordOfOwner {
    Agrees,
    /// One peer says otherwise, at least: who is silent may say so too, and the two count.
    Differs,
}

impl Asking {
    fn waits(&self) -> impl Iterator<Item = Now> {
        let silent = self.asked.iter();
        let silent = silent.filter(|(node, _)| !self.answered.contains(*node));
        let since = silent.map(|(_, asked)| *asked).chain([self.begun]);
        since.map(|since| since.plus(limits::CHANGE_WAIT_MS))
    }

    /// Then it waits for nobody who is silent: a peer whose link comes and goes would hold it up for good.
    fn ends(&self) -> Now {
        self.begun.plus(limits::PROMISE_MAX_MS)
    }

    /// When it goes on without having heard anything.
    pub fn wakes(&self, now: Now) -> Now {
        let later = self.waits().chain([self.ends()]);
        later.filter(|at| *at > now).min().unwrap_or(now)
    }

    /// Whether whoever is up has said what it knows, or has had time to. A node that hears from few does not promise in a name that the
    /// others may know: without them the run would not be opened, unless the tier or the registry gives it.
    fn is_over(&self, word: WordOfOwner, cx: &Context) -> bool {
        let have_had_time = self.waits().all(|at| at <= cx.now) && word == WordOfOwner::Agrees;
        let have_answered = have_had_time
            || self.ends() <= cx.now
            || cx.believed_peers().all(|peer| self.answered.contains(peer));
        let is_given = cx.setup.durable != DurablePolicy::Absent
            || cx.setup.run_authority == RunAuthority::Registry;
        let enough_told = self.answered.len() + 1 >= cx.majority();
        let is_late = self.begun.plus(limits::CHANGE_WAIT_MS) <= cx.now;
        cx.settled() && have_answered && (enough_told || is_late && is_given)
    }

    /// Peers to ask now.
    fn asks<'a>(&mut self, peers: impl Iterator<Item = &'a NodeName>, now: Now) -> Vec<NodeName> {
        let new = peers.filter(|it| !self.asked.contains_key(*it));
        let new: Vec<NodeName> = new.cloned().collect();
        self.asked.extend(new.iter().map(|it| (it.clone(), now)));
        new
    }

    /// A peer is gone, and is asked again when it comes back.
    pub fn forget_peer(&mut self, node: &NodeName) {
        self.asked.remove(node);
        self.answered.remove(node);
    }

    /// Peers that are silent: the first question may have come before their end of the link was up.
    fn silent(&self) -> Vec<NodeName> {
        let asked = self.asked.keys();
        asked
            .filter(|it| !self.answered.contains(*it))
            .cloned()
            .collect()
    }
}

impl Runs {
    pub(super) fn ask_first(&mut self, query: QueryId, cx: &Context) {
        if let Some(proposal) = self.proposals.get_mut(&query) {
            proposal.phase = Phase::Asking(Asking {
                begun: cx.now,
                asked: BTreeMap::new(),
                answered: BTreeSet::new(),
            });
        }
    }

    /// Asks whoever is up, and goes on once all have answered.
    pub(super) fn judge_asking(&mut self, query: QueryId, cx: &mut Context) {
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        let Phase::Asking(asking) = &mut proposal.phase else {
            return;
        };
        let asked = asking.asks(cx.believed_peers(), cx.now);
        send_query(&asked, query, &proposal.namespace, cx);
        let told = cx.told_owner_of(&proposal.namespace);
        let word = match told.filter(|owner| *owner != proposal.owner) {
            Some(_) => WordOfOwner::Differs,
            None => WordOfOwner::Agrees,
        };
        if !asking.is_over(word, cx) {
            return;
        }
        let outcome = self.identify_again(query, cx);
        match outcome.and_then(|()| self.goes_above(query, cx)) {
            Ok(()) => self.begin_proposal(query, cx),
            Err(refusal) => self.refuse_run(query, refusal, cx),
        }
    }

    /// In whose name a run is promised, as is known by now.
    pub(super) fn identify_again(
        &mut self,
        query: QueryId,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return Ok(());
        };
        let conn = proposal.id.conn;
        cx.check_asker(conn)?;
        cx.check_token_current(conn)?;
        let attached = cx.attached(proposal.id)?;
        // It has said hello to another one since, or reads in the owner's name alone.
        if attached.namespace != proposal.namespace || !attached.opens_runs() {
            return Err(wrong_token(&proposal.namespace));
        }
        let (namespace, said) = (attached.namespace.clone(), attached.said);
        proposal.owner = attached.owner;
        cx.check_not_retired(&namespace, said)
    }

    /// Asks again who has not answered.
    pub(super) fn ask_silent(&self, cx: &mut Context) {
        for (query, proposal) in &self.proposals {
            if let Phase::Asking(asking) = &proposal.phase {
                send_query(&asking.silent(), *query, &proposal.namespace, cx);
            }
        }
    }

    /// A peer has answered; what it knows it has told before.
    pub(super) fn asking_told(&mut self, from: &NodeName, query: QueryId, cx: &mut Context) {
        let asking = self.proposals.get_mut(&query).map(|it| &mut it.phase);
        if let Some(Phase::Asking(asking)) = asking {
            asking.answered.insert(from.clone());
            self.advance_proposal(query, cx);
        }
    }
}

fn send_query(peers: &[NodeName], query: QueryId, namespace: &Namespace, cx: &mut Context) {
    for peer in peers {
        let (query, namespace) = (query.0, namespace.clone());
        cx.send(peer, PeerMessage::RunQuery { query, namespace });
    }
}
