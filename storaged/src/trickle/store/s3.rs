//! S3 as durable tier, or any server that speaks it. Retries, back-off and checksums are the SDK's.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use async_trait::async_trait;
use aws_credential_types::Credentials;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{BehaviorVersion, Region};
use aws_sdk_s3::error::{DisplayErrorContext, ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use bytes::Bytes;

use super::directory::check_parts;
use super::{ObjectKey, PartTag, Store, StoreError, Upload};

/// One call, its retries included, takes no longer: a 64 MiB part at 1 MB/s.
const CALL_MAX: Duration = Duration::from_secs(120);
const ATTEMPT_MAX: Duration = Duration::from_secs(60);
const ATTEMPTS: u32 = 4;
/// S3's smallest part but for the last.
const PART_BYTES_MIN: u64 = 5 << 20;

/// Objects in a bucket.
#[derive(Debug)]
pub struct S3 {
    client: Client,
    bucket: String,
    prefix: String,
}

impl S3 {
    /// Opens a bucket. Nothing is sent yet.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if there are no credentials in the environment.
    pub fn open(
        bucket: &str,
        prefix: &str,
        endpoint: Option<&str>,
        region: &str,
        path_style: bool,
    ) -> Result<Self, StoreError> {
        let variable = |name: &str| {
            std::env::var(name).map_err(|_| StoreError::Invalid {
                what: format!("S3 without credentials: {name} is not set, and it"),
            })
        };
        let credentials = Credentials::new(
            variable("AWS_ACCESS_KEY_ID")?,
            variable("AWS_SECRET_ACCESS_KEY")?,
            std::env::var("AWS_SESSION_TOKEN").ok(),
            None,
            "environment",
        );
        let timeouts = TimeoutConfig::builder()
            .operation_timeout(CALL_MAX)
            .operation_attempt_timeout(ATTEMPT_MAX)
            .connect_timeout(Duration::from_secs(5))
            .build();
        let mut config = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new(region.to_owned()))
            .credentials_provider(credentials)
            .force_path_style(path_style)
            .timeout_config(timeouts)
            .retry_config(RetryConfig::standard().with_max_attempts(ATTEMPTS))
            .http_client(http_client());
        if let Some(endpoint) = endpoint {
            config = config.endpoint_url(endpoint);
        }
        Ok(Self {
            client: Client::from_conf(config.build()),
            bucket: bucket.into(),
            prefix: prefix.trim_matches('/').into(),
        })
    }

    fn key(&self, key: &ObjectKey) -> String {
        match self.prefix.is_empty() {
            true => key.to_string(),
            false => format!("{}/{key}", self.prefix),
        }
    }

    /// An unfinished write of the object, if there is one: the newest.
    async fn unfinished(&self, key: &ObjectKey) -> Result<Option<String>, StoreError> {
        let name = self.key(key);
        let listed = self.client.list_multipart_uploads().bucket(&self.bucket).prefix(&name).send().await;
        let listed = listed.map_err(|error| failed(key, error))?;
        let ours = listed.uploads().iter().filter(|upload| upload.key() == Some(name.as_str()));
        Ok(ours.max_by_key(|upload| upload.initiated().cloned().map(|at| at.secs())).and_then(|u| u.upload_id().map(Into::into)))
    }

    async fn parts(&self, key: &ObjectKey, id: &str) -> Result<BTreeMap<u32, PartTag>, StoreError> {
        let mut pages = self
            .client
            .list_parts()
            .bucket(&self.bucket)
            .key(self.key(key))
            .upload_id(id)
            .into_paginator()
            .send();
        let mut done = BTreeMap::new();
        while let Some(page) = pages.next().await {
            for part in page.map_err(|error| failed(key, error))?.parts() {
                let (Some(number), Some(tag), Some(size)) = (part.part_number(), part.e_tag(), part.size()) else {
                    continue;
                };
                let (Ok(number), Ok(bytes)) = (u32::try_from(number - 1), u64::try_from(size)) else {
                    continue;
                };
                done.insert(number, PartTag { bytes, tag: tag.into() });
            }
        }
        Ok(done)
    }
}

fn http_client() -> aws_sdk_s3::config::SharedHttpClient {
    use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};
    aws_smithy_http_client::Builder::new()
        .tls_provider(Provider::Rustls(CryptoMode::Ring))
        .build_https()
}

fn failed<E, R>(key: &ObjectKey, error: SdkError<E, R>) -> StoreError
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
    R: std::fmt::Debug + 'static,
{
    let key = key.to_string();
    let code = error.code().unwrap_or_default().to_owned();
    match code.as_str() {
        "NoSuchKey" | "NotFound" | "NoSuchUpload" => StoreError::NotFound { key },
        "PreconditionFailed" | "ConditionalRequestConflict" => StoreError::AlreadyExists { key },
        "AccessDenied" | "InvalidAccessKeyId" | "SignatureDoesNotMatch" => {
            StoreError::Denied { key, reason: code }
        }
        "QuotaExceeded" => StoreError::Full { key },
        "NoSuchBucket" => StoreError::Invalid { what: "a bucket that does not exist".into() },
        _ => StoreError::Unavailable { key, reason: DisplayErrorContext(&error).to_string() },
    }
}

