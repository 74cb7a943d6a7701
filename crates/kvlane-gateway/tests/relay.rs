//! Relaying: requests reach an engine and responses reach the client, unchanged and at once.

use kvlane_gateway::config::WorkerSpec;
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, chat_stream, config, event, next_call};
use serde_json::json;
use tokio::net::TcpListener;

/// Every API path with a body in an unusual format, so that a re-serialised one would differ.
fn apis() -> Vec<(&'static str, String)> {
    let prompt = r#""model" : "m",  "prompt":"caf\u00e9 \/ 1.0","x":1e2"#;
    vec![
        (
            "/v1/chat/completions",
            r#"{ "messages":[{"role":"user","content":"h\u0069"}] ,"model":"m" }"#.into(),
        ),
        ("/v1/completions", format!("{{{prompt}}}\n")),
        ("/v1/embeddings", r#"{"model":"m","input":["a" , "b"]}"#.into()),
        ("/v1/responses", r#"{"model":"m","input":"a","instructions":"b"}"#.into()),
        ("/v1/messages", r#"{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"a"}]}"#.into()),
        ("/v1/rerank", r#"{"model":"m","query":"a","documents":["b","c"]}"#.into()),
        ("/v1/score", r#"{"model":"m","text_1":"a","text_2":"b"}"#.into()),
        ("/tokenize", r#"{"model":"m","prompt":"a"}"#.into()),
        ("/detokenize", r#"{"model":"m","tokens":[1,2,3]}"#.into()),
        ("/generate", r#"{"text":"a","sampling_params":{"max_new_tokens":4}}"#.into()),
    ]
}

/// Invariant: Bodies and answers are relayed byte for byte, each piece as it arrives.
///
/// Also held by `the_client_gets_the_same_bytes_with_any_framing`,
/// `each_event_is_relayed_the_moment_it_arrives`.
#[tokio::test]
async fn every_api_reaches_the_engine_with_its_body_byte_for_byte() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for (path, body) in apis() {
        let answer = r#"{ "object" : "whatever","n":1.0 }"#;
        let (reply, (head, received)) = tokio::join!(gateway.ask("POST", path, &body), engine.answer(answer));
        assert!(head.starts_with(&format!("POST {path} HTTP/1.1\r\n")), "{head}");
        assert_eq!(String::from_utf8_lossy(&received), body, "{path}");
        assert_eq!((reply.status, reply.text().as_str()), (200, answer), "{path}");
        assert_eq!(reply.header("x-router-backend"), Some(engine.url().as_str()));
        assert!(reply.header("x-router-reason").is_some(), "{reply:?}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_listed_path_passes_through_unparsed_with_its_query() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for (method, target, body) in [
        ("GET", "/v1/files/a-b?limit=5&after=x%20y", ""),
        ("POST", "/v1/audio/transcriptions", "--b\r\nnot json"),
        ("DELETE", "/v1/files/a-b", ""),
        ("POST", "/v1/moderations?x", r#"{"model":"m"}"#),
    ] {
        let (reply, (head, received)) = tokio::join!(gateway.ask(method, target, body), engine.answer("{}"));
        assert!(head.starts_with(&format!("{method} {target} HTTP/1.1\r\n")), "{head}");
        assert_eq!((received.as_slice(), reply.status), (body.as_bytes(), 200));
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_workers_path_prefix_precedes_every_path() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let engine = FakeEngine::on(listener, json!([]));
    let mut config = config();
    let url = format!("{}/", engine.url());
    config.workers =
        vec![WorkerSpec { model: Some("m".into()), ..WorkerSpec::new(format!("{url}engines/a/")) }];
    let serving = kvlane_gateway::serve::Serving::start(config).expect("it starts");
    let call = engine.call().await;
    assert_eq!(call.target(), "GET /engines/a/health");
    drop(call);
    assert!(serving.shut_down().await.is_nothing());
}

#[tokio::test]
async fn model_lists_are_merged_over_the_fleet() {
    let listen = || async { TcpListener::bind("127.0.0.1:0").await.expect("a port") };
    let llama = json!([
        {"id": "llama", "object": "model", "root": "/m/llama", "parent": null, "max_model_len": 4096},
        {"id": "sql", "object": "model", "root": "/a/sql", "parent": "llama"},
    ]);
    let a = FakeEngine::on(listen().await, llama.clone());
    let b = FakeEngine::on(listen().await, llama);
    let c = FakeEngine::start("qwen").await;
    let gateway = TestGateway::start(config(), &[&a, &b, &c]).await;
    let list = gateway.ask("GET", "/v1/models", "").await.json();
    assert_eq!(list["object"], "list");
    let ids: Vec<_> =
        list["data"].as_array().expect("a list").iter().map(|card| card["id"].clone()).collect();
    assert_eq!(ids, ["llama", "qwen", "sql"]);
    assert_eq!(list["data"][0]["max_model_len"], 4096, "cards are the engines' own");
    assert_eq!(gateway.ask("GET", "/v1/models/sql", "").await.json()["parent"], "llama");
    assert_eq!(gateway.ask("GET", "/v1/models/gpt", "").await.error_code(), "model_not_found");

    let (reply, _) = tokio::join!(
        gateway.ask("POST", "/v1/completions", r#"{"model":"qwen","prompt":"a"}"#),
        c.answer("{}")
    );
    assert_eq!(reply.header("x-router-backend"), Some(c.url().as_str()));
    let ask = gateway.ask("POST", "/v1/completions", r#"{"model":"sql","prompt":"a"}"#);
    let (reply, ()) = tokio::join!(ask, async {
        tokio::select! { _ = a.answer("{}") => {}, _ = b.answer("{}") => {} }
    });
    assert_eq!(reply.status, 200, "an adapter is served by its model's workers");
    gateway.end().await;
}

#[tokio::test]
async fn an_unparsed_request_goes_to_its_model() {
    let (a, b) = (FakeEngine::start("a").await, FakeEngine::start("b").await);
    let gateway = TestGateway::start(config(), &[&b, &a]).await;
    let form = "--x\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nb\r\n--x--\r\n";
    for (path, fields, body, to_b) in [
        ("/v1/moderations", "", r#"{"model":"b"}"#, true),
        ("/v1/moderations", "", r#"{"model":"a"}"#, false),
        ("/v1/audio/transcriptions", "content-type: multipart/form-data; boundary=x\r\n", form, true),
        ("/v1/files?purpose=x&model=b", "", "", true),
        ("/v1/files", "x-gateway-model-name: b\r\n", "", true),
    ] {
        let mut client = gateway.client().await;
        client.request_with("POST", path, fields, body).await;
        let (answered, call) = next_call(&[&a, &b]).await;
        assert_eq!(answered == 1, to_b, "{path} {fields}");
        call.answer(200, "{}").await;
        assert_eq!(client.reply().await.status, 200);
    }
    let reply = gateway.ask("POST", "/v1/moderations", r#"{"model":"c"}"#).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (404, "model_not_found"));
    gateway.end().await;
}

#[tokio::test]
async fn each_event_is_relayed_the_moment_it_arrives() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("first")).await;
    let (status, headers) = client.head().await;
    assert_eq!(status, 200, "the head is relayed with the first event: {headers:?}");
    client.see("first").await;
    let pool = gateway.pool("m");
    for n in 0..10 {
        // The next event leaves the engine only after the client has seen the last one.
        call.chunk(&event(&format!("token-{n}"))).await;
        client.see(&format!("token-{n}")).await;
    }
    let load = pool
        .router
        .read(|scheduler| scheduler.pool().endpoints().next().map(|endpoint| endpoint.load.in_flight));
    let load = load.expect("an endpoint");
    assert_eq!((load.requests, load.prefill_tokens), (1, 0), "the prefill was over with the first token");
    call.chunk("data: [DONE]\n\n").await;
    call.end_stream().await;
    let (rest, whole) = client.rest().await;
    assert_eq!((rest.as_slice(), whole), (&b"data: [DONE]\n\n"[..], true));
    gateway.end().await;
}

#[tokio::test]
async fn the_client_gets_the_same_bytes_with_any_framing() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let body = [event("a"), event("b"), "data: [DONE]\n\n".into()].concat();
    let chunked = |size: usize| {
        let chunks = body.as_bytes().chunks(size);
        let chunks: String =
            chunks.map(|c| format!("{:X};x=y\r\n{}\r\n", c.len(), String::from_utf8_lossy(c))).collect();
        format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n{chunks}0\r\nx-trailer: 1\r\n\r\n")
    };
    let length = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let interim = format!("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n{length}");
    for (answer, closes) in [
        (chunked(1), false),
        (chunked(7), false),
        (chunked(10_000), false),
        (length, false),
        (interim, false),
        (format!("HTTP/1.1 200 OK\r\n\r\n{body}"), true),
        (format!("HTTP/1.0 200 OK\r\n\r\n{body}"), true),
        (
            format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len()),
            true,
        ),
    ] {
        for step in [1, 3, 64, usize::MAX] {
            let (reply, ()) =
                tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
                    let mut call = engine.call().await;
                    for piece in answer.as_bytes().chunks(step) {
                        call.send(piece).await;
                    }
                    if closes { drop(call) } else { call.keep() }
                });
            assert_eq!((reply.status, reply.text()), (200, body.clone()), "{answer:?} in steps of {step}");
        }
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_response_without_a_body_is_complete_at_once() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let connections = engine.connections();
    for (method, head) in [
        ("GET", "HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", "HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n"),
        ("GET", "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
    ] {
        let (reply, ()) = tokio::join!(gateway.ask(method, "/v1/files/thing", ""), async {
            let mut call = engine.call().await;
            call.send(head).await;
            call.keep();
        });
        assert_eq!((reply.status, reply.body.len()), (head[9..12].parse().expect("a status"), 0));
    }
    let mut client = gateway.client().await;
    client.request("HEAD", "/v1/files/thing", "").await;
    let mut call = engine.call().await;
    assert_eq!(call.target(), "GET /v1/files/thing");
    call.send("HTTP/1.1 200 OK\r\ncontent-length: 77\r\n\r\n").await;
    call.keep();
    let (status, headers) = client.head().await;
    assert_eq!(status, 200);
    assert!(headers.contains(&("content-length".into(), "77".into())), "{headers:?}");
    gateway.ledger_is_zero().await;
    assert!(engine.connections() <= connections + 2, "one connection per relay thread is enough");
    let left = r#"kvlane_requests_total{model="m",api="other",code="499"}"#;
    assert_eq!(gateway.metric(left).await, None, "no client disconnected early");
    gateway.end().await;
}

#[tokio::test]
async fn responses_of_any_status_are_relayed_unchanged() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for status in [201, 400, 404, 422, 429, 500, 503] {
        let body = format!(r#"{{"error":{{"message":"{status}"}}}}"#);
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            engine.call().await.answer(status, &body).await;
        });
        assert_eq!((reply.status, reply.text()), (status, body));
        assert_eq!(reply.header("x-router-backend"), Some(engine.url().as_str()));
    }
    gateway.end().await;
}

#[tokio::test]
async fn an_upstream_connection_is_reused() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.relay_threads = 1;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let mut used = Vec::new();
    for _ in 0..5 {
        let (reply, connection) =
            tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
                let mut call = engine.call().await;
                let connection = call.connection;
                call.begin_stream().await;
                call.chunk(&event("a")).await;
                call.end_stream().await;
                connection
            });
        assert_eq!(reply.status, 200);
        used.push(connection);
        gateway.ledger_is_zero().await;
    }
    assert!(used.iter().all(|connection| *connection == used[0]), "{used:?}");
    gateway.end().await;
}

/// Invariant: A POST is sent again without being counted as a retry only if no byte of it was accepted.
///
/// Also held by `a_closed_idle_connection_is_replaced_without_a_failure`.
#[tokio::test]
async fn a_request_accepted_on_an_idle_connection_counts_as_an_attempt() {
    for (retries, status) in [(0, 502), (1, 200)] {
        let engine = FakeEngine::start("m").await;
        let mut config = config();
        config.server.relay_threads = 1;
        config.retry.max_total_retries = retries;
        config.retry.max_worker_retries = 2;
        let gateway = TestGateway::start(config, &[&engine]).await;
        let mut client = gateway.begin(chat("m", "one")).await;
        engine.answer("{}").await;
        client.reply().await;
        client.request("POST", "/v1/chat/completions", &chat("m", "two")).await;
        // The engine has read the request, and may have worked on it for any time.
        drop(engine.call().await);
        if retries > 0 {
            let again = engine.call().await;
            assert!(String::from_utf8_lossy(&again.body).contains("two"));
            again.answer(200, "{}").await;
        }
        assert_eq!(client.reply().await.status, status);
        let failures = format!(r#"kvlane_worker_failures_total{{worker="{}",kind="broken"}}"#, engine.url());
        assert_eq!(gateway.metric(&failures).await, Some(1.0));
        gateway.end_quiet(&[&engine]).await;
    }
}

#[tokio::test]
async fn a_closed_idle_connection_is_replaced_without_a_failure() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.relay_threads = 1;
    config.retry.max_total_retries = 0;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let mut client = gateway.begin(chat("m", "one")).await;
    let mut call = engine.call().await;
    // The complete response, and then the end of the connection.
    call.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
    drop(call);
    client.reply().await;
    let (reply, _) = tokio::join!(
        async {
            client.request("POST", "/v1/chat/completions", &chat("m", "two")).await;
            client.reply().await
        },
        engine.answer("{}")
    );
    assert_eq!(reply.status, 200);
    let failures = format!(r#"kvlane_worker_failures_total{{worker="{}",kind="broken"}}"#, engine.url());
    assert_eq!(gateway.metric(&failures).await, None);
    gateway.end().await;
}

#[tokio::test]
async fn a_request_id_is_accepted_generated_and_echoed() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let ask = |fields: String| {
        let (gateway, engine) = (&gateway, &engine);
        async move {
            let mut client = gateway.client().await;
            client.request_with("POST", "/v1/chat/completions", &fields, &chat("m", "hi")).await;
            let mut call = engine.call().await;
            let forwarded: Vec<_> =
                call.head.lines().filter_map(|line| line.strip_prefix("x-request-id: ")).collect();
            assert_eq!(forwarded.len(), 1, "{}", call.head);
            let forwarded = forwarded[0].to_owned();
            call.send("HTTP/1.1 200 OK\r\nx-request-id: engine-1\r\ncontent-length: 2\r\n\r\n{}").await;
            call.keep();
            let reply = client.reply().await;
            assert_eq!(reply.headers.iter().filter(|(name, _)| name == "x-request-id").count(), 1);
            assert_eq!(reply.header("x-request-id"), Some(forwarded.as_str()), "echoed as it was forwarded");
            forwarded
        }
    };
    assert_eq!(ask("x-request-id: abc-1\r\n".into()).await, "abc-1");
    assert_eq!(ask("X-Correlation-Id: c-2\r\n".into()).await, "c-2");
    assert_eq!(ask("x-correlation-id: c-2\r\nx-request-id: r-3\r\n".into()).await, "r-3");
    let (one, two) = (ask(String::new()).await, ask(String::new()).await);
    assert!(one != two && one.starts_with("kvl-"), "{one} {two}");
    for unusable in ["x".repeat(129), "a b".into(), "caf\u{e9}".into(), String::new()] {
        assert!(ask(format!("x-request-id: {unusable}\r\n")).await.starts_with("kvl-"), "{unusable:?}");
    }
    let reply = gateway.ask("GET", "/nowhere", "").await;
    assert!(reply.header("x-request-id").is_some(), "errors carry one too");
    gateway.end().await;
}

#[tokio::test]
async fn hop_by_hop_and_router_headers_are_not_relayed_in_either_direction() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.client().await;
    let fields = "connection: keep-alive, x-mine\r\nx-mine: 1\r\nkeep-alive: 5\r\nte: trailers\r\nupgrade: websocket\r\n\
                  proxy-authorization: p\r\naccept-encoding: gzip\r\nexpect: 100-continue\r\nx-kept: 2\r\n\
                  x-router-backend: spoofed\r\nx-kvlane-trust: me\r\nauthorization: Bearer t\r\n";
    client.request_with("POST", "/v1/chat/completions", fields, &chat("m", "hi")).await;
    let mut call = engine.call().await;
    for name in [
        "connection",
        "x-mine",
        "keep-alive",
        "te",
        "upgrade",
        "proxy-authorization",
        "accept-encoding",
        "expect",
        "x-router-backend",
        "x-kvlane-trust",
    ] {
        assert_eq!(call.header(name), None, "{name} in {}", call.head);
    }
    assert_eq!((call.header("x-kept"), call.header("authorization")), (Some("2"), Some("Bearer t")));
    assert_eq!(call.header("host"), Some(engine.authority()));
    let head = "HTTP/1.1 200 OK\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\nupgrade: h2c\r\n\
                proxy-authenticate: Basic\r\nx-router-backend: spoofed\r\nx-router-other: 1\r\nx-kvlane-a: 1\r\nx-kept: 3\r\nset-cookie: a\r\nset-cookie: b\r\ncontent-length: 2\r\n\r\n{}";
    call.send(head).await;
    call.keep();
    // The body had arrived before a `100 Continue` was needed.
    let reply = client.reply().await;
    for name in
        ["x-hop", "keep-alive", "upgrade", "proxy-authenticate", "connection", "x-router-other", "x-kvlane-a"]
    {
        assert_eq!(reply.header(name), None, "{name} in {reply:?}");
    }
    assert_eq!(reply.header("x-kept"), Some("3"));
    let backends = reply.headers.iter().filter(|(name, _)| name == "x-router-backend");
    assert_eq!(backends.map(|(_, value)| value.as_str()).collect::<Vec<_>>(), [engine.url()]);
    assert_eq!(reply.headers.iter().filter(|(name, _)| name == "set-cookie").count(), 2);
    gateway.end().await;
}

#[tokio::test]
async fn a_client_connection_carries_many_requests_even_pipelined() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.relay_threads = 1;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let mut client = gateway.client().await;
    let one = |text: &str| {
        kvlane_gateway::testing::Client::request_bytes("POST", "/v1/chat/completions", "", &chat("m", text))
    };
    client.send([one("first"), one("second"), one("third")].concat()).await;
    for text in ["first", "second", "third"] {
        let call = engine.call().await;
        assert!(String::from_utf8_lossy(&call.body).contains(text), "in order");
        // The thread that holds the rest reads this one after it, and sends it first.
        let meanwhile = gateway.ask("POST", "/v1/chat/completions", chat("m", "meanwhile"));
        let (reply, (_, sent)) = tokio::join!(meanwhile, engine.answer("{}"));
        assert!(reply.status == 200 && sent == chat("m", "meanwhile").as_bytes(), "one at a time");
        call.answer(200, &format!(r#"{{"for":"{text}"}}"#)).await;
    }
    for text in ["first", "second", "third"] {
        assert_eq!(client.reply().await.json()["for"], text);
    }
    client.send(one("fourth")).await;
    engine.answer("{}").await;
    assert_eq!(client.reply().await.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn an_http_1_0_client_gets_a_stream_until_close() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let body = chat_stream("m", "hi");
    let mut client = gateway.client().await;
    client
        .send(format!("POST /v1/chat/completions HTTP/1.0\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
        .await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("a")).await;
    call.end_stream().await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.text()), (200, event("a")));
    assert_eq!(reply.header("transfer-encoding"), None);
    gateway.end().await;
}

#[tokio::test]
async fn a_client_that_expects_100_continue_gets_it() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let body = chat("m", "hi");
    let mut client = gateway.client().await;
    let fields = format!("host: x\r\nexpect: 100-continue\r\ncontent-length: {}\r\n", body.len());
    client.send(format!("POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n")).await;
    assert_eq!(client.head().await.0, 100);
    client.send(&body).await;
    engine.answer("{}").await;
    assert_eq!(client.reply().await.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn a_body_of_a_hundred_megabytes_is_relayed_where_allowed() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.max_payload_size = 128 << 20;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let body = chat("m", &"0123456789".repeat(10 << 20));
    let (reply, (_, received)) =
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", &body), engine.answer(r#"{"ok":true}"#));
    assert!(received == body.as_bytes(), "{} bytes of {}", received.len(), body.len());
    assert_eq!(reply.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn a_response_before_the_end_of_the_body_is_relayed() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    engine.read_heads_only();
    // More than the sockets between the two hold, so that the gateway is still sending.
    let mut client = gateway.begin(chat("m", &"x".repeat(40 << 20))).await;
    let mut call = engine.call().await;
    call.send("HTTP/1.1 413 Too Large\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        .await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.text().as_str()), (413, "{}"));
    call.drained().await;
    gateway.end_quiet(&[&engine]).await;
}
