//! A job's token is changed for another one: who says so, and what the retired tokens still count for. The owner in manifests, claims
//! and tables stays that of the first token. A record is proved by what somebody says at a hello: the new token opens it, and the first
//! token that lies in it is the owner's; each retired one has left its consent. So nobody needs to be believed who only hands it on.

use std::fmt;

use minicbor::bytes::{ByteArray, ByteVec};
use minicbor::{Decode, Encode};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use storaged_codec::Digest;
use thiserror::Error;

use crate::framing::{WireError, decode, encode};
use crate::ids::{Namespace, Owner};
use crate::local::is_token_length;
use crate::peer::{CheckpointKey, HighMark, OrderKey};
use crate::provenance::{ManifestKey, Provenance, ProvenanceError, token_key};

/// Most tokens that a job can have retired: all of them lie in the record.
pub const SUCCESSIONS_MAX: u32 = 32;
/// Random bytes that a record is sealed with, drawn anew for each.
pub const SEAL_BYTES: usize = NONCE_LEN;

type Mac = ByteArray<32>;

/// What the holder of a token agrees with that it is changed. Other than the manifest key it is told to nobody: a node that publishes
/// without having heard the token must not be able to retire it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ConsentKey([u8; 32]);

impl ConsentKey {
    /// That of whoever holds `token`.
    pub fn of_token(namespace: &Namespace, token: &[u8]) -> Self {
        Self(token_key(
            "storaged 2026-11 job token consent to successions",
            namespace,
            token,
        ))
    }

    fn mac(&self, bytes: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.0, bytes)
    }
}

impl fmt::Debug for ConsentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConsentKey(..)")
    }
}

/// A token that was changed for another one.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
struct RetiredToken {
    #[n(0)]
    token: ByteVec,
    /// The newest checkpoint that was durable then; none if there was none.
    #[n(1)]
    up_to: Option<HighMark>,
}

/// The key of a token that was changed for another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct RetiredKey {
    /// The key.
    #[n(0)]
    pub key: ManifestKey,
    /// It counts for checkpoints up to this one.
    #[n(1)]
    pub up_to: Option<HighMark>,
}

/// All keys of a job's checkpoints in the durable tier.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct JobKeys {
    /// By which new ones are authenticated.
    #[n(0)]
    pub newest: ManifestKey,
    /// By which older ones were, the oldest first.
    #[n(1)]
    pub retired: Vec<RetiredKey>,
}

/// The token of a job has another one as its successor.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Succession {
    /// Format version, [`Succession::VERSION`].
    #[n(0)]
    pub version: u16,
    /// The job.
    #[n(1)]
    pub namespace: Namespace,
    /// Whom it belongs to: the digest of its first token.
    #[n(2)]
    pub owner: Owner,
    /// The digest of the token that opens the job from now on.
    #[n(3)]
    pub credential: Owner,
    /// How many tokens were retired.
    #[n(4)]
    pub number: u32,
    /// The retired tokens, the oldest first, encrypted under the new one; the nonce comes first.
    #[n(5)]
    sealed: ByteVec,
    /// By which nodes know the manifest key of the new token: a MAC under it of the job's name.
    #[n(6)]
    key_check: Mac,
    /// A MAC of all that under the consent key of each retired token, in the same order.
    #[n(7)]
    consents: Vec<Mac>,
    /// The same under their manifest keys, for nodes that publish and have not heard the token.
    #[n(8)]
    key_notices: Vec<Mac>,
    /// And one of everything under the manifest key of the new token.
    #[n(9)]
    mac: Mac,
}

/// A succession, and the keys that follow from it, for nodes that publish.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Rotation {
    /// The record.
    #[n(0)]
    pub succession: Succession,
    /// The keys.
    #[n(1)]
    pub keys: JobKeys,
}

/// Told to peers: by whoever hears of a succession first, and after a link comes up.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Rotated {
    /// The record.
    #[n(0)]
    pub succession: Succession,
    /// The keys, if the sender has them.
    #[n(1)]
    pub keys: Option<JobKeys>,
    /// How the sender knows of it; none of releases that pass on nothing that they were only told.
    #[n(2)]
    pub source: Option<RecordSource>,
}

