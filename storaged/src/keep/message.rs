//! What is said about descriptors: the datagrams of systemd's descriptor store (`sd_notify(3)`), and for our own keeper a request for all
//! that it holds.
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
const HELD: &str = "FDNAME=";
const END: &str = "END=";

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
}

impl ToHolder {
    /// The datagram.
    pub fn encode(&self) -> String {
        match self {
            Self::Store(name) => format!("{STORE}{name}"),
            Self::Remove(name) => format!("{REMOVE}{name}"),
            Self::List => LIST.into(),
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
            (text == LIST).then_some(Self::List)
        }
    }
}

/// What the keeper answers to [`ToHolder::List`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromKeeper {
    /// The descriptor that comes with this has this name.
    Held(HolderName),
    /// So many were sent: there are no more.
    End(usize),
}

impl FromKeeper {
    /// The datagram.
    pub fn encode(&self) -> String {
        match self {
            Self::Held(name) => format!("{HELD}{name}"),
            Self::End(count) => format!("{END}{count}"),
        }
    }

    /// None for anything else.
    pub fn decode(body: &[u8]) -> Option<Self> {
        let text = str::from_utf8(body).ok()?;
        if let Some(name) = text.strip_prefix(HELD) {
            Some(Self::Held(HolderName::new(name)?))
        } else {
            Some(Self::End(text.strip_prefix(END)?.parse().ok()?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storaged_wire::SlotId;

    #[test]
    fn datagrams_are_systemds() {
        let slot = || HolderName::from(KeptName::Slot(SlotId::new(7)));
        for (message, text) in [
            (ToHolder::Store(slot()), "FDSTORE=1\nFDNAME=slot-7"),
            (ToHolder::Remove(slot()), "FDSTOREREMOVE=1\nFDNAME=slot-7"),
            (ToHolder::List, "FDLIST=1"),
        ] {
            assert_eq!(message.encode(), text);
            assert_eq!(ToHolder::decode(text.as_bytes()), Some(message));
        }
        for (message, text) in [
            (FromKeeper::Held(slot()), "FDNAME=slot-7"),
            (FromKeeper::End(3), "END=3"),
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
            &long,
        ] {
            assert_eq!(ToHolder::decode(odd.as_bytes()), None, "{odd:?}");
        }
        assert_eq!(ToHolder::decode(b"FDSTORE=1\nFDNAME=\xff"), None);
        for odd in ["", "FDNAME=", "END=", "END=-1", "END=1 "] {
            assert_eq!(FromKeeper::decode(odd.as_bytes()), None, "{odd:?}");
        }
    }
}
