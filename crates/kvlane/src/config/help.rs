//! The help of the configuration's flags: the main ones first, the others in groups that `--help-all` shows.

use clap::Arg;

use super::flags::FLAGS;

/// The flags that `--help` shows, in this order. Each other flag is in a group.
const MAIN: [&str; 10] = [
    "worker-urls",
    "config",
    "host",
    "port",
    "prometheus-port",
    "policy",
    "tokenizer-path",
    "api-key",
    "worker-api-key",
    "service-discovery",
];
/// The sections of flags that set more than a key.
const SECTION_OF: [(&str, &str); 24] = [
    ("set", "server"),
    ("pd-disaggregation", "disaggregation"),
    ("prefill", "disaggregation"),
    ("decode", "disaggregation"),
    ("decode-policy", "disaggregation"),
    ("selector", "discovery"),
    ("prefill-selector", "discovery"),
    ("decode-selector", "discovery"),
    ("pool-name", "discovery"),
    ("service-discovery-port", "discovery"),
    ("service-discovery-namespace", "discovery"),
    ("dns-discovery", "discovery"),
    ("replicas-peer", "replicas"),
    ("pool-policy", "routing"),
    ("block-size", "routing"),
    ("kv-event-source", "kv_events"),
    ("kv-event-replay-source", "kv_events"),
    ("admin-api-key", "auth"),
    ("control-plane-api-keys", "auth"),
    ("tenant-api-key", "auth"),
    ("ca-cert-paths", "tls"),
    ("jwt-issuer", "auth"),
    ("jwt-audience", "auth"),
    ("jwt-jwks-uri", "auth"),
];
/// The groups, each with the sections of the keys that its flags set.
const GROUPS: [(&str, &[&str]); 9] = [
    ("Server", &["server", "metrics", "upstream", "log", "tracing"]),
    ("Placement and queue", &["routing"]),
    ("Cache knowledge", &["kv_events", "tokens"]),
    ("Failures", &["health", "retry", "breaker"]),
    ("Security", &["auth", "tls"]),
    ("Discovery of workers", &["discovery"]),
    ("Prefill and decode on two workers", &["disaggregation"]),
    ("Replicas of the gateway", &["replicas"]),
    ("Endpoint picker (kvlane epp)", &["epp"]),
];

/// The flag in its place: first, or in its group.
pub(super) fn placed(arg: Arg) -> Arg {
    let name = arg.get_long().unwrap_or_default();
    if let Some(order) = MAIN.iter().position(|main| *main == name) {
        return arg.display_order(order);
    }
    match group(name) {
        Some(group) => arg.help_heading(group).hide_short_help(true),
        None => arg,
    }
}

fn group(name: &str) -> Option<&'static str> {
    let key = FLAGS.iter().find(|flag| flag.name == name).map(|flag| flag.key);
    let section = match key {
        Some(key) => key.split('.').next()?,
        None => SECTION_OF.iter().find(|(flag, _)| *flag == name)?.1,
    };
    GROUPS.iter().find(|(_, sections)| sections.contains(&section)).map(|(group, _)| *group)
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command};

    use super::*;
    use crate::config::ConfigArgs;

    #[test]
    fn every_flag_is_a_main_one_or_in_a_group() {
        let command = ConfigArgs::augment_args(Command::new("serve"));
        let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
        let names: Vec<&str> = shown.filter_map(Arg::get_long).collect();
        for name in &names {
            assert!(MAIN.contains(name) || group(name).is_some(), "--{name} has no group");
        }
        for name in MAIN {
            assert!(names.contains(&name), "there is no --{name}");
        }
    }
}
