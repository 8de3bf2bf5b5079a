//! How a node of a cluster with a registry comes to its place, and `storaged node`, which shows the roster and changes it.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Subcommand};
use storaged_plan::Cordon;
use storaged_wire::NodeName;
use tokio::sync::{Notify, mpsc, watch};

use super::{CliError, print};
use crate::config::{Config, ConfigFile, MembershipConfig, RegistryConfig};
use crate::driver::{Members, chain, open_stage, serve_operator};
use crate::env::Environment;
use crate::keep::{DescriptorStore, KeptName};
use crate::membership::{
    Arrived, ChangeError, Comeback, Cordoning, Dialled, Entered, Entering, EtcdRecords, Following,
    KubernetesRecords, NumberedRecords, ObjectRecords, Place, Proposal, Registry, RegistryError,
    Remembered, Roster, Sight, Waits, enter as enter_roster, follow,
};
use crate::trickle::store::{self, SystemRandomness};
use crate::waiting_room::{Drained, WaitingRoom};

/// Changes of the roster that wait for the driver.
const QUEUE: usize = 16;
/// A change that others outrun is tried again so often.
const TRIES_MAX: usize = 20;

/// `storaged node`
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// List the places of the cluster and the nodes that fill them
    Ls(PlacesArgs),
    /// Give the place of a node to the next spare, now; ask `storaged restart-safe` on the node first
    Replace(PlaceArgs),
    /// Take a place away: new checkpoints are coded by the others; what only its node holds is gone
    Remove(PlaceArgs),
    /// Let a node that was replaced or removed have a place again
    Admit(NodeArgs),
    /// Give a node nothing new where others do: no parity, no place; it serves and repairs what it has
    Cordon(NodeArgs),
    /// Take a cordoned node for one as any other again
    Uncordon(NodeArgs),
    /// Make the groups anew by the failure domains that nodes have now; what changes its group is coded whole once
    Regroup(RegistryArgs),
    /// Say how many places there are to be; machines that come get them once there are as many, or no other has come for 15 s
    Resize(ResizeArgs),
}

/// How to reach the registry.
#[derive(Debug, Args)]
pub struct RegistryArgs {
    /// Configuration file of any node, for its [membership]
    #[arg(long, env = "STORAGED_CONFIG")]
    config: PathBuf,
}

#[derive(Debug, Args)]
pub struct PlacesArgs {
    #[command(flatten)]
    registry: RegistryArgs,
    /// For programs
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct PlaceArgs {
    #[command(flatten)]
    registry: RegistryArgs,
    /// The place, as `storaged node ls` names it
    place: NodeName,
}

#[derive(Debug, Args)]
pub struct NodeArgs {
    #[command(flatten)]
    registry: RegistryArgs,
    /// The node, as in its certificate
    #[arg(env = "STORAGED_NODE")]
    node: NodeName,
}

#[derive(Debug, Args)]
pub struct ResizeArgs {
    #[command(flatten)]
    registry: RegistryArgs,
    /// So many places
    size: usize,
}

fn registry_of(membership: &MembershipConfig) -> Result<Registry, RegistryError> {
    let records: Arc<dyn NumberedRecords> = match &membership.registry {
        RegistryConfig::Objects(config) => {
            let store = store::open_lazily(config, Arc::new(SystemRandomness));
            Arc::new(ObjectRecords::new(Arc::new(
                store.map_err(RegistryError::Store)?,
            )))
        }
        RegistryConfig::Etcd(config) => Arc::new(EtcdRecords::open(config)?),
        RegistryConfig::Kubernetes(config) => Arc::new(KubernetesRecords::open(config)?),
    };
    Ok(Registry::new(records).of_cluster(membership.cluster.clone()))
}

/// How a node comes by its place.
#[derive(Debug)]
pub(super) enum PlaceFound {
    /// It has one, in this roster.
    Placed(Roster),
    /// An operator has drained it before, and nothing is lost with it.
    Drained,
}

/// Waits for this node's place, with the operator's pages up meanwhile, and begins to follow the roster.
pub(super) async fn enter(
    config: &mut Config,
    env: &mut Environment,
) -> Result<PlaceFound, CliError> {
    let Some(membership) = config.membership.clone() else {
        return Err(CliError::Usage("expected [membership], got none".into()));
    };
    let mut room = WaitingRoom::open(
        config.node.clone(),
        open_stage(config)?,
        serve_operator(config).await?,
    );
    let sign = room.sign();
    let registry = registry_of(&membership)?;
    let remembered = Remembered::at(membership.remembered.clone());
    let cluster = membership.first_name(env.entropy.next());
    let entering = Entering {
        registry: registry.clone(),
        arrival: membership.arrival.clone(),
        first: Roster::empty(cluster, membership.size),
        poll: membership.poll,
        remembered: remembered.read(),
        memory: Some(remembered.clone()),
        geometry: config.geometry,
        presence: Arc::new(Dialled {
            tls: config.tls.clone(),
        }),
    };
    let (inherited, descriptors) = (&mut env.inherited, &env.descriptors);
    let entered = enter_roster(&entering, |waits| {
        tracing::info!(reason = %waits, "no place yet");
        if let Waits::AsSpare { .. } | Waits::Cordoned { .. } | Waits::ForAdmission { .. } = waits {
            let_go(std::mem::take(inherited), descriptors);
        }
        sign.say(waits);
    });
    let Entered { roster, place } = match room.answer_until(entered).await {
        Ok(entered) => entered?,
        Err(Drained { left }) if left.is_empty() => return Ok(PlaceFound::Drained),
        Err(Drained { left }) => return Err(CliError::LeftUnfinished(left.join("; "))),
    };
    let filled = roster.place(&place).cloned();
    let filled = filled.ok_or_else(|| CliError::Unexpected("a place without a record".into()))?;
    config.take_roster(&roster, &filled)?;
    let (changes, received) = mpsc::channel(QUEUE);
    let for_runs = registry.clone();
    let (sight, seen) = watch::channel(Sight::default());
    let (news, going) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let following = Following {
        registry,
        arrival: membership.arrival,
        place,
        roster: roster.clone(),
        geometry: config.geometry,
        poll: membership.poll,
        replace_after: membership.replace_after,
        is_news: false,
        passed: Vec::new(),
        is_doubtful: false,
        news: news.clone(),
        going: going.clone(),
        is_going: false,
    };
    tokio::spawn(follow(following, seen, changes));
    let (stage, ops) = room.leave();
    (env.stage, env.ops) = (Some(stage), Some(ops));
    env.members = Some(Members {
        roster: roster.clone(),
        registry: for_runs,
        remembered,
        changes: received,
        sight,
        news,
        going,
    });
    Ok(PlaceFound::Placed(roster))
}

/// What is in a spare's memory belongs to a place that another node has, which has got it from peers: it would be held for nobody.
fn let_go(inherited: Vec<(KeptName, OwnedFd)>, descriptors: &Arc<dyn DescriptorStore>) {
    if !inherited.is_empty() {
        let count = inherited.len();
        tracing::info!(count, "dropped the memory of the place that this node had");
    }
    for (name, descriptor) in inherited {
        descriptors.remove(name);
        drop(descriptor);
    }
    descriptors.remove_unknown();
}

/// What a command asks others with.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, CliError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| CliError::Io {
            what: "starting a runtime",
            source,
        })
}

