//! A job's token is changed for another one. Whoever holds the one that opens the job brings the record; where there is a durable tier it is
//! written there first, and the peers are told. Trainers that are connected by a retired token go on with what they save; whatever else is
//! asked by one is refused.

use storaged_wire::local::{Reply, Request};
use storaged_wire::peer::{HighMark, PeerMessage};
use storaged_wire::succession::{RecordSource, Rotated, SUCCESSIONS_MAX, TokenStanding};
use storaged_wire::{
    JobKeys, KeptNamespace, Namespace, NodeName, Refusal, RefusalCode, Rotation, Succession,
};

use super::identify::token_changed;
use crate::api::{
    ConnId, DurableFault, DurablePolicy, FoundSuccessions, Output, QueryId, RequestId,
    SuccessionFault,
};
use crate::catalog::Attached;
use crate::context::Context;
use crate::place::wrong_token;
use crate::successions::{LateWord, SaidToken, SuccessionWait, WordOfChanges};
use crate::trickle::durable_unavailable;

/// Whether a trainer may ask for this whose token was changed while it was connected.
fn only_goes_on(request: &Request) -> bool {
    matches!(
        request,
        Request::Hello { .. }
            | Request::AcquireSlot { .. }
            | Request::SealSlot { .. }
            | Request::ReleaseSlot { .. }
            | Request::Board { .. }
            | Request::Commit { .. }
            | Request::Wait { .. }
            | Request::FollowShard { .. }
            | Request::CloseShard { .. }
            | Request::Status
            | Request::List { .. }
            | Request::RestartSafe { .. }
            | Request::Drain(_)
    )
}

/// Whether it is about the job of who asks, other than giving something back.
pub(super) fn is_of_job(request: &Request) -> bool {
    !matches!(
        request,
        Request::Hello { .. }
            | Request::ReleaseSlot { .. }
            | Request::CloseShard { .. }
            | Request::Status
            | Request::List { .. }
            | Request::RestartSafe { .. }
            | Request::Drain(_)
    )
}

impl Context {
    /// Whether a connection may ask for this: by a token that was changed since it said hello nothing new is begun.
    pub(crate) fn check_goes_on(
        &mut self,
        id: RequestId,
        request: &Request,
    ) -> Result<(), Refusal> {
        if is_of_job(request) && !planted!("owner_asked_at_hello_alone") {
            self.check_asker(id.conn)?;
        }
        if only_goes_on(request) {
            return Ok(());
        }
        self.check_token_current(id.conn)
    }

    /// Who said hello while nobody had opened the job was asked for no other token than its own: it may be no owner, or have said the
    /// newest token when the record of its change could not be read.
    pub(crate) fn check_asker(&mut self, conn: ConnId) -> Result<(), Refusal> {
        let Some(attached) = self.conns.get(&conn) else {
            return Ok(());
        };
        let namespace = attached.namespace.clone();
        let Err(refusal) = self.check_owner(&namespace, attached.owner) else {
            return Ok(());
        };
        let early = attached.early.clone().ok_or(refusal)?;
        let (owner, said) = self.identify_again(conn, &namespace, &early)?;
        if let Some(attached) = self.conns.get_mut(&conn) {
            (attached.owner, attached.said) = (owner, said);
        }
        Ok(())
    }

    /// Whether the token by which somebody is connected was not changed since.
    pub(crate) fn check_token_current(&self, conn: ConnId) -> Result<(), Refusal> {
        let Some(attached) = self.conns.get(&conn) else {
            return Ok(());
        };
        let proven = self.successions.proven(&attached.namespace);
        match proven.zip(attached.said) {
            Some((it, said)) if it.retires(&said.consent) => {
                Err(token_changed(&attached.namespace))
            }
            _ => Ok(()),
        }
    }

    /// By which token somebody is connected.
    pub(crate) fn token_of(&self, conn: ConnId) -> Option<SaidToken> {
        self.conns.get(&conn)?.said
    }

    /// By which token a job is opened, and what is durable: what the record of a change needs.
    pub(crate) fn standing_of_token(&mut self, id: RequestId) -> Result<(), Refusal> {
        let attached = self.attached(id)?.clone();
        if self.setup.durable == DurablePolicy::Absent {
            self.say_standing(id, None);
            return Ok(());
        }
        let trust = self.trust_of(id.conn, attached.owner);
        self.find_successions(
            attached.namespace,
            SuccessionWait::Standing(id),
            Some(trust),
        );
        Ok(())
    }

