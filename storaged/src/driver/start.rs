//! What a start makes of the configuration: the decisions' setup, the own certificate, the links.

use std::collections::BTreeSet;
use std::sync::Arc;

use storaged_core::limits::NEAR_NODES_MAX;
use storaged_core::{DurableForm, RunAuthority, Setup};
use storaged_wire::{Generation, NodeName};
use tokio::sync::{mpsc, watch};

use super::StartError;
use super::certificate::OwnCertificate;
use super::watch::{WatchedFiles, watch_files};
use crate::config::Config;
use crate::encode::{Executor, ExecutorLimits, NoStreams, Pool, QuicStreams, Streams};
use crate::env::Environment;
use crate::http::OpsState;
use crate::hyperpod;
use crate::memory::Memory;
use crate::net::{LINK_VERSIONS, Net, NetConfig, NetError, NetEvent, TlsIdentity};
use crate::stage::StageEvent;

pub(super) fn setup(config: &Config, generation: Generation) -> Setup {
    Setup {
        name: config.name.clone(),
        generation,
        members: config.members.clone(),
        epoch: config.epoch,
        geometry: config.geometry,
        chunk: config.chunk,
        slots_per_rank: config.slots_per_rank,
        keep_steps: config.keep_steps,
        budget: config.budget,
        shares: config.shares.of_node.clone(),
        idle_job_ms: config.idle_job_ms,
        scrub_period_ms: config.scrub.period_ms,
        link_rates: config.link_rates.clone(),
        durable: config.durable_policy,
        messages: storaged_core::MessageLimits::default(),
        runs_without_tier: config.runs_without_tier,
        run_authority: (config.membership.as_ref())
            .map_or(RunAuthority::Members, |membership| membership.runs),
        durable_form: match config.trickle.increments {
            0 => DurableForm::Full,
            _ => DurableForm::Increments,
        },
    }
}

/// Its dates, if there are links.
pub(super) fn own_certificate(config: &Config) -> Result<Option<OwnCertificate>, NetError> {
    let Some(files) = &config.tls else {
        return Ok(None);
    };
    let identity = TlsIdentity::load(files)?;
    Ok(Some(OwnCertificate::new(identity.validity()?)))
}

/// HTTP for HyperPod's clients, if it is configured.
pub(super) async fn start_hyperpod(
    config: &Config,
    events: &mpsc::Sender<StageEvent>,
    ops: &Arc<OpsState>,
) -> Result<(), StartError> {
    let Some(section) = &config.hyperpod else {
        return Ok(());
    };
    let started = async {
        let token = section.token().map_err(std::io::Error::other)?;
        let settings = hyperpod::Settings::of(config, section, token);
        hyperpod::start(settings, events.clone(), ops.clone()).await
    };
    let what = "the HTTP for HyperPod's clients";
    let bound = (started.await).map_err(|source| StartError::Start { what, source })?;
    tracing::info!(listen = %bound, token = section.token_file.is_some(), "HTTP for HyperPod's clients");
    Ok(())
}

/// Watches the files of certificates, if they are to be.
pub(super) fn watch_certificates(config: &Config) -> WatchedFiles {
    let (watched, files) = watch::channel(config.tls.clone());
    let (changed, changes) = mpsc::channel(1);
    if let (Some(every), Some(_)) = (config.tls_watch, &config.tls) {
        tokio::spawn(watch_files(files, every, changed));
    }
    WatchedFiles {
        in_use: watched,
        changes,
    }
}

/// Those whose death a node must know of as soon as can be: all others of a small cluster, where whoever says what a step bears or gives up
/// a place shares no group with the dead one more often than not; of a larger one those that share a coding group with it, and whoever gives
/// places up.
pub(super) fn near(config: &Config) -> BTreeSet<NodeName> {
    let watchers = config.watchers();
    let members = &config.members;
    if members.len() <= NEAR_NODES_MAX || watchers.contains(&config.name) {
        let others = members.iter().map(|member| &member.name);
        return others
            .filter(|name| **name != config.name)
            .cloned()
            .collect();
    }
    let groups = config.geometry;
    let groups = groups.and_then(|it| storaged_plan::groups(members, it).ok());
    let mut near = storaged_plan::group_peers(&groups.unwrap_or_default(), &config.name);
    near.extend(watchers);
    near
}

/// What runs sessions here; without links it has no streams.
pub(super) fn start_executor(
    config: &Config,
    net: Option<&Arc<Net>>,
    memory: &Arc<Memory>,
    pool: &Pool,
) -> Arc<Executor> {
    let streams: Arc<dyn Streams> = match net {
        Some(net) => Arc::new(QuicStreams::new(net.clone())),
        None => Arc::new(NoStreams),
    };
    let limits = ExecutorLimits {
        repair_rate: config.repair_rate,
        ..ExecutorLimits::default()
    };
    Arc::new(Executor::new(streams, memory.clone(), pool.clone(), limits))
}

