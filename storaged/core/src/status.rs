//! The daemon's state for `storaged status` and the status page: one JSON object. Names are validated ids, so
//! nothing in it needs escaping.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::local::standing;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{NodeName, TenantName};

use crate::api::Viewer;
use crate::budget::Ledger;
use crate::catalog::Checkpoint;
use crate::context::Context;
use crate::encode::{NodeRate, Sessions, SideRate};
use crate::place::Lacking;
use crate::scrub::ScrubState;
use crate::trickle::plain;

/// The state as JSON.
pub(crate) fn status_json(
    cx: &Context,
    sessions: &Sessions,
    scrub: &ScrubState,
    ledger: &Ledger,
    viewer: &Viewer,
) -> String {
    let peers: Vec<String> = cx
        .setup
        .members
        .iter()
        .filter(|member| member.name != cx.setup.name)
        .map(|member| {
            format!(
                r#"{{"node":"{}","up":{},"believed":{},"false_statements":{}}}"#,
                member.name,
                cx.is_up(&member.name),
                cx.is_believed(&member.name),
                cx.testimony.false_statements(&member.name)
            )
        })
        .collect();
    let lacking: BTreeMap<&CheckpointKey, Option<Vec<Lacking>>> = cx
        .checkpoints
        .iter()
        .filter(|(key, _)| viewer.name_of(&key.namespace).is_some())
        .map(|(key, checkpoint)| (key, cx.lacking(checkpoint)))
        .collect();
    let all = cx.checkpoints.values();
    let checkpoints: Vec<String> = all
        .filter_map(|c| cx.checkpoint_json(c, lacking.get(&c.key)?.as_deref(), viewer))
        .collect();
    let geometry = cx
        .setup
        .geometry
        .map_or("null".into(), |g| format!("\"{g}\""));
    format!(
        r#"{{"node":"{}","generation":"{:016x}","epoch":{},"geometry":{},"chunk_bytes":{},"encode":{{"link_rate":{},"node_rates":{{{}}},"link_rate_measured":{},"links":[{}]}},"groups":[{}],"ready":{},"restart_safe":{},"durable":{},"quarantined":[{}],"memory":{{"used":{},"budget":{},"records":{},"records_charged":{},"slots":{},"unchecked_slots":{},"parity_sets":{},"tenants":[{}]}},"scrub":{},"sessions":{},"waiters":{},"peers":[{}],"to_put_back":{},"runs":[{}],"checkpoints":[{}]}}"#,
        cx.setup.name,
        cx.setup.generation.get(),
        cx.setup.epoch,
        geometry,
        cx.setup.chunk.bytes(),
        or_null(cx.setup.link_rates.usual),
        cx.node_rates_json(),
        or_null(sessions.links(cx).usual_measured()),
        links_json(sessions.measured_rates(cx.now)),
        cx.groups_json(),
        cx.settled(),
        cx.restart_objections(None, viewer).is_empty(),
        cx.tier_json(),
        cx.damaged_json(viewer),
        ledger.used,
        ledger.total,
        ledger.records,
        ledger.records_charged,
        ledger.slots,
        ledger.unchecked_slots,
        ledger.parity_sets,
        cx.tenants_json(viewer),
        scrub_json(scrub),
        ledger.sessions,
        ledger.waiters,
        peers.join(","),
        to_put_back_json(lacking.values().flatten().flatten()),
        cx.runs_json(viewer),
        checkpoints.join(",")
    )
}

