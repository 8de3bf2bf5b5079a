//! `storaged pin` and `unpin`: steps that stay in the RAM of all nodes until somebody lets them go, in nobody's way: their slots count not
//! as those of their ranks, and a step is pinned only where two more of its size fit beside it, the newest protected one and the one
//! that is saved. What stays is healed like the newest step.
//!
//! A node that missed a pin would let go what all others keep. So every node that is up is asked to note it, and no pin counts if more
//! nodes than the step can lose have nothing of what belongs on them; who was away, or has missed a later change, hears of it now and then.

mod room;

use std::collections::{BTreeMap, BTreeSet};

use storaged_plan::nodes_with_blocks;
use storaged_wire::local::{Keep, Reply};
use storaged_wire::peer::{CheckpointKey, HighMark, PeerMessage, UnowedCause};
use storaged_wire::pins::{NamespacePins, Pin, PinAnswer};
use storaged_wire::{Namespace, NodeName, Owner, Refusal, RefusalCode, RunId, Step};

use crate::api::{ConnId, Curation, DurablePolicy, Now, QueryId, RequestId};
use crate::catalog::Checkpoint;
use crate::context::Context;
use crate::limits;
use crate::pins::{key_at, mark_of};

/// What comes of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// A step is pinned, or let go.
    Change,
    /// Another node was asked for the pin and has not decided yet: this one sees for itself, and takes back nothing.
    Confirm,
}

/// A pin that all nodes are being told of.
#[derive(Debug)]
struct PinOrder {
    /// Who wants it, and whoever has asked for the same meanwhile, as far as they are still there.
    askers: Vec<RequestId>,
    key: CheckpointKey,
    owner: Owner,
    pin: Pin,
    purpose: Purpose,
    curation: Curation,
    deadline: Now,
    asked: BTreeSet<NodeName>,
    answers: BTreeMap<NodeName, PinAnswer>,
}

impl PinOrder {
    /// Of its step.
    fn saying(&self, pin: Pin) -> NamespacePins {
        NamespacePins {
            namespace: self.key.namespace.clone(),
            owner: self.owner,
            pins: vec![pin],
        }
    }

    fn message(&self, query: QueryId) -> PeerMessage {
        PeerMessage::Pins(Some(query.0), self.saying(self.pin))
    }

    fn has_noted(&self, node: &NodeName) -> bool {
        self.answers.get(node) == Some(&PinAnswer::Noted)
    }
}

/// Pins that somebody here has asked for.
#[derive(Debug, Default)]
pub(crate) struct PinOrders {
    orders: BTreeMap<QueryId, PinOrder>,
    told_at: Now,
}

impl PinOrders {
    /// When one of them must be looked at again.
    pub fn deadlines(&self) -> impl Iterator<Item = Now> {
        self.orders.values().map(|order| order.deadline)
    }

    /// Hears a message about pins; any other comes back.
    pub fn hear(
        &mut self,
        from: &NodeName,
        message: PeerMessage,
        cx: &mut Context,
    ) -> Option<PeerMessage> {
        match message {
            PeerMessage::Pins(query, of) => cx.pins_told(from, query, of),
            PeerMessage::PinNoted(query, answer) => {
                if let Some(order) = self.orders.get_mut(&QueryId(query)) {
                    order.answers.insert(from.clone(), answer);
                }
                self.advance(cx);
            }
            other => return Some(other),
        }
        None
    }

    /// Requests that have not been answered.
    pub fn unanswered(&self) -> usize {
        self.orders.values().map(|order| order.askers.len()).sum()
    }

