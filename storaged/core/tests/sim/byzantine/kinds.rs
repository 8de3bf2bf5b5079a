//! Every kind of peer message by its name. A kind that is new in `PeerMessage` does not compile until it is named here, nor then until the
//! liar says it (`lies.rs`): a message that nobody ever lied with is one that nobody knows to be withstood.

use storaged_wire::peer::PeerMessage;

macro_rules! kinds {
    ($($kind:ident),+ $(,)?) => {
        /// Which message it is, whatever it says.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Kind { $($kind),+ }

        /// All there are.
        pub const KINDS: &[Kind] = &[$(Kind::$kind),+];

        /// That of a message.
        pub fn kind_of(message: &PeerMessage) -> Kind {
            match message { $(PeerMessage::$kind { .. } => Kind::$kind),+ }
        }
    };
}

kinds! {
    Fences,
    PromiseRun,
    RunPromised,
    RaiseFence,
    FenceRaised,
    RunQuery,
    RunAnswer,
    ShardsSealed,
    SealedNoted,
    Description,
    Committed,
    ManifestStored,
    Abandoned,
    Propose,
    Ready,
    Failed,
    Begin,
    Finished,
    Close,
    Protected,
    Durable,
    HoldingsQuery,
    Holdings,
    ManifestQuery,
    ManifestAnswer,
    VerifyQuery,
    VerifyAnswer,
    Quarantined,
    NoRoom,
    Preparing,
    RepairAwaited,
    TableQuery,
    TablePage,
    Parcel,
    ParcelQuery,
    ParcelPage,
    Progress,
    Held,
    HeldNoted,
    Owed,
    Unowed,
    Superseded,
    DurableFailed,
    Marks,
    Attached,
    Evicted,
    Drop,
    Dropped,
    FailedRestarts,
    Pins,
    PinNoted,
    Draining,
    DrainNoted,
    KeyWanted,
    KeyTold,
    DurableRemoved,
    Rotated,
    WithdrawRun,
    CheckOrder,
    OrderChecked,
}
