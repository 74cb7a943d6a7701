//! From a pod to its engines.

use std::net::IpAddr;
use std::str::FromStr;

use kvlane_core::disaggregation::Role;
use kvlane_fleet::worker::config::{FeedSpec, WorkerSpec};
use tokio::time::Instant;

use crate::assembly::{Engine, Stage};
use crate::objects::{Annotations, Pod, Port};

/// What a pod's engines have in common besides the pod.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context<'a> {
    /// The pod's namespace.
    pub(crate) namespace: &'a str,
    /// The ports of each pod; empty if the pods say it.
    pub(crate) ports: &'a [u16],
    /// Where those ports are written.
    pub(crate) ports_key: &'a str,
    /// The role that the selector gives.
    pub(crate) role: Option<Role>,
}

// === impl Context ===

impl Context<'_> {
    /// The engines of a pod, one for each port. Those of a pod that is not ready yet are listed, too; problems are told
    /// of those only that would be workers but for them.
    pub(crate) fn engines(
        &self,
        pod: &Pod,
        leaves: Option<Instant>,
        engines: &mut Vec<Engine>,
        problems: &mut Vec<String>,
    ) {
        let stage = match (&pod.deletion, pod.ready) {
            _ if pod.ended => return,
            (Some(_), _) => Stage::Terminating,
            (None, true) => Stage::Ready,
            (None, false) => Stage::NotReady,
        };
        let said = format!("pod {}/{}", self.namespace, pod.name);
        let mut own_problems = Vec::new();
        match self.ports(&pod.ports) {
            Ok(ports) => {
                if let Some(ip) = address(pod, &mut own_problems) {
                    let worker = Worker {
                        uid: &pod.uid,
                        ip,
                        role: self.role(pod.role.as_deref(), &mut own_problems),
                        annotations: pod.annotations.as_deref(),
                    };
                    for (rank, port) in ports.iter().enumerate() {
                        let spec = worker.spec(rank, *port, ports.len(), &mut own_problems);
                        engines.push(Engine {
                            key: format!("{}:{port}", worker.uid),
                            said: said.clone(),
                            spec,
                            stage,
                            created: pod.created,
                            leaves,
                        });
                    }
                }
            }
            Err(problem) => own_problems.push(problem),
        }
        // A pod that starts has no address yet, and one that ends has had its problems told.
        if stage == Stage::Ready {
            problems.extend(own_problems.into_iter().map(|problem| format!("{said}: {problem}")));
        }
    }

    /// The ports of the engines of something that declares these.
    pub(crate) fn ports(&self, declared: &[Port]) -> Result<Vec<u16>, String> {
        if !self.ports.is_empty() {
            return Ok(self.ports.to_vec());
        }
        if let Some(http) = declared.iter().find(|port| port.name.as_deref() == Some("http")) {
            return Ok(vec![http.number]);
        }
        let tcp: Vec<u16> = declared.iter().filter(|port| port.tcp).map(|port| port.number).collect();
        match tcp[..] {
            [port] => Ok(vec![port]),
            [] => Err(format!(
                "it declares no TCP port: name its port `http` in the manifest, or set {}",
                self.ports_key
            )),
            _ => Err(format!(
                "it declares the ports {} and names none of them `http`: name one, or set {}",
                listed(&tcp),
                self.ports_key
            )),
        }
    }

    /// The role of a pod, from its selector or from its label.
    pub(crate) fn role(&self, label: Option<&str>, problems: &mut Vec<String>) -> Role {
        if let Some(role) = self.role {
            return role;
        }
        match label.map(|label| label.trim().to_ascii_lowercase().replace('_', "-")).as_deref() {
            None | Some("" | "both" | "prefill-decode" | "encode-prefill-decode") => Role::Both,
            Some("prefill") => Role::Prefill,
            Some("decode") => Role::Decode,
            Some("encode") => Role::Encode,
            Some("encode-prefill") => {
                problems.push(
                    "the label llm-d.ai/role is `encode-prefill`: it is used for prefill only; run encoders as pods of \
                     their own with the role `encode`"
                        .into(),
                );
                Role::Prefill
            }
            Some(_) => {
                problems.push(format!(
                    "the label llm-d.ai/role is `{}`, which is no role: it is taken for prefill and decode; write \
                     prefill, decode, prefill-decode or encode",
                    label.unwrap_or_default()
                ));
                Role::Both
            }
        }
    }
}

/// What the workers of a pod or an endpoint have in common.
pub(crate) struct Worker<'a> {
    /// The pod's UID.
    pub(crate) uid: &'a str,
    /// Its address.
    pub(crate) ip: IpAddr,
    /// Its role.
    pub(crate) role: Role,
    /// The annotations of the pod, if they are known.
    pub(crate) annotations: Option<&'a Annotations>,
}

// === impl Worker ===

