//! S3 against a server in this process, and against a real one where the environment names it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use aws_credential_types::Credentials;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use crc_fast::CrcAlgorithm::Crc64Nvme;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use s3s::auth::SimpleAuth;
use s3s::dto::*;
use s3s::service::S3ServiceBuilder;
use s3s::{S3 as Serve, S3Request, S3Response, S3Result};
use s3s_fs::FileSystem;
use storaged_core::Leftovers;
use tokio::net::TcpListener;

use super::super::s3::PartChecksum;
use super::super::{
    KeyPrefix, PartBytes, PartNumber, RetryPolicy, Retrying, S3, S3Config, Store, StoreConfig,
    StoreError, open,
};
use super::conformance::conforms;
use super::encrypted::encrypted;
use super::{key, part_bytes, part_of, pattern, randomness};

pub(super) const BUCKET: &str = "storaged-test";

/// The test server's file system, with what it lacks: conditional creation that is safe against
/// races, a list of unfinished uploads, and entity tags in the list of parts.
struct Server {
    files: FileSystem,
    root: PathBuf,
    creating: tokio::sync::Mutex<()>,
    uploads: Mutex<BTreeMap<String, Unfinished>>,
    tags: Tags,
    asked: Asked,
    wishes: Arc<Mutex<Wishes>>,
}

/// What writes of parts have asked for, in order.
type Asked = Arc<Mutex<Vec<&'static str>>>;

/// What requests have said beside what they want.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    /// Of the last upload: its class, encryption, key and tags.
    pub upload: [Option<String>; 4],
    /// Of the last object that was put at once.
    pub object: [Option<String>; 4],
    /// Who pays, by each request.
    pub payers: Vec<Option<String>>,
    /// By whose keys requests were signed.
    pub signers: BTreeSet<String>,
    /// What the last part's signature says of its bytes.
    pub part_hash: Option<String>,
    /// Whether a policy refuses parts whose signature says nothing of them.
    pub wants_signed_parts: bool,
}

/// What a request asks of the object that it makes: two types of input with the same fields.
macro_rules! wished {
    ($input:expr) => {{
        let class = $input.storage_class.as_ref().map(StorageClass::as_str);
        let encryption = $input.server_side_encryption.as_ref();
        let encryption = encryption.map(ServerSideEncryption::as_str);
        let (key, tags) = ($input.ssekms_key_id.as_deref(), $input.tagging.as_deref());
        [class, encryption, key, tags].map(|said| said.map(str::to_owned))
    }};
}

impl Wishes {
    fn asked<T>(&mut self, request: &S3Request<T>, payer: Option<&RequestPayer>) {
        self.payers.push(payer.map(|it| it.as_str().to_owned()));
        let signer = request.credentials.as_ref();
        self.signers.extend(signer.map(|it| it.access_key.clone()));
    }
}

/// The entity tags of objects that were written in parts.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Tags {
    /// As S3 makes them of those of the parts.
    OfParts,
    /// As of a server that encrypts.
    Others,
    /// None, as of Ceph.
    Missing,
    /// As of a server that encrypts, and computes checksums.
    Checksums,
    /// The same, and it has kept other bytes than it was sent.
    WrongChecksums,
}

impl Tags {
    /// Whether those of parts are not their MD5.
    fn say_nothing(self) -> bool {
        matches!(self, Self::Checksums | Self::WrongChecksums)
    }
}

struct Unfinished {
    key: String,
    begun: u64,
    parts: BTreeMap<i32, Part>,
}

/// What is told of a part.
struct Part {
    tag: ETag,
    sum: Option<String>,
}

#[async_trait::async_trait]
impl Serve for Server {
    async fn put_object(
        &self,
        r: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        let mut r = r;
        // As Google says it.
        if r.headers
            .get("x-goog-if-generation-match")
            .is_some_and(|it| it == "0")
        {
            r.input.if_none_match = Some(ETagCondition::Any);
        }
        let _one_at_a_time = self.creating.lock().await;
        {
            let mut wishes = self.wishes.lock().unwrap();
            wishes.asked(&r, r.input.request_payer.as_ref());
            wishes.object = wished!(r.input);
        }
        self.files.put_object(r).await
    }