/// How a node knows of a succession.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum RecordSource {
    /// A token that was said there has proved it, or a durable tier has it.
    #[n(0)]
    Own,
    /// A peer has told of it.
    #[n(1)]
    Told,
}

/// What a job's token must be known for before it is changed: the answer to `Request::Succession`.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct TokenStanding {
    /// The job, with its tenant.
    #[n(0)]
    pub namespace: Namespace,
    /// The record that holds now, if the token was changed before.
    #[n(1)]
    pub succession: Option<Succession>,
    /// The newest checkpoint in the durable tier.
    #[n(2)]
    pub durable: Option<HighMark>,
}

/// Why a record is not what it claims to be, or none can be made.
#[derive(Debug, Error)]
pub enum SuccessionError {
    /// Somebody else's.
    #[error("it is for another token than the one that was said")]
    AnotherToken,
    /// Not sealed by who knew the tokens before.
    #[error("it was forged or changed: {0}")]
    Forged(&'static str),
    /// Not the record.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A version of the future.
    #[error(
        "succession version must be {expected}, got {got}: use a storaged release that knows it"
    )]
    Version { expected: u16, got: u16 },
    /// The new token is no token, or not a new one.
    #[error("expected a new token that the job has not had, of as many bytes as a token has")]
    NotNew,
    /// Too many were retired.
    #[error("expected at most {SUCCESSIONS_MAX} changes of a job's token, got one more")]
    TooMany,
}

impl JobKeys {
    /// Those of a token that no other came before.
    pub fn of_token(namespace: &Namespace, token: &[u8]) -> Self {
        Self {
            newest: ManifestKey::of_token(namespace, token),
            retired: Vec::new(),
        }
    }

    /// Reads a provenance that one of the keys has authenticated, and may have: a retired one counts for what was durable then.
    ///
    /// # Errors
    /// [`ProvenanceError`] that says what is wrong.
    pub fn read(&self, object: &[u8]) -> Result<Provenance, ProvenanceError> {
        let by_newest = Provenance::from_object(object, &self.newest);
        if !matches!(by_newest, Err(ProvenanceError::Forged)) {
            return by_newest;
        }
        for retired in self.retired.iter().rev() {
            match Provenance::from_object(object, &retired.key) {
                Err(ProvenanceError::Forged) => {}
                Ok(record) if !retired.counts_for(&record.key) => {
                    let (run, step) = (record.key.run, record.key.step);
                    return Err(ProvenanceError::Retired { run, step });
                }
                read => return read,
            }
        }
        by_newest
    }

    /// The same, of this very checkpoint.
    ///
    /// # Errors
    /// [`ProvenanceError`] that says what is wrong, or whose it is.
    pub fn read_of(
        &self,
        object: &[u8],
        manifest: Digest,
        place: &CheckpointKey,
    ) -> Result<Provenance, ProvenanceError> {
        self.read(object)?.for_checkpoint(manifest, place)
    }
}

impl RetiredKey {
    fn counts_for(&self, key: &CheckpointKey) -> bool {
        self.up_to.is_some_and(|up_to| key.mark() <= up_to)
    }
}

impl Succession {
    /// The version that this code writes and reads.
    pub const VERSION: u16 = 1;
    /// The longest that a record may be.
    pub const BYTES_MAX: usize = 128 << 10;

    /// Whether it is as short as a record is: whoever makes one chooses what is sealed in it.
    pub fn is_of_its_length(&self) -> bool {
        encode(self).len() <= Self::BYTES_MAX
    }

    /// Whether the holder of the token has let the job go to another one: proof, since nobody else can say so.
    pub fn retires(&self, consent: &ConsentKey) -> bool {
        is_among(consent.mac(&self.consented()), &self.consents)
    }

    /// Whether it says that of the token of this key. Every node that publishes for the job can make that up.
    pub fn retires_key(&self, key: &ManifestKey) -> bool {
        is_among(key.mac(&self.consented()), &self.key_notices)
    }

