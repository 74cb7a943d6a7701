//! Questions to a server, such as probes, `/tokenize` and `/v1/models`: one request, its whole answer, within a time and a size.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use tokio::time::timeout;

use crate::connections::{AnswerBody, Connections, ConnectionsConfig, UpstreamError};
use crate::secret::Secret;
use crate::upstream::{Upstream, UpstreamId};

/// Bytes of an answer that an [`Engine`] reads: a metrics page of many ranks is not short.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// A client for questions to one server: each is one request, and its whole answer within a time and a size.
#[derive(Clone)]
pub struct Client {
    upstream: Arc<Upstream>,
    connections: Arc<Connections>,
    /// Time that one answer may take.
    limit: Duration,
    /// The data-parallel rank that is asked, if one is.
    rank: Option<u32>,
    /// Header fields of every question, each of which ends in CR LF.
    fields: Arc<str>,
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// There was no connection, or no answer that can be parsed.
    #[error("{method} {path}: {error}")]
    Upstream {
        /// The question's method.
        method: Method,
        /// Its path.
        path: String,
        /// What failed.
        error: UpstreamError,
        /// Whether the server is spoken to with TLS, or is one that has none.
        tls: bool,
    },
    /// The answer is too long.
    #[error("{method} {path} answered more than {bytes_max} bytes")]
    TooLong {
        /// The question's method.
        method: Method,
        /// Its path.
        path: String,
        /// Bytes that an answer may have.
        bytes_max: usize,
    },
    /// The answer was not complete in time.
    #[error("{method} {path}: no answer within {limit:?}")]
    Late {
        /// The question's method.
        method: Method,
        /// Its path.
        path: String,
        /// Time that the answer could take.
        limit: Duration,
    },
}

/// The origin of a URL, and its path with the query; `/` if it has none.
pub fn origin_and_path(url: &str) -> (&str, &str) {
    let host = url.find("://").map_or(0, |at| at + "://".len());
    let (origin, path) = url.split_at(url[host..].find('/').map_or(url.len(), |at| host + at));
    (origin, if path.is_empty() { "/" } else { path })
}

// === impl Client ===

impl Client {
    /// A client for `upstream` on these connections, with `limit` for each answer.
    pub fn new(upstream: Arc<Upstream>, connections: Arc<Connections>, limit: Duration) -> Self {
        Self { upstream, connections, limit, rank: None, fields: Arc::default() }
    }

    /// A client with connections of its own for the server at `url`, with `limit` for each answer.
    ///
    /// # Errors
    /// What is wrong with the URL.
    pub fn at(url: &str, limit: Duration) -> Result<Self, String> {
        let upstream = Arc::new(Upstream::new(UpstreamId(0), url, None, None)?);
        let config = ConnectionsConfig { connect_timeout: limit, ..ConnectionsConfig::default() };
        Ok(Self::new(upstream, Connections::new(config, Arc::default()), limit))
    }

    /// The same client with this key in its requests.
    ///
    /// # Errors
    /// Why the key cannot be read.
    pub fn with_key(self, key: &Secret) -> Result<Self, String> {
        self.upstream.set_key(Some(key))?;
        Ok(self)
    }

