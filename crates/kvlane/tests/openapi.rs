//! `docs/openapi.yaml` says what the code does: every route with its methods, every error code, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use http::StatusCode;
use kvlane_proxy::error::ApiError;
use kvlane_proxy::error_format::anthropic_type;
use kvlane_proxy::paths::OWN_PATHS;
use kvlane_proxy::relay::stream_error_codes;
use kvlane_wire::api::{Audience, ENGINE_PATHS, document};
use serde_json::Value;

fn text(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn document() -> Value {
    serde_saphyr::from_str(&text("docs/openapi.yaml")).expect("YAML")
}

/// The methods of every path, in capitals.
fn paths(document: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let methods = |item: &Value| {
        let keys = item.as_object().expect("a path item").keys();
        keys.filter(|key| !["parameters", "servers"].contains(&key.as_str()))
            .map(|key| key.to_uppercase())
            .collect()
    };
    let paths = document["paths"].as_object().expect("paths");
    paths.iter().map(|(path, item)| (path.clone(), methods(item))).collect()
}

/// Paths that are described by hand, with their bodies.
const BY_HAND: [&str; 14] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/rerank",
    "/v1/rerank",
    "/score",
    "/v1/score",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/generate",
];

/// What stands between two lines of a document, and the document with `new` there instead.
fn between<'a>(text: &'a str, from: &str, to: &str, new: &str) -> (&'a str, String) {
    let start = text.find(from).expect("where it begins") + from.len();
    let end = start + text[start..].find(to).expect("where it ends");
    (&text[start..end], format!("{}{new}{}", &text[..start], &text[end..]))
}

#[test]
fn the_documents_of_paths_are_what_the_table_says() {
    let writes = std::env::var_os("KVLANE_WRITE_APIS").is_some();
    let markdown = |audience| format!("\n\n{}\n", document::markdown(audience));
    for (name, from, to, new) in [
        (
            "docs/openapi.yaml",
            "  # Written by KVLANE_WRITE_APIS=1 cargo test -p kvlane --test openapi.\n",
            "  # End of what is written.",
            document::openapi(&BY_HAND),
        ),
        ("docs/apis.md", "<!-- clients -->", "<!-- end of clients -->", markdown(Audience::Clients)),
        ("docs/apis.md", "<!-- operators -->", "<!-- end of operators -->", markdown(Audience::Operators)),
        ("docs/apis.md", "<!-- closed -->", "<!-- end of closed -->", markdown(Audience::Closed)),
    ] {
        let text = text(name);
        let (written, mended) = between(&text, from, to, &new);
        if writes {
            fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name), mended)
                .expect("it is written");
        } else {
            assert!(
                written == new,
                "{name} is out of date: KVLANE_WRITE_APIS=1 cargo test -p kvlane --test openapi"
            );
        }
    }
}

/// Invariant: The OpenAPI document lists exactly the gateway's routes, methods and error codes.
///
/// Also held by `every_error_code_and_type_of_the_code_is_in_the_document_and_no_other`.
#[test]
fn every_route_of_the_code_is_in_the_document_and_no_other() {
    let mut described = paths(&document());
    for row in ENGINE_PATHS.iter().filter(|row| row.audience == Audience::Clients && !row.is_grpc()) {
        let path = row.path.replace("{}", "{id}");
        let methods = described.remove(&path).unwrap_or_else(|| panic!("docs/openapi.yaml lacks {path}"));
        assert_eq!(methods, row.methods.split(", ").map(str::to_owned).collect(), "{path}");
    }
    for own in &OWN_PATHS {
        let methods = described.remove(own.path);
        let methods = methods.unwrap_or_else(|| panic!("docs/openapi.yaml lacks {}", own.path));
        let served: BTreeSet<String> =
            own.methods.split(", ").filter(|method| *method != "HEAD").map(str::to_owned).collect();
        assert_eq!(methods, served, "{}", own.path);
    }
    assert!(described.is_empty(), "no handler answers {:?}", described.keys());
}

#[test]
fn every_error_code_and_type_of_the_code_is_in_the_document_and_no_other() {
    let document = document();
    let described = |pointer: &str| -> BTreeSet<&str> {
        let list = document.pointer(&format!("/components/schemas/{pointer}/enum")).expect("an enum");
        list.as_array().expect("a list").iter().map(|value| value.as_str().expect("a text")).collect()
    };
    let statuses = || (400..600).map(|status| StatusCode::from_u16(status).expect("a status"));
    let kind = "properties/error/properties/type";
    assert_eq!(BTreeSet::from_iter(ApiError::CODES.iter().copied()), described("Code"));
    assert_eq!(
        statuses().map(ApiError::kind_of).collect::<BTreeSet<_>>(),
        described(&format!("Error/{kind}"))
    );
    assert_eq!(BTreeSet::from(stream_error_codes()), described("StreamError/properties/code"));
    assert_eq!(
        statuses().map(anthropic_type).collect::<BTreeSet<_>>(),
        described(&format!("MessagesError/{kind}"))
    );
}

#[test]
fn every_reference_leads_somewhere_and_every_part_is_used() {
    fn references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(map) => {
                for (key, inner) in map {
                    match (key.as_str(), inner.as_str()) {
                        ("$ref", Some(to)) => drop(found.insert(to.to_owned())),
                        _ => references(inner, found),
                    }
                }
            }
            Value::Array(list) => list.iter().for_each(|inner| references(inner, found)),
            _ => {}
        }
    }
    let document = document();
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    assert!(found.len() > 20, "{found:?}");
    for to in &found {
        let pointer = to.strip_prefix('#').expect("within the document");
        assert!(document.pointer(pointer).is_some(), "{to} leads nowhere");
    }
    for (kind, parts) in document["components"].as_object().expect("components") {
        // Those are named in `security`.
        for name in parts.as_object().expect("parts").keys().filter(|_| kind != "securitySchemes") {
            assert!(found.contains(&format!("#/components/{kind}/{name}")), "unused: {kind}/{name}");
        }
    }
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
}
