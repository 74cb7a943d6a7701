//! `kvlane mock-engine`: one mock engine until SIGINT or SIGTERM.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use kvlane_core::timing::TimingFile;
use kvlane_mock::{
    DeathsLike, KvEventsConfig, KvEventsFaults, KvEventsHashes, KvRole, KvTransferConfig, KvTransferFaults,
    MockConfig, MockEngine,
};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use super::timing_file;

/// Flags have the names of llm-d-inference-sim and vLLM where those have the same flag.
#[derive(Args, Clone, Debug)]
pub(crate) struct MockEngineArgs {
    /// Address to listen on.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// The model's name.
    #[arg(long, default_value = "mock")]
    model: String,
    /// Names of the model in the API, instead of the model's.
    #[arg(long, num_args = 1..)]
    served_model_name: Vec<String>,
    /// Names of adapters of the model.
    #[arg(long, num_args = 1..)]
    lora_modules: Vec<String>,
    /// Adapters that can be loaded at once; by default all always are.
    #[arg(long)]
    max_loras: Option<u32>,
    /// With --max-loras: engine seconds to load one.
    #[arg(long, default_value_t = 0.5)]
    adapter_load_s: f64,
    /// Model and machine to imitate, as `model@gpu` or `model@gpuxN`.
    #[arg(long, default_value = "qwen2.5-7b@a100")]
    preset: String,
    /// A timing file, as `calibrate` writes it, instead of a preset; it also sets those of the sizes below that it
    /// contains.
    #[arg(long, value_name = "FILE", conflicts_with = "preset")]
    timing: Option<PathBuf>,
    /// Engine seconds per second.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Tokens in a KV block [default: 16].
    #[arg(long)]
    block_size: Option<u32>,
    /// KV blocks; by default what fits into the preset's memory.
    #[arg(long)]
    kv_cache_size: Option<u32>,
    /// Share of the preset's memory that weights, activations and KV cache may use.
    #[arg(long, default_value_t = 0.90)]
    gpu_memory_utilization: f64,
    /// Maximum sequences in a batch [default: 256].
    #[arg(long)]
    max_num_seqs: Option<u32>,
    /// Maximum tokens in a step [default: 2048].
    #[arg(long)]
    max_num_batched_tokens: Option<u32>,
    /// Maximum tokens of prompt and answer together.
    #[arg(long)]
    max_model_len: Option<u32>,
    /// Maximum requests in the engine's queue; further ones get 429.
    #[arg(long, default_value_t = 10_000)]
    max_waiting_queue_length: u32,
    /// Seed of the answers, and of the faults of the feed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Engines behind this API, each with its own cache; the header X-data-parallel-rank selects one.
    #[arg(long, default_value_t = 1)]
    data_parallel_size: u32,
    /// Publish KV events as vLLM does, configured by vLLM's JSON, such as
    /// {"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}.
    #[arg(long, value_name = "JSON", default_value = "{}", hide_default_value = true)]
    kv_events_config: KvEventsConfig,
    /// vLLM version whose wire format of events is used, from 0.9.2 on.
    #[arg(long, value_name = "VERSION", default_value = "0.32")]
    kv_events_version: String,
    /// Type of block hashes in events: `int` or `bytes`.
    #[arg(long, value_name = "KIND", default_value = "int")]
    kv_events_hashes: KvEventsHashes,
    /// Faults of the feed, such as drop=0.01,duplicate=0.01,reorder=0.01,delay=50ms,lie=0.1,silent=100.
    #[arg(long, value_name = "FAULTS", default_value = "", hide_default_value = true)]
    kv_events_faults: KvEventsFaults,
    /// Engine whose recorded failures the control port replays.
    #[arg(long, value_name = "ENGINE", default_value_t)]
    deaths_like: DeathsLike,
    /// Share requests with another mock engine as engines with this connector do: nixl, nixl-push, mooncake, sglang,
    /// lmcache or shared-storage. The port for transfers is the engine's own.
    #[arg(long, value_name = "CONNECTOR")]
    kv_connector: Option<String>,
    /// What it does of such requests: `prefill`, `decode` or `both`.
    #[arg(long, value_name = "ROLE", default_value = "both", value_parser = role)]
    role: KvRole,
    /// Engine seconds for which the blocks of a first leg are kept without news of the second.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    kv_lease: f64,
    /// Engine seconds of a transfer before its first byte.
    #[arg(long, value_name = "SECONDS", default_value_t = KvTransferConfig::default().kv_transfer_latency)]
    kv_transfer_latency: f64,
    /// Engine seconds that the first transfer from each other engine takes longer; NIXL's take about 7.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    kv_transfer_handshake: f64,
    /// Tokens of KV cache that are transferred per engine second [default: 128 KiB a token at 400 Gbit/s].
    #[arg(long, value_name = "TOKENS")]
    kv_transfer_tokens_per_second: Option<f64>,
    /// Transfers to the engine at the same time.
    #[arg(long, value_name = "COUNT", default_value_t = KvTransferConfig::default().kv_transfer_slots)]
    kv_transfer_slots: u32,
    /// Faults of transfers to the engine, such as fail=0.01,hang=0.001,slow=0.2,slow_s=20,abort_race=1.
    #[arg(long, value_name = "FAULTS", default_value = "", hide_default_value = true)]
    kv_transfer_faults: KvTransferFaults,
    /// A port, on the same address, that accepts faults at run time: POST /fault with {"fault":"slow","factor":4}, or
    /// reset, black_hole, heal, cut_feed, flood_feed, restore_feed, core_killed, core_stopped, server_killed,
    /// server_stopped, terminated, out_of_memory; or {"fault":"transfers","faults":{"fail":1}}.
    #[arg(long, value_name = "PORT")]
    control_port: Option<u16>,
}

