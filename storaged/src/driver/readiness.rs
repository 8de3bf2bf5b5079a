//! Whether this node is ready, and if not why: what `/readyz`, `storaged status` and the page say.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use storaged_wire::NodeName;
use tokio::time::Instant;

use crate::keep::{HolderReport, KeptBy};
use crate::stage::SocketFaults;

/// What the driver knows of the links, of its own certificate and of who keeps its memory.
#[derive(Debug, Default)]
pub(super) struct LinkFacts {
    /// Peers whose link is up, and the version that it speaks.
    pub up: BTreeMap<NodeName, u16>,
    /// Peers that could be reached and are not linked to, and why.
    pub refused: BTreeMap<NodeName, String>,
    /// Peers that are linked to and should be configured as this node, and what differs.
    pub differing: BTreeMap<NodeName, String>,
    /// Peers that are configured.
    pub configured: Vec<NodeName>,
    /// What is wrong with the own certificate.
    pub own_fault: Option<String>,
    /// Too much of this node's memory has rotted.
    pub rot_fault: Option<String>,
    /// Sockets through which nobody new gets in.
    pub sockets: SocketFaults,
    /// When it expires, in seconds since 1970.
    pub expires: Option<i64>,
    /// It was told to stop.
    pub is_leaving: bool,
    /// The roster, where there is one.
    pub membership: Option<Value>,
    /// Why it cannot be followed: jobs go on, and nobody who is lost is replaced.
    pub registry_fault: Option<String>,
    /// Since when, whatever else the reason was before.
    pub registry_fault_since: Option<Instant>,
    /// Who has the memory once this daemon has ended.
    pub kept_by: KeptBy,
    /// Slots and segments of parity that nobody has then all the same.
    pub unheld: usize,
}

/// What a status says of who keeps the memory.
fn kept_fields(facts: &LinkFacts) -> String {
    let by = match facts.kept_by {
        KeptBy::Nobody => "nobody",
        KeptBy::Systemd => "systemd",
        KeptBy::Keeper(_) => "keeper",
    };
    let (holder, since) = match facts.kept_by.holder() {
        None => (None, None),
        Some(HolderReport::Absent) => (Some("absent"), None),
        Some(HolderReport::HasAll) => (Some("has-all"), None),
        Some(HolderReport::Lacks { since }) => (Some("lacks"), Some(since)),
    };
    format!(
        r#""kept_by":{},"holder":{},"holder_lacks_since":{},"unheld":{}"#,
        json!(by),
        json!(holder),
        json!(since),
        facts.unheld
    )
}

/// Whether peers that are not up have had time to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AbsentPeers {
    AwaitedYet,
    GivenUp,
}

impl LinkFacts {
    /// The registry is followed, or why it is not.
    pub fn note_registry(&mut self, fault: Option<String>) {
        let since = self.registry_fault_since.unwrap_or_else(Instant::now);
        self.registry_fault_since = fault.is_some().then_some(since);
        self.registry_fault = fault;
    }

    /// For how long the registry has not been followed; none while it is.
    pub fn registry_fault_age(&self) -> Option<Duration> {
        self.registry_fault_since.map(|since| since.elapsed())
    }

    /// Why the node is not ready; empty if it is.
    pub fn reasons(&self, absent: AbsentPeers) -> Vec<String> {
        let mut reasons = Vec::new();
        reasons.extend(self.is_leaving.then(|| "this node was told to stop".into()));
        reasons.extend(self.own_fault.clone());
        reasons.extend(self.rot_fault.clone());
        reasons.extend(self.sockets.reasons());
        reasons.extend(self.refused.values().cloned());
        let down = self
            .configured
            .iter()
            .filter(|peer| !self.up.contains_key(*peer));
        let down: Vec<&str> = down.map(|peer| peer.as_str()).collect();
        if absent == AbsentPeers::AwaitedYet {
            reasons.push(format!("waiting for peers: {}", down.join(", ")));
        } else if self.up.is_empty() && !down.is_empty() {
            reasons.push(format!(
                "expected a link to at least one of {} peers, got none: {}; see peers.address and the log",
                down.len(),
                down.join(", ")
            ));
        }
        reasons
    }

