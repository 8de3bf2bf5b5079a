//! `[durable]` in Google Cloud Storage or Azure Blob Storage: the bucket or container, and who asks for it.

use std::path::PathBuf;
use std::sync::Arc;

use object_store::azure::{MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::client::HttpConnector;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{ClientOptions, RetryConfig};
use serde::Deserialize;

use super::http::Connector;
use super::{CloudStore, Leavings, Place};
use crate::trickle::store::{Randomness, StoreError, StoreLimits, StoredForm};

/// A bucket of Google Cloud Storage. Credentials come from a file, else from `GOOGLE_SERVICE_ACCOUNT` and the like in the environment, else as Google's
/// own libraries find them: `GOOGLE_APPLICATION_CREDENTIALS`, then the machine's or pod's service account (Workload Identity).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GcsConfig {
    pub bucket: String,
    /// A folder of the bucket; all of it without.
    #[serde(default)]
    pub prefix: String,
    /// The key of a service account, or another kind of application credentials, in JSON.
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

/// Waiting and trying again are the caller's.
fn once() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

fn options(endpoint: Option<&String>) -> ClientOptions {
    let is_plain = endpoint.is_some_and(|url| url.starts_with("http://"));
    ClientOptions::new()
        .with_allow_http(is_plain)
        .with_timeout_disabled()
        .with_connect_timeout_disabled()
}

fn refused(what: &str, error: &object_store::Error) -> StoreError {
    StoreError::Invalid {
        what: what.into(),
        expected: "settings and credentials from which a client can be made".into(),
        got: crate::driver::chain(error),
    }
}

impl GcsConfig {
    /// What a client is made with.
    pub(in crate::trickle::store) fn builder(
        &self,
        http: impl HttpConnector,
    ) -> GoogleCloudStorageBuilder {
        let mut builder = GoogleCloudStorageBuilder::from_env()
            .with_bucket_name(&self.bucket)
            .with_client_options(options(self.endpoint.as_ref()))
            .with_retry(once())
            .with_http_connector(http);
        if let Some(path) = &self.credentials_file {
            builder = builder.with_application_credentials(path.display().to_string());
        }
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_base_url(endpoint);
        }
        builder
    }
}

impl AzureConfig {
    fn client(&self, http: impl HttpConnector) -> Result<MicrosoftAzure, StoreError> {
        let mut builder = MicrosoftAzureBuilder::from_env()
            .with_account(&self.account)
            .with_container_name(&self.container)
            .with_client_options(options(self.endpoint.as_ref()))
            .with_retry(once())
            .with_http_connector(http);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        let made = builder.build();
        made.map_err(|error| refused("Azure Blob Storage", &error))
    }
}

impl CloudStore {
    /// Makes the client of a bucket; nothing is sent yet.
    pub fn gcs(config: &GcsConfig, randomness: Arc<dyn Randomness>) -> Result<Self, StoreError> {
        let builder = config.builder(Connector::new()?);
        Self::gcs_built(config, builder, randomness)
    }

    /// The same, by a client that is told more than a configuration says.
    pub(in crate::trickle::store) fn gcs_built(
        config: &GcsConfig,
        builder: GoogleCloudStorageBuilder,
        randomness: Arc<dyn Randomness>,
    ) -> Result<Self, StoreError> {
        let made = builder.build();
        let client = made.map_err(|error| refused("Google Cloud Storage", &error))?;
        // The limits are those of S3, whose protocol it speaks.
        let limits = StoreLimits {
            part_bytes_min: 5 << 20,
            part_bytes_max: crate::trickle::store::CALL_BYTES_MAX,
            parts_max: 10_000,
            form: StoredForm::Plain,
        };
        let place = Place::new(format!("gs://{}", config.bucket), &config.prefix)?;
        Ok(Self::new(
            Arc::new(client),
            place,
            limits,
            Leavings::Stay,
            randomness,
        ))
    }

    /// Makes the client of a container; nothing is sent yet.
    pub fn azure(
        config: &AzureConfig,
        randomness: Arc<dyn Randomness>,
    ) -> Result<Self, StoreError> {
        let client = config.client(Connector::new()?)?;
        let limits = StoreLimits {
            part_bytes_min: 1,
            part_bytes_max: crate::trickle::store::CALL_BYTES_MAX,
            parts_max: 50_000,
            form: StoredForm::Plain,
        };
        let name = format!("azure://{}/{}", config.account, config.container);
        let place = Place::new(name, &config.prefix)?;
        Ok(Self::new(
            Arc::new(client),
            place,
            limits,
            Leavings::Vanish,
            randomness,
        ))
    }
}
