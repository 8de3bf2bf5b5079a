//! The plan: ask every live node and the durable tier what they hold, then offer the newest checkpoint that is
//! whole, and say of newer ones why they are not.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_wire::local::Reply;
use storaged_wire::peer::{CheckpointKey, Holding, Lane, PeerMessage};
use storaged_wire::plan::{RestorePlan, ShardSource, Source, Unrestorable};
use storaged_wire::{
    CheckpointState, Digest, ManifestBytes, Namespace, NodeName, Owner, Rank, Refusal, RefusalCode,
    Step,
};

use super::Rates;
use super::holdings::{unknown_manifest, unknown_namespace};
use super::open::OpenWish;
use crate::encode::LaneBlocks;
use crate::io::{Now, Output, QueryId, RequestId};
use crate::limits;
use crate::node::{DurablePolicy, Node};

/// A plan being made. With no request it serves the node itself (an opening that looks for sources).
#[derive(Debug, Clone)]
pub(crate) struct PlanQuery {
    pub id: Option<RequestId>,
    pub namespace: Namespace,
    pub owner: Owner,
    pub step: Option<Step>,
    pub deadline: Now,
    pub survey: Survey,
    waiting_for: BTreeSet<NodeName>,
    waiting_for_durable: bool,
    durable_error: Option<String>,
    manifests_asked: BTreeSet<Digest>,
    foreign_owner: bool,
    then: Then,
}

/// What the answer is for.
#[derive(Debug, Clone)]
pub(crate) enum Then {
    Offer,
    Verify,
    Manifest(Digest),
    Open(OpenWish),
}

/// Who holds what.
#[derive(Debug, Clone, Default)]
pub(crate) struct Survey {
    pub manifests: BTreeMap<Digest, Arc<ManifestBytes>>,
    pub keys: BTreeMap<Digest, CheckpointKey>,
    pub states: BTreeMap<Digest, CheckpointState>,
    pub shards: BTreeMap<Digest, BTreeMap<Rank, BTreeSet<NodeName>>>,
    pub parity: BTreeMap<Digest, BTreeMap<(Lane, u32), BTreeSet<NodeName>>>,
    pub durable: BTreeSet<Digest>,
}

impl Survey {
    pub fn add(&mut self, node: &NodeName, holdings: &[Holding]) {
        for holding in holdings {
            let name = holding.manifest;
            self.keys.insert(name, holding.key.clone());
            let state = self.states.entry(name).or_insert(holding.state);
            *state = (*state).max(holding.state);
            let shards = self.shards.entry(name).or_default();
            for rank in &holding.shards {
                shards.entry(*rank).or_default().insert(node.clone());
            }
            let parity = self.parity.entry(name).or_default();
            for place in &holding.parity {
                parity.entry(*place).or_default().insert(node.clone());
            }
        }
    }

    pub fn add_durable(&mut self, manifest: Arc<ManifestBytes>) {
        let name = manifest.name();
        let record = manifest.manifest();
        self.keys.insert(
            name,
            CheckpointKey {
                namespace: record.namespace.clone(),
                run: record.run,
                step: record.step,
            },
        );
        self.states.insert(name, CheckpointState::Durable);
        self.durable.insert(name);
        self.manifests.insert(name, manifest);
    }

    /// Blocks of a lane that are where they belong.
    pub fn available(&self, name: Digest, lane: Lane, blocks: &LaneBlocks) -> Vec<usize> {
        let holds = |nodes: Option<&BTreeSet<NodeName>>, node: &NodeName| {
            nodes.is_some_and(|nodes| nodes.contains(node))
        };
        (0..blocks.blocks())
            .filter(|block| {
                let Some(node) = blocks.node(*block) else {
                    return false;
                };
                match blocks.data.get(*block) {
                    Some(entry) => entry.as_ref().is_some_and(|shard| {
                        holds(
                            self.shards.get(&name).and_then(|s| s.get(&shard.rank)),
                            node,
                        )
                    }),
                    None => {
                        let index = (*block - blocks.data.len()) as u32;
                        holds(
                            self.parity.get(&name).and_then(|p| p.get(&(lane, index))),
                            node,
                        )
                    }
                }
            })
            .collect()
    }

