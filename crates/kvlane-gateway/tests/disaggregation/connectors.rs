//! What is particular to a connector.

use kvlane_core::disaggregation::Role;
use kvlane_gateway::config::WorkerSpec;
use kvlane_gateway::testing::{
    FakeEngine, TestGateway, chat, chat_stream, event, eventually, in_turn, next_call,
};
use kvlane_wire::disaggregation::Connector;
use serde_json::{Value, json};

use super::{World, params, read};

#[tokio::test]
async fn engines_of_sglang_get_both_legs_at_once_with_one_room() {
    let world = World::with(in_turn(), Connector::Sglang).await;
    let body = chat_stream("m", "hi");
    let mut client = world.gateway.begin(&body).await;
    let (first, mut second) = tokio::join!(world.prefill.call(), world.decode.call());
    let (a, b) = (read(&first), read(&second));
    assert_eq!(a, b, "the same body");
    assert_eq!((&a["bootstrap_host"], &a["bootstrap_port"]), (&json!("127.0.0.1"), &json!(8998)));
    assert!(a["bootstrap_room"].is_u64(), "{a}");
    second.begin_stream().await;
    second.chunk(&event("one")).await;
    client.head().await;
    client.see("one").await;
    first.answer(200, "{}").await;
    second.chunk("data: [DONE]\n\n").await;
    second.end_stream().await;
    client.rest().await;
    world.end().await;
}

