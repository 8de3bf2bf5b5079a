//! Credentials where neither a file nor the environment has any: Amazon's own chain of providers. Those are profiles, a web identity (IRSA), the container's
//! endpoint (ECS, EKS Pod Identity) and the instance's role, in this order; all of them give credentials for a while, and are asked again
//! before they end.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use aws_config::default_provider::credentials::DefaultCredentialsChain;
use aws_config::provider_config::ProviderConfig;
use aws_credential_types::Credentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, Result, future};
use aws_sdk_s3::config::{Region, SharedHttpClient};

/// Less than the client waits for credentials.
const ANSWER_WITHIN: Duration = Duration::from_secs(4);
/// Whoever did not answer is asked again before what was given last is used for longer than this.
const USED_ON: Duration = Duration::from_secs(60);

/// The chain. It is made anew whenever it is asked: one that is kept never reads a profile again, and once a profile could not be read it
/// fails for good, also where a role gave credentials first. Where the service that gives them fails, those given last are used on: servers
/// take them till they end, and often there is no other trouble.
#[derive(Debug)]
pub(super) struct ProviderChain {
    region: String,
    http: SharedHttpClient,
    last: Mutex<Option<Credentials>>,
}

impl ProviderChain {
    pub fn new(region: String, http: SharedHttpClient) -> Self {
        Self {
            region,
            http,
            last: Mutex::default(),
        }
    }

    async fn ask(&self) -> Result {
        let answer = tokio::time::timeout(ANSWER_WITHIN, self.ask_anew()).await;
        let answer = answer.unwrap_or(Err(CredentialsError::provider_timed_out(ANSWER_WITHIN)));
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match (answer, &*last) {
            (Ok(fresh), _) => Ok(last.insert(fresh).clone()),
            (Err(error), Some(last)) if is_of_service(&error) => {
                tracing::warn!(
                    reason = crate::driver::chain(&error),
                    "no new S3 credentials: the last ones are used on"
                );
                let mut used_on = last.clone();
                *used_on.expiry_mut() = Some(SystemTime::now() + USED_ON);
                Ok(used_on)
            }
            (Err(error), _) => Err(error),
        }
    }

    async fn ask_anew(&self) -> Result {
        // By the same TLS as the bucket; roles are asked for where the bucket is.
        let config = ProviderConfig::without_region().with_http_client(self.http.clone());
        let chain = DefaultCredentialsChain::builder().configure(config);
        let chain = chain.region(Region::new(self.region.clone())).build().await;
        chain.provide_credentials().await
    }
}

/// Whether somebody who has credentials did not give them, rather than nobody having any.
fn is_of_service(error: &CredentialsError) -> bool {
    !matches!(
        error,
        CredentialsError::CredentialsNotLoaded(_) | CredentialsError::InvalidConfiguration(_)
    )
}

impl ProvideCredentials for ProviderChain {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(self.ask())
    }
}
