//! Pauses of the small cluster's nodes (SIGSTOP): what comes waits, the others notice by silence, and links that have
//! broken meanwhile look as if they were up until the node has found out.

use super::Cluster;
use crate::testkit::Event;

/// A link ends after so much silence.
const SILENCE_MS: u64 = 2_000;
/// A node that has woken up finds its links broken this late.
const FINDS_OUT_MS: u64 = 50;
/// And dials again this much later.
const DIALS_MS: u64 = 150;

#[derive(Debug)]
pub enum PauseEvent {
    /// A node has been silent to another one for as long as its transport bears.
    Silent(usize, usize),
    Resume(usize),
}

impl Cluster {
    /// Stops a node for so many milliseconds.
    pub fn pause(&mut self, node: usize, ms: u64) {
        self.stop_process(node);
        for other in self.others(node) {
            let silent = Event::Scene(PauseEvent::Silent(node, other));
            self.after(SILENCE_MS + 5 * other as u64, silent);
        }
        self.after(ms, Event::Scene(PauseEvent::Resume(node)));
    }

    pub(super) fn pause_goes_on(&mut self, event: PauseEvent) {
        match event {
            PauseEvent::Silent(node, to) if self.is_paused(node) => {
                self.link_of(node, to).alive = false;
                self.part(to, node);
            }
            PauseEvent::Silent(..) => {}
            PauseEvent::Resume(node) => self.resume(node),
        }
    }

    fn resume(&mut self, node: usize) {
        self.continue_process(node);
        for other in self.others(node) {
            if self.link_of(node, other).alive && self.link_of(other, node).alive {
                continue;
            }
            if !self.link_of(node, other).alive {
                self.part_after(FINDS_OUT_MS, node, other);
            }
            let dials_ms = FINDS_OUT_MS + DIALS_MS;
            self.after(dials_ms, Event::Dial(node, other));
            self.after(dials_ms + 1, Event::Dial(other, node));
        }
    }
}
