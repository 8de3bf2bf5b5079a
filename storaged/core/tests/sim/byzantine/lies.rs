//! A lie of every kind of message. The match in `World::lie_of_kind` has no arm for what is left: whoever adds a message says here what a liar
//! would make of it.

mod jobs;
mod runs;
mod sessions;
mod steps;

use storaged_wire::peer::PeerMessage;

use super::super::world::World;
use super::kinds::Kind;
use super::known::Address;

/// A token that is not the job's.
const OWN_TOKEN: &[u8] = b"a token of its own";

impl World {
    /// Something of this kind that is not so; none if it has nothing to make it of.
    pub(super) fn lie_of_kind(&mut self, at: Address, kind: Kind) -> Option<PeerMessage> {
        Some(match kind {
            Kind::Fences => PeerMessage::Fences(vec![self.some_fence(at)]),
            Kind::PromiseRun => self.lie_of_a_wish(at),
            Kind::RunPromised => self.lie_of_a_promise(at),
            Kind::RaiseFence => self.lie_of_an_opened_run(at),
            Kind::FenceRaised => self.lie_of_a_raised_fence(at),
            Kind::RunQuery => self.question_of_a_run(),
            Kind::RunAnswer => self.lie_of_a_run(at),
            Kind::ShardsSealed => self.lie_of_shards(at),
            Kind::SealedNoted => self.lie_of_noted_shards(at),
            Kind::Description => self.lie_of_a_description(at),
            Kind::Committed => self.lie_of_a_commit(at)?,
            Kind::ManifestStored => self.lie_of_a_stored_manifest(at),
            Kind::Abandoned => self.lie_of_an_abandoned_step(at),
            Kind::Propose => PeerMessage::Propose(self.some_session_record(at)),
            Kind::Ready => self.lie_of_readiness(at),
            Kind::Failed => self.lie_of_a_failed_session(at),
            Kind::Begin => self.lie_of_a_beginning(at),
            Kind::Finished => self.lie_of_a_finished_part(at),
            Kind::Close => self.lie_of_a_closed_session(at),
            Kind::Protected => self.lie_of_protection(at),
            Kind::Durable => self.lie_of_a_durable_step(at),
            Kind::HoldingsQuery => self.question_of_holdings(),
            Kind::Holdings => self.lie_of_holdings(at),
            Kind::ManifestQuery => self.question_of_a_manifest(at),
            Kind::ManifestAnswer => self.lie_of_a_manifest(at),
            Kind::VerifyQuery => self.question_of_a_check(at),
            Kind::VerifyAnswer => self.lie_of_a_check(at),
            Kind::Quarantined => self.lie_of_a_damaged_copy(at),
            Kind::NoRoom => self.lie_of_no_room(at),
            Kind::Preparing => self.lie_of_preparations(at),
            Kind::RepairAwaited => self.lie_of_an_awaited_repair(at),
            Kind::TableQuery => PeerMessage::TableQuery(self.some_table(at)),
            Kind::TablePage => self.lie_of_a_table(at),
            Kind::Parcel => self.lie_of_a_parcel(at),
            Kind::ParcelQuery => PeerMessage::ParcelQuery(self.some_page(at)),
            Kind::ParcelPage => self.lie_of_a_page(at),
            Kind::Progress => self.lie_of_progress(at),
            Kind::Held => self.lie_of_blocks(at),
            Kind::HeldNoted => self.lie_of_noted_blocks(at),
            Kind::Owed => self.lie_of_a_debt(at),
            Kind::Unowed => self.lie_of_no_debt(at),
            Kind::Superseded => self.lie_of_a_superseded_step(at),
            Kind::DurableFailed => self.lie_of_a_failed_upload(at),
            Kind::Marks => self.lie_of_a_mark(at),
            Kind::Attached => self.lie_of_trainers(),
            Kind::Evicted => self.lie_of_an_eviction(at),
            Kind::Drop => self.lie_of_an_order(at),
            Kind::Dropped => self.lie_of_a_dropped_job(at),
            Kind::FailedRestarts => self.lie_of_a_failed_restart(at),
            Kind::Pins => self.lie_of_a_pin(at),
            Kind::PinNoted => self.lie_of_a_noted_pin(at),
            Kind::Draining => self.lie_of_a_drain(),
            Kind::DrainNoted => self.lie_of_a_noted_drain(),
            Kind::KeyWanted => self.question_of_a_key(),
            Kind::KeyTold => self.lie_of_a_key(),
            Kind::DurableRemoved => self.lie_of_a_removal(),
            Kind::Rotated => self.lie_of_a_changed_token(at)?,
            Kind::WithdrawRun => self.lie_of_a_withdrawn_run(at),
            Kind::CheckOrder => self.question_of_an_order(at),
            Kind::OrderChecked => self.lie_of_a_checked_order(at),
        })
    }
}