    /// The same client with these header fields, `name: value`, in its requests.
    ///
    /// # Errors
    /// Which one is not a header field.
    pub fn with_fields<'a>(self, fields: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let mut all = String::from(&*self.fields);
        for field in fields {
            let (name, value) =
                field.split_once(':').ok_or_else(|| format!("'{field}': write 'NAME: VALUE'"))?;
            let (name, value) = (name.trim(), value.trim());
            let is_field = HeaderName::try_from(name).is_ok() && HeaderValue::try_from(value).is_ok();
            if !is_field {
                return Err(format!("'{name}' is not a header field: write 'NAME: VALUE'"));
            }
            all += &format!("{name}: {value}\r\n");
        }
        Ok(Self { fields: all.into(), ..self })
    }

    /// The same client for one data-parallel rank of the engine.
    #[must_use]
    pub fn at_rank(&self, rank: u32) -> Self {
        Self { rank: Some(rank), ..self.clone() }
    }

    /// The same client with another `limit` for each answer.
    #[must_use]
    pub fn within(&self, limit: Duration) -> Self {
        Self { limit, ..self.clone() }
    }

    /// The server's URL, without a trailing `/` or `/v1`.
    pub fn url(&self) -> &str {
        &self.upstream.url
    }

    /// The server's host, without brackets.
    pub fn host(&self) -> &str {
        &self.upstream.address.host
    }

    /// Sends a GET: status and body of the answer.
    ///
    /// # Errors
    /// What went wrong.
    pub async fn get(&self, path: &str) -> Result<(u16, Bytes), String> {
        self.ask(&Method::GET, path, &Bytes::new()).await
    }

    /// Sends a POST of JSON: status and body of the answer.
    ///
    /// # Errors
    /// What went wrong.
    pub async fn post(&self, path: &str, body: &Bytes) -> Result<(u16, Bytes), String> {
        self.ask(&Method::POST, path, body).await
    }

    /// Sends a POST with these header fields, each of which ends in CR LF: status and body of the answer.
    ///
    /// # Errors
    /// What went wrong.
    pub async fn post_with(&self, path: &str, fields: &str, body: &Bytes) -> Result<(u16, Bytes), String> {
        let method = &Method::POST;
        let address = &self.upstream.address;
        let head = format!(
            "POST {}{path} HTTP/1.1\r\nhost: {}\r\nuser-agent: kvlane/{}\r\n{}{fields}content-length: {}\r\n\r\n",
            address.base_path,
            address.authority,
            env!("CARGO_PKG_VERSION"),
            self.fields,
            body.len()
        );
        self.exchange(Question { method, path, head: &head, body }).await
    }

    async fn ask(&self, method: &Method, path: &str, body: &Bytes) -> Result<(u16, Bytes), String> {
        // vLLM and SGLang both read this header.
        let rank = self.rank.map_or_else(String::new, |rank| format!("x-data-parallel-rank: {rank}\r\n"));
        let head = head(&self.upstream, method, path, &format!("{rank}{}", self.fields), body);
        self.exchange(Question { method, path, head: &head, body }).await
    }

    async fn exchange(&self, question: Question<'_>) -> Result<(u16, Bytes), String> {
        let answer =
            exchange(&self.connections, &self.upstream, question, self.limit, ANSWER_BYTES_MAX).await;
        answer.map(|(status, body)| (status.as_u16(), body)).map_err(|error| error.with_remedy())
    }
}

/// Sends one request to `upstream` and reads the whole answer.
///
/// # Errors
/// No connection, no complete answer within `limit`, or one of more than `bytes_max`.
pub async fn ask(
    connections: &Arc<Connections>,
    upstream: &Upstream,
    method: &Method,
    path: &str,
    body: &Bytes,
    limit: Duration,
    bytes_max: usize,
) -> Result<(StatusCode, Bytes), AskError> {
    let head = head(upstream, method, path, "", body);
    exchange(connections, upstream, Question { method, path, head: &head, body }, limit, bytes_max).await
}

/// Like [`ask`], without a body, with more header fields, each of which ends in CR LF, and within a time and a size.
///
/// # Errors
/// Like those of [`ask`].
pub async fn ask_with(
    connections: &Arc<Connections>,
    upstream: &Upstream,
    method: &Method,
    path: &str,
    fields: &str,
    (limit, bytes_max): (Duration, usize),
) -> Result<(StatusCode, Bytes), AskError> {
    let body = &Bytes::new();
    let head = head(upstream, method, path, fields, body);
    exchange(connections, upstream, Question { method, path, head: &head, body }, limit, bytes_max).await
}

