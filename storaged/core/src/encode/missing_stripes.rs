//! What the newcomers of a heal lack. Those that came up together lack the same. One that came up later lacks more: then
//! the stripes that all lack are brought back first, for all of them at once, and what is left to the later one in a
//! session of its own, so that no stripe is sent to a node that has it.

use std::collections::BTreeMap;

use storaged_plan::DirtyMap;
use storaged_wire::NodeName;

/// Stripes that are not in place, by newcomer.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct MissingStripes(BTreeMap<NodeName, DirtyMap>);

impl MissingStripes {
    /// Takes in what a newcomer said.
    pub fn add(&mut self, node: NodeName, map: DirtyMap) {
        self.0.insert(node, map);
    }

    /// The stripes that move: those that all lack that lack any. If there are none, those that some lack: what one has
    /// and another lacks is as much as both lack then, and comes to both. None if nobody said anything.
    pub fn stripes(&self) -> Option<DirtyMap> {
        let some = self.0.values().filter(|map| map.count() > 0);
        let shared = some.cloned().reduce(|mut shared, map| {
            shared.keep_only(&map);
            shared
        });
        match shared {
            Some(shared) if shared.count() > 0 => Some(shared),
            _ if self.0.is_empty() => None,
            _ => Some(DirtyMap::union(self.0.values())),
        }
    }

    /// Whether a newcomer has all once these stripes have moved.
    pub fn is_whole_with(&self, node: &NodeName, moved: Option<&DirtyMap>) -> bool {
        let (Some(lacks), Some(moved)) = (self.0.get(node), moved) else {
            return true;
        };
        let mut rest = lacks.clone();
        rest.remove(moved);
        rest.count() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lacking(maps: &[&[u64]]) -> MissingStripes {
        let mut lacking = MissingStripes::default();
        for (node, stripes) in maps.iter().enumerate() {
            let mut map = DirtyMap::clean(10);
            stripes.iter().for_each(|stripe| map.mark(*stripe));
            lacking.add(name(node), map);
        }
        lacking
    }

    fn name(node: usize) -> NodeName {
        NodeName::new(format!("n{node}")).expect("a name")
    }

    fn stripes(lacking: &MissingStripes) -> Vec<u64> {
        lacking
            .stripes()
            .map_or_else(Vec::new, |map| map.runs().into_iter().flatten().collect())
    }

    #[test]
    fn what_all_lack_moves_first() {
        let both = lacking(&[&[6, 7, 8], &[1, 2, 6, 7, 8]]);
        assert_eq!(stripes(&both), [6, 7, 8]);
        let moved = both.stripes();
        assert!(both.is_whole_with(&name(0), moved.as_ref()));
        assert!(!both.is_whole_with(&name(1), moved.as_ref()));
    }

    #[test]
    fn a_newcomer_that_lacks_nothing_keeps_nobody_back() {
        assert_eq!(stripes(&lacking(&[&[], &[1, 2]])), [1, 2]);
        assert_eq!(stripes(&lacking(&[&[], &[]])), []);
        assert!(lacking(&[]).stripes().is_none());
    }

    #[test]
    fn without_any_in_common_all_move() {
        let apart = lacking(&[&[1, 2], &[5]]);
        assert_eq!(stripes(&apart), [1, 2, 5]);
        assert!(apart.is_whole_with(&name(1), apart.stripes().as_ref()));
    }
}
