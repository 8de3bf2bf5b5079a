//! What gives way when a trainer waits for a slot. A save is never refused because of what is older: neither because the
//! durable tier is slow, full or gone, nor because a node is away and nothing can be protected. What is kept is the
//! newest checkpoint that is whole, and whatever older one is safer than all that came after it.

use std::collections::BTreeSet;

use storaged_plan::uncoded_node;
use storaged_wire::local::KeptFor;
use storaged_wire::peer::{CheckpointKey, Holding, PeerMessage};
use storaged_wire::{CheckpointState, ManifestBytes, Namespace, NodeName, Rank};

use crate::api::{ConnId, Now};
use crate::catalog::{Checkpoint, GivingWayFor, RefusedSlot, SlotUse, WaiterWish};
use crate::context::Context;
use crate::event::Event;
use crate::limits;

/// How long a trainer has waited for a slot.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Waited {
    /// With this request.
    pub ms: u64,
    /// With those before it too, which were refused: who asks with a short limit again and again waits as well.
    pub lacking_ms: u64,
}

/// How a checkpoint gives way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Yield {
    /// Its copy in the durable tier is given up for a newer one's; with it what kept it in RAM.
    DurableCopy,
    /// It goes: it can be made no safer, and a newer one is as safe.
    Checkpoint,
    /// It goes on all nodes: it was kept beside newer ones that are as safe.
    KeptStep,
}

impl Context {
    /// Makes room for a rank's next slot, if anything may go for a trainer that has waited so long; false if nothing may.
    pub(crate) fn make_room(&mut self, namespace: &Namespace, rank: Rank, waited: Waited) -> bool {
        let Some((key, how)) = self.first_to_yield(namespace, rank, waited) else {
            return false;
        };
        match how {
            Yield::DurableCopy => {
                let reason = self.why_not_durable(&key);
                self.give_up_durable(&key, &reason);
                self.retire_older(namespace);
            }
            Yield::KeptStep => self.give_up_kept_step(&key),
            Yield::Checkpoint if self.is_protected(&key) => self.retire(&key),
            Yield::Checkpoint => {
                let why = self.why_not_yet(&key);
                let reason = format!("a newer step needs its slot{why}");
                let checkpoint = &self.checkpoints[&key];
                // With two slots per rank what is called protected goes too.
                if checkpoint.manifest.is_none() || self.is_called_safe(checkpoint) {
                    self.supersede_everywhere(&key, &reason);
                } else {
                    self.give_way(&key, &reason, GivingWayFor::Trainer);
                }
            }
        }
        !self.checkpoints.contains_key(&key)
    }

    /// Which ranks of which jobs wait for a slot here, and for how long they have.
    fn waiting_for_slots(&self) -> impl Iterator<Item = (&Namespace, Rank, Waited)> {
        self.waiters.for_slots().filter_map(|waiter| {
            let attached = self.conns.get(&waiter.id.conn)?;
            let (_, rank, _) = attached.trainer?;
            match waiter.wish {
                WaiterWish::Slot {
                    since,
                    lacking_since,
                    ..
                } => {
                    let waited = Waited {
                        ms: self.now.since(since),
                        lacking_ms: self.now.since(lacking_since),
                    };
                    Some((&attached.namespace, rank, waited))
                }
                WaiterWish::State { .. } => None,
            }
        })
    }

    /// Whether a checkpoint may go for a trainer that waits for a slot of a rank that has one here.
    pub(super) fn is_waited_for(&self, checkpoint: &Checkpoint) -> bool {
        let in_turn = self.upload_in_turn(&checkpoint.key.namespace);
        let mut waiting = self.waiting_for_slots();
        waiting.any(|(namespace, rank, waited)| {
            *namespace == checkpoint.key.namespace
                && checkpoint.shards.contains_key(&rank)
                && !Self::is_read(checkpoint)
                && self.may_yield(checkpoint, in_turn.as_ref(), waited) == Some(Yield::Checkpoint)
        })
    }

