//! What is said about descriptors: the datagrams of systemd's descriptor store (`sd_notify(3)`), for our own keeper a request for all
//! that it holds and one for how it is with its holder, and what a keeper and its holder say to one another beside that.
//!
//! The forms are fixed, and a holder reads nothing else. It takes names for mere text: the keeper goes on through an upgrade of the daemon,
//! whose descriptors may be of kinds that the keeper's own version does not know.

use std::fmt;

use super::KeptName;

/// No datagram is longer.
pub const DATAGRAM_MAX: usize = 512;
/// No name is longer; systemd takes up to 255 characters.
const NAME_MAX: usize = 64;

const STORE: &str = "FDSTORE=1\nFDNAME=";
const REMOVE: &str = "FDSTOREREMOVE=1\nFDNAME=";
const LIST: &str = "FDLIST=1";
const WATCH: &str = "FDHOLDER=1";
const HELD: &str = "FDNAME=";
const END: &str = "END=";
const HOLDER_ABSENT: &str = "HOLDER=none";
const HOLDER_HAS_ALL: &str = "HOLDER=all";
const HOLDER_LACKS: &str = "HOLDERLACKS=";

/// A name as a holder sees it: 1 to 64 printable characters without `:`, which separates names in `LISTEN_FDNAMES`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HolderName(String);

impl HolderName {
    /// None for what systemd or the keeper would not take.
    pub fn new(text: &str) -> Option<Self> {
        let is_plain = |it: u8| it.is_ascii_graphic() && it != b':';
        let is_name = (1..=NAME_MAX).contains(&text.len()) && text.bytes().all(is_plain);
        is_name.then(|| Self(text.to_owned()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<KeptName> for HolderName {
    fn from(name: KeptName) -> Self {
        Self(name.to_string())
    }
}

impl fmt::Display for HolderName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a daemon says to who holds its descriptors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToHolder {
    /// Hold the descriptor that comes with this.
    Store(HolderName),
    /// Let go of it.
    Remove(HolderName),
    /// Say what there is. Our keeper's only: systemd hands descriptors over with exec.
    List,
    /// Say whether a holder has it too, now and at each change. Only to a keeper that says in the environment that it does.
    Watch,
}

impl ToHolder {
    /// The datagram.
    pub fn encode(&self) -> String {
        match self {
            Self::Store(name) => format!("{STORE}{name}"),
            Self::Remove(name) => format!("{REMOVE}{name}"),
            Self::List => LIST.into(),
            Self::Watch => WATCH.into(),
        }
    }

    /// None for anything else.
    pub fn decode(body: &[u8]) -> Option<Self> {
        let text = str::from_utf8(body).ok()?;
        if let Some(name) = text.strip_prefix(STORE) {
            Some(Self::Store(HolderName::new(name)?))
        } else if let Some(name) = text.strip_prefix(REMOVE) {
            Some(Self::Remove(HolderName::new(name)?))
        } else {
            let plain = [Self::List, Self::Watch];
            plain.into_iter().find(|order| order.encode() == text)
        }
    }
}

/// What the keeper says of its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HolderReport {
    /// It was given none.
    Absent,
    /// The holder has all that the keeper has, as far as is known.
    HasAll,
    /// It has not said so since then, in seconds since 1970.
    Lacks { since: u64 },
}

/// What the keeper answers to [`ToHolder::List`] and [`ToHolder::Watch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromKeeper {
    /// The descriptor that comes with this has this name.
    Held(HolderName),
    /// So many were sent: there are no more.
    End(usize),
    /// How it is with the holder from now on.
    Holder(HolderReport),
}

impl FromKeeper {
    /// The datagram.
    pub fn encode(&self) -> String {
        match self {
            Self::Held(name) => format!("{HELD}{name}"),
            Self::End(count) => format!("{END}{count}"),
            Self::Holder(HolderReport::Absent) => HOLDER_ABSENT.into(),
            Self::Holder(HolderReport::HasAll) => HOLDER_HAS_ALL.into(),
            Self::Holder(HolderReport::Lacks { since }) => format!("{HOLDER_LACKS}{since}"),
        }
    }

    /// None for anything else.
    pub fn decode(body: &[u8]) -> Option<Self> {
        let text = str::from_utf8(body).ok()?;
        if let Some(name) = text.strip_prefix(HELD) {
            return Some(Self::Held(HolderName::new(name)?));
        }
        if let Some(count) = text.strip_prefix(END) {
            return Some(Self::End(count.parse().ok()?));
        }
        Some(Self::Holder(match text {
            HOLDER_ABSENT => HolderReport::Absent,
            HOLDER_HAS_ALL => HolderReport::HasAll,
            _ => {
                let since = text.strip_prefix(HOLDER_LACKS)?.parse().ok()?;
                HolderReport::Lacks { since }
            }
        }))
    }
}

const ATTACH: &str = "HOLDATTACH=";
const DAEMON: &str = "HOLDDAEMON=";
const ANEW: &str = "HOLDANEW=1";
const COUNT: &str = "HOLDCOUNT=1";
const RELEASE: &str = "HOLDRELEASE=1";
const WHO: &str = "HOLDWHO=1";
const BUSY: &str = "HOLDBUSY=";
const HOLDS: &str = "HOLDS=";
const LACKS: &str = "HOLDLACKS=";
const RELEASED: &str = "HOLDRELEASED=";
const STRANGER: &str = "HOLDSTRANGER=";

/// A keeper, to its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeeperIdentity {
    /// The number of its process, as it sees it.
    pub process: u32,
    /// The same over all its connections, and no other keeper's.
    pub mark: u64,
}

/// What is said to a holder beside [`ToHolder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldOrder {
    /// What comes over this connection is for this keeper's daemon.
    Attach(KeeperIdentity),
    /// The daemon's process. Its pidfd comes with this: while it runs nobody else is let in.
    Daemon(u32),
    /// What is stored from here up to the next count takes the place of all that is held.
    Anew,
    /// Say how much is held.
    Count,
    /// Let go of everything, if no daemon runs that has it.
    Release,
    /// Say which keeper is attached, as if it were in the way.
    Who,
}

