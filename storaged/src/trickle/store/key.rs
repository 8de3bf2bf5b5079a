//! Names of objects: relative, portable, the same in a directory and in S3.

use std::fmt;
use std::str::FromStr;

use super::StoreError;

/// S3 takes 1024 bytes including the configured prefix, which may have the rest.
const KEY_BYTES_MAX: usize = 800;
/// File systems take 255 bytes per name; the rest is for suffixes.
const SEGMENT_BYTES_MAX: usize = 200;

/// The first segment of everything that a store keeps for itself: unfinished uploads and probes.
pub(super) const RESERVED: &str = ".storaged";

/// What the names of probes in it start with.
pub(super) const PROBE_STEM: &str = "probe-";

/// The validated name of an object: segments of `A-Z a-z 0-9 - _ . = + @ , ~`, joined by `/`.
///
/// No segment is empty, `.` or `..`, so a key can neither leave its root nor mean two things.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey(Box<str>);

impl ObjectKey {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key of `name` below this one taken as a folder.
    pub fn join(&self, name: &str) -> Result<Self, StoreError> {
        format!("{self}/{name}").parse()
    }

    /// A key of a small object that is written to see whether the store takes writes, and removed again.
    pub(super) fn of_probe(number: u64) -> Self {
        Self::reserved(&format!("{PROBE_STEM}{number:016x}"))
    }

    /// A key in the reserved folder; `name` is the store's own and known to be valid.
    pub(super) fn reserved(name: &str) -> Self {
        Self(format!("{RESERVED}/{name}").into_boxed_str())
    }
}

impl FromStr for ObjectKey {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let invalid = |expected: &str| StoreError::Invalid {
            what: "object key".into(),
            expected: expected.into(),
            got: format!("{:?}", text.chars().take(100).collect::<String>()),
        };
        if text.len() > KEY_BYTES_MAX {
            return Err(invalid(&format!("at most {KEY_BYTES_MAX} bytes")));
        }
        for segment in text.split('/') {
            if segment.is_empty() || segment == "." || segment == ".." {
                return Err(invalid("relative, with no segment empty, \".\" or \"..\""));
            }
            if segment.len() > SEGMENT_BYTES_MAX {
                return Err(invalid(&format!(
                    "segments of at most {SEGMENT_BYTES_MAX} bytes"
                )));
            }
            if !segment.bytes().all(is_portable) {
                return Err(invalid("only letters, digits and -_.=+@,~ between slashes"));
            }
        }
        if text.split('/').next() == Some(RESERVED) {
            return Err(invalid(
                "not below .storaged, which the store keeps for itself",
            ));
        }
        Ok(Self(text.into()))
    }
}

fn is_portable(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_.=+@,~".contains(&byte)
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Which objects a listing covers: all, or those below one folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyPrefix(Option<ObjectKey>);

impl KeyPrefix {
    /// Every object of the store.
    pub fn root() -> Self {
        Self(None)
    }

    /// The objects below `folder`, not an object of that very name.
    pub fn folder(folder: ObjectKey) -> Self {
        Self(Some(folder))
    }

    /// The folder, or none for the root.
    pub fn as_folder(&self) -> Option<&ObjectKey> {
        self.0.as_ref()
    }

    /// The text that the covered keys start with: empty, or ending in a slash.
    pub fn text(&self) -> String {
        self.0
            .as_ref()
            .map(|folder| format!("{folder}/"))
            .unwrap_or_default()
    }

    pub fn covers(&self, key: &ObjectKey) -> bool {
        key.as_str().starts_with(&self.text())
    }
}

impl fmt::Display for KeyPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}",
            if self.0.is_none() {
                "/".into()
            } else {
                self.text()
            }
        )
    }
}
