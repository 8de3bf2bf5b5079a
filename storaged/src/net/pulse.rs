//! Whether the peer is there. Once per beat each link is looked at: who has heard nothing since the last one asks, by a
//! datagram of one byte that the peer's transport acknowledges without anybody's doing.
//!
//! With those that are near one side asks at every beat, and four silent beats are a dead peer: 2.0 to 2.5 s. With all others
//! a node speaks seldom, and asks every three seconds; but whoever is sent anything must answer within as many beats. So
//! nobody waits for a dead node longer than for a near one, and the death of one that is sent nothing is noticed in six.
//!
//! The side that was dialled counts on words only where the other one has promised them. Two nodes may take one another for
//! near and far for a while, as during an upgrade or while one of them has not heard of an epoch: a silence that nobody was to
//! break is no sign of death.
//!
//! All links of a node have one beat: a processor that wakes for one packet sends and takes the others too.

use std::time::Duration;

use minicbor::{Decode, Encode};

/// Time between two looks at all links.
pub(super) const BEAT: Duration = Duration::from_millis(500);

/// So many beats without a word, though asked, are a dead peer.
const BEATS_SILENT_MAX: u32 = 4;

/// From those that are far the side that dialled asks for a word after so many silent beats. The other one gives it two more: it
/// need not ask unless the first is gone.
const BEATS_FAR: u32 = 5;
const BEATS_SLACK: u32 = 2;

/// How soon a peer's silence must be noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(index_only)]
pub(super) enum Proximity {
    /// As soon as can be: it shares a coding group with this node, or the cluster is small.
    #[n(0)]
    Near,
    /// When something is sent to it, or in a few seconds.
    #[n(1)]
    #[default]
    Far,
}

/// Which end of a connection this node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// It dialled.
    Dialled,
    /// It was dialled.
    Accepted,
}

/// What a beat asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beat {
    /// Nothing.
    Rest,
    /// A word to the peer, which answers.
    Ask,
    /// The connection is over.
    Lost,
}

/// What is known of a peer's silence.
#[derive(Debug)]
pub(super) struct Pulse {
    side: Side,
    /// Near: the side that dialled says a word at every beat.
    promised: Proximity,
    /// Datagrams that had come at the last beat.
    received: u64,
    /// Beats since something came.
    silent: u32,
    /// Beats since the peer was spoken to, and nothing came.
    unanswered: Option<u32>,
}

impl Pulse {
    /// Of a connection that begins.
    pub fn new(side: Side, promised: Proximity) -> Self {
        Self {
            side,
            promised,
            received: 0,
            silent: 0,
            unanswered: None,
        }
    }

    /// One beat later so many datagrams have come in all. `Spoke::Yes` if something was sent meanwhile.
    pub fn beat(&mut self, received: u64, spoke: Spoke, proximity: Proximity) -> Beat {
        if self.received == received {
            self.silent = self.silent.saturating_add(1);
            self.unanswered = self.unanswered.map(|beats| beats.saturating_add(1));
        } else {
            (self.silent, self.unanswered) = (0, None);
        }
        self.received = received;
        let is_overdue = self.unanswered >= Some(BEATS_SILENT_MAX);
        let breaks_its_word = self.promised == Proximity::Near && self.silent >= BEATS_SILENT_MAX;
        if is_overdue || breaks_its_word {
            return Beat::Lost;
        }
        let is_quiet = self.silent >= self.asks_after(proximity);
        if is_quiet || spoke == Spoke::Yes || self.unanswered.is_some() {
            self.unanswered.get_or_insert(0);
            return Beat::Ask;
        }
        Beat::Rest
    }

    fn asks_after(&self, proximity: Proximity) -> u32 {
        let dialled = match (proximity, self.promised) {
            (Proximity::Far, Proximity::Far) => BEATS_FAR,
            _ => 0,
        };
        match self.side {
            Side::Dialled => dialled,
            Side::Accepted => dialled + BEATS_SLACK,
        }
    }

    /// For how long nothing has come, to a beat.
    pub fn silence(&self) -> Duration {
        BEAT * self.silent
    }
}