    /// Looks after the trainers that still wait.
    pub(crate) fn make_room_for_waiters(&mut self) {
        let waiting = self.waiting_for_slots();
        let waiting = waiting.map(|(job, rank, waited)| (job.clone(), rank, waited));
        let waiting: Vec<_> = waiting.collect();
        let is_waiting = |job: &Namespace| waiting.iter().any(|(of, _, _)| of == job);
        self.homes_asked.retain(|job, _| is_waiting(job));
        let mut stuck = BTreeSet::new();
        for (namespace, rank, waited) in waiting {
            let is_made = self.make_room(&namespace, rank, waited);
            if !is_made && waited.ms >= limits::SUPERSEDE_AFTER_MS {
                stuck.insert(namespace);
            }
        }
        for namespace in stuck {
            self.ask_what_homes_have(&namespace);
        }
        self.emit(Event::RoomMade);
    }

    /// Steps that bear more than what came after them stay, as far as their home nodes say. Whoever retires a step tells nobody: while a
    /// trainer waits, those who call such a step protected are asked whether they still have it.
    fn ask_what_homes_have(&mut self, namespace: &Namespace) {
        let newest = self.newest_safe(namespace);
        let older = self
            .checkpoints
            .values()
            .filter(|c| c.key.namespace == *namespace && Some(&c.key) < newest.as_ref());
        let homes = older.flat_map(|c| c.standing.called_protected_by().cloned());
        let homes: BTreeSet<NodeName> = homes.collect();
        let query = self.fresh();
        self.homes_asked.insert(namespace.clone(), query);
        for home in homes {
            let namespace = namespace.clone();
            self.send(&home, PeerMessage::HoldingsQuery { query, namespace });
        }
    }

    /// A home node that was asked says what it has of a job; false if it was not.
    pub(super) fn hear_what_home_has(
        &mut self,
        from: &NodeName,
        query: u64,
        holdings: &[Holding],
    ) -> bool {
        let mut asked = self.homes_asked.iter();
        let Some((namespace, _)) = asked.find(|(_, asked)| **asked == query) else {
            return false;
        };
        let namespace = namespace.clone();
        let is_there = |c: &Checkpoint| holdings.iter().any(|it| Some(it.manifest) == c.name());
        let of_job = self.checkpoints.values_mut();
        let of_job = of_job.filter(|c| c.key.namespace == namespace);
        let mut gone = Vec::new();
        for checkpoint in of_job.filter(|c| c.standing.word_of(from).is_some() && !is_there(c)) {
            checkpoint.standing.let_go(from);
            gone.push(checkpoint.key.clone());
        }
        for key in gone {
            self.recount(&key, from);
        }
        self.retire_older(&namespace);
        true
    }

    /// The oldest checkpoint that holds a slot of the rank and may go.
    fn first_to_yield(
        &self,
        namespace: &Namespace,
        rank: Rank,
        waited: Waited,
    ) -> Option<(CheckpointKey, Yield)> {
        let mine = self.checkpoints.values().filter(|c| {
            c.key.namespace == *namespace && c.shards.contains_key(&rank) && !Self::is_read(c)
        });
        let in_turn = self.upload_in_turn(namespace);
        let how = |c: &Checkpoint| self.may_yield(c, in_turn.as_ref(), waited);
        let found = mine.filter_map(|c| Some((c.key.clone(), how(c)?)));
        // A kept step goes first: nothing is the less safe for it. What was never protected goes before what was: nodes that are
        // away may bring its blocks back. What is on its way to the tier goes last.
        let worth = |(key, how): &(CheckpointKey, Yield)| {
            (
                *how != Yield::KeptStep,
                in_turn.as_ref() == Some(key),
                self.is_protected(key),
                key.clone(),
            )
        };
        found.min_by_key(worth)
    }

