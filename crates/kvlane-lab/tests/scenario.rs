//! Scenarios as files: what is written is what is read, and whatever a file says is run or refused.

use std::path::Path;

use kvlane_core::policy::PolicyConfig;
use kvlane_core::request::Slo;
use kvlane_lab::figures::{Figures, Judgement};
use kvlane_lab::scenario::{
    Arm, Aside, CacheKnowledge, ClosedLoop, Conversations, FaultSpec, Fleet, Group, OpenLoop, Published,
    Roles, Row, RunError, Scenario, Stage, WorkloadSpec, run,
};
use kvlane_sim::{Batching, Connector, CpuTier, Eviction, TransferConfig};
use kvlane_sim::{Hints, OutputClaim};
use kvlane_trace::TraceError;
use kvlane_trace::adapters::Popularity;
use kvlane_trace::generate::Workload;
use kvlane_trace::trace::Trace;
use proptest::prelude::*;

/// A scenario that takes no time.
const SMALL: &str = r#"{
    "scenario": "small",
    "fleet": {"engines": 2, "preset": "llama-3.1-8b@h100"},
    "workload": {"generate": {"kind": "unshared", "input_tokens": 200, "output_tokens": 20},
                 "closed_loop": {"concurrency": [3], "conversations": {"total": 9}}},
    "policies": ["round_robin"]
}"#;

fn small() -> Scenario {
    serde_json::from_str(SMALL).expect("a scenario")
}

fn no_trace(_: &Path) -> Result<Trace, TraceError> {
    Err(TraceError::Empty)
}

fn rows(scenario: &Scenario, threads: usize) -> Result<Vec<Row>, RunError> {
    run(scenario, Path::new(""), &no_trace, threads, Aside::default(), &|_, _| {})
}

/// A figure that a file may have: of any size, and none with more digits than it needs.
fn figure() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), 1e-9..1e-3, 0.0..1.0, 1.0..1e12, Just(1.0), Just(0.1)]
}

fn eviction() -> impl Strategy<Value = Eviction> {
    prop::sample::select(vec![Eviction::Lru, Eviction::Lfu, Eviction::SessionLru, Eviction::Infinite])
}

fn groups() -> impl Strategy<Value = Group> {
    let tier = (any::<u32>(), figure(), figure(), any::<bool>()).prop_map(
        |(blocks, bytes_per_s, latency_s, overlap)| CpuTier { blocks, bytes_per_s, latency_s, overlap },
    );
    let link = (figure(), figure(), any::<u32>(), (figure(), figure(), figure()), any::<bool>()).prop_map(
        |(setup_s, bytes_per_s, slots, (slow_share, slow_s, overlap), push)| TransferConfig {
            setup_s,
            bytes_per_s,
            slots,
            slow_share,
            slow_s,
            overlap,
            connector: if push { Connector::Push } else { Connector::Pull },
        },
    );
    let batching = prop::sample::select(vec![Batching::Mixed, Batching::PrefillFirst]);
    let names = prop::option::of("[a-z0-9.@:-]{0,12}");
    (
        (any::<u32>(), names.clone(), names.clone(), names.clone(), any::<u32>(), names),
        (prop::option::of(any::<u32>()), figure(), prop::option::of(any::<u64>()), eviction()),
        (prop::option::of(tier), batching, link, prop::option::of(any::<u32>()), prop::option::of(figure())),
    )
        .prop_map(
            |(
                (engines, preset, model, gpu, tp, kv_dtype),
                (block_tokens, memory_share, kv_capacity_tokens, eviction),
                (cpu_tier, batching, link, max_num_seqs, host_step_s),
            )| Group {
                engines,
                preset: preset.clone(),
                model,
                gpu,
                tp,
                timing: preset.map(Into::into),
                kv_dtype,
                block_tokens,
                memory_share,
                kv_capacity_tokens,
                eviction,
                cpu_tier,
                batching,
                link,
                host_step_s,
                max_num_seqs,
                max_num_batched_tokens: max_num_seqs,
                max_loras: max_num_seqs,
                adapter_load_s: memory_share,
            },
        )
}

fn fleets() -> impl Strategy<Value = Fleet> {
    prop::collection::vec(groups(), 1..3).prop_map(|groups| Fleet { groups })
}

fn stages() -> impl Strategy<Value = Stage> {
    (figure(), figure()).prop_map(|(rate, seconds)| Stage { rate, seconds })
}

