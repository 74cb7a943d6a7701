//! Forms: files are passed on while they arrive, whatever their size, and the field `model` says where to.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2::handshake;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvlane_gateway::config::{Config, ModelSpec, TargetSpec};
use kvlane_gateway::testing::{
    Call, Client, FakeEngine, TestGateway, config, eventually, in_turn, next_call, soon,
};
use tokio::net::TcpStream;

const PATH: &str = "/v1/audio/transcriptions";
const KIND: &str = "content-type: multipart/form-data; boundary=\"xx\"\r\n";
const MIB: usize = 1 << 20;

fn field(model: &str) -> Vec<u8> {
    format!("--xx\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n").into()
}

fn file(bytes: usize) -> Vec<u8> {
    let head = "--xx\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n";
    // Lines that nearly delimit.
    let content: Vec<u8> = b"\r\n--x name=\"model\"\r\n\r\n".iter().copied().cycle().take(bytes).collect();
    [head.as_bytes(), &content, b"\r\n"].concat()
}

fn form(parts: &[Vec<u8>]) -> Vec<u8> {
    [&parts.concat()[..], b"--xx--\r\n"].concat()
}

/// A client that has sent the head of a request with a body of this length.
async fn begin(gateway: &TestGateway, fields: &str, length: usize) -> Client {
    let mut client = gateway.client().await;
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: h\r\n{KIND}{fields}content-length: {length}\r\n\r\n");
    client.send(head).await;
    client
}

/// What the engine receives of a body of this length.
async fn receive(call: &mut Call, length: usize) -> Vec<u8> {
    let mut body = std::mem::take(&mut call.body);
    let left = length - body.len();
    body.extend(call.read_exact(left).await);
    body
}

async fn world(config: Config, models: &[&str]) -> (TestGateway, Vec<FakeEngine>) {
    let mut engines = Vec::new();
    for model in models {
        engines.push(FakeEngine::start(model).await);
    }
    let gateway = TestGateway::start(config, &engines.iter().collect::<Vec<_>>()).await;
    engines.iter().for_each(FakeEngine::read_heads_only);
    (gateway, engines)
}

async fn held(gateway: &TestGateway) -> f64 {
    gateway.metric("kvlane_body_memory_bytes").await.expect("a sample")
}

