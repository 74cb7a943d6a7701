//! The tables of flags in docs/migrate, made from the lists of names and from what becomes of each.
//!
//! `KVLANE_WRITE_MIGRATION=1 cargo test -p kvlane --bin kvlane others` writes them again.

use std::fmt::Write as _;
use std::path::Path;

use clap::{Args as _, Command, CommandFactory as _};

use super::{Answer, ELSEWHERE, POLICIES, all, surface};
use crate::config::flags::FLAGS;
use crate::config::{ConfigArgs, MoreArgs};

/// The routers whose flags are listed: the page, the name and version, the names of its flags.
const ROUTERS: &[(&str, &str, &str)] = &[
    ("sglang-router", "sglang-router 0.3.2", include_str!("sglang-router-0.3.2.txt")),
    ("sglang-router", "SMG 1.13.0", include_str!("smg-1.13.0.txt")),
    ("vllm-router", "vllm-router 0.1.17", include_str!("vllm-router-0.1.17.txt")),
    ("production-stack", "production-stack's router", include_str!("production-stack.txt")),
    ("llm-d", "llm-d's endpoint picker", include_str!("llm-d-epp.txt")),
];

/// What a flag that kvlane has, too, does here; `None` if it has no such flag.
fn taken(name: &str) -> Option<String> {
    if let Some(flag) = FLAGS.iter().find(|flag| flag.name == name || flag.aliases.contains(&Some(name))) {
        let to = flag.sets().map_or_else(String::new, |to| format!(": {to}"));
        return Some(format!("`{}`{to}", flag.key));
    }
    let is_named = |arg: &clap::Arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long() == Some(name) || aliases.contains(&name)
    };
    let more = MoreArgs::augment_args(Command::new("serve"));
    let all = crate::cli::Cli::command();
    let arg = more.get_arguments().chain(all.get_arguments()).find(|arg| is_named(arg))?;
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let end = [". ", ": "].iter().filter_map(|end| help.find(end)).min().unwrap_or(help.len());
    let sentence = help[..end].trim_end_matches('.');
    let open = sentence.rfind('(').filter(|open| !sentence[*open..].contains(')'));
    Some(sentence[..open.unwrap_or(sentence.len())].trim_end().to_owned())
}

/// The tables of one router.
fn tables(router: &str, names: &str) -> String {
    let names: Vec<&str> = names.lines().collect();
    let answers = |of: fn(Answer) -> Option<&'static str>| {
        let mut rows: Vec<(&str, Vec<&str>)> = Vec::new();
        for (name, answer) in all().filter(|(name, _)| names.contains(name)) {
            let Some(text) = of(answer) else { continue };
            match rows.iter_mut().find(|(said, _)| *said == text) {
                Some((_, flags)) => flags.push(name),
                None => rows.push((text, vec![name])),
            }
        }
        rows
    };
    let ignored = answers(|answer| match answer {
        Answer::Ignored(why) => Some(why),
        Answer::Refused(_) => None,
    });
    let refused = answers(|answer| match answer {
        Answer::Refused(instead) => Some(instead),
        Answer::Ignored(_) => None,
    });
    let mine: Vec<(&str, String)> = names.iter().filter_map(|name| Some((*name, taken(name)?))).collect();
    let count = |rows: &[(&str, Vec<&str>)]| rows.iter().map(|(_, flags)| flags.len()).sum::<usize>();
    let (warned, no) = (count(&ignored), count(&refused));
    let mut text = format!(
        "Of the {} flags of {router}, {} are taken, {warned} are accepted with a warning that they have no effect, \
         and {no} are refused in one line.\n\n| Taken | Here |\n|---|---|\n",
        names.len(),
        mine.len(),
    );
    for (name, here) in &mine {
        let _ = writeln!(text, "| `--{name}` | {here} |");
    }
    for (head, rows) in [("No effect", ignored), ("Refused", refused)] {
        let column = if head == "Refused" { "Instead" } else { "Why" };
        let _ = write!(text, "\n| {head} | {column} |\n|---|---|\n");
        for (said, flags) in rows {
            let flags: Vec<String> = flags.iter().map(|name| format!("`--{name}`")).collect();
            let _ = writeln!(text, "| {} | {said} |", flags.join(", "));
        }
    }
    text
}

