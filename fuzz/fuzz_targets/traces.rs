//! Any bytes as a trace in each format: sorted, nobody after or like a later one, and what is written is read back.
#![no_main]

use kvlane_trace::format::{self, Jitter, normal};
use kvlane_trace::{Format, Options, Trace};
use libfuzzer_sys::fuzz_target;

fn written(trace: &Trace) -> Vec<u8> {
    let mut out = Vec::new();
    normal::write(trace, &mut out).expect("memory takes it");
    out
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&how, content)) = bytes.split_first() else { return };
    let options = Options {
        format: Format::ALL.get(usize::from(how & 0x0f)).copied(),
        jitter: if how & 0x10 == 0 { Jitter::Off } else { Jitter::Auto },
        skip_bad: how & 0x20 != 0,
        open_loop: how & 0x40 != 0,
        shared_head: how & 0x80 == 0,
        ..Options::default()
    };
    let Ok(trace) = format::read(content, &options) else { return };
    assert!(!trace.requests.is_empty() && trace.block_tokens > 0);
    assert!(trace.requests.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s));
    for (index, request) in trace.requests.iter().enumerate() {
        let index = index as u32;
        assert!(request.input_tokens > 0 && request.arrival_s.is_finite());
        assert!(request.base.is_none_or(|base| base < index), "{request:?}");
        assert!(request.after.is_none_or(|after| after < index), "{request:?}");
        assert!(trace.reusable_blocks(index) <= trace.prompt_blocks(index));
    }
    let once = written(&trace);
    let normal = Options { format: Some(Format::Normal), jitter: Jitter::Off, ..Options::default() };
    let again = format::read(&once[..], &normal).expect("what was written is read");
    assert_eq!(trace.requests.len(), again.requests.len());
    assert_eq!(String::from_utf8(once), String::from_utf8(written(&again)));
});