impl Worker<'_> {
    /// The worker at the port of a rank, of so many that have a port of their own.
    pub(crate) fn spec(
        &self,
        rank: usize,
        port: u16,
        ports: usize,
        problems: &mut Vec<String>,
    ) -> WorkerSpec {
        let host = match self.ip {
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) => format!("[{ip}]"),
        };
        let Some(annotations) = self.annotations else {
            return WorkerSpec { role: self.role, ..WorkerSpec::new(format!("http://{host}:{port}")) };
        };
        // The problems of an annotation are those of all ranks.
        let mut all_ranks = Vec::new();
        let scheme = match annotations.scheme.as_deref() {
            None | Some("http") => "http",
            Some("https") => "https",
            Some(other) => {
                all_ranks.push(wrong("kvlane.io/scheme", other, "write http or https; http is used"));
                "http"
            }
        };
        let kv_ports =
            ranks("kvlane.io/kv-events-port", annotations.kv_events_port.as_deref(), &mut all_ranks);
        let replay_ports =
            ranks("kvlane.io/kv-events-replay-port", annotations.replay_port.as_deref(), &mut all_ranks);
        let bootstrap_port = annotations.bootstrap_port.as_deref().and_then(|value| {
            let port = port_of(value);
            if port.is_none() {
                all_ranks.push(wrong(
                    "sglang.ai/bootstrap-port",
                    value,
                    "write a port from 1 to 65535; it is disregarded",
                ));
            }
            port
        });
        let text = |key: &str, value: &Option<String>, problems: &mut Vec<String>| {
            let value = value.as_deref()?.trim();
            if value.is_empty() {
                problems.push(wrong(key, value, "write a value, or leave it out; it is disregarded"));
            }
            (!value.is_empty()).then(|| value.to_owned())
        };
        let model = text("kvlane.io/model", &annotations.model, &mut all_ranks);
        let tokenizer = text("kvlane.io/tokenizer", &annotations.tokenizer, &mut all_ranks).map(Into::into);
        if kv_ports.is_empty() && !(replay_ports.is_empty() && annotations.topic.is_none()) {
            all_ranks.push(
                "it has an annotation for the replay port or the topic of KV events and none that counts for their \
                 port: add kvlane.io/kv-events-port; the engine is asked for its feeds"
                    .into(),
            );
        }
        let feed = |rank: usize| {
            Some(FeedSpec {
                endpoint: format!("tcp://{host}:{}", of_rank(&kv_ports, rank)?),
                replay: of_rank(&replay_ports, rank).map(|port| format!("tcp://{host}:{port}")),
                topic: annotations.topic.clone().unwrap_or_default(),
            })
        };
        // Ranks with a port each have a feed each; ranks behind one port have as many as there are ports of feeds.
        let feeds = if ports > 1 { rank..rank + 1 } else { 0..kv_ports.len() };
        if rank == 0 {
            problems.append(&mut all_ranks);
        }
        WorkerSpec {
            model,
            kv_events: feeds.filter_map(feed).collect(),
            role: self.role,
            bootstrap_port,
            tokenizer,
            ..WorkerSpec::new(format!("{scheme}://{host}:{port}"))
        }
    }
}

/// An address as it is written by the cluster.
pub(crate) fn parse_address(text: &str) -> Result<IpAddr, String> {
    IpAddr::from_str(text).map_err(|_| format!("its address `{text}` is no IP address"))
}

fn address(pod: &Pod, problems: &mut Vec<String>) -> Option<IpAddr> {
    let Some(ip) = &pod.ip else {
        problems.push(
            "it is ready and has no IP address: see `kubectl describe pod`, and the network plug-in of its node".into(),
        );
        return None;
    };
    parse_address(ip).map_err(|problem| problems.push(problem)).ok()
}

/// The ports of an annotation: one, from which ranks count up, or one for each rank.
fn ranks(key: &str, value: Option<&str>, problems: &mut Vec<String>) -> Vec<u16> {
    let Some(value) = value else { return Vec::new() };
    let ports: Option<Vec<u16>> = value.split(',').map(port_of).collect();
    ports.unwrap_or_else(|| {
        problems.push(wrong(
            key,
            value,
            "write a port from 1 to 65535, or one for each rank as in `5557,5558`; it is disregarded",
        ));
        Vec::new()
    })
}

fn of_rank(ports: &[u16], rank: usize) -> Option<u16> {
    match ports {
        [first] => first.checked_add(u16::try_from(rank).ok()?),
        ports => ports.get(rank).copied(),
    }
}

fn port_of(value: &str) -> Option<u16> {
    value.trim().parse().ok().filter(|port| *port > 0)
}

fn wrong(key: &str, value: &str, what_to_do: &str) -> String {
    let value: String = value.chars().filter(|char| !char.is_control()).take(100).collect();
    format!("the annotation {key} is `{value}`: {what_to_do}")
}

/// Numbers as in `1, 2, 3`.
pub(crate) fn listed(numbers: &[u16]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
