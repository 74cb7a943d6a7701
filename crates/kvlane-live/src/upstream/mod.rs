//! HTTP/1.1 to the workers: pooled connections, one request at a time on each, bodies as bytes.
//!
//! A library client hands over an answer chunk by chunk, as the engine framed it; a stream of 32 events costs 32
//! frames on the way in and 32 on the way out. Here what one read brings is one piece, whatever its framing.
//!
//! A connection belongs to one relay thread. It goes back to the idle ones only when an answer has been read to its
//! exact end, and an idle one that has become readable is not used again: the worker has closed it.

pub(crate) mod chunked;
#[cfg(feature = "testing")]
pub(crate) mod pieces;
mod watch;

use std::collections::HashMap;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

pub(crate) use self::chunked::Chunked;
use crate::address::Address;
use crate::config;
use crate::tls::{Stream, ToWorkers};
use crate::worker::{Worker, WorkerId};

/// Room for one read. An engine's event is some 200 bytes, an answer some kilobytes.
const READ_BYTES: usize = 16 << 10;
/// How long a connection is idle before the kernel is asked whether its worker has closed it; before, what the runtime knows
/// is enough.
const LOOKED_AT_AFTER: Duration = Duration::from_millis(10);
/// The largest head an answer may have.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// The most interim heads (1xx) before an answer.
const INTERIM_HEADS_MAX: u32 = 16;
/// The most header fields an answer may have.
const HEADERS_MAX: usize = 96;

/// Why a worker gave no answer. Always before the first byte of the body.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// No connection.
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    /// No connection within the time for it.
    #[error("no connection within {0:?}")]
    ConnectTimeout(Duration),
    /// A connection that had been idle took nothing of the request: the worker had closed it.
    #[error("the idle connection had been closed: {0}")]
    Stale(io::Error),
    /// The connection broke before a whole head had come.
    #[error("the connection broke before an answer: {0}")]
    Broken(io::Error),
    /// What came is no HTTP.
    #[error("the answer is not HTTP/1.1: {0}")]
    Garbage(String),
    /// Nothing came in time.
    #[error("no answer had begun within {0:?}")]
    Silent(Duration),
    /// Its engine has stopped making progress.
    #[error("its engine makes no progress, and no content had come")]
    Stalled,
    /// The worker's probes say that it is down.
    #[error("it fails its probes, and no answer had begun")]
    Unfit,
}

// === impl UpstreamError ===

impl UpstreamError {
    /// Whether the worker has seen nothing of the request.
    pub(crate) const fn is_before_sending(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::ConnectTimeout(_) | Self::Stale(_))
    }
}

/// The idle connections of one relay thread.
pub(crate) struct Upstreams {
    config: ArcSwap<config::Upstream>,
    tls: ArcSwap<ToWorkers>,
    idle: Mutex<HashMap<WorkerId, Vec<Idle>>>,
}

struct Idle {
    stream: Stream,
    since: Instant,
}

/// An answer whose head has come.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: AnswerBody,
    /// Since when the worker has had the whole request, or all of it that it wanted.
    pub(crate) sent: Instant,
}

/// The body of an answer, as it comes.
pub(crate) struct AnswerBody {
    /// None once the connection has gone back to the idle ones.
    stream: Option<Stream>,
    buffer: BytesMut,
    framing: Framing,
    /// Taken already, and to be given first.
    first: Option<Bytes>,
    reusable: bool,
    home: Arc<Upstreams>,
    worker: WorkerId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Length { left: u64 },
    Chunked(Chunked),
    UntilClose,
    Done,
}

// === impl Upstreams ===

impl Upstreams {
    pub(crate) fn new(config: config::Upstream, tls: Arc<ToWorkers>) -> Arc<Self> {
        let (config, tls) = (ArcSwap::from_pointee(config), ArcSwap::new(tls));
        Arc::new(Self { config, tls, idle: Mutex::default() })
    }

    /// Is set up in another way from here on. Idle connections stay.
    pub(crate) fn configure(&self, config: config::Upstream) {
        self.config.store(Arc::new(config));
    }

    /// Trusts and shows other certificates from here on. Idle connections stay.
    pub(crate) fn speak_as(&self, tls: Arc<ToWorkers>) {
        self.tls.store(tls);
    }