/// What is owed in all, as far as this node counts it.
fn to_put_back_json<'l>(all: impl Iterator<Item = &'l Lacking>) -> String {
    let (blocks, bytes) = all.fold((0, 0), |(blocks, bytes), it| {
        (blocks + it.blocks, bytes + it.bytes)
    });
    format!(r#"{{"blocks":{blocks},"bytes":{bytes}}}"#)
}

fn scrub_json(scrub: &ScrubState) -> String {
    let ScrubState {
        period_ms,
        passes,
        bytes,
        rotten,
        age_ms,
    } = scrub;
    format!(
        r#"{{"period_ms":{period_ms},"passes":{passes},"bytes":{bytes},"rotten_chunks":{rotten},"age_ms":{age_ms}}}"#
    )
}

/// The links that were measured, as this node knows them.
fn links_json(rates: Vec<NodeRate>) -> String {
    let side = |side: Option<SideRate>| match side {
        None => "null".into(),
        Some(side) => format!(
            r#"{{"rate":{},"slow_ppm":{}}}"#,
            side.bytes_per_s,
            or_null(side.slow_ppm)
        ),
    };
    let links = rates.into_iter().map(|node| {
        let (up, down) = (side(node.up), side(node.down));
        format!(r#"{{"node":"{}","up":{up},"down":{down}}}"#, node.node)
    });
    links.collect::<Vec<_>>().join(",")
}

impl Context {
    fn checkpoint_json(
        &self,
        c: &Checkpoint,
        lacking: Option<&[Lacking]>,
        viewer: &Viewer,
    ) -> Option<String> {
        let namespace = viewer.name_of(&c.key.namespace)?;
        let (bears, kept_for) = (self.bears(c), self.kept_for(c));
        let manifest = c.manifest.as_deref();
        let leaders = manifest.map_or_else(BTreeSet::new, |manifest| self.leaders_of(manifest));
        let no_room = self.no_room_of(c);
        Some(format!(
            r#"{{"namespace":"{namespace}","run":"{}","step":{},"state":"{}","standing":"{}","superseded":{},"pinned":{},"bears":{},"bears_full":{},"owed":{},"no_room":{},"world_size":{},"shards_here":{},"parity_here":{},"epoch":{},"homes":[{}],"led_by":[{}],"lacking":{}}}"#,
            c.key.run,
            c.key.step,
            c.state,
            standing(c.state, bears, kept_for),
            kept_for.is_some(),
            self.is_pinned(&c.key),
            or_null(bears.map(|bears| bears.losses.into())),
            or_null(bears.map(|bears| bears.of.into())),
            self.is_due(c),
            no_room.map_or("null".into(), |why| format!("\"{}\"", plain(&why))),
            c.world_size,
            c.shards.len(),
            c.parity.len(),
            or_null(manifest.map(|it| it.manifest().epoch)),
            quoted(&c.homes),
            quoted(leaders),
            lacking.map_or("null".into(), |all| self.lacking_json(all)),
        ))
    }

    fn lacking_json(&self, all: &[Lacking]) -> String {
        let nodes = all.iter().map(|it| {
            let (node, down) = (&it.node, !self.is_up(&it.node));
            let (blocks, bytes) = (it.blocks, it.bytes);
            format!(r#"{{"node":"{node}","down":{down},"blocks":{blocks},"bytes":{bytes}}}"#)
        });
        format!("[{}]", nodes.collect::<Vec<_>>().join(","))
    }

    /// Every job that is remembered: its newest run, and where trainers of it are connected.
    fn runs_json(&self, viewer: &Viewer) -> String {
        let jobs = self.namespaces.iter().filter_map(|(namespace, table)| {
            let name = viewer.name_of(namespace)?;
            let trainers = self.nodes_attached(namespace);
            let (run, on) = (table.fence, quoted(&trainers));
            Some(format!(
                r#"{{"namespace":"{name}","run":"{run}","trainers_on":[{on}]}}"#
            ))
        });
        jobs.collect::<Vec<_>>().join(",")
    }

    /// What the operator says of single nodes.
    fn node_rates_json(&self) -> String {
        let rates = self.setup.link_rates.unusual.iter();
        let rates = rates.map(|(node, rate)| format!("\"{node}\":{rate}"));
        rates.collect::<Vec<_>>().join(",")
    }

    /// What each tenant has of the budget: an operator sees all, a tenant itself.
    fn tenants_json(&self, viewer: &Viewer) -> String {
        let seen = |name: &str| match viewer {
            Viewer::Operator => true,
            Viewer::Tenant(own) => own.as_ref().map_or("", TenantName::as_str) == name,
            Viewer::Public => false,
        };
        let all = self.budget.by_tenant().filter(|(name, ..)| seen(name));
        let all = all.map(|(name, used, share)| {
            let (guaranteed, most) = (share.guaranteed, or_null(share.most));
            format!(
                r#"{{"tenant":"{name}","used":{used},"guaranteed":{guaranteed},"most":{most}}}"#
            )
        });
        all.collect::<Vec<_>>().join(",")
    }

    fn groups_json(&self) -> String {
        let groups = self.groups.iter().map(|group| {
            let (data, coding) = (quoted(&group.data), quoted(&group.coding));
            format!(r#"{{"data":[{data}],"coding":[{coding}]}}"#)
        });
        groups.collect::<Vec<_>>().join(",")
    }
}

fn quoted<'n>(nodes: impl IntoIterator<Item = &'n NodeName>) -> String {
    let names = nodes.into_iter().map(|node| format!("\"{node}\""));
    names.collect::<Vec<_>>().join(",")
}

fn or_null(number: Option<u64>) -> String {
    number.map_or("null".into(), |number| number.to_string())
}
