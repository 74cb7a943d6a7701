//! Comparison with other policies: on the recorded rows of each decision, and in a simulated fleet.
//!
//! The first is exact but ignores consequences: the same rows, another policy. The second includes consequences but
//! is a model: engines as fast as the recording's, the recording's requests, each policy from empty caches. The
//! model's error is measured on the policy that ran, by comparing simulated with recorded figures.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use kvlane_core::disaggregation::Part;
use kvlane_core::index::{approx, exact};
use kvlane_core::policy::PolicyConfig;
use kvlane_core::rates::Rates;
use kvlane_core::recording::Replay;
use kvlane_core::router;
use kvlane_core::scheduler::{self, Agreement, Shadowed};
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingModel;
use kvlane_lab::figures::{Figures, Judgement, mean, play, seed_intervals};
use kvlane_lab::statistics::ci::Interval;
use kvlane_sim::engine::EngineConfig;
use kvlane_sim::fault::EventFeed;
use kvlane_sim::transfer::TransferConfig;
use kvlane_sim::workload::Drive;
use kvlane_sim::world::{GatewaysConfig, Hints, ReportFeed, Send, World, WorldConfig};
use kvlane_trace::format::{self, Options};
use kvlane_trace::plan::Plan;
use kvlane_trace::trace::Trace;
use serde_json::{Value, json};

use super::files::Files;
use super::summary::{EndpointSeen, Summary};

/// The default engine.
const PRESET: &str = "llama-3.1-8b@h100";
/// Figures that are compared.
const SHOWN: [(&str, &str); 5] = [
    ("ttft_mean_s", "TTFT mean s"),
    ("ttft_p90_s", "p90 s"),
    ("e2e_mean_s", "E2E mean s"),
    ("cached_share", "cached"),
    ("answered", "answered"),
];