    /// Sends a request and waits for the head of its answer; tells `sending` just before the first byte goes.
    ///
    /// An idle connection of which the worker took no byte is replaced by a fresh one. One that breaks later may have
    /// carried the request to the engine, which may be at work on it: that attempt has failed (RFC 9110, section 9.2.2,
    /// lets a client repeat a POST on its own only where it knows that it was not applied).
    pub(crate) async fn send(
        self: &Arc<Self>,
        worker: &Worker,
        method: &Method,
        head: &[u8],
        body: &Bytes,
        sending: impl Fn(),
    ) -> Result<Answer, UpstreamError> {
        if let Some(stream) = self.take_idle(worker.id) {
            sending();
            match self.exchange(stream, worker.id, method, head, body).await {
                Err(UpstreamError::Stale(_)) => {}
                answered => return answered,
            }
        }
        // Boxed, since it is rare and takes much more room than the rest.
        let stream = Box::pin(self.connect_in_time(worker)).await?;
        sending();
        self.exchange(stream, worker.id, method, head, body).await
    }

    async fn connect_in_time(&self, worker: &Worker) -> Result<Stream, UpstreamError> {
        let within = self.config.load().connect_timeout;
        match timeout(within, self.connect(worker)).await {
            Ok(connected) => connected.map_err(UpstreamError::Connect),
            Err(_) => Err(UpstreamError::ConnectTimeout(within)),
        }
    }

    async fn connect(&self, worker: &Worker) -> io::Result<Stream> {
        let Address { host, port, tls, .. } = &worker.address;
        let connected = match &worker.allowed {
            None => TcpStream::connect((host.as_str(), *port)).await,
            Some(allowed) => allowed.load_full().connect(&worker.address.place()).await,
        };
        let stream = connected.inspect_err(|_| worker.note_gone())?;
        stream.set_nodelay(true)?;
        if *tls { self.tls.load_full().connect(host, stream).await } else { Ok(Stream::Plain(stream)) }
    }

    async fn exchange(
        self: &Arc<Self>,
        mut stream: Stream,
        worker: WorkerId,
        method: &Method,
        head: &[u8],
        body: &Bytes,
    ) -> Result<Answer, UpstreamError> {
        let mut buffer = BytesMut::with_capacity(READ_BYTES);
        let Conversed { head, whole, sent } = match &mut stream {
            Stream::Plain(stream) => {
                let (mut reader, mut writer) = stream.split();
                converse(&mut reader, &mut writer, &mut buffer, method, head, body).await?
            }
            Stream::Tls(stream) => {
                let (mut reader, mut writer) = tokio::io::split(&mut **stream);
                Box::pin(converse(&mut reader, &mut writer, &mut buffer, method, head, body)).await?
            }
        };
        let body = AnswerBody {
            stream: Some(stream),
            buffer,
            framing: head.framing,
            first: None,
            reusable: head.reusable && whole,
            home: Arc::clone(self),
            worker,
        };
        Ok(Answer { status: head.status, headers: head.headers, body, sent })
    }

    fn take_idle(&self, worker: WorkerId) -> Option<Stream> {
        let idle_timeout = self.config.load().idle_timeout;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let connections = idle.get_mut(&worker)?;
        while let Some(Idle { mut stream, since }) = connections.pop() {
            let idle = since.elapsed();
            if idle > idle_timeout {
                // The last one used is too old, so all are.
                connections.clear();
                return None;
            }
            if (idle < LOOKED_AT_AFTER && stream.seems_silent()) || stream.is_silent() {
                return Some(stream);
            }
        }
        None
    }

    /// Closes what is idle for this worker, which has left.
    pub(crate) fn forget(&self, worker: WorkerId) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).remove(&worker);
    }

    /// Closes what has been idle for this worker for too long.
    pub(crate) fn sweep(&self, worker: WorkerId) {
        let idle_timeout = self.config.load().idle_timeout;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connections) = idle.get_mut(&worker) {
            connections.retain(|connection| connection.since.elapsed() <= idle_timeout);
        }
    }

    fn put_idle(&self, worker: WorkerId, stream: Stream) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let connections = idle.entry(worker).or_default();
        if connections.len() < self.config.load().idle_max {
            connections.push(Idle { stream, since: Instant::now() });
        }
    }
}

// === impl AnswerBody ===

impl AnswerBody {
    /// Closes the connection: the worker hears that nobody waits for the rest.
    pub(crate) fn close(&mut self) {
        self.stream = None;
    }

    /// Whether no byte is to come any more.
    pub(crate) fn is_done(&self) -> bool {
        self.framing == Framing::Done && self.first.is_none()
    }

    /// Whether the answer was over with its head. Then its connection is free, and nobody will ask for a piece.
    pub(crate) fn is_over(&mut self) -> bool {
        if self.is_done() {
            self.give_back();
        }
        self.is_done()
    }

