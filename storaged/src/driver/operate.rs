//! What the driver does for the operator: events of the network as log lines, the pages, and reloads.

use storaged_core::{EpochMembers, Input, Viewer};
use storaged_wire::peer::PeerMessage;
use storaged_wire::{NodeName, decode};

use super::certificate::{Nearness, OwnCertificate, advice, date, wall_clock};
use super::start::near;
use super::{Daemon, chain};
use crate::config::Config;
use crate::http::RestartAsked;
use crate::keep::{HolderReport, KeptBy};
use crate::net::{Net, NetError, NetEvent, Peer, TlsFiles, TlsIdentity, Whose, advised};

impl Daemon {
    pub(super) fn net_event(&mut self, event: NetEvent) -> Option<Input> {
        match event {
            NetEvent::Up {
                peer,
                generation,
                version,
            } => {
                tracing::info!(%peer, generation = %format!("{:016x}", generation.get()), version, "peer up");
                self.links.up.insert(peer.clone(), version);
                self.links.refused.remove(&peer);
                self.compare(&peer);
                self.tell_sight();
                let node = peer;
                Some(Input::PeerUp { node, generation })
            }
            NetEvent::Down {
                peer,
                reason,
                silent,
            } => {
                if let Some(silent) = silent {
                    self.ops.metrics.observe_detection(silent);
                }
                tracing::info!(%peer, reason, "peer down");
                self.links.up.remove(&peer);
                self.tell_sight();
                Some(Input::PeerDown { node: peer })
            }
            NetEvent::AgreementSaid { peer } => {
                self.compare(&peer);
                None
            }
            NetEvent::Message { from, body, room } => {
                drop(room);
                match decode::<PeerMessage>("peer message", &body) {
                    Ok(message) => Some(Input::Message { from, message }),
                    Err(error) => {
                        self.ops.metrics.observe_peer_fault();
                        tracing::warn!(peer = %from, %error, "a control message could not be read");
                        None
                    }
                }
            }
            NetEvent::Stream { from, record, recv } => {
                self.executor.accept(record, from, Box::new(recv));
                None
            }
            NetEvent::Request { from, body, answer } => {
                self.pass_on(from, body, answer);
                None
            }
            NetEvent::Refused { peer, why } => {
                self.refused(peer, &why);
                None
            }
            NetEvent::Failed(error) => {
                self.may_have_a_place(&error);
                self.connection_failed(&error);
                None
            }
        }
    }

    /// Compares a peer that is linked to with this node, as which it should be configured: told when that changes, not at every link.
    pub(super) fn compare(&mut self, peer: &NodeName) {
        // A link that has gone down meanwhile says nothing: the peer is compared when it is linked to again.
        let Some(advice) = self.net.as_ref().and_then(|net| net.advice(peer)) else {
            return;
        };
        if advice.is_empty() {
            if self.links.differing.remove(peer).is_some() {
                tracing::info!(%peer, "a peer is configured as this node again");
            }
            return;
        }
        let told = advised(peer, &advice);
        let before = self.links.differing.insert(peer.clone(), told.clone());
        if before.as_ref() != Some(&told) {
            tracing::warn!(%peer, told, "a peer should be configured as this node");
        }
    }

    /// A peer that is there and cannot be linked to: told when it begins or its reason changes, not at every dial.
    fn refused(&mut self, peer: NodeName, why: &NetError) {
        let reason = chain(why);
        let before = self.links.refused.insert(peer.clone(), reason.clone());
        if before.as_ref() == Some(&reason) {
            return;
        }
        let is_theirs = matches!(
            why,
            NetError::PeerCertificate { .. }
                | NetError::Authority {
                    whose: Whose::Theirs,
                    ..
                }
        );
        if is_theirs {
            self.ops.metrics.observe_peer_fault();
        }
        tracing::warn!(%peer, reason, "not linked to a peer");
    }

