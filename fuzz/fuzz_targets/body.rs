//! Any bytes as the body of a request, at each endpoint: what is read is JSON, and so are both legs of a split request,
//! without a member that is reserved for gateways.
#![no_main]

use kvlane_wire::api::Api;
use kvlane_wire::disaggregation::{
    Connector, Source, Split, may_split, splits, strip_transfer_params, transfer_params,
};
use kvlane_wire::openai;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    let mut prompt = Vec::new();
    let params = transfer_params(body).ok();
    for api in Api::ALL {
        let Ok(parsed) = openai::parse(api, body, &mut prompt) else { continue };
        let (reserved, telling) = (parsed.reserved, parsed.telling);
        let stripped = strip_transfer_params(body).expect("it was read");
        assert!(!openai::parse(api, &stripped, &mut prompt).expect("it was read").reserved);
        assert!(reserved || strip_transfer_params(&stripped).expect("again") == stripped);
        for connector in Connector::ALL {
            let may_split = may_split(connector, api, body).is_ok();
            assert!(telling || may_split == splits(connector, api));
            if !may_split {
                continue;
            }
            let source = Source { host: "h".into(), port: 1, engine_id: "\"".into(), ..Source::default() };
            let split = Split { connector, api, request_id: "r", room: 7, source };
            let legs =
                [split.prefill_body(body), split.decode_body(body, None), split.decode_body(body, params)];
            for leg in legs {
                let leg = leg.expect("it was read");
                drop(serde_json::from_slice::<serde_json::Value>(&leg).expect("JSON"));
            }
        }
    }
});
