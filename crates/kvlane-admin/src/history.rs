//! Figures of the last fifteen minutes, one row per second: every viewer of the dashboard sees the same past.
//!
//! A request costs only a counter or two. Once a second, the admin thread reads the counters and the ledgers and adds
//! a row; the oldest is dropped.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvlane_core::time::Nanos;
use serde_json::{Map, Value, json};
use tokio::time::{MissedTickBehavior, interval};

use kvlane_fleet::Fleet;
use kvlane_fleet::metrics::histogram::{Counts, Histogram};
use kvlane_fleet::pool::ModelPool;
use kvlane_proxy::Proxy;
use kvlane_proxy::outcomes::OUTCOMES;

/// Time between two rows.
const EVERY: Duration = Duration::from_secs(1);
/// Most rows: fifteen minutes.
pub const ROWS_MAX: usize = 900;
/// Rows over which latencies are computed: one second of a small fleet has too few responses for a percentile.
const WINDOW: usize = 10;

/// The last fifteen minutes of a gateway.
#[derive(Default)]
pub struct History {
    past: Mutex<Past>,
}

#[derive(Default)]
struct Past {
    ends: VecDeque<Row<{ OUTCOMES.len() }>>,
    ends_before: [u64; OUTCOMES.len()],
    pools: BTreeMap<String, PoolPast>,
}

/// The rows of one pool, and the state from which the next row is computed.
#[derive(Default)]
struct PoolPast {
    rows: VecDeque<Row<{ COLUMNS.len() }>>,
    totals: Option<Totals>,
    spreads: VecDeque<[Counts; 4]>,
}

/// One row; NaN where there is no value.
struct Row<const N: usize> {
    at: Nanos,
    values: [f32; N],
}

/// Counters of a pool.
#[derive(Clone, Copy)]
struct Totals {
    input_tokens: u64,
    cached_tokens: u64,
    predicted_tokens: u64,
    prompt_tokens: u64,
    engine_queried_tokens: u64,
    engine_hit_tokens: u64,
    engine_external_hit_tokens: u64,
    transferred_tokens: u64,
    splits: u64,
    output_tokens: u64,
    retries: u64,
    shed: u64,
}

/// The values from which a row is computed.
struct Measured {
    /// Seconds since the previous row.
    span_s: f64,
    totals: Totals,
    before: Totals,
    /// Over the last [`WINDOW`] rows: first tokens, further tokens, requests, transfers.
    lately: [Counts; 4],
    /// Seconds of those rows.
    lately_s: f64,
    state: State,
}

/// A pool's state at a moment.
#[derive(Clone, Copy, Default)]
struct State {
    endpoints: usize,
    ready: usize,
    in_flight: usize,
    queued: usize,
    prefill_tokens: u64,
    context_tokens: u64,
    /// Sum and number of the endpoints that report it.
    kv_usage: (f64, usize),
}

/// One column of a pool's rows.
struct Column {
    name: &'static str,
    of: fn(&Measured) -> f64,
}

/// All columns of a pool's rows. Rates are per second.
const COLUMNS: [Column; 27] = [
    Column { name: "requests", of: |row| row.lately[2].total() as f64 / row.lately_s },
    Column { name: "ttft_p50_s", of: |row| row.lately[0].quantile(0.5) },
    Column { name: "ttft_p90_s", of: |row| row.lately[0].quantile(0.9) },
    Column { name: "ttft_p99_s", of: |row| row.lately[0].quantile(0.99) },
    Column { name: "tpot_p50_s", of: |row| row.lately[1].quantile(0.5) },
    Column { name: "tpot_p99_s", of: |row| row.lately[1].quantile(0.99) },
    Column { name: "transfer_p50_s", of: |row| row.lately[3].quantile(0.5) },
    Column { name: "transfer_p99_s", of: |row| row.lately[3].quantile(0.99) },
    Column { name: "duration_p50_s", of: |row| row.lately[2].quantile(0.5) },
    Column { name: "input_tokens", of: |row| row.rate(|totals| totals.input_tokens) },
    Column { name: "cached_tokens", of: |row| row.rate(|totals| totals.cached_tokens) },
    Column { name: "predicted_cached_tokens", of: |row| row.rate(|totals| totals.predicted_tokens) },
    Column { name: "prompt_tokens", of: |row| row.rate(|totals| totals.prompt_tokens) },
    Column { name: "engine_queried_tokens", of: |row| row.rate(|totals| totals.engine_queried_tokens) },
    Column { name: "engine_hit_tokens", of: |row| row.rate(|totals| totals.engine_hit_tokens) },
    Column {
        name: "engine_external_hit_tokens",
        of: |row| row.rate(|totals| totals.engine_external_hit_tokens),
    },
    Column { name: "transferred_tokens", of: |row| row.rate(|totals| totals.transferred_tokens) },
    Column { name: "splits", of: |row| row.rate(|totals| totals.splits) },
    Column { name: "output_tokens", of: |row| row.rate(|totals| totals.output_tokens) },
    Column { name: "retries", of: |row| row.rate(|totals| totals.retries) },
    Column { name: "shed", of: |row| row.rate(|totals| totals.shed) },
    Column { name: "in_flight", of: |row| row.state.in_flight as f64 },
    Column { name: "queued", of: |row| row.state.queued as f64 },
    Column { name: "prefill_tokens", of: |row| row.state.prefill_tokens as f64 },
    Column { name: "context_tokens", of: |row| row.state.context_tokens as f64 },
    Column { name: "kv_usage_ratio", of: |row| row.state.kv_usage.0 / row.state.kv_usage.1 as f64 },
    Column { name: "ready", of: |row| row.state.ready as f64 / row.state.endpoints as f64 },
];

