//! Home nodes: where a checkpoint's commit is decided and its manifest is sure to be found. Rendezvous hashing
//! (Thaler and Ravishankar, 1998) over the configured members, one per failure domain as far as there are domains.

use std::collections::BTreeSet;

use storaged_wire::peer::CheckpointKey;
use storaged_wire::{Digest, NodeName, encode};

use super::groups::Member;

/// The `count` home nodes of a checkpoint, best first.
pub fn homes(members: &[Member], key: &CheckpointKey, count: usize) -> Vec<NodeName> {
    let mut scored: Vec<(Digest, &Member)> = members
        .iter()
        .map(|member| (score(key, &member.name), member))
        .collect();
    scored.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
    let mut domains = BTreeSet::new();
    let (first, rest): (Vec<_>, Vec<_>) = scored
        .into_iter()
        .partition(|(_, member)| domains.insert(&member.failure_domain));
    first
        .into_iter()
        .chain(rest)
        .take(count)
        .map(|(_, member)| member.name.clone())
        .collect()
}

fn score(key: &CheckpointKey, node: &NodeName) -> Digest {
    storaged_codec::digest(&encode(&(key, node)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use storaged_wire::{Namespace, RunId, Step};

    fn key(step: u64) -> CheckpointKey {
        CheckpointKey {
            namespace: Namespace::new("job").unwrap(),
            run: RunId::new(1),
            step: Step::new(step),
        }
    }

    fn members(count: usize, racks: usize) -> Vec<Member> {
        (0..count)
            .map(|i| Member {
                name: NodeName::new(format!("n{i}")).unwrap(),
                failure_domain: format!("rack{}", i % racks),
                cordon: Default::default(),
                seat: None,
            })
            .collect()
    }

    #[test]
    fn homes_lie_in_different_domains_where_there_are_enough() {
        let members = members(12, 4);
        for step in 0..50 {
            let found = homes(&members, &key(step), 3);
            let domains: BTreeSet<_> = found
                .iter()
                .map(|name| {
                    &members
                        .iter()
                        .find(|m| m.name == *name)
                        .unwrap()
                        .failure_domain
                })
                .collect();
            assert_eq!(domains.len(), 3);
        }
    }

    #[test]
    fn losing_another_node_moves_no_home() {
        let all = members(8, 8);
        let before = homes(&all, &key(1), 2);
        let kept: Vec<Member> = all
            .into_iter()
            .filter(|member| member.name.as_str() == "n0" || before.contains(&member.name))
            .collect();
        assert_eq!(homes(&kept, &key(1), 2), before);
    }
}