    /// The best source of one shard, seen from `me`.
    pub fn source(&self, manifest: &ManifestBytes, rank: Rank, me: &NodeName) -> Option<Source> {
        let name = manifest.name();
        let holders = self.shards.get(&name).and_then(|shards| shards.get(&rank));
        if let Some(holders) = holders {
            let near = holders.get(me).or_else(|| holders.first());
            if let Some(node) = near {
                return Some(Source::Ram(node.clone()));
            }
        }
        if let Some((lane, _)) = LaneBlocks::find(manifest.manifest(), rank) {
            let blocks = LaneBlocks::of(manifest.manifest(), lane)?;
            if let Some(chosen) = blocks.enough(&self.available(name, lane, &blocks)) {
                let nodes = chosen
                    .into_iter()
                    .filter_map(|block| blocks.node(block).cloned());
                return Some(Source::Decode(nodes.collect()));
            }
        }
        self.durable.contains(&name).then_some(Source::Durable)
    }
}

impl Node {
    pub(crate) fn plan(
        &mut self,
        id: RequestId,
        step: Option<Step>,
        timeout_ms: u32,
    ) -> Result<(), Refusal> {
        let attached = self.attached(id)?.clone();
        self.survey(
            id,
            attached.namespace,
            attached.owner,
            step,
            timeout_ms,
            Then::Offer,
        );
        Ok(())
    }

    pub(crate) fn survey(
        &mut self,
        id: RequestId,
        namespace: Namespace,
        owner: Owner,
        step: Option<Step>,
        timeout_ms: u32,
        then: Then,
    ) {
        let query = QueryId(self.fresh());
        let mut survey = Survey::default();
        let me = self.me().clone();
        survey.add(&me, &self.holdings_of(&namespace));
        let has_durable = self.setup.durable != DurablePolicy::Absent;
        let asked = u64::from(timeout_ms).min(limits::REQUEST_MAX_MS);
        let longest = if has_durable {
            limits::DURABLE_LIST_MAX_MS
        } else {
            limits::QUERY_MAX_MS
        };
        let after_grace = self.settled_at().plus(limits::QUERY_MAX_MS);
        let deadline = self.now.plus(asked.min(longest)).max(after_grace);
        self.plans.insert(
            query,
            PlanQuery {
                id: Some(id),
                namespace: namespace.clone(),
                owner,
                step,
                deadline,
                survey,
                waiting_for: BTreeSet::new(),
                waiting_for_durable: has_durable,
                durable_error: None,
                manifests_asked: BTreeSet::new(),
                foreign_owner: false,
                then,
            },
        );
        if has_durable {
            let namespace = namespace.clone();
            self.out.push(Output::ListDurable { query, namespace });
        }
        for peer in self.peers.keys().cloned().collect::<Vec<_>>() {
            self.ask_for_plan(query, &peer);
        }
        self.advance_plan(query);
    }

    fn ask_for_plan(&mut self, query: QueryId, peer: &NodeName) {
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        plan.waiting_for.insert(peer.clone());
        let namespace = plan.namespace.clone();
        self.send(
            peer,
            PeerMessage::HoldingsQuery {
                query: query.0,
                namespace,
            },
        );
    }

    pub(crate) fn plan_learns(
        &mut self,
        from: &NodeName,
        query: QueryId,
        owner: Option<Owner>,
        holdings: &[Holding],
    ) {
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        plan.waiting_for.remove(from);
        plan.foreign_owner |= owner.is_some_and(|owner| owner != plan.owner);
        plan.survey.add(from, holdings);
        let unknown: Vec<Digest> = holdings
            .iter()
            .map(|holding| holding.manifest)
            .filter(|name| !plan.survey.manifests.contains_key(name))
            .collect();
        for name in unknown {
            self.learn_manifest(query, name, from);
        }
        self.advance_plan(query);
    }

    fn learn_manifest(&mut self, query: QueryId, name: Digest, from: &NodeName) {
        let known = self.manifest_named(name);
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        if let Some(manifest) = known {
            plan.survey.manifests.insert(name, manifest);
        } else if plan.manifests_asked.insert(name) {
            plan.waiting_for.insert(from.clone());
            self.send(
                from,
                PeerMessage::ManifestQuery {
                    query: query.0,
                    manifest: name,
                },
            );
        }
    }

    pub(crate) fn manifest_answered(
        &mut self,
        from: &NodeName,
        query: QueryId,
        bytes: Option<Vec<u8>>,
    ) {
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        plan.waiting_for.remove(from);
        // A manifest that does not have the digest it was asked by finds no use.
        if let Some(manifest) = bytes.and_then(|bytes| ManifestBytes::parse(bytes).ok())
            && plan.manifests_asked.contains(&manifest.name())
        {
            plan.survey
                .manifests
                .insert(manifest.name(), Arc::new(manifest));
        }
        self.advance_plan(query);
    }

