//! `storaged going`: whether this machine is about to go, and how long its pod may take to end, for hooks that drain it then
//! (deploy/kubernetes/pre-stop.sh).

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use super::{CliError, print};
use crate::config::Span;
use crate::membership::{ApiAccess, ApiServer, KubernetesError, PodEnd};

/// What a pod's end needs beside the drain.
const RESERVE: Duration = Duration::from_secs(5);
/// The machine is known to stay. Nothing that fails ends so.
const EXIT_STAYS: u8 = 3;

#[derive(Debug, Args)]
#[command(
    after_help = "Asks the API server of Kubernetes, as a pod does. A node goes if it is cordoned (`kubectl drain`), deleted, shutting down, or has a taint\nof one that goes (cluster autoscaler, Karpenter, spot notices). Stdout then has how long a drain may take, for\n`storaged drain --deadline`; the reason is on stderr. Where it stays, stdout has that time if the pod alone was told to end.\nIt counts from when the pod was told. Exit codes: 0 it goes, 3 it is known to stay, 1 nobody says."
)]
pub struct GoingArgs {
    /// The node in Kubernetes that this pod is on
    #[arg(long, env = "NODE_NAME")]
    node: String,
    /// This pod: a drain may take the grace period that it was told to end with, but for 5 s
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

/// What the API server says of both.
struct Said {
    why_node_goes: Result<Option<String>, KubernetesError>,
    pod: Result<PodEnd, KubernetesError>,
}

/// Runs `storaged going`.
pub fn going(args: &GoingArgs) -> Result<ExitCode, CliError> {
    let runtime = super::members::runtime()?;
    let Said { why_node_goes, pod } = runtime.block_on(ask(args))?;
    let (pod, pod_fault) = match pod {
        Ok(pod) => (pod, None),
        Err(error) => (PodEnd::default(), Some(error)),
    };
    let grace = pod.grace.map(|it| it.saturating_sub(RESERVE));
    let shuts_down = pod.why_machine_goes.is_some();
    let why = match (why_node_goes, pod.why_machine_goes) {
        (Ok(Some(why)), _) | (_, Some(why)) => why,
        (stays, None) => {
            if let Some(grace) = grace {
                tell(grace);
            }
            stays?;
            // A kubelet that shuts its machine down says so of the pod first.
            pod_fault.map_or(Ok(()), Err)?;
            eprintln!("node {} stays", args.node);
            return Ok(EXIT_STAYS.into());
        }
    };
    if let Some(error) = pod_fault {
        eprintln!("{}", crate::driver::chain(&error));
    }
    eprintln!("node {} goes: {why}", args.node);
    let usual = Duration::from_millis(args.deadline.as_ms());
    // A kubelet that shuts its machine down gives no more, whatever an earlier order to delete the pod gave it.
    tell(match grace {
        Some(grace) if !shuts_down => grace,
        Some(grace) => grace.min(usual),
        None => usual,
    });
    Ok(ExitCode::SUCCESS)
}

fn tell(within: Duration) {
    print(&format!("{}s", within.as_secs().max(1)));
}

/// Asks for both at once: the pod's time may be short.
async fn ask(args: &GoingArgs) -> Result<Said, KubernetesError> {
    let api = ApiServer::open(&ApiAccess {
        server: args.server.clone(),
        ..ApiAccess::default()
    })?;
    let (why_node_goes, pod) = tokio::join!(api.why_node_goes(&args.node), end_of_pod(&api, args));
    Ok(Said { why_node_goes, pod })
}

async fn end_of_pod(api: &ApiServer, args: &GoingArgs) -> Result<PodEnd, KubernetesError> {
    match args.pod.as_ref().zip(args.namespace.as_ref()) {
        Some((pod, namespace)) => api.end_of_pod(namespace, pod).await,
        None => Ok(PodEnd::default()),
    }
}
