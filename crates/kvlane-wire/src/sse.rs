//! Server-sent events scanner: counts events with tokens, reads usage and detects the end of a stream, without delaying
//! it.
//!
//! The bytes may be split at any position. An event that is complete within one push is examined in place; only an
//! event that crosses the end of a push is buffered. Of an event beyond [`EVENT_BYTES_MAX`] only the head, which
//! determines its type, and the tail, which may contain its usage, are kept. Any split of a stream gives the same
//! result. Lines end in LF or CRLF; no engine uses the lone CR that the format also allows.
//!
//! An event is classified by its name (`event:`, or the `type` its data begins with) if it has one, as in Anthropic's
//! messages and OpenAI's responses; otherwise it is a chunk of a completion. Data is searched, not parsed, except for
//! the usage object itself. The search is sound: inside a JSON string every quote is escaped, so `"usage":` can only be
//! a key.

use std::sync::LazyLock;

use kvlane_core::request::AnswerEnd;
use memchr::memchr;
use memchr::memmem::{self, Finder};

use crate::answer_end::{end_in_chunk, end_in_message, end_in_response};
use crate::usage::Counts;
pub use crate::usage::{Usage, usage_in_json};

/// Size above which only the first and last 8 KiB of an event are examined.
pub const EVENT_BYTES_MAX: usize = 16 << 10;
/// Bytes examined at the start of an oversized event.
const HEAD_BYTES: usize = 8 << 10;
/// Bytes examined at the end of an oversized event.
const TAIL_BYTES: usize = EVENT_BYTES_MAX - HEAD_BYTES;

/// Scanner of one stream. Cheap to create; allocates no memory until an event is split.
#[derive(Debug, Default)]
pub struct SseScanner {
    /// The start of an incomplete event, or its head and, from [`HEAD_BYTES`] on, its tail.
    carry: Vec<u8>,
    /// Size of that event so far; more than `carry` holds once it is oversized.
    carried: usize,
    edge: Edge,
    tokens: u64,
    events: u64,
    counts: Counts,
    /// Position of the choices in the previous chunk's data.
    choices_at: usize,
    done: bool,
    failed: bool,
    /// Whether to read how the answer ends, and what was read.
    reads_end: bool,
    end: AnswerEnd,
}

/// The bytes just before the next one, as far as finding a blank line depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Edge {
    /// The start of a line.
    #[default]
    Line,
    /// A carriage return at the start of a line.
    LineReturn,
    /// Any other byte.
    Within,
}

// === impl SseScanner ===

impl SseScanner {
    /// A scanner at the start of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same scanner, which also reads how the answer ends.
    #[must_use]
    pub fn reading_end(self) -> Self {
        Self { reads_end: true, ..self }
    }

    /// How the answer ended, as far as read.
    pub fn answer_end(&self) -> AnswerEnd {
        self.end
    }

    /// Processes the next bytes of the stream; returns the number of completed events with tokens.
    pub fn push(&mut self, mut bytes: &[u8]) -> u32 {
        let before = self.tokens;
        while let Some(end) = event_end(self.edge, bytes) {
            let (event, rest) = bytes.split_at(end);
            if self.carried == 0 {
                self.judge(event, event.len());
            } else {
                self.keep(event);
                self.flush();
            }
            self.edge = Edge::Line;
            bytes = rest;
        }
        if !bytes.is_empty() {
            self.edge = self.edge.after(bytes);
            self.keep(bytes);
        }
        u32::try_from(self.tokens - before).unwrap_or(u32::MAX)
    }

    /// The stream has ended: classifies an event without a final blank line. Returns as [`SseScanner::push`] does.
    pub fn finish(&mut self) -> u32 {
        let before = self.tokens;
        self.flush();
        self.edge = Edge::Line;
        u32::from(self.tokens > before)
    }

    /// Number of events with tokens so far. Engines send one token per event when they keep up.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of complete events so far, including comments.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Bytes of the incomplete event so far.
    pub fn pending(&self) -> usize {
        self.carried
    }

    /// The usage reported so far, if any; reports spread over several events are merged.
    pub fn usage(&self) -> Option<Usage> {
        self.counts.usage()
    }

    /// Whether the stream reported its completion.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Whether the stream reported a failure: an error chunk or an error event.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Adds to the buffered event. Beyond the head, at least the last [`TAIL_BYTES`] are kept.
    fn keep(&mut self, bytes: &[u8]) {
        self.carried = self.carried.saturating_add(bytes.len());
        let (head, rest) = bytes.split_at(bytes.len().min(HEAD_BYTES.saturating_sub(self.carry.len())));
        self.carry.extend_from_slice(head);
        self.carry.extend_from_slice(last(rest, TAIL_BYTES));
        // The tail may grow to twice its size before it is trimmed, to amortize the move.
        if self.carry.len() > EVENT_BYTES_MAX + TAIL_BYTES {
            self.carry.drain(HEAD_BYTES..self.carry.len() - TAIL_BYTES);
        }
    }

