//! Malicious HTTP: a request that two servers could parse differently is rejected or has one meaning, and no request
//! costs unbounded memory or work.

use kvlane_gateway::testing::{Client, FakeEngine, TestGateway, chat, chat_stream, config, event, soon};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[tokio::test]
async fn a_request_with_two_body_lengths_reaches_no_engine() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let body = chat("m", "hi");
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let coding = "transfer-encoding: chunked\r\n";
    for length in [0, 5, body.len(), 4000] {
        let length = format!("Content-Length: {length}\r\n");
        for fields in
            [format!("{length}{coding}"), format!("{coding}{length}"), format!("{length}x: y\r\n{length}")]
        {
            let mut client = gateway.client().await;
            let start = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n";
            client.send(format!("{start}{fields}\r\n{chunked}")).await;
            let reply = client.reply().await;
            assert_eq!((reply.status, reply.error_code().as_str()), (400, "bad_head"), "{fields}");
            assert!(reply.text().contains("more than once"), "{}", reply.text());
            client.closed().await;
        }
    }
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_chunked_body_ends_with_its_chunks() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let body = chat("m", "hi");
    let (one, two) = body.split_at(5);
    let chunked = format!("5\r\n{one}\r\n{:X};x=y\r\n{two}\r\n0\r\nx: y\r\n\r\n", two.len());
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    let next = Client::request_bytes("GET", "/v1/nothing", "", "");
    let request = format!("{head}{chunked}{next}");
    for pieces in [1, 7, request.len()] {
        let mut client = gateway.client().await;
        for piece in request.as_bytes().chunks(pieces) {
            client.send(piece).await;
        }
        let call = engine.call().await;
        assert_eq!((call.body.as_slice(), call.header("transfer-encoding")), (body.as_bytes(), None));
        assert_eq!(call.header("content-length"), Some(body.len().to_string().as_str()));
        call.answer(200, "{}").await;
        assert_eq!(client.reply().await.status, 200);
        assert_eq!(client.reply().await.status, 404, "the following bytes are the next request");
    }
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.client().await;
    let ask = |text: &str| Client::request_bytes("POST", "/v1/chat/completions", "", &chat("m", text));
    // More than the gateway keeps while a request is answered.
    client.send([ask("one"), ask(&"x".repeat(200_000)), ask("three")].concat()).await;
    for n in ["1", "2", "3"] {
        engine.answer(n).await;
        assert_eq!(client.reply().await.text(), n);
    }
    gateway.end().await;
}

#[tokio::test]
async fn an_unneeded_body_is_not_read_as_a_request() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let smuggled = Client::request_bytes("POST", "/v1/chat/completions", "", &chat("m", "hi"));
    let unwanted = Client::request_bytes("POST", "/v1/nothing", "", &smuggled);
    let mut client = gateway.client().await;
    client.send(format!("{unwanted}{unwanted}")).await;
    for _ in 0..2 {
        assert_eq!(client.reply().await.status, 404);
    }
    // If the body is incomplete, the connection closes.
    client.send(&unwanted[..unwanted.len() - 1]).await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.header("connection")), (404, Some("close")));
    client.try_send(&unwanted.as_bytes()[unwanted.len() - 1..]).await;
    client.try_send(smuggled.as_bytes()).await;
    assert!(client.closed().await.is_empty());
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn an_http_1_0_client_gets_no_chunks_and_keep_alive_on_request() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let body = chat_stream("m", "hi");
    let ask = |fields: &str| {
        let length = body.len();
        format!("POST /v1/chat/completions HTTP/1.0\r\n{fields}content-length: {length}\r\n\r\n{body}")
    };
    let mut client = gateway.client().await;
    client.send(ask("connection: keep-alive\r\n")).await;
    engine.answer("{}").await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.header("connection")), (200, Some("keep-alive")));
    client.send(ask("connection: keep-alive\r\n")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("a")).await;
    call.chunk("data: [DONE]\n\n").await;
    call.end_stream().await;
    let answer = String::from_utf8_lossy(&client.closed().await).into_owned();
    let (head, events) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(!head.contains("chunked") && head.contains("connection: close"), "{head}");
    assert_eq!(events, format!("{}data: [DONE]\n\n", event("a")));
    gateway.end().await;
}