/// A page with the tables between its marks.
fn with_tables(page: &str, text: &str) -> String {
    let mut text = text.to_owned();
    for (_, router, names) in ROUTERS.iter().filter(|(of, ..)| *of == page) {
        let (begin, end) = (format!("<!-- flags of {router} -->\n"), "<!-- end of flags -->");
        let from = text.find(&begin).expect("the page has a mark") + begin.len();
        let to = from + text[from..].find(end).expect("it ends");
        text.replace_range(from..to, &format!("\n{}\n", tables(router, names)));
    }
    text
}

#[test]
fn the_pages_have_every_flag() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/migrate");
    for page in ["sglang-router", "vllm-router", "production-stack", "llm-d"] {
        let file = dir.join(format!("{page}.md"));
        let text = std::fs::read_to_string(&file).expect("the page");
        let right = surface::with_tables(page, &with_tables(page, &text));
        if std::env::var_os("KVLANE_WRITE_MIGRATION").is_some() {
            std::fs::write(&file, &right).expect("written");
        }
        let now = std::fs::read_to_string(&file).expect("the page");
        assert!(now == right, "KVLANE_WRITE_MIGRATION=1 cargo test -p kvlane --bin kvlane others");
    }
}

/// Invariant: Every flag of sglang-router, SMG and vllm-router, and those that are known of production-stack's router and llm-d's picker,
/// is taken, has no effect and says why, or is refused with what to write instead.
#[test]
fn every_flag_of_these_routers_has_an_answer() {
    for (_, router, names) in ROUTERS {
        for name in names.lines() {
            let answers = all().filter(|(other, _)| *other == name).count();
            let ways = answers + usize::from(taken(name).is_some());
            assert_eq!(ways, 1, "--{name} of {router}");
        }
    }
    let known: Vec<&str> = ROUTERS.iter().flat_map(|(.., names)| names.lines()).collect();
    for (name, _) in all().filter(|(name, _)| !BINARIES.contains(name) && !is_others(name)) {
        assert!(known.contains(&name) || name.starts_with("no-"), "--{name} is no router's");
    }
}

/// Whether a flag is in a group of [`ELSEWHERE`].
fn is_others(name: &str) -> bool {
    ELSEWHERE.iter().flat_map(|group| group.flags).any(|flag| super::name(flag) == name)
}

/// Flags that only the routers' own programs have, not their Python launchers.
const BINARIES: &[&str] = &[
    "service-discovery-type",
    "config-file",
    "api-key-validation-urls",
    "epd-config",
    "stream-request-bodies-over",
    "kv-indexer-ttl-secs",
    "kv-indexer-max-entries",
];

#[test]
fn what_other_routers_policies_are_called_is_told() {
    for (other, own) in POLICIES {
        assert!(kvlane_core::policy::PolicyConfig::by_name(other).is_none(), "{other}");
        assert!(kvlane_core::policy::PolicyConfig::by_name(own).is_some(), "{own}");
        for flag in ["--policy", "--prefill-policy", "--decode-policy"] {
            let error = parsed(&[flag, other]).expect_err("no such policy");
            assert_eq!(error, format!("{flag} {other}: kvlane has no such policy; the nearest is `{own}`"));
        }
    }
}

/// The warnings of a command line, or why it is refused.
fn parsed(flags: &[&str]) -> Result<Vec<String>, String> {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: ConfigArgs,
        #[arg(long)]
        log_level: Option<String>,
    }
    let line = ["kvlane"].iter().chain(flags);
    let line: Line = clap::Parser::try_parse_from(line).map_err(|error| error.to_string())?;
    line.args.load().map_err(|error| format!("{error:#}"))?;
    Ok(super::ignored(&line.args.others).collect())
}