    /// Classifies the buffered event, if any.
    fn flush(&mut self) {
        if self.carried > 0 {
            let mut event = std::mem::take(&mut self.carry);
            self.judge(&event, self.carried);
            event.clear();
            self.carry = event;
            self.carried = 0;
        }
    }

    /// Examines an event of `length` bytes; `event` holds at least its head and tail.
    fn judge(&mut self, event: &[u8], length: usize) {
        self.events += 1;
        if length > EVENT_BYTES_MAX {
            self.judge_parts(&event[..HEAD_BYTES], last(event, TAIL_BYTES));
        } else {
            self.judge_parts(event, event);
        }
    }

    /// Examines an event by its head and tail, which are equal except for oversized events.
    fn judge_parts(&mut self, head: &[u8], tail: &[u8]) {
        let Some((name, data)) = name_and_data(head) else { return };
        if data.starts_with(b"[DONE]") {
            self.done = true;
            return;
        }
        match if name.is_empty() { leading_type(data) } else { name } {
            b"" => {
                let failed = data.starts_with(b"{\"error\"");
                self.failed |= failed;
                let silent =
                    failed || self.without_choices(data) || (self.tokens == 0 && only_names_the_role(data));
                self.tokens += u64::from(!silent);
                self.counts.read_answer(tail);
                self.read_end(tail, end_in_chunk);
            }
            b"content_block_delta" => self.tokens += 1,
            name if name.ends_with(b".delta") => self.tokens += 1,
            name => {
                const LAST: [&[u8]; 4] =
                    [b"message_stop", b"response.completed", b"response.incomplete", b"response.failed"];
                self.done |= LAST.contains(&name);
                self.failed |= matches!(name, b"error" | b"response.failed");
                self.counts.read_answer(tail);
                match name {
                    b"message_delta" => self.read_end(tail, end_in_message),
                    b"response.completed" => self.read_end(tail, end_in_response),
                    _ => {}
                }
            }
        }
    }

    /// Reads how the answer ends, if asked to.
    fn read_end(&mut self, event: &[u8], end_in: fn(&[u8]) -> AnswerEnd) {
        if self.reads_end {
            match end_in(event) {
                AnswerEnd::Unknown => {}
                end => self.end = end,
            }
        }
    }

    /// Whether a chunk has an empty list of choices: such a chunk only carries usage.
    fn without_choices(&mut self, data: &[u8]) -> bool {
        // The chunks of a stream begin alike, so the key is first looked for at its previous position.
        if !data.get(self.choices_at..).is_some_and(|data| data.starts_with(CHOICES.needle())) {
            match CHOICES.find(data) {
                Some(at) => self.choices_at = at,
                None => return false,
            }
        }
        let list = value_of_key(&data[self.choices_at + CHOICES.needle().len()..]);
        let items = list.and_then(|list| list.strip_prefix(b"["));
        items.is_some_and(|items| items.trim_ascii_start().first() == Some(&b']'))
    }
}

// === impl Edge ===

impl Edge {
    /// The edge after `bytes`, which end no event.
    pub(crate) fn after(self, bytes: &[u8]) -> Self {
        match bytes {
            [] => self,
            [.., b'\n'] => Self::Line,
            [.., b'\n', b'\r'] => Self::LineReturn,
            [b'\r'] if self == Self::Line => Self::LineReturn,
            _ => Self::Within,
        }
    }
}

/// Whether a chat chunk has a role and no content, as the first chunk of vLLM and llama.cpp.
fn only_names_the_role(data: &[u8]) -> bool {
    let has = |needle: &[u8]| memmem::find(data, needle).is_some();
    let empty = [&b"\"content\":\"\""[..], b"\"content\": \"\"", b"\"content\":null", b"\"content\": null"];
    has(b"\"role\"") && empty.into_iter().any(has) && !has(b"\"function\"")
}

/// The end of the event that `bytes` continue, its blank line included.
#[inline]
pub(crate) fn event_end(edge: Edge, bytes: &[u8]) -> Option<usize> {
    match (edge, bytes) {
        (Edge::Line | Edge::LineReturn, [b'\n', ..]) => return Some(1),
        (Edge::Line, [b'\r', b'\n', ..]) => return Some(2),
        _ => {}
    }
    let mut at = 0;
    while let Some(length) = memchr(b'\n', &bytes[at..]) {
        at += length + 1;
        match &bytes[at..] {
            [b'\n', ..] => return Some(at + 1),
            [b'\r', b'\n', ..] => return Some(at + 2),
            _ => {}
        }
    }
    None
}