/// Runs `storaged node`.
pub fn node(command: NodeCommand) -> Result<(), CliError> {
    runtime()?.block_on(async {
        match command {
            NodeCommand::Ls(args) => ls(&args).await,
            NodeCommand::Replace(args) => {
                let why = "the operator replaces it";
                change(&args.registry, |roster| {
                    roster.vacated(&args.place, Comeback::Refused, why)
                })
                .await
            }
            NodeCommand::Admit(args) => {
                change(&args.registry, |roster| roster.admitted(&args.node)).await
            }
            NodeCommand::Cordon(args) => {
                let already = format!("{} is cordoned already", args.node);
                let of = |roster: &Roster, own: &NodeName| roster.cordon(&args.node, own);
                cordon(&args.registry, &already, of).await
            }
            NodeCommand::Uncordon(args) => {
                let already = format!("{} is not cordoned", args.node);
                let of = |roster: &Roster, own: &NodeName| roster.uncordon(&args.node, own);
                cordon(&args.registry, &already, of).await
            }
            NodeCommand::Remove(args) => {
                change(&args.registry, |roster| roster.removed(&args.place)).await
            }
            NodeCommand::Regroup(registry) => {
                let already = "the groups are as they would be made anew";
                let geometry = open(&registry)?.0.geometry;
                let geometry = geometry.ok_or_else(|| {
                    CliError::Usage(
                        "expected [coding] in the configuration, got none: nothing is grouped"
                            .into(),
                    )
                })?;
                let of = |roster: &Roster, _: &NodeName| Ok(roster.grouped_anew(geometry));
                cordon(&registry, already, of).await
            }
            NodeCommand::Resize(args) => {
                change(&args.registry, |roster| roster.resized(args.size)).await
            }
        }
    })
}

/// The registry of a configuration file, and the rest of it.
fn open(args: &RegistryArgs) -> Result<(Config, Registry), CliError> {
    let config = ConfigFile::load(&args.config)?.validate()?;
    let Some(membership) = &config.membership else {
        return Err(CliError::Usage(format!(
            "expected [membership] in {}, got none: the nodes of such a cluster are listed in [[peers]] of every file",
            args.config.display()
        )));
    };
    let registry = registry_of(membership)?;
    Ok((config, registry))
}

async fn newest(registry: &Registry) -> Result<Roster, CliError> {
    let newest = registry.newest().await?;
    newest.ok_or_else(|| {
        CliError::Unexpected(
            "the registry is empty: no node of this cluster has started yet".into(),
        )
    })
}

fn line(roster: &Roster, place: &Place) -> String {
    let node = place.node.as_ref().map_or("-", |node| node.as_str());
    let domain = place.failure_domain.as_deref().unwrap_or("-");
    let (name, address) = (place.name.as_str(), place.address.to_string());
    let cordoned = match roster.cordon_of(place) {
        Cordon::Open => "",
        Cordon::Cordoned => "  (cordoned)",
    };
    format!("{name:<20} {node:<20} {address:<22} {domain}{cordoned}")
}