#[async_trait]
impl Store for S3 {
    async fn begin(&self, key: &ObjectKey) -> Result<Upload, StoreError> {
        if let Some(id) = self.unfinished(key).await? {
            let done = self.parts(key, &id).await?;
            return Ok(Upload { key: key.clone(), id, done });
        }
        let made = self.client.create_multipart_upload().bucket(&self.bucket).key(self.key(key)).send().await;
        let made = made.map_err(|error| failed(key, error))?;
        let id = made.upload_id().unwrap_or_default().to_owned();
        Ok(Upload { key: key.clone(), id, done: BTreeMap::new() })
    }

    async fn put_part(&self, upload: &mut Upload, number: u32, _: u64, bytes: Bytes) -> Result<(), StoreError> {
        let length = bytes.len() as u64;
        let sent = self
            .client
            .upload_part()
            .bucket(&self.bucket)
            .key(self.key(&upload.key))
            .upload_id(&upload.id)
            .part_number(number as i32 + 1)
            .body(ByteStream::from(bytes))
            .send()
            .await;
        let sent = sent.map_err(|error| failed(&upload.key, error))?;
        let tag = sent.e_tag().unwrap_or_default().to_owned();
        upload.done.insert(number, PartTag { bytes: length, tag });
        Ok(())
    }

    async fn complete(&self, upload: Upload, parts: u32, length: u64) -> Result<(), StoreError> {
        check_parts(&upload, parts, length)?;
        let part = |(number, tag): (&u32, &PartTag)| {
            CompletedPart::builder().part_number(*number as i32 + 1).e_tag(&tag.tag).build()
        };
        let all = upload.done.range(..parts).map(part).collect();
        let finished = self
            .client
            .complete_multipart_upload()
            .bucket(&self.bucket)
            .key(self.key(&upload.key))
            .upload_id(&upload.id)
            .multipart_upload(CompletedMultipartUpload::builder().set_parts(Some(all)).build())
            .send()
            .await;
        finished.map_err(|error| failed(&upload.key, error))?;
        match self.length(&upload.key).await? {
            Some(got) if got == length => Ok(()),
            got => Err(StoreError::Truncated {
                key: upload.key.to_string(),
                expected: length,
                got: got.unwrap_or(0),
            }),
        }
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        let put = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(self.key(key))
            .if_none_match("*")
            .body(ByteStream::from(bytes.clone()))
            .send()
            .await;
        match put.map_err(|error| failed(key, error)) {
            // An earlier try of ours may have got through unheard: the same content is success.
            Err(StoreError::AlreadyExists { .. }) if self.get(key, None).await? == bytes => Ok(()),
            outcome => outcome.map(|_| ()),
        }
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let expected = range.as_ref().map(|range| range.end - range.start);
        if expected == Some(0) {
            return Ok(Bytes::new());
        }
        let mut request = self.client.get_object().bucket(&self.bucket).key(self.key(key));
        if let Some(range) = range {
            request = request.range(format!("bytes={}-{}", range.start, range.end - 1));
        }
        let answer = request.send().await.map_err(|error| failed(key, error))?;
        let body = answer.body.collect().await.map_err(|error| StoreError::Unavailable {
            key: key.to_string(),
            reason: error.to_string(),
        })?;
        let bytes = body.into_bytes();
        let got = bytes.len() as u64;
        match expected {
            Some(expected) if expected != got => {
                Err(StoreError::Truncated { key: key.to_string(), expected, got })
            }
            _ => Ok(bytes),
        }
    }

    async fn length(&self, key: &ObjectKey) -> Result<Option<u64>, StoreError> {
        let head = self.client.head_object().bucket(&self.bucket).key(self.key(key)).send().await;
        match head.map_err(|error| failed(key, error)) {
            Ok(head) => Ok(head.content_length().and_then(|length| u64::try_from(length).ok())),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn folders(&self, key: &ObjectKey) -> Result<Vec<String>, StoreError> {
        let prefix = format!("{}/", self.key(key));
        let listing = self.client.list_objects_v2().bucket(&self.bucket).prefix(&prefix).delimiter("/");
        let mut pages = listing.into_paginator().send();
        let mut names = Vec::new();
        while let Some(page) = pages.next().await {
            let page = page.map_err(|error| failed(key, error))?;
            let found = page.common_prefixes().iter().filter_map(|common| common.prefix());
            let found = found.filter_map(|name| name.strip_prefix(&prefix));
            names.extend(found.map(|name| name.trim_end_matches('/').to_owned()));
        }
        Ok(names)
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let deleted = self.client.delete_object().bucket(&self.bucket).key(self.key(key)).send().await;
        match deleted.map_err(|error| failed(key, error)) {
            Err(StoreError::NotFound { .. }) | Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn part_bytes_min(&self) -> u64 {
        PART_BYTES_MIN
    }
}