// === impl History ===

impl History {
    /// Adds a row for every pool.
    pub fn note(&self, fleet: &Fleet, ends: [u64; OUTCOMES.len()]) {
        let now = fleet.clock.now();
        let pools: Vec<(Arc<ModelPool>, State)> = fleet
            .pools()
            .into_iter()
            .map(|pool| {
                let state = State::of(&pool);
                (pool, state)
            })
            .collect();
        let mut past = self.past();
        let span_s = past.ends.back().map_or(0.0, |row| (now - row.at).as_secs_f64());
        let values =
            std::array::from_fn(|n| ((ends[n] - past.ends_before[n]) as f64 / span_s.max(0.001)) as f32);
        past.ends_before = ends;
        keep(&mut past.ends, Row { at: now, values });
        for (pool, state) in pools {
            past.pools.entry(pool.model.clone()).or_default().note(now, &pool, state);
        }
    }

    /// The rows after `since`, or all, column by column.
    pub fn describe(&self, now: Nanos, since: Option<Nanos>) -> Value {
        let past = self.past();
        let pools: Vec<Value> = past
            .pools
            .iter()
            .map(|(model, pool)| {
                let mut columns = columns(&pool.rows, since, COLUMNS.map(|column| column.name));
                columns.insert("model".into(), model.as_str().into());
                Value::Object(columns)
            })
            .collect();
        json!({
            "schema": "kvlane.history/1", "now_s": now.as_secs_f64(), "every_s": EVERY.as_secs_f64(), "rows_max": ROWS_MAX,
            "ends": columns(&past.ends, since, OUTCOMES), "pools": pools,
        })
    }

    fn past(&self) -> MutexGuard<'_, Past> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds a row for every pool each second.
pub async fn keep_history(history: Arc<History>, proxy: Arc<Proxy>) {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        history.note(&proxy.fleet, proxy.outcomes.totals());
    }
}

// === impl State ===

impl State {
    fn of(pool: &ModelPool) -> Self {
        pool.router.read(|scheduler| {
            let mut state =
                Self { in_flight: scheduler.in_flight(), queued: scheduler.queued(), ..Self::default() };
            for endpoint in scheduler.pool().endpoints() {
                state.endpoints += 1;
                state.ready += usize::from(endpoint.healthy && !endpoint.draining);
                state.prefill_tokens += endpoint.load.in_flight.prefill_tokens;
                state.context_tokens += endpoint.load.in_flight.context_tokens;
                if let Some((reported, _)) = endpoint.load.reported.filter(|_| endpoint.healthy) {
                    state.kv_usage.0 += f64::from(reported.kv_usage_ratio);
                    state.kv_usage.1 += 1;
                }
            }
            state
        })
    }
}

// === impl PoolPast ===

