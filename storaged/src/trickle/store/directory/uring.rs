//! Writes through io_uring, on one thread that owns the ring.
//!
//! A request is written piece by piece, then synced, then answered. The thread waits in one place,
//! for completions; an eventfd that the ring polls wakes it for new requests. Whoever gives up on a
//! request leaves its bytes and file with the thread until the kernel is done with them.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use bytes::Bytes;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::{mpsc, oneshot};

/// Requests in the kernel at a time; each has one operation, and the wake-up poll has one more.
const REQUESTS_MAX: usize = 31;
const RING_ENTRIES: u32 = 32;
/// The kernel takes a little less than 2 GiB per operation.
const OPERATION_BYTES_MAX: usize = 1 << 30;
/// The tag of the wake-up poll; requests have their slot's number.
const WAKE: u64 = u64::MAX;

const _: () = assert!(REQUESTS_MAX < RING_ENTRIES as usize);

/// A thread that writes files through io_uring; it ends when this value is dropped.
pub struct Uring {
    requests: Option<mpsc::Sender<Request>>,
    wake: Arc<OwnedFd>,
}

struct Request {
    file: File,
    offset: u64,
    bytes: Bytes,
    answer: oneshot::Sender<io::Result<()>>,
}

impl Uring {
    /// Makes the ring and checks that the kernel has the operations, then starts the thread.
    pub(super) fn start() -> io::Result<Self> {
        let ring = IoUring::new(RING_ENTRIES)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Write::CODE,
            opcode::Fsync::CODE,
            opcode::PollAdd::CODE,
        ];
        if !needed.iter().all(|code| probe.is_supported(*code)) {
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (requests, inbox) = mpsc::channel(REQUESTS_MAX);
        let worker = Worker {
            ring,
            wake: Arc::clone(&wake),
            inbox,
            in_flight: InKernel::new(),
        };
        std::thread::Builder::new()
            .name("storaged-uring".into())
            .spawn(move || worker.run())?;
        Ok(Self {
            requests: Some(requests),
            wake,
        })
    }

    /// Writes all bytes at an offset and waits until they are on disk.
    pub(super) async fn write_durably(
        &self,
        file: File,
        offset: u64,
        bytes: Bytes,
    ) -> io::Result<()> {
        let gone = || io::Error::other("the io_uring thread has ended");
        let (answer, answered) = oneshot::channel();
        let requests = self.requests.as_ref().ok_or_else(gone)?;
        let request = Request {
            file,
            offset,
            bytes,
            answer,
        };
        requests.send(request).await.map_err(|_| gone())?;
        self.wake_thread()?;
        answered.await.map_err(|_| gone())?
    }

    fn wake_thread(&self) -> io::Result<()> {
        match rustix::io::write(&*self.wake, &1u64.to_ne_bytes()) {
            // A full counter means that a wake-up is already pending.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The thread sees its inbox closed when it wakes. Should waking fail, it ends with the
        // process instead; nothing waits for it.
        self.requests = None;
        let _ = self.wake_thread();
    }
}

impl fmt::Debug for Uring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Uring")
    }
}

/// A request that the kernel works on.
struct Slot {
    request: Request,
    written: usize,
}

/// The requests in the kernel. Their memory must outlive the kernel's use of it, so a drop with
/// requests left (a panic or a ring that fails) leaks them.
struct InKernel {
    slots: Vec<Option<Slot>>,
    count: usize,
}

impl InKernel {
    fn new() -> Self {
        Self {
            slots: (0..REQUESTS_MAX).map(|_| None).collect(),
            count: 0,
        }
    }

    fn insert(&mut self, request: Request) -> Option<u64> {
        let free = self.slots.iter().position(Option::is_none)?;
        self.slots[free] = Some(Slot {
            request,
            written: 0,
        });
        self.count += 1;
        Some(free as u64)
    }

    fn remove(&mut self, tag: u64) -> Option<Slot> {
        let slot = self.slots.get_mut(tag as usize)?.take()?;
        self.count -= 1;
        Some(slot)
    }
}

impl Drop for InKernel {
    fn drop(&mut self) {
        if self.count > 0 {
            std::mem::forget(std::mem::take(&mut self.slots));
        }
    }
}

struct Worker {
    ring: IoUring,
    wake: Arc<OwnedFd>,
    inbox: mpsc::Receiver<Request>,
    in_flight: InKernel,
}

