//! Paths, headers and metrics of other routers, and what kvlane has instead: the tables below the flags in docs/migrate.
//!
//! The names are in the files beside this one, one on a line after `path`, `header` or `metric`. Each has exactly one row here.

use std::fmt::Write as _;
use std::path::Path;

/// Names that have one answer, and the answer. A name that ends in `*` stands for all that begin so and have no row of their own.
type Row = (&'static [&'static str], &'static str);

/// Pages, the routers they are about, and the routers' names.
const PAGES: &[(&str, &str, &[&str])] = &[
    (
        "sglang-router",
        "sglang-router 0.3.2, SMG 1.13.0",
        &[include_str!("sglang-router-0.3.2-surface.txt"), include_str!("smg-1.13.0-surface.txt")],
    ),
    ("vllm-router", "vllm-router 0.1.17", &[include_str!("vllm-router-0.1.17-surface.txt")]),
    ("production-stack", "production-stack", &[include_str!("production-stack-surface.txt")]),
    ("llm-d", "llm-d", &[include_str!("llm-d-surface.txt")]),
];

const NONE: &str = "none";

const PATHS: &[Row] = &[
    (
        &[
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/embeddings",
            "/v1/responses",
            "/v1/messages",
            "/generate",
            "/rerank",
            "/v1/rerank",
            "/score",
            "/v1/score",
            "/tokenize",
            "/v1/tokenize",
            "/detokenize",
            "/v1/detokenize",
            "/v1/models",
            "/v1/models/{*id}",
        ],
        "the same, on the clients' port",
    ),
    (
        &[
            "/v1/responses/{response_id}",
            "/v1/responses/{response_id}/cancel",
            "/v1/responses/{response_id}/input_items",
            "/v1/classify",
            "/v1/messages/count_tokens",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/v1/audio/speech",
            "/v1/images/generations",
            "/v1/images/edits",
            "/v1/files*",
            "/v1/batches*",
        ],
        "the same: [relayed to a worker](../apis.md)",
    ),
    (&["/v1/responses/{response_id}/input"], "`/v1/responses/{id}/input_items`"),
    (&["/health", "/liveness", "/readiness"], "the same, on both ports"),
    (
        &["/health_generate"],
        "the same as `/readiness`: 503 while no worker is healthy; workers are probed, none is asked to generate",
    ),
    (
        &[
            "/workers",
            "/workers/{worker_id}",
            "/workers/{url}",
            "/add_worker",
            "/remove_worker",
            "/list_workers",
        ],
        "the same, on the operators' port",
    ),
    (&["/engines"], "`GET /workers`, on the operators' port"),
    (&["/get_loads", "/loads"], "`GET /workers`: requests and tokens in flight, and what the engine reports"),
    (&["/get_model_info", "/version"], "the same: the answer of an engine of the model"),
    (&["/get_server_info"], "the same, for operators; `GET /fleet` on the operators' port has all workers"),
    (&["/metrics"], "`GET /metrics`, on the operators' port"),
    (&["/engine_metrics"], "`GET /metrics`, and Prometheus at the engines"),
    (&["/scheduling/diagnostics"], "`GET /decisions` explains placements; [explain](../explain.md)"),
    (
        &["/flush_cache", "/start_profile", "/stop_profile", "/sleep", "/wake_up", "/is_sleeping", "/v1/rl"],
        "call the engines: their administration is not relayed",
    ),
    (
        &["/inference/v1/generate", "/v1/decisions", "/v1/systemone", "/v1/conversations*"],
        "the same: [relayed to a worker](../apis.md)",
    ),
    (&["/v1/audio/voices"], "404; `server.extra_paths` relays it to a worker"),
    (&["/finish_session"], "not needed: a conversation is forgotten by its last use"),
    (
        &["/ha/*"],
        "[replicas](../replicas.md) find each other by `replicas.peers`; each has its own operators' port",
    ),
    (&["/v1/tokenizers*"], "`tokens` in the configuration"),
    (&["/parse/*"], "none: engines parse reasoning and tool calls"),
    (&["/v1/realtime*", "/v1/interactions", "/wasm*", "/heap_profile"], NONE),
];

