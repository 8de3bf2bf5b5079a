//! A reader's manifest, with the schema and the metadata that it names: from this node if they are here, else from the home
//! nodes, else from whoever says that it holds them, or from the durable tier.

use std::sync::Arc;

use storaged_wire::local::Reply;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{
    Digest, Enclosed, Enclosure, EnclosuresHeld, ManifestBytes, NodeName, Refusal, RefusalCode,
    SharedBytes,
};

use super::plan::{SurveyInProgress, SurveyPurpose, Surveyor, TierListing};
use crate::api::{Now, RequestId};
use crate::context::Context;
use crate::restore::Restores;

/// A reader's question that waits for what the manifest names.
#[derive(Debug, Clone)]
pub(crate) struct ManifestWait {
    pub request: ManifestRequest,
    pub asked: AskedNodes,
}

/// Which manifest is wanted, and by whom.
#[derive(Debug, Clone)]
pub(crate) struct ManifestRequest {
    pub id: RequestId,
    pub manifest: Arc<ManifestBytes>,
    pub deadline: Now,
}

/// Who was asked for what it names.
#[derive(Debug, Clone)]
pub(crate) enum AskedNodes {
    /// Those that should hold it.
    Homes,
    /// Those that said that they do, and the durable tier; why none of them gave it, if none does.
    Surveyed(Absence),
}

/// Why nobody has what a manifest names.
#[derive(Debug, Clone)]
pub(crate) enum Absence {
    /// Those that had it are lost, or say nothing.
    Lost,
    /// A newer step took its place, and it went with it.
    LetGo,
    /// It is for the durable tier to have it.
    Tier(TierWord),
}

/// What the durable tier says against its copy, or why it says nothing.
#[derive(Debug, Clone)]
pub(crate) struct TierWord {
    code: RefusalCode,
    reason: String,
}

impl Restores {
    /// Answers with the manifest, once what it names is here.
    pub(super) fn read_manifest(
        &mut self,
        request: ManifestRequest,
        told_by: Vec<NodeName>,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        cx.check_readable(request.id, &request.manifest)?;
        if cx.give_manifest(&request) {
            return Ok(());
        }
        let mut from = told_by;
        from.extend(cx.homes_in_turn(&request.manifest));
        let named: Vec<Enclosure> = request.manifest.manifest().enclosures().collect();
        self.manifest_waits.push(ManifestWait {
            request,
            asked: AskedNodes::Homes,
        });
        cx.want_enclosures(&named, &from);
        self.advance_manifest_waits(cx);
        Ok(())
    }

    /// Something that a manifest names has come, or does not come from those who were asked; or time has passed.
    pub(crate) fn advance_manifest_waits(&mut self, cx: &mut Context) {
        for wait in std::mem::take(&mut self.manifest_waits) {
            self.advance_manifest_wait(wait, cx);
        }
    }

    fn advance_manifest_wait(&mut self, wait: ManifestWait, cx: &mut Context) {
        if cx.give_manifest(&wait.request) {
            return;
        }
        let is_late = wait.request.deadline <= cx.now;
        if !is_late && cx.enclosures_may_come(wait.request.manifest.manifest()) {
            return self.manifest_waits.push(wait);
        }
        match wait.asked {
            AskedNodes::Homes if !is_late => self.look_for_enclosures(wait.request, cx),
            AskedNodes::Homes => cx.refuse_manifest(&wait.request, Absence::Lost),
            AskedNodes::Surveyed(absence) => cx.refuse_manifest(&wait.request, absence),
        }
    }

    /// None of the home nodes has it: everybody is asked who does, and the durable tier.
    fn look_for_enclosures(&mut self, request: ManifestRequest, cx: &mut Context) {
        let Ok(attached) = cx.attached(request.id) else {
            return;
        };
        let surveyor = Surveyor {
            id: request.id,
            namespace: attached.namespace.clone(),
            owner: attached.owner,
        };
        let step = request.manifest.manifest().step;
        let left = request.deadline.since(cx.now);
        let timeout_ms = u32::try_from(left).unwrap_or(u32::MAX);
        let then = SurveyPurpose::Enclosures(request);
        self.survey(surveyor, Some(step), timeout_ms, then, cx);
    }

