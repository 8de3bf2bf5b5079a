//! Attacks by a node of the cluster: it has a certificate and says what it likes to the others, who protect the honest job without it.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use storaged_sdk::Client;
use storaged_sdk::wire::peer::{
    CheckpointKey, HighMark, Holding, Lane, PeerMessage, SessionKind, SessionRecord, SumChecks,
    UnowedCause,
};
use storaged_sdk::wire::{CheckpointState, Digest, Namespace, NodeName, SessionId};
use storaged_tests::peer::{FENCES, HostilePeer, many_fences};

use crate::honest::DURABLE_EVERY;
use crate::scene::Scene;
use crate::trial::ROUNDS;

/// Of each kind, between two looks at the honest job.
const AT_ONCE: u64 = 64;
/// What a parcel that never comes is said to be.
const PARCEL_BYTES: u64 = 64 << 20;

/// The hostile node of a scene, and whom it speaks to.
struct Liar<'a> {
    scene: &'a Scene,
    peer: &'a HostilePeer,
    others: Vec<NodeName>,
    said: u64,
}

impl<'a> Liar<'a> {
    fn of(scene: &'a Scene) -> Result<Self> {
        Ok(Self {
            scene,
            peer: scene.peer.as_ref().context("a scene with such a node")?,
            others: scene
                .running()
                .map(|node| scene.system.cluster.name(node))
                .collect(),
            said: 0,
        })
    }

    fn say(&mut self, message: &PeerMessage) {
        for other in &self.others {
            self.peer.say(other, message);
        }
        self.said += 1;
    }

    /// Says more and more while the honest job goes on; how much it was.
    fn go_on(mut self, mut more: impl FnMut(&mut Self) -> Result<()>) -> Result<u64> {
        let scene = self.scene;
        scene.endure_beside(ROUNDS, || more(&mut self))?;
        // What is queued for a link that is down attacks nobody.
        scene.until("an answer to it", || {
            ensure!(!self.holdings()?.is_empty(), "no answer");
            Ok(())
        })?;
        Ok(self.said)
    }

    fn job(&self) -> Result<Namespace> {
        let job = &self.scene.system.namespace;
        Ok(Namespace::new(format!("red~{job}"))?)
    }

    /// What others hold of the honest job, as far as they have answered by now.
    fn holdings(&mut self) -> Result<Vec<Holding>> {
        let namespace = self.job()?;
        let query = self.said;
        self.say(&PeerMessage::HoldingsQuery { query, namespace });
        let all = self
            .peer
            .heard()
            .into_iter()
            .filter_map(|heard| match heard {
                PeerMessage::Holdings { holdings, .. } => Some(holdings),
                _ => None,
            });
        Ok(all.flatten().collect())
    }
}

/// The name of something that there is not.
fn digest(number: u64) -> Digest {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Digest::from_bytes(&bytes)
}

/// Fences of jobs that there are not.
pub fn fences_without_end(scene: &Scene) -> Result<String> {
    let message = many_fences()?;
    let said = Liar::of(scene)?.go_on(|liar| {
        (0..AT_ONCE).for_each(|_| liar.say(&message));
        Ok(())
    })?;
    Ok(format!("{said} messages of {FENCES} fences"))
}

/// Whatever costs who answers more than who asks: lists, tables, manifests, and reading all that is held.
pub fn questions_without_end(scene: &Scene) -> Result<String> {
    let mut known = BTreeSet::new();
    let said = Liar::of(scene)?.go_on(|liar| {
        known.extend(liar.holdings()?.into_iter().map(|it| it.manifest));
        for manifest in known.iter().rev().take(16).copied() {
            let query = liar.said;
            liar.say(&PeerMessage::ManifestQuery { query, manifest });
            liar.say(&PeerMessage::VerifyQuery { query, manifest });
        }
        Ok(())
    })?;
    ensure!(!known.is_empty(), "nobody answered it");
    Ok(format!("{said} questions about {} steps", known.len()))
}

