//! Inputs to begin with: short stories in which everything that nodes do for honest jobs happens at least once.

use super::moves::{Kind, move_bytes};
use super::shape::{SHAPE_BYTES, Shape};
use crate::Inputs;

/// A story: a cluster and what happens in it.
struct Story {
    name: String,
    bytes: Vec<u8>,
}

impl Story {
    fn of(name: &str, shape: [u8; SHAPE_BYTES]) -> Self {
        Self {
            name: name.into(),
            bytes: Shape::of(shape).bytes().to_vec(),
        }
    }

    fn then(mut self, kind: Kind, who: u8, twist: [u8; 4]) -> Self {
        self.bytes.extend(move_bytes(kind, who, twist));
        self
    }

    /// `PASSES_MS` has how long.
    fn pass(self, which: u8) -> Self {
        self.then(Kind::Pass, which, [0; 4])
    }

    /// Steps that are protected one after the other.
    fn saves(self, steps: u8, wish: u8) -> Self {
        (0..steps).fold(self, |story, _| {
            let saved = story.then(Kind::Save, 0, [0, 0, wish, 0]);
            saved.pass(5).pass(4)
        })
    }

    fn plans_and_opens(self, node: u8) -> Self {
        let planned = self.then(Kind::Plan, node, [0, 0, 0, 9]).pass(4);
        (0..6).fold(planned, |story, rank| {
            story.then(Kind::OpenPlanned, node, [rank, 0, 0, 0]).pass(4)
        })
    }
}

/// Nodes, geometry, tier, budget, scrub and messages, tenants and rates, length, pacing.
const SHAPES: [[u8; SHAPE_BYTES]; 12] = [
    [0, 0, 0, 0, 0, 0, 0, 0],
    [3, 1, 1, 0, 1, 0, 1, 2],
    [3, 1, 0x11, 0x40, 0x81, 1, 1, 2],
    [1, 2, 2, 1, 0x81, 0, 0, 1],
    [2, 0, 0x41, 0xC0, 1, 2, 4, 2],
    [0x83, 1, 3, 0, 0x80, 2, 1, 3],
    [3, 1, 0x31, 2, 3, 1, 1, 2],
    [0, 5, 1, 1, 0, 0, 0, 0],
    [4, 5, 1, 0, 1, 0, 0, 0],
    [3, 1, 1, 0, 1, 4, 4, 3],
    [3, 1, 1, 0x40, 1, 2, 4, 1],
    [1, 4, 2, 3, 1, 1, 1, 2],
];

/// The inputs, by name.
pub fn seeds() -> Inputs {
    let stories = SHAPES.iter().enumerate().flat_map(|(at, shape)| {
        let stories = [
            ordinary(*shape),
            lost(*shape),
            kept(*shape),
            weather(*shape),
            asked(*shape),
            lied_to(*shape),
            places(*shape),
            slow(*shape),
            failed(*shape),
        ];
        stories.map(|story| (format!("{}-{at}", story.name), story.bytes))
    });
    stories.collect()
}

fn ordinary(shape: [u8; SHAPE_BYTES]) -> Story {
    let story = Story::of("ordinary", shape)
        .saves(3, 1)
        .then(Kind::Wait, 1, [0, 0, 0, 200])
        .then(Kind::Wait, 2, [0, 0, 1, 200])
        .then(Kind::Look, 0, [0, 0, 0, 0])
        .then(Kind::Look, 1, [0, 0, 1, 1]);
    let story = (0..5).fold(story, |story, what| {
        story
            .then(Kind::Plan, 2, [0, 0, what % 2, 5 + what])
            .pass(3)
    });
    story
        .plans_and_opens(1)
        .then(Kind::OpenPlanned, 0, [0, 0, 0, 15])
        .then(Kind::Save, 16, [0, 0, 1, 0])
        .pass(5)
        .then(Kind::HangUp, 0, [0; 4])
        .then(Kind::HangUp, 0, [3, 0, 0, 0])
        .saves(2, 2)
}

/// Nodes die, what they held is decoded or repaired, and a restart reads it.
fn lost(shape: [u8; SHAPE_BYTES]) -> Story {
    Story::of("lost", shape)
        .saves(2, 1)
        .then(Kind::Restart, 1, [0xFF, 0x7F, 0, 0])
        .pass(5)
        .plans_and_opens(0)
        .then(Kind::Plan, 0, [0, 0, 0, 5])
        .pass(6)
        .saves(1, 0)
        .then(Kind::Restart, 1, [0; 4])
        .pass(6)
        .then(Kind::Restart, 0, [100, 0, 0, 0])
        .then(Kind::Restart, 2, [100, 0, 0, 0])
        .pass(6)
        .plans_and_opens(1)
        .saves(1, 1)
        .then(Kind::Links, 0, [0, 16, 0, 3])
        .pass(6)
        .then(Kind::Links, 1, [0, 0, 0, 1])
        .saves(1, 0)
        .then(Kind::Links, 1, [0, 0, 1, 2])
        .pass(6)
}

/// Daemons end, and the next ones take over their memory.
fn kept(shape: [u8; SHAPE_BYTES]) -> Story {
    Story::of("kept", shape)
        .saves(2, 1)
        .then(Kind::Ask, 0, [13, 0, 9, 3])
        .then(Kind::Restart, 0, [10, 0, 0, 1])
        .pass(5)
        .saves(1, 1)
        .then(Kind::Save, 0, [0; 4])
        .then(Kind::Restart, 1, [10, 0, 0, 2])
        .pass(5)
        .then(Kind::Restart, 2, [10, 0, 1, 2])
        .pass(6)
        .plans_and_opens(2)
        .then(Kind::Rot, 0, [0, 0, 0, 1])
        .then(Kind::Rot, 1, [0, 0, 0, 1])
        .then(Kind::Rot, 2, [0, 0, 0, 0])
        .then(Kind::Rot, 4, [0, 0, 0, 0])
        .then(Kind::Rot, 5, [0, 0, 0, 0])
        .pass(6)
        .pass(6)
        .saves(1, 0)
        .plans_and_opens(1)
        .then(Kind::Pause, 1, [0, 16, 0, 0])
        .saves(1, 0)
}

