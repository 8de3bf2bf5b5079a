//! What may change while the daemon runs (kill -HUP), and what may not.

use storaged_plan::Member;

use super::Config;

/// A key that a reload cannot change: the old value stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fixed {
    /// As in the file.
    pub key: &'static str,
    /// The value that stays.
    pub running: String,
    /// The one in the file.
    pub file: String,
}

fn text<T: std::fmt::Debug>(value: &T) -> String {
    format!("{value:?}")
}

impl Config {
    /// Takes what a reload may change from `file`: certificates, peers and their failure domains, the log filter, the
    /// durable tier's keys. Says
    /// which other keys differ; of those the old values stay.
    pub fn take(&mut self, file: &Self) -> Vec<Fixed> {
        let fixed = self.differing(file);
        self.tls = file.tls.clone();
        self.log_filter = file.log_filter.clone();
        self.take_keys(file);
        // The roster says who they are, not the file.
        if self.membership.is_some() {
            return fixed;
        }
        self.peers = file.peers.clone();
        // Its own failure domain too: each of its peers takes it from the list that it reloads. A name stays.
        let is_own = |member: &&Member| member.name == self.name;
        let own = file.members.iter().chain(&self.members).find(is_own);
        let others = file.members.iter();
        let others = others.filter(|it| it.name != self.name && it.name != file.name);
        self.members = own.into_iter().chain(others).cloned().collect();
        fixed
    }

    /// The keys that are in the same place now; a program that has given none leaves the old ones.
    fn take_keys(&mut self, file: &Self) {
        let own = self.encryption.as_mut();
        if let Some((own, file)) = own.zip(file.encryption.as_ref())
            && own.source == file.source
            && file.keys.is_some()
        {
            own.keys.clone_from(&file.keys);
        }
    }

    fn differing(&self, file: &Self) -> Vec<Fixed> {
        let own = |config: &Self| {
            // The roster has it, and asks for it at the next start. What is listed is taken.
            let membership = config.membership.as_ref();
            membership.map(|it| it.arrival.failure_domain.clone())
        };
        let named = |name: &dyn Fn(&Self) -> String, key| {
            let (running, file) = (name(self), name(file));
            (running != file).then_some(Fixed { key, running, file })
        };
        type Key<'a> = (&'static str, &'a dyn Fn(&Config) -> String);
        let keys: [Key<'_>; 27] = [
            ("node.name", &|config| config.node.to_string()),
            ("membership", &|config| text(&config.membership)),
            ("node.failure_domain", &|config| text(&own(config))),
            ("node.listen", &|config| config.listen.to_string()),
            ("network", &|config| config.network.to_string()),
            ("node.ops_listen", &|config| text(&config.ops_listen)),
            ("node.ops_names", &|config| text(&config.ops_viewer)),
            ("node.leave_within", &|config| text(&config.leave_within)),
            ("tls.watch", &|config| text(&config.tls_watch)),
            ("coding.k and coding.m", &|config| text(&config.geometry)),
            ("coding.chunk", &|config| config.chunk.bytes().to_string()),
            (
                "encode.rates, encode.link_rate and encode.node_rates",
                &|config| text(&config.link_rates),
            ),
            ("encode.repair_rate", &|config| text(&config.repair_rate)),
            ("encode.threads and encode.cores", &|config| {
                text(&config.codec_threads)
            }),
            ("memory.budget", &|config| config.budget_set.clone()),
            ("memory.slots_per_rank", &|config| {
                config.slots_per_rank.to_string()
            }),
            ("memory.keep_steps", &|config| config.keep_steps.to_string()),
            ("memory.idle_job", &|config| {
                format!("{} ms", config.idle_job_ms)
            }),
            ("memory.swap", &|config| text(&config.swap)),
            ("scrub", &|config| text(&config.scrub)),
            ("tenants and admin", &|config| {
                text(&(&config.sockets, &config.shares))
            }),
            ("durable", &|config| text(&config.durable)),
            ("trickle.shared_reads", &|config| text(&config.shared_reads)),
            ("trickle.every", &|config| text(&config.durable_policy)),
            ("trickle", &|config| text(&config.trickle)),
            ("trickle.encryption", &|config| {
                let encryption = config.encryption.as_ref();
                text(&encryption.map(|it| (&it.source, it.plain)))
            }),
            ("hyperpod", &|config| text(&config.hyperpod)),
        ];
        keys.into_iter()
            .filter_map(|(key, name)| named(name, key))
            .collect()
    }

    /// What this node and its peers must have in common.
    pub fn agreement(&self) -> crate::net::Agreement {
        let agreement = match &self.cluster {
            // Nodes read a new roster one after the other: those that have not yet are linked to all the same.
            Some(cluster) => {
                let runs = self.membership.as_ref().map(|it| it.runs);
                let runs = runs.unwrap_or_default();
                let cluster = cluster.clone();
                crate::net::Agreement::of_cluster(self.geometry, self.chunk, cluster, runs)
            }
            None => crate::net::Agreement::of(self.geometry, self.chunk, &self.members),
        };
        let encryption = self.encryption.as_ref().map(|encryption| {
            let keys = encryption.keys.as_ref();
            keys.map_or_else(
                || "not known yet".into(),
                |keys| format!("key {}", keys.newest().id()),
            )
        });
        agreement.advising(self.keep_steps, encryption)
    }
}
