//! Distance of a sample to its original.
//!
//! A sample is for a smaller fleet. The ratio of the rates determines how much smaller: at a quarter of the rate,
//! each quarter of a fleet's caches gets the same load as before, so the sample's hits at a quarter of a capacity are
//! compared with the original's at full capacity. A window keeps the rate, so it is compared at the same capacity.

use kvlane_trace::sample::{Method, sample};
use kvlane_trace::trace::Trace;
use serde::{Deserialize, Serialize};

use crate::report::{Axis, Chart, Mark, Page, Part, Section, Series, Table, number, percent};
use crate::statistics::spread::Spread;
use crate::trace_stats::TraceStats;

/// The original beside the sample. JSON of schema `kvlane.trace-sample/1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fidelity {
    /// `kvlane.trace-sample/1`.
    pub schema: String,
    /// The method.
    pub method: Method,
    /// The requested share of requests.
    pub sample_ratio: f64,
    /// Seed of the draw.
    pub seed: u64,
    /// Each method that was tried.
    pub tried: Vec<Closeness>,
    /// The original.
    pub original: TraceStats,
    /// The sample. Its LRU curve is at the original's capacities times the ratio of the rates.
    pub sample: TraceStats,
}

/// Distance of a sample. All differences are between 0 (the same) and 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Closeness {
    /// The method.
    pub method: Method,
    /// Requests that are kept.
    pub requests: u64,
    /// Rate of the sample over that of the original, as requests meet it (see [`crate::trace_stats::Rate::met`]): replay it
    /// against this share of the fleet.
    pub rate_ratio: f64,
    /// Share of tokens that an infinite cache finds in the sample.
    pub hit_token_share: f64,
    /// Difference of that share to the original's, over the larger of the two.
    pub hit_difference: f64,
    /// The same over the LRU curve: the sum of differences over the sum of what is larger.
    pub lru_difference: f64,
    /// Difference of the shares of hits that come from the own session.
    pub intra_difference: f64,
    /// Difference of burstiness, over the larger: the rate that requests meet over the mean rate. Leaving out
    /// requests at random does not change it, while the variation of inter-arrival times tends to that of independent
    /// arrivals.
    pub burst_difference: f64,
    /// The mean of the differences of p50, p90 and p99 of input, uncached input and output, each over the larger.
    pub length_difference: f64,
    /// The mean of the five.
    pub distance: f64,
}

/// The sample closest to the trace, of the given methods, and the result of each method.
pub fn closest(trace: &Trace, methods: &[Method], share: f64, seed: u64) -> Option<(Trace, Fidelity)> {
    let original = TraceStats::of(trace);
    let mut best: Option<(Trace, Fidelity)> = None;
    let mut tried = Vec::new();
    for &method in methods {
        let sample = sample(trace, method, share, seed);
        let fidelity = Fidelity::of(&original, &sample, method, share, seed);
        tried.extend(fidelity.tried.iter().cloned());
        if best.as_ref().is_none_or(|(_, best)| fidelity.distance() < best.distance()) {
            best = Some((sample, fidelity));
        }
    }
    let (sample, fidelity) = best?;
    Some((sample, Fidelity { tried, ..fidelity }))
}

/// The difference of two sizes over the larger.
fn difference(a: f64, b: f64) -> f64 {
    if a == b { 0.0 } else { (a - b).abs() / a.abs().max(b.abs()) }
}

// === impl Fidelity ===

impl Fidelity {
    /// The name of its JSON.
    pub const SCHEMA: &str = "kvlane.trace-sample/1";

    /// Compares a sample with the figures of its original.
    fn of(original: &TraceStats, sample: &Trace, method: Method, share: f64, seed: u64) -> Self {
        let rate_ratio = TraceStats::at(sample, &[]).rate.met / original.rate.met;
        // With few requests, none may arrive within the same minute.
        let rate_ratio = if rate_ratio.is_finite() && rate_ratio > 0.0 { rate_ratio } else { share };
        let scaled = |tokens: u64| (tokens as f64 * rate_ratio).round() as u64;
        let capacities: Vec<u64> =
            original.cache.lru.iter().map(|point| scaled(point.capacity_tokens)).collect();
        let sample = TraceStats::at(sample, &capacities);
        let closeness = Closeness::of(original, &sample, method, rate_ratio);
        let original = original.clone();
        let tried = vec![closeness];
        Self { schema: Self::SCHEMA.to_owned(), method, sample_ratio: share, seed, tried, original, sample }
    }

