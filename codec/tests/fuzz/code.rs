//! The erasure code with geometries, block indices, lengths and bytes from outside.

use bolero::check;
use storaged_codec::{CodingMatrix, Decoder, Engine, Geometry, engine, engine_named, engines};

use crate::{ITERATIONS, noise};

fn views(blocks: &[Vec<u8>]) -> Vec<&[u8]> {
    blocks.iter().map(Vec::as_slice).collect()
}

fn views_mut(blocks: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    blocks.iter_mut().map(Vec::as_mut_slice).collect()
}

/// A matrix of at most a few dozen blocks.
fn matrix(k: u8, m: u8, which: u8) -> CodingMatrix {
    let (k, m) = (1 + usize::from(k % 24), 1 + usize::from(m % 8));
    let geometry = Geometry::new(k, m).expect("within the field");
    match which & 1 {
        0 => CodingMatrix::cauchy(geometry),
        _ => CodingMatrix::vandermonde_rse(geometry).expect("it always exists"),
    }
}

fn stripe(matrix: &CodingMatrix, length: usize) -> Vec<Vec<u8>> {
    let (k, n) = (matrix.geometry().k(), matrix.geometry().n());
    let mut stripe: Vec<Vec<u8>> = (0..n as u64).map(|i| noise(i + 1, length)).collect();
    let (data, parity) = stripe.split_at_mut(k);
    engine().encode(matrix, &views(data), &mut views_mut(parity));
    stripe
}

#[test]
fn every_engine_does_as_naive_does_whatever_the_slices() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(u64, u16, Vec<u16>, Vec<u8>)>()
        .for_each(|(seed, length, lengths, coefficients)| {
            // Every third block has a length of its own.
            let length_of = |(at, own): (usize, &u16)| match at % 3 {
                0 => usize::from(own % 700),
                _ => usize::from(length % 700),
            };
            let lengths = lengths.iter().take(20).enumerate().map(length_of);
            let before: Vec<Vec<u8>> = lengths.map(|length| noise(*seed, length)).collect();
            let data = noise(seed ^ 1, usize::from(length % 700));
            let rows: Vec<&[u8]> = coefficients.chunks(3).collect();
            let run = |engine: &dyn Engine| {
                let mut out = before.clone();
                engine.fold(&mut views_mut(&mut out), coefficients, &data);
                let folded = out.clone();
                engine.fold_from(
                    &mut views_mut(&mut out),
                    &views(&folded),
                    coefficients,
                    &data,
                );
                engine.combine(&rows, &views(&before), &mut views_mut(&mut out[..]));
                out.iter_mut().for_each(|block| engine.xor(block, &data));
                (folded, out)
            };
            let want = run(engine_named("naive").expect("it is always there"));
            for engine in engines() {
                assert!(run(engine) == want, "{}", engine.name());
            }
        });
}

#[test]
fn any_indices_repair_or_are_an_error() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(u8, u8, u8, Vec<u8>, Vec<u8>, bool)>()
        .for_each(|(k, m, which, survivors, wanted, sorted)| {
            let matrix = matrix(*k, *m, *which);
            let (k, n) = (matrix.geometry().k(), matrix.geometry().n());
            let stripe = stripe(&matrix, 5);
            let mut survivors: Vec<usize> = survivors.iter().map(|x| usize::from(*x)).collect();
            if *sorted {
                // The likes of what a plan says.
                survivors.extend(0..n);
                survivors.iter_mut().for_each(|block| *block %= n);
                survivors.truncate(k + usize::from(which & 2));
                survivors.sort_unstable();
                survivors.dedup();
            }
            let wanted: Vec<usize> = wanted.iter().map(|x| usize::from(*x) % (n + 1)).collect();
            let rows = matrix.repair_coefficients(&survivors, &wanted);
            let decoder = Decoder::new(&matrix, &survivors, &wanted);
            assert_eq!(rows.is_ok(), decoder.is_ok());
            let (Ok(_), Ok(mut decoder)) = (rows, decoder) else {
                return;
            };
            for block in &survivors {
                let added = decoder.add(engine(), *block, &stripe[*block]);
                assert_eq!(added, Ok(()));
            }
            let want: Vec<Vec<u8>> = wanted.iter().map(|block| stripe[*block].clone()).collect();
            assert_eq!(decoder.finish(), Ok(want));
        });
}

#[test]
fn a_decode_takes_any_blocks_or_says_why_not() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(u8, u8, u8, Vec<(u8, u8)>)>()
        .for_each(|(k, m, which, blocks)| {
            let matrix = matrix(*k, *m, *which);
            let (k, n) = (matrix.geometry().k(), matrix.geometry().n());
            let survivors: Vec<usize> = (n - k..n).collect();
            let made = Decoder::new(&matrix, &survivors, &[0, n - 1]);
            let mut decoder = made.expect("k survivors");
            let mut added = 0;
            for (block, length) in blocks {
                let block = usize::from(*block) % (n + 2);
                let bytes = noise(block as u64, usize::from(length % 4));
                let before = decoder.missing();
                match decoder.add(engine(), block, &bytes) {
                    Ok(()) => added += 1,
                    Err(_) => assert_eq!(decoder.missing(), before),
                }
            }
            assert_eq!(decoder.missing().len(), k - added);
            assert_eq!(decoder.finish().is_ok(), added == k);
        });
}

#[test]
fn any_name_is_an_engine_or_an_error() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<String>()
        .for_each(|name| match engine_named(name) {
            Ok(engine) => assert_eq!(engine.name(), name),
            Err(error) => assert!(error.to_string().starts_with("expected an engine named")),
        });
}
