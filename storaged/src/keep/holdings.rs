//! All that a keeper holds: its table, and the holder that has the same, if there is one.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use super::KeepError;
use super::holder_link::HolderLink;
use super::message::HolderReport;
use super::table::{Table, Taken};

/// A holder that is well has taken the last of it long before.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// A table, and who has it too.
#[derive(Debug, Default)]
pub struct Holdings {
    table: Table,
    link: Option<HolderLink>,
}

/// Whether memory outlives its keeper.
#[derive(Debug, PartialEq, Eq)]
pub enum AfterKeeper {
    /// There is no holder.
    Free,
    /// The holder has all of it.
    Held,
    /// The holder has not said that it has all.
    Unsure,
}

impl Holdings {
    /// With a holder at this path.
    pub fn with_holder(holder: Option<PathBuf>) -> Self {
        Self {
            table: Table::default(),
            link: holder.map(HolderLink::to),
        }
    }

    /// What is held.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Takes what the holder has, before there is a daemon.
    ///
    /// # Errors
    /// [`KeepError::HolderTaken`] if that is another daemon's, which does not end.
    pub async fn take_over(&mut self) -> Result<(), KeepError> {
        match &mut self.link {
            Some(link) => link.take_over(&mut self.table).await,
            None => Ok(()),
        }
    }

    /// Does what the daemon says, and has the holder do it.
    pub fn take(&mut self, body: &[u8], descriptor: Option<OwnedFd>) -> Taken {
        let taken = self.table.take(body, descriptor);
        if let Some(link) = &mut self.link {
            link.note(&taken, &self.table);
        }
        taken
    }

    /// The daemon that was started.
    pub fn daemon_is(&mut self, number: Option<u32>) {
        if let Some(link) = &mut self.link {
            link.daemon_is(number);
        }
    }

    /// Returns when [`Self::turn`] has something to do with the holder.
    pub async fn ready(&self) {
        match &self.link {
            Some(link) => link.ready().await,
            None => std::future::pending().await,
        }
    }

    /// Talks to the holder without waiting for it.
    pub fn turn(&mut self) {
        if let Some(link) = &mut self.link {
            link.turn(&self.table);
        }
    }

    /// Between two daemons: lets go of everything, if an operator had the holder do so. The next daemon begins without memory.
    pub fn let_go_if_told(&mut self) {
        let Some(link) = &mut self.link else { return };
        if !link.take_release() {
            return;
        }
        let descriptors = self.table.len();
        self.table = Table::default();
        link.say_all(&self.table);
        tracing::warn!(descriptors, "let go of everything, as the holder was told");
    }

    /// The process for which the holder has memory now, if another keeper has taken this one's place there.
    pub async fn is_taken(&mut self) -> Option<u32> {
        let link = self.link.as_mut()?;
        link.is_taken(&self.table).await
    }

    /// There is a holder, and it takes what it is given, as far as is known.
    pub fn has_holder(&self) -> bool {
        self.link.as_ref().is_some_and(HolderLink::is_well)
    }

    /// How it is with the holder.
    pub fn report(&self) -> HolderReport {
        let link = self.link.as_ref();
        link.map_or(HolderReport::Absent, HolderLink::report)
    }

    /// Waits until the holder has said that it has all, for some seconds at most, if one is there. The daemon is not there any more.
    pub async fn hand_on(&mut self) -> AfterKeeper {
        let Some(link) = &mut self.link else {
            return AfterKeeper::Free;
        };
        if link.is_there(&self.table) && link.settle(&self.table, LAST_WAIT).await {
            AfterKeeper::Held
        } else {
            link.doubt();
            AfterKeeper::Unsure
        }
    }
}