    /// All have said what they hold.
    pub(super) fn enclosures_surveyed(
        &mut self,
        request: ManifestRequest,
        plan: &SurveyInProgress,
        cx: &mut Context,
    ) {
        let record = request.manifest.manifest();
        let survey = &plan.survey;
        let key = CheckpointKey::of(record);
        let from = survey.enclosing(request.manifest.name()).to_vec();
        let named: Vec<Enclosure> = record.enclosures().collect();
        cx.want_enclosures(&named, &from);
        let absence = match word_of_tier(plan, &key) {
            Some(word) => Absence::Tier(word),
            None if from.is_empty() && cx.has_given_way(&key, survey) => Absence::LetGo,
            None => Absence::Lost,
        };
        let asked = AskedNodes::Surveyed(absence);
        self.advance_manifest_wait(ManifestWait { request, asked }, cx);
    }

    /// Manifests that readers wait for, or may be offered.
    pub(crate) fn manifests_read(&self) -> impl Iterator<Item = &ManifestBytes> {
        let waits = self.manifest_waits.iter().map(|it| &it.request.manifest);
        let surveyed = self.plans.values().flat_map(|plan| {
            let found = plan.survey.manifests.values();
            found.filter(|it| plan.survey.durable.contains(&it.name()))
        });
        waits.chain(surveyed).map(|it| &**it)
    }
}

fn word_of_tier(plan: &SurveyInProgress, key: &CheckpointKey) -> Option<TierWord> {
    let (code, reason) = match &plan.tier {
        TierListing::Absent => return None,
        TierListing::Read => (RefusalCode::Corrupt, plan.survey.reason_against(key)?),
        TierListing::Unreadable(fault) => (RefusalCode::DurableUnavailable, fault.to_string()),
        TierListing::Unasked | TierListing::Asked => (
            RefusalCode::DurableUnavailable,
            "no listing in time".to_owned(),
        ),
    };
    Some(TierWord { code, reason })
}

impl Context {
    /// Gives a reader the manifest with what it names, if that is here.
    fn give_manifest(&mut self, request: &ManifestRequest) -> bool {
        let record = request.manifest.manifest();
        if self.enclosures_held(record) == EnclosuresHeld::NotAll {
            return false;
        }
        // What the manifest carries itself is in it. The next rank of this node asks for the same.
        let now = self.now;
        let mut named = |enclosed: &Enclosed| match enclosed.to_fetch() {
            Some(named) => self.enclosures.read(named.digest, now),
            None => SharedBytes::default(),
        };
        let (schema, torch_metadata) = (named(&record.schema), named(&record.torch_metadata));
        let reply = Reply::Manifest {
            bytes: request.manifest.shared(),
            schema,
            torch_metadata,
        };
        self.reply(request.id, reply);
        true
    }

    /// The home nodes of a checkpoint, for each node another one first: a restart asks them all at once.
    fn homes_in_turn(&self, manifest: &ManifestBytes) -> Vec<NodeName> {
        let mut homes = self.homes_of(&CheckpointKey::of(manifest.manifest()));
        let mut members = self.setup.members.iter();
        let place = members.position(|member| member.name == *self.me());
        let turns = place.unwrap_or(0) % homes.len().max(1);
        homes.rotate_left(turns);
        homes
    }

    fn refuse_manifest(&mut self, request: &ManifestRequest, absence: Absence) {
        let record = request.manifest.manifest();
        let homes = self.homes_of(&CheckpointKey::of(record));
        let down: Vec<&str> = homes
            .iter()
            .filter(|home| !self.is_up(home))
            .map(NodeName::as_str)
            .collect();
        let (code, reason) = match absence {
            Absence::Tier(TierWord { code, reason }) => {
                (code, format!("; the durable tier: {reason}"))
            }
            Absence::Lost => (RefusalCode::TooManyLost, String::new()),
            Absence::LetGo => {
                let text = format!(
                    "the schema and metadata of step {} were let go with it for a newer one since it was planned; ask for another plan",
                    record.step
                );
                let refusal = Refusal::new(RefusalCode::NoCheckpoint, text);
                return self.reply(request.id, Reply::Refused(refusal));
            }
        };
        let text = format!(
            "the schema and metadata of step {} are on no node that answers (home nodes that are down: [{}]){reason}; start \
             those, or ask for another plan",
            record.step,
            down.join(", ")
        );
        self.reply(request.id, Reply::Refused(Refusal::new(code, text)));
    }

    /// What a listing of the durable tier brought along.
    pub(super) fn keep_listed(&mut self, listed: impl IntoIterator<Item = (Digest, SharedBytes)>) {
        for (name, bytes) in listed {
            self.keep_enclosure(name, bytes);
        }
    }
}