/// A tier and a registry in all weathers.
fn weather(shape: [u8; SHAPE_BYTES]) -> Story {
    let story = (0..11).fold(Story::of("weather", shape), |story, fault| {
        let story = story.then(Kind::Tier, 0, [1, 0, fault, 3]);
        let story = story.then(Kind::Save, 0, [0, 0, 1, 0]).pass(5);
        story.then(Kind::Plan, 1, [0, 0, fault, 3]).pass(3)
    });
    let story = (0..6).fold(story, |story, kind| {
        let story = story
            .then(Kind::Tier, 1, [1, 0, 0, kind])
            .then(Kind::Registry, kind, [0; 4])
            .then(Kind::OpenRun, kind, [0; 4]);
        story.pass(5).then(Kind::Save, 0, [0, 0, 1, 0]).pass(5)
    });
    let story = story.then(Kind::Restart, 0, [0, 0, 0, 0]).pass(6);
    story.plans_and_opens(1)
}

/// Every request.
fn asked(shape: [u8; SHAPE_BYTES]) -> Story {
    let story = Story::of("asked", shape).saves(2, 1);
    let story = (0..40).fold(story, |story, which| {
        let (kind, some) = (which % 20, which / 20);
        let viewer = if which % 3 == 0 { 0 } else { 3 };
        let story = story.then(Kind::Ask, which % 5, [kind, 0, some, viewer]);
        story.pass(3)
    });
    story.saves(1, 1).pass(5)
}

/// Every message, and those that were said before.
fn lied_to(shape: [u8; SHAPE_BYTES]) -> Story {
    let story = Story::of("lied", shape).saves(1, 1);
    let story = (0..70).fold(story, |story, which| {
        story.then(Kind::SayAnything, which, [which, 0, which, 4])
    });
    let story = story.then(Kind::Save, 0, [0; 4]);
    let story = (0..40).fold(story, |story, which| {
        let how = [0, 5, 7, 4, 195][usize::from(which) % 5];
        story
            .then(Kind::SayAgain, 0, [which * 3, 0, which, how])
            .pass(0)
    });
    story.saves(1, 0)
}

/// Places of the cluster change.
fn places(shape: [u8; SHAPE_BYTES]) -> Story {
    Story::of("places", shape)
        .saves(2, 1)
        .then(Kind::Members, 2, [0, 0, 0, 0])
        .saves(1, 0)
        .then(Kind::Members, 1, [0, 0, 0, 1])
        .pass(6)
        .saves(1, 1)
        .then(Kind::Members, 1, [0, 0, 0, 1])
        .then(Kind::Restart, 1, [0; 4])
        .pass(6)
        .saves(2, 1)
        .then(Kind::Members, 0, [0, 0, 200, 2])
        .saves(1, 1)
        .then(Kind::Ask, 1, [11, 0, 0, 8])
        .then(Kind::Ask, 2, [11, 0, 0, 8])
        .pass(5)
        .then(Kind::Ask, 1, [11, 0, 0, 8])
        .then(Kind::Look, 1, [0; 4])
        .then(Kind::Clock, 0, [50, 0, 0, 1])
        .then(Kind::Clock, 1, [50, 0, 0, 2])
        .pass(6)
        .saves(1, 1)
}

/// Sessions that are slow, and that break.
fn slow(shape: [u8; SHAPE_BYTES]) -> Story {
    let story = Story::of("slow", shape).saves(1, 0);
    let story = (0..4).fold(story, |story, turn| {
        let story = story.then(Kind::Save, 0, [0; 4]).pass(4);
        let story = (0..6).fold(story, |story, _| {
            story.then(Kind::Progress, 1, [turn, 4, 20, 7]).pass(4)
        });
        story.pass(5)
    });
    let story = (0..12).fold(story, |story, fault| {
        let story = story.then(Kind::Sessions, 1, [0, 0, fault, fault * 4 + 2]);
        story.then(Kind::Save, 0, [0; 4]).pass(4).pass(4)
    });
    story.then(Kind::Sessions, 0, [0; 4]).saves(1, 0)
}

/// Restarts that fail, and rooms that are too small.
fn failed(shape: [u8; SHAPE_BYTES]) -> Story {
    let story = Story::of("failed", shape).saves(2, 1);
    let story = (0..4).fold(story, |story, _| {
        let story = story.then(Kind::Ask, 0, [8, 0, 0, 9]).pass(3);
        story.then(Kind::Plan, 0, [0, 0, 0, 9]).pass(4)
    });
    let story = story.then(Kind::Ask, 0, [10, 0, 0, 9]).plans_and_opens(0);
    let story = (0..6).fold(story, |story, job| {
        story.then(Kind::Save, job * 16, [0, 0, 0, 0]).pass(4)
    });
    story
        .then(Kind::Save, 0, [0, 0, 0, 255])
        .then(Kind::OpenRun, 1, [0; 4])
        .saves(2, 0)
        .pass(7)
        .pass(7)
        .pass(7)
        .pass(7)
        .pass(7)
        .saves(1, 1)
}