/// Of each step that it hears of: that it is durable, that it bears a loss, that nobody need keep it, that there is no room for it.
pub fn lies_about_steps(scene: &Scene) -> Result<String> {
    let mut told = BTreeSet::new();
    let said = Liar::of(scene)?.go_on(|liar| {
        for Holding { manifest, key, .. } in liar.holdings()? {
            told.insert(key.step);
            for lie in lies(manifest, &key) {
                liar.say(&lie);
            }
        }
        Ok(())
    })?;
    ensure!(told.len() as u64 >= ROUNDS, "it heard of {told:?} alone");
    let falsely = durable_steps(scene)?;
    let falsely = falsely
        .iter()
        .filter(|step| !step.is_multiple_of(DURABLE_EVERY));
    let falsely: Vec<_> = falsely.collect();
    ensure!(falsely.is_empty(), "called durable: {falsely:?}");
    Ok(format!("{said} lies about {} steps", told.len()))
}

/// Not what docs/SECURITY.md says that one node can do: that something newer was protected, that the durable copy is damaged, or that a step which
/// is not protected yet is given up.
fn lies(manifest: Digest, key: &CheckpointKey) -> Vec<PeerMessage> {
    let reason = || "it is said".to_owned();
    let key = || key.clone();
    vec![
        PeerMessage::Durable { manifest },
        // More than there can be would be no lie that anybody believes.
        PeerMessage::Protected { manifest, bears: 1 },
        PeerMessage::ManifestStored {
            manifest,
            state: CheckpointState::Durable,
            bears: 1,
        },
        PeerMessage::Unowed {
            manifest,
            cause: UnowedCause::Retired,
        },
        PeerMessage::Evicted {
            namespace: key().namespace,
            up_to: HighMark {
                run: key().run,
                step: key().step,
            },
            durable: true,
        },
        PeerMessage::NoRoom {
            manifest,
            node: NodeName::new("n0").expect("a name"),
            reason: reason(),
        },
    ]
}

/// Steps of the honest job that the first node calls durable.
fn durable_steps(scene: &Scene) -> Result<Vec<u64>> {
    let admin = scene.red().with_file_name("admin.sock");
    let job = scene.system.namespace.as_str();
    let all = Client::connect_anonymous(&admin)?.list(None)?;
    let own = all.iter().filter(|it| it.namespace.as_str().ends_with(job));
    let durable = own.filter(|it| it.state == CheckpointState::Durable);
    Ok(durable.map(|it| it.step.get()).collect())
}

/// Sessions that it leads for steps that there are not, and that never begin.
pub fn sessions_without_end(scene: &Scene) -> Result<String> {
    let said = Liar::of(scene)?.go_on(|liar| {
        for _ in 0..AT_ONCE {
            let number = liar.said;
            liar.say(&PeerMessage::Propose(SessionRecord {
                session: SessionId::new(number),
                manifest: digest(number),
                kind: SessionKind::Encode {
                    lane: Lane { group: 0, index: 0 },
                    basis: None,
                    checks: SumChecks::Parity,
                    parities: vec![0],
                },
            }));
        }
        Ok(())
    })?;
    Ok(format!("{said} sessions"))
}

/// Long messages that it tells of and never sends.
pub fn parcels_that_never_come(scene: &Scene) -> Result<String> {
    let said = Liar::of(scene)?.go_on(|liar| {
        for _ in 0..AT_ONCE {
            let parcel = digest(liar.said);
            liar.say(&PeerMessage::Parcel {
                parcel,
                length: PARCEL_BYTES,
                relay: None,
            });
        }
        Ok(())
    })?;
    Ok(format!("{said} parcels of {} MiB", PARCEL_BYTES >> 20))
}

/// What is no message at all, of all lengths up to 64 KiB.
pub fn noise(scene: &Scene) -> Result<String> {
    let said = Liar::of(scene)?.go_on(|liar| {
        let mut state = liar.said + 1;
        let length = liar.said * 997 % (64 << 10);
        let noise = (0..length).map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        });
        let noise: Vec<u8> = noise.collect();
        for other in &liar.others {
            liar.peer.say_bytes(other, noise.clone());
        }
        liar.said += 1;
        Ok(())
    })?;
    Ok(format!("{said} messages that nobody can read"))
}
