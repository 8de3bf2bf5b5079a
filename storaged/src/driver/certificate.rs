//! The dates of this node's own certificate: said at start, and again as its end comes near.

use std::time::{SystemTime, UNIX_EPOCH};

use storaged_wire::NodeName;

use crate::net::Validity;

const DAY: i64 = 86_400;

/// How near the end is. Every step is told once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Nearness {
    /// More than 30 days.
    Far,
    /// At most so many days.
    Days30,
    Days7,
    Day1,
    /// It is over, or has not begun.
    Invalid,
}

/// The certificate that the links use.
#[derive(Debug)]
pub(super) struct OwnCertificate {
    pub validity: Validity,
    told: Nearness,
}

/// Seconds since 1970, by the machine's clock: the one that TLS checks certificates with.
pub(super) fn wall_clock() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
    })
}

impl OwnCertificate {
    pub fn new(validity: Validity) -> Self {
        Self {
            validity,
            told: Nearness::Far,
        }
    }

    fn nearness(&self, now: i64) -> Nearness {
        let left = self.validity.ends - now;
        match left {
            _ if now < self.validity.begins => Nearness::Invalid,
            i64::MIN..=0 => Nearness::Invalid,
            left if left <= DAY => Nearness::Day1,
            left if left <= 7 * DAY => Nearness::Days7,
            left if left <= 30 * DAY => Nearness::Days30,
            _ => Nearness::Far,
        }
    }

    /// What to say now, if it was not said yet.
    pub fn news(&mut self, now: i64) -> Option<Nearness> {
        let nearness = self.nearness(now);
        let news = (nearness > self.told).then_some(nearness);
        self.told = nearness;
        news
    }

    /// Why no peer can let this node in, if that is so.
    pub fn fault(&self, node: &NodeName, now: i64) -> Option<String> {
        if self.nearness(now) != Nearness::Invalid {
            return None;
        }
        let when = if now < self.validity.begins {
            format!("is not valid before {}", date(self.validity.begins))
        } else {
            format!("expired on {}", date(self.validity.ends))
        };
        Some(format!(
            "the certificate of this node {when}: {}",
            advice(node)
        ))
    }
}

/// What is wrong with a certificate's dates now, if anything.
pub fn expiry_fault(node: &NodeName, validity: Validity) -> Option<String> {
    OwnCertificate::new(validity).fault(node, wall_clock())
}

/// What really helps.
pub(super) fn advice(node: &NodeName) -> String {
    format!(
        "renew it where the authority is with `storaged cert renew DIR {node}`, copy {node}.pem and {node}.key here and reload this daemon (systemctl reload storaged, or kill -HUP)"
    )
}

/// A date as people read it, in UTC.
pub fn date(seconds: i64) -> String {
    let format = &time::format_description::well_known::Rfc3339;
    let at = time::OffsetDateTime::from_unix_timestamp(seconds).ok();
    at.and_then(|at| at.format(format).ok())
        .unwrap_or_else(|| seconds.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_towards_the_end_is_told_once() {
        let mut own = OwnCertificate::new(Validity {
            begins: 0,
            ends: 100 * DAY,
        });
        let mut news = |day| own.news(day * DAY);
        assert_eq!(news(10), None);
        assert_eq!((news(75), news(76)), (Some(Nearness::Days30), None));
        assert_eq!((news(93), news(95)), (Some(Nearness::Days7), None));
        assert_eq!((news(99), news(99)), (Some(Nearness::Day1), None));
        assert_eq!((news(100), news(101)), (Some(Nearness::Invalid), None));
    }

    #[test]
    fn an_expired_one_says_so_with_what_helps() {
        let own = OwnCertificate::new(Validity { begins: 5, ends: 9 });
        let node = NodeName::new("n2").unwrap();
        let fault = own.fault(&node, 10).unwrap();
        assert!(fault.contains("1970-01-01T00:00:09Z"), "{fault}");
        assert!(fault.contains("storaged cert renew DIR n2"), "{fault}");
        assert!(own.fault(&node, 4).unwrap().contains("not valid before"));
        assert_eq!(own.fault(&node, 7), None);
    }
}
