//! Numbered records in Kubernetes: one ConfigMap each, which the API server creates for whoever comes first and never changes (`immutable`).
//!
//! Which one is the newest no listing says: its order is not promised, and other servers than etcd below the API have had another. So a
//! further ConfigMap, the *head* of a series, says a number that no record is above: it is raised before a record is created, by its
//! `resourceVersion`. Where the record of that number is missing, as after a node that died between the two, all names are looked at.

mod api;
mod labels;
mod leaving;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use storaged_wire::Namespace;

use super::packed::{pack, unpack};
use super::registry::{NumberedRecord, NumberedRecords, Proposal, RegistryError, name_of_number};
use api::ApiRequest;
pub use api::{ApiAccess, ApiServer, KubernetesError};
pub use labels::NodeLabels;
pub use leaving::PodEnd;

/// Names of series are labels too, which have 63 bytes: this one, `-run-` and 32 digits.
const PREFIX_BYTES_MAX: usize = 24;
/// The label of records: their series.
const SERIES_LABEL: &str = "storaged/series";
/// The series of rosters, which the cluster begins with.
const EPOCHS: &str = "epochs";
/// What lists of ConfigMaps are called: of their names alone, and whole, which a server may answer with all the same.
const LISTS: [&str; 2] = ["PartialObjectMetadataList", "ConfigMapList"];
/// Nodes that raise a head at once are all content with the highest of their numbers.
const RAISES_MAX: usize = 20;
/// The pause before a head is raised again, doubled each time up to the longest.
const RAISE_PAUSE: Duration = Duration::from_millis(10);
const RAISE_PAUSE_LONGEST: Duration = Duration::from_millis(200);
/// What records and heads are to the API server.
const KIND: &str = "configmaps";

/// `membership.registry` with `kind = "kubernetes"`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KubernetesConfig {
    /// The namespace that its objects lie in.
    pub namespace: String,
    /// What their names begin with: of this cluster alone.
    pub prefix: String,
    /// The API server, if not that of the pod's environment.
    pub server: Option<String>,
    /// The authority of its certificate, if not the one that a pod has.
    pub ca: Option<PathBuf>,
    /// The token, if not that of the pod's service account.
    pub token_file: Option<PathBuf>,
}

impl KubernetesConfig {
    /// What is wrong with it, without asking anybody.
    ///
    /// # Errors
    /// [`KubernetesError::Config`].
    pub fn check(&self) -> Result<(), KubernetesError> {
        let wrong = |expected, got: &str| {
            let got = got.into();
            Err(KubernetesError::Config { expected, got })
        };
        if !is_label(&self.namespace, 63) {
            return wrong("a namespace of Kubernetes", &self.namespace);
        }
        if !is_label(&self.prefix, PREFIX_BYTES_MAX) {
            let expected = "a prefix of 1 to 24 of a-z, 0-9 and -, with - neither first nor last, of this cluster alone";
            return wrong(expected, &self.prefix);
        }
        self.access().check()
    }

    fn access(&self) -> ApiAccess {
        ApiAccess {
            server: self.server.clone(),
            ca: self.ca.clone(),
            token_file: self.token_file.clone(),
        }
    }

    fn series(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }
}

