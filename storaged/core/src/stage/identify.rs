//! Who says hello. A job is opened by its newest token, and belongs to its first. The record of a change is proved by the very token that
//! is said: a retired one has left its consent in it, the new one opens it. So a forged record is seen through, whoever tells it.

use storaged_wire::local::Role;
use storaged_wire::{
    ConsentKey, JobKeys, Namespace, Owner, Refusal, RefusalCode, RunId, Succession,
};

use crate::api::{ConnId, DurablePolicy, Output, QueryId, Trust, Viewer};
use crate::context::Context;
use crate::limits;
use crate::place::wrong_token;
use crate::stage::TrainerHello;
use crate::successions::{SaidHello, SaidToken, SuccessionWait};

/// Who it is, and by which keys the durable tier is believed.
pub(super) struct Identity {
    pub owner: Owner,
    /// None for an operator whose node has none.
    pub keys: Option<JobKeys>,
}

impl Context {
    /// Lets somebody in. Of a name that this node does not know the durable tier is asked first: the token may be its newest, and not that
    /// of its owner.
    pub(crate) fn greeted(&mut self, said: SaidHello) -> Result<Option<TrainerHello>, Refusal> {
        let namespace = self.viewer(said.id.conn).resolve(&said.namespace)?;
        // What was only promised nobody has told more of.
        let is_known = self.fence_of(&namespace) > RunId::ZERO;
        if is_known || self.setup.durable == DurablePolicy::Absent {
            return self.hello(&said, &[]);
        }
        let until = self.now.plus(limits::SUCCESSION_WAIT_MS);
        let errand = SuccessionWait::Hello { said, until };
        self.find_successions(namespace, errand, None);
        Ok(None)
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
        let said = SaidToken {
            credential,
            consent,
        };
        let reads_all = *role == Role::Reader && self.viewer(conn) == Viewer::Operator;
        let mut candidates = self.successions_of(namespace, found);
        if let Some(by) = candidates.iter().find(|it| it.retires(&consent)) {
            self.adopt_if_it_follows(by.clone(), said);
            if !reads_all {
                return Err(token_changed(namespace));
            }
        }
        candidates.sort_by_key(|it| std::cmp::Reverse(it.number));
        for one in candidates {
            if let Ok(opened) = one.open(token)
                && self.may_follow(&one, |before| opened.has_retired(before.credential))
            {
                let owner = one.owner;
                self.adopt_succession(one);
                self.successions.said.insert(conn, said);
                let keys = Some(opened.keys);
                return Ok(Identity { owner, keys });
            }
        }
        let is_first = known.is_none_or(|owner| owner == credential);
        if reads_all && !is_first {
            let owner = known.unwrap_or(credential);
            let keys = self.keys.of_job(namespace).cloned();
            return Ok(Identity { owner, keys });
        }
        if !is_first {
            return Err(wrong_token(namespace));
        }
        // The owner's own token has let it go to nobody: whatever says so was forged.
        if known.is_some() {
            self.successions.forget_job(namespace);
        }
        self.successions.said.insert(conn, said);
        Ok(Identity {
            owner: credential,
            keys: Some(JobKeys::of_token(namespace, token)),
        })
    }

    fn successions_of(&self, namespace: &Namespace, found: &[Succession]) -> Vec<Succession> {
        let known = self.owner_of(namespace);
        let all = self.successions.candidates(namespace).chain(found);
        let of_it = all.filter(|it| it.namespace == *namespace);
        let of_it = of_it.filter(|it| known.is_none_or(|owner| owner == it.owner));
        of_it.cloned().collect()
    }

    /// Whether a record may take the place of the one that holds: it comes later, and from who had that one's token.
    fn may_follow(&self, one: &Succession, comes_from: impl Fn(&Succession) -> bool) -> bool {
        let Some(before) = self.successions.proven(&one.namespace) else {
            return true;
        };
        if planted!("lower_succession_counts") {
            return true;
        }
        let is_later = one.number > before.number;
        *one == *before || is_later && comes_from(before)
    }

    /// By a token that was said here, and has been let go in it.
    pub(super) fn adopt_if_it_follows(&mut self, one: Succession, by: SaidToken) {
        if !one.retires(&by.consent) {
            return;
        }
        let had = |before: &Succession| before.credential == by.credential;
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