    /// Whether this is the key of the token that opens the job now.
    pub fn is_under(&self, key: &ManifestKey) -> bool {
        key.mac(&key_checked(&self.namespace)) == blake3::Hash::from_bytes(*self.key_check)
    }

    /// The keys of the job, by the token that opens it: proof that whoever held the first one, and each after it, has let it go to the
    /// next.
    ///
    /// # Errors
    /// [`SuccessionError`] that says what is wrong.
    pub fn open(&self, token: &[u8]) -> Result<OpenedSuccession, SuccessionError> {
        let (expected, got) = (Self::VERSION, self.version);
        if expected != got {
            return Err(SuccessionError::Version { expected, got });
        }
        let forged = |what| Err(SuccessionError::Forged(what));
        if self.credential != Owner::of_token(token) {
            return Err(SuccessionError::AnotherToken);
        }
        let newest = ManifestKey::of_token(&self.namespace, token);
        let mac = newest.mac(&self.authenticated());
        if !self.is_under(&newest) || mac != blake3::Hash::from_bytes(*self.mac) {
            return forged("its MAC is not that of the token");
        }
        let tokens = self.unseal(token)?;
        let first = tokens.first().map(|first| Owner::of_token(&first.token));
        if first != Some(self.owner) {
            return forged("the first token in it is not the owner's");
        }
        if tokens.len() != self.number as usize || tokens.len() != self.consents.len() {
            return forged("it has not as many tokens as it says");
        }
        let of = |retired: &RetiredToken| RetiredKey {
            key: ManifestKey::of_token(&self.namespace, &retired.token),
            up_to: retired.up_to,
        };
        let retired: Vec<RetiredKey> = tokens.iter().map(of).collect();
        let consents =
            |one: &RetiredToken| self.retires(&ConsentKey::of_token(&self.namespace, &one.token));
        if !tokens.iter().all(consents) {
            return forged("one of the tokens in it has not consented");
        }
        Ok(OpenedSuccession {
            keys: JobKeys { newest, retired },
            tokens,
        })
    }

    fn unseal(&self, token: &[u8]) -> Result<Vec<RetiredToken>, SuccessionError> {
        let unreadable = SuccessionError::Forged("what is sealed in it cannot be read");
        let Some((nonce, sealed)) = self.sealed.split_first_chunk::<SEAL_BYTES>() else {
            return Err(unreadable);
        };
        let key = seal_key(&self.namespace, token);
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let mut bytes = sealed.to_vec();
        let about = Aad::from(self.number.to_be_bytes());
        match key.open_in_place(nonce, about, &mut bytes) {
            Ok(opened) => Ok(decode("retired tokens", opened)?),
            Err(_) => Err(unreadable),
        }
    }

    /// What the retired tokens' holders agree to.
    fn consented(&self) -> Vec<u8> {
        let mut bytes = b"storaged succession consent".to_vec();
        let about = (&self.namespace, self.owner, self.credential, self.number);
        bytes.extend(encode(&(
            self.version,
            about,
            &self.sealed,
            &self.key_check,
        )));
        bytes
    }

    fn authenticated(&self) -> Vec<u8> {
        let mut bytes = b"storaged succession".to_vec();
        bytes.extend(self.consented());
        bytes.extend(encode(&(&self.consents, &self.key_notices)));
        bytes
    }
}

/// What a record gives to whoever has the token that opens it.
pub struct OpenedSuccession {
    /// The job's keys.
    pub keys: JobKeys,
    tokens: Vec<RetiredToken>,
}

impl OpenedSuccession {
    /// Whether the token of this digest came before.
    pub fn has_retired(&self, credential: Owner) -> bool {
        let mut tokens = self.tokens.iter();
        tokens.any(|one| Owner::of_token(&one.token) == credential)
    }

    /// The key of orders to the job.
    pub fn order_key(&self, namespace: &Namespace) -> Option<OrderKey> {
        let first = self.tokens.first()?;
        Some(OrderKey::of_token(namespace, &first.token))
    }
}

