//! What every store of numbered records must do, clusters whose nodes are agreed on in one, and certificates for those that speak TLS.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use storaged::membership::{Arrival, Arrived, NumberedRecords, Proposal, Registry, Roster};
use storaged_core::Registration;
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, Namespace, NodeName, RunId};

use crate::system::{System, shards, wait, write_secret};

/// A record.
pub fn record(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

/// Many create each epoch, each over a connection of its own: one comes first, and all read its record.
///
/// # Errors
/// If it is not so.
pub async fn one_of_many_comes_first(
    open: impl Fn() -> Result<Arc<dyn NumberedRecords>>,
) -> Result<()> {
    for epoch in 1..=20 {
        let mut racing = Vec::new();
        for writer in 0..8 {
            let records = open()?;
            racing.push(tokio::spawn(async move {
                let own = record(&format!("{epoch} of {writer}"));
                let created = records.create(epoch, own.clone()).await?;
                anyhow::Ok((created, own))
            }));
        }
        let mut first = Vec::new();
        for one in racing {
            let (created, own) = one.await??;
            first.extend((created == Proposal::Taken).then_some(own));
        }
        ensure!(first.len() == 1, "epoch {epoch}: {first:?}");
        let records = open()?;
        let found = records.record(epoch).await?.context("the record")?;
        ensure!(found.bytes == first[0]);
        ensure!(records.newest().await? == Some(found));
        // Whoever has not heard the answer tries again.
        ensure!(records.create(epoch, first[0].clone()).await? == Proposal::Taken);
        ensure!(records.record(epoch + 1).await?.is_none());
    }
    Ok(())
}

/// A roster of 20,000 places is far above what most stores take in one request.
///
/// # Errors
/// If it does not come back.
pub async fn the_largest_roster_fits(records: Arc<dyn NumberedRecords>) -> Result<()> {
    let registry = Registry::new(records);
    let mut roster = Roster::empty("large".into(), 20_000);
    for number in 0..20_000 {
        let arrival = Arrival {
            node: NodeName::new(format!("node-{number:05}"))?,
            address: format!("10.{}.{}.1:9300", number / 250, number % 250).parse()?,
            failure_domain: Some(format!("rack-{}", number / 40)),
        };
        roster.arriving.push(arrival);
    }
    let last = roster.arriving.pop().context("the last")?;
    let Arrived::Propose(full) = roster.arrive(&last) else {
        anyhow::bail!("the last gives all their places");
    };
    ensure!(full.places.len() == 20_000 && full.bytes().len() > 3 << 20);
    ensure!(registry.propose(&full).await? == Proposal::Taken);
    ensure!(registry.newest().await?.as_ref() == Some(&*full));
    Ok(())
}

/// Numbers of runs leave gaps, and none is given below one that is there.
///
/// # Errors
/// If one is.
pub async fn no_run_gets_a_number_below_the_newest(
    records: Arc<dyn NumberedRecords>,
) -> Result<()> {
    let registry = Registry::new(records);
    let first = Roster::empty("c".into(), 1);
    let roster = Roster { epoch: 1, ..first };
    ensure!(registry.propose(&roster).await? == Proposal::Taken);
    for name in ["job", "tenant~job", "a.very_long-name-of-a-job.0123456789"] {
        let job = Namespace::new(name)?;
        let register = async |number, identity| {
            let run = RunId::with_identity(number, identity);
            registry.register_run(&roster, &job, run).await
        };
        for number in [1, 9, 300] {
            ensure!(register(number, 7).await? == Registration::Registered);
            ensure!(register(number, 7).await? == Registration::Registered);
            let highest = number;
            ensure!(register(number, 8).await? == Registration::Taken { highest });
            ensure!(register(1, 9).await? == Registration::Taken { highest });
        }
    }
    Ok(())
}

/// A cluster, (2,1), and who fills its places as the registry has it.
pub struct Nodes {
    /// Its nodes.
    pub system: System,
    registry: Registry,
    runtime: tokio::runtime::Runtime,
}

impl Nodes {
    /// So many, whose files name this registry; none of them runs yet.
    ///
    /// # Errors
    /// If their files cannot be written.
    pub fn with_registry(
        named: &str,
        records: Arc<dyn NumberedRecords>,
        nodes: usize,
        places: usize,
        extra: &str,
    ) -> Result<Self> {
        Ok(Self {
            system: System::with_registry_in(named, nodes, places, Some((2, 1)), extra)?,
            registry: Registry::new(records),
            runtime: tokio::runtime::Runtime::new()?,
        })
    }

    /// Starts daemons.
    ///
    /// # Errors
    /// If it is not so in time.
    pub fn start(&mut self, nodes: impl IntoIterator<Item = usize>) -> Result<()> {
        for node in nodes {
            self.system.cluster.start(node)?;
        }
        Ok(())
    }

    /// Waits until these see so many peers.
    ///
    /// # Errors
    /// If it is not so in time.
    pub fn linked(&self, nodes: impl IntoIterator<Item = usize>, peers: usize) -> Result<()> {
        for node in nodes {
            self.system.cluster.wait_for_peers(node, peers)?;
        }
        Ok(())
    }

    /// Who fills the places, in their order.
    ///
    /// # Errors
    /// If it is not so in time.
    pub fn filled(&self) -> Result<Vec<String>> {
        let newest = self.runtime.block_on(self.registry.newest())?;
        let places = newest.context("a roster")?.places.into_iter();
        Ok(places
            .map(|it| it.node.map_or("-".into(), |node| node.to_string()))
            .collect())
    }

    /// Waits until one of these nodes fills the last place; which.
    ///
    /// # Errors
    /// If it is not so in time.
    pub fn last_is_one_of(&self, spares: &[usize]) -> Result<usize> {
        wait("a spare in the last place", || {
            let filled = self.filled()?;
            let mut spares = spares.iter().copied();
            let found = spares.find(|node| filled.last() == Some(&format!("n{node}")));
            found.with_context(|| format!("{filled:?}"))
        })
    }

    /// Saves a step and waits until it is protected.
    ///
    /// # Errors
    /// If it is not so in time.
    pub fn save(&self, run: RunId, trainers: &mut [Trainer], step: u64) -> Result<()> {
        self.system
            .save(trainers, step, &shards(2, step), DurableWish::Never)?;
        self.system.wait(0, run, step, CheckpointState::Protected)
    }
}

/// Writes an authority, and what it has signed for `localhost`, into a folder.
///
/// # Errors
/// If they cannot be written.
pub fn write_certificates(folder: &Path) -> Result<()> {
    let (authority, own) = (KeyPair::generate()?, KeyPair::generate()?);
    let mut of_authority = CertificateParams::new(Vec::new())?;
    of_authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let signed = of_authority.self_signed(&authority)?;
    std::fs::write(folder.join("ca.pem"), signed.pem())?;
    let mut of_host = CertificateParams::new(vec!["localhost".to_owned()])?;
    of_host.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let signed = of_host.signed_by(&own, &Issuer::new(of_authority, authority))?;
    std::fs::write(folder.join("localhost.pem"), signed.pem())?;
    write_secret(&folder.join("localhost.key"), &own.serialize_pem())
}
