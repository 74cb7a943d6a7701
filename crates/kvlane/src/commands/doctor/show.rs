//! Output of the report, as a table or JSON.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::check::{Checks, Verdict};
use super::{Examined, Report};

/// Writes the table, or JSON if requested.
pub(super) fn write(report: &Report, json: Option<&Path>) -> Result<()> {
    match json {
        Some(path) if path == Path::new("-") => return print(&format!("{:#}\n", as_json(report))),
        Some(path) => {
            let text = format!("{:#}\n", as_json(report));
            std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        None => {}
    }
    print(&table(report))
}

fn print(text: &str) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        // The reader has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

fn table(report: &Report) -> String {
    let mut text = String::new();
    if let Some(checks) = report.discovery.as_ref().filter(|checks| !checks.0.is_empty()) {
        section(&mut text, &[Some("the configuration")], checks);
    }
    for Examined { url, facts, checks } in &report.engines {
        section(&mut text, &[Some(url.as_str()), facts.model.as_deref()], checks);
    }
    if !report.fleet.0.is_empty() {
        section(&mut text, &[Some("all engines")], &report.fleet);
    }
    if let Some(checks) = &report.gateway {
        section(&mut text, &[Some("the gateway")], checks);
    }
    let count = |verdict| report.count(verdict);
    let (ok, warnings, failures) = (count(Verdict::Ok), count(Verdict::Warn), count(Verdict::Fail));
    let _ = writeln!(text, "{ok} ok, {warnings} warnings, {failures} failed");
    text
}

fn section(text: &mut String, title: &[Option<&str>], checks: &Checks) {
    let title: Vec<&str> = title.iter().flatten().copied().collect();
    let _ = writeln!(text, "{}", title.join("  "));
    let width = checks.0.iter().map(|check| check.name.len()).max().unwrap_or(0);
    for check in &checks.0 {
        let (verdict, name) = (check.verdict.word(), check.name);
        let _ = writeln!(text, "  {verdict:4}  {name:width$}  {}", check.said);
        if let Some(fix) = &check.fix {
            let _ = writeln!(text, "        {:width$}  -> {fix}", "");
        }
    }
    text.push('\n');
}

fn as_json(report: &Report) -> Value {
    let engine = |Examined { url, facts, checks }: &Examined| {
        let feeds: Vec<Value> = facts
            .feeds
            .iter()
            .map(|feed| {
                json!({"rank": feed.rank, "address": feed.address, "replay": feed.replay, "topic": feed.topic})
            })
            .collect();
        json!({
            "url": url, "engine": facts.kind.map(|kind| kind.name), "version": facts.version,
            "model": facts.model, "role": facts.role, "max_model_len": facts.max_model_len, "block_tokens": facts.block_tokens,
            "kv_events": feeds, "checks": checks,
        })
    };
    let engines: Vec<Value> = report.engines.iter().map(engine).collect();
    let count = |verdict| report.count(verdict);
    json!({
        "schema": "kvlane.doctor/1", "discovery": report.discovery, "engines": engines, "fleet": report.fleet, "gateway": report.gateway,
        "ok": count(Verdict::Ok), "warnings": count(Verdict::Warn), "failures": count(Verdict::Fail),
        "skipped": count(Verdict::Skip),
    })
}