    /// How many bytes are to come, where that is known.
    pub(crate) fn len(&self) -> Option<u64> {
        let first = self.first.as_ref().map_or(0, Bytes::len) as u64;
        match self.framing {
            Framing::Length { left } => Some(first + left),
            Framing::Done => Some(first),
            Framing::Chunked(_) | Framing::UntilClose => None,
        }
    }

    /// Waits for a piece and puts it behind those that were waited for before: what came of the body is the next piece.
    /// All of that, or nothing at the body's end.
    pub(crate) async fn wait_for_more(&mut self) -> io::Result<Option<&Bytes>> {
        let before = self.first.take();
        let more = poll_fn(|cx| self.poll_piece(cx)).await.transpose();
        let ended = matches!(more, Ok(None));
        self.first = match (before, more?) {
            (Some(before), Some(more)) => Some([before, more].concat().into()),
            (before, more) => before.or(more),
        };
        Ok(self.first.as_ref().filter(|_| !ended))
    }

    /// The next piece of the body, or nothing at its end.
    pub(crate) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        loop {
            if !self.buffer.is_empty()
                && let Some(piece) = self.take_piece().transpose()
            {
                if self.is_done() {
                    self.give_back();
                }
                return Poll::Ready(Some(piece));
            }
            if self.is_done() {
                self.give_back();
                return Poll::Ready(None);
            }
            match ready!(self.poll_read(cx)) {
                Ok(0) if self.framing == Framing::UntilClose => self.framing = Framing::Done,
                Ok(0) => {
                    let cut = io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the worker closed the stream before its end",
                    );
                    return Poll::Ready(Some(Err(cut)));
                }
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let Some(stream) = &mut self.stream else { return Poll::Ready(Ok(0)) };
        self.buffer.reserve(READ_BYTES);
        tokio_util::io::poll_read_buf(std::pin::Pin::new(stream), cx, &mut self.buffer)
    }

    /// What of the body stands in the buffer.
    fn take_piece(&mut self) -> io::Result<Option<Bytes>> {
        let piece = match &mut self.framing {
            Framing::Length { left } => {
                let take = usize::try_from(*left).unwrap_or(usize::MAX).min(self.buffer.len());
                *left -= take as u64;
                if *left == 0 {
                    self.framing = Framing::Done;
                }
                self.buffer.split_to(take)
            }
            Framing::Chunked(chunked) => {
                let (read, data) = chunked.decode(&mut self.buffer).map_err(io::Error::other)?;
                if chunked.is_done() {
                    self.framing = Framing::Done;
                }
                let mut piece = self.buffer.split_to(read);
                piece.truncate(data);
                piece
            }
            Framing::UntilClose => self.buffer.split(),
            Framing::Done => {
                self.buffer.clear();
                return Ok(None);
            }
        };
        Ok((!piece.is_empty()).then(|| piece.freeze()))
    }

    /// The answer is whole. More bytes than were announced are nobody knows what: such a connection is not used again.
    fn give_back(&mut self) {
        if let Some(stream) = self.stream.take()
            && self.reusable
            && self.buffer.is_empty()
        {
            self.home.put_idle(self.worker, stream);
        }
    }
}

/// What came of a request on one connection.
struct Conversed {
    head: Head,
    /// Whether all of the request was sent,
    whole: bool,
    /// and since when it is.
    sent: Instant,
}

/// Sends a request and reads the head of its answer.
async fn converse(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    buffer: &mut BytesMut,
    method: &Method,
    head: &[u8],
    body: &[u8],
) -> Result<Conversed, UpstreamError> {
    // A worker may refuse a large body before it has read it, and then read no further: so while the socket takes no
    // more, its answer is looked for. Mostly it takes all at once.
    let mut taken = false;
    let came = {
        let mut writing = std::pin::pin!(write_all(writer, head, body, &mut taken));
        tokio::select! {
            biased;
            written = writing.as_mut() => Sent::Ended(written),
            parsed = read_head(reader, buffer, method) => Sent::Answered(parsed),
        }
    };
    let sent = Instant::now();
    let (head, whole) = match came {
        Sent::Ended(Ok(())) => (read_head(reader, buffer, method).await?, true),
        Sent::Ended(Err(error)) if !taken => return Err(UpstreamError::Stale(error)),
        // It may have refused the request and closed: then its answer counts, not the failed write.
        Sent::Ended(Err(error)) => match read_head(reader, buffer, method).await {
            Err(UpstreamError::Broken(_)) => return Err(UpstreamError::Broken(error)),
            answered => (answered?, false),
        },
        Sent::Answered(answered) => (answered?, false),
    };
    Ok(Conversed { head, whole, sent })
}