    /// Somebody wants a step to stay, or to go by the policy again: in RAM if it is there, and in the durable tier.
    pub fn keep(
        &mut self,
        id: RequestId,
        run: Option<RunId>,
        step: Step,
        keep: Keep,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        let attached = cx.attached(id)?.clone();
        let (namespace, owner) = (&attached.namespace, attached.owner);
        cx.check_owner(namespace, owner)?;
        let curation = Curation::Keep { run, step, keep };
        let is_it = |at: &HighMark| at.step == step && run.is_none_or(|run| run == at.run);
        let at = match keep {
            Keep::Pin => cx.safe_steps(namespace).rev().find(is_it),
            Keep::Unpin => cx.pinned_marks(namespace).into_iter().rev().find(is_it),
        };
        let Some(at) = at else {
            return cx.keep_in_tier_alone(id, curation);
        };
        // The same one there and here: the tier may have another run's step of this number.
        let curation = Curation::Keep {
            run: Some(at.run),
            step,
            keep,
        };
        let key = key_at(namespace, at);
        if keep == Keep::Pin && cx.is_pinned(&key) {
            let deciding = self.deciding(&key, cx);
            let is_granted = match &deciding {
                Some(_) => planted!("pins_granted_before_they_are"),
                None => cx.is_pin_decided(&key) || planted!("pins_of_others_taken_for_decided"),
            };
            // Asked for again, which may be because it has become durable: whatever nodes say now, it stays as it is in RAM.
            if is_granted {
                return cx.tell_tier(id, curation, Ok(()));
            }
            // Told that it is pinned, whoever asks would count on what may be taken back in a moment.
            if let Some(order) = deciding {
                order.askers.push(id);
                return Ok(());
            }
        }
        let (pin, purpose) = match cx.pin_for(&key, owner, keep) {
            Ok(ordered) => ordered,
            Err(refusal) => return cx.tell_tier(id, curation, Err(refusal)),
        };
        let order = PinOrder {
            askers: vec![id],
            key,
            owner,
            pin,
            purpose,
            curation,
            deadline: cx.now.plus(limits::PIN_WAIT_MS),
            asked: cx.peers.keys().cloned().collect(),
            answers: BTreeMap::from([(cx.me().clone(), PinAnswer::Noted)]),
        };
        let query = QueryId(cx.fresh());
        cx.send_all(&order.message(query));
        self.orders.insert(query, order);
        self.advance(cx);
        Ok(())
    }

    /// The pin of a step that has not been decided yet, nor changed since.
    fn deciding(&mut self, key: &CheckpointKey, cx: &Context) -> Option<&mut PinOrder> {
        let mut orders = self.orders.values_mut();
        orders.find(|order| order.key == *key && cx.goes_by(order))
    }

    /// Ends those whose nodes have all answered or gone down, or whose time is over.
    pub fn advance(&mut self, cx: &mut Context) {
        let is_over = |order: &PinOrder| {
            let mut silent = order.asked.iter();
            let waits = |node: &NodeName| !order.answers.contains_key(node) && cx.is_up(node);
            order.deadline <= cx.now || !silent.any(waits)
        };
        let orders = self.orders.iter();
        let over = orders.filter(|(_, order)| is_over(order));
        for query in over.map(|(query, _)| *query).collect::<Vec<_>>() {
            if let Some(order) = self.orders.remove(&query) {
                cx.end_order(order);
            }
        }
    }

    /// Once a second: says again what is not answered, and now and then all pins.
    pub fn repeat(&mut self, cx: &mut Context) {
        for (query, order) in &self.orders {
            let unheard = |node: &&NodeName| !order.answers.contains_key(*node);
            for node in order.asked.iter().filter(unheard) {
                cx.send(node, order.message(*query));
            }
        }
        if cx.now.since(self.told_at) >= limits::PINS_EVERY_MS {
            self.told_at = cx.now;
            for told in cx.all_pins() {
                cx.send_all(&PeerMessage::Pins(None, told));
            }
        }
    }

    /// Whoever asked is gone. The order goes on: broken off it would count on some nodes and not on others.
    pub fn forget_askers(&mut self, conn: ConnId) {
        for order in self.orders.values_mut() {
            order.askers.retain(|id| id.conn != conn);
        }
    }
}

impl Context {
    /// Whether somebody has pinned a step in RAM.
    pub(crate) fn is_pinned(&self, key: &CheckpointKey) -> bool {
        let table = self.namespaces.get(&key.namespace);
        table.is_some_and(|table| table.pins.has(key.mark()))
    }

    /// Whether it is pinned for good: nobody takes it back but by unpinning it.
    fn is_pin_decided(&self, key: &CheckpointKey) -> bool {
        let table = self.namespaces.get(&key.namespace);
        table.is_some_and(|table| table.pins.has_decided(key.mark()))
    }

    /// The pinned steps of a job, also those of which nothing is here: other nodes keep them.
    fn pinned_marks(&self, namespace: &Namespace) -> Vec<HighMark> {
        let table = self.namespaces.get(namespace);
        table.map_or_else(Vec::new, |table| table.pins.pinned().collect())
    }

    /// The pinned steps of a job of which this node knows.
    pub(crate) fn pinned_here(&self, namespace: &Namespace) -> Vec<CheckpointKey> {
        let keys = self.pinned_marks(namespace).into_iter();
        let keys = keys.map(|at| key_at(namespace, at));
        keys.filter(|key| self.checkpoints.contains_key(key))
            .collect()
    }