/// The settings of KV transfers.
fn transfer(args: &MockEngineArgs) -> KvTransferConfig {
    let default = KvTransferConfig::default();
    KvTransferConfig {
        kv_connector: args.kv_connector.clone(),
        role: args.role,
        kv_lease: args.kv_lease,
        kv_transfer_latency: args.kv_transfer_latency,
        kv_transfer_handshake: args.kv_transfer_handshake,
        kv_transfer_tokens_per_second: args
            .kv_transfer_tokens_per_second
            .unwrap_or(default.kv_transfer_tokens_per_second),
        kv_transfer_slots: args.kv_transfer_slots,
        kv_transfer_faults: args.kv_transfer_faults,
    }
}

/// The role with this name.
fn role(name: &str) -> Result<KvRole, String> {
    match name {
        "prefill" => Ok(KvRole::Prefill),
        "decode" => Ok(KvRole::Decode),
        "both" => Ok(KvRole::Both),
        _ => Err("must be prefill, decode or both".into()),
    }
}

/// Runs it.
pub(crate) fn run(args: &MockEngineArgs) -> Result<ExitCode> {
    let mut config = MockConfig {
        model: args.model.clone(),
        served_model_name: args.served_model_name.clone(),
        lora_modules: args.lora_modules.clone(),
        max_loras: args.max_loras,
        adapter_load_s: args.adapter_load_s,
        preset: args.preset.clone(),
        speed: args.speed,
        gpu_memory_utilization: args.gpu_memory_utilization,
        max_model_len: args.max_model_len,
        max_waiting_queue_length: args.max_waiting_queue_length,
        seed: args.seed,
        data_parallel_size: args.data_parallel_size,
        kv_events_config: args.kv_events_config.clone(),
        kv_events_version: args.kv_events_version.clone(),
        kv_events_hashes: args.kv_events_hashes,
        kv_events_faults: args.kv_events_faults.clone(),
        deaths_like: args.deaths_like,
        kv_transfer: transfer(args),
        ..MockConfig::default()
    };
    if let Some(path) = &args.timing {
        let file = timing_file::read(path)?;
        // The file has the cache's size in tokens; the number of blocks follows from their size.
        config.imitate(TimingFile { block_tokens: args.block_size.or(file.block_tokens), ..file });
    }
    // Flags override the file.
    config.block_size = args.block_size.unwrap_or(config.block_size);
    config.kv_cache_size = args.kv_cache_size.or(config.kv_cache_size);
    config.max_num_seqs = args.max_num_seqs.unwrap_or(config.max_num_seqs);
    config.max_num_batched_tokens = args.max_num_batched_tokens.unwrap_or(config.max_num_batched_tokens);
    let timed_as = config.timing.as_ref().map_or_else(|| config.preset.clone(), |timing| timing.name());
    let address = SocketAddr::new(args.host, args.port);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
        let mut engine = MockEngine::start(config, listener)?;
        if let Some(port) = args.control_port {
            let address = SocketAddr::new(args.host, port);
            let listener =
                TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
            tracing::info!(address = %listener.local_addr()?, "accepting faults");
            engine.take_faults(listener);
        }
        tracing::info!(address = %engine.addr(), model = args.model, timing = timed_as, speed = args.speed, "serving");
        for feed in engine.feeds() {
            let replay = feed.replay.map(|address| address.to_string());
            tracing::info!(rank = feed.rank, publisher = %feed.publisher, replay, "publishing KV events");
        }
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = engine.died() => {
                tracing::info!("stopped by a fault");
                return Ok(ExitCode::SUCCESS);
            }
        }
        tokio::select! {
            () = engine.shutdown() => {}
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        Ok(ExitCode::SUCCESS)
    })
}
