//! Google Cloud Storage against a server in this process that speaks S3's protocol, as Google's does; Azure against Azurite where the environment names one.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use tokio::net::TcpListener;

use super::super::cloud::CloudHttp;
use super::super::config::settled;
use super::super::place::EmptyPlace;
use super::super::unproven::Check;
use super::super::{
    AzureConfig, CloudStore, GcsConfig, KeyPrefix, PartNumber, Store, StoreConfig, StoreError, open,
};
use super::conformance::conforms_but_for_resuming;
use super::encrypted::encrypted;
use super::s3::{BUCKET, Tags, Who, serve_to};
use super::{key, part_bytes, part_of, pattern, randomness};

const TOKEN: &str = "a-token";

fn gcs_config(endpoint: &str) -> GcsConfig {
    let text = format!("bucket = {BUCKET:?}\nprefix = 'some/prefix'\nendpoint = {endpoint:?}");
    toml::from_str(&text).unwrap()
}

fn gcs_over(endpoint: &str, http: impl HttpConnector) -> CloudStore {
    let config = gcs_config(endpoint);
    let builder = config.builder(http).with_bearer_token(TOKEN);
    CloudStore::gcs_built(&config, builder, randomness()).unwrap()
}

fn gcs(endpoint: &str) -> CloudStore {
    gcs_over(endpoint, CloudHttp::new().unwrap())
}

/// A network that does what it is asked for, and loses the first answer to a request with this in its address.
#[derive(Debug, Clone)]
struct Lossy {
    http: CloudHttp,
    of: &'static str,
    lost: Arc<AtomicBool>,
}

impl Lossy {
    fn new(of: &'static str) -> Self {
        let http = CloudHttp::new().unwrap();
        let lost = Arc::default();
        Self { http, of, lost }
    }
}

impl HttpConnector for Lossy {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait::async_trait]
impl HttpService for Lossy {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_it = request.uri().to_string().contains(self.of)
            && !request.uri().to_string().contains("partNumber");
        let answer = self.http.call(request).await;
        if is_it && !self.lost.swap(true, Ordering::Relaxed) {
            let lost = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
            return Err(HttpError::new(HttpErrorKind::Interrupted, lost));
        }
        answer
    }
}

/// Writes an object of two parts, over a network that loses the answer to what puts them together.
async fn completes_though_its_answer_is_lost(store: &CloudStore, lost: &AtomicBool) {
    let (size, name) = (part_bytes(store), key("lost/shard"));
    let bytes = pattern(size.get() as usize + 10, 1);
    let mut upload = store.begin(&name, size).await.unwrap();
    for number in [PartNumber(0), PartNumber(1)] {
        let state = store
            .put_part(&upload, number, part_of(&bytes, size, number))
            .await
            .unwrap();
        upload.note(number, state);
    }
    let length = bytes.len() as u64;
    let error = store.complete(&upload, length).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    assert!(lost.load(Ordering::Relaxed));
    store.complete(&upload, length).await.unwrap();
    assert_eq!(store.get(&name, None).await.unwrap(), bytes);
    assert_eq!(store.unfinished(&KeyPrefix::root()).await.unwrap(), []);
    store.delete(&name).await.unwrap();
}

#[tokio::test]
async fn an_object_is_complete_though_the_answer_was_lost() {
    let root = tempfile::tempdir().unwrap();
    let served = serve_to(root.path(), Tags::OfParts, Who::Bearer(TOKEN)).await;
    let http = Lossy::new("uploadId=");
    let lost = Arc::clone(&http.lost);
    completes_though_its_answer_is_lost(&gcs_over(&served.endpoint, http), &lost).await;
}

/// Not yet given to this machine, say: RAM is served till then.
#[tokio::test]
async fn an_identity_that_is_not_there_is_denied() {
    for status in ["400 Bad Request", "404 Not Found", "403 Forbidden"] {
        let text = "account = 'train'\ncontainer = 'ckpt'\nendpoint = 'http://127.0.0.1:1/train'";
        let config: AzureConfig = toml::from_str(text).unwrap();
        let builder = config.builder(CloudHttp::new().unwrap());
        let builder = builder.with_msi_endpoint(always(status).await);
        let store = CloudStore::azure_built(&config, builder, randomness()).unwrap();
        let error = store.length(&key("a")).await.unwrap_err();
        assert!(
            matches!(error, StoreError::Denied { .. }),
            "{status}: {error:?}"
        );
    }
}

