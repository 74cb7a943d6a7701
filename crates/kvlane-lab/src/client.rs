//! The HTTP client of the laboratory: a server's address, and connections to it.
//!
//! It is not the gateway's own client: what measures the gateway shares no code with it. The number of connections is
//! not limited: each request takes an idle one or opens one. HTTP/1.1, with or without TLS.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST, HeaderName, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;

/// Timeout of a connection attempt.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum idle time of a connection that is reused: vLLM and others close theirs after five seconds, and one that
/// closes while a request is on its way looks like a failure of the server.
const IDLE_MAX: Duration = Duration::from_secs(4);

/// A server.
pub struct Target {
    host: String,
    port: u16,
    /// Before `/v1`, without a slash at its end.
    prefix: String,
    authority: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// Fields of every request.
    headers: HeaderMap,
    /// Resolved once.
    addresses: OnceCell<Vec<SocketAddr>>,
    /// Idle connections with the start of their idle time; the last one is used first.
    free: Mutex<Vec<(Instant, Connection)>>,
}

/// CAs for an https server.
pub type Tls = Arc<ClientConfig>;

/// A connection that takes one request at a time.
pub type Connection = SendRequest<Full<Bytes>>;

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// There is no connection.
    #[error("{0}")]
    Connect(String),
    /// The connection broke.
    #[error("{0}")]
    Broken(String),
}

// === impl Target ===

impl Target {
    /// The server at `http://host:port` or, with `tls`, `https://host`, with or without `/v1` behind it. Every request
    /// has `headers`.
    ///
    /// # Errors
    /// What is wrong with the URL.
    pub fn new(url: &str, tls: Option<Tls>, headers: HeaderMap) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|error: http::uri::InvalidUri| error.to_string())?;
        let host = uri.host().ok_or("the host is missing")?;
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let (tls, default_port) = match uri.scheme_str() {
            Some("http") => (None, 80),
            Some("https") => {
                let tls = tls.ok_or("no CA certificates are configured")?;
                let name = ServerName::try_from(bare.clone()).map_err(|error| error.to_string())?;
                (Some((TlsConnector::from(tls), name)), 443)
            }
            _ => return Err("http:// or https:// is missing".into()),
        };
        let port = uri.port_u16().unwrap_or(default_port);
        let authority = if port == default_port { host.to_owned() } else { format!("{host}:{port}") };
        let mut headers = headers;
        if !headers.contains_key(HOST) {
            let host = HeaderValue::try_from(&*authority);
            headers.insert(HOST, host.map_err(|_| "its host is not a valid header value")?);
        }
        let path = uri.path().trim_end_matches('/');
        Ok(Self {
            host: bare,
            port,
            prefix: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
            authority,
            tls,
            headers,
            addresses: OnceCell::new(),
            free: Mutex::default(),
        })
    }

    /// Its host, and its port if that is not the default one.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// A request for `path`, which begins with a slash. A field of `own` yields to one that every request has.
    pub fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        own: impl IntoIterator<Item = (HeaderName, HeaderValue)>,
    ) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = format!("{}{path}", self.prefix).parse().expect("a path that was parsed before");
        *request.headers_mut() = self.headers.clone();
        for (name, value) in own {
            request.headers_mut().entry(name).or_insert(value);
        }
        request
    }

    /// Sends a request and returns its answer's head, with the connection to return once the body has been read. A
    /// connection that was closed before the request was sent on it is replaced.
    ///
    /// # Errors
    /// Why there is no answer.
    pub async fn send(
        &self,
        mut request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, Connection), SendError> {
        while let Some(mut connection) = self.take() {
            match connection.try_send_request(request).await {
                Ok(answer) => return Ok((answer, connection)),
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(SendError::Broken(describe(&error.into_error()))),
                },
            }
        }
        let mut connection = self.connect().await?;
        match connection.send_request(request).await {
            Ok(answer) => Ok((answer, connection)),
            Err(error) => Err(SendError::Broken(describe(&error))),
        }
    }

    /// Sends a question on a connection of its own: status and body of the answer.
    ///
    /// # Errors
    /// No answer within `limit`, or one of more than `bytes_max`.
    pub async fn ask(
        &self,
        method: Method,
        path: &str,
        limit: Duration,
        bytes_max: usize,
    ) -> Result<(StatusCode, Bytes), String> {
        let answer = async {
            let mut connection = self.connect().await.map_err(|error| error.to_string())?;
            let request = self.request(method, path, Bytes::new(), []);
            let answer = connection.send_request(request).await.map_err(|error| describe(&error))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), bytes_max).collect().await;
            Ok((status, body.map_err(|error| error.to_string())?.to_bytes()))
        };
        let answered = tokio::time::timeout(limit, answer).await;
        answered.unwrap_or_else(|_| Err(format!("no answer within {limit:?}")))
    }

    /// Returns a connection whose answer has been read to its end.
    pub async fn give_back(&self, mut connection: Connection) {
        if connection.ready().await.is_ok() {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.push((Instant::now(), connection));
        }
    }

    /// An idle connection that is young enough; the others are closed. The server may have closed it as well: that is
    /// detected when a request is sent on it.
    fn take(&self) -> Option<Connection> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let old = free.partition_point(|(since, _)| since.elapsed() > IDLE_MAX);
        free.drain(..old);
        free.pop().map(|(_, connection)| connection)
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// [`SendError::Connect`].
    pub async fn connect(&self) -> Result<Connection, SendError> {
        match tokio::time::timeout(CONNECT_TIMEOUT, self.open()).await {
            Ok(opened) => opened.map_err(|error| SendError::Connect(describe(&error))),
            Err(_) => Err(SendError::Connect(format!("no connection within {CONNECT_TIMEOUT:?}"))),
        }
    }

    async fn open(&self) -> io::Result<Connection> {
        let look_up = async || {
            let found = tokio::net::lookup_host((self.host.as_str(), self.port)).await?;
            Ok::<Vec<SocketAddr>, io::Error>(found.collect())
        };
        let addresses = self.addresses.get_or_try_init(look_up).await?;
        let stream = TcpStream::connect(&addresses[..]).await?;
        stream.set_nodelay(true)?;
        match &self.tls {
            None => speak(TokioIo::new(stream)).await,
            Some((connector, name)) => {
                speak(TokioIo::new(connector.connect(name.clone(), stream).await?)).await
            }
        }
    }
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").field("authority", &self.authority).finish_non_exhaustive()
    }
}