    /// For people who wonder what takes the room.
    pub(crate) fn pins_in_words(&self, namespace: &Namespace) -> String {
        let steps = self.pinned_marks(namespace).into_iter();
        let steps: Vec<String> = steps.map(|at| at.step.to_string()).collect();
        match steps.len() {
            0 => String::new(),
            1 => format!("; step {} is pinned: `storaged unpin` frees it", steps[0]),
            _ => format!(
                "; steps {} are pinned: `storaged unpin` frees them",
                steps.join(", ")
            ),
        }
    }

    /// Steps of a job that are as safe as can be, in order.
    fn safe_steps(&self, namespace: &Namespace) -> impl DoubleEndedIterator<Item = HighMark> {
        let safe = self.safe_state();
        let of_job = self.checkpoints.values();
        of_job
            .filter(move |c| c.key.namespace == *namespace && c.state >= safe)
            .map(|c| c.key.mark())
    }

    fn keep_in_tier_alone(&mut self, id: RequestId, curation: Curation) -> Result<(), Refusal> {
        if self.setup.durable != DurablePolicy::Absent {
            return self.curate(id, curation);
        }
        let namespace = &self.attached(id)?.namespace;
        let text = match curation {
            Curation::Keep {
                step,
                keep: Keep::Pin,
                ..
            } => format!(
                "expected a step of {namespace} that is protected and of which this node knows, got step {step}: `storaged ls` shows \
                 which there are; this node has no durable tier ([durable]) to pin another one in"
            ),
            _ => format!(
                "expected a pinned step of {namespace}: `storaged ls` shows which there are"
            ),
        };
        Err(Refusal::new(RefusalCode::NoCheckpoint, text))
    }

    /// What others are to be asked for.
    fn pin_for(
        &mut self,
        key: &CheckpointKey,
        owner: Owner,
        keep: Keep,
    ) -> Result<(Pin, Purpose), Refusal> {
        let table = self.namespaces.get(&key.namespace);
        let known = table.and_then(|table| table.pins.of(key.mark()));
        match known.filter(|known| known.pinned && keep == Keep::Pin) {
            Some(undecided) => Ok((undecided, Purpose::Confirm)),
            None => Ok((self.pin_here(key, owner, keep)?, Purpose::Change)),
        }
    }

    /// This node goes by a pin, or by its end, from now on; what others are to be told.
    fn pin_here(&mut self, key: &CheckpointKey, owner: Owner, keep: Keep) -> Result<Pin, Refusal> {
        let before = self.pinned_here(&key.namespace);
        if keep == Keep::Pin && before.len() >= limits::PINS_MAX && !before.contains(key) {
            let text = format!(
                "expected fewer than {} pinned steps of {}, got that many: unpin one first (`storaged unpin`)",
                limits::PINS_MAX,
                key.namespace
            );
            return Err(Refusal::new(RefusalCode::BudgetFull, text));
        }
        let table = self.namespace_table(&key.namespace, owner);
        let pin = table.pins.next(key.mark(), keep);
        let me = self.me().clone();
        match self.note_pin(key, owner, &pin) {
            PinAnswer::NoRoom(reason) => Err(no_room_to_pin(key, &me, &reason)),
            PinAnswer::Noted | PinAnswer::NotHere => Ok(pin),
        }
    }

    /// A peer tells of pins.
    fn pins_told(&mut self, from: &NodeName, query: Option<u64>, of: NamespacePins) {
        let is_its = self.may_be_its(&of.namespace, of.owner);
        if !is_its || !self.may_tell_of(from, &of.namespace) || planted!("pins_not_heard") {
            return;
        }
        let mut last = PinAnswer::Noted;
        for pin in of.pins.iter().take(limits::PINS_REMEMBERED_MAX) {
            let key = key_at(&of.namespace, mark_of(pin));
            if query.is_some() && pin.pinned && self.is_unsafe_here(&key) {
                // It will have heard of that when it is asked again; what it says now would count.
                return;
            }
            last = self.note_pin(&key, of.owner, pin);
        }
        if let Some(query) = query {
            self.send(from, PeerMessage::PinNoted(query, last));
            return;
        }
        // It was away when this was changed: all that is left of the change may be here.
        let table = self.namespaces.get(&of.namespace);
        let known = table.filter(|table| of.pins.iter().any(|pin| table.pins.is_later_than(pin)));
        if let Some(pins) = known.and_then(|table| table.pins.told()) {
            self.send(from, PeerMessage::Pins(None, NamespacePins { pins, ..of }));
        }
    }

