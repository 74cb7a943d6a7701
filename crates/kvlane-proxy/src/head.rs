//! Heads of HTTP/1 requests: where one ends, and its fields.
//!
//! A head that two servers may parse differently is rejected: a server in front of the gateway may have parsed it the
//! other way, and assume that the request ends elsewhere (request smuggling).

use std::mem::MaybeUninit;

use bytes::{Bytes, BytesMut};
use http::header::{self, HeaderName};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, Version};
use memchr::memchr_iter;

use crate::error::ApiError;

/// Most fields of a head, in HTTP/1 and HTTP/2.
pub(super) const FIELDS_MAX: usize = 100;
/// Most bytes of a head.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 10;

/// The head of a request.
pub(super) struct Head {
    pub(super) parts: Parts,
    /// How the body's end is marked.
    pub(super) framing: Framing,
    /// Whether another request may follow on the connection.
    pub(super) keeps_alive: bool,
    /// Whether the client waits for `100 Continue` before it sends the body.
    pub(super) waits: bool,
}

/// How the end of a body is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// By its length in bytes.
    Length(u64),
    /// By chunked transfer coding.
    Chunked,
}

/// The end of the head at the start of `bytes`, if it is complete; `seen` is how much was searched before.
pub(super) fn end_of_head(bytes: &[u8], seen: &mut usize) -> Result<Option<usize>, ApiError> {
    for at in memchr_iter(b'\n', &bytes[*seen..]).map(|at| *seen + at) {
        match bytes[..at] {
            [.., b'\r', b'\n', b'\r'] if at < HEAD_BYTES_MAX => return Ok(Some(at + 1)),
            [.., b'\r'] => {}
            _ => return Err(ApiError::BadHead("a line of it ends in LF without CR")),
        }
    }
    *seen = bytes.len();
    if bytes.len() > HEAD_BYTES_MAX {
        return Err(ApiError::HeadTooLarge { limit: HEAD_BYTES_MAX });
    }
    Ok(None)
}

// === impl Head ===

impl Head {
    /// Stands for a head that cannot be parsed.
    pub(super) fn unread() -> Self {
        let (parts, ()) = Request::new(()).into_parts();
        Self { parts, framing: Framing::Length(0), keeps_alive: false, waits: false }
    }

    /// Takes the head that starts `buffer` and ends at `end`.
    pub(super) fn take(buffer: &mut BytesMut, end: usize) -> Result<Self, ApiError> {
        let mut fields = [MaybeUninit::uninit(); FIELDS_MAX];
        let mut request = httparse::Request::new(&mut []);
        match request.parse_with_uninit_headers(&buffer[..end], &mut fields) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) => return Err(ApiError::NoHttp("its head is incomplete")),
            Err(httparse::Error::TooManyHeaders) => return Err(ApiError::TooManyFields),
            Err(httparse::Error::Version) => {
                return Err(ApiError::NoHttp("its version is neither 1.0 nor 1.1"));
            }
            Err(httparse::Error::Token | httparse::Error::Status) => {
                return Err(ApiError::NoHttp("its first line is not a request line"));
            }
            Err(_) => return Err(ApiError::NoHttp("a header field has bytes that are not allowed")),
        }
        let (method, target) = (request.method.unwrap_or_default(), request.path.unwrap_or_default());
        let method =
            Method::from_bytes(method.as_bytes()).map_err(|_| ApiError::NoHttp("its method is not valid"))?;
        let version = if request.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
        let start = buffer.as_ptr() as usize;
        let place = |part: &[u8]| {
            let at = part.as_ptr() as usize - start;
            at..at + part.len()
        };
        let target = place(target.as_bytes());
        let mut headers = HeaderMap::with_capacity(request.headers.len());
        let mut fields = Vec::with_capacity(request.headers.len());
        for field in request.headers.iter() {
            let name = HeaderName::from_bytes(field.name.as_bytes());
            let name = name.map_err(|_| ApiError::NoHttp("the name of a header field is not valid"))?;
            fields.push((name, place(field.value)));
        }
        let whole = buffer.split_to(end).freeze();
        for (name, place) in fields {
            let value = HeaderValue::from_maybe_shared(whole.slice(place));
            let value =
                value.map_err(|_| ApiError::NoHttp("a header field has bytes that are not allowed"))?;
            headers.append(name, value);
        }
        let uri = Uri::from_maybe_shared(whole.slice(target));
        let uri = uri.map_err(|_| ApiError::NoHttp("its target is not a valid path"))?;
        Self::of(method, uri, version, headers)
    }

    fn of(method: Method, uri: Uri, version: Version, headers: HeaderMap) -> Result<Self, ApiError> {
        let framing = framing(&headers, version)?;
        let hosts = headers.get_all(header::HOST).iter().count();
        if hosts > 1 || (hosts == 0 && version == Version::HTTP_11) {
            return Err(ApiError::BadHead("it has no `Host`, or several"));
        }
        let mut keeps_alive = version == Version::HTTP_11;
        for option in options(&headers) {
            if option.eq_ignore_ascii_case(b"close") {
                keeps_alive = false;
                break;
            }
            keeps_alive |= option.eq_ignore_ascii_case(b"keep-alive");
        }
        let expects = headers.get(header::EXPECT);
        let waits = expects.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let (mut parts, ()) = Request::new(()).into_parts();
        (parts.method, parts.uri, parts.version, parts.headers) = (method, uri, version, headers);
        Ok(Self { parts, framing, keeps_alive, waits: waits && version == Version::HTTP_11 })
    }
}

