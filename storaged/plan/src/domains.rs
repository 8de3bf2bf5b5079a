//! Failure domains with levels: `zone/rack` lies in `zone`, and a zone's loss is that of all its racks. The whole name is what the blocks
//! of a stripe keep apart; how many of them lie together in what is named before it is kept low, the outermost first.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::NodeName;
use thiserror::Error;

use super::groups::{Cordon, Group, Member};

/// Between two levels.
const SEPARATOR: char = '/';

/// A failure domain with a level that has no name.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error(
    "expected a failure domain such as rack-7, or zone-a/rack-7 with what it lies in before it, got {0:?}, in which a level is empty"
)]
pub struct DomainError(String);

/// Whether every level of a failure domain has a name: with one from a variable that was not set all nodes would seem to fail together.
///
/// # Errors
/// [`DomainError`] if one has none.
pub fn check_domain(domain: &str) -> Result<(), DomainError> {
    if domain
        .split(SEPARATOR)
        .all(|level| !level.trim().is_empty())
    {
        Ok(())
    } else {
        Err(DomainError(domain.into()))
    }
}

/// Whether a failure domain lies in others.
pub fn has_levels(domain: &str) -> bool {
    domain.contains(SEPARATOR)
}

/// How many levels two failure domains share, from the outermost on.
pub fn levels_shared(one: &str, other: &str) -> usize {
    let pairs = one.split(SEPARATOR).zip(other.split(SEPARATOR));
    pairs.take_while(|(one, other)| one == other).count()
}

/// The domain and all that it lies in, the outermost first.
fn levels(domain: &str) -> impl Iterator<Item = &str> {
    let ends = domain.match_indices(SEPARATOR).map(|(at, _)| at);
    let ends = ends.chain([domain.len()]);
    ends.map(|end| &domain[..end])
}

/// What a domain lies in; empty without levels.
fn outer(domain: &str) -> &str {
    domain.rsplit_once(SEPARATOR).map_or("", |(outer, _)| outer)
}

/// In which domains the blocks of a stripe, or the copies of something, lie.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blocks<'a>(BTreeMap<&'a str, usize>);

/// How many blocks lie in each domain that one lies in, the outermost first: the less the better. Empty without levels.
pub(crate) type Closeness = Vec<usize>;

impl<'a> Blocks<'a> {
    pub fn of(domains: impl IntoIterator<Item = &'a str>) -> Self {
        let mut blocks = Self::default();
        domains.into_iter().for_each(|domain| blocks.add(domain));
        blocks
    }

    pub fn add(&mut self, domain: &'a str) {
        for level in levels(domain) {
            *self.0.entry(level).or_default() += 1;
        }
    }

    /// Those that would be lost with this very domain.
    pub fn lost_with(&self, domain: &str) -> usize {
        self.0.get(domain).copied().unwrap_or(0)
    }

    pub fn closeness(&self, domain: &str) -> Closeness {
        let outer = outer(domain);
        let outer = Some(outer).filter(|outer| !outer.is_empty());
        let all = outer.into_iter().flat_map(levels);
        all.map(|level| self.lost_with(level)).collect()
    }
}

/// A member as coding nodes are chosen: those that code for the fewest groups first, cordoned ones after all others. Of those that are alike
/// the ones with levels in their turn, the others by name.
type Coder<'a> = (Cordon, usize, Turn, &'a NodeName, &'a str);

/// When members with levels come, from the last to the first: the data nodes of the last groups code for the first ones, so that of no zone
/// those alone are left that the last groups cannot take, being their own data nodes.
type Turn = Reverse<usize>;

/// All members by how many groups they code for, those of one outer domain together: to a stripe they are equally close.
#[derive(Debug)]
pub(crate) struct Coders<'a> {
    by_outer: BTreeMap<&'a str, BTreeSet<Coder<'a>>>,
    turns: BTreeMap<&'a NodeName, usize>,
    /// For so many groups each would code if all did alike.
    fair: usize,
}

