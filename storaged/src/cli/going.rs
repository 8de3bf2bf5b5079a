//! `storaged going`: whether this machine is about to go, for hooks that drain it then (deploy/kubernetes/pre-stop.sh).

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use super::{CliError, print};
use crate::config::Span;
use crate::membership::{ApiAccess, ApiServer, KubernetesError};

/// What a pod's end needs beside the drain.
const RESERVE: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
#[command(
    after_help = "Asks the API server of Kubernetes, as a pod does. A node goes if it is cordoned (`kubectl drain`), deleted, shutting down, or has a taint\nof one that goes (cluster autoscaler, Karpenter, spot notices). Stdout then has how long a drain may take, for\n`storaged drain --deadline`; the reason is on stderr. Exit codes: 0 it goes, 1 it stays, or nobody says."
)]
pub struct GoingArgs {
    /// The node in Kubernetes that this pod is on
    #[arg(long, env = "NODE_NAME")]
    node: String,
    /// This pod: what is left of its grace period is what a drain may take
    #[arg(long, env = "POD_NAME", requires = "namespace")]
    pod: Option<String>,
    /// The namespace of the pod
    #[arg(long, env = "POD_NAMESPACE")]
    namespace: Option<String>,
    /// What a drain may take where the pod was not told to end: the machine itself ends
    #[arg(long, default_value = "25s")]
    deadline: Span,
    /// The API server, if not that of the pod's environment
    #[arg(long, env = "STORAGED_KUBERNETES_SERVER")]
    server: Option<String>,
}

/// Runs `storaged going`.
pub fn going(args: &GoingArgs) -> Result<ExitCode, CliError> {
    let runtime = super::members::runtime()?;
    let Some(why) = runtime.block_on(why(args))? else {
        eprintln!("node {} stays", args.node);
        return Ok(ExitCode::FAILURE);
    };
    eprintln!("node {} goes: {why}", args.node);
    let deadline = runtime.block_on(grace(args)).unwrap_or_else(|error| {
        // Whoever goes has no time for that.
        eprintln!("{}", crate::driver::chain(&error));
        None
    });
    let deadline = deadline.unwrap_or(Duration::from_millis(args.deadline.as_ms()));
    print(&format!("{}s", deadline.as_secs().max(1)));
    Ok(ExitCode::SUCCESS)
}

fn api(args: &GoingArgs) -> Result<ApiServer, KubernetesError> {
    let server = args.server.clone();
    ApiServer::open(&ApiAccess {
        server,
        ..ApiAccess::default()
    })
}

async fn why(args: &GoingArgs) -> Result<Option<String>, KubernetesError> {
    api(args)?.why_node_goes(&args.node).await
}

async fn grace(args: &GoingArgs) -> Result<Option<Duration>, KubernetesError> {
    let Some((pod, namespace)) = args.pod.as_ref().zip(args.namespace.as_ref()) else {
        return Ok(None);
    };
    let grace = api(args)?.grace_of_pod(namespace, pod).await?;
    Ok(grace.map(|it| it.saturating_sub(RESERVE)))
}
