//! Any bytes as what stands in a request's head beside its body: attributes in headers, a worker's address.
#![no_main]

use http::{HeaderMap, HeaderName, HeaderValue};
use kvlane_gateway::testing::parsers;
use kvlane_http::address::Address;
use libfuzzer_sys::fuzz_target;

const NAMES: [&str; 10] = [
    "x-session-id",
    "session_id",
    "x-session-affinity",
    "authorization",
    "x-api-key",
    "x-llm-d-inference-fairness-id",
    "x-priority",
    "x-smg-priority",
    "traceparent",
    "x-request-id",
];

fuzz_target!(|bytes: &[u8]| {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|&byte| byte == b'\n') {
        if let Some((&which, value)) = line.split_first()
            && let Ok(value) = HeaderValue::from_bytes(value)
        {
            let name = NAMES[usize::from(which) % NAMES.len()];
            headers.append(HeaderName::from_static(name), value);
        }
    }
    assert!(parsers::hints(&headers));
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(address) = Address::parse(text) {
        assert!(!address.host.is_empty() && address.port > 0);
        let scheme = if address.tls { "https" } else { "http" };
        let again = format!("{scheme}://{}{}", address.authority, address.base_path);
        assert_eq!(Address::parse(&again).expect("the same address"), address);
    }
});
