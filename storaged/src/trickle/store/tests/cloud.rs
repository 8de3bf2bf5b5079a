//! Google Cloud Storage against a server in this process that speaks S3's protocol, as Google's does; Azure against Azurite where the environment names one.

use std::sync::Arc;

use tokio::net::TcpListener;

use super::super::cloud::Connector;
use super::super::{
    AzureConfig, CloudStore, GcsConfig, KeyPrefix, PartNumber, Store, StoreConfig, StoreError, open,
};
use super::conformance::conforms_but_for_resuming;
use super::encrypted::encrypted;
use super::s3::{BUCKET, Tags, Who, serve_to};
use super::{key, part_bytes, part_of, pattern, randomness};

const TOKEN: &str = "a-token";

fn gcs(endpoint: &str) -> CloudStore {
    let text = format!("bucket = {BUCKET:?}\nprefix = 'some/prefix'\nendpoint = {endpoint:?}");
    let config: GcsConfig = toml::from_str(&text).unwrap();
    let builder = config
        .builder(Connector::new().unwrap())
        .with_bearer_token(TOKEN);
    CloudStore::gcs_built(&config, builder, randomness()).unwrap()
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
    let prefixed: AzureConfig =
        toml::from_str("account = 'a'\ncontainer = 'c'\nprefix = '../x'").unwrap();
    let error = CloudStore::azure(&prefixed, randomness()).unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error}");
}

/// Against the Azurite of `STORAGED_TEST_AZURE_ENDPOINT` (see tests/azure/azurite.sh), whose key is `AZURE_STORAGE_ACCOUNT_KEY`.
#[tokio::test]
async fn azurite_conforms() {
    let Ok(endpoint) = std::env::var("STORAGED_TEST_AZURE_ENDPOINT") else {
        eprintln!("skipped: STORAGED_TEST_AZURE_ENDPOINT names no server");
        return;
    };
    let prefix = format!("conformance-{}", std::process::id());
    let text = format!(
        "kind = 'azure'\naccount = 'devstoreaccount1'\ncontainer = 'storaged'\nprefix = {prefix:?}\nendpoint = {endpoint:?}"
    );
    let config: StoreConfig = toml::from_str(&text).unwrap();
    let store = open(&config, randomness()).await.unwrap();
    conforms_but_for_resuming(Arc::clone(&store), "job").await;
    let inner = Arc::new(encrypted(store, &["1"]));
    conforms_but_for_resuming(inner, "sealed").await;
}