/// Sends a request with this body over HTTP/2, as gRPC has it: the fields of the answer's head and trailers, and its body.
///
/// # Errors
/// Like those of [`ask`].
pub async fn ask_http2(
    connections: &Arc<Connections>,
    upstream: &Upstream,
    path: &'static str,
    body: &Bytes,
    (limit, bytes_max): (Duration, usize),
) -> Result<(HeaderMap, Bytes), AskError> {
    let named = || (Method::POST, path.to_owned());
    let broken = |error| {
        let (method, path) = named();
        AskError::Upstream { method, path, error, tls: true }
    };
    let exchange = async {
        let head = http2_head(upstream, path).map_err(|error| broken(UpstreamError::Garbage(error)))?;
        let answer = connections.send_http2(upstream, &head, body, || ()).await;
        let mut answer = answer.map_err(broken)?;
        let whole = read(&mut answer.body, bytes_max).await.map_err(&broken)?;
        let Some(whole) = whole else {
            let (method, path) = named();
            return Err(AskError::TooLong { method, path, bytes_max });
        };
        let mut fields = answer.headers;
        fields.extend(answer.body.take_trailers().unwrap_or_default());
        Ok((fields, whole))
    };
    timeout(limit, exchange).await.unwrap_or_else(|_| {
        let (method, path) = named();
        Err(AskError::Late { method, path, limit })
    })
}

fn http2_head(upstream: &Upstream, path: &str) -> Result<Request<()>, String> {
    let mut head = Request::post(format!("http://{}{path}", upstream.address.authority))
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .header("user-agent", "kvlane");
    if let Some(authorization) = upstream.authorization() {
        head = head.header("authorization", authorization.as_str());
    }
    head.body(()).map_err(|error| error.to_string())
}

/// The whole body; none if it has more than `bytes_max`.
async fn read(body: &mut AnswerBody, bytes_max: usize) -> Result<Option<Bytes>, UpstreamError> {
    let mut whole = BytesMut::new();
    while let Some(piece) = std::future::poll_fn(|cx| body.poll_piece(cx)).await {
        whole.extend_from_slice(&piece.map_err(UpstreamError::Broken)?);
        if whole.len() > bytes_max {
            return Ok(None);
        }
    }
    Ok(Some(whole.freeze()))
}

/// A request, ready to be sent.
struct Question<'a> {
    method: &'a Method,
    path: &'a str,
    head: &'a str,
    body: &'a Bytes,
}

fn head(upstream: &Upstream, method: &Method, path: &str, more: &str, body: &Bytes) -> String {
    let address = &upstream.address;
    let mut head = format!(
        "{method} {}{path} HTTP/1.1\r\nhost: {}\r\nuser-agent: kvlane\r\naccept: */*\r\n{more}",
        address.base_path, address.authority
    );
    if let Some(authorization) = upstream.authorization() {
        head += &format!("authorization: {authorization}\r\n");
    }
    if *method == Method::POST {
        head += &format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
    }
    head + "\r\n"
}

async fn exchange(
    connections: &Arc<Connections>,
    upstream: &Upstream,
    question: Question<'_>,
    limit: Duration,
    bytes_max: usize,
) -> Result<(StatusCode, Bytes), AskError> {
    let Question { method, path, head, body } = question;
    let named = || (method.clone(), path.to_owned());
    let broken = |error| {
        let (method, path) = named();
        AskError::Upstream { method, path, error, tls: upstream.address.tls }
    };
    let exchange = async {
        let answer = connections.send(upstream, method, head.as_bytes(), body, || ()).await;
        let mut answer = answer.map_err(broken)?;
        match read(&mut answer.body, bytes_max).await.map_err(broken)? {
            Some(whole) => Ok((answer.status, whole)),
            None => {
                let (method, path) = named();
                Err(AskError::TooLong { method, path, bytes_max })
            }
        }
    };
    timeout(limit, exchange).await.unwrap_or_else(|_| {
        let (method, path) = named();
        Err(AskError::Late { method, path, limit })
    })
}