    /// The core's status, with what only the driver knows: its `ready` counts how the links are.
    pub fn complete(&self, status: &str) -> (String, Vec<String>) {
        let settled = status.contains(r#""ready":true"#);
        let reasons = self.reasons(if settled {
            AbsentPeers::GivenUp
        } else {
            AbsentPeers::AwaitedYet
        });
        let listed = |of: &BTreeMap<NodeName, String>| -> Vec<Value> {
            of.iter()
                .map(|(node, reason)| json!({"node": node.as_str(), "reason": reason}))
                .collect()
        };
        let refused = listed(&self.refused);
        let fields = format!(
            r#""ready":{},"not_ready":{},"refused":{},"differing":{},"link_versions":{},"certificate_expires":{},"membership":{},"membership_fault":{},"membership_fault_seconds":{},{}"#,
            reasons.is_empty(),
            json!(reasons),
            Value::Array(refused),
            Value::Array(listed(&self.differing)),
            json!(
                self.up
                    .iter()
                    .map(|(node, version)| (node.as_str(), *version))
                    .collect::<BTreeMap<_, _>>()
            ),
            json!(self.expires),
            json!(self.membership),
            json!(self.registry_fault),
            json!(self.registry_fault_age().map(|age| age.as_secs())),
            kept_fields(self),
        );
        let own = if settled {
            r#""ready":true"#
        } else {
            r#""ready":false"#
        };
        (status.replacen(own, &fields, 1), reasons)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> NodeName {
        NodeName::new(text).unwrap()
    }

    #[test]
    fn a_node_alone_is_ready_and_one_without_any_of_its_peers_is_not() {
        let mut facts = LinkFacts::default();
        assert!(facts.reasons(AbsentPeers::GivenUp).is_empty());
        facts.configured = vec![name("n1"), name("n2")];
        assert!(facts.reasons(AbsentPeers::AwaitedYet)[0].contains("waiting for peers: n1, n2"));
        assert!(facts.reasons(AbsentPeers::GivenUp)[0].contains("none: n1, n2"));
        facts.up.insert(name("n1"), 4);
        assert!(facts.reasons(AbsentPeers::GivenUp).is_empty());
        facts
            .refused
            .insert(name("n2"), "coding.m is 1 here and 2 there".into());
        assert_eq!(facts.reasons(AbsentPeers::GivenUp).len(), 1);
    }

    /// The reasons of one fault may change: it is as old as the first of them.
    #[tokio::test(start_paused = true)]
    async fn a_registry_that_is_not_followed_is_said_with_its_age_until_it_is() {
        let mut facts = LinkFacts::default();
        let shown = |facts: &LinkFacts| {
            let (text, _) = facts.complete(r#"{"ready":true}"#);
            let status: Value = serde_json::from_str(&text).unwrap();
            let told = ["membership_fault", "membership_fault_seconds"];
            told.map(|key| status[key].clone())
        };
        assert_eq!(shown(&facts), [Value::Null, Value::Null]);
        for reason in ["no answer", "no such place"] {
            facts.note_registry(Some(reason.into()));
            tokio::time::advance(Duration::from_secs(7)).await;
        }
        assert_eq!(shown(&facts), [json!("no such place"), json!(14)]);
        facts.note_registry(None);
        assert_eq!(shown(&facts), [Value::Null, Value::Null]);
        facts.note_registry(Some("no answer".into()));
        assert_eq!(shown(&facts), [json!("no answer"), json!(0)]);
    }

    #[test]
    fn the_status_says_who_keeps_the_memory() {
        let shown = |kept_by| {
            let facts = LinkFacts {
                kept_by,
                ..LinkFacts::default()
            };
            let (text, _) = facts.complete(r#"{"ready":true}"#);
            let status: Value = serde_json::from_str(&text).unwrap();
            ["kept_by", "holder", "holder_lacks_since"].map(|key| status[key].clone())
        };
        let lacks = HolderReport::Lacks { since: 7 };
        for (kept_by, expected) in [
            (KeptBy::Nobody, [json!("nobody"), Value::Null, Value::Null]),
            (
                KeptBy::Systemd,
                [json!("systemd"), Value::Null, Value::Null],
            ),
            (
                KeptBy::Keeper(None),
                [json!("keeper"), Value::Null, Value::Null],
            ),
            (
                KeptBy::Keeper(Some(HolderReport::Absent)),
                [json!("keeper"), json!("absent"), Value::Null],
            ),
            (
                KeptBy::Keeper(Some(HolderReport::HasAll)),
                [json!("keeper"), json!("has-all"), Value::Null],
            ),
            (
                KeptBy::Keeper(Some(lacks)),
                [json!("keeper"), json!("lacks"), json!(7)],
            ),
        ] {
            assert_eq!(shown(kept_by), expected, "{kept_by:?}");
        }
    }

    #[test]
    fn the_status_says_why_and_stays_json() {
        let mut facts = LinkFacts::default();
        facts
            .refused
            .insert(name("n2"), r#"a "quoted" reason"#.into());
        let (text, reasons) = facts.complete(r#"{"node":"n1","ready":true,"peers":[]}"#);
        let status: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(status["ready"], false);
        assert_eq!(status["refused"][0]["reason"], r#"a "quoted" reason"#);
        assert_eq!(reasons, [r#"a "quoted" reason"#]);
        let (text, _) = LinkFacts::default().complete(r#"{"ready":true}"#);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["ready"], true);
    }
}
