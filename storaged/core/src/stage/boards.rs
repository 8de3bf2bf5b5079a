//! Boards: memory that trainers write at any time and that outlives them, for what a restarted process wants at once. The
//! node keeps one per rank and kind until the job leaves RAM, and never looks into it: what is on it is torn wherever its
//! writer died, and its readers must see that for themselves.

use std::collections::BTreeSet;

use storaged_wire::local::{BoardKind, Reply};
use storaged_wire::{Namespace, Owner, Rank, Refusal, RefusalCode, RunId, SlotId};

use crate::api::RequestId;
use crate::catalog::{Claim, NamespaceTable, Slot, SlotUse};
use crate::context::Context;
use crate::limits;
use crate::place::wrong_token;

impl SlotUse {
    /// The request that it is being made for, if a client waits for it.
    pub(super) fn maker(&self) -> Option<RequestId> {
        match self {
            Self::Creating(id) | Self::BoardComing(_, id) => Some(*id),
            _ => None,
        }
    }
}

impl Slot {
    /// Whether it is a board, or will be one.
    pub(super) fn is_board(&self) -> bool {
        matches!(self.used_for, SlotUse::Board(_) | SlotUse::BoardComing(..))
    }
}

impl Context {
    /// Gives a rank's board, the one that is there or a new one.
    pub(crate) fn board(
        &mut self,
        id: RequestId,
        rank: Rank,
        kind: BoardKind,
        bytes: u64,
    ) -> Result<(), Refusal> {
        let attached = self.attached(id)?.clone();
        let namespace = &attached.namespace;
        // Who reads by being an operator alone writes nothing of the job, and a board is there to be written.
        let said = attached.said;
        if said.is_none() && !planted!("operators_get_boards") {
            return Err(wrong_token(namespace));
        }
        let before = self.board_of(namespace, rank, kind)?;
        let before = before.filter(|_| self.are_boards_of(namespace, attached.owner));
        if let Some(slot) = before.filter(|slot| self.slots[slot].capacity >= bytes) {
            self.touch(namespace);
            self.reply_with_slot(id, slot);
            return Ok(());
        }
        if bytes == 0 {
            let text =
                format!("expected a board of rank {rank} in {namespace}, nobody has made one");
            return Err(Refusal::new(RefusalCode::NoCheckpoint, text));
        }
        let boards = self.slots.values().filter(|slot| slot.is_board()).count();
        let is_full = boards >= limits::BOARDS_MAX;
        let makes_room = is_full.then(|| self.unclaimed_for_longest()).flatten();
        if is_full && makes_room.is_none() {
            let text = format!(
                "expected at most {boards} boards on this node, got one more: drop jobs that have ended"
            );
            return Err(Refusal::new(RefusalCode::BudgetFull, text));
        }
        let is_told_of_another = self.is_told_of_another(namespace, attached.owner);
        let coming = SlotUse::BoardComing(kind, id);
        self.create_slot(namespace, rank, bytes, coming)?;
        if let Some(unclaimed) = makes_room {
            self.drop_boards(&unclaimed);
            self.forget_job(&unclaimed);
        }
        if is_told_of_another {
            self.namespaces.remove(namespace);
        }
        self.table_of_boards(namespace, attached.owner);
        // Who else is to have them dropped proves it by the same token.
        if let Some(said) = said {
            self.keys
                .note_orders(namespace, attached.owner, said.orders);
        }
        if is_told_of_another {
            // It may be true.
            self.ask_for_owner(namespace);
        }
        self.touch(namespace);
        // Whoever still writes to it has it mapped; nobody will read it again.
        if let Some(before) = before {
            self.drop_slot(before);
        }
        Ok(())
    }

    fn board_of(
        &self,
        namespace: &Namespace,
        rank: Rank,
        kind: BoardKind,
    ) -> Result<Option<SlotId>, Refusal> {
        let of_rank = |slot: &Slot| slot.namespace == *namespace && slot.rank == rank;
        for (id, slot) in self.slots.iter().filter(|(_, slot)| of_rank(slot)) {
            match slot.used_for {
                SlotUse::Board(its) if its == kind => return Ok(Some(*id)),
                SlotUse::BoardComing(its, _) if its == kind => {
                    let text = "this board is being made for another connection: ask again";
                    return Err(Refusal::new(RefusalCode::Busy, text));
                }
                _ => {}
            }
        }
        Ok(None)
    }

    /// Whether who has this token has the boards of a job.
    fn are_boards_of(&self, namespace: &Namespace, owner: Owner) -> bool {
        let table = self.namespaces.get(namespace);
        table.is_some_and(|table| table.owner == owner)
    }

    /// What boards are filed under. While nobody has opened a run of the job, of two tokens the later one has them.
    fn table_of_boards(&mut self, namespace: &Namespace, owner: Owner) {
        self.pass_boards_to(namespace, owner);
        let new = NamespaceTable {
            claim: Claim::Boards,
            ..NamespaceTable::new(owner)
        };
        self.namespaces.entry(namespace.clone()).or_insert(new);
    }