    fn note_pin(&mut self, key: &CheckpointKey, owner: Owner, pin: &Pin) -> PinAnswer {
        if self
            .namespace_table(&key.namespace, owner)
            .pins
            .is_news(pin)
        {
            // What is pinned already has its room, whatever else is said of it.
            let is_new = pin.pinned && !self.is_pinned(key);
            if is_new && self.is_yet_to_come(key) {
                return PinAnswer::NotHere;
            }
            if is_new && let Some(reason) = self.lack_of_room_beside(key) {
                return PinAnswer::NoRoom(reason);
            }
            let table = self.namespace_table(&key.namespace, owner);
            table.pins.learn(pin);
            self.keeping.touch_job(&key.namespace);
            self.retire_older(&key.namespace);
        }
        // It may know of a later change.
        let is_as_told = self.is_pinned(key) == pin.pinned;
        if is_as_told
            && self
                .checkpoints
                .get(key)
                .is_some_and(Checkpoint::has_blocks)
        {
            return PinAnswer::Noted;
        }
        if self.is_pinned(key) {
            self.ask_for_again(key);
        }
        PinAnswer::NotHere
    }

    /// Nobody pins what is not protected: a peer that says so would have every later step of the job stay, and this node try for ever to protect
    /// one that all others have let go. What it has not heard of yet is told again.
    fn is_yet_to_come(&self, key: &CheckpointKey) -> bool {
        if self.is_unsafe_here(key) {
            return true;
        }
        let of_job = self.checkpoints.keys();
        let of_job = of_job.filter(|it| it.namespace == key.namespace);
        let newest = of_job.map(CheckpointKey::mark).max();
        let too_many = self.pinned_marks(&key.namespace).len() >= limits::PINS_MAX;
        too_many || newest.is_some_and(|newest| key.mark() > newest)
    }

    /// Whether a step is here that is not as safe as it will be, as far as this node has heard.
    fn is_unsafe_here(&self, key: &CheckpointKey) -> bool {
        let checkpoint = self.checkpoints.get(key);
        let is_unsafe = checkpoint.is_some_and(|it| it.state < self.safe_state());
        is_unsafe && !planted!("steps_are_pinned_unprotected")
    }

    /// This node had let the step go before it heard of its pin. Once all know that, the home nodes tell of the step again, whoever holds blocks
    /// of it says so again, if this node is one of these, and it is healed here.
    fn ask_for_again(&mut self, key: &CheckpointKey) {
        let ended = self.ends.of(key).and_then(|end| end.name);
        let now = self.now;
        let Some(manifest) = ended.filter(|_| !self.checkpoints.contains_key(key)) else {
            return;
        };
        let table = self.namespaces.get_mut(&key.namespace);
        if table.is_some_and(|table| table.pins.may_ask(key.mark(), now)) {
            let cause = UnowedCause::Retired;
            self.send_all(&PeerMessage::Unowed { manifest, cause });
        }
    }

    /// All have been asked.
    fn end_order(&mut self, order: PinOrder) {
        let in_ram = if order.pin.pinned {
            self.decide(&order)
        } else {
            Ok(())
        };
        self.end_asked(&order, &in_ram);
    }

    /// Whether a step is pinned, of which all nodes are told.
    fn decide(&mut self, order: &PinOrder) -> Result<(), Refusal> {
        // By somebody else: what was pinned anew since, or was found to hold, does not go with this order. Of the same change only a node that
        // knows nothing of doubts says that it is decided.
        if self.is_pin_decided(&order.key) && !self.goes_by(order) {
            return Ok(());
        }
        if let Some(refusal) = self.objection_to_pin(order) {
            if order.purpose == Purpose::Change {
                self.take_back(order);
            }
            return Err(refusal);
        }
        if !self.goes_by(order) {
            return Err(changed_meanwhile(&order.key));
        }
        self.say_decided(order);
        Ok(())
    }

    /// Whether nothing was changed since.
    fn goes_by(&self, order: &PinOrder) -> bool {
        let table = self.namespaces.get(&order.key.namespace);
        table.is_some_and(|table| table.pins.is_last(&order.pin))
    }

    /// Another node that was asked for it, before or at this moment, may hear from fewer nodes than this one, and take back what it asked for: a pin
    /// that was found to hold is one more change, which that does not end.
    fn say_decided(&mut self, order: &PinOrder) {
        let changes = order.pin.changes.saturating_add(1);
        self.say(
            order,
            Pin {
                changes,
                doubt: None,
                ..order.pin
            },
        );
    }

    /// Ends this change, and no later one.
    fn take_back(&mut self, order: &PinOrder) {
        let later = u32::from(planted!("pins_taken_back_by_others")) * 9;
        let changes = order.pin.changes.saturating_add(later);
        self.say(
            order,
            Pin {
                changes,
                pinned: false,
                doubt: None,
                ..order.pin
            },
        );
    }

