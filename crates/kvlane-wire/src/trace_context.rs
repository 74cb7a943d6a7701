//! W3C Trace Context (Recommendation of 2021, level 2 for the random flag): the trace that a request belongs to.

use std::fmt;

/// Trace id. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceId(pub u128);

/// Span id. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanId(pub u64);

/// The content of a `traceparent` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace.
    pub trace: TraceId,
    /// The caller's span, which is the parent.
    pub span: SpanId,
    /// [`SAMPLED`] and [`RANDOM`].
    pub flags: u8,
}

/// Flag: the caller records this trace.
pub const SAMPLED: u8 = 1;
/// Flag: the last seven bytes of the trace id are random.
pub const RANDOM: u8 = 2;

/// Length of a version 00 header.
const LEN: usize = 55;

// === impl TraceContext ===

impl TraceContext {
    /// Parses a header's value. An invalid value is ignored, as the recommendation requires. Of later versions, the
    /// part defined by version 00 is read.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?.trim_matches([' ', '\t']);
        let (head, rest) = text.split_at_checked(LEN)?;
        let mut parts = head.split('-');
        let mut part = |len: usize| parts.next().filter(|part| part.len() == len);
        let (version, trace) = (hex(part(2)?)?, hex(part(32)?)?);
        let (span, flags) = (hex(part(16)?)?, hex(part(2)?)?);
        let fits = rest.is_empty() || (version > 0 && rest.starts_with('-'));
        if version == 0xff || !fits || trace == 0 || span == 0 {
            return None;
        }
        let flags = flags as u8 & (SAMPLED | RANDOM);
        Some(Self { trace: TraceId(trace), span: SpanId(span as u64), flags })
    }

    /// Whether the caller records the trace.
    pub const fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }
}

/// Formats as a version 00 header.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-{:02x}", self.trace, self.span, self.flags)
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Only lower-case digits are valid.
fn hex(digits: &str) -> Option<u128> {
    let lower = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    digits.bytes().all(lower).then(|| u128::from_str_radix(digits, 16).ok())?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The recommendation's own example.
    const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn what_is_well_formed_is_read_and_written_again() {
        let context = TraceContext::parse(EXAMPLE.as_bytes()).expect("well formed");
        assert!(context.is_sampled());
        assert_eq!((context.trace.0 >> 96, context.span.0), (0x4bf9_2f35, 0x00f0_67aa_0ba9_02b7));
        assert_eq!(context.to_string(), EXAMPLE);
        // Later versions may add fields; unknown flags are not passed on.
        let later = format!("cc{}-what-comes", EXAMPLE[2..].replace("-01", "-ff"));
        let context = TraceContext::parse(later.as_bytes()).expect("the part that is known");
        assert_eq!((context.to_string(), context.flags), (EXAMPLE.replace("-01", "-03"), SAMPLED | RANDOM));
    }

    #[test]
    fn what_is_not_well_formed_is_none() {
        for value in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01more",
            "00-4bf92f3577b34da6a3ce929d0e0e473-600f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-é",
        ] {
            assert_eq!(TraceContext::parse(value.as_bytes()), None, "{value}");
        }
    }

    proptest! {
        #[test]
        fn nothing_panics_and_what_is_read_can_be_written(value in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Some(context) = TraceContext::parse(&value) {
                prop_assert_eq!(TraceContext::parse(context.to_string().as_bytes()), Some(context));
            }
        }
    }
}
