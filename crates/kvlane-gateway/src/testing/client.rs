//! A client on a plain socket: it sends the given bytes and reads responses one by one.

use std::net::SocketAddr;

use bytes::BytesMut;
use kvlane_http::connections::Chunked;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::testing::wait::soon;

/// One connection.
pub struct Client {
    stream: TcpStream,
    buffer: BytesMut,
    /// The framing of the current response's body.
    framing: Framing,
}

/// A complete response.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Its status.
    pub status: u16,
    /// Its header fields, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Its body, without framing.
    pub body: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
enum Framing {
    Length(usize),
    Chunked(Chunked),
    UntilClose,
}

// === impl Client ===

impl Client {
    /// Connects.
    ///
    /// # Panics
    /// The connection is refused.
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = soon("a connection", TcpStream::connect(address)).await.expect("the gateway listens");
        stream.set_nodelay(true).expect("a socket option");
        Self { stream, buffer: BytesMut::new(), framing: Framing::Length(0) }
    }

    /// Sends these bytes unchanged.
    ///
    /// # Panics
    /// The connection is broken.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        soon("room to write", self.stream.write_all(bytes.as_ref())).await.expect("the gateway reads");
    }

    /// Sends these bytes; returns whether the gateway accepted them.
    pub async fn try_send(&mut self, bytes: &[u8]) -> bool {
        soon("room to write", self.stream.write_all(bytes)).await.is_ok()
    }

    /// Sends an HTTP/1.1 request.
    pub async fn request(&mut self, method: &str, path: &str, body: &str) {
        self.request_with(method, path, "", body).await;
    }

    /// Sends a request with more header fields, each ending in CR LF.
    pub async fn request_with(&mut self, method: &str, path: &str, fields: &str, body: &str) {
        self.send(Self::request_bytes(method, path, fields, body)).await;
    }

    /// The bytes of a request.
    pub fn request_bytes(method: &str, path: &str, fields: &str, body: &str) -> String {
        format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\n{fields}content-length: {}\r\n\r\n{body}",
            body.len()
        )
    }

    /// Reads one complete response to a request that is not HEAD.
    ///
    /// # Panics
    /// The response is malformed or incomplete.
    pub async fn reply(&mut self) -> Reply {
        let (status, headers) = self.head().await;
        let mut body = Vec::new();
        while let Some(piece) = self.piece().await.expect("a whole body") {
            body.extend_from_slice(&piece);
        }
        Reply { status, headers, body }
    }

    /// Reads the head of a response. Interim responses (1xx) count as heads.
    ///
    /// # Panics
    /// The connection ends before the head, or the head is malformed.
    pub async fn head(&mut self) -> (u16, Vec<(String, String)>) {
        let end = loop {
            if let Some(at) = memchr::memmem::find(&self.buffer, b"\r\n\r\n") {
                break at + 4;
            }
            assert!(self.fill().await.expect("a readable socket"), "closed before a head: {:?}", self.buffer);
        };
        let head = self.buffer.split_to(end);
        let head = std::str::from_utf8(&head).expect("a head in ASCII");
        let mut lines = head.split("\r\n");
        let status =
            lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).expect("a status line");
        let fields = lines.filter_map(|line| line.split_once(':'));
        let headers: Vec<_> =
            fields.map(|(name, value)| (name.to_lowercase(), value.trim().to_owned())).collect();
        let find =
            |name: &str| headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str());
        let bodiless = status == 204 || status == 304 || status < 200;
        self.framing = match (find("transfer-encoding"), find("content-length")) {
            _ if bodiless => Framing::Length(0),
            (Some("chunked"), None) => Framing::Chunked(Chunked::start()),
            (None, Some(length)) => Framing::Length(length.parse().expect("a length")),
            (None, None) => Framing::UntilClose,
            both => panic!("ambiguous framing: {both:?}"),
        };
        (status, headers)
    }

    /// The next bytes of the body, or none at its end.
    ///
    /// # Errors
    /// The connection ends before the body does.
    pub async fn piece(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        loop {
            match &mut self.framing {
                Framing::Length(0) => return Ok(None),
                Framing::Length(left) if !self.buffer.is_empty() => {
                    let take = self.buffer.len().min(*left);
                    *left -= take;
                    return Ok(Some(self.buffer.split_to(take).to_vec()));
                }
                Framing::Chunked(chunked) => {
                    let (read, data) = chunked.decode(&mut self.buffer).map_err(std::io::Error::other)?;
                    let done = chunked.is_done();
                    let mut piece = self.buffer.split_to(read).to_vec();
                    piece.truncate(data);
                    if !piece.is_empty() {
                        return Ok(Some(piece));
                    }
                    if done {
                        self.framing = Framing::Length(0);
                        return Ok(None);
                    }
                }
                Framing::UntilClose if !self.buffer.is_empty() => {
                    return Ok(Some(self.buffer.split().to_vec()));
                }
                Framing::Length(_) | Framing::UntilClose => {}
            }
            if !self.fill().await? {
                return match self.framing {
                    Framing::UntilClose => Ok(None),
                    _ => Err(std::io::ErrorKind::UnexpectedEof.into()),
                };
            }
        }
    }

    /// Reads the body until `text` has appeared.
    ///
    /// # Panics
    /// The body ends before.
    pub async fn see(&mut self, text: &str) {
        let mut seen = Vec::new();
        while memchr::memmem::find(&seen, text.as_bytes()).is_none() {
            match self.piece().await {
                Ok(Some(piece)) => seen.extend_from_slice(&piece),
                ended => panic!("{ended:?} before {text:?}, after {:?}", String::from_utf8_lossy(&seen)),
            }
        }
    }

    /// Reads the body to its end: returns the bytes, and whether it ended properly.
    pub async fn rest(&mut self) -> (Vec<u8>, bool) {
        let mut seen = Vec::new();
        loop {
            match self.piece().await {
                Ok(Some(piece)) => seen.extend_from_slice(&piece),
                Ok(None) => return (seen, true),
                Err(_) => return (seen, false),
            }
        }
    }

    /// Reads this many bytes as they come.
    ///
    /// # Panics
    /// There are fewer.
    pub async fn read_exact(&mut self, count: usize) -> Vec<u8> {
        while self.buffer.len() < count {
            assert!(self.fill().await.expect("the connection is there"), "it ended after {:?}", self.buffer);
        }
        self.buffer.split_to(count).to_vec()
    }

    /// Waits until the gateway closes the connection, and returns the bytes it sent before.
    pub async fn closed(&mut self) -> Vec<u8> {
        while self.fill().await.unwrap_or(false) {}
        self.buffer.split().to_vec()
    }

    /// Reads more; false at the end.
    async fn fill(&mut self) -> std::io::Result<bool> {
        self.buffer.reserve(16 << 10);
        Ok(soon("bytes from the gateway", self.stream.read_buf(&mut self.buffer)).await? > 0)
    }
}

// === impl Reply ===

impl Reply {
    /// The value of a header field.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// The body is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.text()))
    }

    /// The `code` of the error envelope, after checking its other fields.
    ///
    /// # Panics
    /// The body is not an error envelope.
    pub fn error_code(&self) -> String {
        assert_eq!(self.header("content-type"), Some("application/json"), "{self:?}");
        let error = &self.json()["error"];
        assert!(error["message"].as_str().is_some_and(|message| message.len() > 5), "{error}");
        assert!(error["type"].is_string() && error["param"].is_null(), "{error}");
        error["code"].as_str().expect("a code").to_owned()
    }
}