    pub(crate) fn durable_listed(
        &mut self,
        query: QueryId,
        outcome: Result<Vec<Arc<ManifestBytes>>, String>,
    ) {
        if self.proposals.contains_key(&query) {
            let newest = outcome
                .unwrap_or_default()
                .iter()
                .map(|m| (m.manifest().run, m.manifest().owner))
                .max();
            return self.proposal_learns(query, newest);
        }
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        plan.waiting_for_durable = false;
        match outcome {
            Ok(manifests) => {
                for manifest in manifests {
                    plan.foreign_owner |= manifest.manifest().owner != plan.owner;
                    plan.survey.add_durable(manifest);
                }
            }
            Err(reason) => plan.durable_error = Some(reason),
        }
        self.advance_plan(query);
    }

    pub(crate) fn expire_plans(&mut self) {
        for query in self.plans.keys().copied().collect::<Vec<_>>() {
            self.advance_plan(query);
        }
    }

    /// Answers may be lost while links come up: whoever has not answered is asked again.
    pub(crate) fn repeat_plans(&mut self) {
        for query in self.plans.keys().copied().collect::<Vec<_>>() {
            let Some(plan) = self.plans.get_mut(&query) else {
                continue;
            };
            plan.manifests_asked.clear();
            for peer in plan.waiting_for.clone() {
                self.ask_for_plan(query, &peer);
            }
        }
    }

    /// A peer that comes up while plans are being made is asked too.
    pub(crate) fn plans_ask(&mut self, peer: &NodeName) {
        for query in self.plans.keys().copied().collect::<Vec<_>>() {
            self.ask_for_plan(query, peer);
        }
    }

    pub(crate) fn plans_forget(&mut self, node: &NodeName) {
        for plan in self.plans.values_mut() {
            plan.waiting_for.remove(node);
            let shards = plan
                .survey
                .shards
                .values_mut()
                .flat_map(BTreeMap::values_mut);
            shards.for_each(|nodes| {
                nodes.remove(node);
            });
            let parity = plan
                .survey
                .parity
                .values_mut()
                .flat_map(BTreeMap::values_mut);
            parity.for_each(|nodes| {
                nodes.remove(node);
            });
        }
        for query in self.plans.keys().copied().collect::<Vec<_>>() {
            self.advance_plan(query);
        }
    }

    fn advance_plan(&mut self, query: QueryId) {
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        let own: Vec<Digest> = plan.survey.keys.keys().copied().collect();
        for name in own {
            let known = self.manifest_named(name);
            if let (Some(plan), Some(manifest)) = (self.plans.get_mut(&query), known) {
                plan.survey.manifests.entry(name).or_insert(manifest);
            }
        }
        let Some(plan) = self.plans.get(&query) else {
            return;
        };
        let complete = plan.waiting_for.is_empty() && !plan.waiting_for_durable && self.settled();
        if complete || plan.deadline <= self.now {
            self.finish_plan(query);
        }
    }

    fn finish_plan(&mut self, query: QueryId) {
        let Some(plan) = self.plans.remove(&query) else {
            return;
        };
        let Some(id) = plan.id else {
            return;
        };
        match plan.then {
            Then::Open(wish) => return self.open_surveyed(id, wish, plan.survey),
            Then::Manifest(name) => return self.manifest_surveyed(id, name, &plan.survey),
            Then::Offer | Then::Verify => {}
        }
        match self.choose(&plan) {
            Ok(offer) => {
                let manifest = plan.survey.manifests[&offer.manifest].clone();
                self.remember_planned(manifest.clone());
                match plan.then {
                    Then::Verify => self.start_verify(id, manifest),
                    _ => self.reply(id, Reply::Plan(offer)),
                }
            }
            Err(refusal) => self.reply(id, Reply::Refused(refusal)),
        }
    }

    fn manifest_surveyed(&mut self, id: RequestId, name: Digest, survey: &Survey) {
        let outcome = match survey.manifests.get(&name).cloned() {
            Some(manifest) => {
                self.remember_planned(manifest.clone());
                self.give_manifest(id, &manifest)
            }
            None => Err(unknown_manifest(name)),
        };
        if let Err(refusal) = outcome {
            self.reply(id, Reply::Refused(refusal));
        }
    }

