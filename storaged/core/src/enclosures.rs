//! Enclosures: schemas and torch metadata that manifests name and do not carry. The home nodes of a checkpoint hold them, and
//! whoever was given or has fetched them; equal bytes of many steps are here once. They stay as long as a checkpoint here names
//! them. A node that should hold them and does not fetches them as parcels are fetched, from nodes that do.

use std::collections::{BTreeMap, BTreeSet};

use storaged_plan::nodes_with_blocks;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{
    Digest, Enclosed, Enclosure, Enclosures, EnclosuresHeld, Manifest, ManifestBytes, Namespace,
    NodeName, SharedBytes,
};

use crate::api::{FalseStatement, Now};
use crate::budget::{NoRoom, tenant_of};
use crate::catalog::{Checkpoint, Description};
use crate::context::Context;
use crate::event::Event;
use crate::limits;

/// Those that are here, by the digest of their bytes.
#[derive(Debug, Default)]
pub(crate) struct EnclosureStore {
    kept: BTreeMap<Digest, KeptEnclosure>,
}

#[derive(Debug)]
struct KeptEnclosure {
    bytes: SharedBytes,
    /// Till then it stays though no checkpoint names it.
    until: Now,
    /// The tenant whose trainer gave it, until somebody reads it.
    given_by: Option<Box<str>>,
}

impl EnclosureStore {
    /// Keeps bytes whose digest was compared.
    fn put(&mut self, name: Digest, bytes: SharedBytes, given_by: Option<&str>, now: Now) {
        let until = now.plus(limits::ENCLOSURE_KEPT_MS);
        let new = || KeptEnclosure {
            bytes,
            until,
            given_by: given_by.map(Into::into),
        };
        self.kept.entry(name).or_insert_with(new).until = until;
    }

    pub fn get(&self, name: Digest) -> Option<SharedBytes> {
        self.kept.get(&name).map(|kept| kept.bytes.clone())
    }

    /// Those bytes for a reader: more may come.
    pub fn read(&mut self, name: Digest, now: Now) -> SharedBytes {
        let Some(kept) = self.kept.get_mut(&name) else {
            return SharedBytes::default();
        };
        kept.until = kept.until.max(now.plus(limits::ENCLOSURE_KEPT_MS));
        kept.given_by = None;
        kept.bytes.clone()
    }

    pub fn has(&self, name: Digest) -> bool {
        self.kept.contains_key(&name)
    }

    /// Whether it is here as it is named. A manifest may be forged: what has another length is not what it names.
    fn holds(&self, named: &Enclosure) -> bool {
        self.kept_as(named).is_some()
    }

    fn kept_as(&self, named: &Enclosure) -> Option<&KeptEnclosure> {
        let here = self.kept.get(&named.digest);
        here.filter(|it| it.bytes.len() as u64 == named.length)
    }

    /// Bytes of one, if it is here.
    pub fn length(&self, name: &Digest) -> u64 {
        self.kept.get(name).map_or(0, |it| it.bytes.len() as u64)
    }

    /// All of them, with the tenants that gave them and their bytes.
    pub fn given_by(&self) -> impl Iterator<Item = (&Digest, Option<&str>, u64)> {
        let all = self.kept.iter();
        all.map(|(name, it)| (name, it.given_by.as_deref(), it.bytes.len() as u64))
    }

    /// Those that none of these are.
    pub fn count_beside(&self, named: &BTreeSet<Digest>) -> usize {
        self.kept.keys().filter(|it| !named.contains(it)).count()
    }

    fn sweep(&mut self, named: &BTreeSet<Digest>, now: Now) {
        self.kept
            .retain(|name, kept| kept.until > now || named.contains(name));
    }

    /// Lets go what a tenant's trainers gave and nothing names.
    fn sweep_given_by(&mut self, tenant: &str, named: &BTreeSet<Digest>) {
        let is_its_own = |kept: &KeptEnclosure| kept.given_by.as_deref() == Some(tenant);
        self.kept
            .retain(|name, kept| named.contains(name) || !is_its_own(kept));
    }

