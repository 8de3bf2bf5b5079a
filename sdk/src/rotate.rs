//! A job's token is changed for another one.

use ring::rand::{SecureRandom, SystemRandom};
use storaged_wire::local::{Reply, Request};
use storaged_wire::succession::{SEAL_BYTES, SuccessionError, TokenStanding};
use storaged_wire::{Owner, Rotation};
use thiserror::Error;

use crate::client::Client;
use crate::connection::{Answer, unexpected};
use crate::error::ClientError;

/// Why a job's token is still the same.
#[derive(Debug, Error)]
pub enum RotateError {
    /// The daemon did not take it. If it did not answer, asking again with the same new token goes on with it.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// No change can be made of these tokens.
    #[error(transparent)]
    Tokens(#[from] SuccessionError),
    /// The system gives no random bytes.
    #[error("random bytes could not be drawn")]
    Random,
}

impl Client {
    /// Changes the job's token, by which this connection said hello, for another one. Nobody needs to end for it: trainers that are connected
    /// go on with their saves. Whatever else is asked by the old token is refused from now on.
    ///
    /// # Errors
    /// [`RotateError`]; the job's token is the old one then, or both were refused because somebody else has changed it.
    pub fn rotate(&mut self, old: &[u8], new: &[u8]) -> Result<(), RotateError> {
        let standing = self.token_standing()?;
        let mut seal = [0; SEAL_BYTES];
        let drawn = SystemRandom::new().fill(&mut seal);
        drawn.map_err(|_| RotateError::Random)?;
        let rotation = Rotation::new(&standing, old, new, seal)?;
        Ok(self.done("rotate", &Request::Rotate(Box::new(rotation)))?)
    }

    /// Whether the job's token was changed from `old`, or from one after it, for `new`, by which this connection said hello. Asked by whoever did
    /// not hear how a change ended.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn is_rotated(&mut self, old: &[u8], new: &[u8]) -> Result<bool, ClientError> {
        let standing = self.token_standing()?;
        let opened = standing.succession.and_then(|it| it.open(new).ok());
        Ok(opened.is_some_and(|it| it.has_retired(Owner::of_token(old))))
    }

    fn token_standing(&mut self) -> Result<TokenStanding, ClientError> {
        match self.call("succession", &Request::Succession, Answer::Prompt)? {
            (Reply::Succession(standing), _) => Ok(standing),
            (other, _) => Err(unexpected("succession", "what holds now", &other)),
        }
    }
}
