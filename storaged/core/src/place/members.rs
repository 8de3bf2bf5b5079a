//! Another list of nodes while the daemon runs. What is committed keeps the groups of its manifest; new checkpoints get
//! the new ones, and home nodes are chosen anew.
//!
//! Nodes hear of a list one after the other, and all home nodes must build the same manifest. So its groups are those of the epoch
//! that the node of the committing rank was in when it described the step; the others wait until they know that epoch. Whoever looks
//! rarely has not been in each: were it told of the newest alone, a step that was described in one between would never commit.

use storaged_plan::{Cordon, Group, Member, groups, homes};
use storaged_wire::NodeName;
use storaged_wire::peer::CheckpointKey;

use crate::api::EpochMembers;
use crate::context::Context;
use crate::limits;

impl Context {
    /// Takes the new list, unless it cannot be grouped: whoever read it has checked that already.
    pub(crate) fn set_members(&mut self, newest: EpochMembers, passed: Vec<EpochMembers>) {
        let EpochMembers { epoch, mut members } = newest;
        self.mishear_cordons(&mut members);
        let Some(groups) = self.groups_of(&members) else {
            return;
        };
        if !members.iter().any(|member| member.name == *self.me()) {
            return;
        }
        if epoch != self.setup.epoch && !planted!("epochs_before_forgotten") {
            let before = std::mem::take(&mut self.groups);
            self.remember_groups(self.setup.epoch, before);
            for one in passed.iter().filter(|_| !planted!("epochs_passed_over")) {
                if let Some(groups) = self.groups_of(&one.members) {
                    self.remember_groups(one.epoch, groups);
                }
            }
        }
        let names = |of: &[Member]| of.iter().map(|it| it.name.clone()).collect::<Vec<_>>();
        let passed_over =
            planted!("cordons_are_no_news") && names(&members) == names(&self.setup.members);
        self.setup.epoch = epoch;
        self.setup.members = members;
        if !planted!("groups_not_made_anew") && !passed_over {
            self.groups = groups;
        }
        self.choose_homes_again();
        self.announce_all();
        self.wake_for_the_left();
    }

    /// None if they cannot be grouped.
    fn groups_of(&self, members: &[Member]) -> Option<Vec<Group>> {
        let geometry = self.setup.geometry;
        geometry.map_or(Some(Vec::new()), |it| groups(members, it).ok())
    }

    fn remember_groups(&mut self, epoch: u64, groups: Vec<Group>) {
        self.earlier_groups.push_back((epoch, groups));
        // The newest is not among them.
        if self.earlier_groups.len() >= limits::EPOCHS_KEPT {
            self.earlier_groups.pop_front();
        }
    }

    /// Planted bugs.
    fn mishear_cordons(&self, members: &mut [Member]) {
        for member in members {
            let stays = planted!("uncordons_not_heard") && self.is_cordoned(&member.name);
            if planted!("cordons_not_heeded") {
                member.cordon = Cordon::Open;
            } else if stays {
                member.cordon = Cordon::Cordoned;
            }
        }
    }

    /// Whether a node is expected to fail.
    pub(crate) fn is_cordoned(&self, node: &NodeName) -> bool {
        let mut members = self.setup.members.iter();
        members.any(|it| it.name == *node && it.cordon == Cordon::Cordoned)
    }

    /// The groups of an epoch; none if this node does not know it, or not any more.
    pub(crate) fn groups_at(&self, epoch: u64) -> Option<&[Group]> {
        let is_coded = self.setup.geometry.is_some();
        if epoch == self.setup.epoch || !is_coded || planted!("groups_of_own_epoch") {
            return Some(&self.groups);
        }
        let mut earlier = self.earlier_groups.iter();
        let found = earlier.find(|(of, _)| *of == epoch);
        found.map(|(_, groups)| groups.as_slice())
    }

    /// The home nodes of a checkpoint among the nodes that there are now.
    pub(crate) fn new_homes(&self, key: &CheckpointKey) -> Vec<NodeName> {
        let count = self.setup.geometry.map_or(1, |geometry| geometry.m() + 1);
        homes(&self.setup.members, key, count)
    }