    fn choose(&self, plan: &PlanQuery) -> Result<RestorePlan, Refusal> {
        if plan.foreign_owner {
            self.check_owner(&plan.namespace, plan.owner)?;
            return Err(Refusal::new(
                RefusalCode::WrongToken,
                format!(
                    "namespace {} belongs to another job token: set STORAGED_TOKEN to the token it was created with",
                    plan.namespace
                ),
            ));
        }
        let mut candidates: Vec<(&CheckpointKey, Digest)> = plan
            .survey
            .keys
            .iter()
            .map(|(name, key)| (key, *name))
            .collect();
        candidates.sort();
        if candidates.is_empty()
            && !self.namespaces.contains_key(&plan.namespace)
            && plan.durable_error.is_none()
        {
            return Err(unknown_namespace(&plan.namespace));
        }
        let mut passed_over = Vec::new();
        for (key, name) in candidates.into_iter().rev() {
            if plan.step.is_some_and(|step| step != key.step) {
                continue;
            }
            match self.offer(plan, name, key) {
                Ok(mut offer) => {
                    offer.passed_over = passed_over;
                    return Ok(offer);
                }
                Err(reason) => passed_over.push(Unrestorable {
                    run: key.run,
                    step: key.step,
                    reason,
                }),
            }
        }
        Err(nothing_restorable(plan, &passed_over))
    }

    fn offer(
        &self,
        plan: &PlanQuery,
        name: Digest,
        key: &CheckpointKey,
    ) -> Result<RestorePlan, String> {
        let manifest = plan
            .survey
            .manifests
            .get(&name)
            .ok_or("its manifest was not found on any live node")?;
        let record = manifest.manifest();
        let mut shards = Vec::with_capacity(record.shards.len());
        let mut lost = Vec::new();
        for entry in &record.shards {
            match plan.survey.source(manifest, entry.rank, self.me()) {
                Some(source) => shards.push(ShardSource {
                    rank: entry.rank,
                    length: entry.length,
                    source,
                }),
                None => lost.push(entry.rank),
            }
        }
        if !lost.is_empty() {
            return Err(format!(
                "{} of {} shards are lost and cannot be decoded (ranks {:?}), and it is not in the durable tier",
                lost.len(),
                record.shards.len(),
                &lost[..lost.len().min(8)]
            ));
        }
        let state = plan
            .survey
            .states
            .get(&name)
            .copied()
            .unwrap_or(CheckpointState::Committed);
        Ok(RestorePlan {
            namespace: key.namespace.clone(),
            run: key.run,
            step: key.step,
            manifest: name,
            world_size: record.world_size,
            state,
            expected_ms: shards
                .iter()
                .map(|shard| self.expected_ms(shard))
                .max()
                .unwrap_or(0),
            shards,
            passed_over: Vec::new(),
        })
    }

    /// Every rank reads its own shard on its own node, all at once.
    fn expected_ms(&self, shard: &ShardSource) -> u64 {
        let ram = Rates::ram_ms(shard.length);
        match &shard.source {
            Source::Ram(_) => ram,
            Source::Decode(_) => ram + self.rates.session_ms(shard.length),
            Source::Durable => ram + Rates::durable_ms(shard.length),
        }
    }
}

fn nothing_restorable(plan: &PlanQuery, passed_over: &[Unrestorable]) -> Refusal {
    let wanted = match plan.step {
        Some(step) => format!("checkpoint of step {step}"),
        None => "checkpoint".into(),
    };
    let mut text = format!(
        "no restorable {wanted} of {} in RAM, on peers or in the durable tier",
        plan.namespace
    );
    for one in passed_over.iter().take(5) {
        text.push_str(&format!(
            "; run {} step {}: {}",
            one.run, one.step, one.reason
        ));
    }
    if let Some(error) = &plan.durable_error {
        text.push_str(&format!("; the durable tier could not be read: {error}"));
    }
    if let Some(newest) = plan
        .survey
        .keys
        .values()
        .max()
        .filter(|_| plan.step.is_some())
    {
        text.push_str(&format!(
            "; newest known: run {} step {}",
            newest.run, newest.step
        ));
    }
    let code = match passed_over.is_empty() {
        true => RefusalCode::NoCheckpoint,
        false => RefusalCode::TooManyLost,
    };
    Refusal::new(code, text)
}
