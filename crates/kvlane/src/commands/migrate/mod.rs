//! `kvlane migrate`: the configuration of another router as one of kvlane's, with comments on what became of each part.
//!
//! It reads a file and writes to standard output; it changes nothing and connects to nothing.

mod draft;
mod line;
mod nginx;
mod values;

use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;

use self::draft::Draft;

/// What to migrate.
#[derive(Args)]
pub(crate) struct MigrateArgs {
    /// A file with a command line of sglang-router, SMG or vllm-router, an upstream block of nginx, or Helm values of vLLM
    /// production-stack or llm-d; `-` for standard input.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Writes the configuration.
pub(crate) fn run(args: &MigrateArgs) -> Result<ExitCode> {
    let name = args.file.display().to_string();
    let text = if name == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(&args.file)
    };
    let text = text.with_context(|| format!("cannot read {name}"))?;
    let draft = of(&text).with_context(|| name.clone())?;
    write!(std::io::stdout(), "{}", draft.written(&name))?;
    Ok(ExitCode::SUCCESS)
}

/// What kvlane does the same with.
fn of(text: &str) -> Result<Draft> {
    if let Some(draft) = values::read(text)? {
        return Ok(draft);
    }
    if let Some(draft) = nginx::read(text)? {
        return Ok(draft);
    }
    if let Some(draft) = line::read(text)? {
        return Ok(draft);
    }
    bail!(
        "this is no command line with `--worker-urls` and the like, no `upstream` block of nginx, and no Helm values with \
         `routerSpec` or `router`"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::from_yaml;

    /// The lines that are written, without comments at their ends.
    fn migrated(text: &str) -> String {
        of(text).expect("understood").written("FILE")
    }

    fn keys(text: &str) -> Vec<String> {
        let lines = migrated(text);
        let lines = lines.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        lines.map(|line| line.split("  # ").next().unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn a_command_line_becomes_a_file_that_means_the_same() {
        let text = "#!/bin/bash\n# the router\nexec python3 -m sglang_router.launch_router \\\n  --worker-urls http://w1:8000 http://w2:8000 \\\n  \
                    --policy cache_aware --cache-threshold 0.5 --port 30001 --max-tree-size 1000 \\\n  --api-key secret --mini-lb --nonsense 7 > log 2>&1 &\n";
        let written = migrated(text);
        assert_eq!(
            keys(text),
            [
                "routing:",
                "  policy: {cache_threshold: 0.5, name: cache_aware}",
                "server:",
                "  port: 30001",
                "workers:",
                "  - {url: http://w1:8000}",
                "  - {url: http://w2:8000}",
            ]
        );
        for said in ["--max-tree-size has no effect", "--mini-lb", "--nonsense", "KVLANE_WORKER_API_KEY"] {
            assert!(written.contains(said), "{said}: {written}");
        }
        assert!(!written.contains("secret"), "{written}");
        let config = from_yaml(&written).expect("a configuration");
        assert_eq!((config.workers.len(), config.server.port), (2, 30001));
    }

    #[test]
    fn feeds_and_keys_of_a_command_line_are_in_the_file() {
        let text = "vllm-router --worker-urls http://w1:8000 --kv-event-source http://w1:8000=tcp://w1:5557 \
                    --control-plane-api-keys 'ops:The operators:admin:secret'";
        let written = migrated(text);
        let config = from_yaml(&written).expect("a configuration");
        assert_eq!(config.workers[0].kv_events[0].endpoint, "tcp://w1:5557");
        assert_eq!(config.auth.keys[0].name, "ops");
        assert!(!written.contains("secret"), "{written}");
    }

    #[test]
    fn workers_with_feeds_keep_their_parts() {
        let text = "vllm-router --vllm-pd-disaggregation --prefill http://p:1 --decode http://d:1 --pd-kv-events http://p:1=tcp://p:5557";
        let workers = |file: &str| from_yaml(file).expect("a configuration").workers;
        let same = "workers: [{url: 'http://p:1', role: prefill, kv_events: [{endpoint: 'tcp://p:5557'}]}, {url: 'http://d:1', role: decode}]";
        assert_eq!(workers(&migrated(text)), workers(same));
    }

    #[test]
    fn an_upstream_block_becomes_workers() {
        let text = "
            upstream llm {
                least_conn;
                server 10.0.0.7:8000 weight=2 max_fails=5 fail_timeout=30s;
                server gpu-2:8000;   # the other one
                server 10.0.0.9:8000 backup;
                server 10.0.0.10:8000 down;
                keepalive 64;
            }
            server {
                listen 0.0.0.0:8443 ssl;
                ssl_certificate /etc/tls/cert.pem; ssl_certificate_key /etc/tls/key.pem;
                client_max_body_size 64m;
                gzip on;
                location / { proxy_pass http://llm; proxy_read_timeout 600s; proxy_buffering off; }
            }";
        assert_eq!(
            keys(text),
            [
                "breaker:",
                "  cooldown_max: 30s",
                "  failure_threshold: 5",
                "server:",
                "  host: 0.0.0.0",
                "  max_payload_size: 67108864",
                "  port: 8443",
                "timeouts:",
                "  first_byte_timeout: 600s",
                "tls:",
                "  certificate: /etc/tls/cert.pem",
                "  private_key: /etc/tls/key.pem",
                "upstream:",
                "  idle_max: 64",
                "workers:",
                "  - {url: http://10.0.0.7:8000}",
                "  - {url: http://gpu-2:8000}",
                "  - {url: http://10.0.0.9:8000}",
            ]
        );
        let written = migrated(text);
        for said in ["weight=2", "backup", "10.0.0.10:8000", "`gzip on`", "least_conn", "proxy_buffering"] {
            assert!(written.contains(said), "{said}: {written}");
        }
        assert!(from_yaml(&written).is_ok(), "{written}");
    }

    #[test]
    fn an_upstream_by_tls_is_called_by_tls_and_a_path_is_told() {
        let text = "upstream a { server w:8000; } upstream b { server x:8000; }
                    server { listen 80; location /v1/ { proxy_pass https://b/v1/; proxy_ssl_trusted_certificate ca.pem; } }";
        assert_eq!(
            keys(text),
            [
                "server:",
                "  host: 0.0.0.0",
                "  port: 80",
                "tls:",
                "  upstream_ca: ca.pem",
                "workers:",
                "  - {url: https://x:8000}"
            ]
        );
        assert!(migrated(text).contains("upstream a"));
    }

    #[test]
    fn values_of_production_stack_become_values_of_the_chart() {
        let text = "
servingEngineSpec:
  labels: {environment: prod, release: llm}
  containerPort: 8000
  vllmApiKey: secret
  modelSpec: [{name: qwen}]
routerSpec:
  replicaCount: 3
  routingLogic: session
  sessionKey: x-user-id
  servicePort: 80
  extraArgs: [--log-stats]
  hpa: {enabled: true}
";
        assert_eq!(
            keys(text),
            [
                "config:",
                "  hints:",
                "    session_headers: [x-user-id]",
                "  routing:",
                "    policy: session_sticky",
                "engines:",
                "  ports: [8000]",
                "  selector:",
                "    matchLabels: {environment: prod, release: llm}",
                "mode: gateway",
                "replicas: 3",
                "service:",
                "  port: 80",
            ]
        );
        let written = migrated(text);
        for said in ["routerSpec.extraArgs", "routerSpec.hpa", "vllmApiKey"] {
            assert!(written.contains(said), "{said}: {written}");
        }
        assert!(!written.contains("secret"), "{written}");
    }

    #[test]
    fn values_of_llm_d_become_values_of_the_chart() {
        let text = "
router:
  modelServers: {matchLabels: {app: vllm}, targetPorts: [{number: 8000}, {number: 8001}]}
  epp: {replicas: 1, pluginsConfigFile: a.yaml}
  inferencePool: {failureMode: FailClose}
";
        assert_eq!(
            keys(text),
            [
                "engines:",
                "  ports: [8000, 8001]",
                "  selector:",
                "    matchLabels: {app: vllm}",
                "mode: gateway-api",
                "picker:",
                "  failureMode: FailClose",
                "replicas: 2",
            ]
        );
        assert!(migrated(text).contains("router.epp.pluginsConfigFile"));
        let standalone = format!("{text}  proxy: {{enabled: true}}\n");
        assert!(keys(&standalone).contains(&"mode: envoy".to_owned()));
    }

    #[test]
    fn what_is_not_understood_is_an_error() {
        for text in [
            "",
            "hello world",
            "a: 1\nb: 2\n",
            "upstream {",
            "server { listen 80; }",
            "--worker-urls 'http://w",
        ] {
            assert!(of(text).is_err(), "{text:?}");
        }
    }
}
