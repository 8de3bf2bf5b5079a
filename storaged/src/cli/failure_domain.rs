//! `storaged failure-domain`: where a node lies by its labels in Kubernetes, for whoever starts its daemon (deploy/kubernetes/daemon.sh).

use clap::Args;

use super::{CliError, print};
use crate::membership::{ApiAccess, ApiServer, KubernetesError, NodeLabels};

#[derive(Debug, Args)]
#[command(
    after_help = "Asks the API server of Kubernetes, as a pod does, and prints the labels' values with a / between them, as STORAGED_FAILURE_DOMAIN\nhas it. Exit codes: 0 it is known, 1 nobody says, 78 the node lacks a label or may not be looked at.\n\nExample:\n  storaged failure-domain --labels topology.kubernetes.io/zone,kubernetes.io/hostname"
)]
pub struct FailureDomainArgs {
    /// The node in Kubernetes that this pod is on
    #[arg(long, env = "NODE_NAME")]
    node: String,
    /// Labels of the node, from the outermost level on, with commas between them
    #[arg(
        long,
        env = "STORAGED_FAILURE_DOMAIN_LABELS",
        value_delimiter = ',',
        required = true
    )]
    labels: Vec<String>,
    /// The API server, if not that of the pod's environment
    #[arg(long, env = "STORAGED_KUBERNETES_SERVER")]
    server: Option<String>,
}

/// Runs `storaged failure-domain`.
pub fn failure_domain(args: &FailureDomainArgs) -> Result<(), CliError> {
    let runtime = super::members::runtime()?;
    let found = runtime.block_on(ask(args)).map_err(CliError::Labels)?;
    print(&domain(args, &found)?);
    Ok(())
}

async fn ask(args: &FailureDomainArgs) -> Result<NodeLabels, KubernetesError> {
    let api = ApiServer::open(&ApiAccess {
        server: args.server.clone(),
        ..ApiAccess::default()
    })?;
    api.labels_of_node(&args.node).await
}

/// A level that is left out would part this node from all others.
fn domain(args: &FailureDomainArgs, found: &NodeLabels) -> Result<String, CliError> {
    let level = |label: &String| {
        let value = found.get(label).filter(|value| !value.is_empty());
        value.cloned().ok_or_else(|| CliError::NoLabel {
            node: args.node.clone(),
            label: label.clone(),
        })
    };
    let levels: Result<Vec<String>, CliError> = args.labels.iter().map(level).collect();
    Ok(levels?.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_has_the_levels_that_were_asked_for_or_none() {
        let args = |labels: &[&str]| FailureDomainArgs {
            node: "worker".into(),
            labels: labels.iter().map(|label| (*label).to_owned()).collect(),
            server: None,
        };
        let found = [("zone", "a"), ("rack", "7"), ("row", "")];
        let found: NodeLabels = found
            .map(|(label, value)| (label.to_owned(), value.to_owned()))
            .into();
        let told = |labels: &[&str]| domain(&args(labels), &found);
        assert_eq!(told(&["zone", "rack"]).unwrap(), "a/7");
        assert_eq!(told(&["rack"]).unwrap(), "7");
        for lacking in ["row", "host"] {
            let error = told(&["zone", lacking]).unwrap_err().to_string();
            assert!(
                error.contains(lacking) && error.contains("worker"),
                "{error}"
            );
        }
    }
}
