//! A matrix carried out on servers that are there already: what they are asked, in which order, and what is said of it.

use std::sync::{Arc, Mutex};

use kvlane_lab::matrix::routers::judge::{Recorded, Report};
use kvlane_lab::matrix::routers::run::{Place, judge, run};
use kvlane_lab::matrix::routers::store::Store;
use kvlane_lab::matrix::routers::workload::Source;
use kvlane_lab::matrix::routers::{Job, Matrix};
use kvlane_lab::part::Part;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const EVENTS: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" a\"}}]}\n\n\
    data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1,\"total_tokens\":10}}\n\ndata: [DONE]\n\n";

/// What a server was asked, request by request.
type Asked = Arc<Mutex<Vec<String>>>;

/// Answers flushes with `flush` and everything else with a short stream, one request a connection.
async fn server(flush: u16) -> (String, Asked) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let asked = Asked::default();
    let all = asked.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream, flush, all.clone()));
        }
    });
    (url, asked)
}

async fn answer(mut stream: TcpStream, flush: u16, asked: Asked) -> Option<()> {
    let mut bytes = Vec::new();
    let path = loop {
        stream.read_buf(&mut bytes).await.ok().filter(|read| *read > 0)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.to_ascii_lowercase();
        let length =
            length.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()?.parse().ok());
        if body.len() >= length.unwrap_or(0) {
            break head.split(' ').nth(1)?.to_owned();
        }
    };
    asked.lock().expect("unpoisoned").push(path.clone());
    let (status, body) = if path.contains("chat") { (200, EVENTS) } else { (flush, "") };
    let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
    stream.write_all((head + body).as_bytes()).await.ok()
}

fn matrix(engine: &str, router: &str, flush: &str) -> Matrix {
    let value = serde_json::json!({
        "fleet": {"urls": [engine], "flush": flush},
        "workload": {"generate": {"kind": "unshared", "input_tokens": 8, "output_tokens": 1}, "window_s": 10, "speed": 100},
        "loads": {"rate": [1, 2]},
        "seeds": [1, 2],
        "routers": [{"router": "a", "url": router}, {"router": "b", "url": router}],
        "warm_up": {"requests": 3},
        // A busy machine is nothing that this test is about.
        "client": {"lag_p99_max_s": 1000, "cpu_share_max": 1000},
    });
    serde_json::from_value(value).expect("a matrix")
}

async fn carried_out(matrix: &Matrix, kept: impl FnMut(&Job) -> Option<Recorded>) -> (Report, Vec<Recorded>) {
    let scratch = std::env::temp_dir().join(format!("kvlane-matrix-{}", std::process::id()));
    let place = Place { directory: scratch.clone(), scratch, kvlane: "kvlane".into() };
    let source = Source::read(&matrix.workload, |_| unreachable!("it is made")).expect("a workload");
    let measured =
        run(matrix, &place, &source, Part::WHOLE, kept, |_| ()).await.expect("it can be carried out");
    judge(matrix, &source, measured).expect("one machine")
}

/// Invariant: Every run of a bench starts with empty caches, and runs of one load and seed are adjacent.
///
/// Also held by `every_run_is_in_the_order_once_and_those_of_a_load_and_seed_follow_one_another`.
#[tokio::test]
async fn every_run_begins_with_caches_emptied_and_warm_up_requests_count_in_nothing() {
    let ((engine, flushed), (router, asked)) = (server(200).await, server(200).await);
    let matrix = matrix(&engine, &router, "vllm");
    let (report, recorded) = carried_out(&matrix, |_| None).await;
    assert!(report.is_clean(), "{:?}", report.runs);
    assert_eq!(*flushed.lock().unwrap(), vec!["/reset_prefix_cache"; 8]);
    let sent: usize = recorded.iter().map(|one| one.records.len()).sum();
    assert_eq!(asked.lock().unwrap().len(), sent + 8 * 3);
    // Both routers got the same requests, at the load's rate.
    for load in [1.0, 2.0] {
        let of = |router: &str| report.cell(router, load).map(|cell| (cell.runs, cell.requests)).unwrap();
        assert_eq!(of("a"), of("b"));
        assert_eq!(of("a").0, 2);
    }
    assert!(report.cell("a", 2.0).unwrap().requests > report.cell("a", 1.0).unwrap().requests);
    let paired = &report.paired[0];
    assert_eq!((paired.router.as_str(), paired.ttft_s.unwrap().lost), ("b", 0));
}