    /// A connection that only ended is no fault: every restart of a peer ends some.
    fn connection_failed(&mut self, error: &NetError) {
        let told = chain(error);
        if let NetError::Connection { .. } = error {
            tracing::debug!(error = told, "a connection ended");
            return;
        }
        if let NetError::Lost { peer, .. } = error {
            if let Some(silent) = self.repeats.tell(&told, self.clock.now()) {
                tracing::info!(peer, error = told, silent, "link lost");
            }
            return;
        }
        let is_ours = matches!(
            error,
            NetError::OwnCertificate { .. }
                | NetError::Authority {
                    whose: Whose::Ours,
                    ..
                }
        );
        if !is_ours {
            self.ops.metrics.observe_peer_fault();
        }
        if let Some(silent) = self.repeats.tell(&told, self.clock.now()) {
            tracing::warn!(error = told, silent, "a connection was refused");
        }
    }

    /// Whether this node may be restarted now, as `storaged restart-safe` says it.
    pub(super) fn restart_asked(&self, asked: RestartAsked) -> Option<Input> {
        let objections = self
            .node
            .restart_objections(asked.bears, &self.config.ops_viewer);
        // Whoever asked may have gone.
        let _ = asked.answer.send(objections);
        None
    }

    /// Brings the operator's pages up to date.
    pub(super) fn show(&mut self) {
        self.look_at_certificate();
        // Without a journal the next daemon lets go of whatever is held.
        let journal = self.journal.as_ref();
        self.links.kept_by = journal.map_or(KeptBy::Nobody, |_| self.memory.kept_by());
        self.links.unheld = self.memory.missing_in_store();
        let (status, reasons) = self
            .links
            .complete(&self.node.status_json(&self.config.ops_viewer));
        let metrics = &self.ops.metrics;
        metrics.observe_ledger(
            &self.node.ledger(),
            self.memory.spare_bytes(),
            self.links.up.len(),
        );
        self.show_scrub();
        let unheld = self.links.unheld;
        metrics.observe_unheld(unheld);
        // The holder has all that the keeper has, and that is not all.
        let holder = self.links.kept_by.holder();
        metrics.observe_holder(holder.filter(|it| unheld == 0 || *it != HolderReport::HasAll));
        let lost = self.memory.lost();
        if metrics.observe_pages_lost(lost) {
            tracing::warn!(
                lost,
                "memory of slots or parity has failed: the system could not give all of it, what is missing counts as rotten"
            );
        }
        if let Some(net) = &self.net {
            metrics.observe_connections(net.connections());
            metrics.observe_trunks(net.trunks());
        }
        if let Some(trickle) = &self.trickle {
            metrics.observe_passed_on(trickle.passed_on());
        }
        metrics.observe_refused(self.links.refused.len());
        metrics.observe_registry(self.links.registry_fault_age());
        metrics.observe_in_flight(
            self.executor.stripes_in_flight(),
            self.executor.blocks_in_flight(),
            self.executor.blocks_in_flight_most(),
        );
        metrics.observe_repairs_held(self.executor.repairs_held());
        metrics.observe_tier(self.node.tier_fault());
        metrics.observe_link_rates(&self.node.measured_rates());
        let objections = self.node.restart_objections(None, &Viewer::Public).len();
        let standings = self.node.standings();
        metrics.observe_standings(&standings, objections, &self.config.ops_viewer);
        self.ops.set_status(status, reasons);
    }

    fn look_at_certificate(&mut self) {
        let Some(own) = &mut self.certificate else {
            return;
        };
        let (now, node) = (wall_clock(), &self.config.node);
        let news = own.news(now);
        self.links.own_fault = own.fault(node, now);
        let ends = own.validity.ends;
        self.links.expires = Some(ends);
        self.ops.metrics.observe_certificate(ends);
        match (news, &self.links.own_fault) {
            (Some(Nearness::Invalid), Some(fault)) => tracing::error!("{fault}"),
            (Some(_), _) => {
                let days = (ends - now).div_euclid(86_400);
                tracing::warn!(
                    days,
                    "the certificate of this node expires on {}: {}",
                    date(ends),
                    advice(node)
                );
            }
            (None, _) => {}
        }
    }

