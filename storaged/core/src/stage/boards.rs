//! Boards: memory that trainers write at any time and that outlives them, for what a restarted process wants at once. The
//! node keeps one per rank and kind until the job leaves RAM, and never looks into it: what is on it is torn wherever its
//! writer died, and its readers must see that for themselves.

use storaged_wire::local::BoardKind;
use storaged_wire::{Namespace, Rank, Refusal, RefusalCode, SlotId};

use crate::api::RequestId;
use crate::catalog::{Slot, SlotUse};
use crate::context::Context;
use crate::limits;

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
    /// Whether it is none of the slots that a rank saves in.
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
        let before = self.board_of(namespace, rank, kind)?;
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
        if boards >= limits::BOARDS_MAX {
            let text = format!(
                "expected at most {boards} boards on this node, got one more: drop jobs that have ended"
            );
            return Err(Refusal::new(RefusalCode::BudgetFull, text));
        }
        self.namespace_table(namespace, attached.owner);
        self.touch(namespace);
        let coming = SlotUse::BoardComing(kind, id);
        self.create_slot(namespace, rank, bytes, coming)?;
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

    /// A job's boards go with it; one that is being made is somebody's who is here.
    pub(super) fn drop_boards(&mut self, namespace: &Namespace) {
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
