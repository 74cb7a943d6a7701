//! The engine model: a paged prefix cache and continuous batching in virtual time.
//!
//! [`engine::Engine`] behaves like one vLLM V1 instance as seen from outside: which tokens it finds in its cache, how
//! long each step takes, who waits, who is preempted. It has no clock. A driver tells it the time, asks for its next
//! deadline and collects what happened.

pub mod engine;
pub mod pool;
pub mod tier;
pub mod transfer;

pub use engine::{
    Batching, Engine, EngineConfig, EngineEvent, EngineRequest, EngineStats, Remote, own_block,
};
pub use pool::Eviction;
pub use tier::CpuTier;
pub use transfer::{Transfer, TransferConfig};
