//! The head of a response: status, fields, and how its body ends.

use std::io;
use std::mem::MaybeUninit;

use bytes::BytesMut;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use tokio::io::AsyncRead;

use super::chunked::Chunked;
use super::error::UpstreamError;

/// Room for one read: a head has a few hundred bytes.
const READ_BYTES: usize = 4 << 10;
/// Largest head of a response.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Most interim responses (1xx) before a final one.
const INTERIM_HEADS_MAX: u32 = 16;
/// Most header fields of a response.
const HEADERS_MAX: usize = 96;

pub(super) struct Head {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) framing: Framing,
    pub(super) reusable: bool,
}

/// How the end of a body is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Length { left: u64 },
    Chunked(Chunked),
    UntilClose,
    Done,
}

/// Reads one final head; bytes after it stay in the buffer.
pub(super) async fn read_head(
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
                    return Err(UpstreamError::Garbage("too many interim (1xx) responses".into()));
                }
                None => interim += 1,
            }
            continue;
        }
        if buffer.len() > HEAD_BYTES_MAX {
            return Err(UpstreamError::Garbage(format!("its head is longer than {HEAD_BYTES_MAX} bytes")));
        }
        buffer.reserve(READ_BYTES);
        let read = tokio::io::AsyncReadExt::read_buf(stream, buffer).await.map_err(UpstreamError::Broken)?;
        if read == 0 && buffer.is_empty() {
            let closed = io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the upstream closed the connection without a response",
            );
            return Err(UpstreamError::Broken(closed));
        }
        if read == 0 {
            return Err(UpstreamError::Garbage("it ends within its head".into()));
        }
    }
}

/// Parses a complete head at the start of `bytes`: its length, and the head unless it is an interim response (1xx).
pub(super) fn parse_head(
    bytes: &[u8],
    method: &Method,
) -> Result<Option<(usize, Option<Head>)>, UpstreamError> {
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
    let switches = status == StatusCode::SWITCHING_PROTOCOLS;
    if status.is_informational() && !switches {
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
                content_length(field.value).ok_or_else(|| garbage("its content-length is not a number"))?;
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
        _ if switches => Framing::UntilClose,
        (true, ..) => Framing::Done,
        (_, 1, None) if chunked => Framing::Chunked(Chunked::start()),
        (_, 0, Some(0)) => Framing::Done,
        (_, 0, Some(left)) => Framing::Length { left },
        (_, 0, None) => Framing::UntilClose,
        _ => return Err(garbage("its length is ambiguous")),
    };
    reusable &= framing != Framing::UntilClose;
    Ok(Some((len, Some(Head { status, headers, framing, reusable }))))
}

/// Digits only, so that no other parser reads a different number.
fn content_length(value: &[u8]) -> Option<u64> {
    let value = value.trim_ascii();
    let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    digits.then(|| std::str::from_utf8(value).ok()?.parse().ok())?
}

fn contains_token(list: &[u8], token: &[u8]) -> bool {
    list.split(|&byte| byte == b',').any(|item| item.trim_ascii().eq_ignore_ascii_case(token))
}

/// Whether a header concerns one connection only and is never relayed (RFC 9110, section 7.6.1).
pub fn is_hop_by_hop(name: &HeaderName) -> bool {
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
        check("transfer-encoding: chunked\r\n", (Framing::Chunked(Chunked::start()), true));
        check("", (Framing::UntilClose, false));
        check("connection: Keep-Alive, Close\r\ncontent-length: 5\r\n", (Framing::Length { left: 5 }, false));
        assert_eq!(
            framing("HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\n"),
            (Framing::Length { left: 5 }, false)
        );
        assert_eq!(framing("HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n"), (Framing::Done, true));
    }

    /// Invariant: An answer with an ambiguous length is refused, and a truncated one is never taken for complete.
    ///
    /// Also held by `a_body_cut_anywhere_is_not_done`.
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