    fn may_yield(
        &self,
        checkpoint: &Checkpoint,
        in_turn: Option<&CheckpointKey>,
        waited: Waited,
    ) -> Option<Yield> {
        if checkpoint.manifest.is_some() && self.is_pinned(&checkpoint.key) {
            return planted!("pins_give_way").then_some(Yield::KeptStep);
        }
        if self.is_kept_step(checkpoint) {
            return (waited.ms >= limits::SUPERSEDE_AFTER_MS).then_some(Yield::KeptStep);
        }
        let patience = if in_turn == Some(&checkpoint.key) {
            limits::UPLOAD_YIELDS_AFTER_MS
        } else if self.is_due(checkpoint) {
            0
        } else if checkpoint.state >= CheckpointState::Protected {
            limits::UPLOAD_YIELDS_AFTER_MS
        } else {
            limits::SUPERSEDE_AFTER_MS
        };
        if waited.ms < patience {
            return None;
        }
        if checkpoint.manifest.is_none() {
            let has_waited = waited.ms >= limits::UPLOAD_YIELDS_AFTER_MS;
            let needless =
                self.is_of_older_run(checkpoint) || (has_waited && self.was_gone_past(checkpoint));
            return needless.then_some(Yield::Checkpoint);
        }
        if self.waits_for_the_gone(checkpoint, waited) {
            return None;
        }
        if self.is_left_for_good(checkpoint, waited) && !planted!("left_behind_kept") {
            return Some(Yield::Checkpoint);
        }
        let newer = self.newest_instead_of(checkpoint)?;
        let superseded = checkpoint.key < newer
            && self.knows_bears(&checkpoint.key)
            && self.is_as_safe(&newer, checkpoint);
        if !superseded {
            None
        } else if self.is_due(checkpoint) {
            let safe = self.checkpoints[&newer].state >= self.safe_state();
            let yields = (safe || self.is_stuck(checkpoint)) && !planted!("owed_for_ever");
            yields.then_some(Yield::DurableCopy)
        } else {
            let yields = self.is_stuck(checkpoint) && !planted!("superseded_kept");
            yields.then_some(Yield::Checkpoint)
        }
    }

    /// The newest checkpoint that may take this one's place. What is protected goes for nothing less: a newer step that has
    /// only committed is on a single copy, and the next restart may pass it over when one node does not answer in time. The
    /// step before would be lost then though nothing is. Two slots per rank leave no choice, or saving would stop.
    fn newest_instead_of(&self, checkpoint: &Checkpoint) -> Option<CheckpointKey> {
        let namespace = &checkpoint.key.namespace;
        if self.is_called_safe(checkpoint)
            && self.setup.slots_per_rank > 2
            && !planted!("protected_yields_to_committed")
        {
            return self.newest_safe(namespace);
        }
        self.newest_whole(namespace)
    }

    /// Whether a home node called it protected before it was gone, nothing newer is known to be, and this node has not found otherwise while all
    /// its nodes are there: those that are away may come back with its blocks. Not for long: two such steps, and one that has only
    /// committed, would hold all slots for good.
    fn waits_for_the_gone(&self, checkpoint: &Checkpoint, waited: Waited) -> bool {
        let key = &checkpoint.key;
        let is_for_good = planted!("words_of_the_gone_keep_all");
        // Whoever has waited for something else before has not waited for these.
        let ended = checkpoint.standing.words_ended_at();
        let has_waited = self.has_waited_for_the_gone(waited, ended.unwrap_or_default());
        let may_wait = (!has_waited || is_for_good)
            && self.setup.slots_per_rank > 2
            && checkpoint.standing.was_called_protected()
            && !planted!("words_end_with_homes");
        if !may_wait {
            return false;
        }
        let nodes = checkpoint.manifest.as_ref();
        let mut nodes = nodes.into_iter().flat_map(|it| self.stakeholders(it));
        let is_conclusive =
            nodes.all(|node| self.is_up(&node)) || planted!("the_gone_have_nothing");
        let newest = self.newest_safe(&key.namespace);
        newest.is_none_or(|newest| newest <= *key)
            && !(is_conclusive && self.is_found_bare(checkpoint))
    }

    /// Whether a trainer has waited long enough for nodes that are gone since then, or so long that it does not matter: where links come
    /// and go, each of their ends would begin it anew.
    fn has_waited_for_the_gone(&self, waited: Waited, since: Now) -> bool {
        let waited_for_them = waited.ms.min(self.now.since(since));
        waited_for_them >= limits::GONE_WORDS_MS || waited.lacking_ms >= limits::GONE_WORDS_MAX_MS
    }

