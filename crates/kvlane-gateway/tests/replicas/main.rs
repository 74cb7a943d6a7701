//! Several gateways in front of the same engines: each knows what the others have in flight and have sent.

mod links;
mod told;

use std::net::SocketAddr;
use std::path::PathBuf;

use bytes::Bytes;
use kvlane_core::breaker::State;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::replica::ReplicaId;
use kvlane_gateway::config::{Config, LimitSpec};
use kvlane_gateway::testing::{
    FakeEngine, TestGateway, chat, chat_stream, config, eventually, next_call, soon,
};
use kvlane_wire::replica::{Hello, hello};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const CHAT: &str = "/v1/chat/completions";

/// A gateway that exchanges news, with no peers so far.
fn replica() -> Config {
    replica_with("prefix_aware")
}

/// The same with this policy.
fn replica_with(policy: &str) -> Config {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name(policy).expect("a policy");
    config.replicas.listen = Some("127.0.0.1:0".into());
    config
}

fn address(gateway: &TestGateway) -> SocketAddr {
    gateway.serving().exchange.as_ref().expect("it exchanges news").address.expect("it listens")
}

/// Gives a gateway these peers.
fn set_peers(gateway: &TestGateway, peers: &[SocketAddr]) {
    let mut config = Config::clone(&gateway.serving().config());
    config.replicas.peers = peers.iter().map(SocketAddr::to_string).collect();
    gateway.serving().reload(config).expect("valid");
}

fn live(gateway: &TestGateway) -> usize {
    gateway.fleet().replicas.live(gateway.fleet().clock.now()).len()
}

/// Gives all gateways the same peers, themselves among them, and waits until they hear each other.
async fn meet(gateways: &[&TestGateway]) {
    let all: Vec<SocketAddr> = gateways.iter().map(|gateway| address(gateway)).collect();
    gateways.iter().for_each(|gateway| set_peers(gateway, &all));
    let others = gateways.len() - 1;
    eventually("all hear each other", || gateways.iter().all(|gateway| live(gateway) == others)).await;
}

/// The requests that others have in flight on the only endpoint of `m`.
fn elsewhere(gateway: &TestGateway) -> u32 {
    gateway
        .pool("m")
        .router
        .read(|scheduler| scheduler.pool().endpoints().map(|endpoint| endpoint.elsewhere.requests).sum())
}

async fn readiness(gateway: &TestGateway) -> Value {
    gateway.operate("GET", "/readiness", "").await.json()["replicas"].take()
}

/// Sends a request and lets the chosen engine answer. Returns the worker, and the reason for it.
async fn ask(gateway: &TestGateway, engines: &[&FakeEngine; 2], prompt: &str) -> (String, String) {
    let served = async {
        tokio::select! { _ = engines[0].answer("{}") => {}, _ = engines[1].answer("{}") => {} }
    };
    let (reply, ()) = tokio::join!(gateway.ask("POST", CHAT, chat("m", prompt)), served);
    assert_eq!(reply.status, 200);
    let said = |name: &str| reply.header(name).expect("told").to_owned();
    (said("x-router-backend"), said("x-router-reason"))
}

fn prompt(n: usize) -> String {
    format!("question {n} ").repeat(200)
}