#[tokio::test]
async fn engines_of_sglang_do_not_serve_alone() {
    let world = World::with(in_turn(), Connector::Sglang).await;
    let mut client = world.gateway.begin(chat("m", "hi")).await;
    let (first, mut second) = tokio::join!(world.prefill.call(), world.decode.call());
    first.answer(500, "{}").await;
    second.gateway_gone().await;
    assert_eq!(client.reply().await.status, 500, "there is no other pair");
    let reply = world.gateway.ask("POST", "/v1/completions", r#"{"model":"m","prompt":["a","b"]}"#).await;
    assert_eq!(reply.status, 503, "it cannot be split: {}", reply.text());
    world.end().await;
}

/// Invariant: A decode worker's sidecar gets the client's body and the place of the prefill worker, whose load counts until
/// the prompt is computed.
#[tokio::test]
async fn a_sidecar_gets_the_whole_request_and_the_place_of_the_prefill_worker() {
    let world = World::with(in_turn(), Connector::LlmdSidecar).await;
    for body in [chat("m", "hi"), chat_stream("m", "hi")] {
        let mut client = world.gateway.begin(&body).await;
        let mut call = world.alone(&body).await;
        assert_eq!(call.header("x-prefiller-host-port"), Some(world.prefill.authority()));
        let reply = if body.contains("\"stream\"") {
            assert_eq!(world.in_flight(), [1, 1], "both are reserved");
            call.begin_stream().await;
            call.chunk(&event("one")).await;
            eventually("the prompt is computed", || world.in_flight() == [0, 1]).await;
            call.chunk("data: [DONE]\n\n").await;
            call.end_stream().await;
            client.reply().await
        } else {
            // When its first token is written is not seen.
            eventually("the prompt should be computed", || world.in_flight() == [0, 1]).await;
            call.answer(200, r#"{"id":"x"}"#).await;
            client.reply().await
        };
        assert_eq!(reply.status, 200);
        assert_eq!(reply.header("x-router-prefill"), Some(world.prefill.url().as_str()));
        let timing = reply.header("server-timing").expect("stages");
        assert!(!timing.contains("prefill;") && !timing.contains("transfer;"), "not seen: {timing}");
        world.gateway.ledger_is_zero().await;
    }
    world.end().await;
}

#[tokio::test]
async fn what_a_sidecar_cannot_do_is_done_by_one_worker() {
    let mut config = in_turn();
    config.breaker.failure_threshold = 1;
    let world = World::with(config, Connector::LlmdSidecar).await;
    let failures = [403, 429, 500, 502, 503, 504];
    for status in failures {
        let body = chat("m", &format!("hi {status}"));
        let mut client = world.gateway.begin(&body).await;
        world.alone(&body).await.answer(status, "no").await;
        let call = world.alone(&body).await;
        assert_eq!(call.header("x-prefiller-host-port"), None);
        call.answer(200, r#"{"id":"x"}"#).await;
        assert_eq!(client.reply().await.status, 200, "after {status}");
        world.gateway.ledger_is_zero().await;
    }
    let failed =
        format!(r#"kvlane_worker_failures_total{{worker="{}",kind="transfer"}}"#, world.decode.url());
    assert_eq!(world.gateway.metric(&failed).await, Some(failures.len() as f64));
    let mut client = world.gateway.begin(chat("m", "hi")).await;
    world.decode.call().await.answer(400, r#"{"error":{"message":"no"}}"#).await;
    assert_eq!(client.reply().await.status, 400, "the client's own mistake");
    world.end().await;
}

/// Invariant: No header of a client makes a sidecar send a request to an address of the client's choice.
#[tokio::test]
async fn headers_for_sidecars_come_from_no_client() {
    let world = World::with(in_turn(), Connector::LlmdSidecar).await;
    let names = [
        "x-prefiller-host-port",
        "x-encoder-hosts-ports",
        "x-data-parallel-host-port",
        "x-kv-cache-source-host-port",
    ];
    let fields: String = names.iter().map(|name| format!("{name}: 6.6.6.6:6\r\n")).collect();
    let mut client = world.gateway.client().await;
    client.request_with("POST", "/v1/chat/completions", &fields, &chat("m", "hi")).await;
    let call = world.decode.call().await;
    let own = [Some(world.prefill.authority()), None, None, None];
    assert_eq!(names.map(|name| call.header(name)), own);
    call.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    world.end().await;
}

#[tokio::test]
async fn a_sidecar_learns_the_encode_workers_for_a_chat_with_media() {
    let encoders = [FakeEngine::start("m").await, FakeEngine::start("m").await];
    let mut config = in_turn();
    let encode = |engine: &FakeEngine| WorkerSpec { role: Role::Encode, ..WorkerSpec::new(engine.url()) };
    config.workers = encoders.iter().map(encode).collect();
    let world = World::with(config, Connector::LlmdSidecar).await;
    let image = json!([{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": "data:,"}}]);
    let body = json!({"model": "m", "messages": [{"role": "user", "content": image}]}).to_string();
    let mut client = world.gateway.begin(&body).await;
    let call = world.alone(&body).await;
    let mut named: Vec<&str> = call.header("x-encoder-hosts-ports").expect("encoders").split(',').collect();
    named.sort_unstable();
    let mut all = encoders.each_ref().map(FakeEngine::authority);
    all.sort_unstable();
    assert_eq!(named, all);
    assert_eq!(call.header("x-prefiller-host-port"), Some(world.prefill.authority()));
    call.answer(502, "no").await;
    let call = world.alone(&body).await;
    assert_eq!(call.header("x-encoder-hosts-ports"), None, "one worker does it all");
    call.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    let mut client = world.gateway.begin(chat("m", "hi")).await;
    let call = world.decode.call().await;
    assert_eq!(call.header("x-encoder-hosts-ports"), None, "there is nothing to encode");
    call.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    world.gateway.ledger_is_zero().await;
    world.gateway.end_quiet(&[&world.prefill, &world.decode, &encoders[0], &encoders[1]]).await;
}

#[tokio::test]
async fn engines_with_mooncake_get_both_legs_at_once_and_the_id_that_the_bootstrap_server_tells() {
    let world = World::with(in_turn(), Connector::Mooncake).await;
    for (n, body) in [chat("m", "hi"), chat_stream("m", "hi"), chat("m", "again")].into_iter().enumerate() {
        let asked: Value = serde_json::from_str(&body).expect("JSON");
        let mut client = world.gateway.begin(&body).await;
        if n == 0 {
            world.tells_engine_ids(&["e_dp0"]).await;
        }
        let (first, second) = world.both().await;
        assert_eq!(
            (first.header("x-data-parallel-rank"), second.header("x-data-parallel-rank")),
            (None, None)
        );
        let (a, mut b) = (read(&first), read(&second));
        assert_eq!(
            (&a["max_tokens"], &a["stream"], &a["ignore_eos"]),
            (&json!(1), &json!(false), &json!(true))
        );
        assert_eq!(a["kv_transfer_params"]["do_remote_decode"], true);
        let id = a["kv_transfer_params"]["transfer_id"].clone();
        assert!(id.as_str().is_some_and(|id| id.starts_with("xfer-")), "{a}");
        let found =
            b.as_object_mut().expect("an object").remove("kv_transfer_params").expect("where they are");
        let place = format!("http://{}", world.prefill.authority());
        assert_eq!(
            found,
            json!({"do_remote_prefill": true, "do_remote_decode": false, "transfer_id": id,
                "remote_engine_id": "e_dp0", "remote_bootstrap_addr": place})
        );
        assert_eq!(b, asked);
        first.answer(200, r#"{"choices":[]}"#).await;
        second.answer(200, r#"{"id":"x"}"#).await;
        assert_eq!(client.reply().await.status, 200);
        world.gateway.ledger_is_zero().await;
    }
    // Its engine may have been started again.
    let body = chat("m", "hi");
    let mut client = world.gateway.begin(&body).await;
    let (first, second) = world.both().await;
    first.answer(200, r#"{"choices":[]}"#).await;
    second.answer(500, r#"{"error":{"message":"Internal server error"}}"#).await;
    world.alone(&body).await.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    let mut client = world.gateway.begin(&body).await;
    world.tells_engine_ids(&["e2_dp0"]).await;
    let (first, second) = world.both().await;
    assert_eq!(read(&second)["kv_transfer_params"]["remote_engine_id"], "e2_dp0");
    first.answer(200, r#"{"choices":[]}"#).await;
    second.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    world.end().await;
}

#[tokio::test]
async fn the_first_leg_goes_to_the_rank_whose_id_the_second_was_told() {
    let world = World::with(in_turn(), Connector::Mooncake).await;
    for n in 0..4 {
        let mut client = world.gateway.begin(chat("m", "hi")).await;
        if n == 0 {
            world.tells_engine_ids(&["e_dp0", "e_dp1", "e_dp2"]).await;
        }
        let (first, second) = world.both().await;
        let rank = first.header("x-data-parallel-rank").expect("a rank");
        assert_eq!(read(&second)["kv_transfer_params"]["remote_engine_id"], format!("e_dp{rank}"));
        assert_eq!(second.header("x-data-parallel-rank"), None);
        first.answer(200, "{}").await;
        second.answer(200, "{}").await;
        assert_eq!(client.reply().await.status, 200);
        world.gateway.ledger_is_zero().await;
    }
    world.end().await;
}

#[tokio::test]
async fn without_an_engine_id_one_worker_serves_the_request() {
    let world = World::with(in_turn(), Connector::Mooncake).await;
    for (status, answer) in [(404, "no"), (200, "{}"), (200, "[]"), (200, r#"{"0":{}}"#)] {
        let body = chat("m", &format!("hi {answer}"));
        let mut client = world.gateway.begin(&body).await;
        world.prefill.call().await.answer(status, answer).await;
        world.alone(&body).await.answer(200, "{}").await;
        assert_eq!(client.reply().await.status, 200, "after {status} {answer}");
        world.gateway.ledger_is_zero().await;
    }
    world.end().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_both_legs_that_run_at_once() {
    let world = World::with(in_turn(), Connector::Mooncake).await;
    let client = world.gateway.begin(chat("m", "hi")).await;
    world.tells_engine_ids(&["e_dp0"]).await;
    let (mut first, mut second) = world.both().await;
    drop(client);
    first.gateway_gone().await;
    second.gateway_gone().await;
    world.end().await;
}

/// A prefill that fails cancels the decode, which would wait without end.
#[tokio::test]
async fn a_prefill_that_fails_cancels_the_decode_that_waits_for_it() {
    let world = World::with(in_turn(), Connector::Mooncake).await;
    let body = chat("m", "hi");
    let mut client = world.gateway.begin(&body).await;
    world.tells_engine_ids(&["e_dp0"]).await;
    let (first, mut second) = world.both().await;
    first.answer(500, "{}").await;
    second.gateway_gone().await;
    world.alone(&body).await.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    world.end().await;
}

/// Invariant: Two requests never share the id by which engines that push find one another, whatever id their clients give
/// them.
#[tokio::test]
async fn engines_that_push_get_both_legs_at_once_from_the_second_request_on() {
    let world = World::with(in_turn(), Connector::NixlPush).await;
    let answer = |id: &str| {
        let mut params = params();
        params["remote_engine_id"] = json!(id);
        (params.clone(), json!({"choices": [], "kv_transfer_params": params}).to_string())
    };
    let (mut ids, body) = (Vec::new(), chat("m", "hi"));
    for (n, says) in ["e", "e", "restarted", "restarted"].into_iter().enumerate() {
        let mut client = world.gateway.client().await;
        client.request_with("POST", "/v1/chat/completions", "x-request-id: mine\r\n", &body).await;
        let (params, said) = answer(says);
        let first = world.prefill.call().await;
        let id = first.header("x-request-id").expect("an id").to_owned();
        assert!(id.starts_with("mine-"), "{id}");
        assert_eq!(read(&first)["kv_transfer_params"]["do_remote_decode"], true);
        let second = if n == 0 {
            assert!(world.decode.call_at_hand().await.is_none(), "where its blocks are is not known");
            first.answer(200, &said).await;
            let second = world.decode.call().await;
            assert_eq!(read(&second)["kv_transfer_params"], params, "relayed");
            second
        } else {
            let mut second = world.decode.call().await;
            let known = if n < 3 { "e" } else { "restarted" };
            assert_eq!(
                read(&second)["kv_transfer_params"],
                json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": known,
                    "remote_host": "h", "remote_port": 5600, "tp_size": 1,
                    "remote_request_id": format!("chatcmpl-{id}")})
            );
            first.answer(200, &said).await;
            if n == 2 {
                second.gateway_gone().await;
                second = world.decode.call().await;
                assert_eq!(read(&second)["kv_transfer_params"], params, "the engine is another one");
            }
            second
        };
        assert_eq!(second.header("x-request-id"), Some(&*id));
        second.answer(200, "{}").await;
        assert_eq!(client.reply().await.status, 200);
        ids.push(id);
        world.gateway.ledger_is_zero().await;
    }
    ids.dedup();
    assert_eq!(ids.len(), 4);
    // After a transfer that failed, it is learned again.
    let mut client = world.gateway.begin(&body).await;
    let (first, second) = world.both().await;
    first.answer(200, &answer("restarted").1).await;
    second.answer(500, r#"{"error":{"message":"Internal server error"}}"#).await;
    world.alone(&body).await.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    let mut client = world.gateway.begin(&body).await;
    let first = world.prefill.call().await;
    assert!(world.decode.call_at_hand().await.is_none(), "in turn");
    first.answer(200, &answer("restarted").1).await;
    world.decode.call().await.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    world.end().await;
}

#[tokio::test]
async fn a_generation_server_gets_the_state_and_the_tokens_of_the_context_server() {
    let world = World::with(in_turn(), Connector::TensorRtLlm).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9,
        "stream": true, "stream_options": {"include_usage": true}});
    let text = body.to_string();
    let state = |request_type| {
        json!({"request_type": request_type, "first_gen_tokens": [7], "ctx_request_id": 2049,
            "encoded_opaque_state": "AAE=", "draft_tokens": null, "later": 1.50})
    };
    for finish in ["length", "stop"] {
        let mut client = world.gateway.begin(&text).await;
        let call = world.prefill.call().await;
        let first = read(&call);
        assert_eq!(first["disaggregated_params"], json!({"request_type": "context_only"}));
        assert_eq!((&first["stream"], &first["max_tokens"]), (&json!(false), &json!(9)), "{first}");
        assert_eq!(first.get("stream_options"), None);
        let choice = json!({"finish_reason": finish, "disaggregated_params": state("context_only")});
        let said = json!({"choices": [choice], "prompt_token_ids": [1, 2, 3]}).to_string();
        call.answer(200, &said).await;
        let call = if finish == "length" {
            let call = world.decode.call().await;
            let mut second = body.clone();
            second["disaggregated_params"] = state("generation_only");
            second["prompt_token_ids"] = json!([1, 2, 3]);
            assert_eq!(read(&call), second);
            call
        } else {
            // The first token ended the answer.
            world.alone(&text).await
        };
        call.answer(200, r#"{"id":"x"}"#).await;
        assert_eq!(client.reply().await.status, 200);
        world.gateway.ledger_is_zero().await;
    }
    world.end().await;
}

/// vLLM with Mooncake ends if it gets the leg that it was not started for, and only its operator knows that.
#[tokio::test]
async fn engines_with_mooncake_share_no_request_unless_their_roles_are_known() {
    let (one, two) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = in_turn();
    config.disaggregation.connector = Some(Connector::Mooncake);
    config.disaggregation.split_tokens_min = Some(1);
    // A question to a bootstrap server would come as a request, too.
    let port = |engine: &FakeEngine| engine.authority().rsplit(':').next().and_then(|port| port.parse().ok());
    let spec = |engine| WorkerSpec { bootstrap_port: port(engine), ..WorkerSpec::new(engine.url()) };
    config.workers = vec![spec(&one), spec(&two)];
    let gateway = TestGateway::start(config, &[]).await;
    for _ in 0..4 {
        let mut client = gateway.begin(chat("m", "hi")).await;
        let (_, call) = next_call(&[&one, &two]).await;
        assert_eq!(read(&call).get("kv_transfer_params"), None);
        call.answer(200, "{}").await;
        assert_eq!(client.reply().await.status, 200);
    }
    gateway.end_quiet(&[&one, &two]).await;
}
