//! Steps of a namespace that a home node knows only from those who hold parts of them.

use std::collections::BTreeMap;

use storaged_wire::peer::HighMark;
use storaged_wire::{Digest, NodeName};

use crate::limits;

/// Manifests that nodes have told of which decide nothing of them: by node and step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Vouched(BTreeMap<NodeName, BTreeMap<HighMark, Digest>>);

impl Vouched {
    /// How many nodes have told of the same manifest, with this one. One alone may say anything, and of each as many are remembered as it
    /// can hold, so that it does not displace what others say.
    pub fn hears(&mut self, from: &NodeName, at: HighMark, manifest: Digest) -> usize {
        let told = self.0.entry(from.clone()).or_default();
        told.insert(at, manifest);
        while told.len() > limits::VOUCHED_PER_PEER_MAX {
            told.pop_first();
        }
        let all = self.0.values();
        all.filter(|it| it.get(&at) == Some(&manifest)).count()
    }

    /// What it has said counts no more.
    pub fn forget_teller(&mut self, node: &NodeName) {
        self.0.remove(node);
    }

    /// The step is known now.
    pub fn forget(&mut self, at: HighMark) {
        self.0.retain(|_, it| {
            it.remove(&at);
            !it.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;

    use super::*;
    use crate::testkit::{at, name};

    #[test]
    fn they_count_who_name_the_same_manifest() {
        let (one, other) = (digest(b"one"), digest(b"other"));
        let mut vouched = Vouched::default();
        assert_eq!(vouched.hears(&name("a"), at(1), one), 1);
        assert_eq!(vouched.hears(&name("a"), at(1), one), 1, "said twice");
        assert_eq!(vouched.hears(&name("b"), at(1), other), 1);
        assert_eq!(vouched.hears(&name("b"), at(2), one), 1, "another step");
        assert_eq!(vouched.hears(&name("c"), at(1), one), 2);
        vouched.forget(at(1));
        assert_eq!(vouched.hears(&name("a"), at(1), one), 1);
    }

    #[test]
    fn whoever_tells_of_much_displaces_nobody() {
        let mut vouched = Vouched::default();
        vouched.hears(&name("a"), at(1), digest(b"one"));
        for step in 2..1_000 {
            vouched.hears(&name("b"), at(step), digest(b"any"));
        }
        assert_eq!(vouched.0[&name("b")].len(), limits::VOUCHED_PER_PEER_MAX);
        assert_eq!(vouched.hears(&name("c"), at(1), digest(b"one")), 2);
    }
}
