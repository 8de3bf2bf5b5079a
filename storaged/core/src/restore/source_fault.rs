//! Why a rung of a restore did not give a shard back.

use storaged_wire::NodeName;
use storaged_wire::local::Rung;
use storaged_wire::peer::SessionFault;
use thiserror::Error;

/// One try of an opening that failed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub(crate) enum SourceFault {
    /// The reader checked what it got from this rung before.
    #[error("{0:?}: the reader found wrong digests")]
    FoundByReader(Rung),
    /// A session failed, as this node said.
    #[error("{0}: {text}", text = describe(.1))]
    Session(NodeName, SessionFault),
    /// Nothing to check the bytes by.
    #[error("no table of chunk digests came with the bytes")]
    NoTable,
    /// What came to check them by is not the manifest's.
    #[error("the table of chunk digests does not have the root of the manifest")]
    WrongTable,
    /// The durable tier's, in its words.
    #[error("durable tier: {0}")]
    Durable(String),
}

impl SourceFault {
    /// Whether something came that is not what was saved.
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::FoundByReader(_) | Self::NoTable | Self::WrongTable => true,
            Self::Session(_, fault) => is_wrong(fault) || matches!(fault, SessionFault::Corrupt(_)),
            Self::Durable(_) => false,
        }
    }
}

/// Bytes came that were not what they should be.
pub(crate) fn is_wrong(fault: &SessionFault) -> bool {
    matches!(
        fault,
        SessionFault::WrongResult(_)
            | SessionFault::WrongBytes { .. }
            | SessionFault::Unproven { .. }
    )
}

fn describe(fault: &SessionFault) -> String {
    match fault {
        SessionFault::NoManifest => "the manifest is not there".into(),
        SessionFault::NoBlocks => "the blocks are not there".into(),
        SessionFault::NoBasis => "the basis is not there".into(),
        SessionFault::NoRoom(reason) => format!("no room: {reason}"),
        SessionFault::Corrupt(reason) => format!("wrong digest: {reason}"),
        SessionFault::Neighbour { node, reason } => format!("{node} {reason}"),
        SessionFault::WrongResult(reason) => format!("decoded to a wrong digest: {reason}"),
        SessionFault::Aborted => "ended".into(),
        SessionFault::Unproven { node, reason } => {
            format!("decoded to a wrong digest with what {node} holds: {reason}")
        }
        SessionFault::WrongBytes { node, reason } => {
            format!("{node} sent wrong bytes (digest): {reason}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::name;

    #[test]
    fn what_came_wrong_is_told_from_what_did_not_come() {
        let text = String::new;
        let by_n1 = |fault| SourceFault::Session(name("n1"), fault);
        let (node, reason) = (name("n2"), text());
        let wrong = SessionFault::WrongBytes { node, reason };
        let corrupt = [
            SourceFault::FoundByReader(Rung::OwnRam),
            SourceFault::NoTable,
            SourceFault::WrongTable,
            by_n1(SessionFault::Corrupt(text())),
            by_n1(SessionFault::WrongResult(text())),
            by_n1(wrong),
        ];
        assert!(corrupt.iter().all(SourceFault::is_corrupt));
        let absent = [
            by_n1(SessionFault::NoBlocks),
            by_n1(SessionFault::NoRoom(text())),
            by_n1(SessionFault::Aborted),
            SourceFault::Durable("a digest".into()),
        ];
        assert!(!absent.iter().any(SourceFault::is_corrupt));
    }
}
