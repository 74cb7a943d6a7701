//! Changes between two runs: requests of equal id that got slower or faster, and the causes.
//!
//! A change is attributed to the first of these causes that the records show, in this order: more time in the
//! router's queue, a client that sent later (each at least half of the change), fewer or more tokens from the cache,
//! an endpoint with more or fewer requests in flight. Other changes are listed as unexplained.

use std::collections::{BTreeMap, HashMap};

use kvlane_trace::record::Record;

use super::Run;
use crate::report::{Axis, Chart, Mark, Part, Series, Table, number, percent};
use crate::statistics::draws::{Estimate, RandomStreams};
use crate::statistics::paired::{Matched, Paired, same_requests};

/// Runs that are compared with the first.
const RUNS_MAX: usize = 4;
/// Requests that are listed, the slower and the faster ones each.
const LISTED: usize = 15;
/// Dots of the chart: those that changed most, and an even choice of the others.
const DOTS_MAX: usize = 3000;
const POINTS: usize = 200;
/// Changes of less than this share of the time are none.
const SAME: f64 = 0.05;
/// Differences in cached tokens below both of these are none: blocks, and a share of the prompt.
const CACHED_MIN: u32 = 64;
const CACHED_SHARE_MIN: f64 = 0.05;

/// One request in both runs.
struct Pair<'a> {
    before: &'a Record,
    after: &'a Record,
    /// Seconds to the first token, after less before.
    change_s: f64,
    /// Requests in flight at its endpoint when it was sent.
    beside: (Option<usize>, Option<usize>),
    why: Why,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    Same,
    Queue,
    Client,
    Cache,
    Busy,
    Unknown,
}

pub(super) fn parts(runs: &[Run<'_>]) -> Vec<Part> {
    let Some((first, others)) = runs.split_first() else { return Vec::new() };
    others.iter().take(RUNS_MAX).flat_map(|other| between(first, other)).collect()
}

fn between(first: &Run<'_>, other: &Run<'_>) -> Vec<Part> {
    if !same_requests(first.records, other.records) {
        return vec![Part::Text(format!(
            "{} and {} sent different requests, which cannot be compared one by one.",
            first.name, other.name
        ))];
    }
    let matched = Matched::of(first.records, other.records, Record::ttft_s);
    let Some(paired) = Paired::of(&[matched], RandomStreams::of(1, 0)) else {
        return vec![Part::Text(format!(
            "{} and {} have no answered request in common.",
            first.name, other.name
        ))];
    };
    let mut pairs = pairs(first.records, other.records);
    pairs.sort_by(|a, b| a.change_s.total_cmp(&b.change_s).then(a.before.id.cmp(&b.before.id)));
    let mut parts = vec![Part::Text(summary(first, other, &paired))];
    parts.push(Part::Chart(dots(first, other, &pairs)));
    parts.push(Part::Chart(ratios(first, other, &pairs)));
    parts.push(Part::Text(
        "Causes, as far as the records show them, with the mean change of each group. The contributions of the \
         groups add up to the change of the overall mean."
            .to_owned(),
    ));
    parts.push(Part::Table(reasons(&pairs)));
    let slower: Vec<&Pair<'_>> =
        pairs.iter().rev().filter(|pair| pair.why != Why::Same && pair.change_s > 0.0).take(LISTED).collect();
    let faster: Vec<&Pair<'_>> =
        pairs.iter().filter(|pair| pair.why != Why::Same && pair.change_s < 0.0).take(LISTED).collect();
    for (word, list) in [("slower", slower), ("faster", faster)] {
        if !list.is_empty() {
            parts.push(Part::Text(format!(
                "The {} requests with the largest change, {word} in {}:",
                list.len(),
                other.name
            )));
            parts.push(Part::Table(listed(&list)));
        }
    }
    parts
}

fn summary(first: &Run<'_>, other: &Run<'_>, paired: &Paired) -> String {
    let ms = |estimate: Estimate| {
        let interval = estimate.interval.map_or(String::new(), |interval| {
            format!(" ({} to {})", signed(interval.low * 1e3), signed(interval.high * 1e3))
        });
        format!("{}{interval} ms", signed(estimate.value * 1e3))
    };
    let share = |estimate: Estimate| {
        let interval = estimate.interval.map_or(String::new(), |interval| {
            format!(" ({} to {})", percent(interval.low), percent(interval.high))
        });
        format!("{}{interval}", percent(estimate.value))
    };
    format!(
        "{} against {}, {} requests answered in both, paired: time to first token changed by {} in the mean \
         and {} in the median; {} got faster. {} were answered only in {}, {} only in {}. In brackets, 95 % intervals over \
         the requests.",
        other.name,
        first.name,
        number(paired.matched as f64),
        ms(paired.mean_difference),
        ms(paired.median_difference),
        share(paired.faster_share),
        number(paired.lost as f64),
        first.name,
        number(paired.gained as f64),
        other.name
    )
}

fn signed(value: f64) -> String {
    format!("{}{}", if value > 0.0 { "+" } else { "" }, number(value))
}

/// Requests that both runs answered.
fn pairs<'a>(before: &'a [Record], after: &'a [Record]) -> Vec<Pair<'a>> {
    let answered = |record: &&Record| record.is_ok() && record.ttft_s().is_some();
    let by_id: HashMap<u64, &Record> =
        before.iter().filter(answered).map(|record| (record.id, record)).collect();
    let (busy_before, busy_after) = (InFlight::of(before), InFlight::of(after));
    let pair = |after: &'a Record| {
        let before = *by_id.get(&after.id)?;
        let change_s = after.ttft_s()? - before.ttft_s()?;
        let beside = (busy_before.beside(before), busy_after.beside(after));
        let why = why(before, after, change_s, beside);
        Some(Pair { before, after, change_s, beside, why })
    };
    after.iter().filter(answered).filter_map(pair).collect()
}

