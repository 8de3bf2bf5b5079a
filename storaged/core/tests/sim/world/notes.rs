//! What nodes tell, judged as it is told; and the bytes that every restore is compared with.

use super::*;

impl World {
    /// An honest node is never accused of wrong bytes.
    pub(super) fn only_liars_are_accused(&mut self, fault: &SessionFault) {
        if let SessionFault::WrongBytes { node, .. } = fault {
            assert_eq!(Some(index(node)), self.limits.liar, "{fault:?}");
            self.liar_named += 1;
        }
    }

    pub(super) fn noted(&mut self, note: &Note) {
        if self.month.is_some() {
            return;
        }
        match note {
            Note::SessionFailed { fault, .. } => self.only_liars_are_accused(fault),
            Note::ShapeChosen { .. } => self.shapes += 1,
            Note::Replanned { node, .. } => *self.replans.entry(index(node)).or_default() += 1,
            Note::PeerFault { node, reason } => {
                assert_eq!(Some(index(node)), self.limits.fibber, "{reason}");
                self.refused_reports += 1;
            }
            _ => {}
        }
        let Note::State { key, state } = note else {
            return;
        };
        if *state == CheckpointState::Retired {
            return;
        }
        let newest = self.newest.entry(*state).or_insert_with(|| key.clone());
        if *key > *newest {
            *newest = key.clone();
        }
        if *state >= CheckpointState::Committed {
            self.job.was_sealed_whole(key);
        }
    }

    pub(super) fn check(&mut self, node: usize, part: &CheckPart) -> (u64, Option<String>) {
        match part {
            CheckPart::Shard(SlotShard {
                slot,
                length,
                leaves,
                ..
            }) => {
                let bytes = &self.ram(node).slots[slot][..*length as usize];
                let same = digests(bytes).0 == *leaves;
                (*length, (!same).then(|| "wrong digest".into()))
            }
            CheckPart::Parity(_) => (0, None),
        }
    }

    /// An increment builds on what is in the durable tier, and what it is written against is still in RAM.
    pub(super) fn check_base(&self, node: usize, rank: Rank, base: &UploadBase) {
        let record = base.manifest.manifest();
        let durable = self.durable.get(&(record.run, record.step));
        assert_eq!(
            durable.map(|manifest| manifest.name()),
            Some(base.manifest.name()),
            "a base is in the durable tier"
        );
        let slot = &self.processes[node].as_ref().unwrap().slots[&base.shard.slot];
        let bytes = &self.durable_shards[&(base.manifest.name(), rank)];
        assert_eq!(
            &slot[..base.shard.length as usize],
            bytes,
            "a base is whole"
        );
    }
}

/// Chunk digests and root of a shard.
pub fn digests(bytes: &[u8]) -> (Arc<[Digest]>, Digest) {
    let chunk = ChunkSize::new(CHUNK_BYTES).unwrap();
    let leaves: Vec<Digest> = bytes
        .chunks(CHUNK_BYTES as usize)
        .enumerate()
        .map(|(index, chunk)| leaf_digest(chunk, index as u64))
        .collect();
    let root = root_digest(&leaves, bytes.len() as u64, chunk);
    (leaves.into(), root)
}
