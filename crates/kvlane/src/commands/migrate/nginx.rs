//! Upstream blocks of nginx, with the server that passes requests to one of them.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow, bail};
use serde_json::{Value, json};

use super::draft::Draft;

/// A directive: its words, its line, and the directives in its block.
#[derive(Debug)]
struct Directive {
    words: Vec<String>,
    line: usize,
    block: Vec<Directive>,
}

/// Policies that do what a method of balancing does.
const METHODS: &[(&str, &str)] = &[
    ("least_conn", "least_load"),
    ("random", "power_of_two"),
    ("ip_hash", "session_sticky"),
    ("hash", "session_sticky"),
];

/// Reads a value.
type Read = fn(&str) -> Value;

/// Directives with a key that means the same: the directive, the key, how its value is read.
const SAME: &[(&str, &str, Read)] = &[
    ("ssl_certificate", "tls.certificate", text),
    ("ssl_certificate_key", "tls.private_key", text),
    ("ssl_client_certificate", "tls.client_ca", text),
    ("proxy_ssl_trusted_certificate", "tls.upstream_ca", text),
    ("proxy_ssl_certificate", "tls.upstream_certificate", text),
    ("proxy_ssl_certificate_key", "tls.upstream_private_key", text),
    ("client_max_body_size", "server.max_payload_size", bytes),
    ("client_header_timeout", "server.header_timeout", span),
    ("client_body_timeout", "server.body_timeout", span),
    ("proxy_read_timeout", "timeouts.first_byte_timeout", span),
    ("proxy_connect_timeout", "upstream.connect_timeout", span),
    ("proxy_next_upstream_tries", "retry.max_total_retries", number),
];

/// Directives that need no key: kvlane does so by itself.
const BY_ITSELF: &[(&str, &str)] = &[
    ("proxy_buffering", "answers are never buffered"),
    ("proxy_request_buffering", "a request is read before it is placed"),
    ("proxy_http_version", "workers are called with HTTP/1.1"),
    ("proxy_set_header", "headers of clients are passed on"),
    ("proxy_next_upstream", "a request is retried until its first byte"),
    ("zone", "there is one process"),
    ("server_name", "requests for all names are taken"),
    ("keepalive_timeout", "connections of clients are kept"),
    ("chunked_transfer_encoding", "answers are passed on as they come"),
];

