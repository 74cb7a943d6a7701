//! Any bytes as a signed token, as its claims and as the keys it is verified by: nobody is believed who has no private key.
#![no_main]

use kvlane_gateway::testing::parsers::token;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// The public key of RFC 8037, appendix A.2, the one of RFC 7515, appendix A.3, and one for anything.
const KEYS: &[u8] = br#"{"keys":[
    {"kty":"OKP","crv":"Ed25519","kid":"e","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"},
    {"kty":"EC","crv":"P-256","kid":"p","alg":"ES256","x":"f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
     "y":"x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}
]}"#;

fuzz_target!(|bytes: &[u8]| {
    let mut parts = bytes.splitn(3, |&byte| byte == 0);
    let mut next = || parts.next().unwrap_or_default();
    let (text, claims, keys) = (next(), next(), next());
    let claims: Value = serde_json::from_slice(claims).unwrap_or_default();
    let Ok(text) = std::str::from_utf8(text) else { return };
    assert!(!token(KEYS, text, &claims));
    // Keys that came from here may have signed it.
    let _ = token(keys, text, &claims);
});