/// Policies to compare, the one that ran first.
pub(super) struct Compared {
    machine: String,
    ran: Simulated,
    /// Recorded figures of the policy that ran, if available.
    seen: Vec<(&'static str, f64)>,
    others: Vec<Other>,
    seeds: u32,
}

struct Other {
    simulated: Simulated,
    shadowed: Option<Shadowed>,
}

struct Simulated {
    policy: &'static str,
    figures: Figures,
    intervals: std::collections::BTreeMap<String, Interval>,
}

/// The simulated fleet.
struct Machines {
    engines: Vec<EngineConfig>,
    parts: Vec<Part>,
    link: TransferConfig,
    /// Whether there are KV events.
    knows: bool,
}

/// Makes the comparison.
pub(super) fn compare(
    files: &Files,
    summary: &Summary,
    others: &[PolicyConfig],
    preset: Option<&str>,
    seeds: u32,
) -> Result<Compared> {
    let config = summary.config.as_ref().context("the recording is empty")?;
    ensure!(
        !summary.endpoints.is_empty(),
        "the recording ends without endpoints, so there is no fleet to simulate"
    );
    let trace = workload(files)?;
    let base = match (preset, &config.timing) {
        (Some(preset), _) => TimingModel::preset(preset).with_context(|| format!("--preset {preset}"))?,
        (None, Some(timing)) => (**timing).clone(),
        (None, None) => TimingModel::preset(PRESET)?,
    };
    let engines: Vec<EngineConfig> = summary
        .endpoints
        .iter()
        .map(|EndpointSeen { rates, capacity_tokens, .. }| {
            let block_tokens = summary.block_tokens.clamp(1, 512);
            let mut engine = EngineConfig::vllm(as_fast_as(&base, rates), block_tokens, 0.9);
            if let Some(tokens) = capacity_tokens {
                let blocks = tokens / u64::from(block_tokens);
                engine.blocks = u32::try_from(blocks.clamp(1, 1 << 22)).unwrap_or(1 << 22);
            }
            engine
        })
        .collect();
    let fleet = Machines {
        engines,
        parts: summary.endpoints.iter().map(|endpoint| endpoint.part).collect(),
        link: link(&base, summary.transfer_s),
        knows: summary.exact,
    };
    let plan = Plan::new(&trace);
    let simulate = |policy: &PolicyConfig| {
        let runs: Vec<Figures> =
            (1..=seeds).map(|seed| run(&trace, &plan, &fleet, config, policy, seed)).collect();
        Simulated { policy: policy.name(), figures: mean(&runs), intervals: seed_intervals(&runs, 1) }
    };
    let ran = simulate(&config.policy);
    let compared = others
        .iter()
        .map(|policy| Ok(Other { simulated: simulate(policy), shadowed: shadow(files, policy)? }))
        .collect::<Result<_>>()?;
    let seen = [
        ("ttft_mean_s", summary.ttft_mean_s()),
        ("ttft_p90_s", summary.ttft_s(0.9)),
        ("cached_share", summary.cached_share()),
    ];
    Ok(Compared {
        machine: base.name(),
        ran,
        seen: seen.into_iter().filter_map(|(name, value)| Some((name, value?))).collect(),
        others: compared,
        seeds,
    })
}

/// The recording as a workload.
fn workload(files: &Files) -> Result<Trace> {
    let mut bytes = Vec::new();
    for path in files.paths() {
        bytes.extend(std::fs::read(path).with_context(|| path.display().to_string())?);
    }
    Ok(format::read(&bytes[..], &Options::default())?)
}

/// Decisions of another policy on the same rows.
fn shadow(files: &Files, policy: &PolicyConfig) -> Result<Option<Shadowed>> {
    let mut replay = Replay::new(Some(policy.clone()));
    files.segments(|_, number, bytes| replay.segment(number, bytes, |_| false, |_| true))?;
    Ok(replay.scheduler().and_then(scheduler::Scheduler::shadowed))
}

/// Links on which a transfer of 4,096 tokens takes this long, or the default ones.
fn link(timing: &TimingModel, transfer_s: Option<f64>) -> TransferConfig {
    let link = TransferConfig::default();
    let Some(transfer_s) = transfer_s else { return link };
    let setup_s = link.setup_s.min(0.5 * transfer_s);
    let bytes = 4096.0 * timing.kv_bytes_per_token() as f64;
    TransferConfig { setup_s, bytes_per_s: bytes / (transfer_s - setup_s).max(1e-6), ..link }
}

/// The machine, scaled to these rates. Arithmetic determines the speed of prefill, memory that of decode; the rest is
/// scaled with them.
fn as_fast_as(base: &TimingModel, rates: &Rates) -> TimingModel {
    let mut timing = base.clone();
    // Each part depends slightly on the other, so one iteration is not enough.
    for _ in 0..4 {
        let is = Rates::of(&timing);
        let slower = |wanted: f64, is: f64| {
            if wanted > 0.0 && is > 0.0 { (wanted / is).clamp(0.01, 100.0) } else { 1.0 }
        };
        let prefill = slower(rates.prefill_s(4096, 4096 * 4097 / 2), is.prefill_s(4096, 4096 * 4097 / 2));
        let decode = slower(rates.decode_step_s(16, 16 * 2000), is.decode_step_s(16, 16 * 2000));
        timing.hardware.peak_flops /= prefill;
        timing.hardware.fp8_peak_flops = timing.hardware.fp8_peak_flops.map(|flops| flops / prefill);
        timing.hardware.memory_bytes_per_s /= decode;
        timing.hardware.layer_secs *= decode;
        timing.hardware.moe_layer_secs *= decode;
        timing.hardware.all_reduce_secs *= decode;
        timing.hardware.all_reduce_bytes_per_s /= decode;
        timing.host.step_secs *= decode;
        timing.host.sequence_secs *= decode;
    }
    timing
}

fn run(
    trace: &Trace,
    plan: &Plan,
    Machines { engines, parts, link, knows }: &Machines,
    config: &scheduler::Config,
    policy: &PolicyConfig,
    seed: u32,
) -> Figures {
    let block_tokens = engines.first().map_or(16, |engine| engine.block_tokens);
    let mut world = World::new(WorldConfig {
        engines: engines.clone(),
        router: router::Config {
            scheduler: scheduler::Config {
                policy: policy.clone(),
                shadow_policy: None,
                receipts: 0,
                seed: seed.into(),
                ..config.clone()
            },
            index: approx::Config { memory_bytes_max: 256 << 20, ttl: Nanos::from_secs(1800) },
            exact: knows.then_some(exact::Config { memory_bytes_max: usize::MAX }),
            block_tokens,
        },
        parts: parts.clone(),
        gateways: GatewaysConfig::default(),
        fetch_tokens_min: None,
        link: *link,
        routing_delay: Nanos::from_millis(1),
        reports: Some(ReportFeed { interval: Nanos::from_secs(1), age: Nanos::ZERO }),
        events: EventFeed { delay: Nanos::from_millis(5), ..EventFeed::default() },
        faults: Vec::new(),
        health_delay: Nanos::from_millis(100),
        attempts_max: 5,
        rules: None,
        reloaded: None,
        hints: Hints::default(),
        client_timeout: None,
        seed: seed.into(),
        stopwatch: None,
    });
    let requests = 0..trace.requests.len() as u32;
    let drive = Drive::Open { load: 1.0 };
    let send = Send { trace, plan, requests, origin_s: 0.0, drive };
    play(&mut world, &send, &Judgement::default(), |_| {}).1
}

// === impl Compared ===

impl Compared {
    /// Simulated over recorded figures of the policy that ran, minus one.
    fn errors(&self) -> impl Iterator<Item = (&'static str, f64, f64, f64)> {
        self.seen.iter().filter_map(|&(name, seen)| {
            let says = *self.ran.figures.get(name)?;
            Some((name, seen, says, if seen == 0.0 { f64::NAN } else { says / seen - 1.0 }))
        })
    }

