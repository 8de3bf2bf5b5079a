//! Failure domains with levels: `zone/rack` lies in `zone`, and a zone's loss is that of all its racks. The whole name is what the blocks
//! of a stripe keep apart; how many of them lie together in what is named before it is kept low, the outermost first.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::NodeName;
use thiserror::Error;

use super::groups::{Cordon, Group, Member};

/// Between two levels.
const SEPARATOR: char = '/';

/// Deeper levels are part of the last one: no domain costs more to look at than this.
const LEVELS_MAX: usize = 8;
/// Bytes of a failure domain.
const BYTES_MAX: usize = 255;

/// What is no failure domain.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error(
    "expected a failure domain such as rack-7, or zone-a/rack-7 with what it lies in before it (at most {LEVELS_MAX} levels and {BYTES_MAX} bytes), got {got:?}: {wrong}"
)]
pub struct DomainError {
    got: String,
    wrong: &'static str,
}

/// Whether all nodes would take a failure domain for what is meant: with a level from a variable that was not set all of them would seem to fail
/// together, and with a space behind its name a rack would be another one.
///
/// # Errors
/// [`DomainError`] if not.
pub fn check_domain(domain: &str) -> Result<(), DomainError> {
    let levels = || domain.split(SEPARATOR);
    let strange = |letter: char| letter.is_control() || ",[]".contains(letter);
    let wrong = if domain.len() > BYTES_MAX || levels().count() > LEVELS_MAX {
        "it is too long"
    } else if levels().any(str::is_empty) {
        "a level is empty"
    } else if levels().any(|level| level.trim() != level) {
        "a level begins or ends with a space"
    } else if domain.contains("$(") || domain.contains("${") {
        "a variable in it was not replaced"
    } else if domain.contains(strange) {
        "commas, brackets and control characters are those of host lists and of mistakes"
    } else {
        return Ok(());
    };
    let got = domain.chars().take(BYTES_MAX).collect();
    Err(DomainError { got, wrong })
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
    let ends = ends.take(LEVELS_MAX - 1).chain([domain.len()]);
    ends.map(|end| &domain[..end])
}

/// All that a domain lies in, the outermost first; nothing without levels.
fn above(domain: &str) -> impl Iterator<Item = &str> {
    levels(domain).take_while(move |level| level.len() < domain.len())
}

/// What a domain lies in directly; empty without levels.
fn outer(domain: &str) -> &str {
    above(domain).last().unwrap_or("")
}

/// In which domains the blocks of a stripe, or the copies of something, lie.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blocks<'a> {
    /// How many lie in each domain, at whatever level.
    within: BTreeMap<&'a str, usize>,
    /// Those of which this is the whole domain.
    whole: BTreeMap<&'a str, usize>,
}

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
            *self.within.entry(level).or_default() += 1;
        }
        *self.whole.entry(domain).or_default() += 1;
    }

    fn within(&self, domain: &str) -> usize {
        self.within.get(domain).copied().unwrap_or(0)
    }

    /// Those that are lost with this very domain, or that it is lost with: where one node names a zone alone and another one a rack in it,
    /// neither lies apart from the other.
    pub fn lost_with(&self, domain: &str) -> usize {
        let outside = above(domain).filter_map(|level| self.whole.get(level));
        self.within(domain) + outside.sum::<usize>()
    }

    pub fn closeness(&self, domain: &str) -> Closeness {
        above(domain).map(|level| self.within(level)).collect()
    }
}

/// A member as coding nodes are chosen: those that code for the fewest groups first, cordoned ones after all others. Of those that are alike
/// the ones with levels in their turn, the others by name.
type Coder<'a> = (Cordon, usize, Turn, &'a NodeName, &'a str);

/// When members with levels come, from the last to the first: the data nodes of the last groups code for the first ones, so that of no zone
/// those alone are left that the last groups cannot take, being their own data nodes.
type Turn = Reverse<usize>;

/// For how many groups a member codes, and when its turn is.
#[derive(Debug)]
struct Load<'a> {
    member: &'a Member,
    groups: usize,
    turn: Turn,
}

impl<'a> Load<'a> {
    fn coder(&self) -> Coder<'a> {
        let Member { name, cordon, .. } = self.member;
        let domain = self.member.failure_domain.as_str();
        (*cordon, self.groups, self.turn, name, domain)
    }
}

/// All members by how many groups they code for, as a tree of the domains that others lie in: to a stripe all members below a domain in
/// which it has no block are equally close, so that of these the first alone is looked at.
#[derive(Debug)]
pub(crate) struct Coders<'a> {
    /// By outer domain, the outermost one being empty: the members that lie directly in it, and the first of each domain in it.
    below: BTreeMap<&'a str, BTreeSet<Coder<'a>>>,
    loads: BTreeMap<&'a NodeName, Load<'a>>,
    /// For so many groups each would code if all did alike.
    fair: usize,
}

