//! Which shape a leader chooses.

use storaged_plan::chooser::{
    CodingNodes, Dirty, EncodeCase, GroupFacts, choose_encode, estimate_encode,
};
use storaged_plan::{DirtyMap, Group, LaneBlocks, topology};
use storaged_wire::peer::Lane;
use storaged_wire::shape::EncodeShape;
use storaged_wire::{Manifest, ManifestBytes, NodeName};

use super::linkstats::Links;

const MILLION: u64 = 1_000_000;

/// Which stripes a session needs, as its members said.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct StripeDemand {
    /// Changed at some source; none if no source said.
    changed: Option<DirtyMap>,
    /// Not there yet at some keeper; none if no keeper said.
    lacking: Option<DirtyMap>,
    said_by: u64,
    counted: u64,
}

impl StripeDemand {
    /// Takes in which chunks of a source's shard changed.
    pub fn add_changed(&mut self, map: &DirtyMap) {
        self.said_by += 1;
        self.counted += map.count();
        unite(&mut self.changed, map);
    }

    /// Takes in which stripes a keeper lacks.
    pub fn add_lacking(&mut self, map: &DirtyMap) {
        unite(&mut self.lacking, map);
    }

    /// Stripes that changed at some source, if any source said.
    pub fn changed(&self) -> Option<&DirtyMap> {
        self.changed.as_ref()
    }

    /// Stripes that move: those that changed and that somebody lacks. None if nobody said anything: then all.
    pub fn stripes(&self) -> Option<DirtyMap> {
        match (&self.changed, &self.lacking) {
            (Some(changed), Some(lacking)) => {
                let mut both = changed.clone();
                both.keep_only(lacking);
                Some(both)
            }
            (one, other) => one.as_ref().or(other.as_ref()).cloned(),
        }
    }

    fn dirty(&self) -> Dirty {
        let Some(union) = self.stripes() else {
            return Dirty::FULL;
        };
        let share = |part: u64, whole: u64| {
            let ppm = u128::from(part) * u128::from(MILLION) / u128::from(whole.max(1));
            u32::try_from(ppm).unwrap_or(u32::MAX)
        };
        Dirty {
            union_ppm: share(union.count(), union.chunks()),
            own_ppm: match self.said_by {
                0 => Dirty::FULL.own_ppm,
                sources => share(self.counted, union.chunks() * sources),
            },
        }
    }
}

fn unite(union: &mut Option<DirtyMap>, map: &DirtyMap) {
    match union {
        Some(union) => union.unite(map),
        None => *union = Some(map.clone()),
    }
}

/// A shape that a leader chose.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Chosen {
    pub shape: EncodeShape,
    /// Why, and what is known of the links.
    pub reason: String,
    /// How long it is expected to take.
    pub seconds: f64,
}

/// The shape that is expected to end first, and why. None if the links' rate is not known, or nothing moves.
pub(super) fn chosen(
    manifest: &ManifestBytes,
    lane: Lane,
    needs: &StripeDemand,
    links: &Links<'_>,
) -> Option<Chosen> {
    let blocks = LaneBlocks::of(manifest, lane)?;
    let case = case(manifest.manifest(), lane, &blocks, needs, links)?;
    let choice = choose_encode(&case).ok()?;
    let best = choice.best();
    let nodes: Vec<&NodeName> = (0..blocks.blocks())
        .filter_map(|block| blocks.node(block))
        .collect();
    Some(Chosen {
        shape: topology::to_wire(&best.plan.shape),
        reason: format!("{}; {}", best.reason, links.basis(&nodes)),
        seconds: best.estimate.seconds,
    })
}

/// How long a shape is expected to take, by the same figures.
pub(super) fn expected_seconds(
    manifest: &ManifestBytes,
    lane: Lane,
    needs: &StripeDemand,
    links: &Links<'_>,
    shape: Option<&EncodeShape>,
) -> Option<f64> {
    let blocks = LaneBlocks::of(manifest, lane)?;
    let case = case(manifest.manifest(), lane, &blocks, needs, links)?;
    let shape = topology::from_wire(shape, case.data.len())?;
    let estimate = estimate_encode(&case, &shape).ok()?;
    Some(estimate.seconds)
}

fn case(
    manifest: &Manifest,
    lane: Lane,
    blocks: &LaneBlocks,
    needs: &StripeDemand,
    links: &Links<'_>,
) -> Option<EncodeCase> {
    let groups: Vec<Group> = manifest
        .groups
        .iter()
        .map(|group| Group {
            data: group.data.clone(),
            coding: group.coding.clone(),
        })
        .collect();
    let sources: Vec<usize> = (0..blocks.data.len())
        .filter(|block| !blocks.is_zeros(*block))
        .collect();
    let facts = GroupFacts {
        shard_bytes: blocks.length,
        chunk: manifest.chunk,
        dirty: needs.dirty(),
        link_bytes_per_s: links.usual()?,
    };
    if facts.dirty.union_ppm == 0 {
        return None;
    }
    let mut case = EncodeCase::of_group(&groups, lane.group as usize, &sources, &facts).ok()?;
    for (measure, source) in case.data.iter_mut().zip(&sources) {
        *measure = links.measure(blocks.node(*source)?)?;
    }
    if let CodingNodes::Dedicated(coding) = &mut case.coding {
        for (measure, node) in coding.iter_mut().zip(&blocks.coding) {
            *measure = links.measure(node)?;
        }
    }
    Some(case)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_that_moves_is_what_the_members_said() {
        let map = |chunks: &[u64]| {
            let mut map = DirtyMap::clean(10);
            chunks.iter().for_each(|chunk| map.mark(*chunk));
            map
        };
        let mut needs = StripeDemand::default();
        assert_eq!(needs.dirty(), Dirty::FULL);
        needs.add_changed(&map(&[1, 2]));
        needs.add_changed(&map(&[2, 3]));
        let expected = Dirty {
            union_ppm: 300_000,
            own_ppm: 200_000,
        };
        assert_eq!(needs.dirty(), expected);
        // What a keeper has already need not move.
        needs.add_lacking(&map(&[0, 3]));
        needs.add_lacking(&map(&[2]));
        assert_eq!(needs.stripes(), Some(map(&[2, 3])));
    }
}