#[tokio::test]
async fn a_bucket_that_is_not_there_is_no_tier() {
    let nothing: Check = Box::new(|| Box::pin(std::future::ready(Ok(()))));
    let store = Arc::new(gcs(&always("404 Not Found").await));
    assert!(!format!("{store:?}").contains(TOKEN), "{store:?}");
    let opened = settled(store, nothing, randomness(), &EmptyPlace::Bucket).await;
    let error = opened.unwrap_err();
    assert!(matches!(error, StoreError::NotMounted { .. }), "{error:?}");
}

#[tokio::test]
async fn google_cloud_storage_conforms() {
    let root = tempfile::tempdir().unwrap();
    let served = serve_to(root.path(), Tags::OfParts, Who::Bearer(TOKEN)).await;
    conforms_but_for_resuming(Arc::new(gcs(&served.endpoint)), "job").await;
    assert!(root.path().join(BUCKET).join("some/prefix").exists());
}

#[tokio::test]
async fn google_cloud_storage_conforms_encrypted() {
    let root = tempfile::tempdir().unwrap();
    let served = serve_to(root.path(), Tags::OfParts, Who::Bearer(TOKEN)).await;
    let inner = Arc::new(gcs(&served.endpoint));
    conforms_but_for_resuming(Arc::new(encrypted(inner, &["1"])), "job").await;
}

/// Google keeps what nobody has put together, and sends bills for it.
#[tokio::test]
async fn what_an_earlier_process_left_of_an_upload_is_known_and_given_up() {
    let root = tempfile::tempdir().unwrap();
    let served = serve_to(root.path(), Tags::OfParts, Who::Bearer(TOKEN)).await;
    let earlier = gcs(&served.endpoint);
    let (size, name) = (part_bytes(&earlier), key("job/shard"));
    let bytes = pattern(size.get() as usize + 10, 1);
    let [first, last] = [0, 1].map(|part| part_of(&bytes, size, PartNumber(part)));
    let left = earlier.begin(&name, size).await.unwrap();
    earlier
        .put_part(&left, PartNumber(0), first.clone())
        .await
        .unwrap();
    drop(earlier);
    let store = gcs(&served.endpoint);
    let of_job = KeyPrefix::folder(key("job"));
    for under in [&KeyPrefix::root(), &of_job] {
        let unfinished = store.unfinished(under).await.unwrap();
        assert_eq!(unfinished, std::slice::from_ref(&name), "{under:?}");
    }
    let others = KeyPrefix::folder(key("others"));
    assert_eq!(store.unfinished(&others).await.unwrap(), []);
    // It is no object, and the service itself knows of it till it is begun anew.
    assert_eq!(store.list(&KeyPrefix::root()).await.unwrap(), []);
    assert_eq!(store.resume(&name, size).await.unwrap(), None);
    let mut upload = store.begin(&name, size).await.unwrap();
    let stale = gcs(&served.endpoint)
        .put_part(&left, PartNumber(1), last.clone())
        .await;
    assert!(
        matches!(stale, Err(StoreError::NoUpload { .. })),
        "{stale:?}"
    );
    // Nor is what is under way now lost from sight by it.
    store.abort(&left).await.unwrap();
    let unfinished = store.unfinished(&of_job).await.unwrap();
    assert_eq!(unfinished, std::slice::from_ref(&name));
    for (number, part) in [first, last].into_iter().enumerate() {
        let number = PartNumber(number as u32);
        let state = store.put_part(&upload, number, part).await.unwrap();
        upload.note(number, state);
    }
    store.complete(&upload, bytes.len() as u64).await.unwrap();
    assert_eq!(store.get(&name, None).await.unwrap(), bytes);
    assert_eq!(store.unfinished(&KeyPrefix::root()).await.unwrap(), []);
}

#[tokio::test]
async fn what_a_cloud_refuses_is_a_typed_error() {
    let root = tempfile::tempdir().unwrap();
    let served = serve_to(root.path(), Tags::OfParts, Who::Bearer("another")).await;
    let error = gcs(&served.endpoint).length(&key("a")).await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error}");
    // Nobody listens on a port that was just given back.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = gcs(&closed).length(&key("a")).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
}

/// Answers every request with this status.
async fn always(status: &'static str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 4096]).await;
            let answer =
                format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    endpoint
}