/// Command lines of the routers' documentation and of those who use them, with the flags that have no effect.
const PASTED: &[(&str, &[&str])] = &[
    ("--worker-urls http://worker1:8000 http://worker2:8000 --policy cache_aware", &[]),
    (
        "--worker-urls http://localhost:8000 --policy round_robin --host 0.0.0.0 --port 8080 --insecure-admin",
        &[],
    ),
    (
        "--worker-urls http://w1:8000 http://w2:8000 --policy cache_aware --cache-threshold 0.5 --balance-abs-threshold 32 \
      --balance-rel-threshold 1.5 --eviction-interval-secs 120 --max-tree-size 67108864",
        &["eviction-interval-secs", "max-tree-size"],
    ),
    (
        "--worker-urls http://10.0.0.1:30000 http://10.0.0.2:30000 --policy cache_aware --port 30080 --cache-threshold 0.2 \
      --balance-abs-threshold 1 --balance-rel-threshold 1.2",
        &[],
    ),
    (
        "--pd-disaggregation --prefill http://prefill1:8000 9000 --prefill http://prefill2:8001 9001 --decode http://decode1:8002 \
      --decode http://decode2:8003 --prefill-policy cache_aware --decode-policy round_robin",
        &[],
    ),
    (
        "--pd-disaggregation --policy cache_aware --prefill http://127.0.0.1:8000 8995 --decode http://127.0.0.1:8001 --port 6688",
        &[],
    ),
    (
        "--pd-disaggregation --prefill http://p1:8000 none --decode http://d1:8000 --prefill-policy power_of_two \
      --decode-policy power_of_two --request-timeout-secs 3600",
        &[],
    ),
    (
        "--service-discovery --selector app=sglang-worker role=inference --service-discovery-namespace production \
      --service-discovery-port 8000",
        &[],
    ),
    (
        "--pd-disaggregation --service-discovery --prefill-selector app=sglang component=prefill --decode-selector app=sglang \
      component=decode --service-discovery-namespace sglang-system",
        &[],
    ),
    (
        "--worker-urls http://w1:8000 --enable-igw --policy cache_aware --max-concurrent-requests 256 --queue-size 512 \
      --queue-timeout-secs 30",
        &["enable-igw"],
    ),
    (
        "--worker-urls http://w1:8000 http://w2:8001 --retry-max-retries 3 --retry-initial-backoff-ms 100 \
      --retry-max-backoff-ms 10000 --retry-backoff-multiplier 2.0 --retry-jitter-factor 0.1",
        &[],
    ),
    (
        "--worker-urls http://w1:8000 --cb-failure-threshold 5 --cb-success-threshold 2 --cb-timeout-duration-secs 30 \
      --cb-window-duration-secs 60",
        &["cb-success-threshold", "cb-window-duration-secs"],
    ),
    ("--worker-urls http://w1:8000 --disable-retries --disable-circuit-breaker", &[]),
    (
        "--worker-urls http://w1:8000 --health-failure-threshold 3 --health-success-threshold 2 --health-check-timeout-secs 5 \
      --health-check-interval-secs 10 --health-check-endpoint /health",
        &[],
    ),
    ("--worker-urls http://w1:8000 http://w2:8000 --prometheus-host 127.0.0.1 --prometheus-port 9000", &[]),
    ("--worker-urls http://w1:8000 --request-id-headers x-request-id x-trace-id --log-level debug", &[]),
    ("--worker-urls http://w1:8000 --dp-aware --api-key secret", &["dp-aware"]),
    ("--worker-urls http://w1:8000 --max-concurrent-requests -1 --max-payload-size 536870912", &[]),
    (
        "--worker-urls http://w1:8000 --reasoning-parser deepseek-r1 --tool-call-parser json --history-backend memory",
        &["reasoning-parser", "tool-call-parser", "history-backend"],
    ),
    (
        "--worker-urls http://w1:8000 --worker-startup-timeout-secs 4200 --worker-startup-check-interval 30 \
      --shutdown-grace-period-secs 60 --log-dir /var/log/router",
        &["worker-startup-timeout-secs", "worker-startup-check-interval", "log-dir"],
    ),
    (
        "--worker-urls http://w1:8000 --jwt-issuer https://idp.example --jwt-audience kvlane --jwt-jwks-uri https://idp.example/keys \
      --control-plane-api-keys key1:Service:admin:secret123 key2:Reader:user:secret456 --control-plane-audit-enabled",
        &["control-plane-audit-enabled"],
    ),
    ("--worker-urls http://w1:8000 --tenant-api-key acme:secret1 --tenant-api-key globex:secret2", &[]),
    (
        "--policy round_robin --vllm-pd-disaggregation --prefill http://p1:8010 --decode http://d1:8020 --kv-connector mooncake \
      --port 30000",
        &[],
    ),
    (
        "--vllm-pd-disaggregation --kv-connector nixl --prefill http://127.0.0.1:8081 --prefill http://127.0.0.1:8082 \
      --decode http://127.0.0.1:8083 --decode http://127.0.0.1:8084 --port 8090 --intra-node-data-parallel-size 1",
        &["intra-node-data-parallel-size"],
    ),
    (
        "--worker-urls http://w1:8000 http://w2:8000 --policy consistent_hash --intra-node-data-parallel-size 8 \
      --worker-startup-timeout-secs 4200",
        &["worker-startup-timeout-secs", "intra-node-data-parallel-size"],
    ),
    (
        "--worker-urls http://w1:8000 http://w2:8000 --policy kv_aware --kv-event-source http://w1:8000=tcp://w1:5557 \
      --kv-event-source http://w2:8000=tcp://w2:5557 --kv-event-replay-source http://w1:8000=tcp://w1:5657 \
      --kv-event-block-size 16 --kv-event-model llama --router-temperature 0",
        &["kv-event-block-size", "kv-event-model", "router-temperature"],
    ),
    (
        "--worker-urls http://w1:8000 --policy round_robin --request-id-headers x-session-id --prometheus-port 29000",
        &[],
    ),
    (
        "--service-discovery --selector app=vllm-worker role=inference --service-discovery-namespace default --dp-aware",
        &["dp-aware"],
    ),
    (
        "--worker-urls http://w1:8000 --policy power_of_two --load-monitor-interval 5 --log-json --enable-trace",
        &["load-monitor-interval", "enable-trace"],
    ),
    (
        "--worker-urls http://w1:8000 --policy prefix_hash --prefix-token-count 256 --prefix-hash-load-factor 1.25",
        &["prefix-token-count", "prefix-hash-load-factor"],
    ),
    (
        "--worker-urls http://w1:8000 --tokenizer-cache-enable-l0 --tokenizer-cache-enable-l1 --tokenizer-cache-l1-max-memory 52428800",
        &["tokenizer-cache-enable-l0", "tokenizer-cache-enable-l1", "tokenizer-cache-l1-max-memory"],
    ),
];

