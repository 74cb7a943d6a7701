//! Tokenizers by a model's id: from the cache that Hugging Face's libraries share, and downloaded if that is allowed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::Output;

use crate::program::{kvlane, text};

const ID: &str = "org/tiny";
const COMMIT: &str = "0123abc";
const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}}"#;

/// `kvlane check --model-path ID` with this cache and these variables.
fn check(cache: &Path, more: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = kvlane(&[&["check", "--model-path", ID], more].concat());
    command.env("HF_HUB_CACHE", cache).env_remove("HF_TOKEN").envs(variables.iter().copied());
    command.output().expect("it starts")
}

#[track_caller]
fn is_refused(output: &Output, words: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for word in words {
        assert!(said.contains(word), "'{word}' is not in: {said}");
    }
}

/// A Hub on loopback that answers these paths, each request with its whole head, and 404 to all others. With a token,
/// other requests get 401.
fn hub(pages: BTreeMap<String, (u16, String)>, token: Option<&'static str>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let (mut head, mut byte) = (Vec::new(), [0]);
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count == 1) {
                head.push(byte[0]);
            }
            let head = String::from_utf8_lossy(&head).into_owned();
            let path = head.split(' ').nth(1).unwrap_or_default();
            let allowed =
                token.is_none_or(|token| head.contains(&format!("authorization: Bearer {token}\r\n")));
            let (status, body) = match pages.get(path) {
                _ if !allowed => (401, String::new()),
                Some((status, body)) => (*status, body.clone()),
                None => (404, String::new()),
            };
            // The body of a redirect is where it leads.
            let (location, body) = if status == 302 { (body, String::new()) } else { (String::new(), body) };
            let answer = format!(
                "HTTP/1.1 {status} X\r\nlocation: {location}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
            // The client may have gone.
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    format!("http://{address}")
}

/// The pages of the model; its tokenizer is behind a redirect, as large files are.
fn pages() -> BTreeMap<String, (u16, String)> {
    let listed = format!(
        r#"{{"sha": "{COMMIT}", "siblings": [{{"rfilename": "tokenizer.json"}}, {{"rfilename": "model.safetensors"}}]}}"#
    );
    let file = format!("/{ID}/resolve/{COMMIT}/tokenizer.json");
    BTreeMap::from([
        (format!("/api/models/{ID}/revision/main"), (200, listed)),
        (file, (302, "/blob?signature=1".to_owned())),
        ("/blob?signature=1".to_owned(), (200, TOKENIZER.to_owned())),
    ])
}

#[test]
fn a_model_in_the_cache_is_found_by_its_id() {
    let cache = tempfile::tempdir().expect("a directory");
    is_refused(
        &check(cache.path(), &[], &[]),
        &["tokens.path", ID, "--allow-download", cache.path().to_str().unwrap()],
    );
    let snapshot = cache.path().join("models--org--tiny/snapshots/1");
    fs::create_dir_all(&snapshot).expect("made");
    fs::write(snapshot.join("tokenizer.json"), TOKENIZER).expect("written");
    let found = check(cache.path(), &[], &[]);
    assert_eq!(found.status.code(), Some(0), "{}", text(&found.stderr));
}

#[test]
fn a_model_is_downloaded_if_that_is_allowed_and_then_is_in_the_cache() {
    let cache = tempfile::tempdir().expect("a directory");
    let endpoint = hub(pages(), Some("hf_secret"));
    let there = [("HF_ENDPOINT", endpoint.as_str())];
    let allowed = ["--allow-download"];
    is_refused(&check(cache.path(), &[], &there), &["--allow-download"]);
    is_refused(&check(cache.path(), &allowed, &there), &["answered 401", "HF_TOKEN", &endpoint]);
    let known = [there[0], ("HF_TOKEN", "hf_secret")];
    let loaded = check(cache.path(), &allowed, &known);
    assert_eq!(loaded.status.code(), Some(0), "{}", text(&loaded.stderr));
    let again = check(cache.path(), &[], &[]);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stderr));
}

#[test]
fn a_hub_that_does_not_have_the_model_or_is_not_there_is_named() {
    let cache = tempfile::tempdir().expect("a directory");
    let allowed = ["--allow-download"];
    let empty = hub(BTreeMap::new(), None);
    is_refused(
        &check(cache.path(), &allowed, &[("HF_ENDPOINT", &empty)]),
        &[ID, "answered 404", "no such model"],
    );
    let dead = "http://127.0.0.1:1";
    is_refused(&check(cache.path(), &allowed, &[("HF_ENDPOINT", dead)]), &[ID, dead, "Connection refused"]);
    let mut no_tokenizer = pages();
    let listed = format!(r#"{{"sha": "{COMMIT}", "siblings": [{{"rfilename": "model.safetensors"}}]}}"#);
    no_tokenizer.insert(format!("/api/models/{ID}/revision/main"), (200, listed));
    let bare = hub(no_tokenizer, None);
    is_refused(&check(cache.path(), &allowed, &[("HF_ENDPOINT", &bare)]), &[ID, "neither tokenizer.json"]);
}