    fn say_standing(&mut self, id: RequestId, durable: Option<HighMark>) {
        let Ok(attached) = self.attached(id) else {
            return;
        };
        let namespace = attached.namespace.clone();
        let succession = self.successions.proven(&namespace).cloned();
        let standing = TokenStanding {
            namespace,
            succession,
            durable,
        };
        self.reply(id, Reply::Succession(standing));
    }

    /// The durable tier has answered.
    pub(crate) fn successions_found(
        &mut self,
        query: QueryId,
        outcome: Result<FoundSuccessions, DurableFault>,
    ) {
        self.tier_answered(outcome.as_ref().err());
        match self.successions.errands.remove(&query) {
            Some(SuccessionWait::Hello(mut greeting)) => {
                if outcome.is_ok() || planted!("silent_tiers_change_no_tokens") {
                    greeting.tier = WordOfChanges::Heard;
                }
                greeting.found = Some(outcome.map_or(Vec::new(), |it| it.records));
                let errand = SuccessionWait::Hello(greeting);
                self.successions.errands.insert(query, errand);
            }
            Some(SuccessionWait::Request(mut held)) => {
                held.word = match outcome {
                    Ok(found) => LateWord::Found(found.records),
                    Err(fault) => LateWord::Failed(fault),
                };
                let errand = SuccessionWait::Request(held);
                self.successions.errands.insert(query, errand);
            }
            Some(SuccessionWait::Standing(id)) => self.standing_found(id, outcome),
            Some(SuccessionWait::Publication(namespace)) => {
                if let Ok(found) = outcome {
                    self.key_is_retired(&namespace, &found.records);
                }
            }
            Some(SuccessionWait::Rotation(..)) | None => {}
        }
    }

    fn standing_found(&mut self, id: RequestId, outcome: Result<FoundSuccessions, DurableFault>) {
        let Some(attached) = self.conns.get(&id.conn).cloned() else {
            return;
        };
        let Attached { namespace, .. } = attached;
        let found = match outcome {
            Ok(found) => found,
            Err(fault) => {
                let refusal = durable_unavailable(&namespace, &fault);
                return self.reply(id, Reply::Refused(refusal));
            }
        };
        self.learn(id, &namespace, found.records);
        if let Err(refusal) = self.check_goes_on(id, &Request::Succession) {
            return self.reply(id, Reply::Refused(refusal));
        }
        let newest = found.newest.map(|it| it.mark());
        self.say_standing(id, newest);
    }

    /// What the tier has counts if whoever asks has the token that was let go in it.
    fn learn(&mut self, id: RequestId, namespace: &Namespace, mut records: Vec<Succession>) {
        let Some(said) = self.token_of(id.conn) else {
            return;
        };
        records.retain(|it| it.namespace == *namespace && it.retires(&said.consent));
        records.sort_by_key(|it| it.number);
        if let Some(newest) = records.pop() {
            self.adopt_if_it_follows(newest.clone(), said);
            self.note_found(newest);
        }
    }

    /// The tier says that the key by which this node publishes is no longer the newest: peers are asked for another one.
    fn key_is_retired(&mut self, namespace: &Namespace, records: &[Succession]) {
        let known = self.keys.of_job(namespace).map(|keys| keys.newest);
        if let Some(key) = known.filter(|key| records.iter().any(|it| it.retires_key(key))) {
            self.keys.jobs.remove(namespace);
            self.keys.retired.insert(namespace.clone(), key);
            self.keeping.touch_job(namespace);
        }
        let of_it = records.iter().filter(|it| it.namespace == *namespace);
        let Some(newest) = of_it.max_by_key(|it| it.number).cloned() else {
            return;
        };
        self.adopt_by_connected(&newest);
        self.note_found(newest);
    }

    /// The tier has a record that whoever made it may have told to nobody. A token that is said proves it, here or at a peer.
    fn note_found(&mut self, succession: Succession) {
        self.send_all(&self.as_told(RecordSource::Own, succession.clone()));
        if self.successions.proven(&succession.namespace) != Some(&succession) {
            let me = self.me().clone();
            self.successions.note_told(&me, succession);
        }
    }