    async fn create_multipart_upload(
        &self,
        r: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        self.asked.lock().unwrap().push("begin");
        let key = r.input.key.clone();
        {
            let mut wishes = self.wishes.lock().unwrap();
            wishes.asked(&r, r.input.request_payer.as_ref());
            wishes.upload = wished!(r.input);
        }
        let answer = self.files.create_multipart_upload(r).await?;
        let mut uploads = self.uploads.lock().unwrap();
        let unfinished = Unfinished {
            key,
            begun: uploads.len() as u64,
            parts: BTreeMap::new(),
        };
        uploads.insert(answer.output.upload_id.clone().unwrap(), unfinished);
        Ok(answer)
    }

    async fn upload_part(
        &self,
        r: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        self.asked.lock().unwrap().push("part");
        let (id, number) = (r.input.upload_id.clone(), r.input.part_number);
        if !self.uploads.lock().unwrap().contains_key(&id) {
            return Err(s3s::s3_error!(NoSuchUpload));
        }
        {
            let mut wishes = self.wishes.lock().unwrap();
            wishes.asked(&r, r.input.request_payer.as_ref());
            let hash = r.headers.get("x-amz-content-sha256");
            wishes.part_hash = hash.map(|it| it.to_str().unwrap().to_owned());
            let is_unsigned = wishes.part_hash.as_deref() == Some("UNSIGNED-PAYLOAD");
            if is_unsigned && wishes.wants_signed_parts {
                return Err(s3s::s3_error!(AccessDenied));
            }
        }
        let sum = match self.tags {
            Tags::Checksums => r.input.checksum_crc64nvme.clone(),
            Tags::WrongChecksums => Some("AAAAAAAAAAA=".into()),
            Tags::OfParts | Tags::Others | Tags::Missing => None,
        };
        let mut answer = self.files.upload_part(r).await?;
        if self.tags.say_nothing() {
            answer.output.e_tag = Some(ETag::Strong("another".into()));
        }
        answer.output.checksum_crc64nvme = sum.clone();
        let tag = answer.output.e_tag.clone().unwrap();
        if let Some(unfinished) = self.uploads.lock().unwrap().get_mut(&id) {
            unfinished.parts.insert(number, Part { tag, sum });
        }
        Ok(answer)
    }

    async fn list_parts(
        &self,
        r: S3Request<ListPartsInput>,
    ) -> S3Result<S3Response<ListPartsOutput>> {
        let id = r.input.upload_id.clone();
        let payer = r.input.request_payer.as_ref();
        self.wishes.lock().unwrap().asked(&r, payer);
        let mut answer = self.files.list_parts(r).await?;
        let uploads = self.uploads.lock().unwrap();
        for part in answer.output.parts.iter_mut().flatten() {
            let number = part.part_number.unwrap();
            let known = uploads.get(&id).and_then(|it| it.parts.get(&number));
            part.e_tag = known.map(|part| part.tag.clone());
            part.checksum_crc64nvme = known.and_then(|part| part.sum.clone());
        }
        Ok(answer)
    }

    async fn list_multipart_uploads(
        &self,
        r: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        self.asked.lock().unwrap().push("list");
        let payer = r.input.request_payer.as_ref();
        self.wishes.lock().unwrap().asked(&r, payer);
        let prefix = r.input.prefix.unwrap_or_default();
        let uploads = self.uploads.lock().unwrap();
        let found = uploads
            .iter()
            .filter(|(_, unfinished)| unfinished.key.starts_with(&prefix));
        let listed = found.map(|(id, unfinished)| MultipartUpload {
            key: Some(unfinished.key.clone()),
            upload_id: Some(id.clone()),
            initiated: Some(
                (std::time::UNIX_EPOCH + std::time::Duration::from_secs(unfinished.begun)).into(),
            ),
            ..Default::default()
        });
        let output = ListMultipartUploadsOutput {
            uploads: Some(listed.collect()),
            ..Default::default()
        };
        Ok(S3Response::new(output))
    }

