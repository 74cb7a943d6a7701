//! `Server-Timing` header: the stages of a request until its answer's head was sent, with their durations.
//!
//! The format is W3C's (Server Timing, section 3): metrics separated by commas, each a name and parameters, among them
//! `dur` in milliseconds. kvlane writes its stages in the order of [`Stage::ALL`], to the microsecond. They are
//! contiguous, so they add up to the total time; a stage that did not occur is left out. Headers of other servers are
//! read as far as they have a name and a duration.

/// Most metrics read from one header; further ones are ignored.
pub const METRICS_MAX: usize = 64;
/// Microseconds per millisecond, the header's unit.
const MICROS_PER_MILLI: u64 = 1000;

/// Stages of a request until its answer begins, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Receiving the body, after the head.
    Read,
    /// Parsing the body and rendering the prompt.
    Parse,
    /// Counting the prompt's tokens.
    Tokenize,
    /// Charging limits, looking up the index, choosing an endpoint.
    Place,
    /// Waiting in the queue.
    Queue,
    /// Failed attempts, and the pauses after them.
    Retry,
    /// Sending to the engine: finding or opening a connection, writing head and body.
    Send,
    /// Waiting for the engine's answer: for a stream until its first bytes, otherwise until its head.
    Engine,
    /// With disaggregated serving: prefill by a prefill engine.
    Prefill,
    /// With disaggregated serving: transfer of the KV cache to the decode engine.
    Transfer,
    /// With disaggregated serving: waiting for the decode engine's answer.
    Decode,
}

/// Durations of one request's stages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    micros: [Option<u64>; Stage::ALL.len()],
}

// === impl Stage ===

impl Stage {
    /// All stages, in header order.
    pub const ALL: [Self; 11] = [
        Self::Read,
        Self::Parse,
        Self::Tokenize,
        Self::Place,
        Self::Queue,
        Self::Retry,
        Self::Send,
        Self::Engine,
        Self::Prefill,
        Self::Transfer,
        Self::Decode,
    ];

    /// The name in the header, in metrics and in records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Parse => "parse",
            Self::Tokenize => "tokenize",
            Self::Place => "place",
            Self::Queue => "queue",
            Self::Retry => "retry",
            Self::Send => "send",
            Self::Engine => "engine",
            Self::Prefill => "prefill",
            Self::Transfer => "transfer",
            Self::Decode => "decode",
        }
    }

    /// The stage of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|stage| stage.name() == name)
    }
}

// === impl Stages ===

impl Stages {
    /// Adds microseconds to a stage.
    pub fn add(&mut self, stage: Stage, micros: u64) {
        let so_far = &mut self.micros[stage as usize];
        *so_far = Some(so_far.unwrap_or(0).saturating_add(micros));
    }

    /// The microseconds of a stage, if it occurred.
    pub fn get(&self, stage: Stage) -> Option<u64> {
        self.micros[stage as usize]
    }

    /// The stages that occurred, in order, in microseconds.
    pub fn iter(&self) -> impl Iterator<Item = (Stage, u64)> + '_ {
        Stage::ALL.into_iter().filter_map(|stage| Some((stage, self.get(stage)?)))
    }

    /// The sum of all stages, in microseconds.
    pub fn total(&self) -> u64 {
        self.iter().fold(0, |total, (_, micros)| total.saturating_add(micros))
    }

    /// The header's value; empty if no stage occurred.
    pub fn format(&self) -> Vec<u8> {
        let mut value = Vec::with_capacity(160);
        for (stage, micros) in self.iter() {
            if !value.is_empty() {
                value.extend_from_slice(b", ");
            }
            value.extend_from_slice(stage.name().as_bytes());
            value.extend_from_slice(b";dur=");
            push_number(&mut value, micros / MICROS_PER_MILLI);
            value.push(b'.');
            let after = micros % MICROS_PER_MILLI;
            value.extend([after / 100, after / 10 % 10, after % 10].map(|digit| b'0' + digit as u8));
        }
        value
    }
}

