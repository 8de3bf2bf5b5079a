//! The newest roster that this node has seen, in a file of its own: a daemon that starts while the registry is away goes on in its
//! place, with its memory. If another node has the place by then, peers that know of it refuse its links, and it hears so itself once the
//! registry is back.

use std::path::PathBuf;

use super::roster::{Roster, RosterError};

/// Where it is.
#[derive(Debug, Clone)]
pub struct Remembered {
    path: PathBuf,
}

impl Remembered {
    /// In this file.
    pub fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// The roster, if there is a sound one.
    pub fn read(&self) -> Option<Roster> {
        let bytes = std::fs::read(&self.path).ok()?;
        let read = Roster::parse(&bytes);
        let told = |error: &RosterError| {
            let (path, error) = (self.path.display(), crate::driver::chain(error));
            tracing::warn!(%path, error, "the roster that was remembered cannot be used");
        };
        read.inspect_err(told).ok()
    }

    /// Remembers it. What goes wrong is no reason to stop: it would be missed only while the registry is away.
    pub fn write(&self, roster: &Roster) {
        let beside = self.path.with_extension("new");
        let written = std::fs::write(&beside, roster.bytes())
            .and_then(|()| std::fs::rename(&beside, &self.path));
        if let Err(error) = written {
            let path = self.path.display();
            tracing::warn!(%path, %error, "the roster cannot be remembered");
        }
    }
}
