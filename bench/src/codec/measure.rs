//! The measuring: a thread on each core, all starting together; in each round every contender once, each on other
//! data than the one before, in an order that moves on from round to round.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use super::arena::Arena;
use super::case::{Caches, Case};
use super::contender::{Contender, Outputs, contenders};
use super::machine;

/// Parts of the arena: each measurement goes over one, and the next measurement over another.
const WINDOWS: usize = 4;

/// How long a thread waits for the others before it gives up: far more than any step takes.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// How to measure.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Rounds that count; one before them does not.
    pub rounds: usize,
    /// Names of contenders; none for all.
    pub only: Vec<String>,
    /// Caches of a core.
    pub caches: Caches,
}

/// What one contender reached in one case.
#[derive(Clone, Debug)]
pub struct Series {
    pub case: Case,
    pub cores: usize,
    pub name: &'static str,
    /// Bytes of data per second of all cores together, in each round.
    pub rates: Vec<f64>,
}

/// Cores and the memory of each.
pub struct Bench {
    cpus: Vec<usize>,
    arenas: Vec<Arena>,
}

impl Bench {
    /// Takes so many cores, and memory for data and outputs of so many bytes each from each of them.
    ///
    /// # Errors
    /// If there are not so many cores.
    pub fn new(cores: usize, arena_bytes: usize) -> Result<Self> {
        let cpus = machine::cores(cores)?;
        let arenas = cpus.iter().map(|cpu| arena_on(*cpu, arena_bytes));
        let arenas = arenas.collect::<Result<_>>()?;
        Ok(Self { cpus, arenas })
    }

    /// Measures all contenders of a case.
    ///
    /// # Errors
    /// If a contender fails or makes wrong bytes.
    pub fn measure(&mut self, case: Case, settings: &Settings) -> Result<Vec<Series>> {
        let gate = Gate::new(self.cpus.len());
        let work = |cpu: usize, arena: &mut Arena| {
            let worked = machine::pin(cpu).and_then(|()| work(case, settings, arena, &gate));
            // The others must not wait for a thread that has ended.
            worked.inspect_err(|_| gate.close())
        };
        let spans = thread::scope(|scope| {
            let cpus = self.cpus.iter().zip(&mut self.arenas);
            let threads: Vec<_> = cpus
                .map(|(cpu, arena)| scope.spawn(|| work(*cpu, arena)))
                .collect();
            let ended = threads.into_iter().map(|thread| {
                let ended = thread.join();
                ended.map_err(|_| anyhow!("a measuring thread panicked"))?
            });
            ended.collect::<Result<Vec<_>>>()
        })
        .with_context(|| format!("measuring {case}"))?;
        Ok(series(case, &spans))
    }
}

/// Memory that a core touches first, so that it is near that core.
fn arena_on(cpu: usize, bytes: usize) -> Result<Arena> {
    thread::scope(|scope| {
        let made = scope.spawn(|| machine::pin(cpu).map(|()| Arena::new(bytes)));
        let made = made.join();
        made.map_err(|_| anyhow!("no memory for {bytes} bytes of data and of outputs"))?
    })
}

/// One measurement on one core.
#[derive(Clone, Copy)]
struct Span {
    start: Instant,
    end: Instant,
    bytes: usize,
}

/// What one contender did on one core.
struct Spans {
    name: &'static str,
    rounds: Vec<Span>,
}

fn work(case: Case, settings: &Settings, arena: &mut Arena, gate: &Gate) -> Result<Vec<Spans>> {
    let block = case.block(settings.caches);
    let mut contenders = contenders(case, block, &settings.only)?;
    let window = arena.len() / WINDOWS;
    ensure!(
        window >= case.inputs() * block,
        "expected windows of at least {} bytes, got {window}: use more memory",
        case.inputs() * block
    );
    for contender in &mut contenders {
        let (data, out) = arena.parts();
        let steps = Steps::cut(case, contender.as_ref(), block, data, out);
        steps.check(contender.as_mut())?;
    }
    let started = |name| Spans {
        name,
        rounds: Vec::with_capacity(settings.rounds),
    };
    let mut spans: Vec<Spans> = contenders.iter().map(|one| started(one.name())).collect();
    for round in 0..=settings.rounds {
        for place in 0..contenders.len() {
            let who = (place + round) % contenders.len();
            let (data, out) = arena.parts();
            let at = (round * contenders.len() + place) % WINDOWS * window;
            let (data, out) = (&data[at..][..window], &mut out[at..][..window]);
            let contender = contenders[who].as_mut();
            let mut steps = Steps::cut(case, contender, block, data, out);
            if case.in_cache() {
                steps.one(contender)?;
            }
            gate.pass()?;
            let span = steps.run(contender)?;
            if round > 0 {
                spans[who].rounds.push(span);
            }
        }
    }
    Ok(spans)
}

/// The blocks of the steps of one measurement, cut before the time runs.
struct Steps<'a> {
    inputs: Vec<Vec<&'a [u8]>>,
    outputs: Vec<Vec<&'a mut [u8]>>,
    count: usize,
    step_bytes: usize,
}

