//! `kvlane report` as people meet it.

use std::fs;
use std::path::Path;

use crate::program::{run, text};

/// Records of 60 requests, `slow` seconds to the first token.
fn records(path: &Path, slow: f64, cached: u32) {
    let line = |id: u32| {
        let at = f64::from(id) * 0.5;
        format!(
            "{{\"id\":{id},\"scheduled_s\":{at},\"sent_s\":{at},\"first_token_s\":{},\"end_s\":{},\"prompt_tokens\":1000,\
             \"cached_tokens\":{cached},\"output_tokens\":9,\"endpoint\":\"e{}\",\"status\":200}}\n",
            at + slow,
            at + slow + 1.0,
            id % 3
        )
    };
    fs::write(path, (0..60).map(line).collect::<String>()).expect("written");
}

#[test]
fn two_runs_become_a_page_and_plots() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let (first, second, page, plots) = (path("a.jsonl"), path("b.jsonl"), path("r.html"), path("plots"));
    records(Path::new(&first), 1.0, 0);
    records(Path::new(&second), 0.25, 900);
    let second = format!("with cache={second}");
    let done =
        run(&["report", &first, &second, "--report", &page, "--plots", &plots, "--title", "A <b> day"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let verdict = "with cache gives the first token 75 % sooner (75 to 75) than a at the same load.";
    assert_eq!(text(&done.stdout), format!("a: 60 requests\nwith cache: 60 requests\n{verdict}\n"));
    let html = fs::read_to_string(&page).expect("a page");
    assert!(html.contains(&format!("<p class=\"verdict\">{verdict}</p>")), "{html}");
    assert!(html.contains(&format!("<code>kvlane report {first} ")), "{html}");
    assert!(html.contains("the same in all runs: 60 requests within 30 s, 60,000 prompt tokens"), "{html}");
    assert!(html.contains("A &lt;b&gt; day") && !html.contains("A <b> day"));
    assert!(html.contains("with cache against a, 60 requests answered in both"));
    assert!(html.contains("more came from the cache") && html.contains("-750 "), "{html}");
    for outside in ["src=\"http", "href=\"http", "@import", "url("] {
        assert!(!html.contains(outside), "{outside}");
    }
    let names: Vec<String> = fs::read_dir(&plots)
        .expect("a directory")
        .map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned())
        .collect();
    assert!(names.len() >= 10 && names.contains(&"time-to-first-token.svg".to_owned()), "{names:?}");
    // The same records, the same bytes.
    let again =
        run(&["report", &first, &second, "--report", &page, "--plots", &plots, "--title", "A <b> day"]);
    assert!(again.status.success());
    assert_eq!(html, fs::read_to_string(&page).expect("a page"));
}

#[test]
fn what_cannot_be_a_report_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let (good, empty, broken) = (path("good.jsonl"), path("empty.jsonl"), path("broken.jsonl"));
    records(Path::new(&good), 1.0, 0);
    fs::write(&empty, "\n").expect("written");
    fs::write(&broken, "{\"id\":1}\n").expect("written");
    let page = path("r.html");
    let (missing, nowhere) = (path("missing.jsonl"), path("no/such/r.html"));
    let cases: [(&[&str], &str); 6] = [
        (&["mooncake-conversation", "--html", &page], "--trace mooncake-conversation --records FILE"),
        (&[&good], "--html FILE"),
        (&[&empty, "--html", &page], "contains no records"),
        (&[&broken, "--html", &page], "records line 1"),
        (&[&missing, "--html", &page], "missing.jsonl"),
        (&[&good, "--html", &nowhere], "--html"),
    ];
    for (args, says) in cases {
        let done = run(&[&["report"], args].concat());
        assert_eq!(done.status.code(), Some(1), "{args:?}");
        assert!(text(&done.stderr).contains(says), "{args:?}: {}", text(&done.stderr));
    }
}