#[tokio::test]
async fn a_line_that_ends_in_lf_alone_is_rejected_on_any_request_of_a_connection() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let fine = Client::request_bytes("POST", "/v1/chat/completions", "", &chat("m", "hi"));
    for bad in [
        "GET /v1/models HTTP/1.1\nhost: x\r\n\r\n",
        "GET /v1/models HTTP/1.1\r\nhost: x\n\r\n",
        "GET /v1/models HTTP/1.1\r\nhost: x\r\n\n",
        "\nGET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    ] {
        for before in [0, 1] {
            let mut client = gateway.client().await;
            client.send(format!("{}{bad}", fine.repeat(before))).await;
            for _ in 0..before {
                engine.answer("{}").await;
                assert_eq!(client.reply().await.status, 200);
            }
            let reply = client.reply().await;
            assert_eq!((reply.status, reply.error_code().as_str()), (400, "bad_head"), "{bad:?}");
            client.closed().await;
        }
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_head_without_end_is_rejected_and_counted() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for (refused, lines) in
        [("x: y\r\n".repeat(20_000), "fields"), (format!("x: {}", "y".repeat(70_000)), "a line")]
    {
        let mut client = gateway.client().await;
        client.try_send(format!("GET /v1/models HTTP/1.1\r\nhost: x\r\n{refused}").as_bytes()).await;
        let answer = String::from_utf8_lossy(&client.closed().await).into_owned();
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{lines}: {answer}");
    }
    let seen = gateway.metric(r#"kvlane_limits_reached_total{limit="head_bytes"}"#).await;
    assert_eq!(seen, Some(2.0));
    gateway.end().await;
}

#[tokio::test]
async fn the_memory_of_all_bodies_is_bounded() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.body_memory = 1 << 20;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let held = async || gateway.metric("kvlane_body_memory_bytes").await.expect("a gauge");
    let body = chat("m", &"x".repeat(600_000));
    let request = Client::request_bytes("POST", "/v1/chat/completions", "", &body);
    let mut first = gateway.client().await;
    first.send(&request).await;
    let call = engine.call().await;
    assert!(held().await >= 600_000.0, "it may be sent again");
    let reply = gateway.ask("POST", "/v1/chat/completions", &body).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (503, "body_memory_full"));
    assert_eq!(reply.header("retry-after"), Some("1"));
    // A small request is served.
    gateway.served(&engine, chat("m", "hi")).await;
    call.answer(200, "{}").await;
    assert_eq!(first.reply().await.status, 200);
    gateway.metric_becomes("kvlane_body_memory_bytes", 0.0).await;
    gateway.served(&engine, &body).await;
    let met = gateway.metric(r#"kvlane_limits_reached_total{limit="body_memory"}"#).await;
    assert_eq!(met, Some(1.0));
    gateway.end().await;
}

#[tokio::test]
async fn malformed_chunks_reach_no_engine() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for (what, chunks) in [
        ("a size that is too large", "fffffffffffffffff\r\na".to_owned()),
        ("a size that is not hexadecimal", "0x5\r\nhello\r\n0\r\n\r\n".into()),
        ("a negative size", "-5\r\nhello\r\n0\r\n\r\n".into()),
        ("more data than announced", "5\r\nhelloworld\r\n0\r\n\r\n".into()),
        ("a bare LF in an extension", "5;a\nb\r\nhello\r\n0\r\n\r\n".into()),
        ("an extension without end", format!("5;{}\r\nhello\r\n0\r\n\r\n", "x".repeat(1 << 20))),
        ("trailers without end", format!("1\r\na\r\n0\r\n{}\r\n", "x: y\r\n".repeat(100_000))),
    ] {
        let mut client = gateway.client().await;
        client
            .send("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            .await;
        client.try_send(chunks.as_bytes()).await;
        let answer = client.closed().await;
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1 400"),
            "{what}: {:.80}",
            String::from_utf8_lossy(&answer)
        );
    }
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_path_that_a_server_may_parse_differently_reaches_no_engine() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for path in [
        "/v1/%63hat/completions",
        "/v1/chat/completions%2f",
        "/v1/chat/completions;x=y",
        "/v1//chat/completions",
        "//v1/chat/completions",
        "/v1/chat\\completions",
        "/v1/files/a%2fb",
        "/v1/../reset_prefix_cache",
        "/v1/x/../../reset_prefix_cache",
        "/v1/%2e%2e/reset_prefix_cache",
        "/v1/.%2E/reset_prefix_cache",
        "/v1/..%2freset_prefix_cache",
        "/v1/..%5Creset_prefix_cache",
        "/v1/./models",
        "/v1/..",
    ] {
        for method in ["GET", "POST"] {
            let reply = gateway.ask(method, path, chat("m", "hi")).await;
            assert_eq!((reply.status, reply.error_code().as_str()), (400, "bad_path"), "{method} {path}");
        }
    }
    for path in ["/v1/files/a..b", "/v1/files/.hidden"] {
        let (reply, _) = tokio::join!(gateway.ask("GET", path, ""), engine.answer("{}"));
        assert_eq!(reply.status, 200, "{path}");
    }
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn an_ambiguous_head_is_rejected() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let body = chat("m", "hi");
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let length = format!("content-length: {}\r\n", body.len());
    for (fields, body) in [
        ("host: x\r\ntransfer-encoding: gzip, chunked\r\n", &chunked),
        ("host: x\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", &chunked),
        (&*length, &body),
        (&*format!("host: x\r\nhost: y\r\n{length}"), &body),
        (&*format!("host: x\r\nhost: x\r\n{length}"), &body),
    ] {
        let mut client = gateway.client().await;
        client.send(format!("POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n{body}")).await;
        let answer = String::from_utf8_lossy(&client.closed().await).into_owned();
        assert!(answer.starts_with("HTTP/1.1 400"), "{fields}: {answer}");
    }
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn unknown_paths_and_methods_reach_no_engine() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for path in [
        "/v1/load_lora_adapter",
        "/v1/start_profile",
        "/start_profile",
        "/v1/chat/completions/x",
        "/V1/files",
    ] {
        let reply = gateway.ask("POST", path, chat("m", "hi")).await;
        assert_eq!((reply.status, reply.error_code().as_str()), (404, "not_found"), "{path}");
    }
    for (method, path, allow) in [
        ("TRACE", "/v1/files/a", "GET, DELETE"),
        ("PATCH", "/v1/audio/speech", "POST"),
        ("GET", "/v1/chat/completions", "POST"),
    ] {
        let reply = gateway.ask(method, path, "").await;
        assert_eq!((reply.status, reply.header("allow")), (405, Some(allow)), "{method} {path}");
    }
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn an_event_of_many_megabytes_is_relayed_without_being_held() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    let line = event(&"x".repeat(32 << 20));
    let (seen, ()) = tokio::join!(
        async {
            client.head().await;
            client.rest().await
        },
        async {
            call.chunk(&line).await;
            call.chunk("data: [DONE]\n\n").await;
            call.end_stream().await;
        }
    );
    assert!(seen.1 && seen.0 == [line.as_bytes(), b"data: [DONE]\n\n"].concat());
    gateway.end().await;
}

