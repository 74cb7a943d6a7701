//! `/metrics` under vLLM's names, as written by vLLM 0.32: the ones that routers and dashboards read.

use std::fmt::{Display, Write};

use kvlane_core::adapters::AdapterReport;
use kvlane_core::request::AdapterKey;
use kvlane_sim::EngineStats;
use kvlane_wire::disaggregation::Connector;

use crate::api::Shared;
use crate::transfer::config::KvRole;
use crate::transfer::link::LinkCounts;

/// Counts of observations by upper bound, as in Prometheus.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    bounds: &'static [f64],
    /// One more than bounds: the last is for larger values.
    counts: Vec<u64>,
    sum: f64,
}

/// Values of `/metrics` beyond the engine's own counters. Times are the engine's, in seconds.
#[derive(Clone, Debug)]
pub(crate) struct Served {
    pub(crate) finished: u64,
    pub(crate) ttft: Histogram,
    pub(crate) itl: Histogram,
    pub(crate) e2e: Histogram,
    pub(crate) transfers: LinkCounts,
}

/// vLLM's buckets of `time_to_first_token_seconds`.
const TTFT_BOUNDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];

/// vLLM's buckets of `e2e_request_latency_seconds`.
const E2E_BOUNDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];

/// vLLM's buckets of `inter_token_latency_seconds`.
const ITL_BOUNDS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];

impl Histogram {
    pub(crate) fn ttft() -> Self {
        Self::new(TTFT_BOUNDS)
    }

    pub(crate) fn e2e() -> Self {
        Self::new(E2E_BOUNDS)
    }

    pub(crate) fn itl() -> Self {
        Self::new(ITL_BOUNDS)
    }

    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    pub(crate) fn observe(&mut self, value: f64) {
        self.observe_times(value, 1);
    }

    /// The same value so many times.
    pub(crate) fn observe_times(&mut self, value: f64, times: u32) {
        self.counts[self.bounds.partition_point(|&bound| bound < value)] += u64::from(times);
        self.sum += value * f64::from(times);
    }
}

/// The whole page: of each metric, a line for each engine.
pub(crate) fn render(shared: &Shared) -> String {
    let (stats, served): (Vec<EngineStats>, Vec<Served>) =
        shared.drivers.iter().map(|driver| driver.stats()).unzip();
    let config = &shared.config;
    let mut page = Page::new(&config.names[0], stats.len());
    page.row("num_requests_running", "gauge", "Requests in the batch.", stats.iter().map(|s| s.running));
    page.row("num_requests_waiting", "gauge", "Requests in the queue.", stats.iter().map(|s| s.waiting));
    page.row(
        "kv_cache_usage_perc",
        "gauge",
        "Share of KV blocks in use, 0 to 1.",
        stats.iter().map(|s| f64::from(s.kv_blocks_used) / f64::from(s.kv_blocks.max(1))),
    );
    page.row(
        "prefix_cache_queries_total",
        "counter",
        "Prompt tokens looked up in the cache.",
        stats.iter().map(|s| s.prefix_queried_tokens),
    );
    page.row(
        "prefix_cache_hits_total",
        "counter",
        "Prompt tokens found in the cache.",
        stats.iter().map(|s| s.prefix_hit_tokens),
    );
    page.row(
        "prompt_tokens_total",
        "counter",
        "Prompt tokens, cached ones included.",
        stats.iter().map(|s| s.prompt_tokens),
    );
    page.row(
        "generation_tokens_total",
        "counter",
        "Output tokens.",
        stats.iter().map(|s| s.generation_tokens),
    );
    page.row("num_preemptions_total", "counter", "Sequences preempted.", stats.iter().map(|s| s.preemptions));
    page.row(
        "request_success_total",
        "counter",
        "Requests answered in full.",
        served.iter().map(|s| s.finished),
    );
    page.histogram(
        "time_to_first_token_seconds",
        "Engine seconds from arrival to first token, without the network.",
        served.iter().map(|s| &s.ttft),
    );
    page.histogram(
        "inter_token_latency_seconds",
        "Engine seconds between output tokens.",
        served.iter().map(|s| &s.itl),
    );
    page.histogram(
        "e2e_request_latency_seconds",
        "Engine seconds from arrival to end.",
        served.iter().map(|s| &s.e2e),
    );
    if matches!(config.connector, Some(Connector::Nixl | Connector::NixlPush)) {
        transfers(&mut page, shared, &stats, &served);
    }
    page.cache_config(config.engine.block_tokens, config.engine.blocks);
    adapters(&mut page, shared);
    page.out
}

/// The adapters of requests in flight, of all ranks together.
fn adapters(page: &mut Page, shared: &Shared) {
    let reports: Vec<_> = shared.drivers.iter().filter_map(|driver| driver.adapter_report()).collect();
    let Some(slots) = reports.iter().find_map(|report| report.slots) else { return };
    let listed = shared.adapters.all();
    let names = |of: fn(&AdapterReport) -> &[AdapterKey]| {
        let is_there = |name: &&String| {
            let key = AdapterKey::named(name.as_bytes());
            reports.iter().any(|report| of(report).contains(&key))
        };
        listed.iter().filter(is_there).map(|name| escaped(name)).collect::<Vec<_>>().join(",")
    };
    page.head("lora_requests_info", "gauge", "Adapters of requests.");
    let (running, waiting) = (names(|report| &report.running), names(|report| &report.waiting));
    // Writing to a string cannot fail.
    let _ = writeln!(
        page.out,
        "vllm:lora_requests_info{{max_lora=\"{slots}\",running_lora_adapters=\"{running}\",\
         waiting_lora_adapters=\"{waiting}\"}} {}",
        shared.unix_secs()
    );
}

