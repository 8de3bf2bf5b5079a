//! Decoding block by block.

use storaged_codec::{DecodeError, Decoder, RepairError, engine, engines};

use crate::{cauchy, noise, small_geometries, stripe_of, subsets, vandermonde};

/// Three orders of arrival: as they stand, backwards, and shuffled by `seed`.
fn orders(survivors: &[usize], seed: u64) -> [Vec<usize>; 3] {
    let mut shuffled = survivors.to_vec();
    let keys = noise(seed, 256);
    shuffled.sort_by_key(|block| keys[*block]);
    let backwards = survivors.iter().rev().copied().collect();
    [survivors.to_vec(), backwards, shuffled]
}

#[test]
fn every_small_loss_is_decoded_in_any_order_of_arrival() {
    for (k, m) in small_geometries() {
        let n = k + m;
        // One matrix for odd and the other for even k; `properties.rs` has both for any geometry.
        let matrix = [cauchy(k, m), vandermonde(k, m)][k % 2].clone();
        let stripe = stripe_of(engine(), &matrix, n as u64, 67);
        for (seed, survivors) in subsets(n, k).into_iter().enumerate() {
            let lost: Vec<usize> = (0..n).filter(|block| !survivors.contains(block)).collect();
            for order in orders(&survivors, seed as u64) {
                let mut decoder = Decoder::new(&matrix, &survivors, &lost).expect("k survivors");
                for (done, block) in order.iter().enumerate() {
                    let mut left = order[done..].to_vec();
                    left.sort_unstable();
                    assert_eq!(decoder.missing(), left);
                    let added = decoder.add(engine(), *block, &stripe[*block]);
                    added.expect("a survivor for the first time");
                }
                let got = decoder.finish().expect("all are in");
                let same = got
                    .iter()
                    .zip(&lost)
                    .all(|(got, block)| *got == stripe[*block]);
                assert!(same && got.len() == m, "{k}+{m}, {lost:?} by {order:?}");
            }
        }
    }
}

#[test]
fn large_geometries_are_decoded_on_every_engine() {
    for engine in engines() {
        for (k, m) in [(32, 2), (100, 30), (235, 20), (254, 1)] {
            let matrix = cauchy(k, m);
            let stripe = stripe_of(engine, &matrix, 3, 130);
            let survivors: Vec<usize> = (m..k + m).collect();
            // A survivor may be wanted too.
            let wanted = [0, m - 1, k + m - 1];
            let mut decoder = Decoder::new(&matrix, &survivors, &wanted).expect("k survivors");
            let [_, _, shuffled] = orders(&survivors, 9);
            for block in shuffled {
                decoder
                    .add(engine, block, &stripe[block])
                    .expect("a survivor");
            }
            let want = wanted.map(|block| stripe[block].clone());
            assert!(decoder.finish().as_deref() == Ok(&want), "{k}+{m}");
        }
    }
}

#[test]
fn what_does_not_belong_is_an_error_and_changes_nothing() {
    let matrix = cauchy(3, 2);
    let stripe = stripe_of(engine(), &matrix, 1, 50);
    let survivors = vec![1, 2, 4];
    let mut decoder = Decoder::new(&matrix, &survivors, &[0]).expect("k survivors");
    for got in [0, 3, 5, usize::MAX] {
        let error = decoder.add(engine(), got, &stripe[0]).err();
        let survivors = survivors.clone();
        assert_eq!(error, Some(DecodeError::Foreign { survivors, got }));
    }
    decoder.add(engine(), 4, &stripe[4]).expect("a survivor");
    let again = decoder.add(engine(), 4, &stripe[4]);
    assert_eq!(again, Err(DecodeError::Duplicate(4)));
    for got in [0, 49, 51] {
        let (block, expected) = (1, 50);
        let error = decoder.add(engine(), 1, &vec![1; got]).err();
        assert_eq!(
            error,
            Some(DecodeError::Length {
                block,
                expected,
                got
            })
        );
    }
    decoder.add(engine(), 2, &stripe[2]).expect("a survivor");
    assert_eq!(decoder.missing(), [1]);
    decoder.add(engine(), 1, &stripe[1]).expect("a survivor");
    assert_eq!(decoder.finish(), Ok(vec![stripe[0].clone()]));
}

#[test]
fn an_early_finish_names_what_is_missing() {
    let mut decoder = Decoder::new(&cauchy(3, 2), &[1, 2, 4], &[0]).expect("k survivors");
    decoder.add(engine(), 2, &[1, 2, 3]).expect("a survivor");
    assert_eq!(decoder.finish(), Err(DecodeError::Missing(vec![1, 4])));
}

#[test]
fn no_decode_starts_without_k_survivors_and_real_blocks() {
    let matrix = cauchy(3, 2);
    for survivors in [
        &[0, 1][..],
        &[0, 1, 5],
        &[1, 0, 2],
        &[1, 1, 2],
        &[0, 1, 2, 3],
    ] {
        let error = Decoder::new(&matrix, survivors, &[3]).err();
        let got = survivors.to_vec();
        let repair = RepairError::Survivors { k: 3, n: 5, got };
        assert_eq!(error, Some(DecodeError::Repair(repair)));
    }
    let error = Decoder::new(&matrix, &[0, 1, 2], &[5]).err();
    let repair = RepairError::Wanted { n: 5, got: 5 };
    assert_eq!(error, Some(DecodeError::Repair(repair)));
    let nothing = Decoder::new(&matrix, &[0, 1, 2], &[]).expect("nothing is wanted");
    assert_eq!(nothing.missing(), [0, 1, 2]);
}
