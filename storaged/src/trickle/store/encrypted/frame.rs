//! What an encrypted object is made of: frames of 256 KiB, each sealed by itself, so that a range is read without the rest.
//!
//! A frame is a head, the ciphertext and AES-256-GCM's tag. The last frame of an object is shorter than the others, and empty if
//! the object is a whole number of them: an object that was cut between two frames has no end. Keys are derived for each object
//! from its name, and a frame's place is authenticated with it, so that no frame counts elsewhere.
//!
//! The nonce is the beginning of a keyed hash of the frame's place and plain bytes: the same bytes at the same place are the same
//! frame again, which an upload that is resumed and a small object that is written twice need, and no nonce meets two texts.

use bytes::{Bytes, BytesMut};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use storaged_arena::AlignedBytes;

use super::keys::{KeyId, TierKey, TierKeys};
use crate::trickle::store::ObjectKey;

/// Plain bytes of every frame but the last.
pub const FRAME_BYTES: u64 = 256 << 10;
/// What a frame has beside them: the shortest sealed object is as long. 64 frames, a part of 16 MiB, are whole blocks of any disk: direct I/O takes them.
pub const FRAME_EXTRA: u64 = (HEAD_BYTES + TAG_BYTES) as u64;
/// Bytes of a frame but the last.
pub const SEALED_BYTES: u64 = FRAME_BYTES + FRAME_EXTRA;

const HEAD_BYTES: usize = 48;
const TAG_BYTES: usize = 16;
/// No text, no zip, no CBOR record of ours and no zstd frame begins so.
const MAGIC: [u8; 8] = *b"\x8estorAES";
const VERSION: u8 = 1;

/// Where the key's name and the nonce lie in a head. All else behind the version is zero.
const KEY: std::ops::Range<usize> = 16..24;
const NONCE: std::ops::Range<usize> = 24..24 + NONCE_LEN;

/// Why frames cannot be opened.
#[derive(Debug, PartialEq, Eq)]
pub enum FrameFault {
    /// A form that this release does not read.
    Version(u8),
    /// This node has not the key.
    Locked(KeyId),
    /// This frame is not what was sealed at this place.
    Tampered(u64),
    /// The end is missing, or is no frame.
    Cut,
}

/// Whether the object ends with these bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Here,
    Later,
}

/// Which bytes an object or a part takes when it is sealed, its end included.
pub fn sealed_length(length: u64) -> u64 {
    length + (length / FRAME_BYTES + 1) * FRAME_EXTRA
}

/// How many bytes were sealed in an object of this length; none if no object has it.
pub fn plain_length(sealed: u64) -> Option<u64> {
    let rest = (sealed % SEALED_BYTES).checked_sub(FRAME_EXTRA)?;
    Some(sealed / SEALED_BYTES * FRAME_BYTES + rest)
}

/// The key in whose name an object is sealed, if its beginning is that of a sealed one. One changed byte does not make a sealed
/// object of ours look like another.
pub fn sealed_under(beginning: &[u8], keys: Option<&TierKeys>) -> Option<KeyId> {
    let id = KeyId::from_bytes(beginning.get(KEY)?.try_into().ok()?);
    let is_sealed = beginning.starts_with(&MAGIC) || keys.is_some_and(|keys| keys.of(id).is_some());
    is_sealed.then_some(id)
}

/// The keys of one object.
pub struct ObjectSeal {
    id: KeyId,
    cipher: LessSafeKey,
    nonces: [u8; 32],
}

impl ObjectSeal {
    pub fn new(key: &TierKey, object: &ObjectKey) -> Self {
        let derive = |context| key.derive(context, object.as_str());
        let cipher = derive("storaged 2026-11 durable object key");
        let cipher = UnboundKey::new(&AES_256_GCM, &cipher).expect("AES-256 has keys of 32 bytes");
        Self {
            id: key.id(),
            cipher: LessSafeKey::new(cipher),
            nonces: derive("storaged 2026-11 durable object nonces"),
        }
    }

    /// Seals bytes that begin with this frame, in memory that direct I/O takes. Bytes that the object does not end with are whole frames.
    pub fn seal(&self, first: u64, plain: &[u8], end: End) -> Bytes {
        let frames = plain.len() as u64 / FRAME_BYTES + u64::from(end == End::Here);
        let mut sealed = AlignedBytes::with_room(plain.len() + (frames * FRAME_EXTRA) as usize);
        let mut plain = plain.chunks(FRAME_BYTES as usize);
        let mut frame = vec![0; SEALED_BYTES as usize];
        for index in first..first + frames {
            let plain = plain.next().unwrap_or_default();
            let frame = &mut frame[..plain.len() + FRAME_EXTRA as usize];
            self.seal_frame(index, plain, frame);
            sealed.append(frame);
        }
        Bytes::from_owner(sealed)
    }