/// Whether it is a name as RFC 1123 has labels.
fn is_label(text: &str, bytes_max: usize) -> bool {
    let is_good = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
    (1..=bytes_max).contains(&text.len())
        && text.bytes().all(is_good)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Records that are ConfigMaps of one series.
#[derive(Debug)]
pub struct KubernetesRecords {
    api: Arc<ApiServer>,
    config: Arc<KubernetesConfig>,
    series: String,
}

/// What no record is above.
#[derive(Debug)]
struct Head {
    highest: u64,
    version: String,
}

fn odd(got: String) -> KubernetesError {
    KubernetesError::Answer { got }
}

/// What a ConfigMap of that name has as its record.
fn record_in(name: &str, found: &Value) -> Result<NumberedRecord, KubernetesError> {
    let text = found["binaryData"]["record"].as_str();
    let bytes = text.and_then(|text| BASE64.decode(text).ok());
    let bytes = bytes.ok_or_else(|| odd(format!("configmap {name} without a record")))?;
    let bytes = unpack(name, bytes).map_err(|error| odd(crate::driver::chain(&error)))?;
    let name = name.into();
    Ok(NumberedRecord { name, bytes })
}

/// What a list has, if it is a whole one. Of nothing an API server says `null`: Go's empty list is none.
fn items_in(listed: &Value) -> Result<&[Value], KubernetesError> {
    let is_list = LISTS.iter().any(|kind| listed["kind"] == *kind);
    let metadata = &listed["metadata"];
    let text = |field: &str| metadata[field].as_str().unwrap_or_default();
    let is_whole = !text("resourceVersion").is_empty() && text("continue").is_empty();
    match listed.get("items") {
        Some(Value::Array(items)) if is_list && is_whole => Ok(items),
        Some(Value::Null) if is_list && is_whole => Ok(&[]),
        _ => Err(odd("something else than a whole list".into())),
    }
}

impl Head {
    fn of(name: &str, found: &Value) -> Result<Self, KubernetesError> {
        let highest = found["data"]["highest"].as_str();
        let version = found["metadata"]["resourceVersion"].as_str();
        let parsed = highest.and_then(|it| it.parse().ok()).zip(version);
        let (highest, version) = parsed.ok_or_else(|| {
            odd(format!(
                "configmap {name} without a number: delete it, and it is made anew"
            ))
        })?;
        let version = version.into();
        Ok(Self { highest, version })
    }
}

impl KubernetesRecords {
    /// As the configuration says. Nobody is asked yet.
    ///
    /// # Errors
    /// [`KubernetesError`] if the configuration, or a file that it names, cannot be used.
    pub fn open(config: &KubernetesConfig) -> Result<Self, KubernetesError> {
        config.check()?;
        Ok(Self {
            api: Arc::new(ApiServer::open(&config.access())?),
            config: Arc::new(config.clone()),
            series: config.series(EPOCHS),
        })
    }

    fn name(&self, number: u64) -> String {
        format!("{}-{}", self.series, name_of_number(number))
    }

    /// Of all ConfigMaps, or of one.
    fn path(&self, name: Option<&str>) -> String {
        let all = format!("/api/v1/namespaces/{}/{KIND}", self.config.namespace);
        name.map_or(all.clone(), |name| format!("{all}/{name}"))
    }

    fn action(&self, verb: &str, name: &str) -> String {
        format!("{verb} configmap {name} in {}", self.config.namespace)
    }

    async fn get(&self, name: &str) -> Result<Option<Value>, KubernetesError> {
        let asked = ApiRequest::get(self.path(Some(name)), self.action("get", name));
        match self.api.ask(&asked).await {
            // Not whatever else answers so: what is absent makes a cluster begin anew.
            Err(KubernetesError::Refused(it)) if it.status == 404 && it.kind == KIND => Ok(None),
            answered => answered.map(Some),
        }
    }

    async fn read(&self, number: u64) -> Result<Option<NumberedRecord>, KubernetesError> {
        let name = self.name(number);
        let found = self.get(&name).await?;
        found.map(|found| record_in(&name, &found)).transpose()
    }

    async fn head(&self) -> Result<Option<Head>, KubernetesError> {
        let found = self.get(&self.series).await?;
        let head = found.map(|found| Head::of(&self.series, &found));
        head.transpose()
    }

    /// The highest number of all records, by their names. In one answer: where names do not come in order, pages leave some out.
    async fn highest_of_all(&self) -> Result<Option<u64>, KubernetesError> {
        let selector = format!("labelSelector={SERIES_LABEL}%3D{}", self.series);
        let path = format!("{}?{selector}", self.path(None));
        let listed = self
            .api
            .ask(&ApiRequest::names(path, self.action("list", &self.series)))
            .await?;
        let items = items_in(&listed)?;
        let number = |item: &Value| {
            let name = item["metadata"]["name"].as_str()?;
            let digits = name.strip_prefix(&self.series)?.strip_prefix('-')?;
            Some(u64::MAX - digits.parse::<u64>().ok()?)
        };
        Ok(items.iter().filter_map(number).max())
    }

    /// What a ConfigMap of ours has beside its content.
    fn metadata(&self, name: &str) -> Value {
        json!({
            "name": name,
            "namespace": self.config.namespace,
            "labels": {"app.kubernetes.io/managed-by": "storaged"},
        })
    }

    /// Makes the head say at least this number.
    async fn raise_head(&self, number: u64) -> Result<(), KubernetesError> {
        let mut pause = RAISE_PAUSE;
        for _ in 0..RAISES_MAX {
            let head = self.head().await?;
            if head.as_ref().is_some_and(|it| it.highest >= number) {
                return Ok(());
            }
            let action = self.action("write", &self.series);
            let mut body = self.head_body(number);
            let asked = match head {
                Some(head) => {
                    body["metadata"]["resourceVersion"] = head.version.into();
                    ApiRequest::replace(self.path(Some(&self.series)), body, action)
                }
                // Somebody may have deleted it beside higher records.
                None => {
                    let highest = self.highest_of_all().await?.unwrap_or_default();
                    ApiRequest::create(self.path(None), self.head_body(number.max(highest)), action)
                }
            };
            match self.api.ask(&asked).await {
                // Another node was faster, or this one, whose answer was lost.
                Err(KubernetesError::Refused(it)) if it.is_outrun(KIND) => {}
                answered => return answered.map(drop),
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(RAISE_PAUSE_LONGEST);
        }
        let series = &self.series;
        Err(odd(format!("another configmap {series} again and again")))
    }

    fn head_body(&self, highest: u64) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self.metadata(&self.series),
            "data": {"highest": highest.to_string()},
        })
    }

    async fn create_record(&self, number: u64, record: Bytes) -> Result<Proposal, KubernetesError> {
        let name = self.name(number);
        let mut metadata = self.metadata(&name);
        metadata["labels"][SERIES_LABEL] = self.series.clone().into();
        let body = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "immutable": true,
            "binaryData": {"record": BASE64.encode(pack(record.clone()))},
        });
        let asked = ApiRequest::create(self.path(None), body, self.action("create", &name));
        match self.api.ask(&asked).await {
            Ok(_) => return Ok(Proposal::Taken),
            Err(KubernetesError::Refused(it)) if it.is_outrun(KIND) => {}
            Err(error) => return Err(error),
        }
        match self.read(number).await? {
            Some(there) if there.bytes == record => Ok(Proposal::Taken),
            Some(_) => Ok(Proposal::Outrun),
            None => Err(odd(format!("configmap {name}, which is not there"))),
        }
    }

    async fn find_newest(&self) -> Result<Option<NumberedRecord>, KubernetesError> {
        let head = self.head().await?;
        if let Some(head) = &head
            && let Some(record) = self.read(head.highest).await?
        {
            return Ok(Some(record));
        }
        let Some(highest) = self.highest_of_all().await? else {
            // Epochs have no gaps: somebody has removed them, or lists are kept from this node. It must not begin a cluster anew.
            let head = head.map_or(0, |head| head.highest);
            if head > 1 && self.series == self.config.series(EPOCHS) {
                return Err(odd(format!("no record beside the head of epoch {head}")));
            }
            return Ok(None);
        };
        let record = self.read(highest).await?;
        let lacking = || {
            odd(format!(
                "a list with {}, which is not there",
                self.name(highest)
            ))
        };
        record.ok_or_else(lacking).map(Some)
    }
}

