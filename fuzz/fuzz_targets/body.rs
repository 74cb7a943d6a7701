//! Any bytes as the body of a request, at each endpoint.
#![no_main]

use kvlane_wire::api::Api;
use kvlane_wire::openai;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    let mut prompt = Vec::new();
    for api in Api::ALL {
        let _ = openai::parse(api, body, &mut prompt);
    }
});