/// How a request marks the end of its body (RFC 9112, section 6.3): in one way, and once.
fn framing(headers: &HeaderMap, version: Version) -> Result<Framing, ApiError> {
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let (length, coding) = (lengths.next(), codings.next());
    if lengths.next().is_some() || (length.is_some() && coding.is_some()) {
        return Err(ApiError::BadHead("it states the length of the body more than once"));
    }
    if let Some(coding) = coding {
        let chunked = coding.as_bytes().eq_ignore_ascii_case(b"chunked") && codings.next().is_none();
        if !chunked || version != Version::HTTP_11 {
            return Err(ApiError::BadHead("its `Transfer-Encoding` is not `chunked` once"));
        }
        return Ok(Framing::Chunked);
    }
    let Some(length) = length else { return Ok(Framing::Length(0)) };
    let digits = length.as_bytes();
    let number = std::str::from_utf8(digits).ok().filter(|_| digits.iter().all(u8::is_ascii_digit));
    let number = number.and_then(|text| text.parse().ok());
    number.map(Framing::Length).ok_or(ApiError::BadHead("its `Content-Length` is not a number"))
}

/// The options in the `Connection` field.
fn options(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let lists = headers.get_all(header::CONNECTION).iter();
    lists.flat_map(|list| list.as_bytes().split(|byte| *byte == b',')).map(<[u8]>::trim_ascii)
}

