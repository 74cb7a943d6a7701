//! HTTP/1 with clients: the requests of one connection and their responses, in sequence.
//!
//! It is implemented here, on httparse, instead of hyper, for three reasons. A connection whose request is still
//! arriving holds little more than the received bytes, where hyper holds two buffers of 8 KiB. An ambiguous head is
//! rejected before any code interprets it ([`head`](super::head)). And an event of a stream costs one inspection and
//! one write.
//!
//! While a response is awaited or being sent, the client's socket is read: when the client disconnects, the response
//! is dropped, which cancels the request at the worker. Bytes that arrive meanwhile are kept, up to a bound, as the
//! next request.

mod client;
mod incoming;
mod output;

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io::{self, Write as _};
use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::{Buf as _, BytesMut};
use http::{Method, Response, StatusCode, Version, header};
use http_body::Body as _;
use httpdate::HttpDate;
use kvlane_fleet::metrics::Reached;
use kvlane_http::connections::chunked::Chunked;
use tokio::io::{AsyncRead as _, AsyncWrite as _, ReadBuf};
use tokio::time::{Instant, timeout};

pub(super) use self::client::{Client, NEXT_WITHIN};
use self::client::{READ_BYTES_MAX, READ_BYTES_MIN};
use self::incoming::{Incoming, Left, PendingInput};
use self::output::{End, put};
use crate::body::Body;
use crate::error::ApiError;
use crate::head::{Framing, Head, end_of_head};
use crate::read::REFUSED_BYTES_MAX;

/// Largest write buffer that an idle connection keeps.
const KEPT_BYTES_MAX: usize = 1 << 10;
/// How long a connection that is being closed reads on, so that the client receives the reason.
const LINGER: Duration = Duration::from_secs(10);

// === impl Client ===

impl Client {
    /// Serves requests until the client disconnects, the connection is closed, or the gateway stops.
    ///
    /// # Errors
    /// Errors of the connection.
    pub(super) async fn serve(mut self) -> io::Result<()> {
        while self.exchange().await? {}
        Ok(())
    }

    /// Serves one request; returns whether another may follow.
    async fn exchange(&mut self) -> io::Result<bool> {
        let (head, refused) = match self.head().await? {
            None => return Ok(false),
            Some(Ok(head)) => (head, Ok(())),
            // It is answered like any other, and is the last one.
            Some(Err(error)) => (Head::unread(), Err(error)),
        };
        let Head { parts, framing, keeps_alive, waits } = head;
        let (is_head, version) = (parts.method == Method::HEAD, parts.version);
        let mut coming = match framing {
            Framing::Length(0) if refused.is_ok() => PendingInput::Nothing,
            _ if waits => PendingInput::Waits,
            _ => PendingInput::Body,
        };
        let service = Arc::clone(&self.service);
        let mut left = match framing {
            Framing::Length(length) => Left::Length(length),
            Framing::Chunked => Left::Chunks(Chunked::start()),
        };
        let body = Incoming { client: self, framing, left: &mut left, coming: &mut coming };
        let mut received = service.receive(parts, refused, body).await;
        let intake = received.take_intake();
        let mut respond = pin!(service.respond(received));
        let answer = match intake {
            None => {
                let answer = poll_fn(|cx| match respond.as_mut().poll(cx) {
                    Poll::Ready(answer) => Poll::Ready(Some(answer)),
                    Poll::Pending => self.poll_gone(cx).map(|()| None),
                });
                answer.await
            }
            Some(intake) => {
                let pass_on = Box::pin(self.pass_on(intake, &mut left, &mut coming));
                tokio::select! {
                    biased;
                    answer = respond.as_mut() => Some(answer),
                    () = pass_on => None,
                }
            }
        };
        let Some(answer) = answer else { return Ok(false) };
        if matches!(answer.body(), Body::Tunnel(_)) {
            return Box::pin(self.switch(answer, version)).await;
        }
        if let (PendingInput::Body, Left::Length(left)) = (coming, left)
            && keeps_alive
            && left <= self.buffer.len() as u64
        {
            // The body was not needed, and it has arrived.
            self.buffer.advance(left as usize);
            coming = PendingInput::Nothing;
        }
        let closes = answer.headers().get(header::CONNECTION).is_some_and(|value| value == "close");
        let stays = keeps_alive && coming == PendingInput::Nothing && !closes && !self.service.retires();
        let (end, mut body) = self.begin(answer, is_head, version, stays);
        poll_fn(|cx| self.poll_answer(cx, &mut body, end)).await?;
        drop(body);
        if stays && end != End::Close {
            self.next_until = Instant::now() + NEXT_WITHIN;
            return Ok(true);
        }
        self.leave(coming).await;
        Ok(false)
    }

