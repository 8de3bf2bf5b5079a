//! What nodes of one cluster must have in common, compared when they link up: two that code differently, or take others
//! for members, would only find out by sessions that fail.

use minicbor::{Decode, Encode};
use storaged_core::RunAuthority;
use storaged_plan::{Member, has_levels};
use storaged_wire::{ChunkSize, Digest, Geometry, NodeName, encode};

/// The key of which nodes that differ cannot read each other's copies.
const ENCRYPTION: &str = "trickle.encryption";
/// Longer values travel shortened, with a digest: a hello is at most 4096 bytes.
const VALUE_BYTES_MAX: usize = 600;

/// One value that must be equal.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
struct AgreedValue {
    #[n(0)]
    key: String,
    #[n(1)]
    value: String,
}

/// All of them, and their digest.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Agreement {
    #[n(0)]
    digest: Digest,
    #[n(1)]
    values: Vec<AgreedValue>,
    /// What should be equal, and is changed node by node: links come up all the same. A peer of an older release does not say it.
    #[n(2)]
    advised: Option<Vec<AgreedValue>>,
}

/// A configuration key of which two nodes have different values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// As in the configuration file.
    pub key: String,
    /// The value here.
    pub here: String,
    /// The value there.
    pub there: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { key, here, there } = self;
        write!(f, "{key} is {here} here and {there} there")
    }
}

impl Agreement {
    /// Of a node's configuration.
    pub fn of(geometry: Option<Geometry>, chunk: ChunkSize, members: &[Member]) -> Self {
        let mut members: Vec<&Member> = members.iter().collect();
        members.sort();
        let joined = |one: &dyn Fn(&&Member) -> String| {
            let all: Vec<String> = members.iter().map(one).collect();
            all.join(" ")
        };
        let mut domains = joined(&|member| format!("{}={}", member.name, member.failure_domain));
        // A release that knows no levels makes other groups of the same names.
        if members.iter().any(|it| has_levels(&it.failure_domain)) {
            domains.push_str(" (levels heeded)");
        }
        let names = joined(&|member| member.name.to_string());
        let whole = [("peers.name", names), ("failure_domain", domains)];
        Self::whole(coding_values(geometry, chunk).into_iter().chain(whole))
    }

    /// Of a node whose peers are in a registry, which settles who they are: only the cluster must be the same.
    pub fn of_cluster(
        geometry: Option<Geometry>,
        chunk: ChunkSize,
        cluster: String,
        runs: RunAuthority,
    ) -> Self {
        let whole = [("membership.registry", cluster)];
        // Peers of an older release do not say it, so it is said only where it is not what they could do as well.
        let runs = match runs {
            RunAuthority::Registry => None,
            RunAuthority::Members => Some(("membership.runs", "members".to_owned())),
        };
        let whole = whole.into_iter().chain(runs);
        Self::whole(coding_values(geometry, chunk).into_iter().chain(whole))
    }

