//! The daemon's state for `storaged status` and the status page: one JSON object. Names are validated ids, so
//! nothing in it needs escaping.

use storaged_wire::Refusal;
use storaged_wire::local::Reply;

use crate::io::RequestId;
use crate::node::Node;

impl Node {
    pub(crate) fn status(&mut self, id: RequestId) -> Result<(), Refusal> {
        let json = self.status_json();
        self.reply(id, Reply::Status(json));
        Ok(())
    }

    /// The state as JSON.
    pub fn status_json(&self) -> String {
        let ledger = self.ledger();
        let peers: Vec<String> = self
            .setup
            .members
            .iter()
            .filter(|member| member.name != self.setup.name)
            .map(|member| {
                format!(
                    r#"{{"node":"{}","up":{}}}"#,
                    member.name,
                    self.is_up(&member.name)
                )
            })
            .collect();
        let checkpoints: Vec<String> = self
            .checkpoints
            .values()
            .map(|c| {
                format!(
                    r#"{{"namespace":"{}","run":{},"step":{},"state":"{}","world_size":{},"shards_here":{},"parity_here":{}}}"#,
                    c.key.namespace, c.key.run, c.key.step, c.state, c.world_size, c.shards.len(), c.parity.len()
                )
            })
            .collect();
        let geometry = self
            .setup
            .geometry
            .map_or("null".into(), |g| format!("\"{g}\""));
        format!(
            r#"{{"node":"{}","generation":"{:016x}","geometry":{},"chunk_bytes":{},"encode":{{"link_rate":{}}},"ready":{},"memory":{{"used":{},"budget":{},"slots":{},"parity_sets":{}}},"sessions":{},"waiters":{},"peers":[{}],"checkpoints":[{}]}}"#,
            self.setup.name,
            self.setup.generation.get(),
            geometry,
            self.setup.chunk.bytes(),
            self.setup
                .link_rates
                .usual
                .map_or("null".into(), |rate| rate.to_string()),
            self.settled(),
            ledger.used,
            ledger.total,
            ledger.slots,
            ledger.parity_sets,
            ledger.sessions,
            ledger.waiters,
            peers.join(","),
            checkpoints.join(",")
        )
    }
}
