//! The cases and contenders of `make bench-codec` one at a time, to look at one engine while working on it:
//! `cargo bench -p storaged-bench --features isal,rse-simd -- encode_8_2_ram/gfni512`. Nothing here is interleaved or
//! pinned, so what others do on the machine shows; figures to report come from `make bench-codec`.

use std::time::Duration;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use storaged_bench::codec::arena::Arena;
use storaged_bench::codec::case::Case;
use storaged_bench::codec::contender::{Contender, Outputs, contenders};
use storaged_bench::codec::machine::Machine;

/// More than the caches hold; a step takes the next blocks of it, and begins anew at its end.
const ARENA_BYTES: usize = 512 << 20;

fn codec(criterion: &mut Criterion) {
    let machine = Machine::read();
    let mut arena = Arena::new(ARENA_BYTES);
    for case in Case::all() {
        let block = case.block(machine.caches);
        let mut group = criterion.benchmark_group(case.to_string());
        group.throughput(Throughput::Bytes((case.inputs() * block) as u64));
        let all = contenders(case, block, &[]).expect("every case fits its libraries");
        for mut contender in all {
            group.bench_function(contender.name(), |bencher| {
                let mut steps = Steps::new(case, contender.as_ref(), block);
                bencher.iter_batched(
                    || steps.next(),
                    |at| step(&mut arena, contender.as_mut(), at),
                    BatchSize::NumIterations(64),
                );
            });
        }
        group.finish();
    }
}

/// Where the blocks of a step are.
#[derive(Clone, Copy)]
struct At {
    block: usize,
    inputs: usize,
    input: usize,
    outputs: usize,
    output: usize,
    between: usize,
}

/// The steps of a contender, one after the other.
struct Steps {
    first: At,
    stays: (bool, bool),
    count: usize,
}

impl Steps {
    fn new(case: Case, contender: &dyn Contender, block: usize) -> Self {
        let kept = matches!(contender.outputs(), Outputs::Kept(_));
        let (Outputs::Written(outputs) | Outputs::Kept(outputs)) = contender.outputs();
        let first = At {
            block,
            inputs: case.inputs(),
            input: 0,
            outputs,
            output: 0,
            between: if kept { case.between_outputs() } else { 0 },
        };
        let stays = (case.in_cache(), case.in_cache() || kept);
        let count = 0;
        Self {
            first,
            stays,
            count,
        }
    }

    fn next(&mut self) -> At {
        let step = self.first.inputs * self.first.block;
        let start = self.count % (ARENA_BYTES / step) * step;
        self.count += 1;
        let place = |stays: bool| if stays { 0 } else { start };
        At {
            input: place(self.stays.0),
            output: place(self.stays.1),
            ..self.first
        }
    }
}

fn step(arena: &mut Arena, contender: &mut dyn Contender, at: At) {
    let (data, out) = arena.parts();
    let data = data[at.input..].chunks_exact(at.block);
    let data: Vec<&[u8]> = data.take(at.inputs).collect();
    let out = out[at.output..].chunks_exact_mut(at.block + at.between);
    let out = out.map(|room| &mut room[..at.block]);
    let mut out: Vec<&mut [u8]> = out.take(at.outputs).collect();
    contender
        .step(&data, &mut out)
        .expect("blocks that fit the case");
}

fn short() -> Criterion {
    Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500))
}

criterion_group! {
    name = benches;
    config = short();
    targets = codec
}
criterion_main!(benches);