fn workloads() -> impl Strategy<Value = WorkloadSpec> {
    let open = (prop::collection::vec(stages(), 0..4), any::<bool>(), figure(), prop::option::of(stages()))
        .prop_map(|(stages, back_to_back, pause_s, warm_up)| OpenLoop {
            stages,
            back_to_back,
            pause_s,
            warm_up,
        });
    let count = any::<u32>();
    let conversations =
        prop_oneof![count.prop_map(Conversations::Total), count.prop_map(Conversations::PerClient)];
    let warm_up = prop::option::of(conversations.clone());
    let clients = prop::collection::vec(any::<u32>(), 0..4);
    let closed = (clients, conversations, warm_up, figure(), figure()).prop_map(
        |(concurrency, conversations, warm_up, stagger_s, length_spread)| ClosedLoop {
            concurrency,
            conversations,
            warm_up,
            stagger_s,
            length_spread,
        },
    );
    let generated =
        prop::sample::select(Workload::KINDS.to_vec()).prop_map(|kind| Workload::by_kind(kind).expect("one"));
    (
        prop::option::of("[a-z/.]{1,9}"),
        prop::option::of(generated),
        prop::collection::vec(figure(), 0..3),
        prop::option::of(open),
        prop::option::of(closed),
    )
        .prop_map(|(trace, generate, load, open_loop, closed_loop)| WorkloadSpec {
            trace: trace.map(Into::into),
            adapters: generate.is_some().then_some(Popularity { count: load.len() as u32, skew: 0.5 }),
            generate,
            load,
            open_loop,
            closed_loop,
        })
}

fn arms() -> impl Strategy<Value = Arm> {
    let roles = prop::sample::select(vec![Roles::Fixed, Roles::Preferred, Roles::Elastic]);
    let names = prop::option::of(prop::sample::select(PolicyConfig::NAMES.to_vec()));
    let prefill = (any::<u32>(), roles, names, prop::option::of(any::<u32>()));
    let knowledge = prop::sample::select(vec![CacheKnowledge::Approximate, CacheKnowledge::Exact]);
    (
        (".{0,9}", prop::sample::select(PolicyConfig::NAMES.to_vec()), knowledge),
        (figure(), prop::option::of(figure()), figure()),
        (figure(), figure(), figure(), figure()),
        (prefill, prop::option::of(any::<u32>()), prop::option::of(eviction())),
        (any::<bool>(), any::<u32>(), figure(), any::<bool>()),
        (any::<u16>(), prop::option::of(figure()), figure(), figure(), figure()),
        (any::<u16>(), prop::sample::select(PolicyConfig::NAMES.to_vec()), prop::option::of(figure())),
        (any::<u32>(), figure(), figure(), any::<bool>()),
    )
        .prop_map(
            |(
                (arm, policy, cache_knowledge),
                (delay, interval, age),
                kv,
                (prefill, fetch, eviction),
                queue,
                news,
                cells,
                told,
            )| Arm {
                arm,
                policy: PolicyConfig::by_name(policy).expect("a policy"),
                cache_knowledge,
                routing_delay_s: delay,
                report_interval_s: interval,
                report_age_s: age,
                kv_event_delay_s: kv.0,
                kv_event_jitter_s: kv.1,
                kv_events_lost: kv.2,
                kv_events_duplicated: kv.3,
                gateways: news.0,
                cells: cells.0,
                front_policy: PolicyConfig::by_name(cells.1).expect("a policy"),
                sketch_interval_s: cells.2,
                sketch_bits: told.0,
                cell_load_interval_s: told.1,
                cell_delay_s: told.2,
                exchange_interval_s: news.1,
                exchange_gap_s: news.1,
                exchange_delay_s: news.2,
                exchange_jitter_s: news.3,
                exchange_lost: news.4,
                prefill_engines: prefill.0,
                roles: prefill.1,
                prefill_policy: prefill.2.and_then(PolicyConfig::by_name),
                split_tokens_min: prefill.3,
                fetch_tokens_min: fetch,
                eviction,
                session_admission: queue.0,
                max_requests_per_endpoint: queue.1,
                queue_len_max: queue.1,
                queue_timeout_s: queue.2,
                hints: Hints {
                    conversation: queue.0,
                    output: if queue.3 { OutputClaim::Noisy } else { OutputClaim::None },
                    end: queue.3,
                    last: queue.3,
                    slo: Slo { ttft_ms: queue.3.then_some(queue.1), ..Slo::NONE },
                },
                timing: told.3,
            },
        )
}

