//! Home nodes: where a checkpoint's commit is decided and its manifest is sure to be found. Rendezvous hashing
//! (Thaler and Ravishankar, 1998) over the configured members, one per failure domain as far as there are domains, and these apart as well
//! as far as they have levels.

use storaged_wire::peer::CheckpointKey;
use storaged_wire::{Digest, NodeName, encode};

use super::domains::{Blocks, Closeness};
use super::groups::Member;

/// The `count` home nodes of a checkpoint, best first.
pub fn homes(members: &[Member], key: &CheckpointKey, count: usize) -> Vec<NodeName> {
    let mut scored: Vec<(Digest, &Member)> = members
        .iter()
        .map(|member| (score(key, &member.name), member))
        .collect();
    scored.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
    let mut copies = Blocks::default();
    let mut homes = Vec::with_capacity(count);
    while homes.len() < count && !scored.is_empty() {
        let best = least_close(&scored, &copies);
        let (_, member) = scored.remove(best);
        copies.add(&member.failure_domain);
        homes.push(member.name.clone());
    }
    homes
}

/// The first whose failure domain has no copy, and of these the one that shares what that lies in with the fewest; else the first.
fn least_close(scored: &[(Digest, &Member)], copies: &Blocks<'_>) -> usize {
    let mut best: Option<(bool, Closeness, usize)> = None;
    for (at, (_, member)) in scored.iter().enumerate() {
        let domain = member.failure_domain.as_str();
        let is_taken = copies.lost_with(domain) > 0;
        let closeness = if is_taken {
            Closeness::new()
        } else {
            copies.closeness(domain)
        };
        let is_apart = !is_taken && closeness.iter().all(|blocks| *blocks == 0);
        let key = (is_taken, closeness, at);
        best = best.into_iter().chain([key]).min();
        if is_apart {
            break;
        }
    }
    best.map_or(0, |(.., at)| at)
}

fn score(key: &CheckpointKey, node: &NodeName) -> Digest {
    storaged_codec::digest(&encode(&(key, node)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
