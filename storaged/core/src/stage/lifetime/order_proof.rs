//! Whether an order to drop a job comes from who has its token. The owner in it proves nothing: it stands in every manifest, and one node that
//! errs could have all others let a running job go, or one whose trainers are just being started again.
//!
//! A node to which the token was said checks the order itself. One that has parity alone asks those whose shards it codes for: of two that
//! say so one is sound, and who gave the order is one of them.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::peer::{DropAnswer, DropOrder, OrderKey, PeerMessage};
use storaged_wire::{NodeName, Owner};

use crate::api::{Now, QueryId};
use crate::context::Context;
use crate::limits;

/// Orders that others are asked about.
#[derive(Debug, Default)]
pub(super) struct OrderChecks {
    asked: BTreeMap<QueryId, OrderCheck>,
}

#[derive(Debug)]
struct OrderCheck {
    order: DropOrder,
    from: NodeName,
    deadline: Now,
    waits_for: BTreeSet<NodeName>,
}

/// What speaks for an order.
enum Grounds {
    Proof,
    /// What these say, of whom some may have heard the token.
    Words(BTreeSet<NodeName>),
    /// Nothing, for this reason.
    None(String),
    /// Nothing is needed: of the job there is nothing here.
    Needless,
}

impl OrderChecks {
    /// When one of them must be looked at again.
    pub fn deadlines(&self) -> impl Iterator<Item = Now> {
        self.asked.values().map(|check| check.deadline)
    }

    /// Orders that have not been answered.
    pub fn unanswered(&self) -> usize {
        self.asked.len()
    }

    /// A peer, or this node itself, wants a job dropped.
    pub fn take_up(&mut self, from: &NodeName, order: DropOrder, cx: &mut Context) {
        let of_sender = self.asked.values().filter(|check| check.from == *from);
        if of_sender.count() >= limits::ORDER_CHECKS_PER_PEER_MAX {
            return cx.ignore_order(
                from,
                &order,
                "too many orders of that node are being checked",
            );
        }
        match cx.grounds_of(from, &order) {
            Grounds::Proof => cx.follow_order(from, &order),
            Grounds::None(why) => cx.ignore_order(from, &order, &why),
            Grounds::Words(nodes) => self.ask_about(nodes, from, order, cx),
            Grounds::Needless => cx.forget_how_far_it_got(from, &order),
        }
    }

    fn ask_about(
        &mut self,
        nodes: BTreeSet<NodeName>,
        from: &NodeName,
        order: DropOrder,
        cx: &mut Context,
    ) {
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
        self.asked.insert(query, check);
    }

    /// A node to which the token was said says that an order is proven.
    pub fn proven_by(&mut self, from: &NodeName, query: QueryId, cx: &mut Context) {
        let asked = self.asked.get(&query);
        if asked.is_some_and(|check| check.waits_for.contains(from))
            && let Some(OrderCheck { order, from, .. }) = self.asked.remove(&query)
        {
            cx.follow_order(&from, &order);
        }
    }

    /// A node has not heard the token, or the order is not by it.
    pub fn unproven_by(&mut self, from: &NodeName, query: QueryId, cx: &mut Context) {
        if let Some(check) = self.asked.get_mut(&query) {
            check.waits_for.remove(from);
        }
        self.end(cx);
    }

    /// Ends those that nobody has proven in time.
    pub fn end(&mut self, cx: &mut Context) {
        let is_over = |check: &OrderCheck| {
            check.deadline <= cx.now || !check.waits_for.iter().any(|node| cx.is_up(node))
        };
        let over = self.asked.extract_if(.., |_, check| is_over(check));
        for (_, OrderCheck { order, from, .. }) in over.collect::<Vec<_>>() {
            cx.ignore_order(&from, &order, "no node that was asked has heard its token");
        }
    }
}

impl Context {
    /// An order with its proof, if the token was said: on this connection, or here before by one of the job's own.
    pub(super) fn proven(&self, order: DropOrder, said: Option<OrderKey>) -> DropOrder {
        let key = said.or_else(|| self.order_key(&order));
        let proof = key.map(|key| key.prove(&order, self.me().clone()));
        DropOrder { proof, ..order }
    }