    /// The newest checkpoint that could be restored from RAM right now, as far as this node knows.
    fn newest_whole(&self, namespace: &Namespace) -> Option<CheckpointKey> {
        let all_up = |manifest: &ManifestBytes| {
            let mut shards = manifest.manifest().shards.iter();
            shards.all(|shard| self.is_up(&shard.node))
        };
        let whole = |c: &&Checkpoint| {
            let bears = self.bears(c).map_or(0, |bears| bears.losses);
            c.manifest
                .as_deref()
                .is_some_and(|m| bears > 0 || all_up(m))
        };
        let mut of_it = self.checkpoints.values().rev();
        let newest = of_it.find(|c| c.key.namespace == *namespace && whole(c))?;
        Some(newest.key.clone())
    }

    /// Whether waiting would not make it safer: nodes that it needs are gone, it was left unprotected by an older run, or no group
    /// codes some shard of it.
    pub(crate) fn is_stuck(&self, checkpoint: &Checkpoint) -> bool {
        let Some(manifest) = &checkpoint.manifest else {
            return false;
        };
        let unprotected = checkpoint.state < CheckpointState::Protected;
        let is_uncoded = || {
            let coded_here = self.setup.geometry.is_some() && !planted!("uncoded_never_yield");
            coded_here && uncoded_node(manifest).is_some()
        };
        (unprotected && (self.is_of_older_run(checkpoint) || is_uncoded()))
            || !self.gone_nodes(manifest).is_empty()
    }

    /// Whether a rank here that has sealed it has sealed a newer step since, so that it waits for ranks that skipped it or
    /// hang: each of these steps would hold its slot until it is too old to commit, and no newer one would get any.
    fn was_gone_past(&self, checkpoint: &Checkpoint) -> bool {
        let mut newer = self
            .checkpoints
            .values()
            .filter(|c| c.key.namespace == checkpoint.key.namespace && c.key > checkpoint.key);
        newer.any(|c| {
            let mut ranks = checkpoint.shards.keys();
            ranks.any(|rank| c.shards.contains_key(rank))
        })
    }

    fn is_protected(&self, key: &CheckpointKey) -> bool {
        let checkpoint = self.checkpoints.get(key);
        checkpoint.is_some_and(|c| c.state >= CheckpointState::Protected)
    }

    /// Slots of a rank that count against what it may have. One that only waits for the durable tier to take it does
    /// not, as long as there is room for another: the tier's pace is none of the trainer's concern. Neither is what readers open, a step that
    /// somebody has pinned, nor a process that hangs with an old step open: three of them would stop every save for good.
    pub(super) fn slots_that_count(&self, namespace: &Namespace, rank: Rank) -> usize {
        let waits_for_tier = self.upload_in_turn(namespace).filter(|key| {
            let newest = self.newest_safe(namespace);
            newest.is_some_and(|newest| newest > *key)
        });
        let counts = |used_for: &SlotUse| match used_for {
            SlotUse::Sealed(key) => {
                Some(key) != waits_for_tier.as_ref()
                    && !self.is_only_read(key)
                    && !self.is_pinned(key)
            }
            other => other.is_for_saves(),
        };
        let slots = self.slots.values();
        slots
            .filter(|slot| slot.namespace == *namespace && slot.rank == rank)
            .filter(|slot| counts(&slot.used_for))
            .count()
    }

    /// Whether a checkpoint is here only because somebody has it open.
    fn is_only_read(&self, key: &CheckpointKey) -> bool {
        let checkpoint = self.checkpoints.get(key);
        checkpoint.is_some_and(|c| self.kept_for(c).is_some())
    }

    /// Why a checkpoint is here that a newer one has made needless.
    pub(crate) fn kept_for(&self, checkpoint: &Checkpoint) -> Option<KeptFor> {
        let is_read = Self::is_read(checkpoint) && self.is_needless_but_for_readers(checkpoint);
        is_read.then_some(KeptFor::Reader)
    }