/// Whether something was sent to a peer since the last beat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spoke {
    Yes,
    No,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link on which the side that dialled has promised what it does.
    struct Watch {
        side: Side,
        promised: Proximity,
        /// As what this side takes the other.
        proximity: Proximity,
    }

    impl Watch {
        fn of(proximity: Proximity, side: Side) -> Self {
            let promised = proximity;
            Self {
                side,
                promised,
                proximity,
            }
        }

        /// Beats at which the peer is asked, and the one at which it is lost, if it answers everything until a beat.
        fn until(&self, dead_from: u32, spoke_at: Option<u32>) -> (Vec<u32>, Option<u32>) {
            let mut pulse = Pulse::new(self.side, self.promised);
            let (mut received, mut asked) = (0, Vec::new());
            let mut answers = 1;
            for at in 1..=60 {
                received += answers;
                let spoke = if spoke_at == Some(at) {
                    Spoke::Yes
                } else {
                    Spoke::No
                };
                let beat = pulse.beat(received, spoke, self.proximity);
                let is_alive = at < dead_from;
                answers = u64::from(is_alive && beat == Beat::Ask);
                match beat {
                    Beat::Rest => {}
                    Beat::Ask => asked.push(at),
                    Beat::Lost => {
                        assert_eq!(pulse.silence(), BEAT * (at - dead_from));
                        return (asked, Some(at));
                    }
                }
            }
            (asked, None)
        }
    }

    #[test]
    fn of_those_that_are_near_one_side_asks_at_every_beat_and_four_silent_ones_are_the_end() {
        let (asked, lost) = Watch::of(Proximity::Near, Side::Dialled).until(20, None);
        assert_eq!(asked, (1..24).collect::<Vec<_>>());
        assert_eq!(
            lost,
            Some(24),
            "nothing came from beat 20 on: 2.0 s and the rest of a beat"
        );
        let (_, lost) = Watch::of(Proximity::Near, Side::Accepted).until(1, None);
        assert_eq!(lost, Some(5), "the side that is asked notices as soon");
    }

    #[test]
    fn those_that_are_far_are_asked_seldom_and_nobody_is_lost_who_answers() {
        let (asked, lost) = Watch::of(Proximity::Far, Side::Dialled).until(100, None);
        assert_eq!((asked.len(), lost), (10, None), "every 6 beats: {asked:?}");
        let (asked, lost) = Watch::of(Proximity::Far, Side::Accepted).until(100, None);
        assert_eq!((asked.len(), lost), (7, None), "every 8 beats: {asked:?}");
    }

    #[test]
    fn a_dead_peer_that_is_far_is_noticed_within_six_seconds_by_either_side() {
        for side in [Side::Dialled, Side::Accepted] {
            let (_, lost) = Watch::of(Proximity::Far, side).until(1, None);
            let beats = lost.expect("it is noticed");
            assert!(BEAT * beats <= Duration::from_secs(6), "{beats} beats");
        }
    }

    #[test]
    fn whoever_is_sent_something_and_is_dead_is_lost_as_soon_as_one_that_is_near() {
        for side in [Side::Dialled, Side::Accepted] {
            let (_, lost) = Watch::of(Proximity::Far, side).until(1, Some(3));
            assert_eq!(lost, Some(3 + BEATS_SILENT_MAX));
        }
    }

    /// All that two nodes can take one another for, with a change at any beat, at which the peer stands still. Three beats are a second
    /// and the rest of a beat.
    #[test]
    fn nobody_is_lost_by_a_stall_of_a_second_whatever_both_take_one_another_for() {
        const STALL: u32 = 3;
        let (near, far) = (Proximity::Near, Proximity::Far);
        for side in [Side::Dialled, Side::Accepted] {
            for (promised, first, then) in [
                (near, near, near),
                (near, near, far),
                (near, far, near),
                (near, far, far),
                (far, near, near),
                (far, near, far),
                (far, far, near),
                (far, far, far),
            ] {
                for stalls_at in 1..=24 {
                    let mut pulse = Pulse::new(side, promised);
                    let mut received = 0;
                    let mut answers = 1;
                    for at in 1..=40 {
                        received += answers;
                        let proximity = if at < stalls_at { first } else { then };
                        let beat = pulse.beat(received, Spoke::No, proximity);
                        let case = (side, promised, first, then, stalls_at, at);
                        assert_ne!(beat, Beat::Lost, "{case:?}");
                        let is_stalled = (stalls_at..stalls_at + STALL).contains(&at);
                        let speaks = side == Side::Accepted && promised == near;
                        answers = u64::from(!is_stalled && (speaks || beat == Beat::Ask));
                    }
                }
            }
        }
    }

    /// It has promised nothing: one of an older release, or one that took this node for far when it dialled.
    #[test]
    fn who_has_promised_no_words_is_asked_before_it_is_lost() {
        let watch = Watch {
            side: Side::Accepted,
            promised: Proximity::Far,
            proximity: Proximity::Near,
        };
        let (asked, lost) = watch.until(1, None);
        assert_eq!(asked, [3, 4, 5, 6]);
        assert_eq!(lost, Some(7), "3.5 s at most");
    }
}