    /// Takes what a reload of the configuration may change; links and RAM stay.
    pub(super) fn reload(&mut self, file: &Config) -> Option<Input> {
        self.reload_certificate(file.tls.as_ref());
        let mut taken = self.config.clone();
        let fixed = taken.take(file);
        for one in &fixed {
            tracing::warn!(
                key = one.key,
                running = one.running,
                file = one.file,
                "this key cannot change while the daemon runs: the old value stays until a restart"
            );
        }
        self.reload_keys(&taken);
        let input = self.reload_peers(&taken, Vec::new());
        tracing::info!(kept = fixed.len(), "reloaded the configuration");
        self.show();
        input
    }

    /// Takes the files that are in use again; all else stays.
    pub(super) fn certificates_changed(&mut self) -> Option<Input> {
        tracing::info!("the files of the certificates have changed");
        let files = self.config.tls.clone();
        self.reload_certificate(files.as_ref());
        self.show();
        None
    }

    fn reload_certificate(&mut self, files: Option<&TlsFiles>) {
        let (Some(net), Some(files)) = (&self.net, files) else {
            return;
        };
        match own_certificate(net, files) {
            Ok(own) => {
                tracing::info!(expires = date(own.validity.ends), "took the certificate");
                self.config.tls = Some(files.clone());
                self.watched.in_use.send_replace(Some(files.clone()));
                self.certificate = Some(own);
            }
            Err(error) => {
                self.ops.metrics.observe_certificate_refused();
                tracing::error!(
                    key = "tls",
                    error = chain(&error),
                    "the old certificate stays"
                );
            }
        }
    }

    pub(super) fn reload_peers(
        &mut self,
        taken: &Config,
        passed: Vec<EpochMembers>,
    ) -> Option<Input> {
        let is_same = self.config.members == taken.members && self.config.epoch == taken.epoch;
        if self.config.peers == taken.peers && is_same {
            return None;
        }
        let Some(net) = &self.net else {
            tracing::warn!(
                key = "peers",
                "a daemon that was started without [tls] has no links: restart it to give it peers"
            );
            return None;
        };
        let grouped = taken
            .geometry
            .map(|geometry| storaged_plan::groups(&taken.members, geometry));
        if let Some(Err(error)) = grouped {
            tracing::error!(key = "peers", error = chain(&error), "the old peers stay");
            return None;
        }
        say_peers(&self.config.peers, &taken.peers);
        // Links are tasks of the network's own runtime.
        let entered = self.net_runtime.enter();
        let near = near(taken);
        net.set_peers(taken.peers.clone(), &near, taken.agreement());
        drop(entered);
        self.config.peers.clone_from(&taken.peers);
        self.config.members.clone_from(&taken.members);
        self.config.epoch = taken.epoch;
        self.links.configured = names(&taken.peers);
        let configured = &self.links.configured;
        for of_peers in [&mut self.links.refused, &mut self.links.differing] {
            of_peers.retain(|peer, _| configured.contains(peer));
        }
        // Another machine in a place is to the decisions the same member: they see its node come up.
        (!is_same).then(|| Input::Members {
            newest: EpochMembers {
                epoch: taken.epoch,
                members: taken.members.clone(),
            },
            passed,
        })
    }
}

pub(super) fn names(peers: &[Peer]) -> Vec<NodeName> {
    peers.iter().map(|peer| peer.name.clone()).collect()
}

fn own_certificate(net: &Net, files: &TlsFiles) -> Result<OwnCertificate, NetError> {
    let identity = TlsIdentity::load(files)?;
    net.set_identity(&identity)?;
    Ok(OwnCertificate::new(identity.validity()?))
}

fn say_peers(before: &[Peer], now: &[Peer]) {
    for peer in now {
        match before.iter().find(|old| old.name == peer.name) {
            None => tracing::info!(peer = %peer.name, address = %peer.address, "a peer was added"),
            Some(old) if old.address != peer.address => {
                tracing::info!(peer = %peer.name, address = %peer.address, "a peer has another address; a link that is up stays");
            }
            Some(_) => {}
        }
    }
    let gone = before
        .iter()
        .filter(|old| now.iter().all(|peer| peer.name != old.name));
    for peer in gone {
        tracing::info!(peer = %peer.name, "a peer was removed");
    }
}