    async fn complete_multipart_upload(
        &self,
        r: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        self.asked.lock().unwrap().push("complete");
        let id = r.input.upload_id.clone();
        let payer = r.input.request_payer.as_ref();
        self.wishes.lock().unwrap().asked(&r, payer);
        if self.uploads.lock().unwrap().remove(&id).is_none() {
            return Err(s3s::s3_error!(NoSuchUpload));
        }
        let parts = r
            .input
            .multipart_upload
            .iter()
            .flat_map(|it| it.parts.iter().flatten());
        let sums = parts.map(|part| part.checksum_crc64nvme.clone());
        let sums = sums.collect::<Option<Vec<_>>>();
        let key = r.input.key.clone();
        let mut answer = self.files.complete_multipart_upload(r).await?;
        let tag = match self.tags {
            Tags::OfParts => return Ok(answer),
            Tags::Others | Tags::Checksums | Tags::WrongChecksums => {
                Some(ETag::Strong("another".into()))
            }
            Tags::Missing => None,
        };
        // As of a server that reads it all again; it does so only if each part was named with its own.
        let of_whole = sums.filter(|_| self.tags == Tags::Checksums).map(|_| key);
        let root = self.root.clone();
        if let Some(done) = answer.output.future.take() {
            answer.output.future = Some(Box::pin(async move {
                let mut output = done.await?;
                output.e_tag = tag;
                output.checksum_crc64nvme = of_whole.map(|key| {
                    let bytes = std::fs::read(root.join(BUCKET).join(key)).unwrap();
                    STANDARD.encode(crc_fast::checksum(Crc64Nvme, &bytes).to_be_bytes())
                });
                Ok(output)
            }));
        }
        Ok(answer)
    }

    async fn abort_multipart_upload(
        &self,
        r: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let payer = r.input.request_payer.as_ref();
        self.wishes.lock().unwrap().asked(&r, payer);
        if self
            .uploads
            .lock()
            .unwrap()
            .remove(&r.input.upload_id)
            .is_none()
        {
            return Err(s3s::s3_error!(NoSuchUpload));
        }
        self.files.abort_multipart_upload(r).await
    }

    async fn get_object(
        &self,
        r: S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        let payer = r.input.request_payer.as_ref();
        self.wishes.lock().unwrap().asked(&r, payer);
        self.files.get_object(r).await
    }

    async fn head_object(
        &self,
        r: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        self.asked.lock().unwrap().push("look");
        let payer = r.input.request_payer.as_ref();
        self.wishes.lock().unwrap().asked(&r, payer);
        self.files.head_object(r).await
    }

    async fn list_objects_v2(
        &self,
        r: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let payer = r.input.request_payer.as_ref();
        self.wishes.lock().unwrap().asked(&r, payer);
        self.files.list_objects_v2(r).await
    }

    async fn delete_object(
        &self,
        r: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let payer = r.input.request_payer.as_ref();
        self.wishes.lock().unwrap().asked(&r, payer);
        self.files.delete_object(r).await
    }
}

/// Serves a directory as S3 on a free port of the loopback, as long as the runtime lives.
async fn serve(root: &std::path::Path) -> String {
    serve_with(root, Tags::OfParts).await.endpoint
}

/// A server that runs.
pub(super) struct Served {
    pub endpoint: String,
    asked: Asked,
    pub wishes: Arc<Mutex<Wishes>>,
}

pub(super) async fn serve_with(root: &std::path::Path, tags: Tags) -> Served {
    serve_to(root, tags, Who::Known).await
}

/// Who is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// Who signs with keys that the server knows.
    Known,
    /// Who has Google's kind of token.
    Bearer(&'static str),
}

/// Lets those in who show this token; S3's own service knows only signatures.
fn admit(request: &mut Request<Incoming>, token: &str) -> bool {
    let shown = request.headers_mut().remove("authorization");
    shown.is_some_and(|it| it.as_bytes() == format!("Bearer {token}").as_bytes())
}

pub(super) async fn serve_to(root: &std::path::Path, tags: Tags, who: Who) -> Served {
    std::fs::create_dir(root.join(BUCKET)).unwrap();
    let (asked, wishes) = (Asked::default(), Arc::default());
    let server = Server {
        files: FileSystem::new(root).unwrap(),
        creating: tokio::sync::Mutex::new(()),
        uploads: Mutex::default(),
        tags,
        root: root.to_owned(),
        asked: asked.clone(),
        wishes: Arc::clone(&wishes),
    };
    let mut builder = S3ServiceBuilder::new(server);
    if who == Who::Known {
        let mut auth = SimpleAuth::from_single("key", "secret");
        auth.register("key2".into(), "secret2".into());
        builder.set_auth(auth);
    }
    let service = builder.build();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service.clone();
            let guarded = service_fn(move |mut request: Request<Incoming>| {
                let service = service.clone();
                async move {
                    if let Who::Bearer(token) = who
                        && !admit(&mut request, token)
                    {
                        let refused = Response::builder().status(403);
                        return Ok(refused.body(s3s::Body::empty()).unwrap());
                    }
                    Service::call(&service, request).await
                }
            });
            tokio::spawn(async move {
                let http = auto::Builder::new(TokioExecutor::new());
                // A client that goes away is no failure of the test.
                let _ = http.serve_connection(TokioIo::new(stream), guarded).await;
            });
        }
    });
    Served {
        endpoint,
        asked,
        wishes,
    }
}

