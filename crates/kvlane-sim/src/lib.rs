//! A fleet in virtual time.
//!
//! [`engine::Engine`] models one vLLM V1 instance as seen from outside: cached tokens, step durations, queueing,
//! preemption. It has no clock: a driver passes the time, asks for the next deadline and collects events.
//! [`world::World`] is such a driver: it plays a trace through many engines, placed by the
//! [`kvlane_core::router::Router`] that runs in production.

#![warn(clippy::disallowed_methods)]

pub mod chaos;
pub mod clock;
pub mod engine;
pub mod fault;
pub mod outcome;
pub mod pool;
pub mod rules;
pub mod tier;
pub mod transfer;
pub mod workload;
pub mod world;

/// Dependencies between requests, and the order in which a run sends them.
pub use kvlane_trace::plan::Plan;

pub use engine::{
    AdapterSlots, Batching, Engine, EngineConfig, EngineEvent, EngineRequest, EngineStats, Remote, own_block,
};
pub use outcome::{Failure, Outcome, Split};
pub use pool::Eviction;
pub use tier::CpuTier;
pub use transfer::{Connector, Transfer, TransferConfig};
pub use workload::Drive;
pub use world::{
    CellsConfig, Exchange, GatewaysConfig, Hints, OutputClaim, ReportFeed, Run, Sample, Send, Sketches,
    Traffic, World, WorldConfig,
};