/// An HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short payload").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// `POST http /` in HPACK's static table.
const POST: [u8; 3] = [0x83, 0x86, 0x84];

/// Sends HTTP/2 frames, and reads nothing.
async fn speak(gateway: &TestGateway, frames: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(gateway.address()).await.expect("the gateway listens");
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("it reads");
    stream.write_all(&frame(4, 0, 0, b"")).await.expect("it reads");
    // The gateway may close the connection earlier.
    let _ = stream.write_all(frames).await;
    stream
}

/// The next frame's kind and payload; none at the end of the connection.
async fn next_frame(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut head = [0; 9];
    soon("a frame", stream.read_exact(&mut head)).await.ok()?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    let mut payload = vec![0; usize::try_from(length).expect("a length")];
    soon("its payload", stream.read_exact(&mut payload)).await.ok()?;
    Some((head[3], payload))
}

/// Waits until the gateway closes the connection, or sends GOAWAY.
async fn is_sent_away(stream: &mut TcpStream) {
    while let Some((kind, payload)) = next_frame(stream).await {
        if kind == GOAWAY && payload[4..8] != [0; 4] {
            return;
        }
    }
}

/// Invariant: A connection that causes unbounded work is closed.
///
/// Also held by `header_frames_without_end_close_the_connection`.
#[tokio::test]
async fn rapid_reset_closes_the_connection() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut frames = Vec::new();
    for n in 0..20_000u32 {
        frames.extend(frame(HEADERS, END_HEADERS, 2 * n + 1, &POST));
        frames.extend(frame(RST_STREAM, 0, 2 * n + 1, &[0, 0, 0, 8]));
    }
    let mut stream = speak(&gateway, &frames).await;
    is_sent_away(&mut stream).await;
    // Other clients are served.
    gateway.served(&engine, chat("m", "hi")).await;
    gateway.end().await;
}

#[tokio::test]
async fn header_frames_without_end_close_the_connection() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut frames = frame(HEADERS, END_STREAM, 1, &POST);
    // `x: y`, literal without indexing, repeated.
    let fields = [0, 1, b'x', 1, b'y'].repeat(2000);
    for _ in 0..2000 {
        frames.extend(frame(CONTINUATION, 0, 1, &fields));
    }
    let mut stream = speak(&gateway, &frames).await;
    is_sent_away(&mut stream).await;
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_head_with_more_fields_than_http_1_allows_is_rejected_in_http_2_too() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut block = POST.to_vec();
    // `x: y`, literal without indexing.
    block.extend([0, 1, b'x', 1, b'y'].repeat(2000));
    let mut stream = speak(&gateway, &frame(HEADERS, END_STREAM | END_HEADERS, 1, &block)).await;
    let refused = loop {
        match next_frame(&mut stream).await {
            // `:status 431` in HPACK: a name of the static table, and three literal digits.
            Some((HEADERS, block)) => {
                break block.windows(3).any(|digits| digits == b"431") || block.len() > 3;
            }
            Some((RST_STREAM | GOAWAY, _)) | None => break true,
            Some(_) => {}
        }
    };
    assert!(refused);
    drop(stream);
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_compressed_head_of_megabytes_is_rejected() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    // One large field goes into HPACK's table, and is then referred to a thousand times with one byte each.
    let mut block = POST.to_vec();
    block.extend([0x40, 1, b'x', 0x7f, 0xa1, 0x1e]);
    block.extend([b'y'; 4000]);
    block.extend([0xbe; 4000]);
    let frames = frame(HEADERS, END_STREAM | END_HEADERS, 1, &block);
    let mut stream = speak(&gateway, &frames).await;
    // A rejection within the stream, or its end.
    while !matches!(next_frame(&mut stream).await, Some((HEADERS | RST_STREAM | GOAWAY, _)) | None) {}
    gateway.end_quiet(&[&engine]).await;
}
