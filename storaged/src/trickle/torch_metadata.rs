//! `.metadata`, which stock PyTorch reads: what a trainer packed with zstd, unpacked. It is a trainer that says what it unpacks
//! to, so it is unpacked a part at a time: a few bytes of a hostile one must not cost the daemon a gibibyte.

use std::io::{self, Cursor, Read};

use bytes::Bytes;
use futures::StreamExt;
use storaged_core::{DurableFault, Leftovers};
use storaged_wire::{Manifest, Namespace, SharedBytes};
use zstd::stream::read::Decoder;

use super::fault::local;
use super::parts::{MadePart, ObjectSize};
use super::share::Payment;
use super::store::{ObjectKey, PartBytes};
use super::{Trickle, object};

/// Largest `.metadata` object.
const BYTES_MAX: u64 = 1 << 30;
/// No state of a model packs better by this factor.
const RATIO_MAX: u64 = 1000;
/// Most that a decoder remembers, as a power of two: 16 MiB. zstd's levels up to 19 need half of it.
const WINDOW_LOG_MAX: u32 = 24;

impl Trickle {
    /// Writes `.metadata`, whatever an earlier upload left under this name.
    pub(super) async fn put_torch_metadata(
        &self,
        record: &Manifest,
        packed: &SharedBytes,
    ) -> Result<(), DurableFault> {
        let key = object(record, ".metadata")?;
        let part_bytes = self.part_bytes(ObjectSize { unit: 1, length: 1 })?;
        let begin = {
            let packed = packed.clone();
            move || Unpacking::begin(packed)?.part(part_bytes)
        };
        let (rest, first) = self.compute(begin).await.map_err(local)??;
        if (first.len() as u64) < part_bytes.get() {
            return self.put_mine(&key, first).await;
        }
        drop(first);
        let count = self.compute(move || rest.count()).await;
        let length = count.map_err(local)??;
        self.put_parts(&key, &record.namespace, packed, length)
            .await
    }

    async fn put_parts(
        &self,
        key: &ObjectKey,
        job: &Namespace,
        packed: &SharedBytes,
        length: u64,
    ) -> Result<(), DurableFault> {
        let size = ObjectSize { unit: 1, length };
        let upload = self.begin_or_go_on(key, size, Leftovers::Perhaps).await?;
        let unpacked = UnpackedParts {
            trickle: self,
            job,
            part_bytes: upload.part_bytes(),
            length,
            number: 0,
            unpacking: Unpacking::begin(packed.clone())?,
        };
        let parts = futures::stream::try_unfold(unpacked, UnpackedParts::part);
        // One after the other: it is short, but for one that was made to take memory.
        let put = self.put_made(&upload, parts.boxed(), 1).await?;
        self.complete(upload, put, length).await
    }
}

/// Parts of what is unpacked, as there is room for them.
struct UnpackedParts<'a> {
    trickle: &'a Trickle,
    job: &'a Namespace,
    part_bytes: PartBytes,
    length: u64,
    /// The part that is made next.
    number: u32,
    unpacking: Unpacking,
}

impl UnpackedParts<'_> {
    async fn part(self) -> Result<Option<(MadePart, Self)>, DurableFault> {
        let Self {
            number, part_bytes, ..
        } = self;
        let before = u64::from(number) * part_bytes.get();
        if before >= self.length {
            return Ok(None);
        }
        let most = (self.length - before).min(part_bytes.get());
        let turn = (self.trickle.shares).turn(self.job, most, Payment::First);
        let turn = turn.await?;
        let unpacking = self.unpacking;
        let next = self.trickle.compute(move || unpacking.part(part_bytes));
        let (unpacking, bytes) = next.await.map_err(local)??;
        let part = MadePart {
            number,
            bytes,
            turn,
        };
        let rest = Self {
            number: number + 1,
            unpacking,
            ..self
        };
        Ok(Some((part, rest)))
    }
}

/// Unpacking under way.
struct Unpacking {
    decoder: Decoder<'static, Cursor<SharedBytes>>,
    /// Length of what is packed, in bytes.
    packed: usize,
    unpacked: u64,
}

impl Unpacking {
    fn begin(packed: SharedBytes) -> Result<Self, DurableFault> {
        let length = packed.len();
        let decoder = Decoder::with_buffer(Cursor::new(packed)).and_then(|mut decoder| {
            decoder.window_log_max(WINDOW_LOG_MAX)?;
            Ok(decoder)
        });
        Ok(Self {
            decoder: decoder.map_err(|error| not_unpacked(length, &error.to_string()))?,
            packed: length,
            unpacked: 0,
        })
    }

    /// The next part; a shorter one is the last.
    fn part(mut self, bytes: PartBytes) -> Result<(Self, Bytes), DurableFault> {
        let mut part = Vec::new();
        let read = (&mut self.decoder).take(bytes.get()).read_to_end(&mut part);
        self.note(read.map(|read| read as u64))?;
        Ok((self, part.into()))
    }

    /// Length of all of it, in bytes.
    fn count(mut self) -> Result<u64, DurableFault> {
        let mut block = vec![0; 128 << 10];
        loop {
            match self.decoder.read(&mut block) {
                Ok(0) => return Ok(self.unpacked),
                read => self.note(read.map(|read| read as u64))?,
            }
        }
    }

    fn note(&mut self, read: io::Result<u64>) -> Result<(), DurableFault> {
        let read = read.map_err(|error| not_unpacked(self.packed, &error.to_string()))?;
        self.unpacked = self.unpacked.saturating_add(read);
        let most = BYTES_MAX.min((self.packed as u64).saturating_mul(RATIO_MAX));
        if self.unpacked <= most {
            return Ok(());
        }
        let why = format!("they unpack to more than {most} bytes");
        Err(not_unpacked(self.packed, &why))
    }
}

/// The trainer's bytes, not the tier's: this checkpoint alone cannot be published.
fn not_unpacked(packed: usize, why: &str) -> DurableFault {
    local(format!(
        "expected torch metadata that a trainer packed with zstd, got {packed} bytes that cannot be unpacked: {why}; the \
         trainer that committed the step must be mended"
    ))
}