impl HoldOrder {
    /// The datagram.
    pub fn encode(self) -> String {
        match self {
            Self::Attach(KeeperIdentity { process, mark }) => format!("{ATTACH}{process},{mark}"),
            Self::Daemon(process) => format!("{DAEMON}{process}"),
            Self::Anew => ANEW.into(),
            Self::Count => COUNT.into(),
            Self::Release => RELEASE.into(),
            Self::Who => WHO.into(),
        }
    }

    /// None for anything else.
    pub fn decode(body: &[u8]) -> Option<Self> {
        let text = str::from_utf8(body).ok()?;
        if let Some(keeper) = text.strip_prefix(ATTACH) {
            let (process, mark) = keeper.split_once(',')?;
            let (process, mark) = (process.parse().ok()?, mark.parse().ok()?);
            return Some(Self::Attach(KeeperIdentity { process, mark }));
        }
        if let Some(process) = text.strip_prefix(DAEMON) {
            return Some(Self::Daemon(process.parse().ok()?));
        }
        let plain = [Self::Anew, Self::Count, Self::Release, Self::Who];
        plain.into_iter().find(|order| order.encode() == text)
    }
}

/// What a holder answers beside [`FromKeeper`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldAnswer {
    /// No: it holds for the keeper or the daemon of this process, which is there.
    Busy(u32),
    /// It took everything, and holds this now.
    Holds(HeldCount),
    /// So many of what came it did not take.
    Lacks(usize),
    /// It let go of so many. The keeper that is attached hears it too, and does so if its daemon does not run.
    Released(usize),
    /// No: this user id is not its own.
    Stranger(u32),
}

/// How much a holder has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldCount {
    /// Descriptors.
    pub held: usize,
    /// Those of before that it let go, as what came anew took their place.
    pub freed: usize,
}

impl HoldAnswer {
    /// The datagram.
    pub fn encode(self) -> String {
        match self {
            Self::Busy(process) => format!("{BUSY}{process}"),
            Self::Holds(HeldCount { held, freed }) => format!("{HOLDS}{held},{freed}"),
            Self::Lacks(count) => format!("{LACKS}{count}"),
            Self::Released(count) => format!("{RELEASED}{count}"),
            Self::Stranger(user) => format!("{STRANGER}{user}"),
        }
    }