impl<'a> Steps<'a> {
    fn cut(
        case: Case,
        contender: &dyn Contender,
        block: usize,
        data: &'a [u8],
        out: &'a mut [u8],
    ) -> Self {
        let step_bytes = case.inputs() * block;
        let wanted = case.bytes(data.len()) / contender.share() / step_bytes;
        let different = if case.in_cache() {
            1
        } else {
            wanted.clamp(1, data.len() / step_bytes)
        };
        let (outputs, steps, between) = match contender.outputs() {
            Outputs::Written(outputs) => (outputs, different, 0),
            Outputs::Kept(outputs) => (outputs, 1, case.between_outputs()),
        };
        let inputs = data.chunks_exact(step_bytes).take(different);
        let inputs = inputs.map(|step| step.chunks_exact(block).collect());
        let room = out.chunks_exact_mut(block + between);
        let mut room = room.map(|room| &mut room[..block]);
        let outputs = (0..steps).map(|_| room.by_ref().take(outputs).collect());
        Self {
            inputs: inputs.collect(),
            outputs: outputs.collect(),
            count: if case.in_cache() {
                wanted.max(1)
            } else {
                different
            },
            step_bytes,
        }
    }

    fn check(mut self, contender: &mut dyn Contender) -> Result<()> {
        let checked = contender.check(&self.inputs[0], &mut self.outputs[0]);
        checked.with_context(|| format!("checking {}", contender.name()))
    }

    fn one(&mut self, contender: &mut dyn Contender) -> Result<()> {
        contender.step(&self.inputs[0], &mut self.outputs[0])
    }

    fn run(&mut self, contender: &mut dyn Contender) -> Result<Span> {
        let start = Instant::now();
        for step in 0..self.count {
            let data = &self.inputs[step % self.inputs.len()];
            let outputs = self.outputs.len();
            contender.step(data, &mut self.outputs[step % outputs])?;
        }
        let end = Instant::now();
        let bytes = self.count * self.step_bytes;
        Ok(Span { start, end, bytes })
    }
}

/// The rate of each round: the bytes of all cores, from the first start to the last end.
fn series(case: Case, cores: &[Vec<Spans>]) -> Vec<Series> {
    let Some(first) = cores.first() else {
        return Vec::new();
    };
    let rate = |who: usize, round: usize| {
        let spans = cores.iter().map(|core| core[who].rounds[round]);
        let start = spans.clone().map(|span| span.start).min();
        let end = spans.clone().map(|span| span.end).max();
        let time = start
            .zip(end)
            .map_or(Duration::ZERO, |(start, end)| end - start);
        let bytes: usize = spans.map(|span| span.bytes).sum();
        bytes as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE)
    };
    let of = |(who, spans): (usize, &Spans)| Series {
        case,
        cores: cores.len(),
        name: spans.name,
        rates: (0..spans.rounds.len())
            .map(|round| rate(who, round))
            .collect(),
    };
    first.iter().enumerate().map(of).collect()
}

/// Where threads wait for one another, but not for ever, nor for one that failed.
struct Gate {
    threads: usize,
    state: Mutex<GateState>,
    moved: Condvar,
}

#[derive(Default)]
struct GateState {
    waiting: usize,
    passed: u64,
    closed: bool,
}

impl Gate {
    fn new(threads: usize) -> Self {
        let (state, moved) = (Mutex::default(), Condvar::new());
        Self {
            threads,
            state,
            moved,
        }
    }

    fn pass(&self) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiting += 1;
        if state.waiting == self.threads {
            state.waiting = 0;
            state.passed += 1;
            self.moved.notify_all();
            return Ok(());
        }
        let before = state.passed;
        let waits = |state: &mut GateState| state.passed == before && !state.closed;
        let waited = self.moved.wait_timeout_while(state, WAIT_MAX, waits);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        ensure!(
            state.passed > before,
            "expected all measuring threads within {WAIT_MAX:?}, got not all: another one failed or is stuck"
        );
        Ok(())
    }

    fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.closed = true;
        self.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::{Bench, Gate, Settings};
    use crate::codec::case::{Caches, Case};
    use crate::codec::contender::MEMCPY;

    fn settings(rounds: usize) -> Settings {
        let (first, second) = (32 << 10, 1 << 20);
        Settings {
            rounds,
            only: Vec::new(),
            caches: Caches { first, second },
        }
    }

    #[test]
    fn every_case_is_measured_in_every_round() {
        let settings = settings(2);
        let mut bench = Bench::new(1, 128 << 20).expect("a core");
        for case in Case::all() {
            let series = bench.measure(case, &settings).expect("measured");
            assert!(series.iter().any(|one| one.name == MEMCPY));
            for one in series {
                assert_eq!((one.rates.len(), one.cores), (2, 1));
                assert!(one.rates.iter().all(|rate| rate.is_finite() && *rate > 0.0));
            }
        }
    }

    #[test]
    fn too_little_memory_is_an_error() {
        let settings = settings(1);
        let mut bench = Bench::new(1, 1 << 20).expect("a core");
        assert!(bench.measure(Case::all()[0], &settings).is_err());
    }

    #[test]
    fn a_thread_does_not_wait_for_one_that_failed() {
        let gate = Gate::new(2);
        gate.close();
        assert!(gate.pass().is_err());
        assert!(Gate::new(1).pass().is_ok());
    }
}