async fn ls(args: &PlacesArgs) -> Result<(), CliError> {
    let (config, registry) = open(&args.registry)?;
    let roster = newest(&registry).await?;
    if args.json {
        print(&String::from_utf8_lossy(&roster.bytes()));
        return Ok(());
    }
    let Roster { epoch, size, .. } = &roster;
    let mut lines = vec![
        format!(
            "cluster {}, epoch {epoch}, {} of {size} places: {}",
            roster.cluster,
            roster.places.len(),
            roster.change
        ),
        format!(
            "{:<20} {:<20} {:<22} FAILURE DOMAIN",
            "PLACE", "NODE", "ADDRESS"
        ),
    ];
    lines.extend(roster.places.iter().map(|place| line(&roster, place)));
    lines.extend(domains_told(&config, &roster));
    let waiting = roster.arriving.iter();
    lines.extend(waiting.map(|it| format!("waiting: {} at {}", it.node, it.address)));
    let filling = |node: &&NodeName| roster.filled_by(node).is_some();
    let elsewhere = roster.cordoned.iter().filter(|node| !filling(node));
    lines.extend(elsewhere.map(|node| format!("cordoned, in no place: {node}")));
    lines.extend(without_place(&config, &roster));
    print(&lines.join("\n"));
    Ok(())
}

/// What is lost with a failure domain, and whether groups made anew would lose less.
fn domains_told(config: &Config, roster: &Roster) -> Vec<String> {
    let now = config.domains_told(&roster.members());
    let anew = config.domains_told(&roster.members_without_seats());
    let anew = anew.filter(|anew| now.as_ref() != Some(anew));
    let anew = anew.map(|told| format!("after `storaged node regroup`: {told}"));
    now.into_iter().chain(anew).collect()
}

/// The node of the configuration, where it is in no place: a spare is in no roster.
fn without_place(config: &Config, roster: &Roster) -> Option<String> {
    let (node, arrival) = (&config.node, &config.membership.as_ref()?.arrival);
    match roster.arrive(arrival) {
        Arrived::Spare => Some(format!(
            "{node}: no place; once it runs it is a spare of epoch {}, and takes the next place that gets vacant",
            roster.epoch
        )),
        Arrived::Cordoned => Some(format!(
            "{node}: no place, and cordoned: it takes none (`storaged node uncordon {node}`)"
        )),
        Arrived::Dismissed => Some(format!(
            "{node}: no place; it was replaced or removed (`storaged node admit {node}`)"
        )),
        _ => None,
    }
}

/// Proposes a change of the newest roster, again if somebody else's came first.
async fn change(
    args: &RegistryArgs,
    of: impl Fn(&Roster) -> Result<Roster, ChangeError>,
) -> Result<(), CliError> {
    let changed =
        |before: &Roster, _: &NodeName| of(before).map(|next| Cordoning::Propose(Box::new(next)));
    cordon(args, "", changed).await
}

/// The same of a change that may have been made already, which is said so.
async fn cordon(
    args: &RegistryArgs,
    already: &str,
    of: impl Fn(&Roster, &NodeName) -> Result<Cordoning, ChangeError>,
) -> Result<(), CliError> {
    let (config, registry) = open(args)?;
    for _ in 0..TRIES_MAX {
        let before = newest(&registry).await?;
        let Cordoning::Propose(next) = of(&before, &config.node)? else {
            print(&format!("epoch {}: {already}", before.epoch));
            return Ok(());
        };
        let next = next.seated_after(&before, config.geometry);
        check_groups(&config, &before, &next)?;
        if registry.propose(&next).await? == Proposal::Taken {
            print(&format!("epoch {}: {}", next.epoch, next.change));
            if let Some(expected) = expected_regrouping(&config, &next) {
                print(&expected);
            }
            return Ok(());
        }
    }
    Err(CliError::Unexpected(format!(
        "the roster changed {TRIES_MAX} times meanwhile: try again"
    )))
}

/// What the nodes that have yet to come will change for those that are there.
fn expected_regrouping(config: &Config, roster: &Roster) -> Option<String> {
    let (places, size) = (roster.places.len(), roster.size);
    let more = size
        .checked_sub(places)
        .filter(|more| *more > 0 && places > 0)?;
    let moved = roster.regrouped_by(more, config.geometry?)?;
    Some(format!(
        "once {more} more have come, each in a failure domain of its own, {moved} of the {places} places are coded in other groups than now: \
         the next checkpoint of these is coded whole"
    ))
}

/// A roster that no node could go by is not proposed, unless the one before was no better: then it may be a step on the way out.
fn check_groups(config: &Config, before: &Roster, next: &Roster) -> Result<(), CliError> {
    if before.check_groups(config.geometry).is_err() {
        return Ok(());
    }
    next.check_groups(config.geometry).map_err(|error| {
        CliError::Usage(format!(
            "no new checkpoint could be coded: {}",
            chain(&error)
        ))
    })
}