    /// None for anything else.
    pub fn decode(body: &[u8]) -> Option<Self> {
        let text = str::from_utf8(body).ok()?;
        if let Some(counts) = text.strip_prefix(HOLDS) {
            let (held, freed) = counts.split_once(',')?;
            let (held, freed) = (held.parse().ok()?, freed.parse().ok()?);
            Some(Self::Holds(HeldCount { held, freed }))
        } else if let Some(process) = text.strip_prefix(BUSY) {
            Some(Self::Busy(process.parse().ok()?))
        } else if let Some(count) = text.strip_prefix(LACKS) {
            Some(Self::Lacks(count.parse().ok()?))
        } else if let Some(count) = text.strip_prefix(RELEASED) {
            Some(Self::Released(count.parse().ok()?))
        } else {
            Some(Self::Stranger(text.strip_prefix(STRANGER)?.parse().ok()?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storaged_wire::SlotId;

    #[test]
    fn orders_and_answers_make_the_round_trip_and_are_short() {
        let keeper = KeeperIdentity {
            process: u32::MAX,
            mark: u64::MAX,
        };
        for order in [
            HoldOrder::Attach(keeper),
            HoldOrder::Daemon(7),
            HoldOrder::Anew,
            HoldOrder::Count,
            HoldOrder::Release,
            HoldOrder::Who,
        ] {
            let body = order.encode();
            assert!(body.len() <= DATAGRAM_MAX);
            assert_eq!(HoldOrder::decode(body.as_bytes()), Some(order));
            assert_eq!(ToHolder::decode(body.as_bytes()), None, "{body}");
        }
        let counts = HeldCount { held: 12, freed: 3 };
        for answer in [
            HoldAnswer::Busy(7),
            HoldAnswer::Holds(counts),
            HoldAnswer::Lacks(1),
            HoldAnswer::Released(0),
            HoldAnswer::Stranger(65_534),
        ] {
            let body = answer.encode();
            assert!(body.len() <= DATAGRAM_MAX);
            assert_eq!(HoldAnswer::decode(body.as_bytes()), Some(answer));
            assert_eq!(FromKeeper::decode(body.as_bytes()), None, "{body}");
        }
        for odd in [
            "",
            "HOLDATTACH=1",
            "HOLDATTACH=1,",
            "HOLDANEW=2",
            "HOLDCOUNT=1\n",
            "HOLDDAEMON=-1",
        ] {
            assert_eq!(HoldOrder::decode(odd.as_bytes()), None, "{odd:?}");
        }
        for odd in ["", "HOLDS=1", "HOLDS=,", "HOLDBUSY=", "HOLDLACKS=-1"] {
            assert_eq!(HoldAnswer::decode(odd.as_bytes()), None, "{odd:?}");
        }
        assert_eq!(HoldOrder::decode(b"HOLDANEW=\xff"), None);
    }

    #[test]
    fn datagrams_are_systemds() {
        let slot = || HolderName::from(KeptName::Slot(SlotId::new(7)));
        for (message, text) in [
            (ToHolder::Store(slot()), "FDSTORE=1\nFDNAME=slot-7"),
            (ToHolder::Remove(slot()), "FDSTOREREMOVE=1\nFDNAME=slot-7"),
            (ToHolder::List, "FDLIST=1"),
            (ToHolder::Watch, "FDHOLDER=1"),
        ] {
            assert_eq!(message.encode(), text);
            assert_eq!(ToHolder::decode(text.as_bytes()), Some(message));
        }
        let report = FromKeeper::Holder;
        let lacks = HolderReport::Lacks { since: u64::MAX };
        for (message, text) in [
            (FromKeeper::Held(slot()), "FDNAME=slot-7"),
            (FromKeeper::End(3), "END=3"),
            (report(HolderReport::Absent), "HOLDER=none"),
            (report(HolderReport::HasAll), "HOLDER=all"),
            (report(lacks), "HOLDERLACKS=18446744073709551615"),
        ] {
            assert_eq!(message.encode(), text);
            assert_eq!(FromKeeper::decode(text.as_bytes()), Some(message));
        }
    }

    #[test]
    fn the_longest_datagram_is_within_the_limit() {
        let longest = HolderName::new(&"x".repeat(NAME_MAX)).unwrap();
        assert!(ToHolder::Remove(longest).encode().len() <= DATAGRAM_MAX);
        assert!(KeptName::Journal(u64::MAX).to_string().len() <= NAME_MAX);
    }

    #[test]
    fn anything_else_is_nothing() {
        let long = format!("FDSTORE=1\nFDNAME={}", "x".repeat(NAME_MAX + 1));
        for odd in [
            "",
            "READY=1",
            "FDSTORE=1",
            "FDSTORE=1\nFDNAME=",
            "FDSTORE=1\nFDNAME=a:b",
            "FDSTORE=1\nFDNAME=a b",
            "FDSTORE=1\nFDNAME=a\nFDPOLL=0",
            "FDNAME=a\nFDSTORE=1",
            "FDSTOREREMOVE=1\nFDNAME=\u{e9}",
            "FDLIST=1\n",
            "FDHOLDER=",
            &long,
        ] {
            assert_eq!(ToHolder::decode(odd.as_bytes()), None, "{odd:?}");
        }
        assert_eq!(ToHolder::decode(b"FDSTORE=1\nFDNAME=\xff"), None);
        for odd in [
            "",
            "FDNAME=",
            "END=",
            "END=-1",
            "END=1 ",
            "HOLDER=",
            "HOLDERLACKS=",
        ] {
            assert_eq!(FromKeeper::decode(odd.as_bytes()), None, "{odd:?}");
        }
    }
}