impl<'a> Coders<'a> {
    /// Members with their loads, in the order of the groups, which need so many in all.
    pub fn new(loads: impl IntoIterator<Item = (&'a Member, usize)>, needed: usize) -> Self {
        let mut coders = Self {
            by_outer: BTreeMap::new(),
            turns: BTreeMap::new(),
            fair: 0,
        };
        let mut open = 0;
        for (turn, (member, load)) in loads.into_iter().enumerate() {
            if has_levels(&member.failure_domain) {
                coders.turns.insert(&member.name, turn);
            }
            coders.insert(member, load);
            open += usize::from(member.cordon == Cordon::Open);
        }
        coders.fair = needed.div_ceil(open.max(1));
        coders
    }

    fn coder(&self, member: &'a Member, load: usize) -> Coder<'a> {
        let turn = self.turns.get(&member.name).copied().unwrap_or(0);
        let domain = member.failure_domain.as_str();
        (member.cordon, load, Reverse(turn), &member.name, domain)
    }

    fn insert(&mut self, member: &'a Member, load: usize) {
        let coder = self.coder(member, load);
        let alike = self.by_outer.entry(outer(&member.failure_domain));
        alike.or_default().insert(coder);
    }

    pub fn change_load(&mut self, member: &'a Member, before: usize, now: usize) {
        let coder = self.coder(member, before);
        if let Some(alike) = self.by_outer.get_mut(outer(&member.failure_domain)) {
            alike.remove(&coder);
        }
        self.insert(member, now);
    }

    /// For how many groups an open member codes, at least; none if all are cordoned.
    pub fn least_load(&self) -> Option<usize> {
        let firsts = self.by_outer.values().filter_map(BTreeSet::first);
        let open = firsts.filter(|(cordon, ..)| *cordon == Cordon::Open);
        open.map(|(_, load, ..)| *load).min()
    }

    /// The best of those whose domain may be taken: an open one, that codes for less than its share, that is the least close to the blocks,
    /// that codes least. Without levels the third says nothing, and the second what the fourth says.
    pub fn best(&self, blocks: &Blocks<'_>, may: impl Fn(&str) -> bool) -> Option<&'a NodeName> {
        let first_of_each = self.by_outer.values().filter_map(|alike| {
            let coder = alike.iter().find(|(.., domain)| may(domain))?;
            let (cordon, load, turn, name, domain) = *coder;
            let closeness = blocks.closeness(domain);
            Some((cordon, load >= self.fair, closeness, load, turn, name))
        });
        first_of_each.min().map(|(.., name)| name)
    }
}

/// Of each level, the outermost first, how many blocks of a stripe the loss of one domain may cost.
pub fn blocks_lost_by_level(members: &[Member], groups: &[Group]) -> Vec<usize> {
    let domains: BTreeMap<&NodeName, &str> = members
        .iter()
        .map(|it| (&it.name, it.failure_domain.as_str()))
        .collect();
    let mut lost: Vec<usize> = Vec::new();
    for group in groups {
        let nodes = group.data.iter().chain(&group.coding);
        let of_group: Vec<&str> = nodes.filter_map(|it| domains.get(it).copied()).collect();
        let blocks = Blocks::of(of_group.iter().copied());
        for domain in of_group {
            for (level, outer) in levels(domain).enumerate() {
                lost.resize(lost.len().max(level + 1), 0);
                lost[level] = lost[level].max(blocks.lost_with(outer));
            }
        }
    }
    lost
}

/// Members such that those that follow one another come from as many domains as there are: of the same outer domain in turn, and from each
/// outer domain as often as it has members.
pub(crate) fn interleaved(members: Vec<&Member>) -> Vec<&Member> {
    interleaved_below(members, 0)
}

fn interleaved_below(mut members: Vec<&Member>, level: usize) -> Vec<&Member> {
    let depth = members
        .iter()
        .map(|it| levels(&it.failure_domain).count())
        .max();
    let depth = depth.unwrap_or(0);
    if level >= depth {
        members.sort_by_key(|it| &it.name);
        return members;
    }
    let mut parts: BTreeMap<&str, Vec<&Member>> = BTreeMap::new();
    for member in members {
        let domain = member.failure_domain.as_str();
        let part = levels(domain).nth(level).unwrap_or(domain);
        parts.entry(part).or_default().push(member);
    }
    let parts = parts.into_values();
    let mut parts: Vec<Vec<&Member>> = parts.map(|it| interleaved_below(it, level + 1)).collect();
    parts.sort_by_key(|it| it.iter().map(|member| &member.name).min());
    if level + 1 == depth {
        in_turn(parts)
    } else {
        evenly(parts)
    }
}

/// One of each part in turn, as long as it has some.
fn in_turn(parts: Vec<Vec<&Member>>) -> Vec<&Member> {
    let all = parts.iter().map(Vec::len).sum();
    let mut queues: Vec<_> = parts.into_iter().map(Vec::into_iter).collect();
    let mut ordered = Vec::with_capacity(all);
    while ordered.len() < all {
        ordered.extend(queues.iter_mut().filter_map(Iterator::next));
    }
    ordered
}

/// Every part over the whole length, so that the largest is not alone at the end. Parts of one length come in turn.
fn evenly(parts: Vec<Vec<&Member>>) -> Vec<&Member> {
    let mut of_length: BTreeMap<usize, u64> = BTreeMap::new();
    for part in &parts {
        *of_length.entry(part.len()).or_default() += 1;
    }
    let mut seen: BTreeMap<usize, u64> = BTreeMap::new();
    let mut placed = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        let (count, length) = (of_length[&part.len()], part.len() as u64);
        let turn = seen.entry(part.len()).or_default();
        for (at, member) in (0..).zip(part) {
            // Each part is 2^32 long in all, and parts of one length are shifted against one another by less than a member's share.
            let shifted = 2 * count * at + 2 * *turn + 1;
            let place = (shifted << 32) / (2 * count * length);
            placed.push((place, number, *member));
        }
        *turn += 1;
    }
    placed.sort_by_key(|(place, number, _)| (*place, *number));
    placed.into_iter().map(|(.., member)| member).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_lies_in_those_that_its_name_begins_with() {
        assert_eq!(levels("z/r/p").collect::<Vec<_>>(), ["z", "z/r", "z/r/p"]);
        assert_eq!(levels("rack").collect::<Vec<_>>(), ["rack"]);
        assert_eq!((outer("z/r/p"), outer("rack")), ("z/r", ""));
        for (one, other, shared) in [("z/r", "z/r", 2), ("z/r", "z/q", 1), ("z1", "z", 0)] {
            assert_eq!(levels_shared(one, other), shared);
        }
    }

    #[test]
    fn a_level_without_a_name_is_refused() {
        for wrong in ["", "/", "z/", "/r", "z//r", "z/ /r", " "] {
            let error = check_domain(wrong).unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong:?}")), "{error}");
        }
        assert_eq!(check_domain("zone a/rack-7"), Ok(()));
    }

    #[test]
    fn closeness_counts_blocks_by_level_from_outside() {
        let blocks = Blocks::of(["z1/r1/p1", "z1/r2/p1", "z2/r1/p1"]);
        assert_eq!(blocks.closeness("z3/r1/p1"), [0, 0]);
        assert_eq!(blocks.closeness("z10/r1/p1"), [0, 0]);
        assert_eq!(blocks.closeness("z1/r1/p2"), [2, 1]);
        assert_eq!(blocks.closeness("rack"), [0; 0]);
        assert_eq!(blocks.lost_with("z1/r1/p1"), 1);
        assert_eq!(blocks.lost_with("z1"), 2, "what lies in it is lost with it");
    }
}
