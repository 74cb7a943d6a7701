//! Built-in routers: command, engine list and readiness of each.
//!
//! Each has one thread per core, and its own defaults except where those would distort the comparison: a router that
//! rejects requests early, or logs each of them, measures that instead of its placement. Options are those of kvlane,
//! sglang-router 0.3.2, vllm-router 0.1.17, nginx 1.22 and HAProxy 2.6.

use super::{MatrixError, Ready, Router};

/// The names of all.
pub const NAMES: [&str; 5] = ["kvlane", "sglang-router", "vllm-router", "nginx", "haproxy"];

/// Events are not buffered, connections to engines stay open, prompts stay in memory.
const NGINX: &str = r#"daemon off;
worker_processes {cores};
pid {directory}/nginx.pid;
error_log {directory}/error.log;
events { worker_connections 4096; }
http {
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    client_body_buffer_size 1m;
    client_max_body_size 64m;
    keepalive_requests 1000000000;
    upstream engines {
        least_conn;
        server {address};
        keepalive 256;
        keepalive_requests 1000000000;
    }
    server {
        listen 127.0.0.1:{port};
        location / {
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 1800s;
        }
    }
}
"#;

const HAPROXY: &str = "global
  nbthread {cores}
  maxconn 4096
defaults
  mode http
  http-reuse always
  timeout connect 5s
  timeout client 1800s
  timeout server 1800s
frontend clients
  bind 127.0.0.1:{port}
  default_backend engines
backend engines
  balance leastconn
  server engine{index} {address}
";

/// A built-in router. `None` for a name that is not in [`NAMES`].
pub fn by_name(name: &str) -> Option<Router> {
    let text = |text: &str| Some(text.to_owned());
    let path = |path: &str| Some(Ready(path.to_owned()));
    let router = match name {
        "kvlane" => Router {
            program: text("{kvlane}"),
            command: text(
                "{program} serve --host 127.0.0.1 --port {port} --prometheus-port {port:metrics} --log-level warn \
                 --policy={policy} --worker-urls {workers}",
            ),
            ready: path("http://127.0.0.1:{port:metrics}/readiness"),
            version: text("{program} --version"),
            ..Router::default()
        },
        "sglang-router" => Router {
            program: text("sglang-router"),
            command: text(
                "{program} launch --host 127.0.0.1 --port {port} --prometheus-host 127.0.0.1 \
                 --prometheus-port {port:metrics} --log-level error --max-concurrent-requests 4096 --policy={policy} \
                 --worker-urls {workers}",
            ),
            policies: vec!["cache_aware".to_owned()],
            ready: path("/readiness"),
            ..Router::default()
        },
        "vllm-router" => Router {
            program: text("vllm-router"),
            command: text(
                "{program} --host 127.0.0.1 --port {port} --prometheus-host 127.0.0.1 \
                 --prometheus-port {port:metrics} --log-level error --max-concurrent-requests 4096 --policy={policy} \
                 --worker-urls {workers}",
            ),
            policies: vec!["cache_aware".to_owned()],
            ready: path("/readiness"),
            ..Router::default()
        },
        "nginx" => Router {
            program: text("nginx"),
            command: text("{program} -e {directory}/error.log -c {config}"),
            config: text(NGINX),
            ready: path("/health"),
            version: text("{program} -v"),
            ..Router::default()
        },
        "haproxy" => Router {
            program: text("haproxy"),
            command: text("{program} -db -f {config}"),
            config: text(HAPROXY),
            ready: path("/health"),
            version: text("{program} -v"),
            ..Router::default()
        },
        _ => return None,
    };
    Some(Router { router: name.to_owned(), ..router })
}

/// A router with missing settings filled in from the built-in one.
pub(super) fn filled_in(router: &Router) -> Result<Router, MatrixError> {
    let fail = |why: String| Err(MatrixError { key: format!("routers.{}", router.router), why });
    if router.router.is_empty() || router.router.contains(|c: char| c.is_control() || "/\\".contains(c)) {
        return fail("a name needs at least one letter, and no slash".to_owned());
    }
    let known = by_name(router.like.as_deref().unwrap_or(&router.router));
    if let (Some(like), None) = (&router.like, &known) {
        return fail(format!("unknown built-in router '{like}': known are {}", NAMES.join(", ")));
    }
    if router.url.is_some() {
        let useless = [&router.command, &router.config, &router.program].iter().any(|told| told.is_some())
            || !router.policies.is_empty()
            || !router.args.is_empty();
        return match useless {
            true => fail("a router with a url is not started: remove the settings of its command".to_owned()),
            false => Ok(router.clone()),
        };
    }
    if known.is_none() && router.command.is_none() {
        return fail(format!("set its command or url, or use one of {}", NAMES.join(", ")));
    }
    let known = known.unwrap_or_default();
    let mut router = router.clone();
    // Another command has other options, files and policies.
    if router.command.is_none() {
        router.command = known.command;
        router.config = router.config.or(known.config);
        router.version = router.version.or(known.version);
        if router.policies.is_empty() {
            router.policies = known.policies;
        }
    }
    router.program = router.program.or(known.program);
    router.ready = router.ready.or(known.ready);
    Ok(router)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_a_router_that_can_be_started() {
        for name in NAMES {
            let router = filled_in(&Router { router: name.into(), ..Router::default() }).unwrap();
            assert_eq!(router.router, name);
            let command = router.command.unwrap();
            let told = format!("{command} {}", router.config.unwrap_or_default());
            assert!(command.starts_with("{program} ") && router.program.is_some(), "{name}");
            assert!(told.contains("{port}") && router.ready.is_some(), "{name}");
            assert!(
                told.contains("{workers}") || told.contains("{address}"),
                "{name} is not told of its engines"
            );
        }
    }

    #[test]
    fn what_a_router_says_itself_counts_more() {
        let router = Router {
            router: "theirs".into(),
            like: Some("sglang-router".into()),
            program: Some("./venv/bin/sglang-router".into()),
            policies: vec!["random".into()],
            ..Router::default()
        };
        let filled = filled_in(&router).unwrap();
        assert_eq!((filled.program, filled.policies), (router.program, router.policies));
        assert!(filled.command.unwrap().contains("launch"));
        let other = Router { router: "nginx".into(), command: Some("mine".into()), ..Router::default() };
        assert_eq!(filled_in(&other).unwrap().config, None, "another command needs no file of nginx");
    }

    #[test]
    fn a_router_that_runs_already_is_told_nothing() {
        let url = Some("http://127.0.0.1:1".to_owned());
        let running = Router { router: "theirs".into(), url, ..Router::default() };
        assert_eq!(filled_in(&running).unwrap(), running);
        let told = Router { policies: vec!["random".into()], ..running };
        assert!(filled_in(&told).unwrap_err().to_string().contains("is not started"));
    }
}