/// What came first: the end of writing a request, or an answer.
enum Sent {
    Ended(io::Result<()>),
    Answered(Result<Head, UpstreamError>),
}

/// Writes head and body with as few calls as the socket takes. Tells in `taken` whether it took any byte.
async fn write_all(
    stream: &mut (impl AsyncWrite + Unpin),
    head: &[u8],
    body: &[u8],
    taken: &mut bool,
) -> io::Result<()> {
    let mut written = 0;
    while written < head.len() {
        let slices = [IoSlice::new(&head[written..]), IoSlice::new(body)];
        match stream.write_vectored(&slices).await? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            n => written += n,
        }
        *taken = true;
    }
    stream.write_all(&body[written - head.len()..]).await?;
    // Under TLS what was written may still be here.
    stream.flush().await
}

struct Head {
    status: StatusCode,
    headers: HeaderMap,
    framing: Framing,
    reusable: bool,
}

/// Reads one final head; what follows it stays in the buffer.
async fn read_head(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut BytesMut,
    method: &Method,
) -> Result<Head, UpstreamError> {
    let mut interim = 0;
    loop {
        if !buffer.is_empty()
            && let Some((len, head)) = parse_head(buffer, method)?
        {
            drop(buffer.split_to(len));
            match head {
                Some(head) => return Ok(head),
                None if interim == INTERIM_HEADS_MAX => {
                    return Err(UpstreamError::Garbage("it sends interim heads without end".into()));
                }
                None => interim += 1,
            }
            continue;
        }
        if buffer.len() > HEAD_BYTES_MAX {
            return Err(UpstreamError::Garbage(format!("its head is longer than {HEAD_BYTES_MAX} bytes")));
        }
        buffer.reserve(READ_BYTES / 4);
        let read = tokio::io::AsyncReadExt::read_buf(stream, buffer).await.map_err(UpstreamError::Broken)?;
        if read == 0 && buffer.is_empty() {
            let closed = io::Error::new(io::ErrorKind::UnexpectedEof, "closed without an answer");
            return Err(UpstreamError::Broken(closed));
        }
        if read == 0 {
            return Err(UpstreamError::Garbage("it ends within its head".into()));
        }
    }
}

/// A whole head at the start of `bytes`: its length, and the head unless it is an interim one (1xx).
fn parse_head(bytes: &[u8], method: &Method) -> Result<Option<(usize, Option<Head>)>, UpstreamError> {
    let garbage = |what: &str| UpstreamError::Garbage(what.into());
    let mut fields = [MaybeUninit::uninit(); HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    let read =
        httparse::ParserConfig::default().parse_response_with_uninit_headers(&mut parsed, bytes, &mut fields);
    let len = match read {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(garbage(&error.to_string())),
    };
    let status =
        parsed.code.and_then(|code| StatusCode::from_u16(code).ok()).ok_or_else(|| garbage("no status"))?;
    if status.is_informational() {
        if status == StatusCode::SWITCHING_PROTOCOLS {
            return Err(garbage("it switches protocols"));
        }
        return Ok(Some((len, None)));
    }
    let mut headers = HeaderMap::with_capacity(parsed.headers.len() + 4);
    let (mut length, mut codings, mut chunked) = (None, 0, false);
    let (mut reusable, mut options) = (parsed.version == Some(1), false);
    for field in parsed.headers.iter() {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| garbage("a header name"))?;
        if name == header::TRANSFER_ENCODING {
            codings += 1;
            chunked = field.value.eq_ignore_ascii_case(b"chunked");
        } else if name == header::CONNECTION {
            reusable &= !contains_token(field.value, b"close");
            options |= !field.value.eq_ignore_ascii_case(b"keep-alive")
                && !field.value.eq_ignore_ascii_case(b"close");
        } else if name == header::CONTENT_LENGTH {
            let value =
                content_length(field.value).ok_or_else(|| garbage("its content-length is no number"))?;
            if length.replace(value).is_some_and(|before| before != value) {
                return Err(garbage("two different content-lengths"));
            }
        } else if !is_hop_by_hop(&name) {
            let value = HeaderValue::from_bytes(field.value).map_err(|_| garbage("a header value"))?;
            headers.append(name, value);
        }
    }
    if options {
        for field in parsed.headers.iter().filter(|field| field.name.eq_ignore_ascii_case("connection")) {
            for name in
                field.value.split(|&byte| byte == b',').filter_map(|item| std::str::from_utf8(item).ok())
            {
                headers.remove(name.trim());
            }
        }
    }
    if method == Method::HEAD
        && let Some(length) = length
    {
        headers.insert(header::CONTENT_LENGTH, length.into());
    }
    let bodiless =
        method == Method::HEAD || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED;
    let framing = match (bodiless, codings, length) {
        (true, ..) => Framing::Done,
        (_, 1, None) if chunked => Framing::Chunked(Chunked::new()),
        (_, 0, Some(0)) => Framing::Done,
        (_, 0, Some(left)) => Framing::Length { left },
        (_, 0, None) => Framing::UntilClose,
        _ => return Err(garbage("its length is ambiguous")),
    };
    reusable &= framing != Framing::UntilClose;
    Ok(Some((len, Some(Head { status, headers, framing, reusable }))))
}