/// What the file says; `None` if it has no upstream block.
pub(super) fn read(source: &str) -> Result<Option<Draft>> {
    if !source.split_whitespace().any(|word| word == "upstream") {
        return Ok(None);
    }
    let mut tokens = tokens(source)?;
    tokens.reverse();
    let directives = block(&mut tokens, None)?;
    let all = flat(&directives);
    let upstreams: BTreeMap<&str, &Directive> = all
        .iter()
        .filter(|one| one.words[0] == "upstream" && one.words.len() == 2)
        .map(|one| (one.words[1].as_str(), *one))
        .collect();
    let passes = all.iter().filter(|one| one.words[0] == "proxy_pass");
    let target = |one: &&Directive| {
        let (scheme, rest) = one.words.get(1)?.split_once("://")?;
        let (name, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (name, upstream) = upstreams.get_key_value(name)?;
        Some((scheme.to_owned(), *name, path.to_owned(), *upstream))
    };
    let passed = passes.clone().find_map(target);
    let only = upstreams.iter().next().map(|(name, one)| ("http".to_owned(), *name, String::new(), *one));
    let Some((scheme, name, path, upstream)) = passed.or(only) else { return Ok(None) };
    let mut draft =
        Draft::new("Check it with `kvlane check --config FILE`, start it with `kvlane serve --config FILE`.");
    if !["", "v1/", "v1"].contains(&&*path) {
        draft.remark(format!("requests were passed on under /{path}; kvlane passes paths on as they are"));
    }
    for other in upstreams.keys().filter(|other| **other != name) {
        draft.remark(format!("upstream {other} was left out: one fleet for one gateway"));
    }
    servers(&mut draft, upstream, &scheme)?;
    for one in all.iter().filter(|one| !is_of_other_upstream(one, &upstreams)) {
        directive(&mut draft, one);
    }
    Ok(Some(draft))
}

/// Whether a directive stands in an upstream block: those are read apart.
fn is_of_other_upstream(one: &Directive, upstreams: &BTreeMap<&str, &Directive>) -> bool {
    upstreams.values().any(|upstream| upstream.block.iter().any(|inner| std::ptr::eq(inner, one)))
}

/// The workers, and what the block says of them.
fn servers(draft: &mut Draft, upstream: &Directive, scheme: &str) -> Result<()> {
    let mut workers = Vec::new();
    for one in &upstream.block {
        let said = one.words.join(" ");
        match (&*one.words[0], one.words.get(1)) {
            ("server", Some(address)) if address.starts_with("unix:") => {
                bail!("line {}: {said}: workers are called over TCP", one.line);
            }
            ("server", Some(address)) => {
                let parameters: Vec<&str> = one.words[2..].iter().map(String::as_str).collect();
                if parameters.contains(&"down") {
                    draft.remark(format!("`{said}` was left out"));
                    continue;
                }
                workers.push(json!({"url": format!("{scheme}://{address}")}));
                for parameter in parameters {
                    match parameter.split_once('=') {
                        Some(("max_fails", count)) => {
                            draft.set("breaker.failure_threshold", number(count), parameter)
                        }
                        Some(("fail_timeout", time)) => {
                            draft.set("breaker.cooldown_max", span(time), parameter)
                        }
                        Some(("max_conns", count)) => {
                            draft.set("routing.max_requests_per_endpoint", number(count), parameter);
                        }
                        Some(("weight", _)) => {
                            draft.remark(format!(
                                "`{parameter}` is not needed: how fast a worker is, is learned"
                            ));
                        }
                        _ => draft.remark(format!(
                            "`{said}`: a worker that answers its probes is used like all others"
                        )),
                    }
                }
            }
            ("keepalive", Some(count)) => draft.set("upstream.idle_max", number(count), &said),
            (method, _) if METHODS.iter().any(|(name, _)| *name == method) => {
                let own = METHODS.iter().find(|(name, _)| *name == method).map_or("", |(_, own)| own);
                draft.remark(format!(
                    "`{said}` is nearly `routing.policy: {own}`; the default, fleet_cost, weighs caches and queued tokens"
                ));
            }
            _ => directive(draft, one),
        }
    }
    if workers.is_empty() {
        bail!("line {}: the upstream has no server", upstream.line);
    }
    draft.set("workers", json!(workers), &format!("upstream {}", upstream.words[1]));
    Ok(())
}

/// A directive outside of the upstream block.
fn directive(draft: &mut Draft, one: &Directive) {
    let said = one.words.join(" ");
    let name = &*one.words[0];
    let value = one.words.get(1).map_or("", String::as_str);
    if name == "listen" {
        let address = value.strip_prefix("[::]").map_or(value, |port| port);
        let (host, port) = address.rsplit_once(':').unwrap_or(("", address));
        if let Ok(port) = port.parse::<u16>() {
            draft.set("server.port", json!(port), &said);
            // Without an address, and with `*`, all interfaces.
            let host = if ["", "*"].contains(&host) { "0.0.0.0" } else { host };
            draft.set("server.host", json!(host), "");
        }
    } else if let Some((_, key, read)) = SAME.iter().find(|(of, ..)| *of == name) {
        draft.set(key, read(value), &said);
    } else if let Some((_, why)) = BY_ITSELF.iter().find(|(of, _)| *of == name) {
        draft.remark(format!("`{said}` is not needed: {why}"));
    } else if one.block.is_empty() && name != "proxy_pass" {
        draft.remark(format!("line {}: `{said}` was left out: kvlane has nothing like it", one.line));
    }
}

/// All directives, those in blocks as well.
fn flat(directives: &[Directive]) -> Vec<&Directive> {
    directives.iter().flat_map(|one| std::iter::once(one).chain(flat(&one.block))).collect()
}

/// The directives up to the end of a block, or of the file. `tokens` are in reverse.
fn block(tokens: &mut Vec<(usize, String)>, begun: Option<usize>) -> Result<Vec<Directive>> {
    let (mut directives, mut words) = (Vec::new(), Vec::new());
    while let Some((line, token)) = tokens.pop() {
        match &*token {
            ";" if words.is_empty() => {}
            ";" => directives.push(Directive { words: std::mem::take(&mut words), line, block: Vec::new() }),
            "{" if words.is_empty() => bail!("line {line}: a block has no name"),
            "{" => {
                let words = std::mem::take(&mut words);
                directives.push(Directive { words, line, block: block(tokens, Some(line))? });
            }
            "}" if begun.is_none() || !words.is_empty() => bail!("line {line}: `}}` is unexpected"),
            "}" => return Ok(directives),
            _ => words.push(token),
        }
    }
    match begun {
        Some(line) => Err(anyhow!("line {line}: the block does not end")),
        None if !words.is_empty() => Err(anyhow!("the last line has no `;`")),
        None => Ok(directives),
    }
}

/// The words and signs with their lines; comments are left out.
fn tokens(source: &str) -> Result<Vec<(usize, String)>> {
    let (mut tokens, mut word, mut line) = (Vec::new(), String::new(), 1);
    let mut chars = source.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '#' if word.is_empty() => while chars.next_if(|next| *next != '\n').is_some() {},
            '"' | '\'' => loop {
                match chars.next() {
                    Some(end) if end == char => break,
                    Some(inner) => word.push(inner),
                    None => bail!("line {line}: a quote is not closed"),
                }
            },
            // A variable, as in `${name}`.
            '$' if chars.peek() == Some(&'{') => {
                word.push('$');
                for inner in chars.by_ref() {
                    word.push(inner);
                    if inner == '}' {
                        break;
                    }
                }
            }
            ';' | '{' | '}' | ' ' | '\t' | '\r' | '\n' => {
                if !word.is_empty() {
                    tokens.push((line, std::mem::take(&mut word)));
                }
                if !char.is_whitespace() {
                    tokens.push((line, char.to_string()));
                }
                line += usize::from(char == '\n');
            }
            other => word.push(other),
        }
    }
    if !word.is_empty() {
        tokens.push((line, word));
    }
    Ok(tokens)
}

fn text(value: &str) -> Value {
    json!(value)
}

fn number(value: &str) -> Value {
    value.parse::<u64>().map_or_else(|_| json!(value), |number| json!(number))
}

/// `64m`: bytes.
fn bytes(value: &str) -> Value {
    let (digits, unit) = value.split_at(value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len()));
    let factor = match unit.to_ascii_lowercase().as_str() {
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        _ => 1,
    };
    digits.parse::<u64>().map_or_else(|_| json!(value), |count| json!(count.saturating_mul(factor)))
}

/// `600s`, or `600`: seconds without a unit.
fn span(value: &str) -> Value {
    json!(if value.bytes().all(|byte| byte.is_ascii_digit()) {
        format!("{value}s")
    } else {
        value.to_owned()
    })
}
