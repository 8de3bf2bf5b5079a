//! The kernels' loops, written once as a macro over an engine's vector operations, because only code inside a function
//! that enables the same processor features becomes those instructions.

/// How far ahead a fold asks for its data: a page and a half, since processors fetch ahead by themselves only up to the
/// end of a page. Without it a fold into two sums in the second-level cache takes 1.8 times as long, into four 2.2 times
/// (docs/bench/codec.md has the machine).
pub(super) const FOLD_AHEAD: usize = 6 << 10;

/// How far ahead a combination asks for each of its inputs: eight cache lines, about the latency of memory at full rate.
pub(super) const COMBINE_AHEAD: usize = 512;

/// `fold_group` and `fold_from_group`, over the `Vector`, `Factor`, `WIDTH`, `zero`, `load`, `store`, `xor`, `factor`, `spread`,
/// `multiply` and `prefetch` of the module that calls it. Takes the processor features, and for each number of outputs how
/// many vectors of each are gone over at a time.
macro_rules! fold_kernels {
    ($features:literal; $($m:literal => $u:literal),+ $(,)?) => {
        /// `out[j] ^= coefficients[j] * data` for the whole steps at the front; says how many bytes that were.
        #[target_feature(enable = $features)]
        fn fold_pass<const M: usize, const U: usize>(
            out: &mut [&mut [u8]; M],
            coefficients: &[u8; M],
            data: &[u8],
        ) -> usize {
            let (data, _) = data.as_chunks::<WIDTH>().0.as_chunks::<U>();
            let out = out
                .each_mut()
                .map(|block| block.as_chunks_mut::<WIDTH>().0.as_chunks_mut::<U>().0);
            let factors = coefficients.map(factor);
            for (at, step) in data.iter().enumerate() {
                prefetch::<FOLD_AHEAD, WIDTH, U>(step);
                let mut x = [zero(); U];
                for u in 0..U {
                    x[u] = load(&step[u]);
                }
                for j in 0..M {
                    let spread = spread(&factors[j]);
                    let block = &mut out[j][at];
                    for u in 0..U {
                        let sum = xor(load(&block[u]), multiply(spread, x[u]));
                        store(&mut block[u], sum);
                    }
                }
            }
            data.len() * WIDTH * U
        }

        /// `out[j] = input[j] ^ coefficients[j] * data` for the whole steps at the front of blocks of one length;
        /// says how many bytes that were.
        #[target_feature(enable = $features)]
        fn fold_from_pass<const M: usize, const U: usize>(
            out: &mut [&mut [u8]; M],
            input: &[&[u8]; M],
            coefficients: &[u8; M],
            data: &[u8],
        ) -> usize {
            let (data, _) = data.as_chunks::<WIDTH>().0.as_chunks::<U>();
            let input = input.map(|block| block.as_chunks::<WIDTH>().0.as_chunks::<U>().0);
            let out = out
                .each_mut()
                .map(|block| block.as_chunks_mut::<WIDTH>().0.as_chunks_mut::<U>().0);
            let factors = coefficients.map(factor);
            for (at, step) in data.iter().enumerate() {
                prefetch::<FOLD_AHEAD, WIDTH, U>(step);
                let mut x = [zero(); U];
                for u in 0..U {
                    x[u] = load(&step[u]);
                }
                for j in 0..M {
                    let spread = spread(&factors[j]);
                    let (block, from) = (&mut out[j][at], &input[j][at]);
                    for u in 0..U {
                        let sum = xor(load(&from[u]), multiply(spread, x[u]));
                        store(&mut block[u], sum);
                    }
                }
            }
            data.len() * WIDTH * U
        }

        /// `fold_pass` for as many outputs as there are; does nothing for none or more than a group.
        #[target_feature(enable = $features)]
        pub(super) fn fold_group(out: &mut [&mut [u8]], coefficients: &[u8], data: &[u8]) -> usize {
            match out.len() {
                $($m => match (out.first_chunk_mut(), coefficients.first_chunk()) {
                    (Some(out), Some(coefficients)) => {
                        fold_pass::<$m, $u>(out, coefficients, data)
                    }
                    _ => 0,
                },)+
                _ => 0,
            }
        }

        /// `fold_from_pass` for as many outputs as there are; does nothing for none or more than a group.
        #[target_feature(enable = $features)]
        pub(super) fn fold_from_group(
            out: &mut [&mut [u8]],
            input: &[&[u8]],
            coefficients: &[u8],
            data: &[u8],
        ) -> usize {
            match out.len() {
                $($m => match (out.first_chunk_mut(), input.first_chunk(), coefficients.first_chunk()) {
                    (Some(out), Some(input), Some(coefficients)) => {
                        fold_from_pass::<$m, $u>(out, input, coefficients, data)
                    }
                    _ => 0,
                },)+
                _ => 0,
            }
        }
    };
}