const HEADERS: &[Row] = &[
    (&["x-request-id", "x-correlation-id"], "the same; answers have `x-request-id`"),
    (&["request-id", "x-trace-id"], "add it to `server.request_id_headers`"),
    (&["traceparent"], "the same: [traces](../observability.md#traces)"),
    (&["authorization", "x-api-key"], "the same, with [keys](../guide.md#keys) of kvlane; else forwarded"),
    (
        &["x-session-id", "x-claude-code-session-id", "x-session-affinity", "session-id", "session_id"],
        "the same: a conversation",
    ),
    (
        &[
            "x-smg-routing-key",
            "x-user-id",
            "thread-id",
            "x-claude-code-agent-id",
            "x-claude-code-parent-agent-id",
        ],
        "a conversation: add it to `hints.session_headers`. The default policy needs none",
    ),
    (
        &["x-session-token"],
        "none: `session_sticky` names a conversation by `hints.session_headers`, and answers carry no token",
    ),
    (&["x-smg-priority"], "the same: `system`, `interactive`, `default`, `bulk`"),
    (
        &["x-smg-tenant-id", "x-tenant-id"],
        "add it to `hints.tenant_headers`; believed from clients that may name tenants",
    ),
    (&["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"], "the same: a tenant"),
    (
        &["x-llm-d-inference-objective", "x-gateway-inference-objective"],
        "the same: a name of `hints.priorities`, a number, or an InferenceObjective of the cluster",
    ),
    (
        &["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"],
        "the same: endpoints that should miss it are left out",
    ),
    (&["x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"], "the same, in `kvlane epp`"),
    (
        &["x-gateway-destination-endpoint"],
        "the same, set by `kvlane epp`; in mode `gateway` answers have `x-router-backend`",
    ),
    (&["x-prefiller-host-port"], "the same, with the connector `llm-d`"),
    (&["x-encoder-hosts-ports"], "removed: engines encode images themselves"),
    (&["x-data-parallel-rank"], "the same: the rank that a client names, or the one that is chosen"),
    (&["x-data-parallel-host-port", "x-kv-cache-source-host-port"], NONE),
    (&["x-llm-d-request-dropped-reason"], "`error.code` of the body of a 429: [messages.md](../messages.md)"),
    (&["x-smg-routed-worker-id"], "`x-router-backend`, with `x-router-reason`"),
    (&["x-smg-error-code"], "`error.code` of the body: [messages.md](../messages.md)"),
    (&["x-smg-cache-trace"], "`x-router-reason`, and `GET /decisions` on the operators' port"),
    (&["x-router-stages"], "`server-timing`: the stages until the head of the answer"),
    (&["x-smg-routing-tokens"], "none: prompts are tokenized here"),
    (&["x-prefer-pd"], "none: a split is [chosen by its price](../disaggregation.md)"),
    (&["x-smg-target-worker", "x-worker-priority", "x-max-cost"], "none: the policy chooses the worker"),
    (&["x-smg-preempted"], "none: requests in flight are not preempted"),
    (
        &["x-smg-mcp", "x-smg-parser"],
        "none: tools are called by the application, and answers are parsed by the engines",
    ),
];