    /// Result of the selected method.
    pub fn closeness(&self) -> &Closeness {
        let taken = self.tried.iter().find(|tried| tried.method == self.method);
        taken.expect("the method that was taken was tried")
    }

    /// The distance of the sample from its original, between 0 and 1.
    pub fn distance(&self) -> f64 {
        self.closeness().distance
    }

    /// The report as text for a terminal.
    pub fn to_text(&self) -> String {
        let mut out = self.table().to_text();
        out.extend(["\n", &self.tried_table().to_text()]);
        out
    }

    /// The report as a page. `name` is the original trace.
    pub fn to_page(&self, name: &str) -> Page {
        let closeness = self.closeness();
        let intro = format!(
            "{} of {} requests, cut by {} (seed {}). Replay them against {} of the fleet. Distance {}: 0 is equal, \
             1 is the maximum.",
            number(closeness.requests as f64),
            number(self.original.requests as f64),
            self.method,
            self.seed,
            percent(closeness.rate_ratio),
            number(closeness.distance)
        );
        let sections = vec![
            Section {
                heading: "Original and sample".into(),
                parts: std::iter::once(Part::Table(self.table()))
                    .chain(self.charts().map(Part::Chart))
                    .collect(),
            },
            Section { heading: "Methods".into(), parts: vec![Part::Table(self.tried_table())] },
        ];
        Page {
            title: format!("Sample of {name}"),
            trace: Some(name.to_owned()),
            intro,
            sections,
            ..Page::default()
        }
    }

    fn table(&self) -> Table {
        type Figure = fn(&TraceStats) -> String;
        let rows: [(&str, Figure); 11] = [
            ("requests", |stats| number(stats.requests as f64)),
            ("sessions", |stats| number(stats.sessions.count as f64)),
            ("span (s)", |stats| number(stats.span_s)),
            ("mean rate (requests/s)", |stats| number(stats.rate.mean)),
            ("rate seen by a request (requests/s)", |stats| number(stats.rate.met)),
            ("rate seen by a request / mean rate", |stats| number(stats.rate.met / stats.rate.mean)),
            ("coefficient of variation (CV) of inter-arrival times", |stats| {
                stats.rate.interarrival_cv.map_or("-".into(), number)
            }),
            ("token hit rate (infinite cache)", |stats| percent(stats.cache.hit_token_share)),
            ("block hit rate (infinite cache)", |stats| percent(stats.cache.hit_block_share)),
            ("hits from the same session", |stats| {
                stats.cache.intra_session_share.map_or("-".into(), percent)
            }),
            ("requests after the first turn", |stats| percent(stats.sessions.later_turn_share)),
        ];
        let both = [&self.original, &self.sample];
        let mut table = Table {
            columns: ["figure", "original", "sample"].map(String::from).into(),
            rows: rows
                .iter()
                .map(|(name, figure)| std::iter::once((*name).to_owned()).chain(both.map(figure)).collect())
                .collect(),
        };
        // Every third capacity, counted from the largest, is one per half a power of ten.
        let points: Vec<_> =
            self.original.cache.lru.iter().zip(&self.sample.cache.lru).rev().step_by(3).collect();
        for (original, sample) in points.into_iter().rev().filter(|_| self.original.cache.hit_blocks > 0) {
            let name = format!(
                "hit rate of an LRU cache of {} / {} tokens",
                number(original.capacity_tokens as f64),
                number(sample.capacity_tokens as f64)
            );
            table.rows.push(vec![name, percent(original.hit_token_share), percent(sample.hit_token_share)]);
        }
        let lengths = |stats: &TraceStats| {
            [stats.lengths.input.clone(), stats.lengths.uncached.clone(), stats.lengths.output.clone()]
        };
        let percentiles = |spread: &Option<Spread>| {
            let texts = |spread: &Spread| [spread.p50, spread.p90, spread.p99].map(number).join(" / ");
            spread.as_ref().map_or("-".into(), texts)
        };
        let names = ["input", "uncached input (infinite cache)", "output"];
        for ((name, original), sample) in names.iter().zip(lengths(&self.original)).zip(lengths(&self.sample))
        {
            let name = format!("{name}, p50 / p90 / p99 (tokens)");
            table.rows.push(vec![name, percentiles(&original), percentiles(&sample)]);
        }
        table
    }

