//! Downloads of files over HTTP: redirects are followed, and a key goes to the first server only.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, StatusCode, Uri, header};
use tokio::time::timeout;

use crate::client::AskError;
use crate::connections::{Connections, ConnectionsConfig, UpstreamError};
use crate::secret::Secret;
use crate::upstream::{Upstream, UpstreamId};

/// Redirects that are followed.
const REDIRECTS_MAX: usize = 5;

/// A request for a file.
pub struct Download<'a> {
    /// Its URL.
    pub url: &'a str,
    /// The key to send to the URL's server.
    pub key: Option<&'a Secret>,
    /// Time for the whole file, redirects included.
    pub limit: Duration,
    /// Bytes that it may have.
    pub bytes_max: usize,
}

/// One request of a download.
struct Step {
    upstream: Upstream,
    path: String,
}

// === impl Download ===

impl Download<'_> {
    /// Sends the request and those that redirects ask for: the status and body of the last answer.
    ///
    /// # Errors
    /// What went wrong.
    pub async fn run(&self) -> Result<(StatusCode, Bytes), String> {
        let late = |_| Err(format!("{}: not complete within {:?}", self.url, self.limit));
        timeout(self.limit, self.follow()).await.unwrap_or_else(late)
    }

    async fn follow(&self) -> Result<(StatusCode, Bytes), String> {
        let (mut url, mut key) = (self.url.to_owned(), self.key);
        for _ in 0..=REDIRECTS_MAX {
            let step = Step::of(&url, key)?;
            let (status, headers, body) =
                step.ask(self.bytes_max).await.map_err(|error| error.with_remedy())?;
            let Some(location) = headers.get(header::LOCATION).filter(|_| status.is_redirection()) else {
                return Ok((status, body));
            };
            let location = location.to_str().map_err(|_| format!("{url}: its Location is not a URL"))?;
            let there = step.resolve(location);
            if !Step::of(&there, None)?.is_at(&step) {
                key = None;
            }
            url = there;
        }
        Err(format!("{}: more than {REDIRECTS_MAX} redirects", self.url))
    }
}

// === impl Step ===

impl Step {
    fn of(url: &str, key: Option<&Secret>) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|error| format!("'{url}' is not a URL ({error})"))?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(format!("'{url}' is not a URL with a host"));
        };
        let upstream = Upstream::new(UpstreamId(0), &format!("{scheme}://{authority}"), key, None)?;
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        Ok(Self { upstream, path: path.to_owned() })
    }

    fn is_at(&self, other: &Self) -> bool {
        self.upstream.address == other.upstream.address
    }

    /// The URL of a redirect.
    fn resolve(&self, location: &str) -> String {
        match location.starts_with('/') {
            true => format!("{}{location}", self.upstream.url),
            false => location.to_owned(),
        }
    }

    async fn ask(&self, bytes_max: usize) -> Result<(StatusCode, HeaderMap, Bytes), AskError> {
        let connections = Connections::new(ConnectionsConfig::default(), Arc::default());
        let (method, path) = (Method::GET, &self.path);
        let tls = self.upstream.address.tls;
        let broken = |error| AskError::Upstream { method: Method::GET, path: path.clone(), error, tls };
        let key = self.upstream.authorization();
        let key = key.map_or_else(String::new, |key| format!("authorization: {key}\r\n"));
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: {}\r\nuser-agent: kvlane/{}\r\naccept: */*\r\n{key}\r\n",
            self.upstream.address.authority,
            env!("CARGO_PKG_VERSION")
        );
        let answer = connections.send(&self.upstream, &method, head.as_bytes(), &Bytes::new(), || ()).await;
        let mut answer = answer.map_err(broken)?;
        let mut whole = BytesMut::new();
        while let Some(piece) = std::future::poll_fn(|cx| answer.body.poll_piece(cx)).await {
            whole.extend_from_slice(&piece.map_err(|error| broken(UpstreamError::Broken(error)))?);
            if whole.len() > bytes_max {
                return Err(AskError::TooLong { method, path: path.clone(), bytes_max });
            }
        }
        Ok((answer.status, answer.headers, whole.freeze()))
    }
}