/// Copies a head into memory of its own: otherwise it keeps the whole read buffer alive.
pub(super) fn compact(parts: &mut Parts) {
    let mut room = BytesMut::with_capacity(parts.headers.values().map(HeaderValue::len).sum());
    for value in parts.headers.values_mut() {
        room.extend_from_slice(value.as_bytes());
        if let Ok(own) = HeaderValue::from_maybe_shared(room.split().freeze()) {
            *value = own;
        }
    }
    let target = Bytes::from(parts.uri.to_string());
    if let Ok(own) = Uri::from_maybe_shared(target) {
        parts.uri = own;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn take(text: &str) -> Result<Option<Head>, String> {
        let mut buffer = BytesMut::from(text);
        let end = end_of_head(&buffer, &mut 0).map_err(|error| error.to_string())?;
        end.map(|end| Head::take(&mut buffer, end).map_err(|error| error.to_string())).transpose()
    }

    fn head(text: &str) -> Head {
        take(text).expect("a good head").expect("a whole one")
    }

    #[test]
    fn a_head_is_parsed_into_its_fields() {
        let text =
            "POST /v1/x?a=b HTTP/1.1\r\nHost: h\r\nX-A: 1\r\ncontent-length: 5\r\nx-a: 2 \r\n\r\nhello";
        let head = head(text);
        assert_eq!((head.framing, head.keeps_alive, head.waits), (Framing::Length(5), true, false));
        let Parts { method, uri, version, headers, .. } = head.parts;
        assert_eq!((method, uri.path(), uri.query()), (Method::POST, "/v1/x", Some("a=b")));
        assert_eq!((version, headers.len()), (Version::HTTP_11, 4));
        assert_eq!(headers.get_all("x-a").iter().collect::<Vec<_>>(), ["1", "2"]);
    }

    #[test]
    fn close_and_expect_are_read_from_the_head() {
        let of = |first: &str, fields: &str| {
            let head = head(&format!("{first}\r\nhost: h\r\n{fields}\r\n"));
            (head.keeps_alive, head.waits)
        };
        assert_eq!(of("GET / HTTP/1.1", "connection: te, Close\r\n"), (false, false));
        assert_eq!(of("GET / HTTP/1.1", "connection: te\r\nexpect: 100-Continue\r\n"), (true, true));
        assert_eq!(of("GET / HTTP/1.0", "expect: 100-continue\r\n"), (false, false));
        assert_eq!(of("GET / HTTP/1.0", "connection: keep-alive\r\n"), (true, false));
    }

    #[test]
    fn a_head_that_two_servers_may_parse_differently_is_rejected() {
        let refused =
            |fields: &str| take(&format!("POST / HTTP/1.1\r\n{fields}\r\n")).err().expect("refused");
        for fields in [
            "host: h\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n",
            "host: h\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n",
            "host: h\r\ncontent-length: 5\r\ncontent-length: 5\r\n",
        ] {
            assert!(refused(fields).contains("more than once"), "{fields}");
        }
        for length in ["+5", "5,5", "0x5", "-1", "", "5 5", "18446744073709551616"] {
            let fields = format!("host: h\r\ncontent-length: {length}\r\n");
            assert!(refused(&fields).contains("not a number"), "{length}");
        }
        for coding in ["gzip, chunked", "identity", "chunked\r\ntransfer-encoding: chunked", ""] {
            let fields = format!("host: h\r\ntransfer-encoding: {coding}\r\n");
            assert!(refused(&fields).contains("`chunked` once"), "{coding}");
        }
        for fields in ["", "host: h\r\nhost: h\r\n"] {
            assert!(refused(fields).contains("`Host`"), "{fields}");
        }
        for fields in ["host: h\r\nx : y\r\n", "host: h\r\nx: y\r\n z\r\n", "host: h\r\nx: \0\r\n", ": y\r\n"]
        {
            assert!(refused(fields).contains("not HTTP/1.1"), "{fields:?}");
        }
        let many = "x: y\r\n".repeat(FIELDS_MAX);
        assert!(refused(&format!("host: h\r\n{many}")).contains("100 fields"));
        for first in
            ["GET  / HTTP/1.1", "GET / HTTP/2.0", "GET /a b HTTP/1.1", "GET /", "G(T / HTTP/1.1", "\0"]
        {
            assert!(take(&format!("{first}\r\nhost: h\r\n\r\n")).is_err(), "{first:?}");
        }
    }

    #[test]
    fn the_end_of_a_head_is_found_in_pieces_of_any_size() {
        let text = b"GET / HTTP/1.1\r\nhost: h\r\n\r\nGET";
        for step in 1..text.len() {
            let (mut seen, mut end) = (0, None);
            for len in (step..text.len() + step).step_by(step) {
                end = end_of_head(&text[..len.min(text.len())], &mut seen).expect("a good head");
                if end.is_some() {
                    break;
                }
            }
            assert_eq!(end, Some(text.len() - 3), "in steps of {step}");
        }
        for text in ["GET / HTTP/1.1\nhost: h\r\n\r\n", "GET / HTTP/1.1\r\n\n", "GET / HTTP/1.1\r\nx\n", "\n"]
        {
            assert!(end_of_head(text.as_bytes(), &mut 0).is_err(), "{text:?}");
        }
        let long = format!("GET / HTTP/1.1\r\nx: {}", "y".repeat(HEAD_BYTES_MAX));
        assert!(end_of_head(long.as_bytes(), &mut 0).is_err());
        assert!(end_of_head(format!("{long}\r\n\r\n").as_bytes(), &mut 0).is_err(), "all at once");
    }

    #[test]
    fn a_compacted_head_is_equal_and_takes_less_memory() {
        let mut head = head("GET /a?b HTTP/1.1\r\nhost: h\r\nx: 1\r\nx: 2\r\n\r\n");
        let (uri, headers) = (head.parts.uri.clone(), head.parts.headers.clone());
        compact(&mut head.parts);
        assert_eq!((&head.parts.uri, &head.parts.headers), (&uri, &headers));
        let first = |headers: &HeaderMap| headers.get("x").map(|value| value.as_bytes().as_ptr());
        assert_ne!(first(&head.parts.headers), first(&headers));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(text in "(GET|POST|\\PC{0,3}) /[ -~]{0,9} HTTP/1.[012]\r\n(([A-Za-z-]{0,17}:[ -~]{0,9}|\\PC{0,9})\r?\n){0,9}") {
            if let Ok(Some(head)) = take(&format!("{text}\r\n")) {
                prop_assert!(!text.replace("\r\n", "").contains('\n'));
                prop_assert!(head.parts.headers.len() <= text.lines().count());
            }
        }
    }
}
