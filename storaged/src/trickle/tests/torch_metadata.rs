//! `.metadata` is unpacked a part at a time, and what cannot be unpacked fails its own step alone.

use super::*;

const PART: usize = 1 << 20;

/// Publishes a step with this metadata; gives what `.metadata` is then.
async fn published(metadata: Vec<u8>) -> Result<Bytes, DurableFault> {
    let mut world = World::new(0, Packing::None);
    let saved = world.seal_with(1, noise(1, 1000), metadata);
    let copied = world.trickle.upload(
        &saved.manifest,
        RANK,
        &saved.shard,
        None,
        Leftovers::Perhaps,
    );
    copied.await.unwrap();
    world.publish(&saved, &by_job()).await?;
    let key: ObjectKey = "job/run-1/step-1/.metadata".parse().unwrap();
    Ok(world.store.get(&key, None).await.unwrap())
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 3).unwrap()
}

#[tokio::test]
async fn metadata_of_any_length_comes_out_as_it_was_packed() {
    for length in [1, PART - 1, PART, PART + 1, 3 * PART, 5 * PART + 7] {
        let metadata = noise(3, length);
        let got = published(packed(&metadata)).await.unwrap();
        assert!(got == metadata, "{length} bytes came out changed");
    }
}

#[tokio::test]
async fn two_frames_are_one_text() {
    let two = [packed(b"one, "), packed(b"two")].concat();
    assert_eq!(published(two).await.unwrap(), "one, two");
}

#[tokio::test]
async fn what_cannot_be_unpacked_is_said() {
    let zeros = packed(&vec![0; 64 * PART]);
    assert!(zeros.len() * 1000 < 64 * PART, "a bomb of {}", zeros.len());
    let mut cut = packed(&noise(5, 2 * PART));
    cut.truncate(cut.len() - 100);
    for metadata in [zeros, cut, b"no frame".to_vec()] {
        let fault = published(metadata).await.unwrap_err();
        let text = fault.to_string();
        assert!(text.contains("cannot be unpacked"), "{text}");
    }
}