/// Digits and nothing else: what one reader takes for a number another must not take for a different one.
fn content_length(value: &[u8]) -> Option<u64> {
    let value = value.trim_ascii();
    let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    digits.then(|| std::str::from_utf8(value).ok()?.parse().ok())?
}

fn contains_token(list: &[u8], token: &[u8]) -> bool {
    list.split(|&byte| byte == b',').any(|item| item.trim_ascii().eq_ignore_ascii_case(token))
}

/// Headers that are about one connection and never relayed (RFC 9110, section 7.6.1).
pub(crate) fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection"
            | "keep-alive"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "proxy-connection"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str) -> Result<Option<(usize, Option<Head>)>, UpstreamError> {
        parse_head(text.as_bytes(), &Method::POST)
    }

    fn framing(text: &str) -> (Framing, bool) {
        let head = head(text).expect("well formed").expect("whole").1.expect("final");
        (head.framing, head.reusable)
    }

    #[test]
    fn the_length_of_a_body_is_read_from_the_head() {
        let check =
            |fields: &str, expect| assert_eq!(framing(&format!("HTTP/1.1 200 OK\r\n{fields}\r\n")), expect);
        check("content-length: 5\r\n", (Framing::Length { left: 5 }, true));
        check("content-length: 0\r\n", (Framing::Done, true));
        check("transfer-encoding: chunked\r\n", (Framing::Chunked(Chunked::new()), true));
        check("", (Framing::UntilClose, false));
        check("connection: Keep-Alive, Close\r\ncontent-length: 5\r\n", (Framing::Length { left: 5 }, false));
        assert_eq!(
            framing("HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\n"),
            (Framing::Length { left: 5 }, false)
        );
        assert_eq!(framing("HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n"), (Framing::Done, true));
    }

    #[test]
    fn an_ambiguous_length_is_refused() {
        for fields in [
            "content-length: 5\r\ncontent-length: 6\r\n",
            "content-length: -5\r\n",
            "content-length: +5\r\n",
            "content-length: 5, 5\r\n",
            "content-length: \r\n",
            "content-length: 99999999999999999999\r\n",
            "content-length: 5\r\ntransfer-encoding: chunked\r\n",
            "transfer-encoding: gzip, chunked\r\n",
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        ] {
            assert!(head(&format!("HTTP/1.1 200 OK\r\n{fields}\r\n")).is_err(), "{fields:?}");
        }
    }

    #[test]
    fn interim_heads_are_passed_over_and_connection_headers_are_not_relayed() {
        assert!(matches!(head("HTTP/1.1 100 Continue\r\n\r\nHTTP"), Ok(Some((25, None)))));
        let relayed = head("HTTP/1.1 200 OK\r\nkeep-alive: 5\r\nx-a: 1\r\ncontent-length: 0\r\n\r\n");
        let headers = relayed.expect("well formed").expect("whole").1.expect("final").headers;
        assert_eq!(headers.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["x-a"]);
    }

    #[tokio::test]
    async fn interim_heads_without_end_are_garbage() {
        let answer = async |heads: usize| {
            let interim = "HTTP/1.1 102 Processing\r\n\r\n".repeat(heads);
            let text = format!("{interim}HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
            read_head(&mut text.as_bytes(), &mut BytesMut::new(), &Method::POST).await.map(|head| head.status)
        };
        assert!(answer(INTERIM_HEADS_MAX as usize).await.is_ok_and(|status| status == StatusCode::OK));
        let garbage = answer(INTERIM_HEADS_MAX as usize + 1).await.expect_err("one too many");
        assert!(matches!(garbage, UpstreamError::Garbage(_)), "{garbage}");
    }

    #[test]
    fn what_is_no_http_is_garbage_and_what_is_not_whole_is_waited_for() {
        assert!(matches!(head("SSH-2.0-OpenSSH\r\n"), Err(UpstreamError::Garbage(_))));
        assert!(matches!(head("HTTP/1.1 200 OK\r\nx: "), Ok(None)));
    }
}