    /// Of all checkpoints: a home node that is no member any more tells nobody anything. Those that stay tell the new ones.
    fn choose_homes_again(&mut self) {
        if planted!("homes_of_old_epoch") {
            return;
        }
        let (now, me) = (self.now, self.me().clone());
        for key in self.checkpoints.keys().cloned().collect::<Vec<_>>() {
            let homes = self.new_homes(&key);
            let Some(checkpoint) = self.checkpoints.get_mut(&key) else {
                continue;
            };
            let was_home = std::mem::replace(&mut checkpoint.homes, homes).contains(&me);
            // Nobody tells it any more what changes.
            if was_home && !checkpoint.homes.contains(&me) {
                checkpoint.standing.count_no_more();
            }
            if let Some(manifest) = checkpoint.manifest.clone()
                && checkpoint.homes.contains(&me)
                && !was_home
            {
                checkpoint.standing.doubted_since = None;
                checkpoint.standing.begin_to_count(&me, &manifest, now);
                // Nodes that heard of this epoch sooner have said already what they hold, and will not again.
                let heard_of = checkpoint.standing.heard_of();
                for node in heard_of
                    .iter()
                    .filter(|_| !planted!("early_reports_forgotten"))
                {
                    self.recount(&key, node);
                }
            }
        }
        // They may have waited for this epoch.
        let waiting = self.checkpoints.values().filter(|c| c.manifest.is_none());
        let waiting = waiting.filter(|_| !planted!("epoch_not_waited_for"));
        for key in waiting.map(|c| c.key.clone()).collect::<Vec<_>>() {
            self.try_commit(&key);
        }
        // All of them say again which blocks they hold, to home nodes that have not heard of it.
        self.tell_all();
    }
}

#[cfg(test)]
mod tests {
    use storaged_codec::{Digest, digest, root_digest};
    use storaged_wire::local::DurableWish;
    use storaged_wire::peer::{Fence, PeerMessage, SealedShard};
    use storaged_wire::{
        CheckpointState, Enclosure, EnclosuresHeld, Generation, ManifestBytes, Rank, RunId, Step,
        WorldSize,
    };

    use super::*;
    use crate::api::{Input, Now, Output};
    use crate::node::Node;
    use crate::testkit::{chunk, hear, job, last_of, manifest, name, owner, prepared, sent};

    const BEFORE: [&str; 4] = ["a", "b", "c", "z"];
    const AFTER: [&str; 6] = ["a", "aa", "ab", "b", "c", "z"];

    fn members(names: &[&str]) -> Vec<Member> {
        let member = |text: &&str| Member {
            name: name(text),
            failure_domain: (*text).into(),
            cordon: Default::default(),
            seat: None,
        };
        names.iter().map(member).collect()
    }

    fn change(node: &mut Node, epoch: u64, names: &[&str]) -> Vec<PeerMessage> {
        let members = members(names);
        let passed = Vec::new();
        hear_of(node, epoch, members, passed)
    }

    fn hear_of(
        node: &mut Node,
        epoch: u64,
        members: Vec<Member>,
        passed: Vec<EpochMembers>,
    ) -> Vec<PeerMessage> {
        let heard = Input::Members {
            newest: EpochMembers { epoch, members },
            passed,
        };
        let outputs = node.handle(Now(2), heard);
        sent(prepared(node, Now(2), outputs))
    }

    fn key(step: u64) -> CheckpointKey {
        CheckpointKey {
            namespace: job(),
            run: RunId::new(1),
            step: Step::new(step),
        }
    }

    fn is_home(node: &Node, step: u64) -> bool {
        let cx = node.context();
        cx.homes_of(&key(step)).contains(cx.me())
    }

    /// A node of the members before, and a step of which it is a home before and after.
    fn home() -> (Node, u64) {
        let mut later = last_of(&BEFORE, 2, 1);
        change(&mut later, 2, &AFTER);
        let mut node = last_of(&BEFORE, 2, 1);
        let both = |step: &u64| is_home(&node, *step) && is_home(&later, *step);
        let step = (1..).find(both).expect("a step of which it is a home");
        let fence = Fence {
            namespace: job(),
            owner: owner(),
            run: RunId::new(1),
            promised: RunId::new(1),
        };
        hear(&mut node, 0, "a", PeerMessage::Fences(vec![fence]));
        (node, step)
    }

    fn two() -> WorldSize {
        WorldSize::new(2).expect("ranks")
    }

    fn committed(said: Vec<PeerMessage>) -> Option<ManifestBytes> {
        said.into_iter().find_map(|message| match message {
            PeerMessage::Committed { manifest, .. } => ManifestBytes::parse(manifest).ok(),
            _ => None,
        })
    }

    /// Two ranks seal a step, which a node of this epoch has described.
    fn save(node: &mut Node, step: u64, epoch: u64) -> Option<ManifestBytes> {
        save_on(node, ["a", "b"], step, epoch)
    }

