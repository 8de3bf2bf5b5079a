//! Credentials where neither a file nor the environment has any: Amazon's own chain of providers. Those are profiles, a web identity (IRSA), the container's
//! endpoint (ECS, EKS Pod Identity) and the instance's role, in this order; all of them give credentials for a while, and are asked again
//! before they end.

use aws_config::default_provider::credentials::DefaultCredentialsChain;
use aws_config::provider_config::ProviderConfig;
use aws_credential_types::provider::{ProvideCredentials, Result, future};
use aws_sdk_s3::config::{Region, SharedHttpClient};

/// The chain. It is made anew whenever it is asked: one that is kept never reads a profile again, and once a profile could not be read it
/// fails for good, also where a role gave credentials first.
#[derive(Debug)]
pub(super) struct ProviderChain {
    region: String,
    http: SharedHttpClient,
}

impl ProviderChain {
    pub fn new(region: String, http: SharedHttpClient) -> Self {
        Self { region, http }
    }

    async fn ask(&self) -> Result {
        // By the same TLS as the bucket; roles are asked for where the bucket is.
        let config = ProviderConfig::without_region()
            .with_http_client(self.http.clone())
            .with_region(Some(Region::new(self.region.clone())));
        let chain = DefaultCredentialsChain::builder().configure(config);
        chain.build().await.provide_credentials().await
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