/// The event's name if it precedes its data (empty for SSE's default, `message`), and everything from its first data
/// on.
#[inline]
pub(crate) fn name_and_data(mut event: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut name: &[u8] = b"";
    loop {
        if let Some(data) = event.strip_prefix(b"data:") {
            return Some((name, data.trim_ascii_start()));
        }
        let (line, rest) = event.split_at(memchr(b'\n', event)? + 1);
        if let Some(value) = line.strip_prefix(b"event:") {
            name = value.trim_ascii();
            if name == b"message" {
                name = b"";
            }
        }
        event = rest;
    }
}

/// The `type` at the start of the data, as in Anthropic's and OpenAI's typed events.
fn leading_type(data: &[u8]) -> &[u8] {
    let value = data.strip_prefix(b"{\"type\":").map(<[u8]>::trim_ascii_start);
    let value = value.and_then(|value| value.strip_prefix(b"\"")).unwrap_or_default();
    &value[..memchr(b'"', value).unwrap_or_default()]
}

/// The value after a key; `None` if the match is not a key.
fn value_of_key(after: &[u8]) -> Option<&[u8]> {
    after.trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start)
}

/// The last `count` bytes.
fn last(bytes: &[u8], count: usize) -> &[u8] {
    &bytes[bytes.len().saturating_sub(count)..]
}

