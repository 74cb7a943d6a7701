//! Reads the queries of requests to the admin API.

use http::StatusCode;
use http::request::Parts;
use kvlane_core::time::Nanos;
use kvlane_proxy::error::ApiError;
use percent_encoding::percent_decode_str;

/// An error of the admin API.
pub(crate) fn refused(status: StatusCode, message: &str) -> ApiError {
    ApiError::Admin { status, message: message.into() }
}

/// The start of the requested period: zero where the query does not give one.
pub(crate) fn since(parts: &Parts) -> Result<Option<Nanos>, ApiError> {
    let Some(text) = query(parts, "since_s") else { return Ok(None) };
    match text.parse::<f64>() {
        Ok(secs) if secs >= 0.0 && secs.is_finite() => Ok(Some(Nanos::from_secs_f64(secs))),
        _ => Err(refused(
            StatusCode::BAD_REQUEST,
            &format!("since_s={text}: must be a number of seconds, at least 0"),
        )),
    }
}

/// The value of a key in the query, percent-decoded.
pub(crate) fn query(parts: &Parts, key: &str) -> Option<String> {
    let pairs = parts.uri.query()?.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(name, _)| *name == key).map(|(_, value)| percent_decoded(value)).next()
}

/// Text with its percent encoding decoded; what is not valid stays as it is.
pub(crate) fn percent_decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::percent_decoded;

    #[test]
    fn valid_percent_encoding_is_decoded() {
        for (text, expect) in [
            ("http%3A%2F%2Fh:1", "http://h:1"),
            ("a%2", "a%2"),
            ("%zz%41", "%zzA"),
            ("%", "%"),
            ("%%41", "%A"),
            ("%+1", "%+1"),
        ] {
            assert_eq!(percent_decoded(text), expect);
        }
    }
}