impl PoolPast {
    fn note(&mut self, now: Nanos, pool: &ModelPool, state: State) {
        let metrics = &pool.metrics;
        let totals = Totals {
            input_tokens: metrics.input_tokens.get(),
            cached_tokens: metrics.cached_tokens.get(),
            predicted_tokens: metrics.predicted_tokens.get(),
            prompt_tokens: metrics.prompt_tokens.get(),
            engine_queried_tokens: metrics.engine_reuse.queried_tokens.get(),
            engine_hit_tokens: metrics.engine_reuse.hit_tokens.get(),
            engine_external_hit_tokens: metrics.engine_reuse.external_hit_tokens.get(),
            transferred_tokens: metrics.transferred_tokens.get(),
            splits: metrics.splits.get(),
            output_tokens: metrics.output_tokens.get(),
            retries: metrics.retries.get(),
            shed: metrics.shed.by_reason().iter().map(|(_, count)| count).sum(),
        };
        let histograms = [&metrics.ttft, &metrics.tpot, &metrics.duration, &metrics.kv_transfer];
        let counts = histograms.map(Histogram::counts);
        if let Some(first) = self.spreads.front() {
            let span = |rows: usize| {
                let before = self.rows.len().checked_sub(rows).and_then(|n| self.rows.get(n));
                before.map_or(EVERY.as_secs_f64(), |row| (now - row.at).as_secs_f64())
            };
            let measured = Measured {
                span_s: span(1),
                totals,
                before: self.totals.unwrap_or(totals),
                lately: std::array::from_fn(|n| counts[n].since(&first[n])),
                lately_s: span(self.spreads.len()).max(0.001),
                state,
            };
            let values = COLUMNS.map(|column| (column.of)(&measured) as f32);
            keep(&mut self.rows, Row { at: now, values });
        }
        self.totals = Some(totals);
        if self.spreads.len() >= WINDOW {
            self.spreads.pop_front();
        }
        self.spreads.push_back(counts);
    }
}

// === impl Measured ===

impl Measured {
    fn rate(&self, of: impl Fn(&Totals) -> u64) -> f64 {
        (of(&self.totals) - of(&self.before)) as f64 / self.span_s.max(0.001)
    }
}

fn keep<const N: usize>(rows: &mut VecDeque<Row<N>>, row: Row<N>) {
    if rows.len() >= ROWS_MAX {
        rows.pop_front();
    }
    rows.push_back(row);
}

/// The rows after `since`, or all: their times, and each column under its name.
fn columns<const N: usize>(
    rows: &VecDeque<Row<N>>,
    since: Option<Nanos>,
    names: [&str; N],
) -> Map<String, Value> {
    let from = since.map_or(0, |since| rows.partition_point(|row| row.at <= since));
    let times: Value = rows.range(from..).map(|row| json!(row.at.as_secs_f64())).collect();
    let mut columns = Map::from_iter([("t_s".to_owned(), times)]);
    for (n, name) in names.into_iter().enumerate() {
        let values = rows.range(from..).map(|row| json!(rounded(row.values[n])));
        columns.insert(name.to_owned(), values.collect());
    }
    columns
}

/// Rounded to four digits, which is enough for a chart; none for NaN.
pub fn rounded(value: f32) -> Option<f64> {
    if !value.is_finite() {
        return None;
    }
    let value = f64::from(value);
    if value == 0.0 {
        return Some(0.0);
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    if digits <= 0 {
        return Some(value.round());
    }
    let scale = 10f64.powi(digits.min(12));
    Some((value * scale).round() / scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_bounded_and_listed_from_a_given_time() {
        let mut rows = VecDeque::new();
        for second in 0..2 * ROWS_MAX as u64 {
            keep(&mut rows, Row { at: Nanos::from_secs(second), values: [second as f32, f32::NAN] });
        }
        assert_eq!(rows.len(), ROWS_MAX);
        let told = columns(&rows, Some(Nanos::from_secs(2 * ROWS_MAX as u64 - 3)), ["a", "b"]);
        assert_eq!(told["t_s"], json!([1798.0, 1799.0]));
        assert_eq!((&told["a"], &told["b"]), (&json!([1798.0, 1799.0]), &json!([null, null])));
        assert_eq!(columns(&rows, None, ["a", "b"])["t_s"].as_array().map(Vec::len), Some(ROWS_MAX));
    }

    #[test]
    fn numbers_are_rounded_to_four_digits() {
        for (value, expect) in [
            (0.1, Some(0.1)),
            (123_456.7, Some(123_457.0)),
            (0.000_123_456, Some(0.000_123_5)),
            (-12.345_6, Some(-12.35)),
            (0.0, Some(0.0)),
            (f32::NAN, None),
            (f32::INFINITY, None),
        ] {
            assert_eq!(rounded(value), expect, "{value}");
        }
        assert!(rounded(f32::MIN_POSITIVE).is_some());
    }
}