/// A label's value as the text format wants it.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// What vLLM reports with a NIXL connector. Leases are counted by API: they are in the first rank's lines.
fn transfers(page: &mut Page, shared: &Shared, stats: &[EngineStats], served: &[Served]) {
    let first = |count: u64| (0..stats.len()).map(move |rank| if rank == 0 { count } else { 0 });
    let leases = shared.store.counts();
    page.row(
        "external_prefix_cache_hits_total",
        "counter",
        "Prompt tokens that came from another engine.",
        stats.iter().map(|s| s.remote_tokens),
    );
    page.row(
        "nixl_xfer_time_seconds_sum",
        "counter",
        "Engine seconds of transfers.",
        served.iter().map(|s| s.transfers.seconds),
    );
    page.row(
        "nixl_xfer_time_seconds_count",
        "counter",
        "Transfers to this engine.",
        served.iter().map(|s| s.transfers.ended),
    );
    page.row(
        "nixl_num_failed_transfers_total",
        "counter",
        "Transfers to this engine that failed.",
        served.iter().map(|s| s.transfers.failed),
    );
    if shared.config.transfer.role != KvRole::Prefill {
        page.row(
            "num_requests_kv_fetch_by_stage",
            "gauge",
            "Requests whose KV blocks are fetched; engines that only produce blocks do not have it.",
            stats.iter().map(|_| 0),
        );
    }
    page.row(
        "nixl_num_kv_expired_reqs_total",
        "counter",
        "First legs whose lease ended.",
        first(leases.expired),
    );
    page.row(
        "nixl_num_notifications_after_expiry_total",
        "counter",
        "Second legs that came after the end of the lease.",
        first(leases.late),
    );
}

/// A page under construction. Writing to a `String` cannot fail, so results of `write!` are ignored here and nowhere
/// else.
struct Page {
    out: String,
    /// Label pairs of each engine's lines.
    labels: Vec<String>,
}

impl Page {
    /// For this many engines. The model's name is escaped as the text format wants it.
    fn new(model: &str, engines: usize) -> Self {
        let model = escaped(model);
        let labels = (0..engines).map(|rank| format!("engine=\"{rank}\",model_name=\"{model}\"")).collect();
        Self { out: String::with_capacity(8192), labels }
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.out, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}");
    }

    fn row(&mut self, name: &str, kind: &str, help: &str, values: impl Iterator<Item = impl Display>) {
        self.head(name, kind, help);
        for (labels, value) in self.labels.iter().zip(values) {
            let _ = writeln!(self.out, "vllm:{name}{{{labels}}} {value}");
        }
    }

    fn histogram<'a>(&mut self, name: &str, help: &str, histograms: impl Iterator<Item = &'a Histogram>) {
        self.head(name, "histogram", help);
        for (labels, histogram) in self.labels.iter().zip(histograms) {
            let mut below = 0;
            for (index, count) in histogram.counts.iter().enumerate() {
                below += count;
                let bound = histogram.bounds.get(index).map_or("+Inf".into(), f64::to_string);
                let _ = writeln!(self.out, "vllm:{name}_bucket{{{labels},le=\"{bound}\"}} {below}");
            }
            let _ = writeln!(self.out, "vllm:{name}_sum{{{labels}}} {}", histogram.sum);
            let _ = writeln!(self.out, "vllm:{name}_count{{{labels}}} {below}");
        }
    }

    fn cache_config(&mut self, block_tokens: u32, blocks: u32) {
        self.head("cache_config_info", "gauge", "Size of the KV cache.");
        let tokens = u64::from(block_tokens) * u64::from(blocks);
        for rank in 0..self.labels.len() {
            let _ = writeln!(
                self.out,
                "vllm:cache_config_info{{block_size=\"{block_tokens}\",enable_prefix_caching=\"True\",\
                 engine=\"{rank}\",kv_cache_size_tokens=\"{tokens}\",num_gpu_blocks=\"{blocks}\"}} 1"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_a_bound_as_below_it() {
        let mut histogram = Histogram::new(&[1.0, 2.0]);
        [0.5, 1.0, 1.5, 9.0].into_iter().for_each(|value| histogram.observe(value));
        let mut page = Page { out: String::new(), labels: vec!["a=\"b\"".into()] };
        page.histogram("h", "help", [&histogram].into_iter());
        let expected = "# HELP vllm:h help\n# TYPE vllm:h histogram\nvllm:h_bucket{a=\"b\",le=\"1\"} 2\n\
            vllm:h_bucket{a=\"b\",le=\"2\"} 3\nvllm:h_bucket{a=\"b\",le=\"+Inf\"} 4\nvllm:h_sum{a=\"b\"} 12\n\
            vllm:h_count{a=\"b\"} 4\n";
        assert_eq!(page.out, expected);
    }

    #[test]
    fn a_models_name_cannot_break_the_format() {
        assert_eq!(Page::new("a\"b\\c", 2).labels[1], r#"engine="1",model_name="a\"b\\c""#);
    }
}
