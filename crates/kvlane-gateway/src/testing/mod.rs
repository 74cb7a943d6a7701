//! A gateway, engines and clients for tests, all on loopback and free ports.
//!
//! [`TestGateway`] is the gateway as `kvlane serve` runs it. A [`FakeEngine`] answers probes by itself and hands
//! every other request to the test as a [`Call`], to which the test writes any bytes at any time. A [`FakeFeed`]
//! publishes KV events; an engine with one, and a cache, is a [`CachingEngine`]. A [`Client`] is a socket with just
//! enough HTTP to read responses; a [`DataPlane`] speaks Envoy's side of external processing to a picker. Nothing here sleeps: tests wait for bytes, for calls, or with [`eventually`] for a
//! condition.

mod caching;
mod chat;
mod client;
mod data_plane;
mod engine;
mod feed;
mod gateway;
mod grpc_engine;
pub mod parsers;
mod wait;

pub use self::caching::{
    BLOCK, CachingEngine, FeedEndpoint, caching_config, caching_gateway, caching_gateway_at_speed, chain,
    tokens,
};
pub use self::chat::{chat, chat_stream, event};
pub use self::client::{Client, Reply};
pub use self::data_plane::{
    Changes, Context, DataPlane, GrpcCall, Hint, Immediate, Outcome, Reaction, full_duplex,
};
pub use self::engine::{Call, FakeEngine, next_call};
pub use self::feed::FakeFeed;
pub use self::gateway::{TestGateway, config, in_turn, is_zero, key};
pub use self::grpc_engine::{GrpcEngine, GrpcEngineCall, next_grpc_call};
pub use self::wait::{PATIENCE, eventually, soon};
pub use kvlane_control::testing::{Told, batch};