    fn bytes_of(&self, enclosed: &Enclosed) -> Option<SharedBytes> {
        match enclosed {
            Enclosed::Inline(bytes) => Some(bytes.clone()),
            Enclosed::Named(named) if named.is_empty() => Some(SharedBytes::default()),
            Enclosed::Named(named) => self.kept_as(named).map(|kept| kept.bytes.clone()),
        }
    }
}

impl Checkpoint {
    /// What it names: its manifest, or as long as there is none whoever described it.
    pub fn named(&self) -> Vec<Enclosure> {
        let manifest = self.manifest.iter();
        let of_manifest = manifest.flat_map(|manifest| manifest.manifest().enclosures());
        let described = self.description.iter().chain(&self.description_here);
        let described = described.flat_map(Description::named);
        of_manifest.chain(described).collect()
    }
}

impl Context {
    /// Schema and metadata of a manifest, if all that it names is here.
    pub(crate) fn enclosures_of(&self, manifest: &Manifest) -> Option<Enclosures> {
        Some(Enclosures {
            schema: self.enclosures.bytes_of(&manifest.schema)?,
            torch_metadata: self.enclosures.bytes_of(&manifest.torch_metadata)?,
        })
    }

    /// Whether all that a manifest names is here.
    pub(crate) fn enclosures_held(&self, manifest: &Manifest) -> EnclosuresHeld {
        let mut named = manifest.enclosures();
        if named.all(|it| self.enclosures.holds(&it)) {
            EnclosuresHeld::All
        } else {
            EnclosuresHeld::NotAll
        }
    }

    /// Whether all of these are here that are not empty.
    pub(crate) fn has_enclosures(&self, named: &[Enclosure]) -> bool {
        let has = |it: &Enclosure| it.is_empty() || self.enclosures.holds(it);
        named.iter().all(has)
    }

    /// Keeps what was proved elsewhere: what the durable tier gave, a peer, or an earlier daemon.
    pub(crate) fn keep_enclosure(&mut self, name: Digest, bytes: SharedBytes) {
        if !bytes.is_empty() {
            self.enclosures.put(name, bytes, None, self.now);
        }
    }

    /// Keeps what a job's trainer gave, for which there is room.
    pub(crate) fn keep_given(&mut self, name: Digest, bytes: SharedBytes, of: &Namespace) {
        if !bytes.is_empty() {
            let tenant = Some(tenant_of(of));
            self.enclosures.put(name, bytes, tenant, self.now);
        }
    }

    /// Takes room for what describes a checkpoint, as far as it is not here; what its tenant's trainers gave and nothing names gives way.
    pub(crate) fn take_room(&mut self, named: &[Enclosure], of: &Namespace) -> Result<(), NoRoom> {
        let is_new = |it: &&Enclosure| !self.is_here_or_coming(it);
        let bytes = named
            .iter()
            .filter(is_new)
            .fold(0_u64, |sum, it| sum.saturating_add(it.length));
        let first = self.budget.add_description(bytes, of);
        if bytes == 0 || first.is_ok() {
            return Ok(());
        }
        let still_named = self.enclosures_named();
        self.enclosures.sweep_given_by(tenant_of(of), &still_named);
        self.count_records();
        self.budget.add_description(bytes, of)
    }

    fn is_here_or_coming(&self, it: &Enclosure) -> bool {
        self.enclosures.has(it.digest) || self.parcels.may_come(it)
    }

    /// Fetches what is not here of these, from the nodes that are said to hold it, in this order.
    pub(crate) fn want_enclosures(&mut self, named: &[Enclosure], from: &[NodeName]) {
        let me = self.me().clone();
        let from: Vec<NodeName> = from
            .iter()
            .filter(|node| **node != me && self.is_up(node))
            .cloned()
            .collect();
        for enclosure in named {
            let is_wanted = !enclosure.is_empty() && !self.enclosures.has(enclosure.digest);
            // Of several none is to blame: they are asked for what another one has named.
            if is_wanted
                && self.parcels.want(*enclosure, &from).is_err()
                && let [alone] = &from[..]
            {
                self.is_false(alone, FalseStatement::TooMuch);
            }
        }
        self.fetch_parcels();
    }