    /// The next head, or the error of it; none if the client is done.
    async fn head(&mut self) -> io::Result<Option<Result<Head, ApiError>>> {
        self.held.release();
        if self.buffer.is_empty() {
            // An idle connection holds no buffer.
            self.buffer = BytesMut::new();
        }
        let within = self.service.proxy.settings().server.header_timeout;
        let (until, mut seen) = (Instant::now() + within, 0);
        loop {
            while seen == 0 && self.buffer.starts_with(b"\r\n") {
                self.buffer.advance(2);
            }
            match end_of_head(&self.buffer, &mut seen) {
                Ok(Some(end)) => {
                    let head = Head::take(&mut self.buffer, end);
                    if let Ok(Head { framing: Framing::Length(length), .. }) = head {
                        let bytes = usize::try_from(length).unwrap_or(usize::MAX).saturating_add(end);
                        self.read_bytes = bytes.clamp(READ_BYTES_MIN, READ_BYTES_MAX);
                    }
                    return Ok(Some(head));
                }
                Ok(None) if !self.held.grow_to(self.buffer.len()) => {
                    return Ok(Some(Err(ApiError::NoMemory)));
                }
                Ok(None) => {}
                Err(error) => return Ok(Some(Err(error))),
            }
            let read = poll_fn(|cx| self.poll_head(cx, until)).await?;
            match read {
                Some(0) if !self.buffer.is_empty() => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(0) | None => return Ok(None),
                Some(_) => {}
            }
        }
    }

