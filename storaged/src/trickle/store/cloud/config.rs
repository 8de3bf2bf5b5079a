//! `[durable]` in Google Cloud Storage or Azure Blob Storage: the bucket or container, and who asks for it.

use std::path::PathBuf;
use std::sync::Arc;

use object_store::RetryConfig;
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::HttpConnector;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use serde::Deserialize;

use super::http::CloudHttp;
use super::{Bucket, CloudStore, Leavings};
use crate::trickle::store::remote::{check_endpoint, read_credentials, variable};
use crate::trickle::store::s3::S3_LIMITS;
use crate::trickle::store::{CALL_BYTES_MAX, Randomness, StoreError, StoreLimits, StoredForm};

/// A bucket of Google Cloud Storage. Credentials come from a file, else from what a variable of the environment names, else they are those of the
/// machine's or pod's service account (Workload Identity).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GcsConfig {
    pub bucket: String,
    /// A folder of the bucket; all of it without.
    #[serde(default)]
    pub prefix: String,
    /// The key of a service account, or the credentials of an authorized user, in JSON.
    pub credentials_file: Option<PathBuf>,
    /// Google's own without.
    pub endpoint: Option<String>,
}

/// A container of Azure Blob Storage. Credentials come from the environment: `AZURE_STORAGE_ACCOUNT_KEY`, a SAS in `AZURE_STORAGE_SAS_KEY`, a client's secret, or
/// what AKS gives a pod (Workload Identity); else the machine's managed identity is asked.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AzureConfig {
    pub account: String,
    pub container: String,
    /// A folder of the container; all of it without.
    #[serde(default)]
    pub prefix: String,
    /// Azure's own without.
    pub endpoint: Option<String>,
}

/// What may name credentials, in this order. Nothing else of the environment counts: it could move the tier elsewhere.
const GOOGLE_CREDENTIALS: [(&str, GoogleConfigKey); 4] = [
    ("GOOGLE_SERVICE_ACCOUNT", GoogleConfigKey::ServiceAccount),
    (
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        GoogleConfigKey::ServiceAccount,
    ),
    (
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        GoogleConfigKey::ServiceAccountKey,
    ),
    (
        "GOOGLE_APPLICATION_CREDENTIALS",
        GoogleConfigKey::ApplicationCredentials,
    ),
];

/// An account's key; a shared access signature; an identity, or what is asked for one.
const AZURE_CREDENTIALS: [&[(&str, AzureConfigKey)]; 3] = [
    &[("AZURE_STORAGE_ACCOUNT_KEY", AzureConfigKey::AccessKey)],
    &[("AZURE_STORAGE_SAS_KEY", AzureConfigKey::SasKey)],
    &[
        ("AZURE_CLIENT_ID", AzureConfigKey::ClientId),
        ("AZURE_TENANT_ID", AzureConfigKey::AuthorityId),
        ("AZURE_CLIENT_SECRET", AzureConfigKey::ClientSecret),
        (
            "AZURE_FEDERATED_TOKEN_FILE",
            AzureConfigKey::FederatedTokenFile,
        ),
        ("AZURE_AUTHORITY_HOST", AzureConfigKey::AuthorityHost),
        ("AZURE_MSI_ENDPOINT", AzureConfigKey::MsiEndpoint),
    ],
];

/// Waiting and trying again are the caller's.
fn once() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

fn refused(what: &str, error: &object_store::Error) -> StoreError {
    StoreError::Invalid {
        what: what.into(),
        expected: "settings and credentials from which a client can be made".into(),
        got: super::failure::words(error),
    }
}

impl GcsConfig {
    /// What a client is made with.
    pub(in crate::trickle::store) fn builder(
        &self,
        http: impl HttpConnector,
    ) -> GoogleCloudStorageBuilder {
        let mut builder = GoogleCloudStorageBuilder::new()
            .with_bucket_name(&self.bucket)
            .with_retry(once())
            .with_http_connector(http);
        if let Some(path) = &self.credentials_file {
            builder = builder.with_application_credentials(path.display().to_string());
        } else {
            let set = GOOGLE_CREDENTIALS
                .iter()
                .find_map(|(name, key)| Some((key, variable(name)?)));
            if let Some((key, value)) = set {
                builder = builder.with_config(*key, value);
            }
        }
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_base_url(endpoint);
        }
        builder
    }
}

impl AzureConfig {
    /// What a client is made with.
    pub(in crate::trickle::store) fn builder(
        &self,
        http: impl HttpConnector,
    ) -> MicrosoftAzureBuilder {
        let mut builder = MicrosoftAzureBuilder::new()
            .with_account(&self.account)
            .with_container_name(&self.container)
            .with_retry(once())
            .with_http_connector(http);
        // Of the first kind of which something is set: the client would mix them.
        let set = AZURE_CREDENTIALS.iter().map(|names| {
            let set = names
                .iter()
                .map(|(name, key)| Some((*key, variable(name)?)));
            set.flatten().collect::<Vec<_>>()
        });
        for (key, value) in set
            .into_iter()
            .find(|set| !set.is_empty())
            .unwrap_or_default()
        {
            builder = builder.with_config(key, value);
        }
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        builder
    }
}

impl CloudStore {
    /// Makes the client of a bucket; nothing is sent yet.
    pub fn gcs(config: &GcsConfig, randomness: Arc<dyn Randomness>) -> Result<Self, StoreError> {
        let builder = config.builder(CloudHttp::new()?);
        Self::gcs_built(config, builder, randomness)
    }

    /// The same, by a client that is told more than a configuration says.
    pub(in crate::trickle::store) fn gcs_built(
        config: &GcsConfig,
        builder: GoogleCloudStorageBuilder,
        randomness: Arc<dyn Randomness>,
    ) -> Result<Self, StoreError> {
        config.endpoint.as_deref().map_or(Ok(()), check_endpoint)?;
        if let Some(path) = &config.credentials_file {
            // The client reads it itself; here is seen who else can.
            read_credentials(path)?;
        }
        let made = builder.build();
        let client = made.map_err(|error| refused("Google Cloud Storage", &error))?;
        let bucket = Bucket::new(format!("gs://{}", config.bucket), &config.prefix)?;
        Ok(Self::new(
            Arc::new(client),
            bucket,
            S3_LIMITS,
            Leavings::Stay,
            randomness,
        ))
    }

    /// Makes the client of a container; nothing is sent yet.
    pub fn azure(
        config: &AzureConfig,
        randomness: Arc<dyn Randomness>,
    ) -> Result<Self, StoreError> {
        let builder = config.builder(CloudHttp::new()?);
        Self::azure_built(config, builder, randomness)
    }

    /// The same, by a client that is told more than a configuration says.
    pub(in crate::trickle::store) fn azure_built(
        config: &AzureConfig,
        builder: MicrosoftAzureBuilder,
        randomness: Arc<dyn Randomness>,
    ) -> Result<Self, StoreError> {
        config.endpoint.as_deref().map_or(Ok(()), check_endpoint)?;
        let made = builder.build();
        let client = made.map_err(|error| refused("Azure Blob Storage", &error))?;
        let limits = StoreLimits {
            part_bytes_min: 1,
            part_bytes_max: CALL_BYTES_MAX,
            parts_max: 50_000,
            form: StoredForm::Plain,
        };
        let name = format!("azure://{}/{}", config.account, config.container);
        let bucket = Bucket::new(name, &config.prefix)?;
        Ok(Self::new(
            Arc::new(client),
            bucket,
            limits,
            Leavings::Vanish,
            randomness,
        ))
    }
}