    fn seal_frame(&self, index: u64, plain: &[u8], frame: &mut [u8]) {
        let nonce = self.nonce(index, plain);
        let (head, rest) = frame.split_at_mut(HEAD_BYTES);
        head[..8].copy_from_slice(&MAGIC);
        head[8] = VERSION;
        head[KEY].copy_from_slice(&self.id.bytes());
        head[NONCE].copy_from_slice(&nonce);
        let (text, tag) = rest.split_at_mut(plain.len());
        text.copy_from_slice(plain);
        let nonce = Nonce::assume_unique_for_key(nonce);
        let about = Aad::from(about(head, index));
        let made = self.cipher.seal_in_place_separate_tag(nonce, about, text);
        tag.copy_from_slice(
            made.expect("a frame is far below what AES-GCM takes")
                .as_ref(),
        );
    }

    fn nonce(&self, index: u64, plain: &[u8]) -> [u8; NONCE_LEN] {
        let mut hash = blake3::Hasher::new_keyed(&self.nonces);
        hash.update(&index.to_le_bytes()).update(plain);
        let mut nonce = [0; NONCE_LEN];
        hash.finalize_xof().fill(&mut nonce);
        if is_planted("nonces_constant") {
            nonce = [0; NONCE_LEN];
        }
        nonce
    }

    fn open_frame(&self, index: u64, frame: &[u8], plain: &mut [u8]) -> Result<(), FrameFault> {
        let tampered = FrameFault::Tampered(index);
        let (head, rest) = frame.split_at(HEAD_BYTES);
        let (text, tag) = rest.split_at(plain.len());
        let (Ok(nonce), Ok(tag)) = (head[NONCE].try_into(), Tag::try_from(tag)) else {
            return Err(tampered);
        };
        plain.copy_from_slice(text);
        let nonce = Nonce::assume_unique_for_key(nonce);
        let about = Aad::from(about(head, index));
        let opened = self
            .cipher
            .open_in_place_separate_tag(nonce, about, tag, plain, 0..);
        opened.map(|_| ()).map_err(|_| tampered)
    }
}

/// What is authenticated beside the text: the head and the place.
fn about(head: &[u8], index: u64) -> [u8; HEAD_BYTES + 8] {
    let mut about = [0; HEAD_BYTES + 8];
    about[..HEAD_BYTES].copy_from_slice(head);
    about[HEAD_BYTES..].copy_from_slice(&index.to_le_bytes());
    about
}

/// Opens frames of an object, of which this is the first.
pub fn open(
    keys: &TierKeys,
    object: &ObjectKey,
    first: u64,
    sealed: &[u8],
) -> Result<Bytes, FrameFault> {
    let whole = sealed.len() / SEALED_BYTES as usize * FRAME_BYTES as usize;
    let rest = match sealed.len() % SEALED_BYTES as usize {
        0 => 0,
        rest => rest
            .checked_sub(FRAME_EXTRA as usize)
            .ok_or(FrameFault::Cut)?,
    };
    let mut plain = BytesMut::zeroed(whole + rest);
    let mut rest = &mut plain[..];
    let mut seal: Option<ObjectSeal> = None;
    for (index, frame) in (first..).zip(sealed.chunks(SEALED_BYTES as usize)) {
        let (text, behind) = rest.split_at_mut(frame.len() - FRAME_EXTRA as usize);
        rest = behind;
        let id = sealed_under(frame, Some(keys)).ok_or(FrameFault::Tampered(index))?;
        if frame.starts_with(&MAGIC) && frame[8] != VERSION {
            return Err(FrameFault::Version(frame[8]));
        }
        let seal = match seal.take() {
            Some(known) if known.id == id => seal.insert(known),
            _ => {
                let key = keys.of(id).ok_or(FrameFault::Locked(id))?;
                seal.insert(ObjectSeal::new(key, object))
            }
        };
        seal.open_frame(index, frame, text)?;
    }
    Ok(plain.freeze())
}

/// Opens a whole object.
pub fn open_whole(keys: &TierKeys, object: &ObjectKey, sealed: &[u8]) -> Result<Bytes, FrameFault> {
    let plain = open(keys, object, 0, sealed)?;
    match plain_length(sealed.len() as u64) {
        Some(_) => Ok(plain),
        None => Err(FrameFault::Cut),
    }
}

/// A planted bug, as those of the core (docs/TESTING.md): there only in a build with `--cfg storaged_mutants`.
#[expect(
    unexpected_cfgs,
    reason = "the cfg is of builds with planted bugs alone"
)]
fn is_planted(name: &str) -> bool {
    cfg!(storaged_mutants) && std::env::var("STORAGED_MUTANT").is_ok_and(|chosen| chosen == name)
}