impl fmt::Debug for OpenedSuccession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpenedSuccession({} tokens)", self.tokens.len())
    }
}

impl Rotation {
    /// Changes the token `old`, which opens the job now, for `new`. `seal` must be random and never used again.
    ///
    /// # Errors
    /// [`SuccessionError`] if `old` does not open it, or `new` is no new token.
    pub fn new(
        standing: &TokenStanding,
        old: &[u8],
        new: &[u8],
        seal: [u8; SEAL_BYTES],
    ) -> Result<Self, SuccessionError> {
        let namespace = &standing.namespace;
        let (owner, mut tokens) = match &standing.succession {
            Some(before) => (before.owner, before.open(old)?.tokens),
            None => (Owner::of_token(old), Vec::new()),
        };
        tokens.push(RetiredToken {
            token: old.to_vec().into(),
            up_to: standing.durable,
        });
        let had = tokens.iter().any(|one| *one.token == *new);
        if had || new.is_empty() || !is_token_length(new.len()) {
            return Err(SuccessionError::NotNew);
        }
        let number = tokens.len() as u32;
        if number > SUCCESSIONS_MAX {
            return Err(SuccessionError::TooMany);
        }
        let newest = ManifestKey::of_token(namespace, new);
        let mut succession = Succession {
            version: Succession::VERSION,
            namespace: namespace.clone(),
            owner,
            credential: Owner::of_token(new),
            number,
            sealed: sealed(namespace, number, &tokens, new, seal),
            key_check: as_mac(newest.mac(&key_checked(namespace))),
            consents: Vec::new(),
            key_notices: Vec::new(),
            mac: ByteArray::from([0; 32]),
        };
        let agreed = succession.consented();
        let mut retired = Vec::new();
        for one in &tokens {
            let consent = ConsentKey::of_token(namespace, &one.token);
            succession.consents.push(as_mac(consent.mac(&agreed)));
            let key = ManifestKey::of_token(namespace, &one.token);
            succession.key_notices.push(as_mac(key.mac(&agreed)));
            let up_to = one.up_to;
            retired.push(RetiredKey { key, up_to });
        }
        succession.mac = as_mac(newest.mac(&succession.authenticated()));
        let keys = JobKeys { newest, retired };
        Ok(Self { succession, keys })
    }
}

fn as_mac(hash: blake3::Hash) -> Mac {
    ByteArray::from(*hash.as_bytes())
}

/// Compared in constant time.
fn is_among(mac: blake3::Hash, all: &[Mac]) -> bool {
    all.iter().any(|one| mac == blake3::Hash::from_bytes(**one))
}

fn key_checked(namespace: &Namespace) -> Vec<u8> {
    [
        &b"storaged succession key "[..],
        namespace.as_str().as_bytes(),
    ]
    .concat()
}

fn sealed(
    namespace: &Namespace,
    number: u32,
    tokens: &Vec<RetiredToken>,
    new: &[u8],
    seal: [u8; SEAL_BYTES],
) -> ByteVec {
    let mut bytes = encode(tokens);
    let about = Aad::from(number.to_be_bytes());
    let nonce = Nonce::assume_unique_for_key(seal);
    let key = seal_key(namespace, new);
    let tag = key.seal_in_place_separate_tag(nonce, about, &mut bytes);
    let Ok(tag) = tag else {
        unreachable!("a record is far shorter than what the cipher takes");
    };
    [&seal[..], &bytes, tag.as_ref()].concat().into()
}

/// Of the token itself, not of its manifest key, which nodes tell one another: a node is not to learn a token that other jobs may have
/// too.
fn seal_key(namespace: &Namespace, token: &[u8]) -> LessSafeKey {
    let context = "storaged 2026-11 job token seal of successions";
    match UnboundKey::new(&CHACHA20_POLY1305, &token_key(context, namespace, token)) {
        Ok(key) => LessSafeKey::new(key),
        Err(_) => unreachable!("the cipher takes keys of 32 bytes"),
    }
}

#[cfg(test)]
mod tests;
