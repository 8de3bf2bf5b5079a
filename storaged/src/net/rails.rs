//! Over which of a node's interfaces a stream goes where its connections are equally free. A session has one stream per pair and direction, so
//! that what one pair has used says nothing: with that alone each first stream would go on the link, and every rail stay idle.

use std::net::{IpAddr, SocketAddr};

/// An interface of this node, known by the address of the sockets there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Interface {
    /// That of the links; also where all sockets are on all interfaces.
    OfLinks,
    /// Another one.
    Rail(IpAddr),
}

impl Interface {
    /// Of a socket beside that of the links.
    pub fn of(socket: SocketAddr, links: SocketAddr) -> Self {
        if socket.ip() == links.ip() || socket.ip().is_unspecified() {
            Self::OfLinks
        } else {
            Self::Rail(socket.ip())
        }
    }
}

/// A number by which streams spread over interfaces. Those to different peers should have different ones, those from different peers too: the
/// two ends' places in a plan, added up, are such numbers. 0 prefers the link. The receiver need not know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RailHint(usize);

impl RailHint {
    /// Of this number.
    pub fn new(number: usize) -> Self {
        Self(number)
    }

    /// Which of so many interfaces it means. The last two digits to that base are added up: sums of neighbours in a chain are all
    /// odd, and by the last digit alone one of two interfaces would have the whole chain.
    pub(super) fn among(self, count: usize) -> usize {
        let count = count.max(1);
        (self.0 + self.0 / count) % count
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    /// How many of these hints mean each of so many interfaces.
    fn spread(hints: impl Iterator<Item = usize>, count: usize) -> Vec<usize> {
        let mut spread = vec![0; count];
        hints.for_each(|hint| spread[RailHint::new(hint).among(count)] += 1);
        spread
    }

    #[test]
    fn what_one_sends_or_takes_and_what_a_chain_sends_spreads_evenly() {
        for count in 1..=16 {
            for place in 0..40 {
                let row = spread(place..place + 4 * count, count);
                assert!(row.iter().all(|got| (3..=5).contains(got)), "{row:?}");
            }
            let chain = spread((0..count * count).map(|place| 2 * place + 1), count);
            assert_eq!(chain, vec![count; count]);
        }
        assert_eq!(spread(0..6, 2), [3, 3]);
    }

    #[test]
    fn hint_0_means_the_first() {
        assert!((0..=16).all(|count| RailHint::default().among(count) == 0));
        assert_eq!(RailHint::new(usize::MAX / 2).among(1), 0);
    }

    #[test]
    fn sockets_of_one_address_or_of_all_are_on_the_interface_of_the_links() {
        let at = |ip, port| SocketAddr::from((ip, port));
        let links = at([10, 0, 0, 1], 9300);
        assert_eq!(
            Interface::of(at([10, 0, 0, 1], 9301), links),
            Interface::OfLinks
        );
        let all = [0, 0, 0, 0];
        assert_eq!(
            Interface::of(at(all, 9301), at(all, 9300)),
            Interface::OfLinks
        );
        let rail = Interface::Rail(IpAddr::V4(Ipv4Addr::new(10, 1, 0, 1)));
        assert_eq!(Interface::of(at([10, 1, 0, 1], 9300), links), rail);
    }
}
