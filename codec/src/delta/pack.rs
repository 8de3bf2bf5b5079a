//! zstd, with one context per use that is made once. What packs a byte sequence is chosen from a count of some of its
//! bytes: noise stays as it is, numbers of low entropy take Huffman codes alone (zstd with its search for repeats
//! all but off: three times as fast, and as small), sparse and repeating bytes the ordinary search.

use zstd::zstd_safe::{CCtx, CParameter, DCtx, ParamSwitch, get_error_name};

use super::{DeltaError, entropy};

/// zstd's fastest ordinary level: state hardly shrinks more at higher ones.
const SEARCH_LEVEL: i32 = 1;
/// The level at which the search for repeats takes almost no time.
const CODES_LEVEL: i32 = -50;
/// From this many bits per byte on packing saves less than it costs.
const NOISE_BITS: f32 = 7.7;
/// From this share of one byte on the search finds long runs.
const SPARSE_SHARE: f32 = 0.93;
/// Equal neighbours beyond chance from which on the search finds repeats.
const REPEATS_BEYOND_CHANCE: f32 = 0.08;

/// How bytes are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Method {
    Zeros,
    Stored,
    Codes,
    Search,
}

/// Tags of packed bytes in a record.
const ZEROS: u8 = 0;
const STORED: u8 = 1;
const ZSTD: u8 = 2;

/// Bytes before each packed plane: a tag and a length.
const PLANE_HEADER_BYTES: usize = 5;

/// Compression and decompression contexts.
pub(super) struct Packer {
    codes: CCtx<'static>,
    search: CCtx<'static>,
    decompress: DCtx<'static>,
    /// What zstd writes, before its length is known.
    scratch: Vec<u8>,
}

impl Packer {
    pub fn new() -> Result<Self, DeltaError> {
        Ok(Self {
            codes: context(CODES_LEVEL)?,
            search: context(SEARCH_LEVEL)?,
            decompress: DCtx::try_create().ok_or_else(no_memory)?,
            scratch: Vec::new(),
        })
    }

    /// Appends a plane: a tag, the length of what follows, and that.
    pub fn pack_plane(&mut self, plane: &[u8], out: &mut Vec<u8>) -> Result<(), DeltaError> {
        let method = method(plane);
        let start = out.len();
        out.extend_from_slice(&[0; PLANE_HEADER_BYTES]);
        let tag = match method {
            Method::Zeros => ZEROS,
            Method::Stored => STORED,
            Method::Codes | Method::Search => {
                let context = match method {
                    Method::Codes => &mut self.codes,
                    _ => &mut self.search,
                };
                compress(context, plane, &mut self.scratch, out)?;
                if out.len() - start - PLANE_HEADER_BYTES < plane.len() {
                    ZSTD
                } else {
                    STORED
                }
            }
        };
        if tag == STORED {
            out.truncate(start + PLANE_HEADER_BYTES);
            out.extend_from_slice(plane);
        }
        let length = (out.len() - start - PLANE_HEADER_BYTES) as u32;
        out[start] = tag;
        out[start + 1..start + PLANE_HEADER_BYTES].copy_from_slice(&length.to_le_bytes());
        Ok(())
    }

    /// Takes a plane off the front of `packed`; it fills `plane`.
    pub fn unpack_plane<'a>(
        &mut self,
        packed: &'a [u8],
        plane: &mut [u8],
    ) -> Result<&'a [u8], DeltaError> {
        let cut = |got: usize| super::record::size("a plane", plane.len() as u64, got);
        let (header, rest) = packed
            .split_first_chunk::<PLANE_HEADER_BYTES>()
            .ok_or_else(|| cut(packed.len()))?;
        let [tag, length @ ..] = *header;
        let length = u32::from_le_bytes(length) as usize;
        let (bytes, rest) = rest
            .split_at_checked(length)
            .ok_or_else(|| cut(rest.len()))?;
        match tag {
            ZEROS if length == 0 => plane.fill(0),
            STORED if length == plane.len() => plane.copy_from_slice(bytes),
            ZSTD => self.unpack("a plane", bytes, plane)?,
            ZEROS | STORED => return Err(cut(length)),
            got => {
                return Err(DeltaError::Unknown {
                    what: "plane tag",
                    got,
                });
            }
        }
        Ok(rest)
    }

    /// Appends `bytes` as one zstd frame.
    pub fn pack(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), DeltaError> {
        compress(&mut self.search, bytes, &mut self.scratch, out)
    }

    /// One zstd frame that must fill `out`.
    pub fn unpack(
        &mut self,
        what: &'static str,
        packed: &[u8],
        out: &mut [u8],
    ) -> Result<(), DeltaError> {
        let reason = |code| DeltaError::Packed {
            what,
            reason: get_error_name(code).into(),
        };
        let got = self.decompress.decompress(out, packed).map_err(reason)?;
        if got == out.len() {
            Ok(())
        } else {
            Err(super::record::size(what, out.len() as u64, got))
        }
    }
}

/// How a plane is best written, from a count of some of its bytes.
fn method(plane: &[u8]) -> Method {
    let count = entropy::count(plane);
    if count.top == 1.0 && plane.iter().all(|byte| *byte == 0) {
        return Method::Zeros;
    }
    let repeating = count.repeats > count.repeats_by_chance + REPEATS_BEYOND_CHANCE;
    match () {
        () if repeating || count.top > SPARSE_SHARE => Method::Search,
        () if count.bits > NOISE_BITS => Method::Stored,
        () => Method::Codes,
    }
}

fn context(level: i32) -> Result<CCtx<'static>, DeltaError> {
    let mut context = CCtx::try_create().ok_or_else(no_memory)?;
    let settings = [
        CParameter::CompressionLevel(level),
        // Literals are coded also where the search is all but off: they are what is left to save.
        CParameter::LiteralCompressionMode(ParamSwitch::Enable),
        CParameter::ContentSizeFlag(false),
    ];
    for setting in settings {
        let outcome = context.set_parameter(setting);
        outcome.map_err(|code| DeltaError::Packed {
            what: "a zstd setting",
            reason: get_error_name(code).into(),
        })?;
    }
    Ok(context)
}

/// Appends the frame. It goes through `scratch`, which need not be cleared first as room in `out` would.
fn compress(
    context: &mut CCtx<'static>,
    bytes: &[u8],
    scratch: &mut Vec<u8>,
    out: &mut Vec<u8>,
) -> Result<(), DeltaError> {
    scratch.clear();
    scratch.reserve(zstd::zstd_safe::compress_bound(bytes.len()));
    let outcome = context.compress2(scratch, bytes);
    outcome.map_err(|code| DeltaError::Packed {
        what: "bytes to pack",
        reason: get_error_name(code).into(),
    })?;
    out.extend_from_slice(scratch);
    Ok(())
}

fn no_memory() -> DeltaError {
    DeltaError::Packed {
        what: "a zstd context",
        reason: "no memory for it".into(),
    }
}
