//! Whether an order to drop a job comes from who has its token. The owner in it proves nothing: it stands in every manifest, and one node that
//! errs could have all others let a running job go, or one whose trainers are just being started again.
//!
//! A node to which the token was said checks the order itself. One that has parity alone asks those whose shards it codes for: of two that
//! say so one is sound, and who gave the order is one of them.

use std::collections::BTreeSet;

use storaged_wire::NodeName;
use storaged_wire::peer::{
    CheckpointKey, DropAnswer, DropOrder, OrderIssue, OrderKey, PeerMessage,
};

use super::drop_job::Drops;
use crate::api::{Now, QueryId};
use crate::context::Context;
use crate::limits;

/// An order that others are asked about.
#[derive(Debug)]
pub(super) struct OrderCheck {
    order: DropOrder,
    from: NodeName,
    pub deadline: Now,
    waits_for: BTreeSet<NodeName>,
}

/// What is done with an order.
enum Standing {
    Proven,
    /// There is nothing that it would let go, or it was followed before.
    Needless,
    /// These may know.
    Asked(BTreeSet<NodeName>),
    Refused(String),
}

impl Drops {
    /// A peer, or this node itself, wants a job dropped.
    pub(super) fn drop_asked(&mut self, from: &NodeName, order: DropOrder, cx: &mut Context) {
        match cx.standing_of_order(from, &order) {
            Standing::Proven => cx.follow_order(from, &order),
            Standing::Needless => cx.answer_order(from, &order, nothing_freed()),
            Standing::Refused(reason) => {
                cx.answer_order(from, &order, DropAnswer::Refused(reason));
            }
            Standing::Asked(nodes) => self.ask_about(nodes, from, order, cx),
        }
    }

    fn ask_about(
        &mut self,
        nodes: BTreeSet<NodeName>,
        from: &NodeName,
        order: DropOrder,
        cx: &mut Context,
    ) {
        let of_sender = self.checks.values().filter(|check| check.from == *from);
        if of_sender.count() >= limits::ORDER_CHECKS_PER_PEER_MAX {
            let reason = "other orders of the same node are being checked: try again".into();
            return cx.answer_order(from, &order, DropAnswer::Refused(reason));
        }
        let query = QueryId(cx.fresh());
        for node in &nodes {
            let (query, order) = (query.0, Box::new(order.clone()));
            cx.send(node, PeerMessage::CheckOrder { query, order });
        }
        let check = OrderCheck {
            order,
            from: from.clone(),
            deadline: cx.now.plus(limits::QUERY_MAX_MS),
            waits_for: nodes,
        };
        self.checks.insert(query, check);
    }

    /// A node says whether an order is proven. One that knows is enough; who knows nothing of the token says no.
    pub(super) fn order_checked(
        &mut self,
        from: &NodeName,
        query: QueryId,
        is_proven: bool,
        cx: &mut Context,
    ) {
        let asked = self.checks.get_mut(&query);
        let Some(check) = asked.filter(|check| check.waits_for.contains(from)) else {
            return;
        };
        check.waits_for.remove(from);
        if is_proven && let Some(check) = self.checks.remove(&query) {
            cx.follow_order(&check.from, &check.order);
        }
        self.end_checks(cx);
    }

    /// Refuses orders that nobody has proven in time.
    pub(super) fn end_checks(&mut self, cx: &mut Context) {
        let is_over = |check: &OrderCheck| {
            check.deadline <= cx.now || !check.waits_for.iter().any(|node| cx.is_up(node))
        };
        let over = self.checks.extract_if(.., |_, check| is_over(check));
        for (_, OrderCheck { order, from, .. }) in over.collect::<Vec<_>>() {
            let reason = unproven(&order, "nobody who has heard its token says so");
            cx.answer_order(&from, &order, DropAnswer::Refused(reason));
        }
    }
}