const METRICS: &[Row] = &[
    (
        &[
            "smg_http_requests_total",
            "smg_http_responses_total",
            "smg_router_requests_total",
            "smg_router_request_errors_total",
            "smg_router_upstream_responses_total",
            "smg_responses_stream_failures_total",
            "vllm_router_requests_total",
            "vllm_router_request_errors_total",
            "vllm_router_processed_requests_total",
            "vllm_router_embeddings_total",
            "vllm_router_embeddings_errors_total",
            "vllm:request_errors_total",
            "vllm:current_qps",
            "vllm:num_incoming_requests",
            "llm_d_epp_request_total",
            "llm_d_epp_request_error_total",
            "llm_d_epp_scheduler_attempts_total",
        ],
        "`kvlane_requests_total` by model, API and status",
    ),
    (
        &[
            "smg_http_request_duration_seconds",
            "smg_router_request_duration_seconds",
            "smg_router_generation_duration_seconds",
            "vllm_router_request_duration_seconds",
            "vllm_router_generate_duration_seconds",
            "vllm_router_embeddings_duration_seconds",
            "vllm:request_latency_seconds",
            "vllm:avg_latency",
            "llm_d_epp_request_duration_seconds",
        ],
        "`kvlane_request_duration_seconds`",
    ),
    (
        &[
            "smg_router_ttft_seconds",
            "llm_d_epp_request_ttft_seconds",
            "smg_pd_ttft_seconds",
            "smg_pd_decode_ttft_seconds",
        ],
        "`kvlane_ttft_seconds`",
    ),
    (
        &[
            "smg_router_tpot_seconds",
            "vllm:avg_itl",
            "llm_d_epp_request_ntpot_seconds",
            "llm_d_epp_request_streaming_tpot_seconds",
            "llm_d_epp_request_streaming_itl_seconds",
        ],
        "`kvlane_tpot_seconds`",
    ),
    (
        &[
            "smg_router_stage_duration_seconds",
            "smg_pd_prefill_admission_wait_seconds",
            "smg_scheduler_queue_wait_seconds",
            "llm_d_epp_scheduler_e2e_duration_seconds",
            "llm_d_epp_request_processing_duration_seconds",
            "llm_d_epp_response_processing_duration_seconds",
            "llm_d_epp_plugin_duration_seconds",
        ],
        "`kvlane_stage_seconds` by stage",
    ),
    (
        &[
            "smg_router_tokens_total",
            "vllm:input_tokens_total",
            "vllm:output_tokens_total",
            "llm_d_epp_request_input_tokens",
            "llm_d_epp_request_output_tokens",
            "llm_d_epp_request_cached_tokens",
        ],
        "`kvlane_input_tokens_total`, `kvlane_output_tokens_total`, `kvlane_cached_tokens_total`",
    ),
    (
        &[
            "smg_worker_health",
            "smg_worker_health_checks_total",
            "smg_worker_pool_size",
            "vllm_router_worker_health",
            "vllm_router_active_workers",
            "vllm:healthy_pods_total",
            "llm_d_epp_ready_endpoints",
        ],
        "`kvlane_worker_health`",
    ),
    (
        &[
            "smg_worker_requests_active",
            "smg_worker_connections_active",
            "smg_http_connections_active",
            "smg_http_inflight_request_age_count",
            "smg_engine_running_requests",
            "smg_engine_waiting_requests",
            "vllm_router_worker_load",
            "vllm_router_max_load",
            "vllm_router_min_load",
            "vllm_router_running_requests",
            "vllm_router_pd_active_decode_requests",
            "vllm:num_requests_running",
            "vllm:num_prefill_requests",
            "vllm:num_decoding_requests",
            "llm_d_epp_request_running",
            "llm_d_epp_average_running_requests",
            "llm_d_epp_std_dev_running_requests",
            "llm_d_epp_inflight_requests",
        ],
        "`kvlane_worker_requests_active`",
    ),
    (
        &[
            "vllm_router_pd_active_prefill_tokens",
            "vllm_router_pd_new_prefill_tokens",
            "vllm_router_pd_prefill_occupancy",
            "llm_d_epp_inflight_tokens",
        ],
        "`kvlane_worker_prefill_tokens`, `kvlane_worker_context_tokens`",
    ),
    (
        &[
            "smg_worker_selection_total",
            "smg_worker_requests_total",
            "smg_manual_policy_branch_total",
            "smg_prefix_hash_policy_branch_total",
            "smg_consistent_hashing_policy_branch_total",
            "smg_cache_aware_policy_branch_total",
            "smg_routing_key_source_total",
            "smg_worker_liveness_fallback_total",
            "smg_worker_overload_fallback_total",
            "vllm_router_policy_decisions_total",
            "vllm_router_load_balancing_events_total",
            "vllm_router_prefix_routing_decisions_total",
            "vllm_router_kv_routing_inputs_total",
            "vllm_router_pd_affinity_decisions_total",
        ],
        "`kvlane_worker_selection_total` by worker, policy and reason",
    ),
    (
        &[
            "smg_worker_errors_total",
            "smg_http_connection_timeouts_total",
            "smg_pd_bootstrap_failures_total",
            "smg_pd_kv_transfer_failures_total",
            "smg_pd_rendezvous_failures_total",
            "vllm_router_pd_errors_total",
            "vllm_router_pd_prefill_errors_total",
            "vllm_router_pd_decode_errors_total",
            "vllm_router_pd_stream_errors_total",
        ],
        "`kvlane_worker_failures_total` by kind",
    ),
    (&["smg_worker_cb_*", "vllm_router_cb_*"], "`kvlane_worker_failures_total`, `kvlane_worker_busy_total`"),
    (
        &["smg_worker_stalled", "smg_worker_stall_transitions_total"],
        "`kvlane_worker_stalled`, `kvlane_worker_stalls_total`",
    ),
    (
        &[
            "smg_worker_retries_total",
            "smg_worker_retries_exhausted_total",
            "smg_worker_retry_backoff_seconds",
            "smg_router_upstream_send_retries_total",
            "vllm_router_retries_total",
            "vllm_router_retries_exhausted_total",
            "vllm_router_retry_backoff_duration_seconds",
        ],
        "`kvlane_retries_total`",
    ),
    (&["smg_http_rate_limit_total"], "`kvlane_rate_limited_total`, `kvlane_shed_total` by reason"),
    (
        &[
            "smg_admission_queue_depth",
            "smg_admission_inflight",
            "smg_scheduler_queue_depth",
            "smg_scheduler_inflight",
            "smg_scheduler_utilization",
            "smg_scheduler_class_capacity_pressure",
            "smg_pd_prefill_admission_inflight",
            "smg_pd_prefill_admission_queued",
            "smg_pd_admission_window",
            "vllm_router_embeddings_queue_size",
            "vllm_router_pd_pending_decode_requests",
            "vllm_router_pd_unknown_prefill_requests",
            "vllm_router_pd_decode_pending_seconds",
            "llm_d_epp_average_queue_size",
            "llm_d_epp_std_dev_queue_size",
            "llm_d_epp_per_endpoint_queue_size",
            "llm_d_epp_flow_control_*",
        ],
        "`kvlane_queue_requests`, `kvlane_queue_seconds`",
    ),
    (
        &[
            "smg_admission_queue_rejected_total",
            "smg_pd_admission_sheds_total",
            "smg_pd_admission_waits_total",
            "smg_pd_prefill_admission_rejections_total",
            "smg_worker_overload_shed_total",
            "smg_workers_overloaded",
        ],
        "`kvlane_shed_total` by reason, `kvlane_worker_busy_total`",
    ),
    (&["smg_scheduler_*"], "none: requests wait in one queue, by priority"),
    (
        &[
            "smg_cache_*",
            "smg_kv_index_*",
            "smg_policy_inflight_reconciled_total",
            "vllm_router_tree_size",
            "llm_d_epp_prefix_indexer_size",
        ],
        "`kvlane_index_bytes`, `kvlane_index_blocks`",
    ),
    (
        &[
            "smg_cache_aware_match_ratio",
            "vllm_router_cache_hits_total",
            "vllm_router_cache_misses_total",
            "vllm_router_kv_placement_lookups_total",
            "vllm_router_pd_credited_prefix_tokens_total",
            "vllm_router_pd_identity_verified",
            "llm_d_epp_prefix_indexer_hit_ratio",
            "llm_d_epp_prefix_indexer_hit_bytes",
        ],
        "tokens: `kvlane_predicted_cached_tokens_total` and `kvlane_cached_tokens_total` over `kvlane_prompt_tokens_total`",
    ),
    (
        &["smg_engine_cache_hit_rate", "vllm:gpu_prefix_cache_hit_rate"],
        "`kvlane_engine_hit_tokens_total` over `kvlane_engine_queried_tokens_total`",
    ),
    (
        &[
            "smg_engine_token_usage",
            "llm_d_epp_average_kv_cache_utilization",
            "llm_d_epp_std_dev_kv_cache_utilization",
        ],
        "`kvlane_worker_kv_usage_ratio`, `kvlane_kv_usage_ratio`",
    ),
    (
        &["smg_engine_gen_throughput", "vllm:avg_decoding_length"],
        "`kvlane_output_tokens_total` as a rate, `kvlane_worker_decode_step_seconds`, `kvlane_output_tokens_usual`",
    ),
    (&["smg_engine_load_polls_total", "smg_engine_pd_*", "vllm:num_requests_swapped"], "scrape the engines"),
    (
        &["smg_kv_event_*", "llm_d_epp_kv_cache_events_*"],
        "`kvlane_kv_messages_total`, `kvlane_kv_events_total`, `kvlane_kv_incidents_total`, `kvlane_kv_event_lag_seconds`",
    ),
    (
        &["smg_kv_events_unavailable", "smg_kv_event_degraded_ranks"],
        "`kvlane_kv_feed_state`, `kvlane_worker_knowledge`",
    ),
    (
        &["smg_discovery_*", "vllm_router_discovery_*"],
        "`kvlane_discovery_joins_total`, `kvlane_discovery_leaves_total`, `kvlane_discovery_workers`, `kvlane_discovery_problems`",
    ),
    (
        &[
            "smg_pd_kv_connector_mode_total",
            "vllm_router_pd_requests_total",
            "vllm_router_pd_prefill_requests_total",
            "vllm_router_pd_decode_requests_total",
            "vllm_router_pd_prefill_decisions_total",
            "llm_d_epp_disagg_decision_total",
        ],
        "`kvlane_splits_total`",
    ),
    (
        &[
            "smg_pd_prefill_duration_seconds",
            "smg_pd_kv_transfer_duration_seconds",
            "vllm_router_pd_request_duration_seconds",
            "vllm_router_pd_kv_prepare_seconds",
        ],
        "`kvlane_kv_transfer_seconds`, `kvlane_stage_seconds`",
    ),
    (
        &["smg_tokenizer_*"],
        "`kvlane_tokenize_seconds`, `kvlane_tokenizer_cache_bytes`, `kvlane_tokenizer_tokens_total`, `kvlane_prompts_estimated_total`",
    ),
    (&["smg_tokio_*"], "`kvlane_tasks`"),
    (
        &[
            "smg_router_request_buffers_released_early_bytes_total",
            "smg_router_request_body_path_total",
            "vllm_router_pd_body_over_limit_total",
            "llm_d_epp_request_size_bytes",
        ],
        "`kvlane_body_memory_bytes`, `kvlane_limits_reached_total`",
    ),
    (
        &[
            "smg_worker_routing_keys_active",
            "smg_manual_policy_cache_entries",
            "smg_worker_http2",
            "smg_mcp_*",
            "smg_db_*",
            "smg_mm_*",
            "smg_rl_*",
            "smg_allocator_*",
            "smg_detokenize_prefix_mismatch_total",
            "smg_history_memory_records",
            "smg_log_dropped_lines",
            "smg_responses_not_stored_total",
            "vllm_router_agent_aware_*",
            "vllm_router_workflow_*",
            "vllm:semantic_cache_*",
            "llm_d_epp_program_aware_jains_fairness_index",
        ],
        NONE,
    ),
];

