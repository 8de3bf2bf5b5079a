//! The S3 client from its configuration. Credentials come from the configuration or environment.

use std::path::PathBuf;

use aws_credential_types::Credentials;
use aws_credential_types::provider::ProvideCredentials;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    BehaviorVersion, IdentityCache, Region, RequestChecksumCalculation, ResponseChecksumValidation,
    StalledStreamProtectionConfig,
};
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};
use serde::Deserialize;

use super::S3;
use super::credentials::FileCredentials;
use crate::trickle::store::{ObjectKey, StoreError};

/// The longest prefix, so that prefix and key fit S3's 1024 bytes.
const PREFIX_BYTES_MAX: usize = 200;

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
    #[serde(default = "default_region")]
    pub region: String,
    /// Whether the bucket stands in the path rather than in the host name, as servers other than
    /// Amazon's mostly want it. By default so where an endpoint is given.
    pub path_style: Option<bool>,
    /// Names of the environment variables with the credentials.
    #[serde(default = "default_access_key_env")]
    pub access_key_env: String,
    #[serde(default = "default_secret_key_env")]
    pub secret_key_env: String,
    #[serde(default = "default_session_token_env")]
    pub session_token_env: String,
    /// A file with lines of those names instead of the environment; it may be replaced while the daemon runs.
    pub credentials_file: Option<PathBuf>,
}

fn default_region() -> String {
    "us-east-1".into()
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

impl S3 {
    /// Makes the client with credentials from the environment; nothing is sent yet.
    pub fn open(config: &S3Config) -> Result<Self, StoreError> {
        if let Some(path) = &config.credentials_file {
            let credentials = FileCredentials::open(path.clone(), config)?;
            return Self::with_credentials(config, credentials);
        }
        let access = variable(&config.access_key_env)?;
        let secret = variable(&config.secret_key_env)?;
        let token = std::env::var(&config.session_token_env)
            .ok()
            .filter(|token| !token.is_empty());
        Self::with_credentials(
            config,
            Credentials::new(access, secret, token, None, "storaged"),
        )
    }

    /// Makes the client with given credentials; nothing is sent yet.
    pub fn with_credentials(
        config: &S3Config,
        credentials: impl ProvideCredentials + 'static,
    ) -> Result<Self, StoreError> {
        let prefix = checked_prefix(&config.prefix)?;
        check_bucket(&config.bucket)?;
        let http = aws_smithy_http_client::Builder::new()
            .tls_provider(Provider::Rustls(CryptoMode::Ring))
            .build_https();
        let mut builder = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new(config.region.clone()))
            .credentials_provider(credentials)
            // Whoever provides them knows when they are others.
            .identity_cache(IdentityCache::no_cache())
            .http_client(http)
            .retry_config(RetryConfig::disabled())
            .timeout_config(TimeoutConfig::disabled())
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
            // Older servers refuse the trailing checksums that the client would add by itself.
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            .force_path_style(config.path_style.unwrap_or(config.endpoint.is_some()));
        if let Some(endpoint) = &config.endpoint {
            check_endpoint(endpoint)?;
            builder = builder.endpoint_url(endpoint);
        }
        let client = Client::from_conf(builder.build());
        Ok(Self {
            client,
            bucket: config.bucket.clone(),
            prefix,
        })
    }
}

fn variable(name: &str) -> Result<String, StoreError> {
    std::env::var(name)
        .ok()
        .filter(|value| !value.is_empty())
        .ok_or_else(|| StoreError::Invalid {
            what: "S3 credentials".into(),
            expected: format!("the environment variable {name}"),
            got: "none".into(),
        })
}

fn checked_prefix(prefix: &str) -> Result<String, StoreError> {
    let prefix = prefix.trim_end_matches('/');
    if prefix.is_empty() {
        return Ok(String::new());
    }
    let key: ObjectKey = prefix.parse()?;
    if prefix.len() > PREFIX_BYTES_MAX {
        return Err(StoreError::Invalid {
            what: "S3 prefix".into(),
            expected: format!("at most {PREFIX_BYTES_MAX} bytes"),
            got: format!("{} bytes", prefix.len()),
        });
    }
    Ok(format!("{key}/"))
}

fn check_bucket(bucket: &str) -> Result<(), StoreError> {
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

fn check_endpoint(endpoint: &str) -> Result<(), StoreError> {
    let rest = endpoint
        .strip_prefix("http://")
        .or_else(|| endpoint.strip_prefix("https://"));
    if rest.is_some_and(|host| !host.is_empty()) {
        return Ok(());
    }
    Err(StoreError::Invalid {
        what: "S3 endpoint".into(),
        expected: "a URL that starts with http:// or https://".into(),
        got: format!("{endpoint:?}"),
    })
}
