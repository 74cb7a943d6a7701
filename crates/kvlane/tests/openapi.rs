//! `docs/openapi.yaml` says what the code does: every route with its methods, every error code, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

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

/// Every text in quotes that `begins` so.
fn quoted<'a>(source: &'a str, begins: &str) -> BTreeSet<&'a str> {
    let texts = source.split('"').skip(1).step_by(2);
    texts.filter(|text| text.starts_with(begins) && !text.contains(['\n', ' '])).collect()
}

/// The source without its tests, and without what would be mistaken for a quote.
fn code(name: &str) -> String {
    let source = text(name);
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n").replace("r#\"", "").replace("\\\"", "").replace("'\"'", "")
}

/// As it stands in the document, where the code has the beginning of a path.
fn with_its_parameter(path: &str) -> String {
    match path {
        "/workers/" => "/workers/{worker}".into(),
        "/v1/models/" => "/v1/models/{model}".into(),
        path => path.into(),
    }
}

/// Invariant: The OpenAPI document lists exactly the gateway's routes, methods and error codes.
///
/// Also held by `every_method_of_an_operators_path_is_in_the_document`,
/// `every_error_code_and_type_of_the_code_is_in_the_document_and_no_other`.
#[test]
fn every_route_of_the_code_is_in_the_document_and_no_other() {
    let described = paths(&document());
    let api = code("crates/kvlane-wire/src/api.rs");
    let served = quoted(&api, "/");
    assert!(served.len() > 10, "{served:?}");
    for path in &served {
        let methods = described.get(*path).unwrap_or_else(|| panic!("docs/openapi.yaml lacks {path}"));
        assert_eq!(methods, &BTreeSet::from(["POST".to_owned()]), "{path}");
    }
    let admin = code("crates/kvlane-gateway/src/admin/mod.rs");
    let own: BTreeSet<String> =
        quoted(&admin, "/").into_iter().map(with_its_parameter).filter(|path| path != "/v1/").collect();
    assert!(
        own.contains("/workers/{worker}") && own.contains("/metrics"),
        "admin/mod.rs is written in another way"
    );
    for path in &own {
        assert!(described.contains_key(path), "docs/openapi.yaml lacks {path}");
    }
    for path in described.keys() {
        assert!(own.contains(path) || served.contains(path.as_str()), "no handler answers {path}");
    }
}

#[test]
fn every_method_of_an_operators_path_is_in_the_document() {
    let described = paths(&document());
    let admin = code("crates/kvlane-gateway/src/admin/mod.rs");
    let arms: Vec<(&str, &str)> = admin
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("(\""))
        .filter_map(|arm| arm.split_once("\", ").or_else(|| arm.split_once("\" | ")))
        .collect();
    assert!(arms.len() >= 8, "admin/mod.rs is written in another way: {arms:?}");
    for line in admin.lines().map(str::trim_start).filter(|line| line.starts_with("(\"")) {
        let Some((arm, _)) = line.split_once(" =>") else { continue };
        let path = quoted(arm, "/").into_iter().next().unwrap_or("/workers/{worker}");
        for method in quoted(arm, "").into_iter().filter(|text| text.chars().all(|c| c.is_ascii_uppercase()))
        {
            let methods = described.get(path).unwrap_or_else(|| panic!("docs/openapi.yaml lacks {path}"));
            assert!(methods.contains(method), "docs/openapi.yaml lacks {method} {path}");
        }
    }
}

#[test]
fn every_error_code_and_type_of_the_code_is_in_the_document_and_no_other() {
    let document = document();
    let described = |pointer: &str| -> BTreeSet<String> {
        let list = document.pointer(&format!("/components/schemas/{pointer}/enum")).expect("an enum");
        let values = list.as_array().expect("a list").iter();
        values.map(|value| value.as_str().expect("a text").to_owned()).collect()
    };
    let front = "crates/kvlane-gateway/src/front/http/";
    let source = code(&format!("{front}error.rs")) + &code(&format!("{front}dialect.rs"));
    let of = |function: &str| -> BTreeSet<String> {
        let body = source.split(function).nth(1).unwrap_or_else(|| panic!("there is no {function}"));
        let body = body.split("\n    }\n").next().unwrap_or_default();
        let values = body.split("=> \"").skip(1).filter_map(|rest| rest.split('"').next());
        values.map(str::to_owned).collect()
    };
    assert!(of("fn code(&self)").len() > 10, "error.rs is written in another way");
    assert_eq!(of("fn code(&self)"), described("Code"));
    let kind = "properties/error/properties/type";
    assert_eq!(of("fn kind(&self)"), described(&format!("Error/{kind}")));
    let relay = code(&format!("{front}relay.rs"));
    let in_streams = relay.split("const fn code(self)").nth(1).expect("relay.rs is written in another way");
    let in_streams = in_streams.split("\n    }\n").next().unwrap_or_default();
    let in_streams = in_streams.split("=> \"").skip(1).filter_map(|rest| rest.split('"').next());
    let in_streams: BTreeSet<String> = in_streams.map(str::to_owned).collect();
    assert_eq!(in_streams, described("StreamError/properties/code"));
    assert_eq!(of("fn anthropic_type("), described(&format!("MessagesError/{kind}")));
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