fn config(endpoint: &str, bucket: &str, prefix: &str) -> S3Config {
    let text = format!("bucket = {bucket:?}\nprefix = {prefix:?}\nendpoint = {endpoint:?}");
    toml::from_str(&text).unwrap()
}

pub(super) fn client(endpoint: &str, secret: &str) -> S3 {
    let credentials = Credentials::new("key", secret, None, None, "test");
    S3::with_credentials(&config(endpoint, BUCKET, "some/prefix"), credentials).unwrap()
}

#[tokio::test]
async fn s3_in_process_conforms() {
    let root = tempfile::tempdir().unwrap();
    let endpoint = serve(root.path()).await;
    conforms(Arc::new(client(&endpoint, "secret")), "job").await;
    assert!(root.path().join(BUCKET).join("some/prefix").exists());
}

#[tokio::test]
async fn s3_in_process_conforms_encrypted() {
    let root = tempfile::tempdir().unwrap();
    let endpoint = serve(root.path()).await;
    let inner = Arc::new(client(&endpoint, "secret"));
    conforms(Arc::new(encrypted(inner, &["1"])), "job").await;
}

#[tokio::test]
async fn a_new_client_resumes_an_upload() {
    let root = tempfile::tempdir().unwrap();
    let endpoint = serve(root.path()).await;
    let store = client(&endpoint, "secret");
    let size = part_bytes(&store);
    let bytes = pattern(size.get() as usize + 10, 1);
    let begun = store.begin(&key("shard"), size).await.unwrap();
    let first = part_of(&bytes, size, PartNumber(0));
    store
        .put_part(&begun, PartNumber(0), first.clone())
        .await
        .unwrap();
    drop(store);
    let store = client(&endpoint, "secret");
    let mut found = store.resume(&key("shard"), size).await.unwrap().unwrap();
    assert!(found.done()[&PartNumber(0)].matches(&first));
    let last = part_of(&bytes, size, PartNumber(1));
    let state = store.put_part(&found, PartNumber(1), last).await.unwrap();
    found.note(PartNumber(1), state);
    store.complete(&found, bytes.len() as u64).await.unwrap();
    assert_eq!(store.get(&key("shard"), None).await.unwrap(), bytes);
}

#[tokio::test]
async fn an_upload_is_found_again_in_parts_of_its_own_size() {
    let root = tempfile::tempdir().unwrap();
    let endpoint = serve(root.path()).await;
    let store = client(&endpoint, "secret");
    let size = part_bytes(&store);
    let larger = PartBytes::new(2 * size.get(), &store.limits()).unwrap();
    let bytes = pattern(3 * size.get() as usize, 1);
    let name = key("shard");
    let begun = store.begin(&name, size).await.unwrap();
    for (number, asked, expected) in [
        // One part alone may be the last one of larger ones.
        (0, larger, larger),
        (1, larger, size),
        (2, size, size),
    ] {
        let part = part_of(&bytes, size, PartNumber(number));
        let put = store.put_part(&begun, PartNumber(number), part);
        put.await.unwrap();
        let found = store.resume(&name, asked).await.unwrap().unwrap();
        assert_eq!(found.part_bytes(), expected, "{number}");
        assert_eq!(found.done().len() as u32, number + 1);
    }
    // Those that are longer than asked for tell.
    let begun = store.begin(&name, larger).await.unwrap();
    let part = part_of(&bytes, larger, PartNumber(0));
    store.put_part(&begun, PartNumber(0), part).await.unwrap();
    let found = store.resume(&name, size).await.unwrap().unwrap();
    assert_eq!(found.part_bytes(), larger);
}

