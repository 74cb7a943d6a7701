//! The head of a request, as Envoy sends it.

use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Request, Uri};
use kvlane_wire::ext_proc::Head;

use crate::error::ApiError;
use crate::head::FIELDS_MAX;

/// The head as that of an HTTP request. Envoy has checked it; what it sends that HTTP does not allow is refused.
pub(super) fn parts(head: &Head<'_>) -> Result<Parts, ApiError> {
    let (mut parts, ()) = Request::new(()).into_parts();
    let mut authority = None;
    for (name, value) in head.fields() {
        match name {
            b":method" => {
                parts.method = Method::from_bytes(value).map_err(|_| ApiError::BadHead("its method"))?;
            }
            b":path" => {
                let path = Uri::try_from(value).ok().filter(|uri| uri.path().starts_with('/'));
                parts.uri = path.ok_or(ApiError::BadPath)?;
            }
            b":authority" => authority = HeaderValue::from_bytes(value).ok(),
            [b':', ..] => {}
            _ => {
                let name = HeaderName::from_bytes(name);
                let name = name.map_err(|_| ApiError::BadHead("the name of a field"))?;
                let value = HeaderValue::from_bytes(value);
                let value = value.map_err(|_| ApiError::BadHead("the value of a field"))?;
                if parts.headers.len() >= FIELDS_MAX {
                    return Err(ApiError::TooManyFields);
                }
                parts.headers.append(name, value);
            }
        }
    }
    if let Some(authority) = authority {
        parts.headers.insert(http::header::HOST, authority);
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use kvlane_wire::ext_proc::{Part, Received};
    use kvlane_wire::protobuf::Message;

    use super::*;

    fn read(fields: &[(&str, &str)]) -> Result<Parts, ApiError> {
        let mut message = Message::default();
        message.message(2, |head| {
            head.message(1, |map| {
                for (name, value) in fields {
                    map.message(1, |header| {
                        header.bytes(1, name.as_bytes());
                        header.bytes(3, value.as_bytes());
                    });
                }
            });
        });
        let Some(Received { part: Part::RequestHead(head), .. }) = Received::read(&message.0) else {
            panic!("a head")
        };
        parts(&head)
    }

    #[test]
    fn pseudo_headers_are_method_path_and_host() {
        let fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "llm.example"),
            (":path", "/v1/completions?a=b"),
            ("x-a", "1"),
            ("x-a", "2"),
        ];
        let parts = read(&fields).expect("valid");
        assert_eq!((parts.method, parts.uri.path()), (Method::POST, "/v1/completions"));
        assert_eq!(parts.headers["host"], "llm.example");
        assert_eq!(parts.headers.get_all("x-a").iter().count(), 2);
    }

    #[test]
    fn what_http_does_not_allow_is_refused() {
        for (name, value) in [(":method", "a b"), (":path", "x"), (":path", ""), ("a b", ""), ("x", "a\nb")] {
            assert!(read(&[(name, value)]).is_err(), "{name}: {value}");
        }
        let many: Vec<_> = (0..=FIELDS_MAX).map(|_| ("x", "y")).collect();
        assert!(matches!(read(&many), Err(ApiError::TooManyFields)));
    }
}