    /// The key by which this node publishes is no longer the newest.
    pub(crate) fn learn_of_successions(&mut self, namespace: &Namespace) {
        let errand = SuccessionWait::Publication(namespace.clone());
        self.find_successions(namespace.clone(), errand, None);
    }

    /// Whoever holds the token that opens the job gives it to another one.
    pub(crate) fn rotate(&mut self, id: RequestId, rotation: Rotation) -> Result<(), Refusal> {
        let attached = self.attached(id)?.clone();
        let keys = self.keys.said.get(&id.conn);
        let Some((said, keys)) = attached.said.zip(keys) else {
            return Err(wrong_token(&attached.namespace));
        };
        let retired = keys.keys.newest;
        let Rotation { succession, .. } = &rotation;
        let is_agreed = succession.retires(&said.consent) && succession.retires_key(&retired);
        self.check_rotation(&attached, &rotation)
            .filter(|()| is_agreed)
            .ok_or_else(|| not_the_next(&attached.namespace))?;
        if self.owner_of(&attached.namespace).is_none() {
            return Err(unknown(&attached.namespace));
        }
        if self.setup.durable == DurablePolicy::Absent {
            self.rotated(id, rotation.succession, rotation.keys);
            return Ok(());
        }
        // It goes on when its client has gone: one of a job is kept at a time.
        if self.successions.is_rotating(&attached.namespace) {
            return Err(under_way(&attached.namespace));
        }
        let query = QueryId(self.fresh());
        let errand = SuccessionWait::Rotation(id, Box::new(rotation.clone()));
        self.successions.errands.insert(query, errand);
        self.out.push(Output::Succeed {
            query,
            rotation,
            retired,
        });
        Ok(())
    }

    fn check_rotation(&self, attached: &Attached, rotation: &Rotation) -> Option<()> {
        let Rotation { succession, keys } = rotation;
        let before = self.successions.proven(&attached.namespace);
        let number = before.map_or(1, |it| it.number.saturating_add(1));
        let is_its =
            succession.namespace == attached.namespace && succession.owner == attached.owner;
        let is_next = succession.number == number && number <= SUCCESSIONS_MAX;
        let is_next = is_next && succession.is_of_its_length();
        let has_keys = succession.is_under(&keys.newest) && keys.retired.len() == number as usize;
        (is_its && is_next && has_keys).then_some(())
    }

    /// The durable tier has the record, or another one, or took none.
    pub(crate) fn succeeded(
        &mut self,
        query: QueryId,
        outcome: Result<Box<Succession>, SuccessionFault>,
    ) {
        if let Err(SuccessionFault::Durable(fault)) = &outcome {
            self.tier_answered(Some(fault));
        }
        let Some(SuccessionWait::Rotation(id, rotation)) = self.successions.errands.remove(&query)
        else {
            return;
        };
        let namespace = rotation.succession.namespace.clone();
        let refusal = match outcome {
            Ok(succession) => return self.rotated(id, *succession, rotation.keys),
            Err(SuccessionFault::WrongOwner) => wrong_token(&namespace),
            Err(SuccessionFault::Another(other)) => {
                self.learn(id, &namespace, vec![*other]);
                token_changed(&namespace)
            }
            Err(SuccessionFault::Durable(fault)) => not_taken(&namespace, &fault),
        };
        self.reply(id, Reply::Refused(refusal));
    }

    fn rotated(&mut self, id: RequestId, succession: Succession, keys: JobKeys) {
        let namespace = succession.namespace.clone();
        self.adopt_succession(succession.clone());
        if succession.is_under(&keys.newest) {
            self.set_keys(&namespace, keys.clone());
        }
        self.send_all(&PeerMessage::Rotated(Box::new(Rotated {
            succession,
            keys: Some(keys),
            source: Some(RecordSource::Own),
        })));
        self.reply(id, Reply::Done);
        self.start_publishing();
    }

    /// What is known of changes, to a peer whose link is up now: also what this node was only told. A job whose token was changed while nobody was
    /// connected elsewhere has its record proved at one node; were that to lose it, the token that was let go would open the job there.
    pub(crate) fn tell_successions(&mut self, node: &NodeName) {
        for namespace in self.successions.jobs() {
            for told in self.what_to_tell(&namespace) {
                self.send(node, told);
            }
        }
    }

