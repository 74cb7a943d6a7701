//! The client's machine, and versions of programs.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

/// Timeout for a program to print its version.
const VERSION_MAX: Duration = Duration::from_secs(30);

/// A program's version: the first word with two dots, else its first line.
pub(super) async fn version(words: Vec<String>) -> Option<String> {
    let asked = tokio::task::spawn_blocking(move || Command::new(&words[0]).args(&words[1..]).output().ok());
    let output = tokio::time::timeout(VERSION_MAX, asked).await.ok()?.ok()??;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let is_version = |word: &&str| {
        let word = word.rsplit('/').next().unwrap_or(word);
        word.starts_with(|c: char| c.is_ascii_digit()) && word.matches('.').count() >= 2
    };
    let word = said.split_whitespace().find(is_version).and_then(|word| word.rsplit('/').next());
    word.or_else(|| said.lines().next()).map(str::to_owned)
}

pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The client's machine.
pub(super) fn machine() -> BTreeMap<String, String> {
    let mut found = BTreeMap::from([
        ("cores".to_owned(), cores().to_string()),
        ("system".to_owned(), format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
    ]);
    let cpu = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    found.extend(cpu.map(|cpu| ("cpu".to_owned(), cpu)));
    found
}
