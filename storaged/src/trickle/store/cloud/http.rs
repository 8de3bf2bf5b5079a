//! The HTTP client of `object_store`: hyper and rustls, as for registries, with the machine's certificate authorities. Time is limited by whoever calls.

use std::error::Error;

use async_trait::async_trait;
use http_body_util::BodyExt;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as Tcp;
use hyper_util::rt::TokioExecutor;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};

use crate::trickle::store::StoreError;

/// Connections that are kept and used again.
#[derive(Debug, Clone)]
pub(in crate::trickle::store) struct CloudHttp(Client<HttpsConnector<Tcp>, HttpRequestBody>);

impl CloudHttp {
    pub fn new() -> Result<Self, StoreError> {
        let provider = rustls::crypto::ring::default_provider();
        let roots = HttpsConnectorBuilder::new().with_provider_and_native_roots(provider);
        let roots = roots.map_err(|error| StoreError::Invalid {
            what: "certificate authorities of this machine".into(),
            expected: "at least one (package ca-certificates)".into(),
            got: error.to_string(),
        })?;
        let https = roots.https_or_http().enable_http1().build();
        Ok(Self(Client::builder(TokioExecutor::new()).build(https)))
    }
}

impl HttpConnector for CloudHttp {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for CloudHttp {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let answer = self.0.request(request).await.map_err(|error| {
            let kind = if error.is_connect() {
                HttpErrorKind::Connect
            } else {
                HttpErrorKind::Request
            };
            // In words, as its own are only "client error".
            HttpError::new_boxed(kind, crate::driver::chain(&error).into())
        })?;
        let (parts, body) = answer.into_parts();
        let broken_off = |error: hyper::Error| {
            let source: Box<dyn Error + Send + Sync> = Box::new(error);
            HttpError::new_boxed(HttpErrorKind::Interrupted, source)
        };
        let body = HttpResponseBody::new(body.map_err(broken_off));
        Ok(HttpResponse::from_parts(parts, body))
    }
}