    /// Whether something of these is not here and on its way.
    pub(crate) fn enclosures_may_come(&self, manifest: &Manifest) -> bool {
        let mut lacking = manifest
            .enclosures()
            .filter(|it| !self.enclosures.holds(it));
        lacking.all(|it| self.parcels.may_come(&it))
    }

    /// One that was wanted is here, and is what its name says.
    pub(crate) fn enclosure_came(&mut self, name: Digest, bytes: SharedBytes) {
        self.keep_enclosure(name, bytes);
        let names_it = |c: &&Checkpoint| c.named().iter().any(|it| it.digest == name);
        let naming = self.checkpoints.values().filter(names_it);
        let keys: Vec<CheckpointKey> = naming.map(|c| c.key.clone()).collect();
        for key in keys {
            self.try_commit(&key);
            self.report_held(&key);
        }
        self.emit(Event::EnclosuresMoved);
    }

    /// Tells whoever waits for one that nobody who was asked has it.
    pub(crate) fn emit_enclosures_given_up(&mut self) {
        if !self.parcels.take_given_up().is_empty() {
            self.emit(Event::EnclosuresMoved);
        }
    }

    /// Fetches what this node should hold of committed checkpoints: it was restarted, or has heard of a commit before it had
    /// all of the description, or a home node is gone.
    pub(crate) fn fetch_enclosures(&mut self) {
        let committed = self.checkpoints.values();
        let lacking: Vec<(CheckpointKey, Vec<Enclosure>)> = committed
            .filter_map(|c| {
                let manifest = c.manifest.as_ref()?;
                let lacks = self.enclosures_held(manifest.manifest()) == EnclosuresHeld::NotAll;
                let named = || manifest.manifest().enclosures().collect();
                (lacks && self.should_hold_enclosures(manifest)).then(|| (c.key.clone(), named()))
            })
            .collect();
        for (key, named) in lacking {
            let mut from = self.homes_of(&key);
            if let Some(checkpoint) = self.checkpoints.get(&key) {
                let told = checkpoint
                    .standing
                    .enclosing()
                    .filter(|it| !from.contains(it));
                let told: Vec<NodeName> = told.cloned().collect();
                from.extend(told);
            }
            self.want_enclosures(&named, &from);
        }
    }

    /// Whether this node is one of the m + 1 that hold what a manifest names, so that it outlives any m: a home node, or in
    /// the place of one that is gone the first other node that the manifest places something on.
    fn should_hold_enclosures(&self, manifest: &ManifestBytes) -> bool {
        let homes = self.homes_of(&CheckpointKey::of(manifest.manifest()));
        if homes.contains(self.me()) {
            return !planted!("enclosures_not_fetched_again");
        }
        let gone = homes.iter().filter(|home| self.is_gone(home)).count();
        // Who has no blocks of it does not hear of it, and fetches nothing.
        let others = nodes_with_blocks(manifest).filter(|it| !homes.contains(it));
        let mut substitutes = others.filter(|it| self.is_up(it)).take(gone);
        substitutes.any(|node| node == self.me())
    }

    /// What checkpoints here name.
    pub(crate) fn enclosures_named(&self) -> BTreeSet<Digest> {
        let named = self.checkpoints.values().flat_map(Checkpoint::named);
        named.map(|it| it.digest).collect()
    }

    /// Lets go what neither a checkpoint here names nor one of these manifests.
    pub(crate) fn sweep_enclosures<'a>(&mut self, read: impl Iterator<Item = &'a ManifestBytes>) {
        let mut named = self.enclosures_named();
        named.extend(read.flat_map(|it| it.manifest().enclosures().map(|it| it.digest)));
        self.enclosures.sweep(&named, self.now);
    }
}

#[cfg(test)]
mod tests;