    /// Since when a connection has waited, for a new wish of it.
    pub(super) fn slot_wish(&self, conn: ConnId, bytes: u64, timeout_ms: u32) -> WaiterWish {
        let since: Now = self.now;
        let until = since.plus(u64::from(timeout_ms));
        let refused = self.conns.get(&conn).and_then(|it| it.refused_slot);
        let recent = refused.filter(|it| {
            since.since(it.last) <= limits::ASKED_AGAIN_MS && !planted!("each_request_lacks_anew")
        });
        WaiterWish::Slot {
            bytes,
            since,
            lacking_since: recent.map_or(since, |it| it.lacking_since),
            until,
        }
    }

    /// A trainer that waited for a slot is refused one.
    pub(super) fn note_refused_slot(&mut self, conn: ConnId, lacking_since: Now) {
        let last = self.now;
        if let Some(conn) = self.conns.get_mut(&conn) {
            conn.refused_slot = Some(RefusedSlot {
                lacking_since,
                last,
            });
        }
    }

    /// Whether what the rank has here is all being filled over this connection.
    fn holds_all(&self, conn: ConnId, namespace: &Namespace, rank: Rank) -> bool {
        let mut its = self.slots.values();
        !its.any(|slot| {
            slot.namespace == *namespace
                && slot.rank == rank
                && !slot.is_board()
                && slot.used_for != SlotUse::Held(conn)
        })
    }

