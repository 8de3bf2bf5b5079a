//! Keys of the durable tier: what the operator has in a file or a key service, the newest first.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use thiserror::Error;

use crate::trickle::store::StoreError;

/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// Keys that a node may have: one that writes, and those that older checkpoints were written with.
const KEYS_MAX: usize = 16;

/// Names a key without saying anything of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyId([u8; 8]);

/// A key of the tier.
#[derive(Clone, PartialEq, Eq)]
pub struct TierKey {
    id: KeyId,
    secret: [u8; KEY_BYTES],
}

/// All keys of a node, the newest first: that one writes, each of them reads.
#[derive(Clone, PartialEq, Eq)]
pub struct TierKeys(Vec<TierKey>);

/// Why a text holds no keys. It says nothing of what is in it.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum KeysError {
    #[error(
        "expected a key of 64 hexadecimal digits in each line, as `storaged token FILE` makes, got something else in line {line}"
    )]
    Line { line: usize },
    #[error("expected 1 to {KEYS_MAX} keys, the newest first, got {got}")]
    Count { got: usize },
    #[error("expected each key once, got key {id} twice")]
    Twice { id: KeyId },
}

impl KeyId {
    pub(super) fn from_bytes(bytes: [u8; 8]) -> Self {
        Self(bytes)
    }

    pub(super) fn bytes(self) -> [u8; 8] {
        self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Nothing of the secret gets into a log.
impl fmt::Debug for TierKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "key {}", self.id)
    }
}

impl fmt::Debug for TierKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The names of the keys, the newest first.
impl fmt::Display for TierKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids: Vec<String> = self.0.iter().map(|key| key.id.to_string()).collect();
        f.write_str(&ids.join(" "))
    }
}

impl TierKey {
    fn new(secret: [u8; KEY_BYTES]) -> Self {
        let mut id = [0; 8];
        let mut named = blake3::Hasher::new_derive_key("storaged 2026-11 durable tier key id");
        named.update(&secret).finalize_xof().fill(&mut id);
        let id = KeyId(id);
        Self { id, secret }
    }

    pub fn id(&self) -> KeyId {
        self.id
    }

    /// A key for one purpose and one object.
    pub(super) fn derive(&self, context: &str, object: &str) -> [u8; 32] {
        let mut derived = blake3::Hasher::new_derive_key(context);
        derived.update(&self.secret).update(object.as_bytes());
        *derived.finalize().as_bytes()
    }
}

impl TierKeys {
    /// Reads keys from a text: one in a line, the newest first. Lines that begin with `#` say nothing.
    ///
    /// # Errors
    /// [`KeysError`] if there are none, too many, or something else.
    pub fn parse(text: &[u8]) -> Result<Self, KeysError> {
        let mut keys: Vec<TierKey> = Vec::new();
        for (line, text) in (1..).zip(text.split(|byte| *byte == b'\n')) {
            let text = text.trim_ascii();
            if text.is_empty() || text.starts_with(b"#") {
                continue;
            }
            let mut secret = [0; KEY_BYTES];
            let read = hex::decode_to_slice(text, &mut secret);
            read.map_err(|_| KeysError::Line { line })?;
            let key = TierKey::new(secret);
            if keys.iter().any(|known| known.id == key.id) {
                return Err(KeysError::Twice { id: key.id });
            }
            keys.push(key);
        }
        match keys.len() {
            1..=KEYS_MAX => Ok(Self(keys)),
            got => Err(KeysError::Count { got }),
        }
    }

    /// The key that writes.
    pub fn newest(&self) -> &TierKey {
        &self.0[0]
    }

    /// The key of this name.
    pub fn of(&self, id: KeyId) -> Option<&TierKey> {
        self.0.iter().find(|key| key.id == id)
    }
}

/// The keys that a node has now: a reload replaces them, and a key service may not have given them yet.
#[derive(Debug, Default)]
pub struct KeyRing(RwLock<Option<Arc<TierKeys>>>);

impl KeyRing {
    pub fn replace(&self, keys: TierKeys) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(keys));
    }

    /// Whether there are any yet.
    pub fn has_keys(&self) -> bool {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        keys.is_some()
    }

    pub(super) fn get(&self) -> Result<Arc<TierKeys>, StoreError> {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        keys.clone().ok_or_else(|| StoreError::Unavailable {
            what: "encryption".into(),
            source: "trickle.encryption.key_command has given no keys yet".into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_line_by_line_and_shown_by_their_names_alone() {
        let (new, old) = ("11".repeat(32), "22".repeat(32));
        let text = format!("# the newest\n{new}\n\n  {old}\r\n");
        let keys = TierKeys::parse(text.as_bytes()).unwrap();
        assert_eq!(
            keys.newest(),
            &TierKeys::parse(new.as_bytes()).unwrap().0[0]
        );
        for key in &keys.0 {
            assert_eq!(keys.of(key.id()), Some(key));
        }
        let shown = format!("{keys:?} {keys} {:?}", keys.newest());
        assert!(
            !shown.contains("1111") && !shown.contains("2222"),
            "{shown}"
        );
        // Pinned: objects in the tier name their key by it.
        assert_eq!(keys.to_string(), "74aa78d817fc8b56 545322cb089cec88");
    }

    #[test]
    fn what_holds_no_keys_is_refused_without_being_shown() {
        let key = "11".repeat(32);
        let line = |line| KeysError::Line { line };
        for (text, expected) in [
            (String::new(), KeysError::Count { got: 0 }),
            ("# nothing\n".into(), KeysError::Count { got: 0 }),
            (format!("{key}\nsecret"), line(2)),
            (key[1..].to_owned(), line(1)),
            (format!("{key}00"), line(1)),
        ] {
            let error = TierKeys::parse(text.as_bytes()).unwrap_err();
            assert_eq!(error, expected, "{text}");
            assert!(!error.to_string().contains("secret"));
        }
        let twice = TierKeys::parse(format!("{key}\n{key}\n").as_bytes());
        assert!(matches!(twice, Err(KeysError::Twice { .. })));
        let many: Vec<String> = (0..17).map(|n| format!("{n:064x}")).collect();
        let many = TierKeys::parse(many.join("\n").as_bytes());
        assert_eq!(many, Err(KeysError::Count { got: 17 }));
    }
}
