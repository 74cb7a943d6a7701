//! The client of the API server.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ClientBuilder, ConfigExt};
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;
use tower_service::Service;

use crate::refusal::told;

/// How long a TCP connection to the API server may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long reading files and asking for credentials may take.
const CREDENTIALS: Duration = Duration::from_secs(30);
/// After how much silence a connection is probed: one that the network has forgotten ends.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// How the API server is reached.
pub(crate) struct Access {
    how: How,
    current: Mutex<Current>,
}

enum How {
    /// By this kubeconfig, by the pod's service account, or by the user's kubeconfig.
    Cluster(Option<PathBuf>),
    /// By this client.
    #[cfg(test)]
    Given(Client),
}

#[derive(Default)]
struct Current {
    /// Counts clients, so that of several who find one broken the first renews it.
    number: u64,
    client: Option<Client>,
    /// A client that is being made.
    making: Option<JoinHandle<Result<Client, String>>>,
}

// === impl Access ===

impl Access {
    /// Access by a kubeconfig; if not set, by the pod's service account.
    pub(crate) fn new(kubeconfig: Option<PathBuf>) -> Self {
        Self { how: How::Cluster(kubeconfig), current: Mutex::default() }
    }

    #[cfg(test)]
    pub(crate) fn given(client: Client) -> Self {
        Self { how: How::Given(client), current: Mutex::default() }
    }

    /// A client and its number.
    ///
    /// # Errors
    /// Why there is none, and what to do.
    pub(crate) async fn client(&self) -> Result<(Client, u64), String> {
        let mut current = self.current.lock().await;
        if let Some(client) = &current.client {
            return Ok((client.clone(), current.number));
        }
        let client = match &self.how {
            How::Cluster(kubeconfig) => {
                // Files are read, and a kubeconfig may name a program to be run for credentials. If that hangs, one thread
                // waits for it and no other is begun.
                let mut making = current.making.take().unwrap_or_else(|| {
                    let kubeconfig = kubeconfig.clone();
                    spawn_blocking(move || Handle::current().block_on(connect(kubeconfig.as_deref())))
                });
                let Ok(made) = timeout(CREDENTIALS, &mut making).await else {
                    current.making = Some(making);
                    return Err(format!(
                        "there are no credentials for the API server within {} s: look at the program that the \
                         kubeconfig names in `exec`",
                        CREDENTIALS.as_secs()
                    ));
                };
                made.map_err(|error| told(&error))??
            }
            #[cfg(test)]
            How::Given(client) => client.clone(),
        };
        current.number += 1;
        current.client = Some(client.clone());
        Ok((client, current.number))
    }

    /// The client of this number does not do: the next one reads credentials and certificates again, and opens
    /// connections of its own.
    pub(crate) async fn renew(&self, number: u64) {
        let mut current = self.current.lock().await;
        if current.number == number {
            current.client = None;
        }
    }
}

async fn connect(kubeconfig: Option<&Path>) -> Result<Client, String> {
    // The client takes the process's provider: it is the one that all other TLS here uses.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = configuration(kubeconfig).await?;
    if let Some(proxy) = &config.proxy_url {
        return Err(format!(
            "the kubeconfig has the proxy-url {proxy}, and kvlane uses no proxies: name an address of the API server that \
             is reached without one"
        ));
    }
    let server = config.cluster_url.to_string();
    build(config).map_err(|error| format!("cannot connect to the API server {server}: {}", told(&error)))
}

async fn configuration(kubeconfig: Option<&Path>) -> Result<Config, String> {
    let options = KubeConfigOptions::default();
    let wrong = |which: &str, error: &KubeconfigError| format!("{which}: {}", told(error));
    if let Some(path) = kubeconfig {
        let which = format!("discovery.kubernetes.kubeconfig {}", path.display());
        let read = Kubeconfig::read_from(path).map_err(|error| wrong(&which, &error))?;
        return Config::from_custom_kubeconfig(read, &options).await.map_err(|error| wrong(&which, &error));
    }
    if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
        return Config::incluster().map_err(|error| match error {
            InClusterError::ReadDefaultNamespace(error) | InClusterError::ReadCertificateBundle(error) => {
                format!(
                    "this pod has no service account to ask the API server with ({error}): set \
                 automountServiceAccountToken: true in its spec"
                )
            }
            error => format!("the pod's service account cannot be used: {}", told(&error)),
        });
    }
    if std::env::var_os("KUBECONFIG").is_none()
        && !std::env::home_dir().is_some_and(|home| home.join(".kube/config").exists())
    {
        return Err("no kubeconfig and not in a pod: set discovery.kubernetes.kubeconfig".into());
    }
    Config::from_kubeconfig(&options).await.map_err(|error| wrong("the user's kubeconfig", &error))
}

/// `kube`'s own stack of layers would also log each failed request as an error, and repeat requests by itself.
fn build(mut config: Config) -> kube::Result<Client> {
    let agent = HeaderValue::from_static(concat!("kvlane/", env!("CARGO_PKG_VERSION")));
    config.headers.push((http::header::USER_AGENT, agent));
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(CONNECT));
    tcp.set_keepalive(Some(KEEPALIVE));
    let https = config.rustls_https_connector_with_connector(tcp)?;
    let http = Transport(HttpClient::builder(TokioExecutor::new()).build::<_, Body>(https));
    let stack = ClientBuilder::new(http, config.default_namespace.clone())
        .with_layer(&config.base_uri_layer())
        .with_layer(&config.extra_headers_layer()?);
    Ok(match config.auth_layer()? {
        Some(auth) => stack.with_layer(&auth).build(),
        None => stack.build(),
    })
}

/// The HTTP client, with the type of errors that layers of authentication ask for.
#[derive(Clone)]
struct Transport<C>(HttpClient<C, Body>);

// === impl Transport ===

impl<C> Service<Request<Body>> for Transport<C>
where
    C: Connect + Clone + Send + Sync + 'static,
{
    type Response = Response<Incoming>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = self.0.request(request);
        Box::pin(async { Ok(answer.await?) })
    }
}
