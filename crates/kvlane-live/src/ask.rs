//! Questions of the gateway's own to a worker: one request, its whole answer, within a time and a size.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Method, StatusCode};
use tokio::time::timeout;

use crate::config;
use crate::secret::Secret;
use crate::upstream::{UpstreamError, Upstreams};
use crate::worker::{Worker, WorkerId};

/// Bytes of an answer that an [`Engine`] reads: a metrics page of many ranks is not short.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// An engine that is asked about itself.
#[derive(Clone)]
pub struct Engine {
    pub(crate) worker: Arc<Worker>,
    pub(crate) upstreams: Arc<Upstreams>,
    /// Time that one answer may take.
    pub(crate) limit: Duration,
    /// The data-parallel rank that is asked, if one is.
    pub(crate) rank: Option<u32>,
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    /// There was no connection, or no answer that can be read.
    #[error("{method} {path}: {error}")]
    Upstream { method: Method, path: String, error: UpstreamError },
    /// The answer is too long.
    #[error("{method} {path} answered more than {bytes_max} bytes")]
    TooLong { method: Method, path: String, bytes_max: usize },
    /// The answer was not whole in time.
    #[error("{method} {path}: no answer within {limit:?}")]
    Late { method: Method, path: String, limit: Duration },
}

// === impl Engine ===

impl Engine {
    /// The engine at `url`, with `limit` for each of its answers.
    ///
    /// # Errors
    /// What is wrong with the URL, for people.
    pub fn at(url: &str, limit: Duration) -> Result<Self, String> {
        let worker = Arc::new(Worker::new(WorkerId(0), &config::WorkerSpec::new(url))?);
        let config = config::Upstream { connect_timeout: limit, ..config::Upstream::default() };
        Ok(Self { worker, upstreams: Upstreams::new(config, Arc::default()), limit, rank: None })
    }

    /// The same engine, shown this key.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub fn showing(self, key: &Secret) -> Result<Self, String> {
        self.worker.show_key(Some(key))?;
        Ok(self)
    }

    /// The same engine, asked at one of its data-parallel ranks.
    #[must_use]
    pub fn at_rank(&self, rank: u32) -> Self {
        Self { rank: Some(rank), ..self.clone() }
    }

    /// Its URL, as given but for a `/` or `/v1` at its end.
    pub fn url(&self) -> &str {
        &self.worker.url
    }

    /// Its host, without brackets.
    pub fn host(&self) -> &str {
        &self.worker.address.host
    }

    /// What it answers to a GET: status and body.
    ///
    /// # Errors
    /// What went wrong, for people.
    pub async fn get(&self, path: &str) -> Result<(u16, Bytes), String> {
        self.ask(&Method::GET, path, &Bytes::new()).await
    }

    /// What it answers to a POST of JSON: status and body.
    ///
    /// # Errors
    /// What went wrong, for people.
    pub async fn post(&self, path: &str, body: &Bytes) -> Result<(u16, Bytes), String> {
        self.ask(&Method::POST, path, body).await
    }

    /// Tells it something, under header fields that each end in CR LF: the status and body of its answer.
    ///
    /// # Errors
    /// What went wrong, for people.
    pub(crate) async fn tell(&self, path: &str, fields: &str, body: &Bytes) -> Result<(u16, Bytes), String> {
        let (Self { worker, upstreams, limit, .. }, method) = (self, &Method::POST);
        let address = &worker.address;
        let head = format!(
            "POST {}{path} HTTP/1.1\r\nhost: {}\r\nuser-agent: kvlane/{}\r\n{fields}content-length: {}\r\n\r\n",
            address.base_path,
            address.authority,
            env!("CARGO_PKG_VERSION"),
            body.len()
        );
        let what = What { method, path, head: &head, body };
        let answer = exchange(upstreams, worker, what, *limit, ANSWER_BYTES_MAX).await;
        answer.map(|(status, body)| (status.as_u16(), body)).map_err(|error| error.to_string())
    }

    async fn ask(&self, method: &Method, path: &str, body: &Bytes) -> Result<(u16, Bytes), String> {
        let Self { worker, upstreams, limit, rank } = self;
        // vLLM's and SGLang's.
        let rank = rank.map_or_else(String::new, |rank| format!("x-data-parallel-rank: {rank}\r\n"));
        let head = head(worker, method, path, &rank, body);
        let what = What { method, path, head: &head, body };
        let answer = exchange(upstreams, worker, what, *limit, ANSWER_BYTES_MAX).await;
        answer.map(|(status, body)| (status.as_u16(), body)).map_err(|error| error.to_string())
    }
}

/// Asks `worker` and reads all that it answers.
///
/// # Errors
/// No connection, no whole answer within `limit`, or one of more than `bytes_max`.
pub(crate) async fn ask(
    upstreams: &Arc<Upstreams>,
    worker: &Worker,
    method: &Method,
    path: &str,
    body: &Bytes,
    limit: Duration,
    bytes_max: usize,
) -> Result<(StatusCode, Bytes), AskError> {
    let head = head(worker, method, path, "", body);
    exchange(upstreams, worker, What { method, path, head: &head, body }, limit, bytes_max).await
}

/// A question, ready to be sent.
struct What<'a> {
    method: &'a Method,
    path: &'a str,
    head: &'a str,
    body: &'a Bytes,
}

fn head(worker: &Worker, method: &Method, path: &str, more: &str, body: &Bytes) -> String {
    let address = &worker.address;
    let mut head = format!(
        "{method} {}{path} HTTP/1.1\r\nhost: {}\r\nuser-agent: kvlane\r\naccept: */*\r\n{more}",
        address.base_path, address.authority
    );
    if let Some(authorization) = worker.authorization() {
        head += &format!("authorization: {authorization}\r\n");
    }
    if *method == Method::POST {
        head += &format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
    }
    head + "\r\n"
}

async fn exchange(
    upstreams: &Arc<Upstreams>,
    worker: &Worker,
    what: What<'_>,
    limit: Duration,
    bytes_max: usize,
) -> Result<(StatusCode, Bytes), AskError> {
    let What { method, path, head, body } = what;
    let named = || (method.clone(), path.to_owned());
    let broken = |error| {
        let (method, path) = named();
        AskError::Upstream { method, path, error }
    };
    let exchange = async {
        let answer = upstreams.send(worker, method, head.as_bytes(), body, || ()).await;
        let mut answer = answer.map_err(broken)?;
        let mut whole = BytesMut::new();
        while let Some(piece) = std::future::poll_fn(|cx| answer.body.poll_piece(cx)).await {
            whole.extend_from_slice(&piece.map_err(|error| broken(UpstreamError::Broken(error)))?);
            if whole.len() > bytes_max {
                let (method, path) = named();
                return Err(AskError::TooLong { method, path, bytes_max });
            }
        }
        Ok((answer.status, whole.freeze()))
    };
    timeout(limit, exchange).await.unwrap_or_else(|_| {
        let (method, path) = named();
        Err(AskError::Late { method, path, limit })
    })
}