/// What it takes to write an object of two parts.
async fn asked_for_two_parts(tags: Tags, leftovers: Leftovers) -> Vec<&'static str> {
    let root = tempfile::tempdir().unwrap();
    let Served {
        endpoint, asked, ..
    } = serve_with(root.path(), tags).await;
    let store = client(&endpoint, "secret");
    let size = part_bytes(&store);
    let bytes = pattern(size.get() as usize + 10, 1);
    let key = key("shard");
    let upload = store.resume_or_begin(&key, size, leftovers);
    let mut upload = upload.await.unwrap();
    for number in [PartNumber(0), PartNumber(1)] {
        let part = part_of(&bytes, size, number);
        let state = store.put_part(&upload, number, part).await.unwrap();
        upload.note(number, state);
    }
    store.complete(&upload, bytes.len() as u64).await.unwrap();
    let asked = asked.lock().unwrap().clone();
    assert_eq!(store.get(&key, None).await.unwrap(), bytes);
    asked
}

#[tokio::test]
async fn an_object_is_looked_at_only_if_its_tag_does_not_prove_its_parts() {
    let needed = ["list", "begin", "part", "part", "complete"];
    let of_parts = asked_for_two_parts(Tags::OfParts, Leftovers::Perhaps).await;
    assert_eq!(of_parts, needed);
    let without = asked_for_two_parts(Tags::Missing, Leftovers::Perhaps).await;
    assert_eq!(without, needed);
    let others = asked_for_two_parts(Tags::Others, Leftovers::Perhaps).await;
    assert_eq!(others, [&needed[..], &["look"]].concat());
}

#[tokio::test]
async fn unfinished_uploads_are_looked_for_only_where_there_may_be_one() {
    let asked = asked_for_two_parts(Tags::OfParts, Leftovers::None).await;
    assert_eq!(asked, ["begin", "part", "part", "complete"]);
}

#[tokio::test]
async fn bad_credentials_bucket_and_endpoint_are_typed_errors() {
    let root = tempfile::tempdir().unwrap();
    let endpoint = serve(root.path()).await;
    let error = client(&endpoint, "wrong")
        .list(&KeyPrefix::root())
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error}");
    let credentials = Credentials::new("key", "secret", None, None, "test");
    let other = S3::with_credentials(&config(&endpoint, "no-such-bucket", ""), credentials);
    let error = other.unwrap().list(&KeyPrefix::root()).await.unwrap_err();
    assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
    // Nobody listens on a port that was just given back.
    let closed = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let error = client(&format!("http://{closed}"), "secret")
        .length(&key("a"))
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    let bad = config("ftp://host", BUCKET, "");
    let credentials = Credentials::new("key", "secret", None, None, "test");
    let error = S3::with_credentials(&bad, credentials).unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error}");
}

#[tokio::test]
async fn a_server_that_never_answers_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = client(
        &format!("http://{}", listener.local_addr().unwrap()),
        "secret",
    );
    let policy = RetryPolicy {
        attempts_max: 2,
        attempt_limit: std::time::Duration::from_millis(100),
        ..RetryPolicy::default()
    };
    let store = Retrying::new(Arc::new(silent), policy, randomness());
    let error = store.length(&key("a")).await.unwrap_err();
    assert!(matches!(error, StoreError::Timeout { .. }), "{error}");
}

/// Against the server of `STORAGED_TEST_S3_ENDPOINT` (see tests/s3/ceph.sh), with the bucket of
/// `STORAGED_TEST_S3_BUCKET` and the usual credentials.
#[tokio::test]
async fn a_real_s3_server_conforms() {
    let Ok(endpoint) = std::env::var("STORAGED_TEST_S3_ENDPOINT") else {
        eprintln!("skipped: STORAGED_TEST_S3_ENDPOINT names no server");
        return;
    };
    let bucket = std::env::var("STORAGED_TEST_S3_BUCKET").unwrap_or_else(|_| "storaged".into());
    // Servers that know no such checksum are to go on by their entity tags.
    for checksum in [PartChecksum::Etag, PartChecksum::Crc64nvme] {
        let prefix = format!("conformance-{checksum:?}-{}", std::process::id());
        let mut config = config(&endpoint, &bucket, &prefix);
        config.part_checksum = Some(checksum);
        let opened = open(&StoreConfig::S3(config), randomness()).await.unwrap();
        conforms(opened, "job").await;
    }
}