#[async_trait]
impl NumberedRecords for KubernetesRecords {
    fn runs_of(&self, namespace: &Namespace) -> Arc<dyn NumberedRecords> {
        // A namespace of ours has letters that a name of Kubernetes has not; what lies there says whose it is.
        let digest = blake3::hash(namespace.as_str().as_bytes());
        let digits = hex::encode(&digest.as_bytes()[..16]);
        Arc::new(Self {
            api: self.api.clone(),
            config: self.config.clone(),
            series: self.config.series(&format!("run-{digits}")),
        })
    }

    async fn record(&self, number: u64) -> Result<Option<NumberedRecord>, RegistryError> {
        Ok(self.read(number).await?)
    }

    async fn newest(&self) -> Result<Option<NumberedRecord>, RegistryError> {
        Ok(self.find_newest().await?)
    }

    async fn create(&self, number: u64, record: Bytes) -> Result<Proposal, RegistryError> {
        self.raise_head(number).await?;
        Ok(self.create_record(number, record).await?)
    }

    /// A name that is not there is not there: the API server reads from a majority of etcd where no version is asked for.
    async fn check_place(&self) -> Result<(), RegistryError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> KubernetesConfig {
        KubernetesConfig {
            namespace: "storaged".into(),
            prefix: "a".into(),
            server: None,
            ca: None,
            token_file: None,
        }
    }