impl Context {
    /// An order with the proof of its token, if that was said: on this connection, or here before by one of the job's own.
    pub(super) fn proven(&self, order: DropOrder, said: Option<OrderKey>) -> DropOrder {
        let issue = OrderIssue {
            by: self.me().clone(),
            generation: self.setup.generation,
            run: self.fence_of(&order.namespace),
        };
        let key = said.or_else(|| self.keys.orders(&order.namespace));
        let proof = key.map(|key| key.prove(&order, issue));
        DropOrder { proof, ..order }
    }

    /// Whether the job's token was said here, and makes the proof of an order.
    pub(super) fn has_proof_of(&self, order: &DropOrder) -> bool {
        let key = self.keys.orders(&order.namespace);
        key.is_some_and(|key| key.has_proven(order))
            && self.owner_of(&order.namespace) == Some(order.owner)
    }

    fn standing_of_order(&self, from: &NodeName, order: &DropOrder) -> Standing {
        if from == self.me() || planted!("anybody_drops_jobs") {
            return Standing::Proven;
        }
        let Some(proof) = &order.proof else {
            return if self.holds_of(order) {
                Standing::Refused(unproven(order, "the order has none"))
            } else {
                Standing::Needless
            };
        };
        let table = self.namespaces.get(&order.namespace);
        let followed = table.is_some_and(|it| it.orders_followed.contains(proof));
        if followed && !planted!("orders_are_followed_twice") {
            return Standing::Needless;
        }
        let run = self.fence_of(&order.namespace);
        if proof.issue.run < run && !planted!("old_orders_are_followed") {
            let why = format!("run {run} was opened since");
            return Standing::Refused(unproven(order, &why));
        }
        if self.has_proof_of(order) {
            return Standing::Proven;
        }
        if !self.holds_of(order) {
            return Standing::Needless;
        }
        self.askable(from, order)
    }

    /// Whom to ask: nodes with shards or trainers of the job, other than those that want it dropped.
    fn askable(&self, from: &NodeName, order: &DropOrder) -> Standing {
        let attached = self.nodes_attached(&order.namespace);
        let mut know: BTreeSet<NodeName> = attached.into_iter().collect();
        let of_job = |key: &CheckpointKey| key.namespace == order.namespace;
        let committed = self.committed().into_iter();
        for (_, manifest) in committed.filter(|(key, _)| of_job(key)) {
            let shards = manifest.manifest().shards.iter();
            know.extend(shards.map(|shard| shard.node.clone()));
        }
        // Whose bytes they all are may let them go.
        if know.iter().eq([from]) {
            return Standing::Proven;
        }
        know.retain(|node| {
            node != from && node != self.me() && self.is_up(node) && self.is_believed(node)
        });
        if know.is_empty() {
            return Standing::Refused(unproven(
                order,
                "no other node is up that may have heard its token",
            ));
        }
        Standing::Asked(know.into_iter().take(limits::ORDER_CHECKERS_MAX).collect())
    }

    fn holds_of(&self, order: &DropOrder) -> bool {
        self.namespaces_holding().contains(&order.namespace)
    }

    /// An order lets nothing go a second time.
    pub(super) fn note_followed(&mut self, order: &DropOrder) {
        let table = self.namespaces.get_mut(&order.namespace);
        let Some((table, proof)) = table.zip(order.proof.clone()) else {
            return;
        };
        table.orders_followed.push_back(proof);
        if table.orders_followed.len() > limits::ORDERS_REMEMBERED {
            table.orders_followed.pop_front();
        }
    }
}

fn unproven(order: &DropOrder, why: &str) -> String {
    let job = &order.namespace;
    format!(
        "expected an order with a proof by the token of {job}, which somebody has said here or at a node that has its shards: {why}; run the command with the job's token, or on this node too"
    )
}

fn nothing_freed() -> DropAnswer {
    DropAnswer::Freed {
        bytes: 0,
        checkpoints: 0,
    }
}