    pub(super) fn json(&self) -> Value {
        let simulated = |one: &Simulated| json!({"policy": one.policy, "figures": one.figures, "intervals": one.intervals});
        let other = |other: &Other| {
            let mut told = simulated(&other.simulated);
            if let Some(shadowed) = &other.shadowed {
                let Agreement { decisions, agreed, gain_s, .. } = shadowed.all();
                let (mean_s, error_s) = shadowed.all().mean_gain_s();
                told["same_rows"] = json!({
                    "decisions": decisions, "agreed": agreed, "gain_s": gain_s,
                    "mean_gain_s": mean_s, "mean_gain_error_s": error_s,
                });
            }
            told
        };
        let error = |(name, seen, says, error): (&str, f64, f64, f64)| json!({"figure": name, "seen": seen, "simulated": says, "error": error});
        json!({
            "machine": self.machine, "seeds": self.seeds, "ran": simulated(&self.ran),
            "model_errors": self.errors().map(error).collect::<Vec<_>>(),
            "others": self.others.iter().map(other).collect::<Vec<_>>(),
        })
    }

    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        _ = writeln!(
            out,
            "\non the same rows, one decision at a time (seconds of the fleet, as fleet_cost counts them):"
        );
        for Other { simulated, shadowed } in &self.others {
            let Some(all) = shadowed.as_ref().map(Shadowed::all) else { continue };
            let (mean_s, error_s) = all.mean_gain_s();
            _ = writeln!(
                out,
                "  {:<20} agrees on {:.1} % of {} decisions, and saves {:.4} +- {:.4} s per decision",
                simulated.policy,
                100.0 * all.share(),
                all.decisions,
                mean_s,
                1.96 * error_s
            );
        }
        _ = writeln!(
            out,
            "\nsimulated, the whole recording under each policy ({} seeds, {}, as fast as its engines were):",
            self.seeds, self.machine
        );
        _ = write!(out, "  {:<20}", "policy");
        SHOWN.iter().for_each(|(_, title)| _ = write!(out, " {title:>22}"));
        out.push('\n');
        for one in std::iter::once(&self.ran).chain(self.others.iter().map(|other| &other.simulated)) {
            _ = write!(out, "  {:<20}", one.policy);
            for (name, _) in SHOWN {
                let Some(value) = one.figures.get(name) else {
                    _ = write!(out, " {:>22}", "-");
                    continue;
                };
                let less =
                    self.ran.figures.get(name).filter(|ran| **ran != 0.0 && one.policy != self.ran.policy);
                let cell = match less {
                    Some(ran) => format!("{value:.3} ({:+.1} %)", 100.0 * (value / ran - 1.0)),
                    None => format!("{value:.3}"),
                };
                _ = write!(out, " {cell:>22}");
            }
            out.push('\n');
        }
        out += "error of the model, on the policy that ran:\n";
        let mut any = false;
        for (name, seen, says, error) in self.errors() {
            any = true;
            _ = writeln!(
                out,
                "  {name:<20} recorded {seen:.3}, simulated {says:.3} ({:+.0} %)",
                100.0 * error
            );
        }
        if !any {
            out += "  unknown: the recording has no first tokens and no reported cached tokens\n";
        }
        out += "differences between policies smaller than this error, or than the seeds' intervals (--json), are not significant\n";
        out
    }
}