    /// What the refusal of a slot advises, by what holds them.
    pub(super) fn slot_advice(&self, conn: ConnId) -> String {
        let attached = self.conns.get(&conn);
        let of_it = attached.and_then(|a| Some((a.namespace.clone(), a.trainer?.1)));
        let Some((namespace, rank)) = of_it else {
            return "connect again".into();
        };
        if self.holds_all(conn, &namespace, rank) {
            return "this trainer has them all and has sealed none: close or give up what it writes".into();
        }
        let mine = |c: &&Checkpoint| c.key.namespace == namespace && c.shards.contains_key(&rank);
        let held: Vec<&Checkpoint> = self.checkpoints.values().filter(mine).collect();
        if held.iter().any(|c| Self::is_read(c)) {
            return "a reader has a step open: let it end, or raise memory.slots_per_rank".into();
        }
        let mut open = held.iter().filter(|c| c.manifest.is_none());
        if let Some(why) = open.find_map(|c| self.no_room_of(c)) {
            return format!("a step cannot commit: {why}");
        }
        if held.iter().any(|c| c.manifest.is_none()) {
            return "a step has not committed, because a rank has not sealed it: save on every rank"
                .into();
        }
        if let Some(why) = held.iter().find_map(|c| self.no_room_of(c)) {
            return format!("steps cannot be protected, and the last protected one stays: {why}");
        }
        "steps follow one another faster than they are protected: save less often, or raise memory.slots_per_rank"
            .into()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use storaged_codec::{Digest, digest};
    use storaged_wire::local::DurableWish;
    use storaged_wire::peer::PeerMessage;
    use storaged_wire::{Generation, NodeName, RunId};

    use super::{Waited, Yield};
    use crate::api::Now;
    use crate::testkit::{at, hear, hear_from_all, last_of, manifest, name};
    use crate::{Input, Node, limits};

    /// A step that all have committed, and that `a` calls protected if it is a home node of it.
    fn committed(step: u64) -> (Node, Digest) {
        let mut node = last_of(&["a", "b", "c", "d"], 2, 1);
        let manifest = manifest(step, &["a", "b"], &["c"], 4096, digest(b"shard"));
        let manifest = manifest.seal().expect("a sound manifest");
        let committed = PeerMessage::Committed {
            manifest: manifest.bytes().to_vec().into(),
            durable: DurableWish::Policy,
        };
        hear_from_all(&mut node, 1, &committed);
        let manifest = manifest.name();
        assert!(!stays(&node, manifest, 0), "it has only committed");
        let protected = PeerMessage::Protected { manifest, bears: 1 };
        hear(&mut node, 2, "a", protected);
        (node, manifest)
    }

    fn homes(node: &Node, manifest: Digest) -> BTreeSet<NodeName> {
        let cx = node.context();
        let homes = cx.homes_of(&cx.by_name[&manifest]);
        homes.into_iter().collect()
    }

    fn stays(node: &Node, manifest: Digest, waited_ms: u64) -> bool {
        let cx = node.context();
        let checkpoint = &cx.checkpoints[&cx.by_name[&manifest]];
        cx.waits_for_the_gone(checkpoint, waited(waited_ms))
    }

    fn waited(ms: u64) -> Waited {
        Waited { ms, lacking_ms: ms }
    }

    /// Those that called it protected have just gone.
    fn assert_saves_go_on(node: &mut Node, manifest: Digest) {
        let long = 2 * limits::GONE_WORDS_MS;
        assert!(stays(node, manifest, long), "waited for something else");
        node.context_mut().now = Now(4 + limits::GONE_WORDS_MS);
        assert!(!stays(node, manifest, long), "saves go on");
    }

    /// What it counts while two are away, one of which calls the step protected, it may have to count again.
    #[test]
    fn a_home_node_that_counts_too_little_while_others_are_gone_waits_for_them() {
        let mut tried = 0;
        for step in 1..20 {
            let (mut node, manifest) = committed(step);
            let homes = homes(&node, manifest);
            if !homes.contains(node.context().me()) || !homes.contains(&name("a")) {
                continue;
            }
            for gone in ["a", "c"] {
                node.handle(Now(3), Input::PeerDown { node: name(gone) });
            }
            // What those that are up hold it has heard by then, or would have.
            node.context_mut().now = Now(3 + limits::DOUBT_MS);
            assert!(stays(&node, manifest, 4_000), "they may come back");
            assert_saves_go_on(&mut node, manifest);
            tried += 1;
        }
        assert!(tried > 0, "it is a home node of some step with a");
    }

    /// A step of the run before lacks nodes that are gone. Whoever sees few others is gone itself, and may not have heard that it is protected.
    #[test]
    fn who_is_cut_off_lets_go_no_step_of_the_run_before_at_once() {
        let goes = |gone: &[&str], waited_ms| {
            let mut node = last_of(&["a", "b", "c", "d", "e"], 2, 1);
            let [manifest, base] = [1, 2].map(|step| {
                let it = manifest(step, &["a", "e"], &["c"], 4096, digest(b"shard"));
                it.seal().expect("a sound manifest")
            });
            for step in [&manifest, &base] {
                hear_from_all(&mut node, 1, &crate::testkit::committed(step));
            }
            for gone in gone {
                node.handle(Now(2), Input::PeerDown { node: name(gone) });
            }
            node.handle(Now(limits::JOIN_GRACE_MS + 10_000), Input::Tick);
            let cx = node.context_mut();
            let key = cx.by_name[&manifest.name()].clone();
            let table = cx.namespaces.get_mut(&key.namespace);
            let table = table.expect("the job is known");
            table.fence = RunId::new(2);
            // Ranks have gone on from the other step.
            table.opened.opens(at(2));
            cx.may_yield(&cx.checkpoints[&key], None, waited(waited_ms)) == Some(Yield::Checkpoint)
        };
        assert!(goes(&["a"], 2_000), "a alone has its shard");
        assert!(!goes(&["a", "b", "c"], 2_000), "it is away itself");
        assert!(goes(&["a", "b", "c"], limits::GONE_WORDS_MS), "saves go on");
    }

    /// A home node alone has found all blocks of a step at once, and loses its memory: that the other ones cannot call the step protected
    /// says nothing against it, while nodes with its blocks are away. A save waits for them, and not for good.
    #[test]
    fn a_step_that_a_home_node_called_protected_outlives_its_memory_for_a_while() {
        let mut tried = 0;
        for step in 1..20 {
            let (mut node, manifest) = committed(step);
            let homes = homes(&node, manifest);
            if homes.contains(node.context().me()) || !homes.contains(&name("a")) {
                continue;
            }
            node.handle(Now(3), Input::PeerDown { node: name("a") });
            assert!(stays(&node, manifest, 4_000), "it may come back");
            let back = Input::PeerUp {
                node: name("a"),
                generation: Generation::new(2),
            };
            node.handle(Now(4), back);
            assert!(stays(&node, manifest, 4_000), "others hold what it counted");
            assert_saves_go_on(&mut node, manifest);
            tried += 1;
        }
        assert!(tried > 0, "a is a home node of some step");
    }
}