    #[test]
    fn what_cannot_be_is_said_before_anybody_is_asked() {
        config().check().unwrap();
        for server in [
            "https://10.0.0.1:6443/",
            "https://[fd00::1]:443",
            "http://127.0.0.1:8001",
        ] {
            let server = Some(server.into());
            KubernetesConfig { server, ..config() }.check().unwrap();
        }
        for server in [
            "http://10.0.0.1:6443",
            "10.0.0.1:6443",
            "https://a/api",
            "https://a?b=c",
            "ftp://a",
        ] {
            let server = Some(server.into());
            let error = KubernetesConfig { server, ..config() }.check().unwrap_err();
            assert!(error.to_string().contains("server"), "{error}");
        }
        for wrong in ["", "A", "a_b", "a.b", "-a", "a-", &"a".repeat(64)] {
            let (namespace, prefix) = (wrong.to_owned(), wrong.to_owned());
            assert!(
                KubernetesConfig {
                    namespace,
                    ..config()
                }
                .check()
                .is_err(),
                "{wrong}"
            );
            assert!(
                KubernetesConfig { prefix, ..config() }.check().is_err(),
                "{wrong}"
            );
        }
        let prefix = "a".repeat(PREFIX_BYTES_MAX + 1);
        assert!(KubernetesConfig { prefix, ..config() }.check().is_err());
    }

    #[test]
    fn names_and_labels_of_the_longest_prefix_fit() {
        let config = KubernetesConfig {
            prefix: "a".repeat(PREFIX_BYTES_MAX),
            server: Some("http://127.0.0.1:1".into()),
            ..config()
        };
        let records = KubernetesRecords::open(&config).unwrap();
        assert!(is_label(&records.series, 63));
        assert!(
            format!("{:?}", records.runs_of(&Namespace::new("t~j").unwrap())).contains("-run-")
        );
        assert!(config.series("run-").len() + 32 <= 63);
    }

    #[test]
    fn objects_that_are_none_of_ours_are_errors() {
        for found in [
            json!({}),
            json!({"binaryData": {"record": "%"}}),
            json!({"data": {"record": "YQ=="}}),
        ] {
            assert!(record_in("n", &found).is_err(), "{found}");
        }
        assert_eq!(
            record_in("n", &json!({"binaryData": {"record": "YQ=="}}))
                .unwrap()
                .bytes,
            "a"
        );
        for found in [
            json!({}),
            json!({"data": {"highest": "-1"}, "metadata": {"resourceVersion": "1"}}),
        ] {
            assert!(Head::of("h", &found).is_err(), "{found}");
        }
        let whole = json!({"resourceVersion": "9"});
        let cut = json!({"resourceVersion": "9", "continue": "x"});
        for found in [
            json!({"metadata": whole, "items": []}),
            json!({"kind": "Status", "metadata": whole, "items": null}),
            json!({"kind": "ConfigMapList", "metadata": whole, "items": {}}),
            json!({"kind": "ConfigMapList", "metadata": whole}),
            json!({"kind": "ConfigMapList", "metadata": cut, "items": null}),
            json!({"kind": "ConfigMapList", "metadata": {"resourceVersion": ""}, "items": null}),
            json!({"kind": "ConfigMapList", "items": null}),
        ] {
            assert!(items_in(&found).is_err(), "{found}");
        }
    }

    #[test]
    fn of_nothing_there_is_a_list_without_items() {
        for items in [json!(null), json!([])] {
            let metadata = json!({"resourceVersion": "9"});
            let found =
                json!({"kind": "PartialObjectMetadataList", "metadata": metadata, "items": items});
            assert!(items_in(&found).unwrap().is_empty(), "{found}");
        }
    }
}
