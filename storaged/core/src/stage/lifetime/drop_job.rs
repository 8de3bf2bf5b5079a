//! `storaged drop`: a job's checkpoints leave the RAM of all nodes because somebody says so. What is in the durable tier
//! stays. A job with trainers is not dropped unless that is said too. Nodes do so for who has the job's token (`order_proof`).

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::local::{DropReport, DroppedNode, Reply};
use storaged_wire::peer::{DropAnswer, DropOrder, PeerMessage};
use storaged_wire::{Namespace, NodeName, Refusal, RefusalCode};

use super::evict::Freed;
use super::order_proof::OrderChecks;
use crate::api::{ConnId, Now, QueryId, RequestId};
use crate::context::Context;

/// Whether trainers of a job keep it from being dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trainers {
    Heeded,
    Ignored,
}

/// A job being dropped everywhere.
#[derive(Debug)]
pub(crate) struct DropWork {
    id: RequestId,
    namespace: Namespace,
    pub deadline: Now,
    asked: BTreeSet<NodeName>,
    answers: BTreeMap<NodeName, DropAnswer>,
}

/// Jobs being dropped because somebody here said so, and orders of others that this node cannot check itself.
#[derive(Debug, Default)]
pub(crate) struct Drops {
    drops: BTreeMap<QueryId, DropWork>,
    checks: OrderChecks,
}

impl Drops {
    /// When one of them must be looked at again.
    pub fn deadlines(&self) -> impl Iterator<Item = Now> {
        let checks = self.checks.deadlines();
        self.drops.values().map(|work| work.deadline).chain(checks)
    }

    /// Hears a message about jobs that are dropped; any other comes back.
    pub fn hear(
        &mut self,
        from: &NodeName,
        message: PeerMessage,
        cx: &mut Context,
    ) -> Option<PeerMessage> {
        match message {
            PeerMessage::Drop(order) => self.checks.take_up(from, order, cx),
            PeerMessage::CheckOrder { query, order } => {
                let is_proven = cx.has_proof_of(&order);
                cx.send(from, PeerMessage::OrderChecked { query, is_proven });
            }
            PeerMessage::OrderChecked { query, is_proven } => {
                let query = QueryId(query);
                if is_proven {
                    self.checks.proven_by(from, query, cx);
                } else {
                    self.checks.unproven_by(from, query, cx);
                }
            }
            PeerMessage::Dropped { query, answer } => {
                self.dropped_told(from, QueryId(query), answer, cx);
            }
            other => return Some(other),
        }
        None
    }

    /// Requests, of others too, that have not been answered.
    pub fn unanswered(&self) -> usize {
        self.drops.len() + self.checks.unanswered()
    }

    pub(crate) fn drop_job(
        &mut self,
        id: RequestId,
        trainers: Trainers,
        timeout_ms: u32,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        let attached = cx.attached(id)?.clone();
        let nodes = cx.nodes_attached(&attached.namespace);
        let force = trainers == Trainers::Ignored;
        if !force && !nodes.is_empty() {
            return Err(in_use(&attached.namespace, &nodes));
        }
        if !force {
            cx.check_unpinned(&attached.namespace)?;
        }
        let query = QueryId(cx.fresh());
        let said = attached.said.map(|said| said.orders);
        let order = DropOrder {
            query: query.0,
            namespace: attached.namespace.clone(),
            owner: attached.owner,
            force,
            proof: None,
        };
        let order = cx.proven(order, said);
        if !force && order.proof.is_none() && !cx.peers.is_empty() {
            return Err(unproven(&order.namespace));
        }
        let mut asked: BTreeSet<NodeName> = cx.peers.keys().cloned().collect();
        asked.insert(cx.me().clone());
        let work = DropWork {
            id,
            namespace: attached.namespace,
            deadline: cx.answer_by(timeout_ms),
            asked: asked.clone(),
            answers: BTreeMap::new(),
        };
        self.drops.insert(query, work);
        for node in asked {
            cx.send(&node, PeerMessage::Drop(order.clone()));
        }
        Ok(())
    }

    fn dropped_told(
        &mut self,
        from: &NodeName,
        query: QueryId,
        answer: DropAnswer,
        cx: &mut Context,
    ) {
        let Some(work) = self.drops.get_mut(&query) else {
            return;
        };
        work.answers.insert(from.clone(), answer);
        self.advance_drops(cx);
    }