/// The kinds of names, the heading of each kind's table, and its rows.
const KINDS: &[(&str, &str, &[Row])] =
    &[("path", "Endpoints", PATHS), ("header", "Headers", HEADERS), ("metric", "Metrics", METRICS)];

/// Whether a row's name stands for a name, and how exactly.
fn fits(pattern: &str, name: &str) -> Option<usize> {
    match pattern.strip_suffix('*') {
        Some(begin) => name.starts_with(begin).then_some(begin.len()),
        None => (pattern == name).then_some(usize::MAX),
    }
}

/// The row of a name: one that has it, else that of the longest beginning.
fn row(rows: &'static [Row], name: &str) -> Option<usize> {
    let all =
        rows.iter().enumerate().flat_map(|(at, (names, _))| names.iter().map(move |theirs| (at, theirs)));
    let fitting = all.filter_map(|(at, theirs)| Some((fits(theirs, name)?, at)));
    fitting.max_by_key(|(exactly, _)| *exactly).map(|(_, at)| at)
}

/// The names of one kind of all lists, each once.
fn names<'a>(lists: &[&'a str], kind: &str) -> Vec<&'a str> {
    let mut names = Vec::new();
    for line in lists.iter().flat_map(|list| list.lines()) {
        let (of, name) = line.split_once(' ').expect("a kind and a name");
        if of == kind && !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The tables of one page.
fn tables(routers: &str, lists: &[&str]) -> String {
    let mut text = String::new();
    for (kind, heading, rows) in KINDS {
        let names = names(lists, kind);
        if names.is_empty() {
            continue;
        }
        let _ = write!(text, "\n## {heading}\n\n| {routers} | kvlane |\n|---|---|\n");
        for (at, (patterns, here)) in rows.iter().enumerate() {
            let of_row: Vec<&str> =
                names.iter().copied().filter(|name| row(rows, name) == Some(at)).collect();
            let of_pattern = |pattern: &&str| {
                let fitting = of_row.iter().filter(|name| fits(pattern, name).is_some()).count();
                match fitting {
                    0 => None,
                    1.. if pattern.ends_with('*') => Some(format!("`{pattern}` ({fitting})")),
                    1.. => Some(format!("`{pattern}`")),
                }
            };
            let theirs: Vec<String> = patterns.iter().filter_map(of_pattern).collect();
            if !theirs.is_empty() {
                let _ = writeln!(text, "| {} | {here} |", theirs.join(", "));
            }
        }
    }
    text
}

/// A page with the tables between its marks.
pub(super) fn with_tables(page: &str, text: &str) -> String {
    let (_, routers, lists) = PAGES.iter().find(|(of, ..)| *of == page).expect("a page with tables");
    let (begin, end) = ("<!-- endpoints, headers and metrics -->\n", "\n<!-- end of metrics -->");
    let from = text.find(begin).expect("the page has a mark") + begin.len();
    let to = from + text[from..].find(end).expect("it ends");
    format!("{}{}{}", &text[..from], tables(routers, lists), &text[to..])
}

/// Invariant: Every endpoint, header and metric of sglang-router, SMG and vllm-router has a row in docs/migrate that names what there
/// is instead.
#[test]
fn every_name_of_these_routers_has_an_answer() {
    for (page, _, lists) in PAGES {
        for (kind, _, rows) in KINDS {
            for name in names(lists, kind) {
                assert!(row(rows, name).is_some(), "{page}: {kind} {name}");
            }
        }
    }
}

#[test]
fn each_row_is_of_a_router_and_no_name_has_two() {
    for (kind, _, rows) in KINDS {
        let known: Vec<&str> = PAGES.iter().flat_map(|(.., lists)| names(lists, kind)).collect();
        let mut theirs: Vec<&str> = rows.iter().flat_map(|(names, _)| names.iter().copied()).collect();
        for pattern in &theirs {
            assert!(
                known.iter().any(|name| fits(pattern, name).is_some()),
                "{kind} {pattern} is no router's"
            );
        }
        theirs.sort_unstable();
        let twice = theirs.windows(2).find(|pair| pair[0] == pair[1]);
        assert_eq!(twice, None, "{kind}");
    }
}

#[test]
fn metrics_and_keys_that_answers_name_are_kvlanes() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let read = |file: &str| std::fs::read_to_string(docs.join(file)).expect("a document");
    let (metrics, keys) = (read("metrics.md"), read("configuration.md"));
    for (_, here) in KINDS.iter().flat_map(|(.., rows)| *rows) {
        for code in here.split('`').skip(1).step_by(2) {
            let known = match code.split_once(['.', '_']) {
                Some(("kvlane", _)) => metrics.contains(&format!("`{code}`")),
                Some(("hints" | "server" | "replicas" | "tokens", _)) => keys.contains(&format!("`{code}`")),
                _ => true,
            };
            assert!(known, "{code}");
        }
    }
}