    fn tried_table(&self) -> Table {
        let columns = [
            "method",
            "requests",
            "rate",
            "found",
            "hit",
            "LRU",
            "own session",
            "bursts",
            "lengths",
            "distance",
        ];
        let row = |tried: &Closeness| {
            let differences = [
                tried.hit_difference,
                tried.lru_difference,
                tried.intra_difference,
                tried.burst_difference,
                tried.length_difference,
                tried.distance,
            ];
            let head = [
                tried.method.to_string(),
                number(tried.requests as f64),
                format!("x {}", number(tried.rate_ratio)),
                percent(tried.hit_token_share),
            ];
            head.into_iter().chain(differences.map(|difference| format!("{difference:.3}"))).collect()
        };
        Table { columns: columns.map(String::from).into(), rows: self.tried.iter().map(row).collect() }
    }

    fn charts(&self) -> impl Iterator<Item = Chart> {
        let axis = |label: &str, log| Axis { log, ..Axis::linear(label) };
        let series = |name: &str, points, mark| Series { name: name.into(), points, band: Vec::new(), mark };
        let capacities = || self.original.cache.lru.iter().map(|point| point.capacity_tokens as f64);
        let curve = |stats: &TraceStats| {
            capacities().zip(stats.cache.lru.iter().map(|point| point.hit_token_share)).collect()
        };
        let lru = Chart {
            title: "Hit rate of an LRU cache".into(),
            x: axis("capacity of the original's fleet (tokens)", true),
            y: axis("share of input tokens", false),
            series: vec![
                series("original", curve(&self.original), Mark::Line),
                series("sample", curve(&self.sample), Mark::Line),
            ],
        };
        let uncached =
            |stats: &TraceStats| stats.lengths.uncached.as_ref().map(Spread::points).unwrap_or_default();
        let lengths = Chart {
            title: "Uncached input (infinite cache)".into(),
            x: axis("tokens", true),
            y: axis("cumulative share of requests", false),
            series: vec![
                series("original", uncached(&self.original), Mark::Steps),
                series("sample", uncached(&self.sample), Mark::Steps),
            ],
        };
        [lru, lengths].into_iter()
    }
}

// === impl Closeness ===