    /// The key of a job's orders, as far as this node can know it. That of a job without a token anybody can.
    fn order_key(&self, order: &DropOrder) -> Option<OrderKey> {
        let namespace = &order.namespace;
        let has_no_token = || order.owner == Owner::of_token(b"");
        let known = self.keys.orders(namespace, order.owner);
        known.or_else(|| has_no_token().then(|| OrderKey::of_token(namespace, b"")))
    }

    /// Whether the job's token was said here, and makes the proof of an order.
    pub(super) fn has_proof_of(&self, order: &DropOrder) -> bool {
        let table = self.namespaces.get(&order.namespace);
        table.is_some_and(|table| table.owner == order.owner)
            && self
                .order_key(order)
                .is_some_and(|key| key.has_proven(order))
    }

    fn grounds_of(&self, from: &NodeName, order: &DropOrder) -> Grounds {
        if from == self.me() || planted!("anybody_drops_jobs") {
            return Grounds::Proof;
        }
        if !self.holds_something_of(&order.namespace) {
            return Grounds::Needless;
        }
        let Some(proof) = &order.proof else {
            return Grounds::None("the order has none".into());
        };
        if proof.by != *from && !planted!("orders_are_passed_on") {
            return Grounds::None(format!("it was given by {}", proof.by));
        }
        if self.has_proof_of(order) {
            return Grounds::Proof;
        }
        if self.order_key(order).is_some() {
            return Grounds::None("its proof is by another token".into());
        }
        self.words_for(from, order)
    }

    /// Whom to ask: nodes with trainers or shards of the job, other than the one that wants it dropped.
    fn words_for(&self, from: &NodeName, order: &DropOrder) -> Grounds {
        let mut know = self.nodes_attached(&order.namespace);
        let of_job = self.checkpoints.values();
        let of_job = of_job.filter(|c| c.key.namespace == order.namespace);
        let manifests = of_job.filter_map(|c| c.manifest.as_ref());
        let nodes = manifests.flat_map(|manifest| manifest.nodes());
        let with_shards = nodes.filter(|(_, on)| !on.ranks.is_empty());
        let with_shards: BTreeSet<&NodeName> = with_shards.map(|(node, _)| node).collect();
        // Whose bytes they all are may let them go.
        if know.is_empty() && with_shards.iter().copied().eq([from]) {
            return Grounds::Proof;
        }
        know.extend(with_shards.into_iter().cloned());
        know.retain(|node| node != from && self.is_up(node) && self.is_believed(node));
        if know.is_empty() {
            return Grounds::None("no other node is up that may have heard its token".into());
        }
        // Each node begins with others, so that not all ask the same.
        let own_place = know.iter().filter(|node| *node < self.me()).count();
        let from_there = know.iter().cycle().skip(own_place);
        let asked = from_there.take(limits::ORDER_CHECKERS_MAX.min(know.len()));
        Grounds::Words(asked.cloned().collect())
    }

    /// Follows an order as a node does that has nothing of the job, which nobody need prove. Were it remembered here how far the job got, that
    /// would be told again to all that come up. Of its pins the nodes tell that have let it go.
    fn forget_how_far_it_got(&mut self, from: &NodeName, order: &DropOrder) {
        if let Some(table) = self.namespaces.get_mut(&order.namespace) {
            table.mark = None;
            self.keeping.touch_job(&order.namespace);
        }
        self.answer_order(from, order, nothing_freed());
    }

    /// Answers an order that is not proven.
    fn ignore_order(&mut self, from: &NodeName, order: &DropOrder, why: &str) {
        let job = &order.namespace;
        let refused = DropAnswer::Refused(format!(
            "expected an order with a proof by the token of {job}, said here or at a node that has its shards: {why}; have it dropped at this node too"
        ));
        self.answer_order(from, order, refused);
    }
}

fn nothing_freed() -> DropAnswer {
    DropAnswer::Freed {
        bytes: 0,
        checkpoints: 0,
    }
}