/// Invariant: Command lines of sglang-router, SMG and vllm-router start kvlane, and say which of their flags have no effect.
#[test]
fn pasted_command_lines_are_taken() {
    for (line, without_effect) in PASTED {
        let flags: Vec<&str> = line.split_whitespace().collect();
        let warnings = parsed(&flags).unwrap_or_else(|error| panic!("{line}: {error}"));
        let mut said: Vec<&str> =
            warnings.iter().filter_map(|said| said.strip_prefix("--")?.split(' ').next()).collect();
        let mut expect = without_effect.to_vec();
        said.sort_unstable();
        expect.sort_unstable();
        assert_eq!(said, expect, "{line}");
    }
}

#[test]
fn what_cannot_be_done_is_refused_with_what_to_write_instead() {
    for (line, instead) in [
        ("--worker-urls http://w:8000 --mini-lb", "--policy random"),
        (
            "--worker-urls http://w:8000 --cors-allowed-origins https://a.example https://b.example",
            "load balancer",
        ),
        ("--worker-urls http://w:8000 --rate-limit-tokens-per-second 20", "limits"),
        (
            "--vllm-pd-disaggregation --kv-connector nixl --vllm-discovery-address 0.0.0.0:30001",
            "--worker-urls",
        ),
        (
            "--worker-urls http://w:8000 --enable-mesh --mesh-port 39527 --mesh-peer-urls a:39527 b:39527",
            "--replicas-peer",
        ),
        ("--worker-urls http://w:8000 --ca-cert-paths a.pem b.pem", "one file"),
        ("--worker-urls https://w:8443 --ca-cert-paths Cargo.toml", "Cargo.toml has no certificate in PEM"),
        (
            "--worker-urls https://w:8443 --client-cert-path Cargo.toml --client-key-path Cargo.toml",
            "upstream_",
        ),
        ("--worker-urls http://w:8000 --control-plane-api-keys admin:secret", "ID:NAME:ROLE:KEY"),
        ("--worker-urls http://w:8000 --control-plane-api-keys a:b:owner:secret", "admin or user"),
        ("--worker-urls http://w:8000 --tenant-api-key secret", "TENANT:KEY"),
        ("--worker-urls http://w:8000 --jwt-issuer https://idp.example", "--jwt-jwks-uri"),
    ] {
        let flags: Vec<&str> = line.split_whitespace().collect();
        let error = parsed(&flags).expect_err(line);
        assert!(error.contains(instead) && !error.contains("secret"), "{line}: {error}");
    }
}
