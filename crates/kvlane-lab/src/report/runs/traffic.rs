//! What runs sent, as far as their records show it.

use std::collections::BTreeSet;
use std::path::Path;

use kvlane_trace::generate::Workload;

use super::Run;
use crate::report::number;
use crate::statistics::paired::same_requests;

/// A trace by its name or file, or a generated workload by its kind.
pub fn workload(trace: Option<&Path>, generate: Option<&Workload>) -> Option<String> {
    let generated = || generate.map(|workload| format!("generated, of the kind {}", workload.kind()));
    trace.map(|trace| trace.display().to_string()).or_else(generated)
}

/// The requests in a sentence: of the first run, and whether the others sent the same. `None` without a record.
pub(super) fn of(runs: &[Run<'_>]) -> Option<String> {
    let (first, others) = runs.split_first()?;
    let sent = described(first)?;
    let apart: Vec<String> = others
        .iter()
        .filter(|other| !same_requests(first.records, other.records))
        .filter_map(|other| Some(format!("{}: {}", other.name, described(other)?)))
        .collect();
    Some(match (others.is_empty(), apart.is_empty()) {
        (true, _) => sent,
        (false, true) => format!("the same in all runs: {sent}"),
        (false, false) => {
            format!("runs with different requests. {}: {sent}; {}", first.name, apart.join("; "))
        }
    })
}

fn described(run: &Run<'_>) -> Option<String> {
    let from_s = run.records.iter().map(|record| record.scheduled_s).reduce(f64::min)?;
    let to_s = run.records.iter().map(|record| record.scheduled_s).fold(from_s, f64::max);
    let prompts: f64 = run.records.iter().map(|record| f64::from(record.prompt_tokens)).sum();
    let sessions = run.records.iter().filter_map(|record| record.session).collect::<BTreeSet<u32>>().len();
    let conversations = match sessions {
        0 => String::new(),
        count => format!(" of {} conversations", number(count as f64)),
    };
    Some(format!(
        "{} requests{conversations} within {} s, {} prompt tokens",
        number(run.records.len() as f64),
        number((to_s - from_s).round()),
        number(prompts)
    ))
}

#[cfg(test)]
mod tests {
    use kvlane_trace::record::Record;

    use super::*;

    #[test]
    fn requests_are_described_once_where_all_runs_sent_the_same() {
        let records = |count: u64, tokens: u32| -> Vec<Record> {
            let record = |id: u64| Record {
                id,
                scheduled_s: id as f64,
                prompt_tokens: tokens,
                session: Some(id as u32 / 2),
                status: 200,
                ..Record::default()
            };
            (0..count).map(record).collect()
        };
        let (few, others) = (records(10, 100), records(10, 5000));
        let run = |name: &str, records| Run { name: String::from(name), records };
        let said = |runs: &[Run<'_>]| of(runs).expect("records");
        assert_eq!(said(&[run("a", &few)]), "10 requests of 5 conversations within 9 s, 1,000 prompt tokens");
        assert!(said(&[run("a", &few), run("b", &few)]).starts_with("the same in all runs: 10 requests"));
        let said = said(&[run("a", &few), run("b", &others)]);
        assert!(said.starts_with("runs with different requests. a: 10 requests"), "{said}");
        assert!(
            said.ends_with("; b: 10 requests of 5 conversations within 9 s, 50,000 prompt tokens"),
            "{said}"
        );
        assert_eq!(of(&[]), None);
    }
}