    /// The same on these nodes.
    fn save_on(node: &mut Node, nodes: [&str; 2], step: u64, epoch: u64) -> Option<ManifestBytes> {
        let described = PeerMessage::Description {
            key: key(step),
            owner: owner(),
            world_size: two(),
            schema: Enclosure::of(&[]),
            torch_metadata: Enclosure::of(&[]),
            durable: DurableWish::Never,
            epoch,
        };
        let mut said = sent(hear(node, 1, "a", described));
        for (rank, from) in (0..).zip(nodes) {
            let sealed = PeerMessage::ShardsSealed {
                key: key(step),
                owner: owner(),
                world_size: two(),
                shards: vec![SealedShard {
                    rank: Rank::new(rank),
                    length: 5,
                    root: root_digest(&[digest(b"hello")], 5, chunk()),
                }],
                digesting: 0,
            };
            said.extend(sent(hear(node, 1, from, sealed)));
        }
        committed(said)
    }

    /// Two home nodes in different epochs build the same bytes: a step with two manifests could be restored by neither.
    #[test]
    fn a_step_is_coded_by_the_groups_of_the_epoch_that_described_it() {
        let (mut early, step) = home();
        let (mut late, _) = home();
        change(&mut late, 2, &AFTER);
        let (one, other) = (save(&mut early, step, 1), save(&mut late, step, 1));
        let (one, other) = (one.expect("a commit"), other.expect("a commit"));
        assert_eq!(one.bytes(), other.bytes());
        assert_eq!(one.manifest().epoch, 1);
        let (mut newer, step) = home();
        change(&mut newer, 2, &AFTER);
        let newer = save(&mut newer, step, 2).expect("a commit");
        assert_eq!(newer.manifest().epoch, 2);
        assert_ne!(newer.manifest().groups, one.manifest().groups);
    }

    /// A rank has sealed on a node that has no place in the epoch of the description: no group codes its shard, and whoever took the
    /// step for protected would let the one before go.
    #[test]
    fn a_step_with_a_shard_that_no_group_codes_is_not_protected() {
        let (mut node, step) = home();
        change(&mut node, 2, &AFTER);
        for peer in ["aa", "ab"] {
            let generation = Generation::new(1);
            let node_up = Input::PeerUp {
                node: name(peer),
                generation,
            };
            node.handle(Now(2), node_up);
        }
        let manifest = save_on(&mut node, ["a", "aa"], step, 1).expect("a commit");
        assert_eq!(manifest.manifest().epoch, 1);
        for (lane, blocks) in storaged_plan::LaneBlocks::all(&manifest) {
            let shards = blocks
                .data
                .iter()
                .flatten()
                .map(|it| (it.node.clone(), it.rank, None));
            let parity = (0..)
                .zip(&blocks.coding)
                .map(|(i, it)| (it.clone(), Rank::new(0), Some(i)));
            for (from, rank, parity) in shards.chain(parity) {
                let held = PeerMessage::Held {
                    manifest: manifest.name(),
                    version: 1,
                    shards: Vec::from_iter(parity.is_none().then_some(rank)),
                    parity: Vec::from_iter(parity.map(|i| (lane, i))),
                    enclosures: EnclosuresHeld::All,
                };
                hear(&mut node, 2, from.as_str(), held);
            }
        }
        node.handle(Now(1_500), Input::Tick);
        let cx = node.context();
        let checkpoint = &cx.checkpoints[&key(step)];
        let losses = cx.bears(checkpoint).map(|bears| bears.losses);
        assert_eq!(
            (checkpoint.state, losses),
            (CheckpointState::Committed, Some(0))
        );
        assert!(cx.is_stuck(checkpoint), "it gives way to a newer one");
        let why = cx.why_not_yet(&key(step));
        assert!(
            why.contains("aa has shards of it and had no place in epoch 1"),
            "{why}"
        );
    }

    #[test]
    fn a_home_node_waits_until_it_knows_the_epoch_and_commits_then() {
        let (mut node, step) = home();
        assert_eq!(save(&mut node, step, 2), None);
        let why = node.context().why_not_yet(&key(step));
        assert!(why.contains("members of epoch 2"), "{why}");
        let manifest = committed(change(&mut node, 2, &AFTER)).expect("a commit");
        assert_eq!(manifest.manifest().epoch, 2);
    }