    /// Whether all that speaks against this owner of a job is one peer's word: it keeps nobody from a board.
    fn is_told_of_another(&self, namespace: &Namespace, owner: Owner) -> bool {
        let table = self.namespaces.get(namespace);
        let is_told = |it: &NamespaceTable| {
            it.owner != owner && it.granted == RunId::ZERO && self.is_hearsay(namespace, it)
        };
        table.is_some_and(is_told)
            && !self.has_boards(namespace)
            && !planted!("one_word_keeps_from_boards")
    }

    pub(crate) fn has_boards(&self, namespace: &Namespace) -> bool {
        let mut slots = self.slots.values();
        slots.any(|slot| slot.namespace == *namespace && slot.is_board())
    }

    /// Whether boards are here that were made for another owner of the job: one peer's word takes them from nobody.
    pub(crate) fn has_boards_of_another(&self, namespace: &Namespace, owner: Owner) -> bool {
        let table = self.namespaces.get(namespace);
        let is_anothers = |table: &NamespaceTable| {
            table.owner != owner && Some(table.owner) != self.newest_of(namespace, owner)
        };
        table.is_some_and(is_anothers)
            && self.has_boards(namespace)
            && !planted!("one_word_takes_boards")
    }

    /// The newest token of a job, if it was changed for it.
    fn newest_of(&self, namespace: &Namespace, owner: Owner) -> Option<Owner> {
        let changed = self.successions.proven(namespace);
        let its = changed.filter(|it| it.owner == owner);
        its.map(|it| it.credential)
    }

    /// Boards of a job whose name nobody has claimed go, with their table, if they are another token's. Those that were made by the newest
    /// token, when nobody had told yet that the owner's was changed for it, are the owner's.
    pub(super) fn pass_boards_to(&mut self, namespace: &Namespace, owner: Owner) {
        let newest = self.newest_of(namespace, owner);
        let table = self.namespaces.get_mut(namespace);
        let Some(table) = table.filter(|table| table.claim == Claim::Boards) else {
            return;
        };
        if Some(table.owner) == newest && !planted!("boards_keep_nobodys_newest") {
            table.owner = owner;
        } else if table.owner != owner {
            self.drop_boards(namespace);
            self.namespaces.remove(namespace);
        }
    }

    /// A board is there. Meanwhile the job may have been opened by another token, whose boards nobody else may write to.
    pub(super) fn board_made(&mut self, slot: SlotId, kind: BoardKind, id: RequestId) {
        let namespace = self.slots[&slot].namespace.clone();
        // Of one that has gone nobody knows whose board it is, and nothing is on it.
        let Some(owner) = self.conns.get(&id.conn).map(|asked| asked.owner) else {
            return self.drop_slot(slot);
        };
        if self.are_boards_of(&namespace, owner) {
            self.slot_mut(slot).used_for = SlotUse::Board(kind);
            return self.reply_with_slot(id, slot);
        }
        self.drop_slot(slot);
        let refusal = match self.check_owner(&namespace, owner) {
            Err(refusal) => refusal,
            Ok(()) => Refusal::new(
                RefusalCode::Busy,
                "another token has had boards made of a job that nobody has opened: ask again",
            ),
        };
        self.reply(id, Reply::Refused(refusal));
    }

    /// Of the jobs that have boards, that nobody has opened and nobody is here for, the one that has been so for longest: it goes where others
    /// would have no board, or so many names that nobody opens would keep them from it for good.
    fn unclaimed_for_longest(&self) -> Option<Namespace> {
        let is_here = |namespace: &Namespace| {
            let mut conns = self.conns.values();
            conns.any(|conn| conn.namespace == *namespace)
        };
        let with_boards = self.slots.values().filter(|slot| slot.is_board());
        let with_boards: BTreeSet<&Namespace> = with_boards.map(|slot| &slot.namespace).collect();
        let is_unclaimed = |namespace: &Namespace| {
            let table = self.namespaces.get(namespace);
            table.is_some_and(|table| table.claim == Claim::Boards)
        };
        let unclaimed = with_boards.into_iter().filter(|it| is_unclaimed(it));
        let idle = unclaimed.map(|namespace| (self.idle_ms(namespace), namespace));
        let idle = idle.filter(|(idle_ms, _)| *idle_ms >= limits::EMPTY_JOB_MIN_MS);
        let longest = idle.filter(|(_, namespace)| !is_here(namespace)).max();
        longest.map(|(_, namespace)| namespace.clone())
    }

    /// A job's boards go with it; one that is being made is somebody's who is here.
    pub(crate) fn drop_boards(&mut self, namespace: &Namespace) {
        let boards: Vec<SlotId> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.namespace == *namespace)
            .filter(|(_, slot)| matches!(slot.used_for, SlotUse::Board(_)))
            .map(|(id, _)| *id)
            .collect();
        for board in boards {
            self.drop_slot(board);
        }
    }
}