fn faults() -> impl Strategy<Value = FaultSpec> {
    (0..11, figure(), 0usize..9, figure(), prop::option::of(figure())).prop_map(
        |(kind, at_s, engine, factor, end_s)| match kind {
            0 => FaultSpec::Death { at_s, engine, back_at_s: end_s },
            1 => FaultSpec::Slow { at_s, engine, factor, until_s: end_s },
            2 => FaultSpec::Pause { at_s, engine, until_s: end_s },
            3 => FaultSpec::Reset { at_s, engine },
            4 => FaultSpec::BlackHole { at_s, engine, until_s: end_s },
            5 => FaultSpec::Busy { at_s, engine, retry_after_s: end_s.map(|_| factor), until_s: end_s },
            6 => FaultSpec::CutFeed { at_s, engine, until_s: end_s },
            7 => FaultSpec::FloodFeed { at_s, engine, until_s: end_s },
            8 => FaultSpec::Transfers {
                at_s,
                engine,
                failed_share: factor,
                slow_share: factor,
                slow_s: factor,
                until_s: end_s,
            },
            9 => FaultSpec::Drain { at_s, engine, until_s: end_s },
            _ => FaultSpec::Replace { at_s, engine, back_at_s: end_s },
        },
    )
}

fn published() -> impl Strategy<Value = Published> {
    let figures = prop::collection::btree_map("[a-z][a-z_]{3,9}_s", figure(), 0..4);
    let load = || prop::option::of(figure());
    (".{0,9}", load(), prop::option::of(any::<u32>()), load(), figures).prop_map(
        |(arm, rate, concurrency, load, figures)| Published { arm, rate, concurrency, load, figures },
    )
}

fn scenarios() -> impl Strategy<Value = Scenario> {
    (
        (".{0,9}", ".{0,20}", fleets(), workloads(), any::<u32>(), any::<u32>()),
        prop::collection::vec(arms(), 0..3),
        prop::collection::vec(faults(), 0..3),
        prop::collection::vec(published(), 0..3),
        (figure(), figure(), any::<u32>(), any::<u32>()),
    )
        .prop_map(
            |(
                (scenario, about, fleet, workload, seeds, first_seed),
                policies,
                faults,
                published,
                judgement,
            )| Scenario {
                scenario,
                about,
                fleet,
                workload,
                policies,
                faults,
                seeds,
                first_seed,
                judgement: Judgement {
                    slo_ttft_s: judgement.0,
                    slo_tpot_ms: judgement.1,
                    medium_from_tokens: judgement.2,
                    heavy_from_tokens: judgement.3,
                },
                published,
            },
        )
}

proptest! {
    #[test]
    fn a_scenario_that_is_written_is_read_as_it_was(scenario in scenarios()) {
        let text = serde_json::to_string(&scenario).expect("JSON");
        let read: Scenario = serde_json::from_str(&text).expect("a scenario");
        prop_assert_eq!(scenario, read);
    }
}

/// Places of [`SMALL`] that hold numbers, as JSON pointers; some are not there before.
const NUMBERS: [&str; 27] = [
    "/fleet/engines",
    "/fleet/tp",
    "/fleet/block_tokens",
    "/fleet/memory_share",
    "/fleet/kv_capacity_tokens",
    "/fleet/max_num_seqs",
    "/fleet/max_num_batched_tokens",
    "/fleet/host_step_s",
    "/fleet/link/setup_s",
    "/fleet/link/bytes_per_s",
    "/fleet/link/slow_share",
    "/fleet/link/slow_s",
    "/fleet/link/overlap",
    "/fleet/cpu_tier/blocks",
    "/fleet/cpu_tier/bytes_per_s",
    "/fleet/cpu_tier/latency_s",
    "/workload/generate/input_tokens",
    "/workload/generate/output_tokens",
    "/workload/closed_loop/concurrency/0",
    "/workload/closed_loop/conversations/total",
    "/policies/0/routing_delay_s",
    "/policies/0/report_interval_s",
    "/policies/0/kv_event_delay_s",
    "/policies/0/kv_events_lost",
    "/policies/0/prefill_engines",
    "/policies/0/split_tokens_min",
    "/policies/0/fetch_tokens_min",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Invariant: A scenario is run or rejected for any numbers in it, and always ends.
    ///
    /// Also held by `a_world_with_nothing_to_do_for_weeks_is_over_at_once`.
    #[test]
    fn whatever_number_stands_somewhere_a_scenario_is_run_or_refused(
        changes in prop::collection::vec(
            (
                prop::sample::select(NUMBERS.to_vec()),
                prop::sample::select(vec![-1.0, 0.0, 1e-3, 0.5, 1.0, 2.0, 3.0, 17.0, 1000.0]),
            ),
            1..4,
        ),
    ) {
        let mut scenario: serde_json::Value = serde_json::from_str(SMALL).expect("JSON");
        scenario["policies"][0] = serde_json::json!({"policy": "lmetric"});
        scenario["fleet"]["link"] = serde_json::json!(TransferConfig::default());
        for (pointer, number) in changes {
            if pointer.starts_with("/fleet/cpu_tier") && scenario["fleet"]["cpu_tier"].is_null() {
                scenario["fleet"]["cpu_tier"] = serde_json::json!(CpuTier::new(50));
            }
            let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
            let parent = scenario.pointer_mut(parent).expect("it is there");
            let number = if number == f64::trunc(number) { serde_json::json!(number as i64) } else { number.into() };
            match parent {
                serde_json::Value::Array(list) => list[0] = number,
                other => other[key] = number,
            }
        }
        let Ok(scenario) = serde_json::from_value::<Scenario>(scenario) else { return Ok(()) };
        match rows(&scenario, 1) {
            Err(why) => prop_assert!(!why.to_string().is_empty()),
            Ok(rows) => {
                prop_assert_eq!(rows.len(), 1);
                prop_assert!(rows[0].simulated.values().all(|value| value.is_finite()));
                let asked = f64::from(match scenario.workload.closed_loop {
                    Some(ClosedLoop { conversations: Conversations::Total(count), .. }) => count,
                    _ => 0,
                });
                prop_assert_eq!(rows[0].simulated["requests"], asked);
            }
        }
    }
}

