//! The server under load: its address, and connections to it.
//!
//! The number of connections is not limited: each request takes an idle one or opens one. HTTP/1.1, with or without
//! TLS.

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
use kvlane_wire::models;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;

use super::{Api, ErrorClass, ReplayConfig, ReplayError};

/// Timeout of a connection attempt, after which a request counts as [`ErrorClass::Connect`].
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum idle time of a connection that is reused: vLLM and others close theirs after five seconds, and one that
/// closes while a request is on its way looks like a failure of the server.
const IDLE_MAX: Duration = Duration::from_secs(4);

/// Bytes of a list of models that are read.
const MODELS_BYTES_MAX: usize = 16 << 20;

/// The server's address.
pub(super) struct Target {
    url: String,
    host: String,
    port: u16,
    /// Before `/v1`, without a slash at its end.
    prefix: String,
    authority: HeaderValue,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    headers: HeaderMap,
    /// Resolved once.
    addresses: OnceCell<Vec<SocketAddr>>,
    /// Idle connections with the start of their idle time; the last one is used first.
    free: Mutex<Vec<(Instant, Connection)>>,
}

/// A connection that takes one request at a time.
pub(super) type Connection = SendRequest<Full<Bytes>>;

/// A class and a message.
pub(super) type Failure = (ErrorClass, String);

// === impl Target ===

impl Target {
    pub(super) fn new(config: &ReplayConfig) -> Result<Self, ReplayError> {
        let wrong = |why: &str| ReplayError::BaseUrl { url: config.base_url.clone(), why: why.into() };
        let uri: Uri =
            config.base_url.parse().map_err(|error: http::uri::InvalidUri| wrong(&error.to_string()))?;
        let host = uri.host().ok_or_else(|| wrong("the host is missing"))?;
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let (tls, default_port) = match uri.scheme_str() {
            Some("http") => (None, 80),
            Some("https") => {
                let tls = config.tls.clone().ok_or_else(|| wrong("no CA certificates are configured"))?;
                let name = ServerName::try_from(bare.clone()).map_err(|error| wrong(&error.to_string()))?;
                (Some((connector(tls), name)), 443)
            }
            _ => return Err(wrong("http:// or https:// is missing")),
        };
        let port = uri.port_u16().unwrap_or(default_port);
        let authority = if port == default_port { host.to_owned() } else { format!("{host}:{port}") };
        let path = uri.path().trim_end_matches('/');
        let mut headers = HeaderMap::new();
        if let Some(key) = &config.api_key {
            let mut bearer: HeaderValue =
                format!("Bearer {key}").try_into().map_err(|_| ReplayError::ApiKey)?;
            bearer.set_sensitive(true);
            headers.insert(AUTHORIZATION, bearer);
        }
        headers.extend(config.headers.iter().cloned());
        Ok(Self {
            url: config.base_url.clone(),
            host: bare,
            port,
            prefix: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
            authority: authority.try_into().map_err(|_| wrong("its host cannot be a header's value"))?,
            tls,
            headers,
            addresses: OnceCell::new(),
            free: Mutex::default(),
        })
    }

    /// A request for `path`, which begins with `/v1`.
    pub(super) fn request(&self, method: Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = format!("{}{path}", self.prefix).parse().expect("a path that was parsed before");
        let headers = request.headers_mut();
        headers.extend(self.headers.clone());
        headers.entry(HOST).or_insert_with(|| self.authority.clone());
        request
    }

    /// The request of a trace for `api`.
    pub(super) fn ask(
        &self,
        api: Api,
        body: Bytes,
        own: impl IntoIterator<Item = (HeaderName, HeaderValue)>,
    ) -> Request<Full<Bytes>> {
        let mut request = self.request(Method::POST, api.path(), body);
        for (name, value) in own {
            request.headers_mut().entry(name).or_insert(value);
        }
        request
    }

    /// Sends a request and returns its answer's head, with the connection to return once the body has been read. A
    /// connection that was closed before the request was sent on it is replaced.
    pub(super) async fn send(
        &self,
        mut request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, Connection), Failure> {
        while let Some(mut connection) = self.take() {
            match connection.try_send_request(request).await {
                Ok(answer) => return Ok((answer, connection)),
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err((ErrorClass::Reset, describe(&error.into_error()))),
                },
            }
        }
        let connect = |error: io::Error| (ErrorClass::Connect, describe(&error));
        let opened = tokio::time::timeout(CONNECT_TIMEOUT, self.open()).await;
        let mut connection = match opened {
            Ok(opened) => opened.map_err(connect)?,
            Err(_) => return Err((ErrorClass::Connect, format!("no connection within {CONNECT_TIMEOUT:?}"))),
        };
        match connection.send_request(request).await {
            Ok(answer) => Ok((answer, connection)),
            Err(error) => Err((ErrorClass::Reset, describe(&error))),
        }
    }

    /// Returns a connection whose answer has been read to its end.
    pub(super) async fn give_back(&self, mut connection: Connection) {
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

    /// The names of its models, without adapters.
    pub(super) async fn models(&self) -> Result<Vec<String>, ReplayError> {
        let fail = |why: String| ReplayError::Models { url: self.url.clone(), why };
        let asked = async {
            let request = self.request(Method::GET, "/v1/models", Bytes::new());
            let (answer, _connection) = self.send(request).await.map_err(|(_, why)| why)?;
            if answer.status() != StatusCode::OK {
                return Err(format!("GET /v1/models answered {}", answer.status()));
            }
            let body = Limited::new(answer.into_body(), MODELS_BYTES_MAX).collect().await;
            let listed = models::parse(&body.map_err(|error| error.to_string())?.to_bytes());
            listed.map_err(|error| error.to_string())
        };
        let listed = match tokio::time::timeout(CONNECT_TIMEOUT, asked).await {
            Ok(listed) => listed.map_err(fail)?,
            Err(_) => return Err(fail(format!("no answer within {CONNECT_TIMEOUT:?}"))),
        };
        Ok(listed.into_iter().filter(|model| model.parent.is_none()).map(|model| model.id).collect())
    }
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

fn connector(config: Arc<ClientConfig>) -> TlsConnector {
    TlsConnector::from(config)
}

/// An error with its causes; the client's own display names only the outermost.
pub(super) fn describe(error: &dyn std::error::Error) -> String {
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

    #[tokio::test]
    async fn a_free_connection_that_the_server_has_closed_is_replaced() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let base_url = format!("http://{}", listener.local_addr().expect("bound"));
        let target = Target::new(&ReplayConfig { base_url, ..Default::default() }).expect("an address");
        let ask = async || {
            let request = target.request(Method::GET, "/v1/models", Bytes::new());
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
