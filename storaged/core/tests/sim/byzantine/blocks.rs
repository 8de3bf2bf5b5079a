//! What honest nodes hold of a step is what its job has sealed, and the parity of that. Had a liar one of them keep something else, nobody
//! would see it before other nodes are lost.

use storaged_codec::{CodingMatrix, engine};
use storaged_core::Shown;
use storaged_plan::LaneBlocks;
use storaged_wire::{KeptRecord, ManifestBytes, RecordName};

use super::super::job::content;
use super::super::world::World;
use crate::testkit::{CHUNK_BYTES, Process, digests};

impl World {
    pub(super) fn honest_blocks_are_right(&self) {
        for node in self.honest() {
            let Some(process) = &self.processes[node] else {
                continue;
            };
            for shown in process.node.shown() {
                self.shards_are_right(node, process, &shown);
                let record = shown.manifest.map(RecordName::Manifest);
                let record = record.and_then(|name| process.kept.get(&name));
                if let Some(KeptRecord::Manifest(_, bytes)) = record {
                    let manifest = ManifestBytes::parse(bytes.clone()).expect("it was read before");
                    self.parity_is_right(node, process, &shown, &manifest);
                }
            }
        }
    }

    fn shards_are_right(&self, node: usize, process: &Process, shown: &Shown) {
        for (rank, slot) in &shown.shards {
            let scale = self.scene.limits.shard_scale;
            let expected = content(shown.key.run, shown.key.step, *rank, scale);
            let held = process.slots.get(slot);
            assert!(
                held.is_none_or(|held| held[..expected.len()] == expected),
                "n{node}: {rank:?} of {:?} at {} ms",
                shown.key,
                self.now
            );
        }
    }

    fn parity_is_right(
        &self,
        node: usize,
        process: &Process,
        shown: &Shown,
        manifest: &ManifestBytes,
    ) {
        for (lane, index, set) in &shown.parity {
            let blocks = LaneBlocks::of(manifest, *lane).expect("a lane");
            let Some(expected) = self.parity_of(manifest, &blocks, *index as usize) else {
                continue;
            };
            let held = process
                .parity
                .get(set)
                .map_or(Vec::new(), |set| set.concat());
            assert!(
                held.len() >= expected.len() && held[..expected.len()] == expected,
                "n{node}: parity {index} of {lane:?} of {:?} at {} ms",
                shown.key,
                self.now
            );
        }
    }

    /// None of shards that the job has not sealed: the manifest is forged.
    fn parity_of(
        &self,
        manifest: &ManifestBytes,
        blocks: &LaneBlocks,
        parity: usize,
    ) -> Option<Vec<u8>> {
        let record = manifest.manifest();
        let matrix = CodingMatrix::cauchy(record.geometry);
        let stripes = (blocks.length as usize).div_ceil(CHUNK_BYTES as usize);
        let mut sum = vec![0; stripes * CHUNK_BYTES as usize];
        for (block, shard) in blocks.data.iter().enumerate() {
            let Some(shard) = shard else { continue };
            let scale = self.scene.limits.shard_scale;
            let bytes = content(record.run, record.step, shard.rank, scale);
            (digests(&bytes).1 == shard.root).then_some(())?;
            let there = &mut sum[..bytes.len()];
            engine().fold(&mut [there], &[matrix.coefficient(parity, block)], &bytes);
        }
        Some(sum)
    }
}
