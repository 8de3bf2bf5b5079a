//! What a start makes of the configuration: the decisions' setup, the own certificate, the links.

use std::collections::BTreeSet;
use std::sync::Arc;

use storaged_core::limits::{NEAR_NODES_MAX, WATCHED_NODES_MAX, WATCHERS};
use storaged_core::{DurableForm, RunAuthority, Setup};
use storaged_plan::Member;
use storaged_wire::{Generation, Geometry, NodeName};
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
/// a place shares no group with the dead one more often than not; of a larger one those that share a coding group with it, and the first in
/// order, which give places up.
pub(super) fn near(
    members: &[Member],
    geometry: Option<Geometry>,
    own: &NodeName,
) -> BTreeSet<NodeName> {
    let first = if members.len() <= WATCHED_NODES_MAX {
        &members[..members.len().min(WATCHERS)]
    } else {
        &[]
    };
    let is_first = first.iter().any(|member| member.name == *own);
    if members.len() <= NEAR_NODES_MAX || is_first {
        let others = members.iter().map(|member| &member.name);
        return others.filter(|name| *name != own).cloned().collect();
    }
    let groups = geometry.and_then(|it| storaged_plan::groups(members, it).ok());
    let mut near = storaged_plan::group_peers(&groups.unwrap_or_default(), own);
    near.extend(first.iter().map(|member| member.name.clone()));
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
        near: near(&config.members, config.geometry, &config.name),
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
    use super::*;

    fn members(count: usize) -> Vec<Member> {
        let member = |number: usize| Member {
            name: NodeName::new(format!("n{number:04}")).expect("a name"),
            failure_domain: format!("rack-{number}"),
            cordon: Default::default(),
            seat: None,
        };
        (0..count).map(member).collect()
    }

    /// Those that are near to the node of a place.
    fn near_to(place: usize, nodes: usize, geometry: Option<Geometry>) -> BTreeSet<NodeName> {
        let members = members(nodes);
        let own = &members[place].name;
        let near = near(&members, geometry, own);
        assert!(!near.contains(own));
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
        let group = near_to(NEAR_NODES_MAX, NEAR_NODES_MAX + 1, geometry).len();
        assert!((9..30).contains(&group), "{group}");
    }

    /// Else a node that shares no group with them would be missed 6 s after its death, and replaced so much later.
    #[test]
    fn who_gives_places_up_is_near_to_all_nodes_of_a_large_cluster_too() {
        for nodes in [NEAR_NODES_MAX + 1, WATCHED_NODES_MAX] {
            let watchers: BTreeSet<_> = (0..WATCHERS)
                .map(|place| {
                    assert_eq!(near_to(place, nodes, None).len(), nodes - 1);
                    members(nodes)[place].name.clone()
                })
                .collect();
            assert_eq!(near_to(nodes - 1, nodes, None), watchers);
        }
        assert_eq!(near_to(0, WATCHED_NODES_MAX + 1, None).len(), 0);
    }
}