impl Worker {
    fn run(mut self) {
        if let Err(error) = self.serve() {
            tracing::error!(%error, "io_uring failed; restart the daemon or set io = \"plain\"");
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        self.arm_wake()?;
        loop {
            let open = self.take_requests()?;
            if !open && self.in_flight.count == 0 {
                return Ok(());
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
            let done: Vec<_> = self
                .ring
                .completion()
                .map(|entry| (entry.user_data(), entry.result()))
                .collect();
            for (tag, result) in done {
                self.finish(tag, result)?;
            }
        }
    }

    /// Moves requests from the inbox to free slots; false once the inbox is closed and empty.
    fn take_requests(&mut self) -> io::Result<bool> {
        while self.in_flight.count < REQUESTS_MAX {
            match self.inbox.try_recv() {
                Ok(request) => {
                    if let Some(tag) = self.in_flight.insert(request) {
                        self.submit_next(tag)?;
                    }
                }
                Err(mpsc::error::TryRecvError::Empty) => return Ok(true),
                Err(mpsc::error::TryRecvError::Disconnected) => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Notes a completion, then submits the request's next step or answers it.
    fn finish(&mut self, tag: u64, result: i32) -> io::Result<()> {
        if tag == WAKE {
            // Emptied before the inbox is looked at, so that no wake-up is lost in between.
            let mut count = [0; 8];
            match rustix::io::read(&*self.wake, &mut count) {
                Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
            return self.arm_wake();
        }
        let Some(Some(slot)) = self.in_flight.slots.get_mut(tag as usize) else {
            return Err(io::Error::other(format!(
                "completion with unknown tag {tag}"
            )));
        };
        let left = slot.request.bytes.len() - slot.written;
        let outcome = match usize::try_from(result) {
            Ok(0) if left > 0 => Some(Err(io::Error::from(io::ErrorKind::WriteZero))),
            Ok(written) if left > 0 => {
                slot.written += written.min(left);
                None
            }
            Ok(_) => Some(Ok(())),
            Err(_) => {
                let error = io::Error::from_raw_os_error(-result);
                if is_passing(&error) {
                    None
                } else {
                    Some(Err(error))
                }
            }
        };
        match outcome {
            None => self.submit_next(tag),
            Some(outcome) => {
                if let Some(slot) = self.in_flight.remove(tag) {
                    // Nobody listens if the caller gave up meanwhile.
                    let _ = slot.request.answer.send(outcome);
                }
                Ok(())
            }
        }
    }

    /// Submits the next step of a request: the rest of its bytes, or the sync when all are written.
    fn submit_next(&mut self, tag: u64) -> io::Result<()> {
        let Some(Some(slot)) = self.in_flight.slots.get(tag as usize) else {
            return Err(io::Error::other(format!("no request with tag {tag}")));
        };
        let file = types::Fd(slot.request.file.as_raw_fd());
        let rest = &slot.request.bytes[slot.written..];
        let entry = if rest.is_empty() {
            opcode::Fsync::new(file)
                .flags(types::FsyncFlags::DATASYNC)
                .build()
        } else {
            let length = rest.len().min(OPERATION_BYTES_MAX) as u32;
            let offset = slot.request.offset + slot.written as u64;
            opcode::Write::new(file, rest.as_ptr(), length)
                .offset(offset)
                .build()
        };
        self.push(entry.user_data(tag))
    }

    fn arm_wake(&mut self) -> io::Result<()> {
        let readable = rustix::event::PollFlags::IN.bits().into();
        let poll = opcode::PollAdd::new(types::Fd(self.wake.as_raw_fd()), readable);
        self.push(poll.build().user_data(WAKE))
    }

    fn push(&mut self, entry: squeue::Entry) -> io::Result<()> {
        // SAFETY: an entry's pointer and file must stay valid until its completion. `submit_next`
        // points into a slot's `Bytes`, whose heap memory does not move, and takes the fd of the
        // slot's `File`; the slot is removed only in `finish`, after the completion of its only
        // operation, and `InKernel` leaks rather than frees what is left. The poll entry has no
        // pointer, and its eventfd is owned by this worker as long as the ring is.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // There are more entries than operations, so the queue is never full.
        pushed.map_err(io::Error::other)
    }
}

/// Errors after which the same operation is simply tried again.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
    ) || error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error())
}
