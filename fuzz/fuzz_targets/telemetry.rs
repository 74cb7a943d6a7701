//! Any bytes as headers of a trace and of times, and as a collector's answer: bounded, and what is read can be written.
#![no_main]

use kvlane_wire::otlp;
use kvlane_wire::server_timing::{METRICS_MAX, parse};
use kvlane_wire::trace_context::TraceContext;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(context) = TraceContext::parse(bytes) {
        assert_eq!(TraceContext::parse(context.to_string().as_bytes()), Some(context));
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let mut metrics = 0;
        for (name, duration_s) in parse(text) {
            assert!(!name.is_empty() && duration_s.is_finite() && duration_s >= 0.0);
            metrics += 1;
        }
        assert!(metrics <= METRICS_MAX);
    }
    let (_, why) = otlp::rejected(bytes);
    assert!(why.len() <= 3 * bytes.len());
});
