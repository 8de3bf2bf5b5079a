//! What operators ask a daemon for.

use storaged_wire::drain::{DrainOrder, DrainReport};
use storaged_wire::local::{Reply, Request};

use crate::client::Client;
use crate::connection::{Answer, unexpected};
use crate::error::ClientError;

impl Client {
    /// Ends this node's daemon in order, or asks how far that is: ask again until [`DrainReport::phase`] says that it is over, since a
    /// daemon that nobody asks ends without a report. Only by the operator's socket.
    ///
    /// # Errors
    /// [`ClientError`] if this is another socket, or if the daemon has ended.
    pub fn drain(&mut self, order: DrainOrder) -> Result<DrainReport, ClientError> {
        match self.call("drain", &Request::Drain(order), Answer::Prompt)? {
            (Reply::Draining(report), _) => Ok(report),
            (other, _) => Err(unexpected("drain", "how far it is", &other)),
        }
    }
}