    fn whole(values: impl Iterator<Item = (&'static str, String)>) -> Self {
        let value = |(key, value): (&str, String)| AgreedValue {
            key: key.into(),
            value,
        };
        let whole: Vec<AgreedValue> = values.map(value).collect();
        Self {
            digest: storaged_codec::digest(&encode(&whole)),
            values: whole.into_iter().map(shortened).collect(),
            advised: None,
        }
    }

    /// With what should be equal: so many steps a node keeps, and what encrypts the durable tier.
    #[must_use]
    pub fn advising(self, keep_steps: usize, encryption: Option<String>) -> Self {
        let steps = Some(("memory.keep_steps", keep_steps.to_string()));
        // Peers of an older release do not say it, so it is said only where it is not what they do as well.
        let encryption = encryption.map(|key| (ENCRYPTION, key));
        let values = steps.into_iter().chain(encryption);
        let values = values.map(|(key, value)| AgreedValue {
            key: key.into(),
            value,
        });
        Self {
            advised: Some(values.collect()),
            ..self
        }
    }

    /// What differs between this node and a peer that it is linked to, and should not.
    pub fn advice(&self, there: &Self) -> Vec<Difference> {
        let both = self.advised.as_ref().zip(there.advised.as_ref());
        both.map_or_else(Vec::new, |(here, there)| differing(here, there))
    }

    /// What differs between this node and a peer, by key.
    pub fn differences(&self, there: &Self) -> Vec<Difference> {
        if self.digest == there.digest {
            return Vec::new();
        }
        differing(&self.values, &there.values)
    }
}

fn differing(here: &[AgreedValue], there: &[AgreedValue]) -> Vec<Difference> {
    let other = |key: &str| {
        let found = there.iter().find(|value| value.key == key);
        found.map_or("not said", |value| &value.value)
    };
    here.iter()
        .filter(|ours| other(&ours.key) != ours.value)
        .map(|ours| Difference {
            key: ours.key.clone(),
            here: ours.value.clone(),
            there: other(&ours.key).into(),
        })
        .collect()
}

fn coding_values(geometry: Option<Geometry>, chunk: ChunkSize) -> [(&'static str, String); 3] {
    let number = |count: fn(&Geometry) -> usize| match &geometry {
        Some(geometry) => count(geometry).to_string(),
        None => "not set".into(),
    };
    [
        ("coding.k", number(Geometry::k)),
        ("coding.m", number(Geometry::m)),
        ("coding.chunk", format!("{}KiB", chunk.bytes() / 1024)),
    ]
}

/// Differences in one line.
pub fn told(peer: &NodeName, differences: &[Difference]) -> String {
    let all: Vec<String> = differences.iter().map(ToString::to_string).collect();
    format!(
        "{peer} is configured differently: {}; give both the same and reload or restart the one that is wrong",
        all.join("; ")
    )
}

/// Differences of nodes that are linked, in one line.
pub fn advised(peer: &NodeName, differences: &[Difference]) -> String {
    let all: Vec<String> = differences.iter().map(ToString::to_string).collect();
    let of_tier = |it: &Difference| it.key == ENCRYPTION;
    let mut until = Vec::new();
    if differences.iter().any(of_tier) {
        until
            .push("one of the two may be unable to read what the other copies to the durable tier");
    }
    if !differences.iter().all(of_tier) {
        until.push("steps that one of the two has let go are still said to bear losses");
    }
    format!(
        "{peer} is configured differently: {}; until both are the same, {}",
        all.join("; "),
        until.join(", and ")
    )
}

fn shortened(whole: AgreedValue) -> AgreedValue {
    if whole.value.len() <= VALUE_BYTES_MAX {
        return whole;
    }
    let shown = whole.value.floor_char_boundary(VALUE_BYTES_MAX / 2);
    let count = whole.value.split(' ').count();
    let digest = storaged_codec::digest(whole.value.as_bytes()).to_string();
    AgreedValue {
        value: format!(
            "{}... ({count} in all, digest {:.16})",
            &whole.value[..shown],
            digest
        ),
        ..whole
    }
}

/// Protocol versions that a node speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionRange {
    /// The lowest.
    pub min: u16,
    /// The highest.
    pub max: u16,
}

impl VersionRange {
    /// The highest that both speak.
    pub fn common(self, other: Self) -> Option<u16> {
        let highest = self.max.min(other.max);
        (highest >= self.min.max(other.min)).then_some(highest)
    }
}

impl std::fmt::Display for VersionRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} to {}", self.min, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(names: &[&str]) -> Vec<Member> {
        let member = |name: &&str| Member {
            name: NodeName::new(*name).unwrap(),
            failure_domain: (*name).into(),
            cordon: Default::default(),
            seat: None,
        };
        names.iter().map(member).collect()
    }

    fn agreement(k: usize, m: usize, chunk: u32, names: &[&str]) -> Agreement {
        let geometry = Geometry::new(k, m).unwrap();
        Agreement::of(
            Some(geometry),
            ChunkSize::new(chunk).unwrap(),
            &members(names),
        )
    }

    #[test]
    fn every_key_that_differs_is_named_with_both_values() {
        let here = agreement(2, 1, 1 << 16, &["a", "b", "c"]);
        assert!(
            here.differences(&agreement(2, 1, 1 << 16, &["c", "b", "a"]))
                .is_empty()
        );
        let there = agreement(3, 2, 1 << 18, &["a", "b", "d"]);
        let found = here.differences(&there);
        let keys: Vec<&str> = found.iter().map(|one| one.key.as_str()).collect();
        let all = [
            "coding.k",
            "coding.m",
            "coding.chunk",
            "peers.name",
            "failure_domain",
        ];
        assert_eq!(keys, all);
        let text = told(&NodeName::new("n7").unwrap(), &found);
        for part in [
            "n7",
            "coding.m is 1 here and 2 there",
            "64KiB here and 256KiB there",
            "a b c",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn what_should_be_equal_is_told_and_parts_nobody() {
        let of = |keep_steps| agreement(2, 1, 1 << 16, &["a", "b", "c"]).advising(keep_steps, None);
        assert_eq!(of(1).differences(&of(2)), []);
        assert_eq!(of(2).advice(&of(2)), []);
        let older = agreement(2, 1, 1 << 16, &["a", "b", "c"]);
        assert_eq!(of(2).advice(&older), []);
        assert_eq!(older.advice(&of(2)), []);
        let text = advised(&NodeName::new("n7").unwrap(), &of(2).advice(&of(1)));
        assert!(
            text.contains("memory.keep_steps is 2 here and 1 there"),
            "{text}"
        );
        let bytes = encode(&of(2));
        assert_eq!(
            storaged_wire::decode::<Agreement>("agreement", &bytes).unwrap(),
            of(2)
        );
    }

    #[test]
    fn another_key_of_the_durable_tier_is_told_and_parts_nobody() {
        let of = |key: Option<&str>| {
            agreement(2, 1, 1 << 16, &["a", "b", "c"]).advising(1, key.map(Into::into))
        };
        assert_eq!(of(Some("key 1")).differences(&of(None)), []);
        assert_eq!(of(Some("key 1")).advice(&of(Some("key 1"))), []);
        for there in [None, Some("key 2")] {
            let text = advised(
                &NodeName::new("n7").unwrap(),
                &of(Some("key 1")).advice(&of(there)),
            );
            assert!(text.contains("trickle.encryption is key 1 here"), "{text}");
            assert!(text.contains("unable to read"), "{text}");
            assert!(!text.contains("bear losses"), "{text}");
        }
    }

    #[test]
    fn nodes_that_open_runs_in_two_ways_do_not_link() {
        let of = |runs| {
            let chunk = ChunkSize::new(1 << 16).unwrap();
            Agreement::of_cluster(None, chunk, "c".into(), runs)
        };
        let [by_registry, by_members] = [RunAuthority::Registry, RunAuthority::Members].map(of);
        assert_eq!(by_members.differences(&by_members), []);
        let keys: Vec<String> = (by_members.differences(&by_registry).into_iter())
            .map(|it| it.key)
            .collect();
        assert_eq!(keys, ["membership.runs"], "the one of the two refuses");
    }

    #[test]
    fn a_thousand_members_fit_a_hello_and_differ_by_one() {
        let names: Vec<String> = (0..1000)
            .map(|n| format!("a-rather-long-name-{n:04}"))
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (all, fewer) = (
            agreement(8, 2, 1 << 18, &names),
            agreement(8, 2, 1 << 18, &names[..999]),
        );
        assert!(encode(&all).len() < 3000);
        assert_eq!(all.differences(&fewer).len(), 2);
    }

    #[test]
    fn the_highest_common_version_is_spoken() {
        let range = |min, max| VersionRange { min, max };
        assert_eq!(range(4, 5).common(range(3, 4)), Some(4));
        assert_eq!(range(4, 5).common(range(4, 6)), Some(5));
        assert_eq!(range(5, 6).common(range(3, 4)), None);
        assert_eq!(range(3, 4).common(range(5, 6)), None);
    }
}
