//! The decision core of kvlane: a pure function of time, inputs and a seed.
//!
//! Nothing here waits, reads a clock, opens a socket or logs. The HTTP gateway and the simulator drive the same
//! [`router::Router`]; its inputs can be recorded and replayed.

#![warn(clippy::disallowed_methods)]

mod abort_on_panic;
pub mod adapters;
pub mod block;
pub mod bounded;
pub mod breaker;
pub mod budget;
pub mod busy;
pub mod cache_accuracy;
mod candidate;
mod columns;
pub mod config;
mod cost_unit;
mod decaying_counter;
pub mod decision;
pub mod disaggregation;
pub mod endpoint;
pub mod event;
mod evidence;
pub mod forecast;
pub mod health;
pub mod index;
pub mod limit;
pub mod load;
pub mod poison_prompts;
pub mod policy;
mod queue;
pub mod rates;
mod reason;
pub mod recent;
pub mod recording;
pub mod replica;
pub mod request;
pub mod retry;
mod ring;
pub mod rng;
pub mod router;
pub mod scheduler;
mod session_admission;
pub mod stall;
pub mod suggest;
mod table;
pub mod time;
pub mod timing;
