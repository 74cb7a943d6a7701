//! Helm values of vLLM production-stack and of llm-d's router, as values of kvlane's chart.

use anyhow::Result;
use kvlane_wire::yaml;
use serde_json::{Map, Value, json};

use super::draft::Draft;

const ABOUT: &str =
    "Values of kvlane's Helm chart: `helm template kvlane deploy/helm/kvlane -f FILE` shows what they make.";

/// A value with a key that means the same: its path, the key.
type Same = (&'static str, &'static str);

/// Of production-stack's chart.
const STACK: &[Same] = &[
    ("servingEngineSpec.labels", "engines.selector.matchLabels"),
    ("routerSpec.replicaCount", "replicas"),
    ("routerSpec.servicePort", "service.port"),
    ("routerSpec.serviceType", "service.type"),
    ("routerSpec.resources", "resources"),
    ("routerSpec.serviceAnnotations", "service.annotations"),
];

/// Its routers.
const LOGICS: &[(&str, &str)] = &[
    ("roundrobin", "round_robin"),
    ("session", "session_sticky"),
    ("prefixaware", "prefix_aware"),
    ("kvaware", "fleet_cost"),
    ("disaggregated_prefill", "fleet_cost"),
    ("disaggregated_prefill_orchestrated", "fleet_cost"),
];

/// Of llm-d's charts.
const LLM_D: &[Same] = &[
    ("router.modelServers.matchLabels", "engines.selector.matchLabels"),
    ("router.inferencePool.failureMode", "picker.failureMode"),
    ("router.epp.resources", "resources"),
];

/// What the values say; `None` if they are of neither chart.
pub(super) fn read(text: &str) -> Result<Option<Draft>> {
    let Ok(Value::Object(values)) = yaml::read::<Value>(text) else { return Ok(None) };
    if values.contains_key("routerSpec") || values.contains_key("servingEngineSpec") {
        return Ok(Some(stack(&values)));
    }
    if values.get("router").is_some_and(|router| router.get("modelServers").is_some()) {
        return Ok(Some(llm_d(&values)));
    }
    Ok(None)
}

fn stack(values: &Map<String, Value>) -> Draft {
    let mut draft = Draft::new(ABOUT);
    let mut left = Value::Object(values.clone());
    draft.set("mode", json!("gateway"), "clients call kvlane");
    same(&mut draft, &mut left, STACK);
    let port = take(&mut left, "servingEngineSpec.containerPort").unwrap_or(json!(8000));
    draft.set("engines.ports", json!([port]), "servingEngineSpec.containerPort");
    if let Some(key) = take(&mut left, "routerSpec.sessionKey").filter(|key| key.as_str() != Some("")) {
        draft.set("config.hints.session_headers", json!([key]), "routerSpec.sessionKey");
    }
    if let Some(logic) = take(&mut left, "routerSpec.routingLogic") {
        let own = LOGICS.iter().find(|(other, _)| logic == *other).map_or("fleet_cost", |(_, own)| own);
        draft.set(
            "config.routing.policy",
            json!(own),
            &format!("routingLogic: {}", logic.as_str().unwrap_or("?")),
        );
        draft.remark("`config.routing.policy` may be left out: the default, fleet_cost, weighs caches and queued tokens.");
    }
    for engines in ["servingEngineSpec.vllmApiKey", "routerSpec.vllmApiKey"] {
        if take(&mut left, engines).is_some_and(|key| !key.is_null()) {
            draft.remark(format!(
                "{engines} is the key that engines want: put it into a Secret and set `config.upstream.api_key: {{file: …}}`."
            ));
        }
    }
    _ = take(&mut left, "servingEngineSpec");
    for part in ["cacheserverSpec", "loraController", "sharedPvcStorage", "sharedStorage"] {
        _ = take(&mut left, part);
    }
    draft.remark("The engines stay as production-stack's chart makes them: set `routerSpec.enableRouter: false` there when clients have moved.");
    rest(&mut draft, &left);
    draft
}

fn llm_d(values: &Map<String, Value>) -> Draft {
    let mut draft = Draft::new(ABOUT);
    let mut left = Value::Object(values.clone());
    let proxy = take(&mut left, "router.proxy.enabled");
    _ = take(&mut left, "router.proxy");
    match proxy == Some(json!(true)) {
        true => {
            draft.set("mode", json!("envoy"), "router.proxy; `gateway` does the same with one process less")
        }
        false => draft.set("mode", json!("gateway-api"), "an endpoint picker for a gateway that is there"),
    }
    same(&mut draft, &mut left, LLM_D);
    if let Some(Value::Array(ports)) = take(&mut left, "router.modelServers.targetPorts") {
        let ports: Vec<Value> = ports.iter().map(|port| port.get("number").unwrap_or(port).clone()).collect();
        draft.set("engines.ports", json!(ports), "router.modelServers.targetPorts");
    }
    let replicas = take(&mut left, "router.epp.replicas").and_then(|replicas| replicas.as_u64()).unwrap_or(1);
    draft.set("replicas", json!(replicas.max(2)), "router.epp.replicas; all are active");
    rest(&mut draft, &left);
    draft
}

/// Takes over what means the same.
fn same(draft: &mut Draft, left: &mut Value, pairs: &[Same]) {
    for (theirs, ours) in pairs {
        if let Some(value) = take(left, theirs).filter(|value| !value.is_null()) {
            draft.set(ours, value, theirs);
        }
    }
}

/// Takes a value out.
fn take(values: &mut Value, path: &str) -> Option<Value> {
    match path.split_once('.') {
        Some((name, rest)) => take(values.get_mut(name)?, rest),
        None => values.as_object_mut()?.remove(path),
    }
}

/// Says what was left.
fn rest(draft: &mut Draft, left: &Value) {
    let mut paths = Vec::new();
    leaves(left, "", 0, &mut paths);
    if !paths.is_empty() {
        draft.remark(format!("Left out: {}. docs/migrate says what there is instead.", paths.join(", ")));
    }
}

fn leaves(value: &Value, path: &str, depth: usize, paths: &mut Vec<String>) {
    match value {
        Value::Object(map) if depth < 3 => {
            for (name, value) in map {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                leaves(value, &path, depth + 1, paths);
            }
        }
        _ => paths.push(path.to_owned()),
    }
}