impl<'a> Coders<'a> {
    /// Members in the order of the groups, which need so many coding nodes in all. None of them codes yet.
    pub fn new(members: &[&'a Member], needed: usize) -> Self {
        let open = members.iter().filter(|it| it.cordon == Cordon::Open);
        let mut coders = Self {
            below: BTreeMap::new(),
            loads: BTreeMap::new(),
            fair: needed.div_ceil(open.count().max(1)),
        };
        for (turn, member) in members.iter().enumerate() {
            let domain = member.failure_domain.as_str();
            let load = Load {
                member,
                groups: 0,
                turn: Reverse(if has_levels(domain) { turn } else { 0 }),
            };
            coders.replace(outer(domain), None, Some(load.coder()));
            coders.loads.insert(&member.name, load);
        }
        coders
    }

    /// For how many groups a member codes.
    pub fn load(&self, member: &Member) -> usize {
        self.loads.get(&member.name).map_or(0, |load| load.groups)
    }

    /// It codes for one group more.
    pub fn take_on(&mut self, member: &Member) {
        self.change(member, |groups| groups + 1);
    }

    /// It codes for one group less.
    pub fn let_go(&mut self, member: &Member) {
        self.change(member, |groups| groups - 1);
    }

    fn change(&mut self, member: &Member, of: impl Fn(usize) -> usize) {
        if let Some(load) = self.loads.get_mut(&member.name) {
            let before = load.coder();
            load.groups = of(load.groups);
            let now = load.coder();
            self.replace(outer(before.4), Some(before), Some(now));
        }
    }

    /// In this domain, and in all that it lies in as far as the first of it is another one then.
    fn replace(&mut self, domain: &'a str, old: Option<Coder<'a>>, new: Option<Coder<'a>>) {
        let all = self.below.entry(domain).or_default();
        let first = all.first().copied();
        if let Some(old) = old {
            all.remove(&old);
        }
        all.extend(new);
        let now = all.first().copied();
        if !domain.is_empty() && first != now {
            self.replace(outer(domain), first, now);
        }
    }

    /// For how many groups an open member codes, at least; none if all are cordoned.
    pub fn least_load(&self) -> Option<usize> {
        let (cordon, load, ..) = self.below.get("")?.first()?;
        (*cordon == Cordon::Open).then_some(*load)
    }

    /// The best of those whose domain no block is lost with: an open one, that codes for less than its share, that is the least close to the
    /// blocks, that codes least. Without levels the third says nothing, and the second what the fourth says.
    pub fn best(&self, blocks: &Blocks<'_>) -> Option<&'a Member> {
        let touched = blocks.within.keys().copied().chain([""]);
        let first_of_each = touched.filter_map(|domain| {
            let mut all = self.below.get(domain)?.iter();
            let coder = all.find(|(.., of)| {
                let is_below = child(domain, of).is_none_or(|child| blocks.within(child) == 0);
                is_below && blocks.lost_with(of) == 0
            })?;
            let (cordon, load, turn, name, of) = *coder;
            let is_beyond = load >= self.fair;
            Some((cordon, is_beyond, blocks.closeness(of), load, turn, name))
        });
        let (.., name) = first_of_each.min()?;
        self.loads.get(name).map(|load| load.member)
    }
}

/// The domain directly in this outer one that another lies in; none of one that is directly in it itself.
fn child<'d>(outer: &str, domain: &'d str) -> Option<&'d str> {
    above(domain).find(|level| level.len() > outer.len())
}

/// What the loss of one failure domain of a level costs at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LostWithOne {
    /// Blocks of a stripe.
    pub blocks: usize,
    /// Nodes.
    pub nodes: usize,
}

/// The same of each level, the outermost first; nothing without groups.
pub fn lost_by_level(members: &[Member], groups: &[Group]) -> Vec<LostWithOne> {
    let mut lost: Vec<LostWithOne> = Vec::new();
    let domains: BTreeMap<&NodeName, &str> = members
        .iter()
        .map(|it| (&it.name, it.failure_domain.as_str()))
        .collect();
    let all = Blocks::of(domains.values().copied());
    for group in groups {
        let nodes = group.data.iter().chain(&group.coding);
        let of_group: Vec<&str> = nodes.filter_map(|it| domains.get(it).copied()).collect();
        let blocks = Blocks::of(of_group.iter().copied());
        for domain in of_group {
            for (level, outer) in levels(domain).enumerate() {
                lost.resize(lost.len().max(level + 1), LostWithOne::default());
                let most = &mut lost[level];
                most.blocks = most.blocks.max(blocks.within(outer));
                most.nodes = most.nodes.max(all.within(outer));
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
    fn what_nodes_could_take_for_different_domains_is_refused() {
        let deep = ["x"; LEVELS_MAX + 1].join("/");
        let long = "r".repeat(BYTES_MAX + 1);
        for wrong in [
            "",
            "/",
            "z/",
            "/r",
            "z//r",
            "z/ /r",
            " ",
            "z1 /r2",
            "rack-1 ",
            "z1/r1\n",
            "$(ZONE)/n1",
            "${ZONE}",
            "r1,r2",
            "r[1-2]",
            &deep,
            &long,
        ] {
            let error = check_domain(wrong).unwrap_err().to_string();
            let shown: String = wrong.chars().take(BYTES_MAX).collect();
            assert!(error.contains(&format!("{shown:?}")), "{error}");
        }
        assert_eq!(check_domain("zone a/rack-7"), Ok(()));
        // A roster may say it all the same.
        assert_eq!(levels(&"x/".repeat(100_000)).count(), LEVELS_MAX);
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
        assert_eq!(
            blocks.lost_with("z1/r1/p1/b"),
            1,
            "and it with what it lies in"
        );
    }
}