    fn say(&mut self, order: &PinOrder, pin: Pin) {
        self.note_pin(&order.key, order.owner, &pin);
        self.send_all(&PeerMessage::Pins(None, order.saying(pin)));
    }

    fn end_asked(&mut self, order: &PinOrder, in_ram: &Result<(), Refusal>) {
        for id in &order.askers {
            let told = self.tell_tier(*id, order.curation.clone(), in_ram.clone());
            if let Err(refusal) = told {
                self.reply(*id, Reply::Refused(refusal));
            }
        }
    }

    /// The durable tier is told too, where there is one, also of a step for which RAM has no room: many pin for what lies there.
    fn tell_tier(
        &mut self,
        id: RequestId,
        curation: Curation,
        in_ram: Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        if self.setup.durable == DurablePolicy::Absent {
            in_ram?;
            self.reply(id, nothing_removed());
            return Ok(());
        }
        self.curate(id, curation)?;
        self.kept_in_ram.insert(id, in_ram);
        Ok(())
    }

    /// Why a step cannot stay, if a node has no room beside it or too many have nothing of it.
    fn objection_to_pin(&self, order: &PinOrder) -> Option<Refusal> {
        let full = order
            .answers
            .iter()
            .find_map(|(node, answer)| match answer {
                PinAnswer::NoRoom(reason) => Some((node, reason)),
                PinAnswer::Noted | PinAnswer::NotHere => None,
            });
        if let Some((node, reason)) = full {
            return Some(no_room_to_pin(&order.key, node, reason));
        }
        let checkpoint = self.checkpoints.get(&order.key);
        let manifest = checkpoint.and_then(|c| c.manifest.as_ref());
        let without: Vec<&str> = manifest.map_or_else(Vec::new, |manifest| {
            let without = nodes_with_blocks(manifest).filter(|node| !order.has_noted(node));
            without.map(NodeName::as_str).collect()
        });
        let most = checkpoint.and_then(Checkpoint::parity_count).unwrap_or(0);
        let is_coded = self.setup.geometry.is_some();
        let most = if is_coded { most as usize } else { 0 };
        if manifest.is_some() && without.len() <= most {
            return None;
        }
        Some(Refusal::new(
            RefusalCode::TooManyLost,
            format!(
                "step {} of run {} is not pinned: expected at most {most} nodes that do not have it (any more) or do not answer, got {}: \
                 pin a newer one",
                order.key.step,
                order.key.run,
                without.join(", ")
            ),
        ))
    }

    /// What a peer that has just come up may not know; and it may have what is missed here.
    pub(crate) fn tell_pins(&mut self, node: &NodeName) {
        let tables = self.namespaces.values_mut();
        tables.for_each(|table| table.pins.ask_anew());
        for told in self.all_pins() {
            self.send(node, PeerMessage::Pins(None, told));
        }
    }

    /// Of jobs of which something is here: what is said of others would bring back those that were forgotten.
    fn all_pins(&self) -> Vec<NamespacePins> {
        let here = self.jobs_with_checkpoints();
        let tables = self.namespaces.iter();
        let tables = tables.filter(|(namespace, _)| here.contains(namespace));
        let all = tables.filter_map(|(namespace, table)| {
            Some(NamespacePins {
                namespace: namespace.clone(),
                owner: table.owner,
                pins: table.pins.told()?,
            })
        });
        all.collect()
    }

    /// A job is dropped by its owner, on all nodes: nothing of it stays.
    pub(super) fn unpin_all(&mut self, namespace: &Namespace) {
        let pinned = self.pinned_marks(namespace);
        if let Some(table) = self.namespaces.get_mut(namespace) {
            for at in pinned {
                let pin = table.pins.next(at, Keep::Unpin);
                table.pins.learn(&pin);
            }
        }
    }
}

/// A pin counts in RAM; nothing had to go.
pub(crate) fn nothing_removed() -> Reply {
    Reply::Removed {
        checkpoints: 0,
        objects: 0,
    }
}

fn changed_meanwhile(key: &CheckpointKey) -> Refusal {
    let (run, step) = (key.run, key.step);
    Refusal::new(
        RefusalCode::Abandoned,
        format!(
            "step {step} of run {run} was unpinned while nodes were asked to pin it: `storaged ls` shows what is pinned"
        ),
    )
}

fn no_room_to_pin(key: &CheckpointKey, node: &NodeName, reason: &str) -> Refusal {
    let (run, step) = (key.run, key.step);
    let reason = super::cut(reason);
    Refusal::new(
        RefusalCode::BudgetFull,
        format!("step {step} of run {run} is not pinned, because of {node}: {reason}"),
    )
}