    /// Answers those whose nodes have all answered or gone down, or whose time is over.
    pub(crate) fn advance_drops(&mut self, cx: &mut Context) {
        self.checks.end(cx);
        let over = |work: &DropWork| {
            let mut silent = work
                .asked
                .iter()
                .filter(|node| !work.answers.contains_key(*node));
            work.deadline <= cx.now || silent.all(|node| !cx.is_up(node))
        };
        let drops = self.drops.iter();
        let over: Vec<QueryId> = drops
            .filter(|(_, work)| over(work))
            .map(|(query, _)| *query)
            .collect();
        for query in over {
            if let Some(work) = self.drops.remove(&query) {
                let report = cx.drop_report(&work);
                cx.reply(work.id, Reply::Dropped(report));
            }
        }
    }

    pub(crate) fn forget_drops(&mut self, conn: ConnId) {
        self.drops.retain(|_, work| work.id.conn != conn);
    }
}

impl Context {
    /// Drops a job as a peer, or this node itself, wants it, and says what that has freed.
    pub(super) fn follow_order(&mut self, from: &NodeName, order: &DropOrder) {
        let answer = match self.drop_here(order) {
            Ok(freed) => DropAnswer::Freed {
                bytes: freed.bytes,
                checkpoints: freed.checkpoints,
            },
            Err(refusal) => DropAnswer::Refused(refusal.message),
        };
        self.answer_order(from, order, answer);
    }

    pub(super) fn answer_order(&mut self, from: &NodeName, order: &DropOrder, answer: DropAnswer) {
        let query = order.query;
        self.send(from, PeerMessage::Dropped { query, answer });
    }

    fn drop_here(&mut self, order: &DropOrder) -> Result<Freed, Refusal> {
        let namespace = &order.namespace;
        self.check_owner(namespace, order.owner)?;
        let mut conns = self.conns.values();
        let has_trainers = conns.any(|c| c.namespace == *namespace && c.trainer.is_some());
        if has_trainers && !order.force {
            return Err(in_use(namespace, &[self.me().clone()]));
        }
        if !order.force {
            self.check_unpinned(namespace)?;
        }
        self.unpin_all(namespace);
        let freed = self.drop_ram(namespace, self.newest_mark(namespace));
        if let Some(table) = self.namespaces.get_mut(namespace) {
            self.keeping.touch_job(namespace);
            table.mark = None;
        }
        Ok(freed)
    }

    /// What somebody has pinned does not go by the way.
    fn check_unpinned(&self, namespace: &Namespace) -> Result<(), Refusal> {
        let pins = self.pins_in_words(namespace);
        if pins.is_empty() {
            return Ok(());
        }
        let text = format!(
            "expected {namespace} to have no pinned steps, got some{pins}; or drop it all the same (`--force`)"
        );
        Err(Refusal::new(RefusalCode::InUse, text))
    }

    fn drop_report(&self, work: &DropWork) -> DropReport {
        let members = self.setup.members.iter().map(|member| &member.name);
        let silent = members.filter(|node| !work.answers.contains_key(*node));
        let nodes = work.answers.iter().map(|(node, answer)| DroppedNode {
            node: node.clone(),
            answer: answer.clone(),
        });
        DropReport {
            namespace: work.namespace.clone(),
            nodes: nodes.collect(),
            silent: silent.cloned().collect(),
        }
    }
}

/// Whoever asks reads by an operator's right, and the token was said to nobody here: the job would go from this node alone.
fn unproven(namespace: &Namespace) -> Refusal {
    Refusal::new(
        RefusalCode::WrongToken,
        format!(
            "expected the token of {namespace} to have been said at this node, since others let the job go for who has it, got none: give the token, or have each node drop what it has itself (`--force` on each)"
        ),
    )
}

fn in_use(namespace: &Namespace, nodes: &[NodeName]) -> Refusal {
    let names = nodes.iter().map(NodeName::to_string).collect::<Vec<_>>();
    Refusal::new(
        RefusalCode::InUse,
        format!(
            "expected {namespace} to have no trainers, got some on {}: end them first, or drop it all the same (`--force`)",
            names.join(", ")
        ),
    )
}
