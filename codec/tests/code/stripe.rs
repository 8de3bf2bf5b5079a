//! Stripes whose blocks do not fit together.

use proptest::prelude::*;
use storaged_codec::{CodingMatrix, StripeCheck, StripeError, check_stripe, engine, engines};

use crate::{cauchy, noise, small_geometries, stripe_of, subsets};

fn check(matrix: &CodingMatrix, stripe: &[Vec<u8>], given: &[usize]) -> StripeCheck {
    let blocks: Vec<(usize, &[u8])> = given.iter().map(|b| (*b, &stripe[*b][..])).collect();
    check_stripe(engine(), matrix, &blocks).expect("blocks of one stripe")
}

fn spoil(stripe: &[Vec<u8>], wrong: &[usize], seed: u64) -> Vec<Vec<u8>> {
    let mut spoiled = stripe.to_vec();
    for block in wrong {
        let change = noise(seed + *block as u64 + 1, 3);
        let at = seed as usize % (spoiled[*block].len() - 3);
        spoiled[*block][at] ^= change[0] | 1;
        spoiled[*block][at + 1] ^= change[1];
        spoiled[*block][at + 2] ^= change[2];
    }
    spoiled
}

#[test]
fn wrong_blocks_of_small_stripes_are_found() {
    for (k, m) in small_geometries() {
        let (n, matrix) = (k + m, cauchy(k, m));
        let stripe = stripe_of(engine(), &matrix, n as u64, 50);
        let all: Vec<usize> = (0..n).collect();
        assert_eq!(check(&matrix, &stripe, &all), StripeCheck::Consistent);
        for count in 1..=m / 2 {
            for wrong in subsets(n, count) {
                let got = check(&matrix, &spoil(&stripe, &wrong, 5), &all);
                assert_eq!(got, StripeCheck::Wrong(wrong), "{k}+{m}");
            }
        }
        // More than half, but at most m, are never taken for a sound stripe.
        for wrong in subsets(n, m / 2 + 1) {
            let got = check(&matrix, &spoil(&stripe, &wrong, 8), &all);
            assert_ne!(got, StripeCheck::Consistent, "{k}+{m}, {wrong:?}");
        }
    }
}

#[test]
fn any_more_than_k_blocks_can_be_checked() {
    let (k, m) = (4, 3);
    let matrix = cauchy(k, m);
    let stripe = stripe_of(engine(), &matrix, 2, 70_000);
    for given in subsets(k + m, k + 1) {
        assert_eq!(check(&matrix, &stripe, &given), StripeCheck::Consistent);
        let spoiled = spoil(&stripe, &given[1..2], 60_000);
        assert_eq!(check(&matrix, &spoiled, &given), StripeCheck::Inconsistent);
    }
    for given in subsets(k + m, k + 2) {
        let spoiled = spoil(&stripe, &given[3..4], 60_000);
        let found = StripeCheck::Wrong(vec![given[3]]);
        assert_eq!(check(&matrix, &spoiled, &given), found);
    }
}

#[test]
fn wrong_bytes_that_depend_on_one_another_are_found() {
    // The same single byte in two blocks: one syndrome vector, two wrong blocks.
    let matrix = cauchy(8, 4);
    let stripe = stripe_of(engine(), &matrix, 6, 40);
    let all: Vec<usize> = (0..12).collect();
    for wrong in subsets(12, 2) {
        let mut spoiled = stripe.clone();
        wrong.iter().for_each(|block| spoiled[*block][17] ^= 3);
        let found = StripeCheck::Wrong(wrong);
        assert_eq!(check(&matrix, &spoiled, &all), found);
    }
}

#[test]
fn every_engine_says_the_same() {
    let matrix = cauchy(8, 4);
    for engine in engines() {
        let stripe = spoil(&stripe_of(engine, &matrix, 6, 33_000), &[2, 10], 32_800);
        let blocks: Vec<(usize, &[u8])> = stripe.iter().map(Vec::as_slice).enumerate().collect();
        let got = check_stripe(engine, &matrix, &blocks);
        assert_eq!(
            got,
            Ok(StripeCheck::Wrong(vec![2, 10])),
            "{}",
            engine.name()
        );
    }
}

#[test]
fn wide_stripes_end_with_an_answer() {
    let matrix = cauchy(200, 20);
    let stripe = stripe_of(engine(), &matrix, 6, 64);
    let all: Vec<usize> = (0..220).collect();
    let wrong = vec![0, 7, 33, 100, 180, 199, 200, 219];
    let mut spoiled = stripe.clone();
    for block in &wrong {
        spoiled[*block] = noise(*block as u64 + 500, 64);
    }
    assert_eq!(
        check(&matrix, &spoiled, &all),
        StripeCheck::Wrong(wrong.clone())
    );
    let mut same_byte = stripe;
    wrong.iter().for_each(|block| same_byte[*block][9] ^= 1);
    assert_eq!(check(&matrix, &same_byte, &all), StripeCheck::Inconsistent);
}

#[test]
fn what_is_no_stripe_is_an_error() {
    let matrix = cauchy(2, 2);
    let run = |blocks: &[(usize, &[u8])]| check_stripe(engine(), &matrix, blocks).err();
    for got in [
        vec![],
        vec![0, 1],
        vec![0, 1, 4],
        vec![1, 0, 2],
        vec![0, 1, 1],
    ] {
        let blocks: Vec<(usize, &[u8])> = got.iter().map(|block| (*block, &[1u8][..])).collect();
        assert_eq!(run(&blocks), Some(StripeError::Blocks { k: 2, n: 4, got }));
    }
    let (block, expected, got) = (3, 2, 1);
    let unlike = run(&[(0, &[1, 2]), (1, &[1, 2]), (3, &[1])]);
    assert_eq!(
        unlike,
        Some(StripeError::Length {
            block,
            expected,
            got
        })
    );
    assert_eq!(
        check(&matrix, &[vec![], vec![], vec![]], &[0, 1, 2]),
        StripeCheck::Consistent
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn one_wrong_block_is_found_in_any_geometry(k in 1usize..60, m in 2usize..8, length in 4usize..400, at in any::<prop::sample::Index>(), seed in 1u64..1 << 30) {
        let matrix = cauchy(k, m);
        let stripe = stripe_of(engine(), &matrix, seed, length);
        let all: Vec<usize> = (0..k + m).collect();
        let wrong = vec![at.index(k + m)];
        let got = check(&matrix, &spoil(&stripe, &wrong, seed), &all);
        prop_assert_eq!(got, StripeCheck::Wrong(wrong));
    }
}