fn push_number(out: &mut Vec<u8>, number: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    let mut left = number;
    loop {
        at -= 1;
        digits[at] = b'0' + (left % 10) as u8;
        left /= 10;
        if left == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// The names and durations in seconds of a header's metrics, in header order. A metric without a duration, or whose
/// duration is not a finite number from 0 on, is left out.
pub fn parse(value: &str) -> impl Iterator<Item = (&str, f64)> {
    split(value, ',').take(METRICS_MAX).filter_map(|metric| {
        let mut parts = split(metric, ';').map(str::trim);
        let name = parts.next().filter(|name| !name.is_empty())?;
        // The first one counts, according to the specification.
        let dur = parts.find_map(|parameter| {
            let (key, value) = parameter.split_once('=')?;
            key.trim().eq_ignore_ascii_case("dur").then(|| value.trim())
        })?;
        let millis: f64 = dur.trim_matches('"').trim().parse().ok()?;
        (millis.is_finite() && millis >= 0.0).then_some((name, millis / 1e3))
    })
}

/// The pieces between separators outside of quoted strings.
fn split(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let (mut quoted, mut escaped) = (false, false);
    text.split(move |c| {
        let ends = c == separator && !quoted;
        if escaped {
            escaped = false;
        } else if quoted && c == '\\' {
            escaped = true;
        } else if c == '"' {
            quoted = !quoted;
        }
        ends
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Asserts the names and microseconds.
    fn check(value: &str, expect: &[(&str, u64)]) {
        let read: Vec<_> = parse(value).map(|(name, s)| (name, (s * 1e6).round() as u64)).collect();
        assert_eq!(read, expect, "{value}");
    }

    #[test]
    fn stages_are_written_in_order_to_the_microsecond() {
        let mut stages = Stages::default();
        assert_eq!(stages.format(), b"");
        stages.add(Stage::Engine, 1_234_567);
        stages.add(Stage::Read, 7);
        stages.add(Stage::Place, 40);
        stages.add(Stage::Place, 2);
        stages.add(Stage::Send, 0);
        let written = String::from_utf8(stages.format()).expect("ASCII");
        assert_eq!(written, "read;dur=0.007, place;dur=0.042, send;dur=0.000, engine;dur=1234.567");
        assert_eq!((stages.total(), stages.get(Stage::Queue)), (1_234_616, None));
    }

    #[test]
    fn what_others_write_is_read_as_far_as_it_has_a_duration() {
        check("miss, db;dur=53, app;dur=47.2", &[("db", 53_000), ("app", 47_200)]);
        check("cache;desc=\"Cache, Read; dur=9\";dur=23.2", &[("cache", 23_200)]);
        check(r#"a;desc="\",";DUR = "4" , b;dur=1;dur=2"#, &[("a", 4_000), ("b", 1_000)]);
        check("", &[]);
        check(";dur=1, a;dur, b;dur=, c;dur=x, d;dur=-1, e;dur=inf, f;dur=NaN, g", &[]);
        check("open;desc=\"never closed, h;dur=1", &[]);
    }

    #[test]
    fn a_header_without_end_is_read_up_to_a_bound() {
        let long = "a;dur=1,".repeat(10_000);
        assert_eq!(parse(&long).count(), METRICS_MAX);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(taken in prop::collection::vec((0..11usize, 0..1u64 << 40), 0..12)) {
            let mut stages = Stages::default();
            taken.iter().for_each(|&(stage, micros)| stages.add(Stage::ALL[stage], micros));
            let written = String::from_utf8(stages.format()).expect("ASCII");
            let mut again = Stages::default();
            for (name, duration_s) in parse(&written) {
                again.add(Stage::from_name(name).expect("a stage"), (duration_s * 1e6).round() as u64);
            }
            prop_assert_eq!(again, stages);
        }

        #[test]
        fn whatever_is_read_is_a_name_and_a_time(value in "[a-c;=,\"\\\\ dur.0-9é-]{0,80}") {
            for (name, duration_s) in parse(&value) {
                prop_assert!(!name.is_empty() && duration_s.is_finite() && duration_s >= 0.0);
            }
        }
    }
}