#[test]
fn threads_do_not_show_and_every_request_is_told_of() {
    let mut scenario = small();
    scenario.policies.push(Arm::new(PolicyConfig::by_name("random").expect("a policy")));
    scenario.seeds = 3;
    let told = std::sync::atomic::AtomicUsize::new(0);
    let progress = |over: usize, total: usize| {
        assert!(over <= total && (over < 54 || total == 54), "{over} of {total}");
        told.fetch_max(over, std::sync::atomic::Ordering::Relaxed);
    };
    let run = |threads| {
        run(&scenario, Path::new(""), &no_trace, threads, Aside::default(), &progress).expect("it runs")
    };
    let figures = |rows: &[Row]| -> Vec<(String, Figures)> {
        rows.iter().map(|row| (row.arm.clone(), row.simulated.clone())).collect()
    };
    let one = figures(&run(1));
    assert_eq!(one, figures(&run(4)));
    assert_eq!(told.into_inner(), 2 * 3 * 9, "arms, seeds and requests");
    assert_eq!(one.iter().map(|(arm, _)| arm.as_str()).collect::<Vec<_>>(), ["round_robin", "random"]);
}

#[test]
fn stages_one_after_the_other_find_the_caches_of_those_before_and_single_ones_do_not() {
    let mut scenario = small();
    scenario.workload.generate =
        serde_json::from_str(r#"{"kind": "shared-prefix", "groups": 4, "prompts_per_group": 2}"#)
            .expect("a workload");
    scenario.workload.closed_loop = None;
    let stage = Stage { rate: 2.0, seconds: 4.0 };
    let cached = |scenario: &mut Scenario, back_to_back: bool, warm_up: Option<Stage>| -> Vec<f64> {
        scenario.workload.open_loop =
            Some(OpenLoop { stages: vec![stage, stage], back_to_back, pause_s: 1.0, warm_up });
        let rows = rows(scenario, 1).expect("it runs");
        rows.iter().map(|row| row.simulated["cached_share"]).collect()
    };
    let alone = cached(&mut scenario, false, None);
    let together = cached(&mut scenario, true, None);
    let warmed = cached(&mut scenario, true, Some(stage));
    assert_eq!(alone.len(), 2);
    assert!(together[1] > together[0], "{together:?}");
    assert!(together[1] > alone[1], "{together:?} {alone:?}");
    assert_eq!(warmed.len(), 2, "the warm-up is not reported");
    assert!(warmed[0] > together[0], "{warmed:?} {together:?}");
}

#[test]
fn no_reports_can_be_said_and_nothing_said_is_the_default() {
    let arm = |text: &str| serde_json::from_str::<Arm>(text).expect("an arm").report_interval_s;
    assert_eq!(arm(r#"{"policy": "random", "report_interval_s": null}"#), None);
    assert_eq!(
        arm(r#"{"policy": "random"}"#),
        Arm::new(PolicyConfig::by_name("random").expect("one")).report_interval_s
    );
}