impl Closeness {
    fn of(original: &TraceStats, sample: &TraceStats, method: Method, rate_ratio: f64) -> Self {
        let points = || original.cache.lru.iter().zip(&sample.cache.lru);
        let points = || points().map(|(a, b)| (a.hit_token_share, b.hit_token_share));
        let apart: f64 = points().map(|(a, b)| (a - b).abs()).sum();
        let larger: f64 = points().map(|(a, b)| a.max(b)).sum();
        let lengths = |stats: &TraceStats| {
            let spreads = [&stats.lengths.input, &stats.lengths.uncached, &stats.lengths.output];
            spreads
                .map(|spread| spread.as_ref().map_or([0.0; 3], |spread| [spread.p50, spread.p90, spread.p99]))
        };
        let (ours, theirs) = (lengths(original), lengths(sample));
        let pairs = ours.as_flattened().iter().zip(theirs.as_flattened());
        let intra = |stats: &TraceStats| stats.cache.intra_session_share.unwrap_or(0.0);
        let burst = |stats: &TraceStats| match stats.rate.mean {
            0.0 => 0.0,
            mean => stats.rate.met / mean,
        };
        let hit_difference = difference(original.cache.hit_token_share, sample.cache.hit_token_share);
        let lru_difference = if larger > 0.0 { apart / larger } else { 0.0 };
        let intra_difference = (intra(original) - intra(sample)).abs();
        let burst_difference = difference(burst(original), burst(sample));
        let length_difference = pairs.map(|(&a, &b)| difference(a, b)).sum::<f64>() / 9.0;
        let all = [hit_difference, lru_difference, intra_difference, burst_difference, length_difference];
        Self {
            method,
            requests: sample.requests,
            rate_ratio,
            hit_token_share: sample.cache.hit_token_share,
            hit_difference,
            lru_difference,
            intra_difference,
            burst_difference,
            length_difference,
            distance: all.iter().sum::<f64>() / all.len() as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use kvlane_trace::session;
    use kvlane_trace::trace::{Builder, TraceRequest};

    use super::*;

    /// Prompts of four blocks that share as many as they are told, one a second.
    fn trace(shared: &[u64]) -> Trace {
        let mut builder = Builder::new(16);
        for (place, &shared) in shared.iter().enumerate() {
            let ids: Vec<u64> =
                (0..4).map(|at| if at < shared { at } else { 100 + place as u64 * 4 + at }).collect();
            let request = TraceRequest {
                arrival_s: place as f64,
                input_tokens: 65,
                output_tokens: 8,
                session: place as u32,
                ..TraceRequest::default()
            };
            builder.push(request, &ids);
        }
        builder.finish()
    }

    /// `sessions` conversations of three turns each, interleaved.
    fn conversations(sessions: u64) -> Trace {
        let mut builder = Builder::new(512);
        for (turn, session) in (0..3).flat_map(|turn| (0..sessions).map(move |session| (turn, session))) {
            let ids: Vec<u64> =
                std::iter::once(0).chain((0..=turn).map(|block| 1 + session * 8 + block)).collect();
            let arrival_s = (turn * sessions + session) as f64;
            let input_tokens = ids.len() as u32 * 512;
            builder.push(TraceRequest { arrival_s, input_tokens, ..TraceRequest::default() }, &ids);
        }
        let mut trace = builder.finish();
        session::infer(&mut trace);
        trace
    }

    #[test]
    fn all_of_a_trace_is_at_no_distance_from_it() {
        let whole = conversations(20);
        for method in Method::ALL {
            let (sample, fidelity) = closest(&whole, &[method], 1.0, 7).unwrap();
            assert_eq!(sample.requests, whole.requests);
            assert_eq!((fidelity.distance(), fidelity.tried[0].rate_ratio), (0.0, 1.0));
        }
    }

    #[test]
    fn the_closest_of_all_is_as_close_as_any() {
        let whole = conversations(80);
        let (_, fidelity) = closest(&whole, &Method::ALL, 0.25, 3).unwrap();
        let distances: Vec<f64> = fidelity.tried.iter().map(|tried| tried.distance).collect();
        assert_eq!(distances.len(), 4);
        assert_eq!(fidelity.distance(), distances.iter().copied().fold(f64::INFINITY, f64::min));
        let (sessions, window) = (&fidelity.tried[0], &fidelity.tried[1]);
        assert!(sessions.hit_difference < 0.1 && window.hit_difference > 0.3, "{:?}", fidelity.tried);
    }

    #[test]
    fn a_sample_that_shares_less_is_as_far_away_as_it_shares_less() {
        let (whole, less) = (trace(&[4; 41]), trace(&[2; 41]));
        let fidelity = Fidelity::of(&TraceStats::of(&whole), &less, Method::Window, 1.0, 0);
        let closeness = fidelity.closeness();
        assert_eq!(
            (closeness.hit_difference, closeness.intra_difference, closeness.burst_difference),
            (0.5, 0.0, 0.0)
        );
        assert_eq!(closeness.rate_ratio, 1.0);
        let differences = closeness.hit_difference + closeness.lru_difference + closeness.length_difference;
        assert!((closeness.distance - differences / 5.0).abs() < 1e-12);
        // 1 token is computed against 33, but for the first request, which is the p99 of so few.
        assert!((closeness.length_difference - 2.0 / 9.0 * 32.0 / 33.0).abs() < 1e-12, "{closeness:?}");
    }

    #[test]
    fn a_quarter_of_the_rate_is_compared_at_a_quarter_of_the_capacity() {
        let whole = trace(&[4; 241]);
        let mut slow = trace(&[4; 61]);
        slow.requests.iter_mut().for_each(|request| request.arrival_s *= 4.0);
        let fidelity = Fidelity::of(&TraceStats::of(&whole), &slow, Method::Sessions, 0.25, 0);
        assert!((fidelity.closeness().rate_ratio - 0.25).abs() < 0.02, "{:?}", fidelity.closeness());
        for (ours, theirs) in fidelity.original.cache.lru.iter().zip(&fidelity.sample.cache.lru) {
            let ratio = theirs.capacity_tokens as f64 / ours.capacity_tokens as f64;
            assert!((ratio - fidelity.closeness().rate_ratio).abs() < 0.02);
        }
    }

    #[test]
    fn a_report_survives_json_and_names_every_method_it_tried() {
        let fidelity =
            Fidelity::of(&TraceStats::of(&trace(&[1; 16])), &trace(&[1; 4]), Method::WindowThin, 0.25, 0);
        let json = serde_json::to_value(&fidelity).unwrap();
        assert_eq!(
            (&json["schema"], &json["method"]),
            (&"kvlane.trace-sample/1".into(), &"window+thin".into())
        );
        let text = fidelity.to_text();
        assert!(text.contains("window+thin") && text.contains("hit rate of an LRU cache of"), "{text}");
        let html = fidelity.to_page("t").to_html();
        assert_eq!(html.matches("<figure data-file=").count(), 2);
    }
}