    /// Reads more of a head; returns the number of bytes, or none if the gateway stops and no head has begun.
    fn poll_head(&mut self, cx: &mut Context<'_>, until: Instant) -> Poll<io::Result<Option<usize>>> {
        if let Poll::Ready(read) = self.poll_fill(cx) {
            return Poll::Ready(read.map(Some));
        }
        let stopped = self.buffer.is_empty() && self.stopped.as_mut().poll(cx).is_ready();
        if stopped && Instant::now() >= self.next_until {
            return Poll::Ready(Ok(None));
        }
        let until = if stopped { until.min(self.next_until) } else { until };
        // Re-armed only when it fires: most heads arrive long before.
        if self.alarm.deadline() > until {
            self.alarm.as_mut().reset(until);
        }
        while self.alarm.as_mut().poll(cx).is_ready() {
            if Instant::now() >= until {
                if stopped {
                    return Poll::Ready(Ok(None));
                }
                self.service.proxy.fleet.metrics.limits.reached(Reached::HeadTime);
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "no request head within server.header_timeout",
                )));
            }
            self.alarm.as_mut().reset(until);
        }
        Poll::Pending
    }

    /// Switches protocols together with the engine, and serves the connection to its end.
    async fn switch(&mut self, answer: Response<Body>, version: Version) -> io::Result<bool> {
        let (parts, body) = answer.into_parts();
        let (end, mut nothing) =
            self.begin(Response::from_parts(parts, Body::Whole(None)), false, version, false);
        poll_fn(|cx| self.poll_answer(cx, &mut nothing, end)).await?;
        if let Body::Tunnel(tunnel) = body {
            tunnel.run(&mut self.socket, self.buffer.split().freeze()).await;
        }
        self.leave(PendingInput::Nothing).await;
        Ok(false)
    }

    /// Puts a response's head into the output. Returns its body, and how its end is marked.
    fn begin(
        &mut self,
        answer: Response<Body>,
        is_head: bool,
        version: Version,
        mut stays: bool,
    ) -> (End, Body) {
        let (http::response::Parts { status, headers, .. }, body) = answer.into_parts();
        let bodiless = is_head
            || status.is_informational()
            || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        let length = body.size_hint().exact();
        let end = match length {
            None if bodiless => End::Length,
            Some(_) => End::Length,
            None if version == Version::HTTP_11 => End::Chunked,
            None => End::Close,
        };
        stays &= end != End::Close;
        let out = &mut self.out.flat;
        out.reserve(KEPT_BYTES_MAX);
        let reason = status.canonical_reason().unwrap_or_default();
        put(out, &[b"HTTP/1.1 ", status.as_str().as_bytes(), b" ", reason.as_bytes(), b"\r\n"]);
        for (name, value) in &headers {
            let ours = name == header::CONNECTION
                || name == header::TRANSFER_ENCODING
                || (name == header::CONTENT_LENGTH && !bodiless);
            if !ours {
                put(out, &[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"]);
            }
        }
        match (end, length) {
            (End::Chunked, _) => put(out, &[b"transfer-encoding: chunked\r\n"]),
            (End::Length, Some(length))
                if !bodiless || (is_head && !headers.contains_key(header::CONTENT_LENGTH) && length > 0) =>
            {
                // Writing to memory cannot fail.
                let _ = write!(out, "content-length: {length}\r\n");
            }
            _ => {}
        }
        match (stays, version) {
            _ if status == StatusCode::SWITCHING_PROTOCOLS => {
                put(out, &[b"connection: upgrade\r\nupgrade: websocket\r\n"])
            }
            (false, _) => put(out, &[b"connection: close\r\n"]),
            (true, Version::HTTP_10) => put(out, &[b"connection: keep-alive\r\n"]),
            (true, _) => {}
        }
        if !headers.contains_key(header::DATE) {
            put_date(out);
        }
        put(out, &[b"\r\n"]);
        (end, if bodiless { Body::Whole(None) } else { body })
    }

    /// Writes the rest of a response.
    fn poll_answer(&mut self, cx: &mut Context<'_>, body: &mut Body, end: End) -> Poll<io::Result<()>> {
        // Whether more of the response may be ready, and whether any was.
        let (mut more, mut came) = (true, false);
        loop {
            while more && self.out.takes_more() {
                match Pin::new(&mut *body).poll_frame(cx) {
                    Poll::Ready(Some(Ok(frame))) => {
                        if let Ok(data) = frame.into_data() {
                            self.out.push(data, end);
                            came = true;
                        }
                    }
                    Poll::Ready(Some(Err(error))) => self.out.ended = Some(Err(error)),
                    Poll::Ready(None) => self.out.end(end),
                    Poll::Pending => more = false,
                }
            }
            if !self.out.is_empty() {
                ready!(self.out.poll_write(&mut self.socket, cx))?;
                continue;
            }
            ready!(Pin::new(&mut self.socket).poll_flush(cx))?;
            if let Some(ended) = self.out.ended.take() {
                if self.out.flat.capacity() > KEPT_BYTES_MAX {
                    self.out.flat = Vec::new();
                }
                return Poll::Ready(ended);
            }
            if came && matches!(body, Body::Relay(_)) {
                // The client was polled before. If it has disconnected since, the next piece or the relay's own
                // alarm, at most a second later, detects that.
                return Poll::Pending;
            }
            ready!(self.poll_gone(cx));
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the client has disconnected",
            )));
        }
    }

    /// Closes the connection. A client that is still sending would not read the response, and would lose it if the
    /// connection were closed at once.
    async fn leave(&mut self, coming: PendingInput) {
        let _ = poll_fn(|cx| Pin::new(&mut self.socket).poll_shutdown(cx)).await;
        if coming != PendingInput::Body {
            return;
        }
        let mut left = REFUSED_BYTES_MAX;
        let throw_away = poll_fn(|cx| {
            while left > 0 {
                let mut room = [MaybeUninit::uninit(); 4096];
                let mut read = ReadBuf::uninit(&mut room);
                match ready!(Pin::new(&mut self.socket).poll_read(cx, &mut read)) {
                    Ok(()) if !read.filled().is_empty() => {
                        left = left.saturating_sub(read.filled().len() as u64)
                    }
                    Ok(()) | Err(_) => break,
                }
            }
            Poll::Ready(())
        });
        tokio::select! {
            _ = timeout(LINGER, throw_away) => {}
            () = &mut self.stopped => {}
        }
    }
}

/// The `Date` header's value; formatted once a second.
fn put_date(out: &mut Vec<u8>) {
    thread_local! {
        static SAID: RefCell<(u64, String)> = const { RefCell::new((0, String::new())) };
    }
    let now = SystemTime::now();
    let second = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    SAID.with_borrow_mut(|(said, line)| {
        if *said != second {
            (*said, *line) = (second, format!("date: {}\r\n", HttpDate::from(now)));
        }
        out.extend_from_slice(line.as_bytes());
    });
}