#[tokio::test]
async fn a_status_says_whether_to_try_again() {
    let listed = async |status| {
        let store = gcs(&always(status).await);
        store.list(&KeyPrefix::root()).await.unwrap_err()
    };
    let error = listed("429 Too Many Requests").await;
    assert!(matches!(error, StoreError::Throttled { .. }), "{error:?}");
    let error = listed("503 Service Unavailable").await;
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    let error = listed("400 Bad Request").await;
    assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
}

#[test]
fn both_clouds_are_configured_and_unknown_keys_are_refused() {
    let google = "kind = 'gcs'\nbucket = 'ckpt'\nprefix = 'llm'\ncredentials_file = '/etc/storaged/gcs.json'";
    let azure = "kind = 'azure'\naccount = 'train'\ncontainer = 'ckpt'";
    for text in [google, azure] {
        assert!(toml::from_str::<StoreConfig>(text).is_ok(), "{text}");
        let unknown = format!("{text}\nregion = 'x'");
        assert!(toml::from_str::<StoreConfig>(&unknown).is_err(), "{text}");
    }
    let absent: GcsConfig =
        toml::from_str("bucket = 'ckpt'\ncredentials_file = '/nowhere/gcs.json'").unwrap();
    let error = CloudStore::gcs(&absent, randomness()).unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error}");
    let elsewhere: GcsConfig = toml::from_str("bucket = 'ckpt'\nendpoint = 'ftp://x'").unwrap();
    let error = CloudStore::gcs(&elsewhere, randomness()).unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error}");
    let prefixed: AzureConfig =
        toml::from_str("account = 'a'\ncontainer = 'c'\nprefix = '../x'").unwrap();
    let error = CloudStore::azure(&prefixed, randomness()).unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error}");
}

#[test]
fn credentials_for_google_that_others_can_read_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gcs.json");
    let user =
        r#"{"type":"authorized_user","client_id":"a","client_secret":"b","refresh_token":"c"}"#;
    std::fs::write(&path, user).unwrap();
    let text = format!("bucket = 'ckpt'\ncredentials_file = '{}'", path.display());
    let config: GcsConfig = toml::from_str(&text).unwrap();
    let open_with = |mode| {
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        CloudStore::gcs(&config, randomness())
    };
    let error = open_with(0o644).unwrap_err().to_string();
    assert!(error.contains("gcs.json"), "{error}");
    assert!(error.contains("mode 0644"), "{error}");
    open_with(0o640).unwrap();
}

/// Against the Azurite of `STORAGED_TEST_AZURE_ENDPOINT` (see tests/azure/azurite.sh), whose key is `AZURE_STORAGE_ACCOUNT_KEY`.
#[tokio::test]
async fn azurite_conforms() {
    let Ok(endpoint) = std::env::var("STORAGED_TEST_AZURE_ENDPOINT") else {
        eprintln!("skipped: STORAGED_TEST_AZURE_ENDPOINT names no server");
        return;
    };
    let config = |folder: &str| -> AzureConfig {
        let prefix = format!("{folder}-{}", std::process::id());
        let text = format!(
            "account = 'devstoreaccount1'\ncontainer = 'storaged'\nprefix = {prefix:?}\nendpoint = {endpoint:?}"
        );
        toml::from_str(&text).unwrap()
    };
    let store = open(&StoreConfig::Azure(config("conformance")), randomness())
        .await
        .unwrap();
    let name = key("job/shard");
    let upload = store.begin(&name, part_bytes(&*store)).await.unwrap();
    let unfinished = store.unfinished(&KeyPrefix::root()).await.unwrap();
    assert_eq!(unfinished, std::slice::from_ref(&name));
    store.abort(&upload).await.unwrap();
    conforms_but_for_resuming(Arc::clone(&store), "job").await;
    let inner = Arc::new(encrypted(store, &["1"]));
    conforms_but_for_resuming(inner, "sealed").await;
    let http = Lossy::new("comp=blocklist");
    let (lost, config) = (Arc::clone(&http.lost), config("lossy"));
    let lossy = CloudStore::azure_built(&config, config.builder(http), randomness()).unwrap();
    completes_though_its_answer_is_lost(&lossy, &lost).await;
    let absent = AzureConfig {
        container: "no-such-container".into(),
        ..config
    };
    let error = open(&StoreConfig::Azure(absent), randomness())
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::NotMounted { .. }), "{error:?}");
}
