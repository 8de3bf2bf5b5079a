//! The S3 client from its configuration. Credentials come from a file, the environment, or Amazon's own chain.

use std::sync::Arc;

use aws_credential_types::Credentials;
use aws_credential_types::provider::ProvideCredentials;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    BehaviorVersion, IdentityCache, Region, RequestChecksumCalculation, ResponseChecksumValidation,
    SharedHttpClient, SharedIdentityCache, StalledStreamProtectionConfig,
};
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};

use super::S3;
use super::chain::ProviderChain;
use super::config::{S3Config, check_bucket};
use super::credentials::FileCredentials;
use super::objects::{ObjectSettings, RequesterPays, Signatures};
use crate::trickle::store::StoreError;
use crate::trickle::store::remote::{BucketFolder, check_endpoint, variable};

impl S3 {
    /// Makes the client with credentials of the file, the environment, or Amazon's own chain of providers, in this order; nothing is sent yet.
    pub fn open(config: &S3Config) -> Result<Self, StoreError> {
        if let Some(path) = &config.credentials_file {
            let credentials = FileCredentials::open(path.clone(), config)?;
            return Self::with_credentials(config, credentials);
        }
        if let Some(credentials) = of_environment(config)? {
            return Self::with_credentials(config, credentials);
        }
        let http = http_client();
        let chain = ProviderChain::new(config.region(), http.clone());
        // It says how long they are good for.
        Self::make(config, chain, IdentityCache::lazy().build(), http)
    }

    /// Makes the client with given credentials; nothing is sent yet.
    pub fn with_credentials(
        config: &S3Config,
        credentials: impl ProvideCredentials + 'static,
    ) -> Result<Self, StoreError> {
        // Whoever provides them knows when they are others.
        Self::make(
            config,
            credentials,
            IdentityCache::no_cache(),
            http_client(),
        )
    }

    fn make(
        config: &S3Config,
        credentials: impl ProvideCredentials + 'static,
        cache: SharedIdentityCache,
        http: SharedHttpClient,
    ) -> Result<Self, StoreError> {
        let folder = BucketFolder::new(&config.prefix)?;
        check_bucket(&config.bucket)?;
        let objects = ObjectSettings::of(config)?;
        let mut builder = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new(config.region()))
            .credentials_provider(credentials)
            .identity_cache(cache)
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
        if config.requester_pays {
            builder = builder.interceptor(RequesterPays);
        }
        let client = Client::from_conf(builder.build());
        Ok(Self {
            client,
            bucket: config.bucket.clone(),
            folder,
            objects,
            signatures: Arc::new(Signatures::of(config)),
        })
    }
}

#[cfg(test)]
impl S3 {
    /// As if TLS protected what is sent.
    pub(in crate::trickle::store) fn protected_by_tls(mut self) -> Self {
        self.signatures = Arc::new(Signatures::over_tls());
        self
    }
}

fn http_client() -> SharedHttpClient {
    aws_smithy_http_client::Builder::new()
        .tls_provider(Provider::Rustls(CryptoMode::Ring))
        .build_https()
}

/// What the environment has; none if it has nothing of it, and the operator did not say that it should.
fn of_environment(config: &S3Config) -> Result<Option<Credentials>, StoreError> {
    let names = [&config.access_key_env, &config.secret_key_env];
    let [access, secret] = names.map(|name| variable(name));
    if access.is_none() && secret.is_none() && !config.names_variables() {
        return Ok(None);
    }
    let missing = |name: &str| StoreError::Invalid {
        what: "S3 credentials".into(),
        expected: format!("the environment variable {name}"),
        got: "none".into(),
    };
    let access = access.ok_or_else(|| missing(names[0]))?;
    let secret = secret.ok_or_else(|| missing(names[1]))?;
    let token = variable(&config.session_token_env);
    let credentials = Credentials::new(access, secret, token, None, "storaged");
    Ok(Some(credentials))
}
