//! Credentials where neither a file nor the environment has any: Amazon's own chain of providers. Those are profiles, a web identity (IRSA), the container's
//! endpoint (ECS, EKS Pod Identity) and the instance's role, in this order; all of them give credentials for a while, and are asked again
//! before they end.

use aws_config::default_provider::credentials::DefaultCredentialsChain;
use aws_config::provider_config::ProviderConfig;
use aws_credential_types::provider::{ProvideCredentials, Result, future};
use aws_sdk_s3::config::{Region, SharedHttpClient};
use tokio::sync::OnceCell;

/// The chain, which is made when it is asked first: nothing of it is in the way of a start.
#[derive(Debug)]
pub(super) struct ProviderChain {
    region: String,
    http: SharedHttpClient,
    made: OnceCell<DefaultCredentialsChain>,
}

impl ProviderChain {
    pub fn new(region: String, http: SharedHttpClient) -> Self {
        Self {
            region,
            http,
            made: OnceCell::new(),
        }
    }

    async fn ask(&self) -> Result {
        let made = self.made.get_or_init(|| self.make()).await;
        made.provide_credentials().await
    }

    async fn make(&self) -> DefaultCredentialsChain {
        // By the same TLS as the bucket; roles are asked for where the bucket is.
        let config = ProviderConfig::without_region()
            .with_http_client(self.http.clone())
            .with_region(Some(Region::new(self.region.clone())));
        let chain = DefaultCredentialsChain::builder().configure(config);
        chain.build().await
    }
}

impl ProvideCredentials for ProviderChain {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(self.ask())
    }
}