/// When requests began and ended at each endpoint.
struct InFlight<'a>(BTreeMap<&'a str, (Vec<f64>, Vec<f64>)>);

// === impl InFlight ===

impl<'a> InFlight<'a> {
    fn of(records: &'a [Record]) -> Self {
        let mut times: BTreeMap<&str, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
        for record in records {
            if let Some(endpoint) = record.endpoint.as_deref() {
                let of_endpoint = times.entry(endpoint).or_default();
                of_endpoint.0.push(record.sent_s);
                of_endpoint.1.push(record.end_s);
            }
        }
        for (sent, ends) in times.values_mut() {
            sent.sort_unstable_by(f64::total_cmp);
            ends.sort_unstable_by(f64::total_cmp);
        }
        Self(times)
    }

    /// Others in flight at a request's endpoint when it was sent.
    fn beside(&self, record: &Record) -> Option<usize> {
        let (sent, ends) = self.0.get(record.endpoint.as_deref()?)?;
        let at = record.sent_s;
        let begun = sent.partition_point(|&time| time < at);
        Some(begun.saturating_sub(ends.partition_point(|&time| time <= at)))
    }
}

fn why(before: &Record, after: &Record, change_s: f64, beside: (Option<usize>, Option<usize>)) -> Why {
    let ttft_s = before.ttft_s().unwrap_or(0.0).max(after.ttft_s().unwrap_or(0.0));
    if change_s.abs() <= SAME * ttft_s {
        return Why::Same;
    }
    let slower = change_s > 0.0;
    let explains = |difference_s: f64| difference_s * change_s.signum() >= change_s.abs() / 2.0;
    let queue_s = |record: &Record| record.stages_s.get("queue").copied().unwrap_or(0.0);
    if explains(queue_s(after) - queue_s(before)) {
        return Why::Queue;
    }
    if explains(after.lag_s() - before.lag_s()) {
        return Why::Client;
    }
    if let (Some(was), Some(is)) = (before.cached_tokens, after.cached_tokens) {
        let share = CACHED_SHARE_MIN * f64::from(before.prompt_tokens);
        let enough = was.abs_diff(is) >= CACHED_MIN && f64::from(was.abs_diff(is)) >= share;
        if enough && (is < was) == slower {
            return Why::Cache;
        }
    }
    match beside {
        (Some(was), Some(is)) if is != was && (is > was) == slower => Why::Busy,
        _ => Why::Unknown,
    }
}

// === impl Why ===

impl Why {
    fn words(self, slower: bool) -> &'static str {
        match (self, slower) {
            (Self::Same, _) => "unchanged within 5 %",
            (Self::Queue, true) => "waited longer in the queue",
            (Self::Queue, false) => "waited less in the queue",
            (Self::Client, true) => "the client sent it later",
            (Self::Client, false) => "the client sent it sooner",
            (Self::Cache, true) => "less came from the cache",
            (Self::Cache, false) => "more came from the cache",
            (Self::Busy, true) => "more requests in flight",
            (Self::Busy, false) => "fewer requests in flight",
            (Self::Unknown, true) => "slower, unexplained",
            (Self::Unknown, false) => "faster, unexplained",
        }
    }
}

