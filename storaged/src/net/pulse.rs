//! Whether the peer is there. Once per beat each link is looked at: who has heard nothing since the last one asks, by a
//! datagram of one byte that the peer's transport acknowledges without anybody's doing.
//!
//! Within a coding group one side asks at every beat, and four silent beats are a dead peer: 2.0 to 2.5 s. With all others
//! a node speaks seldom, and asks every three seconds; but whoever is sent anything must answer within as many beats. So
//! nobody waits for a dead node longer than within a group, and the death of one that is sent nothing is noticed in six.
//!
//! All links of a node have one beat: a processor that wakes for one packet sends and takes the others too.

use std::time::Duration;

/// Time between two looks at all links.
pub(super) const BEAT: Duration = Duration::from_millis(500);

/// So many beats without a word, though asked, are a dead peer.
const BEATS_SILENT_MAX: u32 = 4;

/// Outside the group the side that dialled asks after so many silent beats. The other one gives it two more: it need not
/// ask unless the first is gone.
const BEATS_OUTSIDE: u32 = 5;
const BEATS_SLACK: u32 = 2;

/// How soon a peer's silence must be noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Proximity {
    /// It shares a coding group with this node.
    Group,
    /// It does not.
    #[default]
    Outside,
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
#[derive(Debug, Default)]
pub(super) struct Pulse {
    /// Datagrams that had come at the last beat.
    received: u64,
    /// Beats since something came.
    silent: u32,
    /// Beats since the peer was spoken to, and nothing came.
    unanswered: Option<u32>,
}

impl Pulse {
    /// One beat later so many datagrams have come in all. `Spoke::Yes` if something was sent meanwhile.
    pub fn beat(&mut self, received: u64, spoke: Spoke, proximity: Proximity, side: Side) -> Beat {
        if self.received == received {
            self.silent = self.silent.saturating_add(1);
            self.unanswered = self.unanswered.map(|beats| beats.saturating_add(1));
        } else {
            (self.silent, self.unanswered) = (0, None);
        }
        self.received = received;
        let is_overdue = self.unanswered >= Some(BEATS_SILENT_MAX);
        if is_overdue || proximity == Proximity::Group && self.silent >= BEATS_SILENT_MAX {
            return Beat::Lost;
        }
        let is_quiet = self.silent >= ask_after(proximity, side);
        if is_quiet || spoke == Spoke::Yes || self.unanswered.is_some() {
            self.unanswered.get_or_insert(0);
            return Beat::Ask;
        }
        Beat::Rest
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

fn ask_after(proximity: Proximity, side: Side) -> u32 {
    let dialled = match proximity {
        Proximity::Group => 0,
        Proximity::Outside => BEATS_OUTSIDE,
    };
    match side {
        Side::Dialled => dialled,
        Side::Accepted => dialled + BEATS_SLACK,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Beats at which the peer is asked, and the one at which it is lost, if it answers everything until a beat.
    fn watch(
        proximity: Proximity,
        side: Side,
        dead_from: u32,
        spoke_at: Option<u32>,
    ) -> (Vec<u32>, Option<u32>) {
        let (mut pulse, mut received, mut asked) = (Pulse::default(), 0, Vec::new());
        let mut answers = 1;
        for at in 1..=60 {
            received += answers;
            let spoke = if spoke_at == Some(at) {
                Spoke::Yes
            } else {
                Spoke::No
            };
            let beat = pulse.beat(received, spoke, proximity, side);
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

    #[test]
    fn within_a_group_one_side_asks_at_every_beat_and_four_silent_ones_are_the_end() {
        let (asked, lost) = watch(Proximity::Group, Side::Dialled, 20, None);
        assert_eq!(asked, (1..24).collect::<Vec<_>>());
        assert_eq!(
            lost,
            Some(24),
            "nothing came from beat 20 on: 2.0 s and the rest of a beat"
        );
        let (_, lost) = watch(Proximity::Group, Side::Accepted, 1, None);
        assert_eq!(lost, Some(5), "the side that is asked notices as soon");
    }

    #[test]
    fn outside_it_a_peer_is_asked_seldom_and_nobody_is_lost_who_answers() {
        let (asked, lost) = watch(Proximity::Outside, Side::Dialled, 100, None);
        assert_eq!((asked.len(), lost), (10, None), "every 6 beats: {asked:?}");
        let (asked, lost) = watch(Proximity::Outside, Side::Accepted, 100, None);
        assert_eq!((asked.len(), lost), (7, None), "every 8 beats: {asked:?}");
    }

    #[test]
    fn outside_it_a_dead_peer_is_noticed_within_six_seconds_by_either_side() {
        for side in [Side::Dialled, Side::Accepted] {
            let (_, lost) = watch(Proximity::Outside, side, 1, None);
            let beats = lost.expect("it is noticed");
            assert!(BEAT * beats <= Duration::from_secs(6), "{beats} beats");
        }
    }

    #[test]
    fn whoever_is_sent_something_and_is_dead_is_lost_as_soon_as_in_the_group() {
        for side in [Side::Dialled, Side::Accepted] {
            let (_, lost) = watch(Proximity::Outside, side, 1, Some(3));
            assert_eq!(lost, Some(3 + BEATS_SILENT_MAX));
        }
    }
}