pub(super) async fn start_net(
    config: &Config,
    env: &Environment,
    generation: Generation,
    events: mpsc::Sender<NetEvent>,
) -> Result<Option<Arc<Net>>, StartError> {
    let Some(files) = &config.tls else {
        return Ok(None);
    };
    let identity = TlsIdentity::load(files).map_err(NetError::from)?;
    let mut seed = [0; 32];
    for part in seed.chunks_mut(8) {
        part.copy_from_slice(&env.entropy.next().to_le_bytes());
    }
    let net_config = NetConfig {
        place: config.name.clone(),
        node: config.node.clone(),
        generation,
        listen: config.listen,
        trunks: config.network.trunks.clone(),
        identity,
        peers: config.peers.clone(),
        near: near(config),
        agreement: config.agreement(),
        versions: LINK_VERSIONS,
        sockets: env.sockets.clone(),
        seed: Some(seed),
    };
    let started = env.net_runtime.spawn(Net::start(net_config, events)).await;
    let started = started.map_err(|error| StartError::Start {
        what: "the network's runtime",
        source: std::io::Error::other(error),
    })?;
    Ok(Some(started?))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use storaged_core::limits::{WATCHED_NODES_MAX, WATCHERS};
    use storaged_plan::Member;
    use storaged_wire::Geometry;

    use super::*;
    use crate::config::ConfigFile;
    use crate::net::Peer;

    /// A node of a cluster of so many: by its place, where they are in a registry.
    fn config(own: usize, count: usize, geometry: Option<Geometry>) -> Config {
        let file = toml::from_str::<ConfigFile>("").expect("a file");
        let mut config = file.validate().expect("a configuration");
        config.cluster = Some("c".into());
        config.geometry = geometry;
        config.name = name(own);
        let others = (0..count).filter(|number| *number != own);
        let peer = |number| Peer::named(name(number), SocketAddr::from(([127, 0, 0, 1], 9)));
        config.peers = others.map(peer).collect();
        config.members = (0..count).map(member).collect();
        config
    }

    fn name(number: usize) -> NodeName {
        NodeName::new(format!("n{number:04}")).expect("a name")
    }

    fn member(number: usize) -> Member {
        Member {
            name: name(number),
            failure_domain: format!("rack-{number}"),
            cordon: Default::default(),
            seat: None,
        }
    }

    fn near_to(own: usize, count: usize, geometry: Option<Geometry>) -> BTreeSet<NodeName> {
        let near = near(&config(own, count, geometry));
        assert!(!near.contains(&name(own)));
        near
    }

    /// Also where nothing is coded: a place is given up by nodes of all groups.
    #[test]
    fn all_nodes_of_a_small_cluster_are_near_and_of_a_large_one_those_of_a_group() {
        let geometry = Some(Geometry::new(8, 2).expect("a code"));
        for geometry in [None, geometry] {
            assert_eq!(near_to(0, 1, geometry).len(), 0);
            let all = near_to(NEAR_NODES_MAX - 1, NEAR_NODES_MAX, geometry);
            assert_eq!(all.len(), NEAR_NODES_MAX - 1);
        }
        let group = near_to(WATCHERS, NEAR_NODES_MAX + 1, geometry).len();
        assert!((9..30).contains(&group), "{group}");
    }

    /// Else a node that shares no group with them would be missed 6 s after its death, and replaced so much later.
    #[test]
    fn who_gives_places_up_is_near_to_all_nodes_of_a_large_cluster_too() {
        for count in [NEAR_NODES_MAX + 1, WATCHED_NODES_MAX] {
            for own in 0..WATCHERS {
                assert_eq!(near_to(own, count, None).len(), count - 1);
            }
            let watchers: BTreeSet<_> = (0..WATCHERS).map(name).collect();
            assert_eq!(near_to(count - 1, count, None), watchers);
        }
        assert_eq!(near_to(0, WATCHED_NODES_MAX + 1, None).len(), 0);
        // Nobody has the first place.
        let count = NEAR_NODES_MAX + 1;
        let mut config = config(2, count, None);
        config.peers.retain(|peer| peer.name != name(0));
        assert_eq!(near(&config).len(), count - 1);
    }

    /// There each node is the first in its own list, and nobody gives a place up.
    #[test]
    fn where_files_say_who_is_there_nobody_watches_all_of_a_large_cluster() {
        let mut config = config(0, NEAR_NODES_MAX + 1, None);
        config.cluster = None;
        assert_eq!(near(&config).len(), 0);
    }
}
