//! Signals for autoscalers on `/metrics`.

use kvlane_gateway::testing::{FakeEngine, TestGateway, chat_stream, config, event};

#[tokio::test]
async fn metrics_say_what_a_new_request_would_find() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    for (engine, usage) in [(&a, 0.5), (&b, 0.7)] {
        let load = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc";
        engine.set_metrics(&format!("{load} {usage}\n"));
    }
    let gateway = TestGateway::start(config(), &[&a, &b]).await;
    let signal = async |name: &str| gateway.metric(&format!(r#"kvlane_{name}{{model="m"}}"#)).await;
    let ratio = async |stat: &str| {
        let sample = format!(r#"kvlane_kv_usage_ratio{{model="m",stat="{stat}"}}"#);
        gateway.metric(&sample).await.expect("reported")
    };
    assert_eq!((signal("queue_seconds").await, signal("queue_mean_seconds").await), (Some(0.0), Some(0.0)));
    assert_eq!(signal("predicted_ttft_seconds").await, None, "no request has come yet");
    assert!((ratio("mean").await - 0.6).abs() < 1e-6 && (ratio("max").await - 0.7).abs() < 1e-6);

    let mut client = gateway.begin(chat_stream("m", &"a long prompt ".repeat(2000))).await;
    let mut call = tokio::select! { call = a.call() => call, call = b.call() => call };
    assert_eq!(signal("queue_seconds").await, Some(0.0), "the other endpoint is idle");
    assert!(signal("queue_mean_seconds").await > Some(0.0));
    assert!(signal("predicted_ttft_seconds").await > Some(0.0));
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    client.head().await;
    client.see("one").await;
    gateway.metric_becomes(r#"kvlane_queue_mean_seconds{model="m"}"#, 0.0).await;
    call.end_stream().await;
    client.rest().await;
    gateway.end().await;
}