/// The field of a request that has this API key; `None` if a header cannot carry it.
pub fn bearer(key: &str) -> Option<(HeaderName, HeaderValue)> {
    let mut value = HeaderValue::try_from(format!("Bearer {key}")).ok()?;
    value.set_sensitive(true);
    Some((AUTHORIZATION, value))
}

/// The next piece of a body; `None` at its end.
///
/// # Errors
/// If the connection broke.
pub async fn next(body: &mut Incoming) -> Result<Option<Bytes>, hyper::Error> {
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// The beginning of an error answer, or less if it breaks.
pub async fn beginning(mut body: Incoming, bytes_max: usize) -> String {
    let mut read = Vec::new();
    while let Ok(Some(data)) = next(&mut body).await {
        read.extend_from_slice(&data[..data.len().min(bytes_max - read.len())]);
        if read.len() == bytes_max {
            break;
        }
    }
    String::from_utf8_lossy(&read).trim().to_owned()
}

/// Starts HTTP on a stream. The connection runs in a separate task until it is closed.
async fn speak<S>(stream: TokioIo<S>) -> io::Result<Connection>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(stream).await.map_err(io::Error::other)?;
    // Its failure is reported to the request on it.
    tokio::spawn(async move { connection.await.ok() });
    Ok(sender)
}

/// An error with its causes; the client's own display names only the outermost.
pub fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn what_stands_before_v1_is_kept_and_a_default_port_is_not_named() {
        let request = |url: &str| {
            let target = Target::new(url, None, HeaderMap::new()).expect("an address");
            let request = target.request(Method::GET, "/v1/models", Bytes::new(), []);
            (request.uri().to_string(), request.headers()[HOST].to_str().expect("text").to_owned())
        };
        assert_eq!(request("http://h:1/some/v1/"), ("/some/v1/models".into(), "h:1".into()));
        assert_eq!(request("http://[::1]:80"), ("/v1/models".into(), "[::1]".into()));
    }

    #[tokio::test]
    async fn a_free_connection_that_the_server_has_closed_is_replaced() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let target = Target::new(&url, None, HeaderMap::new()).expect("an address");
        let ask = async || {
            let request = target.request(Method::GET, "/v1/models", Bytes::new(), []);
            target.send(request).await.expect("an answer")
        };
        let answer = async || {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let mut heard = Vec::new();
            while !heard.ends_with(b"\r\n\r\n") {
                assert!(stream.read_buf(&mut heard).await.expect("it reads") > 0);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.expect("it writes");
            stream
        };
        let (first, stream) = tokio::join!(ask(), answer());
        let (answered, connection) = first;
        drop(answered);
        target.give_back(connection).await;
        drop(stream);
        let closed =
            || target.free.lock().expect("whole").iter().all(|(_, connection)| connection.is_closed());
        assert_eq!(target.free.lock().expect("whole").len(), 1);
        while !closed() {
            tokio::task::yield_now().await;
        }
        let (second, _stream) = tokio::join!(ask(), answer());
        assert_eq!(second.0.status(), StatusCode::OK);
    }
}