    /// The same of a job of which peers hear now: they may have lost their memory.
    pub(crate) fn tell_succession_of(&mut self, namespace: &Namespace) {
        for told in self.what_to_tell(namespace) {
            self.send_all(&told);
        }
    }

    pub(crate) fn what_to_tell(&self, namespace: &Namespace) -> Vec<PeerMessage> {
        let all = self.successions.to_tell(namespace).into_iter();
        let all = all.filter(|(source, _)| {
            *source == RecordSource::Own || !planted!("told_changes_stay_untold")
        });
        all.map(|(source, it)| self.as_told(source, it)).collect()
    }

    fn as_told(&self, source: RecordSource, succession: Succession) -> PeerMessage {
        let keys = self.keys.of_job(&succession.namespace).cloned();
        let keys = keys.filter(|keys| succession.is_under(&keys.newest));
        PeerMessage::Rotated(Box::new(Rotated {
            succession,
            keys,
            source: Some(source),
        }))
    }

    /// A peer says that a token was changed. It holds here if somebody who is connected has said the token that was let go in it; else
    /// it waits for a hello that proves it.
    pub(super) fn rotated_told(&mut self, from: &NodeName, rotated: Rotated) {
        let Rotated {
            succession,
            keys,
            source,
        } = rotated;
        let namespace = succession.namespace.clone();
        // Of a job that this node has forgotten the first peer that is asked tells alone whose it is.
        let is_its = self.told_owner_of(&namespace) == Some(succession.owner);
        if !is_its || !succession.is_of_its_length() {
            return;
        }
        self.adopt_by_connected(&succession);
        let proven = self.successions.proven(&namespace);
        if proven == Some(&succession) {
            if let Some(keys) = keys.filter(|keys| succession.is_under(&keys.newest)) {
                self.set_keys(&namespace, keys);
                self.start_publishing();
            }
        } else if proven.is_none_or(|it| it.number < succession.number) {
            match source {
                Some(RecordSource::Told) => self.successions.note_passed_on(succession),
                Some(RecordSource::Own) | None => self.successions.note_told(from, succession),
            }
        }
    }

    /// Somebody who is connected may have said the token that was let go.
    fn adopt_by_connected(&mut self, succession: &Succession) {
        let of_it = self.conns.values();
        let of_it = of_it.filter(|it| it.namespace == succession.namespace);
        let said: Vec<SaidToken> = of_it.filter_map(|it| it.said).collect();
        for said in said {
            self.adopt_if_it_follows(succession.clone(), said);
        }
    }

    /// An earlier daemon of this node knew it.
    pub(crate) fn recover_succession(&mut self, job: &KeptNamespace) {
        if let Some(succession) = job.succession.clone()
            && !planted!("successions_end_with_the_daemon")
        {
            self.successions.prove(*succession);
        }
    }

    /// A connection is gone. Of a job that this node does not know nothing stays when nobody reads it.
    pub(super) fn forget_successions_of(&mut self, conn: ConnId, attached: Option<Attached>) {
        self.successions.forget(conn);
        let Some(Attached { namespace, .. }) = attached else {
            return;
        };
        let is_read = self.conns.values().any(|it| it.namespace == namespace);
        if !self.namespaces.contains_key(&namespace) && !is_read {
            self.successions.forget_job(&namespace);
        }
    }
}

fn not_the_next(namespace: &Namespace) -> Refusal {
    Refusal::new(
        RefusalCode::Malformed,
        format!(
            "expected the next change of the token of {namespace}, agreed to by who holds the one that opens it, got another record: ask for what holds now, and make a new one"
        ),
    )
}

fn under_way(namespace: &Namespace) -> Refusal {
    Refusal::new(
        RefusalCode::Busy,
        format!(
            "expected no other change of the token of {namespace} to wait for the durable tier, got one that does: try again with the same new token when that answers"
        ),
    )
}

fn not_taken(namespace: &Namespace, fault: &DurableFault) -> Refusal {
    Refusal::new(
        RefusalCode::DurableUnavailable,
        format!(
            "expected the durable tier to take the change of the token of {namespace}, got: {fault}; it may have taken it: keep both tokens, and try again with the same new one when it answers"
        ),
    )
}

fn unknown(namespace: &Namespace) -> Refusal {
    Refusal::new(
        RefusalCode::UnknownNamespace,
        format!(
            "expected a job that this node knows, got {namespace}: ask a node on which it trains, or after it has opened a run"
        ),
    )
}