/// Invariant: A form of any size takes at most 2 MiB of the gateway's memory.
#[tokio::test]
async fn a_form_of_100_mb_passes_in_constant_memory() {
    const PIECES: usize = 100;
    let (gateway, engines) = world(config(), &["m"]).await;
    for model_first in [true, false] {
        let piece: Vec<u8> = (0..MIB).map(|at| (at * 31 % 251) as u8).collect();
        // A model after so large a file is not found: there is only one.
        let (first, last) = if model_first {
            ([field("m"), file(10)].concat(), b"\r\n--xx--\r\n".to_vec())
        } else {
            (file(10), [&b"\r\n"[..], &field("m"), b"--xx--\r\n"].concat())
        };
        let length = first.len() + PIECES * MIB + last.len();
        let mut client = begin(&gateway, "", length).await;
        let sending = async {
            client.send(&first).await;
            for _ in 0..PIECES {
                client.send(&piece).await;
            }
            client.send(&last).await;
        };
        let receiving = async {
            let mut call = engines[0].call().await;
            assert_eq!(call.header("content-length"), Some(&*length.to_string()));
            let mut body = receive(&mut call, first.len()).await;
            assert!(body.starts_with(&first[..first.len().min(body.len())]));
            let mut ahead = body.split_off(first.len());
            for _ in 0..PIECES {
                let left = MIB.saturating_sub(ahead.len());
                ahead.extend(call.read_exact(left).await);
                assert!(ahead[..MIB] == piece, "the file is unchanged");
                ahead.drain(..MIB);
                assert!(held(&gateway).await <= 2.0 * MIB as f64);
            }
            let left = last.len() - ahead.len();
            ahead.extend(call.read_exact(left).await);
            assert_eq!(ahead, last);
            call.answer(200, r#"{"text": "a"}"#).await;
        };
        tokio::join!(sending, receiving);
        let reply = client.reply().await;
        assert_eq!((reply.status, reply.text().as_str()), (200, r#"{"text": "a"}"#));
        gateway.metric_becomes("kvlane_body_memory_bytes", 0.0).await;
        // The connection serves the next request.
        client.request("GET", "/v1/models", "").await;
        assert_eq!(client.reply().await.status, 200);
    }
    gateway.end().await;
}

#[tokio::test]
async fn the_model_is_found_after_a_file_and_across_pieces() {
    let (gateway, engines) = world(config(), &["alpha", "beta"]).await;
    let body = form(&[file(300_000), field("beta"), file(2 * MIB)]);
    let at = memchr(&body, b"beta");
    for cut in [at + 2, at + 5, at - 3, at - 60, 100] {
        let mut client = begin(&gateway, "", body.len()).await;
        client.send(&body[..cut]).await;
        let rest = async { client.send(&body[cut..]).await };
        let answered = async {
            let mut call = engines[1].call().await;
            assert!(receive(&mut call, body.len()).await == body);
            call.answer(200, "{}").await;
        };
        tokio::join!(rest, answered);
        assert_eq!(client.reply().await.status, 200, "cut at {cut}");
    }
    gateway.end().await;
}

fn memchr(body: &[u8], word: &[u8]) -> usize {
    body.windows(word.len()).position(|at| at == word).expect("the word")
}

#[tokio::test]
async fn a_model_after_a_larger_file_is_named_by_a_header() {
    let (gateway, engines) = world(config(), &["alpha", "beta"]).await;
    let body = form(&[file(2 * MIB), field("beta")]);
    let mut client = begin(&gateway, "", body.len()).await;
    client.try_send(&body).await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (400, "missing_field"));
    assert!(reply.text().contains("x-kvlane-model"), "{}", reply.text());
    let mut client = begin(&gateway, "x-kvlane-model: beta\r\n", body.len()).await;
    let answered = async {
        let mut call = engines[1].call().await;
        assert!(receive(&mut call, body.len()).await == body);
        call.answer(200, "{}").await;
    };
    tokio::join!(client.send(&body), answered);
    assert_eq!(client.reply().await.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn a_client_that_leaves_midway_ends_the_engines_request() {
    let (gateway, engines) = world(config(), &["m"]).await;
    let first = [field("m"), file(10)].concat();
    let mut client = begin(&gateway, "", 100 * MIB).await;
    client.send(&first).await;
    let mut call = engines[0].call().await;
    client.send(vec![0; MIB]).await;
    receive(&mut call, first.len() + MIB).await;
    drop(client);
    gateway.ledger_is_zero().await;
    call.drained().await;
    gateway.metric_becomes("kvlane_body_memory_bytes", 0.0).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_client_that_leaves_while_its_form_is_queued_leaves_the_queue() {
    let mut config = config();
    config.routing.max_concurrent_requests = 1;
    let (gateway, engines) = world(config, &["m"]).await;
    let served = gateway.begin(kvlane_gateway::testing::chat("m", "hi")).await;
    let call = engines[0].call().await;
    let mut client = begin(&gateway, "", 100 * MIB).await;
    client.send([field("m"), file(10)].concat()).await;
    let pool = gateway.pool("m");
    let queued = || pool.router.read(|scheduler| scheduler.queued());
    eventually("it is queued", || queued() == 1).await;
    for _ in 0..8 {
        client.send(vec![0; 4096]).await;
    }
    drop(client);
    eventually("it has left the queue", || queued() == 0).await;
    drop((served, call));
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_answers_early_is_heard() {
    let (gateway, engines) = world(config(), &["m"]).await;
    let body = form(&[field("m"), file(8 * MIB)]);
    for status in [413, 400, 503] {
        let mut client = begin(&gateway, "", body.len()).await;
        let early = async {
            let mut call = engines[0].call().await;
            let wanted = MIB - call.body.len();
            call.read_exact(wanted).await;
            let words = r#"{"error": "too long"}"#;
            call.send(format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{words}", words.len())).await;
            call
        };
        let half = async { client.send(&body[..4 * MIB]).await };
        let ((), mut call) = tokio::join!(half, early);
        client.try_send(&body[4 * MIB..]).await;
        let reply = client.reply().await;
        assert_eq!((reply.status, reply.text().as_str()), (status, r#"{"error": "too long"}"#));
        assert_eq!(reply.header("connection"), Some("close"));
        client.closed().await;
        call.drained().await;
        gateway.ledger_is_zero().await;
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_form_of_which_anything_was_passed_on_is_not_sent_again() {
    let (gateway, engines) = world(in_turn(), &["m", "m"]).await;
    let both = [&engines[0], &engines[1]];
    let body = form(&[field("m"), file(8 * MIB)]);
    let mut client = begin(&gateway, "", body.len()).await;
    let dies = async {
        let (_, mut call) = next_call(&both).await;
        let wanted = MIB - call.body.len();
        call.read_exact(wanted).await;
        call.reset();
    };
    let half = async { client.send(&body[..2 * MIB]).await };
    tokio::join!(half, dies);
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (502, "upstream_error"));
    assert!(engines[0].call_at_hand().await.is_none() && engines[1].call_at_hand().await.is_none());
    gateway.ledger_is_zero().await;
    // One that no engine has received is.
    engines[0].refuse();
    for _ in 0..2 {
        let mut client = begin(&gateway, "", body.len()).await;
        let served = async {
            let mut call = engines[1].call().await;
            assert!(receive(&mut call, body.len()).await == body);
            call.answer(200, "{}").await;
        };
        tokio::join!(client.send(&body), served);
        assert_eq!(client.reply().await.status, 200);
    }
    gateway.end().await;
}

#[tokio::test]
async fn chunks_go_on_as_chunks_and_a_small_form_is_held() {
    let (gateway, engines) = world(config(), &["m"]).await;
    for (bytes, is_held) in [(1000, true), (3 * MIB, false)] {
        let body = form(&[field("m"), file(bytes)]);
        let mut client = gateway.client().await;
        let sending = async {
            let head = format!("POST {PATH} HTTP/1.1\r\nhost: h\r\n{KIND}transfer-encoding: chunked\r\n\r\n");
            client.send(head).await;
            for piece in body.chunks(700_001) {
                client.send(format!("{:x}\r\n", piece.len())).await;
                client.send([piece, b"\r\n"].concat()).await;
            }
            client.send("0\r\n\r\n").await;
        };
        let receiving = async {
            let mut call = engines[0].call().await;
            let is_chunked = call.header("transfer-encoding") == Some("chunked");
            assert_eq!((is_chunked, call.header("content-length").is_some()), (!is_held, is_held));
            let received =
                if is_held { receive(&mut call, body.len()).await } else { unchunked(&mut call).await };
            assert!(received == body);
            call.answer(200, "{}").await;
        };
        tokio::join!(sending, receiving);
        assert_eq!(client.reply().await.status, 200);
    }
    gateway.end().await;
}

/// The data of a chunked body.
async fn unchunked(call: &mut Call) -> Vec<u8> {
    let mut chunked = kvlane_http::connections::Chunked::start();
    let (mut body, mut came) = (Vec::new(), std::mem::take(&mut call.body));
    loop {
        let (read, data) = chunked.decode(&mut came).expect("well formed");
        assert_eq!(read, came.len());
        body.extend_from_slice(&came[..data]);
        if chunked.is_done() {
            return body;
        }
        came = call.read().await;
    }
}

#[tokio::test]
async fn a_form_arrives_over_http2() {
    let (gateway, engines) = world(config(), &["alpha", "beta"]).await;
    let stream = TcpStream::connect(gateway.address()).await.expect("the gateway listens");
    let (mut client, connection) =
        handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("it speaks h2c");
    let running = tokio::spawn(connection);
    let body = form(&[file(100_000), field("beta"), file(5 * MIB)]);
    let request = Request::post(format!("http://kvlane{PATH}"))
        .header("content-type", "multipart/form-data; boundary=xx")
        .body(Full::<Bytes>::from(body.clone()).map_err(|never: Infallible| match never {}).boxed())
        .expect("a request");
    let answered = async {
        let mut call = engines[1].call().await;
        assert!(receive(&mut call, body.len()).await == body);
        call.answer(200, "{}").await;
    };
    let (response, ()) = tokio::join!(client.send_request(request), answered);
    assert_eq!(response.expect("an answer").status(), 200);
    drop(client);
    let _ = soon("the connection ends", running).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_client_that_is_silent_within_a_form_is_told_so() {
    let mut config = config();
    config.server.body_timeout = Duration::from_millis(50);
    let (gateway, engines) = world(config, &["m"]).await;
    let mut client = begin(&gateway, "", 100 * MIB).await;
    client.send([field("m"), file(10)].concat()).await;
    let mut call = engines[0].call().await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (408, "body_timeout"));
    call.drained().await;
    gateway.end().await;
}

#[tokio::test]
async fn a_form_above_its_limit_is_refused() {
    let mut config = config();
    config.server.max_upload_size = 2 << 20;
    let (gateway, engines) = world(config, &["m"]).await;
    let mut client = begin(&gateway, "", 2 * MIB + 1).await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (413, "body_too_large"));
    assert!(reply.text().contains("server.max_upload_size"), "{}", reply.text());
    // Its length is not known before.
    let mut client = gateway.client().await;
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: h\r\n{KIND}transfer-encoding: chunked\r\n\r\n");
    client.send(head).await;
    let body = form(&[field("m"), file(4 * MIB)]);
    let sending = async {
        client.send(format!("{:x}\r\n", body.len())).await;
        client.try_send(&body).await;
        client.reply().await
    };
    let receiving = async {
        let mut call = engines[0].call().await;
        call.drained().await;
    };
    let (reply, ()) = tokio::join!(sending, receiving);
    assert_eq!((reply.status, reply.error_code().as_str()), (413, "body_too_large"));
    gateway.end().await;
}

#[tokio::test]
async fn sound_passes_unchanged() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    // Looks like events, and is none.
    let sound = [
        b"\xff\xfb\x90\0data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n\0".as_slice(),
        &[0xfe; 90_000],
    ]
    .concat();
    let body = r#"{"model": "m", "input": "hi", "voice": "v"}"#;
    let mut client = gateway.client().await;
    client.request("POST", "/v1/audio/speech", body).await;
    let mut call = engine.call().await;
    call.send("HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n").await;
    for piece in sound.chunks(33_333) {
        call.send(format!("{:x}\r\n", piece.len())).await;
        call.send([piece, b"\r\n"].concat()).await;
    }
    call.end_stream().await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.header("content-type")), (200, Some("audio/mpeg")));
    assert!(reply.body == sound);
    gateway.ledger_is_zero().await;
    assert_eq!(gateway.metric("kvlane_output_tokens_total{model=\"m\"}").await.unwrap_or(0.0), 0.0);
    gateway.end().await;
}

#[tokio::test]
async fn a_name_of_the_catalogue_in_a_form_is_the_engines_own_at_the_engine() {
    let target =
        TargetSpec { model: "whisper-large".into(), weight: 1, headers: BTreeMap::new(), keys: Vec::new() };
    let mut config = config();
    config.models =
        BTreeMap::from([("w".into(), ModelSpec { targets: vec![target], ..ModelSpec::default() })]);
    let (gateway, engines) = world(config, &["whisper-large", "other"]).await;
    // One that is held whole, and one that is passed on.
    for bytes in [10, 3 * MIB] {
        let (sent, wanted) = (form(&[field("w"), file(bytes)]), form(&[field("whisper-large"), file(bytes)]));
        let mut client = begin(&gateway, "", sent.len()).await;
        let receiving = async {
            let mut call = engines[0].call().await;
            assert_eq!(call.header("content-length"), Some(&*wanted.len().to_string()));
            assert!(receive(&mut call, wanted.len()).await == wanted);
            call.answer(200, r#"{"text": "a"}"#).await;
        };
        tokio::join!(client.send(&sent), receiving);
        let reply = client.reply().await;
        assert_eq!((reply.status, reply.header("x-router-model")), (200, Some("whisper-large")));
    }
    gateway.end().await;
}