    /// Two epochs came between two of its looks, and a node that was in the first has described a step in it.
    #[test]
    fn a_home_node_commits_a_step_of_an_epoch_that_it_has_passed_over() {
        let between = ["a", "aa", "b", "c", "z"];
        let passed = EpochMembers {
            epoch: 2,
            members: members(&between),
        };
        let (mut late, step) = home();
        hear_of(&mut late, 3, members(&AFTER), vec![passed]);
        let late = save(&mut late, step, 2).expect("a commit");
        let (mut early, _) = home();
        change(&mut early, 2, &between);
        let early = save(&mut early, step, 2).expect("a commit");
        assert_eq!(late.bytes(), early.bytes());
        assert_eq!(late.manifest().epoch, 2);
    }

    /// `c` tells of the commit of a step, with shards on `a` and `b` and its own parity; the manifest's name.
    fn told_by_c(node: &mut Node, step: u64) -> Digest {
        let shards = manifest(step, &["a", "b"], &["c"], 5, digest(b"shard"));
        let sealed = shards.seal().expect("a sound manifest");
        let told = PeerMessage::Committed {
            manifest: sealed.bytes().to_vec().into(),
            durable: DurableWish::Policy,
        };
        hear(node, 1, "c", told);
        sealed.name()
    }

    fn all_say_what_they_hold(node: &mut Node, at: u64, manifest: Digest) {
        let parity_of_c = (storaged_wire::peer::Lane { group: 0, index: 0 }, 0);
        for (from, shards, parity) in [
            ("a", vec![Rank::new(0)], vec![]),
            ("b", vec![Rank::new(1)], vec![]),
            ("c", vec![], vec![parity_of_c]),
        ] {
            let held = PeerMessage::Held {
                manifest,
                version: 1,
                shards,
                parity,
                enclosures: EnclosuresHeld::All,
            };
            hear(node, at, from, held);
        }
    }

    /// A node that becomes a home of a step that it knows asks nobody twice: it hears which blocks there are, and counts.
    #[test]
    fn the_homes_of_old_steps_are_members_of_the_newest_epoch() {
        let mut node = last_of(&BEFORE, 2, 1);
        // `c` leaves, a home node, and this one takes its turn.
        let stay = ["a", "b", "z"];
        let follows = |step: &u64| {
            let old = node.context().homes_of(&key(*step));
            let new = homes(&members(&stay), &key(*step), 2);
            old.contains(&name("c")) && !is_home(&node, *step) && new.contains(&name("z"))
        };
        let step = (1..).find(follows).expect("a step");
        let name_of_step = told_by_c(&mut node, step);
        change(&mut node, 2, &stay);
        assert!(!node.context().homes_of(&key(step)).contains(&name("c")));
        assert!(is_home(&node, step));
        all_say_what_they_hold(&mut node, 3, name_of_step);
        let cx = node.context();
        assert_eq!(cx.checkpoints[&key(step)].state, CheckpointState::Protected);
    }

    /// Two that leave have made this node a home; the others heard of that first, and have said what they hold.
    #[test]
    fn what_was_said_before_the_epoch_was_heard_of_counts() {
        let mut node = last_of(&BEFORE, 2, 1);
        let stay = ["a", "b", "z"];
        let follows = |step: &u64| {
            let new = homes(&members(&stay), &key(*step), 2);
            !is_home(&node, *step) && new.contains(&name("z"))
        };
        let step = (1..).find(follows).expect("a step");
        let name_of_step = told_by_c(&mut node, step);
        all_say_what_they_hold(&mut node, 2, name_of_step);
        // What it has heard may not be all of it.
        let state = |node: &Node| node.context().checkpoints[&key(step)].state;
        assert_eq!(state(&node), CheckpointState::Committed, "no home decides");
        change(&mut node, 2, &stay);
        node.handle(Now(1_500), Input::Tick);
        let cx = node.context();
        let bears = cx.bears(&cx.checkpoints[&key(step)]);
        let state = cx.checkpoints[&key(step)].state;
        assert_eq!(
            (state, bears.map(|it| it.losses)),
            (CheckpointState::Protected, Some(1))
        );
    }

    #[test]
    fn a_list_without_this_node_or_that_cannot_be_grouped_changes_nothing() {
        let mut node = last_of(&BEFORE, 2, 1);
        for wrong in [&["a", "b", "c"][..], &["z"]] {
            let members = members(wrong);
            let newest = EpochMembers { epoch: 2, members };
            let passed = Vec::new();
            let heard = Input::Members { newest, passed };
            let said: Vec<Output> = node.handle(Now(2), heard);
            assert!(said.is_empty());
            assert_eq!(node.context().setup.epoch, 1);
        }
    }
}
