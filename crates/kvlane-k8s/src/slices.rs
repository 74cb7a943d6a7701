//! From the EndpointSlices of a Service to engines.

use std::collections::HashMap;

use kvlane_core::disaggregation::Role;
use tokio::time::Instant;

use crate::assembly::{Engine, Stage};
use crate::objects::{Endpoint, Pod, Slice};
use crate::pods::{Context, Worker, parse_address};

/// The engines of slices. What pods say is added where they are known, by UID.
pub(crate) fn engines<'a>(
    context: &Context<'_>,
    slices: impl Iterator<Item = &'a Slice>,
    pods: &HashMap<&str, (&Pod, Option<Instant>)>,
    engines: &mut Vec<Engine>,
    problems: &mut Vec<String>,
) {
    // Of a Service with two address families each pod has an endpoint of each: the first family that is met counts.
    let mut slices: Vec<&Slice> = slices.collect();
    slices.sort_by(|a, b| (&a.address_type, &a.name).cmp(&(&b.address_type, &b.name)));
    for slice in slices {
        let said = format!("EndpointSlice {}/{}", context.namespace, slice.name);
        if slice.address_type == "FQDN" {
            problems.push(format!("{said}: its endpoints are host names: use discovery.dns for them"));
            continue;
        }
        if slice.endpoints.is_empty() {
            continue;
        }
        let ports = match context.ports(&slice.ports) {
            Ok(ports) => ports,
            Err(problem) => {
                problems.push(format!("{said}: {problem}"));
                continue;
            }
        };
        for endpoint in &slice.endpoints {
            endpoint_engines(context, endpoint, &ports, pods, engines, problems);
        }
    }
}

fn endpoint_engines(
    context: &Context<'_>,
    endpoint: &Endpoint,
    ports: &[u16],
    pods: &HashMap<&str, (&Pod, Option<Instant>)>,
    engines: &mut Vec<Engine>,
    problems: &mut Vec<String>,
) {
    let known = endpoint.pod.as_ref().and_then(|(_, uid)| pods.get(uid.as_str()));
    let said = match &endpoint.pod {
        Some((name, _)) => format!("pod {}/{name}", context.namespace),
        None => format!("endpoint {} in namespace {}", endpoint.address, context.namespace),
    };
    let stage = match (endpoint.terminating, endpoint.ready) {
        (true, _) => Stage::Terminating,
        (false, true) => Stage::Ready,
        (false, false) => Stage::NotReady,
    };
    // The pod is seen to be deleted, or to have ended, a little earlier than its endpoint.
    let stage = match known {
        Some((pod, _)) if pod.ended => return,
        Some((pod, _)) if pod.deletion.is_some() => Stage::Terminating,
        _ => stage,
    };
    let mut own_problems = Vec::new();
    match parse_address(&endpoint.address) {
        Ok(ip) => {
            let pod = known.map(|(pod, _)| *pod);
            let worker = Worker {
                // Without a pod, the address is all there is to tell one from another.
                uid: endpoint.pod.as_ref().map_or(endpoint.address.as_str(), |(_, uid)| uid),
                ip,
                role: pod.map_or(Role::Both, |pod| context.role(pod.role.as_deref(), &mut own_problems)),
                annotations: pod.and_then(|pod| pod.annotations.as_deref()),
            };
            for (rank, port) in ports.iter().enumerate() {
                engines.push(Engine {
                    key: format!("{}:{port}", worker.uid),
                    said: said.clone(),
                    spec: worker.spec(rank, *port, ports.len(), &mut own_problems),
                    stage,
                    created: pod.map_or(0, |pod| pod.created),
                    leaves: known.and_then(|(_, leaves)| *leaves),
                });
            }
        }
        Err(problem) => own_problems.push(problem),
    }
    if stage == Stage::Ready {
        problems.extend(own_problems.into_iter().map(|problem| format!("{said}: {problem}")));
    }
}
