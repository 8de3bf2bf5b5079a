//! Whether the machine below a pod is about to go, as its node in Kubernetes says, and how long the pod may take to end. A DaemonSet's pod
//! is told nothing else: `kubectl drain` passes it over, and when the machine ends it gets a SIGTERM like any pod that is started again.

use std::time::Duration;

use serde_json::Value;

use super::KubernetesError;
use super::api::{ApiRequest, ApiServer};

/// Taints of a node that goes, by who sets them: Kubernetes, its cloud controllers, the cluster autoscaler, Karpenter, AWS, GKE.
const TAINTS: &[&str] = &[
    "node.kubernetes.io/out-of-service",
    "node.cloudprovider.kubernetes.io/shutdown",
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "aws-node-termination-handler/",
    "cloud.google.com/impending-node-termination",
];
/// What the kubelet says beside `Ready` while it ends the pods of a machine that shuts down.
const SHUTTING_DOWN: &str = "node is shutting down";
/// What it says of a pod that it ends for that, in the condition `DisruptionTarget`; the node may say it later.
const ENDED_FOR_SHUTDOWN: &str = "imminent node shutdown";

/// How a pod ends.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PodEnd {
    /// What it was given, from when it was told to end; none before, and where the kubelet ends it by itself.
    pub grace: Option<Duration>,
    /// Why the machine goes, in words, if it ends for that.
    pub why_machine_goes: Option<String>,
}

/// Why a node goes, in words; none if it stays.
pub fn why_it_goes(node: &Value) -> Option<String> {
    let taints = node["spec"]["taints"].as_array().into_iter().flatten();
    let keys = taints.filter_map(|taint| taint["key"].as_str());
    let is_known = |key: &&str| TAINTS.iter().any(|known| key.starts_with(known));
    let taint = keys.clone().find(is_known);
    let conditions = node["status"]["conditions"].as_array();
    let mut messages = conditions
        .into_iter()
        .flatten()
        .filter_map(|condition| condition["message"].as_str());
    if node["metadata"]["deletionTimestamp"].is_string() {
        Some("it is being deleted".into())
    } else if let Some(taint) = taint {
        Some(format!("it has the taint {taint}"))
    } else if messages.any(|message| message.contains(SHUTTING_DOWN)) {
        Some("it is shutting down".into())
    } else if node["spec"]["unschedulable"] == true {
        Some("it takes no pods any more (cordoned or drained)".into())
    } else {
        None
    }
}

/// How this pod ends.
fn end_of(pod: &Value) -> PodEnd {
    let conditions = pod["status"]["conditions"].as_array();
    let mut messages = conditions
        .into_iter()
        .flatten()
        .filter(|condition| condition["type"] == "DisruptionTarget")
        .filter_map(|condition| condition["message"].as_str());
    let shutdown = messages.find(|message| message.contains(ENDED_FOR_SHUTDOWN));
    let grace = pod["metadata"]["deletionGracePeriodSeconds"].as_u64();
    PodEnd {
        grace: grace.map(Duration::from_secs),
        why_machine_goes: shutdown.map(|message| format!("the kubelet says: {message}")),
    }
}

impl ApiServer {
    /// Why a node goes.
    ///
    /// # Errors
    /// [`KubernetesError`] if the API server does not say.
    pub async fn why_node_goes(&self, node: &str) -> Result<Option<String>, KubernetesError> {
        let asked = ApiRequest::get(format!("/api/v1/nodes/{node}"), format!("get node {node}"));
        Ok(why_it_goes(&self.ask(&asked).await?))
    }

    /// How a pod ends.
    ///
    /// # Errors
    /// [`KubernetesError`] if the API server does not say.
    pub async fn end_of_pod(&self, namespace: &str, pod: &str) -> Result<PodEnd, KubernetesError> {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}");
        let asked = ApiRequest::get(path, format!("get pod {pod} in {namespace}"));
        Ok(end_of(&self.ask(&asked).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_node_goes_for_a_reason_alone() {
        let ready = json!({"type": "Ready", "status": "True", "message": "kubelet is posting ready status"});
        let stays = json!({
            "metadata": {"name": "n"},
            "spec": {"taints": [
                {"key": "nvidia.com/gpu", "effect": "NoSchedule"},
                {"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"},
            ]},
            "status": {"conditions": [ready]},
        });
        assert_eq!(why_it_goes(&stays), None);
        assert_eq!(why_it_goes(&json!({})), None);
        let with = |path: &str, value: Value| {
            let mut node = stays.clone();
            *node.pointer_mut(path).unwrap() = value;
            why_it_goes(&node).unwrap()
        };
        for taint in TAINTS {
            assert!(with("/spec/taints/0/key", json!(taint)).contains(taint));
        }
        let message = "container runtime is down, node is shutting down";
        assert!(with("/status/conditions/0/message", json!(message)).contains("shutting"));
        assert!(with("/spec", json!({"unschedulable": true})).contains("cordoned"));
        let deleted = json!({"deletionTimestamp": "2026-11-25T00:00:00Z"});
        assert!(with("/metadata", deleted).contains("deleted"));
    }
    #[test]
    fn a_pod_says_what_it_was_given_and_whether_the_machine_shuts_down() {
        assert_eq!(end_of(&json!({})), PodEnd::default());
        let evicted = json!({
            "metadata": {"deletionGracePeriodSeconds": 30},
            "status": {"conditions": [{
                "type": "DisruptionTarget",
                "reason": "EvictionByEvictionAPI",
                "message": "Eviction API: evicting",
            }]},
        });
        let grace = Some(Duration::from_secs(30));
        let why_machine_goes = None;
        assert_eq!(
            end_of(&evicted),
            PodEnd {
                grace,
                why_machine_goes
            }
        );
        let shutdown = json!({"status": {"conditions": [
            {"type": "Ready", "status": "True"},
            {
                "type": "DisruptionTarget",
                "reason": "TerminationByKubelet",
                "message": "Pod was terminated in response to imminent node shutdown.",
            },
        ]}});
        let PodEnd {
            grace,
            why_machine_goes,
        } = end_of(&shutdown);
        assert_eq!(grace, None);
        assert!(why_machine_goes.unwrap().contains("node shutdown"));
    }
}
