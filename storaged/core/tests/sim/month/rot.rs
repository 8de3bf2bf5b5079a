//! Chunks of a month's RAM that are not what they were. Each is a loss of its block until it is put back where it was; whoever reads it
//! before the scrub comes to it sees that, and asks for another source.

use std::collections::BTreeSet;

use storaged_codec::Digest;
use storaged_core::ParityId;
use storaged_wire::{Namespace, Rank, SlotId};

use super::super::world::World;
use crate::testkit::{Pid, digests};

/// Of the beats, a chunk rots at one in so many.
const ROT_ONE_IN: u64 = 100;

/// Which bytes were changed, and what they were.
#[derive(Debug, Clone)]
enum Block {
    Shard {
        manifest: Digest,
        slot: SlotId,
        length: usize,
        root: Digest,
    },
    Parity {
        set: ParityId,
        stripe: usize,
        before: Vec<u8>,
    },
}

/// A chunk that has rotted.
#[derive(Debug, Clone)]
pub struct Rotten {
    pid: Pid,
    block: Block,
}

impl World {
    pub(super) fn strike_chunks(&mut self) {
        // A step that is newer than what is shown as protected may have rotted: its losses are counted here alone.
        let m = self.scene.limits.m;
        if self.random(ROT_ONE_IN) != 0 || !self.may_lose_one() || self.rotten_machines() >= m {
            return;
        }
        let machines = self.machines();
        let machine = machines[self.random(machines.len() as u64) as usize];
        let jobs = self.month().jobs.all.len() as u64;
        let job = self.random(jobs) as usize;
        let namespace = self.month().jobs.all[job].namespace.clone();
        self.ask_what_is_promised();
        let Some(rotten) = self.rots(machine, &namespace) else {
            return;
        };
        self.struck(match rotten.block {
            Block::Shard { .. } => "chunks of shards that rot",
            Block::Parity { .. } => "chunks of parity that rot",
        });
        self.lose_machine(machine);
        self.month().rotten.push(rotten);
    }

    /// A byte changes in what a machine holds of the newest step there.
    fn rots(&mut self, machine: usize, namespace: &Namespace) -> Option<Rotten> {
        let pid = self.pid(machine)?;
        let shown = self.ram(machine).node.shown().into_iter();
        let mut shown = shown.filter(|it| it.key.namespace == *namespace).rev();
        let holds = shown.find(|it| !it.shards.is_empty() || !it.parity.is_empty())?;
        let (shards, parity) = (holds.shards.len() as u64, holds.parity.len() as u64);
        let at = self.random(shards + parity);
        let block = if at < shards {
            let (rank, slot) = holds.shards[at as usize];
            self.shard_rots(machine, holds.manifest?, rank, slot)
        } else {
            let (_, _, set) = holds.parity[(at - shards) as usize];
            self.parity_rots(machine, set)
        };
        Some(Rotten { pid, block: block? })
    }

    fn shard_rots(
        &mut self,
        machine: usize,
        manifest: Digest,
        rank: Rank,
        slot: SlotId,
    ) -> Option<Block> {
        let record = self.month().promises.manifests.get(&manifest)?.clone();
        let entry = record.manifest().shard(rank)?;
        let length = usize::try_from(entry.length).ok()?;
        let at = self.random(entry.length) as usize;
        let bytes = self.ram(machine).slots.get_mut(&slot)?;
        // What has rotted before counts once.
        if digests(&bytes[..length]).1 != entry.root {
            return None;
        }
        bytes[at] ^= 0x20;
        Some(Block::Shard {
            manifest,
            slot,
            length,
            root: entry.root,
        })
    }

    fn parity_rots(&mut self, machine: usize, set: ParityId) -> Option<Block> {
        // Struck a second time, the same byte would be what it was.
        if self.is_rotten_parity(self.pid(machine)?, set) {
            return None;
        }
        let stripes = self.ram(machine).parity.get(&set)?.len() as u64;
        let stripe = self.random(stripes) as usize;
        let bytes = &mut self.ram(machine).parity.get_mut(&set)?[stripe];
        let before = bytes.clone();
        *bytes.first_mut()? ^= 0x20;
        Some(Block::Parity {
            set,
            stripe,
            before,
        })
    }

    /// Whether a shard in a machine's RAM is not what it was.
    pub(super) fn is_rotten_shard(&self, pid: Pid, name: Digest, at: SlotId) -> bool {
        let is_it = |rotten: &&Rotten| {
            rotten.pid == pid
                && matches!(&rotten.block, Block::Shard { manifest, slot, .. }
                    if *manifest == name && *slot == at)
        };
        self.rotten_now().any(|it| is_it(&it))
    }

    pub(super) fn is_rotten_parity(&self, pid: Pid, parity: ParityId) -> bool {
        self.rotten_now().any(|rotten| {
            rotten.pid == pid
                && matches!(&rotten.block, Block::Parity { set, .. } if *set == parity)
        })
    }

    /// How many machines hold a block that has rotted.
    fn rotten_machines(&self) -> usize {
        let holds = |rotten: &&Rotten| {
            let process = self.processes[rotten.pid.node].as_ref();
            process.is_some_and(|process| match &rotten.block {
                Block::Shard { manifest, slot, .. } => {
                    let shown = process.node.shown();
                    let mut of_it = shown.iter().filter(|it| it.manifest == Some(*manifest));
                    of_it.any(|it| it.shards.iter().any(|(_, at)| at == slot))
                }
                Block::Parity { .. } => true,
            })
        };
        let machines = self.rotten_now().filter(holds).map(|it| it.pid.node);
        machines.collect::<BTreeSet<_>>().len()
    }

    /// What has rotted and has not been put back.
    fn rotten_now(&self) -> impl Iterator<Item = &Rotten> {
        let all = self.scene.month.iter().flat_map(|month| &month.rotten);
        all.filter(|rotten| {
            let process = self.processes[rotten.pid.node].as_ref();
            let process = process.filter(|it| it.generation == rotten.pid.generation);
            process.is_some_and(|process| match &rotten.block {
                Block::Shard {
                    slot, length, root, ..
                } => {
                    let bytes = process.slots.get(slot);
                    let bytes = bytes.and_then(|bytes| bytes.get(..*length));
                    bytes.is_some_and(|bytes| digests(bytes).1 != *root)
                }
                Block::Parity {
                    set,
                    stripe,
                    before,
                } => {
                    let stripes = process.parity.get(set);
                    let bytes = stripes.and_then(|stripes| stripes.get(*stripe));
                    bytes.is_some_and(|bytes| bytes != before)
                }
            })
        })
    }

    /// Whether chunks of this month rot.
    pub(super) fn has_rot(&self) -> bool {
        let month = self.scene.month.as_deref();
        month.is_some_and(|month| month.scenario.rot)
    }
}