static CHOICES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"choices\""));

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A scanner's results, for comparison.
    fn result(scanner: &SseScanner) -> (u64, Option<Usage>, bool) {
        (scanner.tokens(), scanner.usage(), scanner.is_done())
    }

    #[test]
    fn a_stream_that_says_so_has_failed() {
        for (stream, failed) in [
            (CHAT, false),
            (MESSAGES, false),
            ("data: {\"error\":{\"message\":\"x\"}}\n\ndata: [DONE]\n\n", true),
            ("data: {\"choices\":[{\"delta\":{\"content\":\"{\\\"error\\\"\"}}]}\n\n", false),
            ("event: error\ndata: {\"type\":\"error\",\"error\":{}}\n\n", true),
            ("event: response.failed\ndata: {\"type\":\"response.failed\"}\n\n", true),
        ] {
            let mut scanner = SseScanner::new();
            scanner.push(stream.as_bytes());
            assert_eq!(scanner.has_failed(), failed, "{stream}");
        }
    }

    #[test]
    fn what_no_event_has_ended_is_pending() {
        let mut scanner = SseScanner::new();
        for (bytes, events, pending) in [
            ("data: 1\n\n", 1, 0),
            ("data: 2\n\nda", 2, 2),
            ("ta: 3\r", 2, 8),
            ("\n\r", 2, 10),
            ("\n", 3, 0),
            (": c\n\nx", 4, 1),
        ] {
            scanner.push(bytes.as_bytes());
            assert_eq!((scanner.events(), scanner.pending()), (events, pending), "after {bytes:?}");
        }
    }

    fn scan(stream: &str) -> (u64, Option<Usage>, bool) {
        let mut scanner = SseScanner::new();
        assert_eq!(u64::from(scanner.push(stream.as_bytes())), scanner.tokens());
        result(&scanner)
    }

    fn usage(prompt_tokens: u32, completion_tokens: u32, cached_tokens: Option<u32>) -> Option<Usage> {
        Some(Usage { prompt_tokens, completion_tokens, cached_tokens })
    }

    const CHAT: &str = concat!(
        "data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        ": ping\n\n",
        "data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\\\"usage\\\": {\"}}],\"usage\":null}\n\n",
        "data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"choices\"},\"finish_reason\":\"stop\"}]}\n\n",
        "data: {\"id\":\"1\",\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"total_tokens\":103,\"completion_tokens\":3,",
        "\"prompt_tokens_details\":{\"cached_tokens\":96,\"created_cache_tokens\":null}}}\n\n",
        "data: [DONE]\n\n",
    );

    const MESSAGES: &str = concat!(
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":20,",
        "\"cache_read_input_tokens\":64,\"cache_creation_input_tokens\":16,\"output_tokens\":1}}}\n\n",
        "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0}\n\n",
        "event: ping\ndata: {\"type\": \"ping\"}\n\n",
        "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n\n",
        "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"b\"}}\n\n",
        "event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\n",
        "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":15}}\n\n",
        "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    );

    const RESPONSES: &str = concat!(
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"usage\":null}}\n\n",
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n",
        "event: response.reasoning_text.delta\ndata: {\"type\":\"response.reasoning_text.delta\",\"delta\":\"b\"}\n\n",
        "event: response.output_text.done\ndata: {\"type\":\"response.output_text.done\",\"text\":\"ab\"}\n\n",
        "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":50,",
        "\"input_tokens_details\":{\"cached_tokens\":32},\"output_tokens\":2}}}\n\n",
    );

    const LLAMA_CPP: &str = concat!(
        "data: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"finish_reason\":null}],\"object\":\"chat.completion.chunk\"}\n\n",
        "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":{\"completion_tokens\":1,\"prompt_tokens\":85},",
        "\"timings\":{\"cache_n\":84,\"prompt_n\":1,\"predicted_n\":1}}\n\ndata: [DONE]\n\n",
    );

    #[test]
    fn a_chat_stream_counts_chunks_with_choices_and_reads_usage() {
        assert_eq!(scan(CHAT), (2, usage(100, 3, Some(96)), true));
    }

    #[test]
    fn a_first_chunk_that_only_names_the_role_is_no_token() {
        let first = |delta: &str| scan(&format!("data: {{\"choices\":[{{\"delta\":{delta}}}]}}\n\n")).0;
        for delta in [r#"{"role":"assistant","content":""}"#, r#"{"role": "assistant", "content": null}"#] {
            assert_eq!(first(delta), 0, "{delta}");
        }
        for delta in [
            r#"{"role":"assistant","content":"a"}"#,
            r#"{"content":""}"#,
            r#"{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f"}}]}"#,
        ] {
            assert_eq!(first(delta), 1, "{delta}");
        }
    }

    #[test]
    fn lines_may_end_with_a_carriage_return_too() {
        assert_eq!(scan(&CHAT.replace('\n', "\r\n")), (2, usage(100, 3, Some(96)), true));
        assert_eq!(scan(&MESSAGES.replace('\n', "\r\n")), (2, usage(100, 15, Some(64)), true));
    }

    #[test]
    fn a_messages_stream_counts_deltas_and_joins_usage() {
        assert_eq!(scan(MESSAGES), (2, usage(100, 15, Some(64)), true));
        let unnamed: String =
            MESSAGES.lines().filter(|line| !line.starts_with("event:")).map(|l| format!("{l}\n")).collect();
        assert_eq!(scan(&unnamed), (2, usage(100, 15, Some(64)), true), "the type in the data is equivalent");
    }

    #[test]
    fn a_responses_stream_counts_deltas_of_any_kind() {
        assert_eq!(scan(RESPONSES), (2, usage(50, 2, Some(32)), true));
    }

    #[test]
    fn llama_cpp_tells_its_cached_tokens_in_timings() {
        assert_eq!(scan(LLAMA_CPP), (2, usage(85, 1, Some(84)), true));
    }

    #[test]
    fn sglang_tells_its_usage_in_every_event_of_generate() {
        let stream = "data: {\"text\":\"a\",\"meta_info\":{\"prompt_tokens\":9,\"completion_tokens\":1,\"cached_tokens\":8}}\n\n\
                      data: {\"text\":\"ab\",\"meta_info\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"cached_tokens\":8}}\n\n";
        assert_eq!(scan(stream), (2, usage(9, 2, Some(8)), false));
    }

    #[test]
    fn an_error_event_is_no_token() {
        assert_eq!(scan("data: {\"error\":{\"message\":\"out of memory\"}}\n\n"), (0, None, false));
    }

    #[test]
    fn spaces_in_the_data_change_nothing() {
        assert_eq!(
            scan("data:{\"choices\" : [ ] , \"usage\" : {\"prompt_tokens\" : 7}}\n\n"),
            (0, usage(7, 0, None), false)
        );
    }

    #[test]
    fn a_last_event_without_its_blank_line_counts_once_the_stream_ends() {
        let mut scanner = SseScanner::new();
        assert_eq!(scanner.push(b"data: {\"choices\":[{}]}\n\ndata: {\"choices\":[{}]}\n"), 1);
        assert_eq!((scanner.finish(), scanner.tokens(), scanner.is_done()), (1, 2, false));
        scanner.push(b"data: [DONE]");
        assert_eq!((scanner.finish(), scanner.is_done()), (0, true));
    }

    #[test]
    fn an_endless_event_is_counted_and_not_kept() {
        let mut scanner = SseScanner::new();
        scanner.push(b"data: {\"text\":\"");
        for _ in 0..1000 {
            scanner.push(&[b'x'; 1009]);
            assert!(
                scanner.carry.len() <= EVENT_BYTES_MAX + TAIL_BYTES,
                "{} bytes kept",
                scanner.carry.len()
            );
        }
        scanner.push(&[b'x'; 100_000]);
        assert!(scanner.carry.len() <= EVENT_BYTES_MAX + TAIL_BYTES);
        assert_eq!(scanner.push(b"\"}\n\n"), 1);
    }

    #[test]
    fn an_oversized_last_event_still_tells_its_usage() {
        let stream = format!(
            "event: response.completed\ndata: {{\"type\":\"response.completed\",\"response\":{{\"output\":\"{}\",\
             \"usage\":{{\"input_tokens\":5,\"output_tokens\":6}}}}}}\n\n",
            "é".repeat(20_000)
        );
        assert_eq!(scan(&stream), (0, usage(5, 6, None), true));
    }

    /// Streams of known and unusual events, some beyond the limit.
    fn stream() -> impl Strategy<Value = Vec<u8>> {
        let event = prop_oneof![
            4 => prop::sample::select(vec![CHAT, MESSAGES, RESPONSES, LLAMA_CPP]).prop_map(str::to_owned),
            2 => "(data: ?|event: ?|: ?|id: ?)[a-z{}\"\\[\\]:,. ]{0,20}(\n|\r\n|\n\n|\r\n\r\n)",
            1 => "[\r\nda:t]{0,12}",
            1 => (0..3 * EVENT_BYTES_MAX).prop_map(|fill| format!(
                "data: {{\"choices\":[{{\"x\":\"{}\"}}],\"usage\":{{\"prompt_tokens\":{fill}}}}}\n\n", "é".repeat(fill / 2)
            )),
        ];
        prop::collection::vec((event, any::<bool>()), 0..6).prop_map(|events| {
            let text: String = events
                .into_iter()
                .map(|(event, returns)| if returns { event.replace('\n', "\r\n") } else { event })
                .collect();
            text.into_bytes()
        })
    }

    proptest! {
        /// Invariant: A stream is parsed alike however it is split.
        ///
        /// Also held by `any_split_gives_the_same_data`.
        #[test]
        fn any_split_of_a_stream_gives_the_same_result(
            stream in stream(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12)
        ) {
            let mut whole = SseScanner::new();
            whole.push(&stream);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.sort_unstable();
            cuts.push(stream.len());
            let (mut split, mut from, mut counted) = (SseScanner::new(), 0, 0);
            for cut in cuts {
                counted += u64::from(split.push(&stream[from..cut]));
                from = cut;
            }
            prop_assert_eq!(counted, split.tokens());
            prop_assert_eq!(result(&split), result(&whole));
            whole.finish();
            split.finish();
            prop_assert_eq!(result(&split), result(&whole));
        }

        #[test]
        fn what_is_carried_is_the_whole_event_or_its_head_and_tail(
            pieces in prop::collection::vec(1..2 * EVENT_BYTES_MAX, 1..12)
        ) {
            let mut scanner = SseScanner::new();
            let mut event = Vec::new();
            for length in pieces {
                let piece: Vec<u8> = (event.len()..event.len() + length).map(|at| b'a' + (at % 23) as u8).collect();
                scanner.push(&piece);
                event.extend(piece);
                if event.len() <= EVENT_BYTES_MAX {
                    prop_assert!(scanner.carry == event);
                } else {
                    prop_assert!(scanner.carry[..HEAD_BYTES] == event[..HEAD_BYTES]);
                    prop_assert!(last(&scanner.carry, TAIL_BYTES) == last(&event, TAIL_BYTES));
                }
                prop_assert!(scanner.carry.len() <= EVENT_BYTES_MAX + TAIL_BYTES);
            }
        }

        #[test]
        fn a_stream_read_byte_by_byte_gives_the_same_result(
            name in prop::sample::select(vec![CHAT, MESSAGES, RESPONSES, LLAMA_CPP]), returns: bool
        ) {
            let stream = if returns { name.replace('\n', "\r\n") } else { name.to_owned() };
            let mut split = SseScanner::new();
            for byte in stream.as_bytes() {
                split.push(std::slice::from_ref(byte));
            }
            prop_assert_eq!(result(&split), scan(&stream));
        }

        #[test]
        fn any_bytes_are_scanned_without_a_panic(pieces in prop::collection::vec(any::<Vec<u8>>(), 0..8)) {
            let mut scanner = SseScanner::new();
            for piece in &pieces {
                let newlines = piece.iter().filter(|byte| **byte == b'\n').count();
                prop_assert!(scanner.push(piece) as usize <= newlines, "an event ends with a line");
            }
        }
    }
}
