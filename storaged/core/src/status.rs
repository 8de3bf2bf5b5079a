//! The daemon's state for `storaged status` and the status page: one JSON object. Names are validated ids, so
//! nothing in it needs escaping.

use storaged_wire::local::standing;
use storaged_wire::{NodeName, TenantName};

use crate::api::Viewer;
use crate::budget::Ledger;
use crate::context::Context;
use crate::encode::{NodeRate, Sessions, SideRate};
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
    let checkpoints: Vec<String> = cx
            .checkpoints
            .values()
            .filter_map(|c| {
                let namespace = viewer.name_of(&c.key.namespace)?;
                Some(format!(
                    r#"{{"namespace":"{namespace}","run":"{}","step":{},"state":"{}","standing":"{}","superseded":{},"bears":{},"bears_full":{},"owed":{},"no_room":{},"world_size":{},"shards_here":{},"parity_here":{}}}"#,
                    c.key.run,
                    c.key.step,
                    c.state,
                    standing(c.state, cx.bears(c), cx.kept_for(c)),
                    cx.kept_for(c).is_some(),
                    or_null(cx.bears(c).map(|bears| bears.losses.into())),
                    or_null(cx.bears(c).map(|bears| bears.of.into())),
                    cx.is_due(c),
                    cx.no_room_of(c)
                        .map_or("null".into(), |why| format!("\"{}\"", plain(&why))),
                    c.world_size,
                    c.shards.len(),
                    c.parity.len()
                ))
            })
            .collect();
    let geometry = cx
        .setup
        .geometry
        .map_or("null".into(), |g| format!("\"{g}\""));
    format!(
        r#"{{"node":"{}","generation":"{:016x}","geometry":{},"chunk_bytes":{},"encode":{{"link_rate":{},"node_rates":{{{}}},"link_rate_measured":{},"links":[{}]}},"groups":[{}],"ready":{},"restart_safe":{},"durable":{},"quarantined":[{}],"memory":{{"used":{},"budget":{},"records":{},"slots":{},"unchecked_slots":{},"parity_sets":{},"tenants":[{}]}},"scrub":{},"sessions":{},"waiters":{},"peers":[{}],"checkpoints":[{}]}}"#,
        cx.setup.name,
        cx.setup.generation.get(),
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
        ledger.slots,
        ledger.unchecked_slots,
        ledger.parity_sets,
        cx.tenants_json(viewer),
        scrub_json(scrub),
        ledger.sessions,
        ledger.waiters,
        peers.join(","),
        checkpoints.join(",")
    )
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
        let names = |nodes: &[NodeName]| {
            let names = nodes.iter().map(|node| format!("\"{node}\""));
            names.collect::<Vec<_>>().join(",")
        };
        let groups = self.groups.iter().map(|group| {
            let (data, coding) = (names(&group.data), names(&group.coding));
            format!(r#"{{"data":[{data}],"coding":[{coding}]}}"#)
        });
        groups.collect::<Vec<_>>().join(",")
    }
}

fn or_null(number: Option<u64>) -> String {
    number.map_or("null".into(), |number| number.to_string())
}