/// `combine_group` and `xor_whole`, over what `fold_kernels` is over, `stream` and `fence`. Takes the processor features, and
/// for each number of outputs how many vectors of each are summed in registers.
macro_rules! combine_kernels {
    ($features:literal; $($m:literal => $u:literal),+ $(,)?) => {
        /// `out[j] = sum over i of factors[i][j] * data[i]` for the whole steps at the front of blocks of one
        /// length; says how many bytes that were.
        #[target_feature(enable = $features)]
        fn combine_pass<const M: usize, const U: usize, const STREAM: bool>(
            factors: &[[Factor; M]],
            data: &[&[u8]],
            out: &mut [&mut [u8]; M],
        ) -> usize {
            let data: Vec<&[[[u8; WIDTH]; U]]> = data
                .iter()
                .map(|block| block.as_chunks::<WIDTH>().0.as_chunks::<U>().0)
                .collect();
            let out = out
                .each_mut()
                .map(|block| block.as_chunks_mut::<WIDTH>().0.as_chunks_mut::<U>().0);
            let steps = out.iter().map(|block| block.len()).min().unwrap_or(0);
            for at in 0..steps {
                let mut sums = [[zero(); U]; M];
                for (block, factors) in data.iter().zip(factors) {
                    let step = &block[at];
                    if STREAM {
                        prefetch::<COMBINE_AHEAD, WIDTH, U>(step);
                    }
                    let mut x = [zero(); U];
                    for u in 0..U {
                        x[u] = load(&step[u]);
                    }
                    for j in 0..M {
                        let spread = spread(&factors[j]);
                        for u in 0..U {
                            sums[j][u] = xor(sums[j][u], multiply(spread, x[u]));
                        }
                    }
                }
                for j in 0..M {
                    let block = &mut out[j][at];
                    for u in 0..U {
                        if STREAM {
                            stream(&mut block[u], sums[j][u]);
                        } else {
                            store(&mut block[u], sums[j][u]);
                        }
                    }
                }
            }
            if STREAM {
                fence();
            }
            steps * WIDTH * U
        }

        /// `combine_pass` for as many outputs as there are; does nothing for none or more than a group.
        #[target_feature(enable = $features)]
        fn combine_group(
            rows: &[&[u8]],
            data: &[&[u8]],
            out: &mut [&mut [u8]],
            stores: Stores,
        ) -> usize {
            match out.len() {
                $($m => match (out.first_chunk_mut(), stores) {
                    (Some(out), Stores::Cached) => {
                        combine_pass::<$m, $u, false>(&columns(rows, data.len()), data, out)
                    }
                    (Some(out), Stores::Streamed) => {
                        combine_pass::<$m, $u, true>(&columns(rows, data.len()), data, out)
                    }
                    _ => 0,
                },)+
                _ => 0,
            }
        }

        /// The factors of every input, for each output.
        fn columns<const M: usize>(rows: &[&[u8]], count: usize) -> Vec<[Factor; M]> {
            let of = |j: usize, i| rows.get(j).map_or(0, |row| blocks::entry(row, i));
            let column = |i| std::array::from_fn(|j| factor(of(j, i)));
            (0..count).map(column).collect()
        }

        /// `out ^= data` for the whole vectors at the front of both; says how many bytes that were.
        #[target_feature(enable = $features)]
        fn xor_whole(out: &mut [u8], data: &[u8]) -> usize {
            let length = out.len().min(data.len());
            let (out, _) = out[..length].as_chunks_mut::<WIDTH>();
            let (data, _) = data[..length].as_chunks::<WIDTH>();
            for (x, y) in out.iter_mut().zip(data) {
                let sum = xor(load(x), load(y));
                store(x, sum);
            }
            data.len() * WIDTH
        }
    };
}

/// The engine on the combining kernels of the module that calls it and the folding kernels of a module that it names, for
/// a type whose values exist only where the processor has the features of both.
macro_rules! engine_on_kernels {
    ($engine:ident, $name:literal, $folds:path) => {
        use $folds as folds;

        impl Engine for $engine {
            fn name(&self) -> &'static str {
                $name
            }

            fn fold(&self, out: &mut [&mut [u8]], coefficients: &[u8], data: &[u8]) {
                blocks::fold(out, coefficients, data, |out, coefficients, data| {
                    // SAFETY: the kernels only need the processor's features, and a value of this type, `self`,
                    // exists only after `detect` found them.
                    unsafe { folds::fold_group(out, coefficients, data) }
                });
            }

            fn fold_from(
                &self,
                out: &mut [&mut [u8]],
                input: &[&[u8]],
                coefficients: &[u8],
                data: &[u8],
            ) {
                blocks::fold_from(
                    out,
                    input,
                    coefficients,
                    data,
                    |out, input, coefficients, data| {
                        // SAFETY: the kernels only need the processor's features, and a value of this type, `self`,
                        // exists only after `detect` found them.
                        unsafe { folds::fold_from_group(out, input, coefficients, data) }
                    },
                );
            }

            fn xor(&self, out: &mut [u8], data: &[u8]) {
                // SAFETY: the kernels only need the processor's features, and a value of this type, `self`, exists
                // only after `detect` found them.
                let done = unsafe { xor_whole(out, data) };
                Portable.xor(&mut out[done..], &data[done..]);
            }

            fn combine(&self, rows: &[&[u8]], data: &[&[u8]], out: &mut [&mut [u8]]) {
                blocks::combine(rows, data, out, |rows, data, out, stores| {
                    // SAFETY: the kernels only need the processor's features, and a value of this type, `self`,
                    // exists only after `detect` found them.
                    unsafe { combine_group(rows, data, out, stores) }
                });
            }
        }
    };
}
