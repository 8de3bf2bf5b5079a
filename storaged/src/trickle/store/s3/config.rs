//! `[durable]` of an S3 server: the bucket, who asks for it, and what its owner wants of objects.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use crate::trickle::store::StoreError;
use crate::trickle::store::remote::variable;

/// Where a bucket is that nobody has said anything of.
const USUAL_REGION: &str = "us-east-1";
const REGION_NAMES: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];

/// A bucket and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct S3Config {
    pub bucket: String,
    /// A folder of the bucket; all of it without.
    #[serde(default)]
    pub prefix: String,
    /// Such as `http://127.0.0.1:7480`; Amazon's own without.
    pub endpoint: Option<String>,
    /// Of the bucket; what `AWS_REGION` or `AWS_DEFAULT_REGION` names without, else `us-east-1`.
    pub region: Option<String>,
    /// Whether the bucket stands in the path rather than in the host name, as servers other than
    /// Amazon's mostly want it. By default so where an endpoint is given.
    pub path_style: Option<bool>,
    /// Names of the environment variables with the credentials. Where none of the usual names is set, Amazon's own chain
    /// of providers is asked.
    #[serde(default = "default_access_key_env")]
    pub access_key_env: String,
    #[serde(default = "default_secret_key_env")]
    pub secret_key_env: String,
    #[serde(default = "default_session_token_env")]
    pub session_token_env: String,
    /// A file with lines of those names instead of the environment; it may be replaced while the daemon runs.
    pub credentials_file: Option<PathBuf>,
    /// Of objects that are written in parts: shards. What is read often and small stays in the bucket's usual one.
    pub storage_class: Option<String>,
    /// How the server encrypts; as the bucket has it without.
    pub server_side_encryption: Option<SseConfig>,
    /// Id or ARN of the key that the server encrypts with.
    pub kms_key: Option<String>,
    /// Of every object, for whoever counts costs or removes by them.
    #[serde(default)]
    pub tags: BTreeMap<String, String>,
    /// Whether whoever asks pays, not the bucket's owner.
    #[serde(default)]
    pub requester_pays: bool,
    /// What tells whether a part in the bucket is the one that was sent.
    pub part_checksum: Option<PartChecksum>,
    /// Whether signatures cover the bytes of parts also where TLS and a checksum that the server compares protect them:
    /// the policies of some buckets ask for it.
    #[serde(default)]
    pub sign_parts: bool,
}

/// How a server encrypts what it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum SseConfig {
    /// With keys of S3's own.
    #[serde(rename = "AES256")]
    Aes256,
    /// With a key of the key service.
    #[serde(rename = "aws:kms")]
    Kms,
    /// Twice, with a key of the key service.
    #[serde(rename = "aws:kms:dsse")]
    KmsTwice,
}

/// What tells whether a part in the bucket is the one that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartChecksum {
    /// The entity tag, where it is the MD5 of the part. Under encryption by a key service it is not: after a restart of the
    /// daemon all parts are sent again.
    Etag,
    /// A CRC of 64 bits that the server computes too, and compares.
    Crc64nvme,
}

fn default_access_key_env() -> String {
    "AWS_ACCESS_KEY_ID".into()
}

fn default_secret_key_env() -> String {
    "AWS_SECRET_ACCESS_KEY".into()
}

fn default_session_token_env() -> String {
    "AWS_SESSION_TOKEN".into()
}

impl S3Config {
    /// Where the bucket is.
    pub fn region(&self) -> String {
        let of_environment = || REGION_NAMES.iter().find_map(|name| variable(name));
        let region = self.region.clone().or_else(of_environment);
        region.unwrap_or_else(|| USUAL_REGION.into())
    }

    /// Whether the operator has named variables of their own.
    pub(super) fn names_variables(&self) -> bool {
        self.access_key_env != default_access_key_env()
            || self.secret_key_env != default_secret_key_env()
    }

    /// What tells whether a part is right: as was said; else the CRC where entity tags say nothing, or the server is Amazon's own, as others
    /// may not know it.
    pub(super) fn checksum(&self) -> PartChecksum {
        let by_key = matches!(
            self.server_side_encryption,
            Some(SseConfig::Kms | SseConfig::KmsTwice)
        );
        let usual = if by_key || self.endpoint.is_none() {
            PartChecksum::Crc64nvme
        } else {
            PartChecksum::Etag
        };
        self.part_checksum.unwrap_or(usual)
    }
}

pub(super) fn check_bucket(bucket: &str) -> Result<(), StoreError> {
    let portable = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if (3..=255).contains(&bucket.len()) && bucket.bytes().all(portable) {
        return Ok(());
    }
    Err(StoreError::Invalid {
        what: "S3 bucket".into(),
        expected: "3 to 255 letters, digits, dots, dashes or underscores".into(),
        got: format!("{bucket:?}"),
    })
}
