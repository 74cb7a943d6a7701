//! Time of requests by stage.

use std::collections::BTreeMap;

use kvlane_trace::record::Record;
use kvlane_wire::server_timing::Stage;
use serde::Serialize;

use crate::statistics::summary::Percentiles;

/// From the server's last stage to the first token: the network, and this client.
pub const REST: &str = "rest";
/// From the first token to the end.
pub const ANSWER: &str = "answer";

/// One stage, over the answered requests that went through it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageTimes {
    /// Its name in `Server-Timing`, [`REST`] or [`ANSWER`].
    pub stage: String,
    /// Number of requests that went through it.
    pub requests: u64,
    /// Its duration, in seconds.
    pub seconds: Percentiles,
}

/// The stages of all answered requests, in order; stages that kvlane does not have follow its own. Empty if no answer
/// has stages.
pub fn stages(records: &[Record]) -> Vec<StageTimes> {
    let mut times: BTreeMap<(usize, &str), Vec<f64>> = BTreeMap::new();
    let place = |name: &str| Stage::ALL.iter().position(|stage| stage.name() == name);
    for record in records.iter().filter(|record| record.is_ok() && !record.stages_s.is_empty()) {
        for (name, &seconds) in &record.stages_s {
            times.entry((place(name).unwrap_or(Stage::ALL.len()), name)).or_default().push(seconds);
        }
        let Some(first_s) = record.first_token_s else { continue };
        let told_s: f64 = record.stages_s.values().sum();
        let rest_s = (first_s - record.sent_s - told_s).max(0.0);
        times.entry((Stage::ALL.len() + 1, REST)).or_default().push(rest_s);
        times.entry((Stage::ALL.len() + 2, ANSWER)).or_default().push(record.end_s - first_s);
    }
    let row = |((_, stage), mut seconds): ((usize, &str), Vec<f64>)| {
        let requests = seconds.len() as u64;
        Percentiles::of(&mut seconds).map(|seconds| StageTimes { stage: stage.to_owned(), requests, seconds })
    };
    times.into_iter().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_stand_in_their_order_and_what_is_left_before_the_first_token_is_the_rest() {
        let record = |stages: &[(&str, f64)], status| Record {
            sent_s: 1.0,
            first_token_s: Some(2.0),
            end_s: 5.0,
            status,
            stages_s: stages.iter().map(|&(name, seconds)| (name.to_owned(), seconds)).collect(),
            ..Record::default()
        };
        let records = [
            record(&[("engine", 0.5), ("queue", 0.25), ("proxy", 0.125)], 200),
            record(&[("engine", 0.75)], 200),
            record(&[("engine", 99.0)], 503),
            record(&[], 200),
        ];
        let found = stages(&records);
        let row = |row: &StageTimes| (row.stage.clone(), row.requests, row.seconds.max);
        let expect =
            [("queue", 1, 0.25), ("engine", 2, 0.75), ("proxy", 1, 0.125), (REST, 2, 0.25), (ANSWER, 2, 3.0)];
        assert_eq!(
            found.iter().map(row).collect::<Vec<_>>(),
            expect.map(|(name, n, s)| (name.to_owned(), n, s))
        );
        assert!(stages(&records[3..]).is_empty());
    }
}