#[tokio::test]
async fn parts_have_all_routers_of_a_load_and_seed_and_come_from_equal_machines() {
    let ((engine, _), (router, _)) = (server(200).await, server(200).await);
    let matrix = matrix(&engine, &router, "nothing");
    let scratch = std::env::temp_dir().join(format!("kvlane-parts-{}", std::process::id()));
    let place = Place { directory: scratch.clone(), scratch, kvlane: "kvlane".into() };
    let source = Source::read(&matrix.workload, |_| unreachable!("it is made")).expect("a workload");
    let mut parts = Vec::new();
    for part in ["1/3", "2/3", "3/3"] {
        let part = part.parse().expect("a part");
        parts.push(
            run(&matrix, &place, &source, part, |_| None, |_| ()).await.expect("it can be carried out"),
        );
    }
    assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 1], "four of load and seed");
    let text =
        serde_json::to_string(&[&parts[0][0], &parts[1][0], &parts[2][0], &parts[0][1]]).expect("JSON");
    let merged = |text: &str| judge(&matrix, &source, serde_json::from_str(text).expect("JSON"));
    let (report, recorded) = merged(&text).expect("one machine");
    let order = matrix.order().expect("an order");
    assert!(report.is_clean() && recorded.iter().map(|one| &one.run.job).eq(&order));
    let cores = text.find("\"cores\":\"").expect("a machine") + "\"cores\":\"".len();
    let other = format!("{}9{}", &text[..cores], &text[cores..]);
    assert!(merged(&other).expect_err("two machines").to_string().contains("different machines"));
}

#[tokio::test]
async fn requests_of_the_warm_up_window_are_sent_and_not_counted() {
    let ((engine, _), (router, asked)) = (server(200).await, server(200).await);
    let mut matrix = matrix(&engine, &router, "nothing");
    (matrix.warm_up.requests, matrix.warm_up.window_s) = (0, 5.0);
    let (report, recorded) = carried_out(&matrix, |_| None).await;
    let counted: usize = recorded.iter().map(|one| one.records.len()).sum();
    assert!(0 < counted && counted < asked.lock().unwrap().len(), "{counted}");
    assert!(recorded.iter().all(|one| one.records.iter().all(|record| record.scheduled_s >= 5.0)));
    assert_eq!(report.runs.iter().map(|run| run.requests as usize).sum::<usize>(), counted);
}

#[tokio::test]
async fn a_cache_that_cannot_be_emptied_is_a_run_that_does_not_count() {
    let ((engine, _), (router, asked)) = (server(404).await, server(200).await);
    let (report, recorded) = carried_out(&matrix(&engine, &router, "vllm"), |_| None).await;
    assert!(!report.is_clean() && recorded.iter().all(|one| one.records.is_empty()));
    let failure = report.runs[0].failure.as_deref().expect("it does not count");
    assert!(failure.contains("VLLM_SERVER_DEV_MODE=1") && failure.contains(&engine), "{failure}");
    assert!(asked.lock().unwrap().is_empty(), "nothing is sent onto caches of which nothing is known");
}

#[tokio::test]
async fn runs_that_are_kept_are_not_run_again_unless_they_came_from_something_else() {
    let directory = std::env::temp_dir().join(format!("kvlane-store-{}", std::process::id()));
    let store = Store::open(&directory).expect("a directory");
    let ((engine, _), (router, asked)) = (server(200).await, server(200).await);
    let matrix = matrix(&engine, &router, "nothing");
    let (first, recorded) = carried_out(&matrix, |_| None).await;
    recorded.iter().for_each(|one| store.keep(&matrix, one).expect("kept"));
    let before = asked.lock().unwrap().len();
    let (again, _) = carried_out(&matrix, |job| store.find(&matrix, job)).await;
    assert_eq!(asked.lock().unwrap().len(), before, "everything was kept");
    assert_eq!((again.cells, again.paired), (first.cells, first.paired));
    // A further seed leaves the others as they are; another model makes them others.
    let more = Matrix { seeds: vec![1, 2, 3], ..matrix.clone() };
    assert!(more.order().unwrap().iter().all(|job| store.find(&more, job).is_some() == (job.seed < 3)));
    let other = Matrix { model: "other".into(), ..matrix.clone() };
    assert!(other.order().unwrap().iter().all(|job| store.find(&other, job).is_none()));
    // What failed is not kept, not even in the place of what was.
    let mut failed = recorded[0].clone();
    failed.run.failure = Some("late".into());
    store.keep(&matrix, &failed).expect("written");
    assert!(store.find(&matrix, &failed.run.job).is_none());
    std::fs::remove_dir_all(directory).expect("it is there");
}

#[tokio::test]
async fn a_client_that_was_late_is_a_run_that_does_not_count() {
    let ((engine, _), (router, _)) = (server(200).await, server(200).await);
    let mut matrix = matrix(&engine, &router, "nothing");
    matrix.client.lag_p99_max_s = 1e-9;
    let (report, _) = carried_out(&matrix, |_| None).await;
    let failure = report.runs[0].failure.as_deref().expect("no client is that punctual");
    assert!(failure.contains("the client was the bottleneck"), "{failure}");
    assert!(report.cells.iter().all(|cell| cell.runs == 0 && cell.figures.is_empty()));
}
