//! All metrics: one table, behind `observe_*` functions. Names begin with the verb; units stand at the end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use storaged_codec::delta::Kind;
use storaged_core::{
    NodeRate, SessionPurpose, SessionTally, SetAside, SetAsideCause, Standings, Viewer,
};
use storaged_plan::Member;
use storaged_wire::local::Rung;
use storaged_wire::{CheckpointState, NodeName};

use crate::keep::HolderReport;
use crate::membership::{Roster, Waits};
use crate::trickle::{Copied, PassedOn};

/// What the states' counter says of a checkpoint that was given up.
const ABANDONED: &str = "abandoned";

/// How requests of HyperPod's clients end.
const HYPERPOD_KINDS: [&str; 3] = ["ok", "refused", "failed"];

/// Why a listing of the durable tier leaves a checkpoint out.
const REFUSED_KINDS: [&str; 4] = ["forged", "without_mac", "unchecked", "missing"];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NamespaceLabel {
    namespace: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabel {
    source: String,
}

fn source_label(rung: Rung) -> SourceLabel {
    let source = match rung {
        Rung::OwnRam => "own-ram",
        Rung::PeerRam => "peer-ram",
        Rung::Decoded => "decoded",
        Rung::Durable => "durable",
    };
    SourceLabel {
        source: source.into(),
    }
}

fn purpose_label(purpose: SessionPurpose) -> KindLabel {
    let kind = match purpose {
        SessionPurpose::Encode => "encode",
        SessionPurpose::Repair => "repair",
    };
    kind_label(kind)
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NodeLabel {
    node: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VersionLabel {
    version: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LinkLabels {
    node: String,
    side: String,
}

/// Makes [`Metrics`] of the table below: per metric its field and kind (with what it begins with, if that is not the
/// default), its name, and what it counts. They are exposed in the table's order.
macro_rules! metrics {
    ($($field:ident: $kind:ty $(= $begin:expr)?, $name:literal, $help:literal;)*) => {
        /// The daemon's metrics.
        #[derive(Debug)]
        pub struct Metrics {
            registry: Registry,
            $($field: $kind,)*
        }

        impl Metrics {
            fn registered_in(mut registry: Registry) -> Self {
                $(
                    let $field: $kind = metrics!(@begin $($begin)?);
                    registry.register($name, $help, $field.clone());
                )*
                Self { registry, $($field,)* }
            }
        }
    };
    (@begin) => { Default::default() };
    (@begin $begin:expr) => { $begin };
}

metrics! {
    states: Family<StateLabel, Counter>, "checkpoint_states",
        "Checkpoints that reached a state, as this node knows it";
    stage_digest_bytes: Counter, "stage_digest_bytes",
        "Bytes of sealed shards digested";
    encode_bytes: Counter, "encode_session_bytes",
        "Bytes of blocks computed in sessions, encode and repair";
    encode_received: Family<KindLabel, Counter>, "encode_received_bytes",
        "Bytes of blocks that came from other nodes in sessions";
    encode_lane_seconds: Histogram = lane_seconds(), "encode_lane_seconds",
        "Time from the first try to the protection of a lane led here";
    restore_detection: Histogram = detection_seconds(), "restore_detection_seconds",
        "Time from a peer's last sign of life until this node took it for gone, where silence alone told";
    restore_plan: Histogram = restore_seconds(), "restore_plan_seconds",
        "Time from the question for a plan to its answer";
    restore_open: Family<SourceLabel, Histogram> =
        Family::new_with_constructor(restore_seconds), "restore_open_seconds",
        "Time from the question for a shard until it is there, by where its bytes came from";
    restore_read: Family<SourceLabel, Histogram> =
        Family::new_with_constructor(restore_seconds), "restore_read_seconds",
        "Time for which a reader had a shard open";
    encode_failures: Counter, "encode_session_failures",
        "Sessions led here that failed and were tried again";
    encode_stripes_in_flight: Gauge, "encode_stripes_in_flight",
        "Stripes being computed, over all sessions";
    encode_blocks_in_flight: Gauge, "encode_blocks_in_flight",
        "Blocks in use by sessions and by the transport until they are acknowledged";
    encode_blocks_in_flight_most: Gauge, "encode_blocks_in_flight_most",
        "Most blocks that were in use at once";
    encode_repair_held: Counter<f64, AtomicU64>, "encode_repair_held_seconds",
        "Seconds that streams of repairs waited so that a save was protected sooner, all streams added up";
    encode_replans: Counter, "encode_replans",
        "Slow nodes that sessions led here were ended to go around";
    encode_link_rates: Family<LinkLabels, Gauge>, "encode_link_bytes_per_second",
        "What a node's link was measured to carry in sessions led here, where links set the pace";
    encode_slow_nodes: Gauge, "encode_slow_nodes",
        "Nodes whose link is measured to be far below the usual rate";
    encode_wrong_bytes: Family<NodeLabel, Counter>, "encode_wrong_bytes",
        "Sessions led here that failed because this node had sent wrong bytes, as the node that got them says";
    hyperpod_requests: Family<KindLabel, Counter>, "hyperpod_requests",
        "Requests of HyperPod's clients";
    hyperpod_received: Counter, "hyperpod_received_bytes",
        "Bytes of shards received";
    hyperpod_sent: Counter, "hyperpod_sent_bytes",
        "Bytes of shards opened to send";
    place_peers_up: Gauge, "place_peers_up",
        "Peers whose link is up";
    membership_epoch: Gauge, "membership_epoch",
        "Epoch of the roster that this node goes by; 0 where nodes are listed in its file";
    membership_vacant: Gauge, "membership_vacant",
        "Places of the roster that no node fills";
    membership_cordoned: Gauge, "membership_cordoned",
        "Nodes that the roster says are cordoned";
    membership_spare: Gauge, "membership_spare",
        "1 while this node is a spare, which takes the next place that gets vacant: the sum over all nodes is how many wait";
    membership_fault: Gauge, "membership_fault",
        "1 while the registry cannot be followed: jobs go on, and nobody who is lost is replaced";
    membership_fault_seconds: Gauge<f64, AtomicU64>, "membership_fault_seconds",
        "For how long that has been so; 0 while the registry is followed, or where there is none";
    place_trunks: Gauge, "place_trunks",
        "Connections for data alone beside the links to peers, both ways";
    place_connections: Gauge, "place_connections",
        "QUIC connections to peers, those that are just beginning or ending too";
    place_healed: Counter, "place_blocks_healed",
        "Lost blocks put back by sessions led here";
    place_peer_faults: Counter, "place_peer_faults",
        "Peers or strangers that broke the protocol or had a wrong certificate";
    place_stops: Counter, "place_stops",
        "Times that this process was seen not to run for 3 s";
    place_false_statements: Family<NodeLabel, Counter>, "place_false_statements",
        "What this peer said that cannot be so, or that is more than one peer may say";
    place_peers_refused: Gauge, "place_peers_refused",
        "Peers that answer and are not linked to: configured differently, or a certificate is refused";
    place_certificate_refused: Counter, "place_certificate_refused",
        "Changed files of certificates, key or revoked certificates that cannot be used: the old ones stay";
    place_certificate_expires: Gauge, "place_certificate_expires_seconds",
        "When the certificate of this node expires, in seconds since 1970; 0 without one";
    trickle_failures: Counter, "trickle_failures",
        "Copies and manifests that could not be written to the durable tier and will be tried again";
    trickle_uploads: Counter, "trickle_uploads",
        "Shards copied to the durable tier";
    trickle_tier_up: Gauge, "trickle_tier_up",
        "1 while the durable tier answers, or where there is none";
    trickle_quarantined: Counter, "trickle_quarantined",
        "Checkpoints in the durable tier that proved damaged";
    trickle_got: Counter, "trickle_bytes_from_peers",
        "Bytes of the durable tier that peers read for this node";
    trickle_given: Counter, "trickle_bytes_for_peers",
        "Bytes of the durable tier that this node read for peers";
    trickle_bytes: Counter, "trickle_bytes",
        "Bytes of the shards copied to the durable tier";
    trickle_stored_bytes: Counter, "trickle_stored_bytes",
        "Bytes that those copies take there";
    trickle_increments: Counter, "trickle_increments",
        "Shards copied as increments";
    trickle_records: Family<KindLabel, Counter>, "trickle_increment_records",
        "Records of increments";
    trickle_expected_bytes: Counter, "trickle_increment_expected_bytes",
        "Bytes that the cost model expected of the records";
    trickle_record_bytes: Counter, "trickle_increment_bytes",
        "Bytes that the records took";
    trickle_expected_seconds: Counter<f64, AtomicU64>, "trickle_increment_expected_seconds",
        "Seconds of one core that the cost model expected of the records";
    trickle_record_seconds: Counter<f64, AtomicU64>, "trickle_increment_seconds",
        "Seconds of one core that the records took";
    trickle_given_up: Counter, "trickle_given_up",
        "Checkpoints whose copy in the durable tier was given up for a newer one's";
    trickle_refused: Family<KindLabel, Counter>, "trickle_refused",
        "Checkpoints in the durable tier that a listing did not offer, because they may be forged or are missing";
    trickle_owed: Gauge, "trickle_owed",
        "Checkpoints kept in RAM for their way to the durable tier";
    place_bears: Family<NamespaceLabel, Gauge>, "place_bears",
        "Node losses that the newest protected checkpoint of a namespace survives now";
    place_restart_objections: Gauge, "place_restart_objections",
        "Namespaces that speak against restarting this node now";
    memory_used_bytes: Gauge, "memory_used_bytes",
        "Bytes of slots and parity, and of records above 64 MiB";
    memory_records_bytes: Gauge, "memory_records_bytes",
        "Bytes of manifests, descriptions and tables, which count in the budget above 64 MiB";
    memory_unchecked_slots: Gauge, "memory_unchecked_slots",
        "Slots of an earlier daemon whose bytes have not been compared with their digests yet";
    memory_unheld: Gauge, "memory_unheld",
        "Slots and segments of parity that whoever keeps memory for the next daemon did not take";
    memory_at_holder: Gauge, "memory_at_holder",
        "1 while a holder has all of this node's memory too, as its keeper says: it outlives keeper and pod";
    memory_holder_lacks: Gauge, "memory_holder_lacks",
        "1 while the holder that the keeper was given has not said that it has all of this node's memory";
    memory_pages_lost: Gauge, "memory_pages_lost",
        "Pages of slots and chunks of parity that the system could not give when this daemon read them";
    memory_budget_bytes: Gauge, "memory_budget_bytes",
        "Bytes that these may take";
    memory_spare_bytes: Gauge, "memory_spare_bytes",
        "Bytes of parity memory kept for the next set, beside those used";
    scrub_bytes: Counter, "scrub_bytes",
        "Bytes of shards and parity in RAM read again";
    scrub_rotten_chunks: Counter, "scrub_rotten_chunks",
        "Chunks in this node's RAM that were not what they had been";
    scrub_seconds: Counter<f64, AtomicU64>, "scrub_seconds",
        "Seconds of one thread of the codec that reading again took";
    scrub_age_seconds: Gauge<f64, AtomicU64>, "scrub_age_seconds",
        "All that has been in RAM for longer than this was read again within it";
    sessions: Gauge, "sessions",
        "Sessions that this node takes part in or leads";
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All at zero.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("storaged");
        let build = Family::<VersionLabel, Gauge>::default();
        let version = env!("CARGO_PKG_VERSION").into();
        build.get_or_create(&VersionLabel { version }).set(1);
        registry.register(
            "build_info",
            "Always 1; the label says what runs here",
            build,
        );
        let metrics = Self::registered_in(registry);
        metrics.begin_at_zero();
        metrics
    }

    /// A counter that is not there before its first event hides that event from whoever watches its growth.
    fn begin_at_zero(&self) {
        let states = [
            CheckpointState::Staged,
            CheckpointState::Committed,
            CheckpointState::Protected,
            CheckpointState::Durable,
            CheckpointState::Retired,
        ];
        let states = states.iter().map(|state| state.as_str());
        for state in states.chain([ABANDONED]) {
            drop(self.states.get_or_create(&state_label(state)));
        }
        for kind in Kind::ALL {
            drop(self.trickle_records.get_or_create(&kind_label(kind.name())));
        }
        for purpose in [SessionPurpose::Encode, SessionPurpose::Repair] {
            drop(self.encode_received.get_or_create(&purpose_label(purpose)));
        }
        for kind in HYPERPOD_KINDS {
            drop(self.hyperpod_requests.get_or_create(&kind_label(kind)));
        }
        for kind in REFUSED_KINDS {
            drop(self.trickle_refused.get_or_create(&kind_label(kind)));
        }
    }

    /// The counters of single nodes begin at zero too.
    pub fn expect_nodes(&self, members: &[Member]) {
        for member in members {
            let node = member.name.to_string();
            let label = NodeLabel { node };
            drop(self.encode_wrong_bytes.get_or_create(&label));
            drop(self.place_false_statements.get_or_create(&label));
        }
    }

    /// A checkpoint reached a state.
    pub fn observe_state(&self, state: &str) {
        self.states.get_or_create(&state_label(state)).inc();
    }

    /// A checkpoint was given up.
    pub fn observe_abandoned(&self) {
        self.observe_state(ABANDONED);
    }

    /// What this node waits for, which has no place.
    pub fn observe_waiting(&self, waits: &Waits) {
        let is_spare = matches!(waits, Waits::AsSpare { .. });
        self.membership_spare.set(i64::from(is_spare));
    }

    /// What the roster says now, in which this node has a place.
    pub fn observe_roster(&self, roster: &Roster) {
        self.membership_spare.set(0);
        let vacant = roster.vacant().count();
        self.membership_epoch.set(gauge(roster.epoch));
        self.membership_vacant.set(gauge(vacant as u64));
        let cordoned = roster.cordoned.len();
        self.membership_cordoned.set(gauge(cordoned as u64));
    }

    /// For how long the registry has not been followed; none while it is, or where there is none.
    pub fn observe_registry(&self, fault: Option<Duration>) {
        self.membership_fault.set(i64::from(fault.is_some()));
        let age = fault.unwrap_or_default();
        self.membership_fault_seconds.set(age.as_secs_f64());
    }

    /// So many connections there are now.
    pub fn observe_connections(&self, connections: usize) {
        self.place_connections.set(gauge(connections as u64));
    }

    /// So many trunks there are now.
    pub fn observe_trunks(&self, trunks: usize) {
        self.place_trunks.set(gauge(trunks as u64));
    }

    /// So many peers answer and are not linked to.
    pub fn observe_refused(&self, peers: usize) {
        self.place_peers_refused.set(gauge(peers as u64));
    }

    /// Files that cannot be used take no old one's place.
    pub fn observe_certificate_refused(&self) {
        self.place_certificate_refused.inc();
    }

    /// When this node's certificate expires.
    pub fn observe_certificate(&self, expires: i64) {
        self.place_certificate_expires.set(expires);
    }

    /// A listing of the durable tier left these out.
    pub fn observe_set_aside(&self, set_aside: &[SetAside]) {
        let [forged, without_mac, unchecked, missing] = REFUSED_KINDS;
        for one in set_aside {
            let kind = match one.cause {
                SetAsideCause::Quarantined | SetAsideCause::Unusable => continue,
                SetAsideCause::Forged => forged,
                SetAsideCause::WithoutMac => without_mac,
                SetAsideCause::Unchecked => unchecked,
                SetAsideCause::Missing => missing,
            };
            self.trickle_refused.get_or_create(&kind_label(kind)).inc();
        }
    }

    /// A manifest could not be written to the durable tier.
    pub fn observe_unpublished(&self) {
        self.trickle_failures.inc();
    }

    /// A durable copy was given up.
    pub fn observe_durable_given_up(&self) {
        self.trickle_given_up.inc();
    }

    /// What committed checkpoints bear now, oldest first, and how many namespaces speak against a restart.
    pub fn observe_standings(&self, standings: &[Standings], objections: usize, viewer: &Viewer) {
        self.place_bears.clear();
        for one in standings {
            if let Some(bears) = one
                .bears
                .filter(|_| one.state >= CheckpointState::Protected && one.kept_for.is_none())
            {
                let namespace = viewer.name_of(&one.namespace).unwrap_or_default();
                let gauge = self
                    .place_bears
                    .get_or_create(&NamespaceLabel { namespace });
                gauge.set(bears.into());
            }
        }
        let owed = standings.iter().filter(|one| one.owed).count();
        self.trickle_owed
            .set(i64::try_from(owed).unwrap_or(i64::MAX));
        let objections = i64::try_from(objections).unwrap_or(i64::MAX);
        self.place_restart_objections.set(objections);
    }

    /// A shard was digested.
    pub fn observe_digest(&self, bytes: u64) {
        self.stage_digest_bytes.inc_by(bytes);
    }

    /// A session ended well.
    pub fn observe_session(&self, purpose: SessionPurpose, tally: &SessionTally) {
        self.encode_bytes.inc_by(tally.bytes);
        let came = tally.links.iter().map(|link| link.bytes).sum();
        self.encode_received
            .get_or_create(&purpose_label(purpose))
            .inc_by(came);
    }

    /// A session led here failed.
    pub fn observe_session_failure(&self) {
        self.encode_failures.inc();
    }

    /// A session led here was ended to go around a slow node.
    pub fn observe_replan(&self) {
        self.encode_replans.inc();
    }

    /// What is known of the nodes' links now; what is not known any more goes.
    pub fn observe_link_rates(&self, nodes: &[NodeRate]) {
        self.encode_link_rates.clear();
        for node in nodes {
            for (side, rate) in [("up", node.up), ("down", node.down)] {
                if let Some(rate) = rate {
                    let labels = LinkLabels {
                        node: node.node.to_string(),
                        side: side.into(),
                    };
                    let rate = i64::try_from(rate.bytes_per_s).unwrap_or(i64::MAX);
                    self.encode_link_rates.get_or_create(&labels).set(rate);
                }
            }
        }
        let slow = nodes.iter().filter(|node| node.is_slow()).count();
        self.encode_slow_nodes.set(slow as i64);
    }

    /// A node was named for wrong bytes.
    pub fn observe_wrong_bytes(&self, node: &NodeName) {
        let node = node.to_string();
        self.encode_wrong_bytes
            .get_or_create(&NodeLabel { node })
            .inc();
    }

    /// A lane led here is protected.
    pub fn observe_lane(&self, elapsed_ms: u64) {
        self.encode_lane_seconds.observe(elapsed_ms as f64 / 1000.0);
    }

    /// A peer was silent for so long.
    pub fn observe_detection(&self, silent: Duration) {
        self.restore_detection.observe(silent.as_secs_f64());
    }

    /// A plan was made.
    pub fn observe_restore_plan(&self, took: Duration) {
        self.restore_plan.observe(took.as_secs_f64());
    }

    /// A shard is there.
    pub fn observe_restore_open(&self, rung: Rung, took: Duration) {
        let opened = self.restore_open.get_or_create(&source_label(rung));
        opened.observe(took.as_secs_f64());
    }

    /// A shard was read and closed.
    pub fn observe_restore_read(&self, rung: Rung, took: Duration) {
        let read = self.restore_read.get_or_create(&source_label(rung));
        read.observe(took.as_secs_f64());
    }

    /// A lost block is back.
    pub fn observe_healed(&self) {
        self.place_healed.inc();
    }

    /// Somebody broke the rules.
    pub fn observe_peer_fault(&self) {
        self.place_peer_faults.inc();
    }

    /// This process was stopped and goes on.
    pub fn observe_stop(&self) {
        self.place_stops.inc();
    }

    /// A peer said what cannot be so.
    pub fn observe_false_statement(&self, node: &NodeName) {
        let node = node.to_string();
        self.place_false_statements
            .get_or_create(&NodeLabel { node })
            .inc();
    }

    /// The durable tier answers, or no longer does.
    pub fn observe_tier(&self, fault: Option<&storaged_core::DurableFault>) {
        self.trickle_tier_up.set(i64::from(fault.is_none()));
    }

    /// A checkpoint in the durable tier proved damaged.
    pub fn observe_quarantine(&self) {
        self.trickle_quarantined.inc();
    }

    /// What nodes have read for one another in the durable tier.
    pub fn observe_passed_on(&self, bytes: PassedOn) {
        self.trickle_got.inner().store(bytes.got, Ordering::Relaxed);
        self.trickle_given
            .inner()
            .store(bytes.given, Ordering::Relaxed);
    }

    /// A copy to the durable tier ended.
    pub fn observe_upload(&self, outcome: &Result<Copied, storaged_core::DurableFault>) {
        let Ok(copied) = outcome else {
            self.trickle_failures.inc();
            return;
        };
        self.trickle_uploads.inc();
        self.trickle_bytes.inc_by(copied.bytes);
        self.trickle_stored_bytes.inc_by(copied.stored);
        let Some(increment) = &copied.increment else {
            return;
        };
        self.trickle_increments.inc();
        for (kind, tally) in &increment.tallies {
            self.trickle_records
                .get_or_create(&kind_label(kind.name()))
                .inc_by(tally.chunks);
            self.trickle_expected_bytes
                .inc_by(tally.expected.bytes as u64);
            self.trickle_record_bytes.inc_by(tally.got.bytes as u64);
            self.trickle_expected_seconds.inc_by(tally.expected.seconds);
            self.trickle_record_seconds.inc_by(tally.got.seconds);
        }
    }

    /// What the executor has in its hands now, and the most blocks that it had.
    pub fn observe_in_flight(&self, stripes: usize, blocks: usize, blocks_most: usize) {
        self.encode_stripes_in_flight.set(gauge(stripes as u64));
        self.encode_blocks_in_flight.set(gauge(blocks as u64));
        self.encode_blocks_in_flight_most
            .set(gauge(blocks_most as u64));
    }

    /// Repairs have waited so long beside saves till now.
    pub fn observe_repairs_held(&self, held: Duration) {
        let seconds = held.as_secs_f64().to_bits();
        self.encode_repair_held
            .inner()
            .store(seconds, Ordering::Relaxed);
    }

    /// A request of a HyperPod client was answered with this status.
    pub fn observe_hyperpod(&self, status: u16) {
        let [ok, refused, failed] = HYPERPOD_KINDS;
        let kind = match status {
            ..400 => ok,
            400..500 => refused,
            500.. => failed,
        };
        self.hyperpod_requests
            .get_or_create(&kind_label(kind))
            .inc();
    }

    /// A shard came in over HTTP.
    pub fn observe_hyperpod_received(&self, bytes: u64) {
        self.hyperpod_received.inc_by(bytes);
    }

    /// A shard goes out over HTTP.
    pub fn observe_hyperpod_sent(&self, bytes: u64) {
        self.hyperpod_sent.inc_by(bytes);
    }

    /// What the ledger says now.
    pub fn observe_ledger(&self, ledger: &storaged_core::Ledger, spare: u64, peers_up: usize) {
        self.memory_unchecked_slots
            .set(gauge(ledger.unchecked_slots as u64));
        self.memory_used_bytes.set(gauge(ledger.used));
        self.memory_budget_bytes.set(gauge(ledger.total));
        self.memory_records_bytes.set(gauge(ledger.records));
        self.memory_spare_bytes.set(gauge(spare));
        self.sessions.set(gauge(ledger.sessions as u64));
        self.place_peers_up.set(gauge(peers_up as u64));
    }

    /// A piece of RAM was read again, in this time of one thread.
    pub fn observe_scrubbed(&self, bytes: u64, took: Duration) {
        self.scrub_bytes.inc_by(bytes);
        self.scrub_seconds.inc_by(took.as_secs_f64());
    }

    /// So many chunks had rotted.
    pub fn observe_rotten(&self, chunks: u64) {
        self.scrub_rotten_chunks.inc_by(chunks);
    }

    /// Within so long all of RAM was read again.
    pub fn observe_scrub_age(&self, age: Duration) {
        self.scrub_age_seconds.set(age.as_secs_f64());
    }

    /// So many pages have failed since the daemon started; whether these are more than was said last.
    pub fn observe_pages_lost(&self, pages: u64) -> bool {
        self.memory_pages_lost.set(gauge(pages)) < gauge(pages)
    }

    /// So much memory would end with this daemon.
    pub fn observe_unheld(&self, descriptors: usize) {
        self.memory_unheld.set(gauge(descriptors as u64));
    }

    /// What is known of the holder; none where none is told of.
    pub fn observe_holder(&self, report: Option<HolderReport>) {
        let lacks = matches!(report, Some(HolderReport::Lacks { .. }));
        self.memory_holder_lacks.set(i64::from(lacks));
        let has_all = report == Some(HolderReport::HasAll);
        self.memory_at_holder.set(i64::from(has_all));
    }

    /// Bytes of slots and parity, as the ledger said last.
    pub fn memory_used(&self) -> u64 {
        u64::try_from(self.memory_used_bytes.get()).unwrap_or(0)
    }

    /// All of them, as Prometheus reads them.
    pub fn text(&self) -> String {
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(_) => unreachable!("writing to a string cannot fail"),
        }
    }
}

/// From a quarter of a beat of the links to a minute.
fn detection_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.125, 2.0, 10))
}

/// From a millisecond to an hour.
fn restore_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 4.0, 12))
}

fn lane_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

fn state_label(state: &str) -> StateLabel {
    let state = state.into();
    StateLabel { state }
}

fn kind_label(kind: &str) -> KindLabel {
    let kind = kind.into();
    KindLabel { kind }
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