/// The requests by what their change is put down to.
fn reasons(pairs: &[Pair<'_>]) -> Table {
    #[derive(Default)]
    struct Group {
        count: f64,
        moved: f64,
        change_s: f64,
        cached: f64,
    }
    let mut groups: BTreeMap<(Why, bool), Group> = BTreeMap::new();
    for pair in pairs {
        let slower = pair.why != Why::Same && pair.change_s > 0.0;
        let group = groups.entry((pair.why, slower)).or_default();
        group.count += 1.0;
        group.moved += f64::from(u8::from(pair.before.endpoint != pair.after.endpoint));
        group.change_s += pair.change_s;
        let cached = |record: &Record| f64::from(record.cached_tokens.unwrap_or(0));
        group.cached += cached(pair.after) - cached(pair.before);
    }
    let all = pairs.len() as f64;
    let mut groups: Vec<((Why, bool), Group)> = groups.into_iter().collect();
    groups.sort_by(|a, b| b.1.change_s.abs().total_cmp(&a.1.change_s.abs()));
    let columns = [
        "why",
        "requests",
        "share",
        "at another endpoint",
        "cached tokens",
        "TTFT ms",
        "contribution to the mean ms",
    ];
    let row = |((why, slower), group): ((Why, bool), Group)| {
        vec![
            why.words(slower).to_owned(),
            number(group.count),
            percent(group.count / all),
            percent(group.moved / group.count),
            signed((group.cached / group.count).round()),
            signed(group.change_s / group.count * 1e3),
            signed(group.change_s / all * 1e3),
        ]
    };
    Table { columns: columns.map(str::to_owned).into(), rows: groups.into_iter().map(row).collect() }
}

fn listed(pairs: &[&Pair<'_>]) -> Table {
    let columns = [
        "request",
        "TTFT s",
        "then",
        "why",
        "endpoint",
        "then",
        "prompt tokens",
        "cached",
        "then",
        "in flight",
        "then",
    ];
    let text = |value: Option<f64>| value.map_or("-".to_owned(), number);
    let row = |pair: &&Pair<'_>| {
        let Pair { before, after, change_s, beside, why } = pair;
        let endpoint = |record: &Record| record.endpoint.clone().unwrap_or_else(|| "-".to_owned());
        let then = if before.endpoint == after.endpoint { "same".to_owned() } else { endpoint(after) };
        vec![
            before.id.to_string(),
            text(before.ttft_s()),
            text(after.ttft_s()),
            why.words(*change_s > 0.0).to_owned(),
            endpoint(before),
            then,
            number(f64::from(before.prompt_tokens)),
            text(before.cached_tokens.map(f64::from)),
            text(after.cached_tokens.map(f64::from)),
            text(beside.0.map(|count| count as f64)),
            text(beside.1.map(|count| count as f64)),
        ]
    };
    Table { columns: columns.map(str::to_owned).into(), rows: pairs.iter().map(row).collect() }
}

/// Each request as a dot: before across, after up. `pairs` are in the order of their changes.
fn dots(first: &Run<'_>, other: &Run<'_>, pairs: &[Pair<'_>]) -> Chart {
    let end = DOTS_MAX / 6;
    let stride = pairs.len().div_ceil(DOTS_MAX).max(1);
    let chosen = |place: usize| place < end || place + end >= pairs.len() || place.is_multiple_of(stride);
    let mut series: BTreeMap<bool, Vec<(f64, f64)>> = BTreeMap::new();
    let (mut low, mut high) = (f64::INFINITY, 0.0f64);
    for (_, pair) in pairs.iter().enumerate().filter(|(place, _)| chosen(*place)) {
        let (Some(was), Some(is)) = (pair.before.ttft_s(), pair.after.ttft_s()) else { continue };
        series.entry(pair.before.endpoint != pair.after.endpoint).or_default().push((was, is));
        if was > 0.0 && is > 0.0 {
            (low, high) = (low.min(was).min(is), high.max(was).max(is));
        }
    }
    let mut series: Vec<Series> = series
        .into_iter()
        .map(|(moved, mut points)| {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let name = if moved { "at another endpoint" } else { "at the same endpoint" };
            Series { name: name.to_owned(), points, mark: Mark::Dots, ..Series::default() }
        })
        .collect();
    if low < high {
        let name = "unchanged".to_owned();
        series.push(Series { name, points: vec![(low, low), (high, high)], ..Series::default() });
    }
    Chart {
        title: format!("Requests in both runs; above the line: slower in {}", other.name),
        x: Axis::log(format!("TTFT in {} (s)", first.name)),
        y: Axis::log(format!("TTFT in {} (s)", other.name)),
        series,
    }
}

/// Cumulative distribution of the ratio of latencies.
fn ratios(first: &Run<'_>, other: &Run<'_>, pairs: &[Pair<'_>]) -> Chart {
    let ratio = |pair: &Pair<'_>| Some(pair.after.ttft_s()? / pair.before.ttft_s()?);
    let mut ratios: Vec<f64> =
        pairs.iter().filter_map(ratio).filter(|ratio| *ratio > 0.0 && ratio.is_finite()).collect();
    ratios.sort_unstable_by(f64::total_cmp);
    let count = ratios.len();
    let shown = count.min(POINTS);
    let point = |place: usize| {
        let index = if shown > 1 { place * (count - 1) / (shown - 1) } else { 0 };
        ((index + 1) as f64 / count as f64 * 100.0, ratios[index])
    };
    Chart {
        title: format!("Time to first token, {} over {}", other.name, first.name),
        x: Axis::linear("Requests, sorted by change (%)"),
        y: Axis::log("Ratio of latencies"),
        series: vec![
            Series {
                name: "after over before".to_owned(),
                points: (0..shown).map(point).collect(),
                ..Series::default()
            },
            Series {
                name: "unchanged".to_owned(),
                points: vec![(0.0, 1.0), (100.0, 1.0)],
                ..Series::default()
            },
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: u64, sent_s: f64, ttft_s: f64, endpoint: &str, cached: u32) -> Record {
        Record {
            id,
            scheduled_s: sent_s,
            sent_s,
            first_token_s: Some(sent_s + ttft_s),
            end_s: sent_s + ttft_s + 1.0,
            prompt_tokens: 1000,
            cached_tokens: Some(cached),
            output_tokens: 2,
            endpoint: Some(endpoint.to_owned()),
            status: 200,
            ..Record::default()
        }
    }

    fn whys(before: &[Record], after: &[Record]) -> Vec<(u64, Why)> {
        pairs(before, after).iter().map(|pair| (pair.before.id, pair.why)).collect()
    }

    #[test]
    fn each_change_is_put_down_to_what_the_records_show() {
        let alone = |id: u64, ttft_s, cached| record(id, id as f64 * 100.0, ttft_s, "a", cached);
        let before = [
            alone(0, 1.0, 500),
            alone(1, 1.0, 500),
            alone(2, 1.0, 500),
            alone(3, 1.0, 500),
            alone(4, 1.0, 500),
        ];
        let queued = Record { stages_s: [("queue".to_owned(), 0.9)].into(), ..alone(2, 2.0, 0) };
        let late = Record { sent_s: 301.0, ..alone(3, 2.0, 500) };
        let after = [alone(0, 1.02, 0), alone(1, 2.0, 0), queued, late, alone(4, 2.0, 520)];
        let expect = [Why::Same, Why::Cache, Why::Queue, Why::Client, Why::Unknown];
        assert_eq!(whys(&before, &after), (0..5).zip(expect).collect::<Vec<_>>());
        // What explains slower does not explain faster.
        let faster = [alone(1, 0.2, 0)];
        assert_eq!(whys(&before, &faster), [(1, Why::Unknown)]);
    }

    #[test]
    fn a_busier_endpoint_is_told_from_a_quiet_one() {
        let before = [record(0, 0.0, 1.0, "a", 0), record(1, 0.5, 1.0, "b", 0)];
        let after = [record(0, 0.0, 1.0, "a", 0), record(1, 0.5, 3.0, "a", 0)];
        assert_eq!(whys(&before, &after), [(0, Why::Same), (1, Why::Busy)]);
    }

    #[test]
    fn what_the_groups_add_is_the_whole_change() {
        let before: Vec<Record> = (0..40).map(|id| record(id, id as f64, 1.0, "a", 500)).collect();
        let after: Vec<Record> = (0..40)
            .map(|id| record(id, id as f64, 0.5 + id as f64 * 0.05, "b", (id as u32 * 37) % 900))
            .collect();
        let pairs = pairs(&before, &after);
        let whole = pairs.iter().map(|pair| pair.change_s).sum::<f64>() / 40.0 * 1e3;
        let added: f64 = reasons(&pairs).rows.iter().map(|row| row[6].parse::<f64>().unwrap()).sum();
        assert!((whole - added).abs() < 2.0, "{whole} {added}");
        let listed: Vec<Part> =
            between(&Run { name: "x".into(), records: &before }, &Run { name: "y".into(), records: &after });
        let tables = listed.iter().filter(|part| matches!(part, Part::Table(_))).count();
        assert_eq!(tables, 3, "why, slower, faster");
    }

    #[test]
    fn runs_without_a_request_in_common_say_so() {
        let (before, other) = ([record(0, 0.0, 1.0, "a", 0)], [record(1, 0.0, 1.0, "a", 0)]);
        let failed = [Record { status: 503, ..record(0, 0.0, 1.0, "a", 0) }];
        let run = |name: &str, records| Run { name: String::from(name), records };
        let said = |after| match &between(&run("x", &before), &run("y", after))[..] {
            [Part::Text(text)] => text.clone(),
            parts => panic!("{parts:?}"),
        };
        assert_eq!(said(&failed), "x and y have no answered request in common.");
        assert_eq!(said(&other), "x and y sent different requests, which cannot be compared one by one.");
    }
}
