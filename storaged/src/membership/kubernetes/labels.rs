//! The labels of the node below a pod, which say where it lies. A pod is not told them: the downward API knows labels of pods alone.

use std::collections::BTreeMap;

use serde_json::Value;

use super::KubernetesError;
use super::api::{ApiRequest, ApiServer};

/// A node's labels, by their names.
pub type NodeLabels = BTreeMap<String, String>;

fn labels_in(node: &Value) -> NodeLabels {
    let labels = node["metadata"]["labels"].as_object();
    let texts = labels.into_iter().flatten();
    texts
        .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
        .collect()
}

impl ApiServer {
    /// The labels of a node.
    ///
    /// # Errors
    /// [`KubernetesError`] if the API server does not say.
    pub async fn labels_of_node(&self, node: &str) -> Result<NodeLabels, KubernetesError> {
        let asked = ApiRequest::get(format!("/api/v1/nodes/{node}"), format!("get node {node}"));
        Ok(labels_in(&self.ask(&asked).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_node_without_labels_has_none() {
        assert!(labels_in(&json!({"metadata": {}})).is_empty());
        let labelled = json!({"metadata": {"labels": {"topology.kubernetes.io/zone": "a"}}});
        assert_eq!(labels_in(&labelled)["topology.kubernetes.io/zone"], "a");
    }
}
