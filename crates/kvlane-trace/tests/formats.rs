//! The readers on what is published, and on what is not fit to be read.

use std::path::{Path, PathBuf};

use std::sync::{Arc, Mutex};

use kvlane_core::index::approx;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::recording::Recorder;
use kvlane_core::recording::file::{Head, add, begin};
use kvlane_core::request::{RequestId, SchedulingRequest};
use kvlane_core::router::{self, Router, Scratch};
use kvlane_core::scheduler::{self, Input};
use kvlane_core::time::Nanos;
use kvlane_trace::format::{Format, Jitter, Options, TraceError, normal, open, read};
use kvlane_trace::generate::{Arrivals, Workload, generate};
use kvlane_trace::trace::Trace;
use proptest::prelude::*;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(data(name)).expect("the sample is here")
}

fn sample(name: &str) -> Trace {
    open(&data(name), &Options::default()).unwrap_or_else(|error| panic!("{name}: {error}"))
}

const SAMPLES: [(&str, Format); 4] = [
    ("mooncake_fast25_conversation.jsonl", Format::Mooncake),
    ("azure_2023_conv.csv", Format::Azure),
    ("weka_original.jsonl", Format::Weka),
    ("weka_packed.jsonl", Format::Weka),
];

/// A few lines of each format, for those of which no sample is kept too.
fn texts() -> Vec<(Vec<u8>, Format)> {
    let mut texts: Vec<_> = SAMPLES.iter().map(|(name, format)| (bytes(name), *format)).collect();
    let bailian = "{\"chat_id\": 55, \"parent_chat_id\": -1, \"timestamp\": 1.5, \"input_length\": 33, \"output_length\": 9, \
                   \"type\": \"text\", \"turn\": 1, \"hash_ids\": [1, 2, 3]}\n\
                   {\"chat_id\": 159, \"parent_chat_id\": 55, \"timestamp\": 61.114, \"input_length\": 64, \"output_length\": 13, \
                   \"type\": \"text\", \"turn\": 2, \"hash_ids\": [1, 2, 4, 5]}\n";
    let burstgpt = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                    5,a,1.5,ChatGPT,100,60,160,Conversation log\n45,a,2,GPT-4,300,230,530,Conversation log\n\
                    46,,2,GPT-4,300,230,530,API log\n";
    let recording = "{\"id\":0,\"scheduled_s\":0.5,\"sent_s\":0.5,\"end_s\":2.0,\"prompt_tokens\":100,\"output_tokens\":30,\
                     \"status\":200,\"session\":4}\n\
                     {\"id\":1,\"scheduled_s\":3.0,\"sent_s\":3.0,\"end_s\":4.0,\"prompt_tokens\":200,\"output_tokens\":3,\
                     \"status\":200,\"session\":4,\"base\":0,\"shared_tokens\":112}\n";
    let mut normal = Vec::new();
    normal::write(&chat(5), &mut normal).expect("memory takes all");
    texts.push((bailian.into(), Format::Bailian));
    texts.push((burstgpt.into(), Format::BurstGpt));
    texts.push((recording.into(), Format::Recording));
    texts.push((normal, Format::Normal));
    texts.push((gateway(), Format::Gateway));
    texts
}

/// What a gateway has recorded of two requests.
fn gateway() -> Vec<u8> {
    let head = Head {
        schema: "kvlane.recording/1".into(),
        model: "m".into(),
        version: "0".into(),
        origin_unix_s: 1e9,
        begun: Nanos::ZERO,
    };
    let file = Arc::new(Mutex::new(begin(&head)));
    let router = Router::new(router::Config {
        scheduler: scheduler::Config::new(PolicyConfig::by_name("least_load").expect("one")),
        index: approx::Config { memory_bytes_max: 1 << 20, ttl: Nanos::MAX },
        exact: None,
        block_tokens: 16,
    });
    let sink = Arc::clone(&file);
    router
        .record(Some(Recorder::new(move |segment| add(&mut sink.lock().expect("no panic"), &segment, &[]))));
    let (mut scratch, mut out) = (Scratch::default(), Vec::new());
    router.join(Nanos(1), "e".into(), true, false, &mut out);
    for n in 0..2 {
        let request = SchedulingRequest::new(RequestId(n), 100 + n as u32);
        router.arrive(Nanos::from_secs(n), request, &[], &mut scratch, &mut out);
        router.step(Nanos::from_secs(n), Input::Finished { request: RequestId(n) }, &mut out);
    }
    router.record(None);
    file.lock().expect("no panic").clone()
}

fn chat(count: u32) -> Trace {
    let mut workload = Workload::by_kind("shared-prefix").expect("a kind");
    workload.set_arrivals(Arrivals::Poisson { rate: 3.0, count: Some(count), seconds: None });
    generate(&workload, 1).expect("defaults make sense")
}

#[test]
fn every_format_is_known_by_how_it_begins_and_has_a_name() {
    for (text, format) in texts() {
        assert_eq!(Format::detect(&text), Some(format), "{}", format.name());
        assert_eq!(Format::by_name(format.name()), Some(format));
    }
    let seen: Vec<Format> = texts().into_iter().map(|(_, format)| format).collect();
    assert!(Format::ALL.iter().all(|format| seen.contains(format)), "a format has no text here");
    assert_eq!(Format::detect(b"a,b,c\n1,2,3\n"), None);
    let error = read(&b"a,b,c\n1,2,3\n"[..], &Options::default()).unwrap_err().to_string();
    assert!(error.contains("a,b,c") && error.contains("mooncake"), "{error}");
    assert!(matches!(read(&b" \n"[..], &Options::default()), Err(TraceError::Empty)));
}

#[test]
fn mooncake_prompts_share_their_first_block() {
    let trace = sample("mooncake_fast25_conversation.jsonl");
    assert_eq!((trace.requests.len(), trace.block_tokens), (8, 512));
    assert_eq!((trace.requests[0].input_tokens, trace.requests[0].output_tokens), (6758, 500));
    assert_eq!((trace.requests[1].base, trace.requests[1].shared_blocks), (Some(0), 1));
}

#[test]
fn azure_times_are_exact_and_count_from_the_first() {
    let trace = sample("azure_2023_conv.csv");
    assert_eq!(trace.requests.len(), 8);
    assert_eq!((trace.requests[1].arrival_s, trace.requests[1].input_tokens), (4.314_579, 396));
    assert!(trace.requests.iter().all(|request| request.base.is_none() && request.after.is_none()));
    let later = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n\
                 2024-05-10T02:30:00.109930+02:30,2399,6\n2024-05-10 00:00:01Z,76,15\n";
    let trace = read(later.as_bytes(), &Options::default()).unwrap();
    let arrivals: Vec<f64> = trace.requests.iter().map(|request| request.arrival_s).collect();
    assert_eq!(arrivals, [0.0, 0.1, 0.990_07]);
}

#[test]
fn a_coding_agent_s_turns_follow_each_other_and_share_all_that_went_before() {
    let trace = sample("weka_original.jsonl");
    assert_eq!(trace.block_tokens, 64);
    for (index, request) in (0..).zip(&trace.requests).skip(1) {
        assert_eq!(request.after, Some(index - 1));
        assert!(request.think_s.is_some());
        assert!(request.shared_blocks > 200, "request {index} shares {}", request.shared_blocks);
    }
    assert_eq!((trace.requests[0].after, trace.requests[0].think_s), (None, None));
}

#[test]
fn packed_sessions_have_sub_agents_that_their_parent_starts() {
    let trace = sample("weka_packed.jsonl");
    let sessions = trace.requests.iter().map(|request| request.session).max().unwrap() + 1;
    assert_eq!(sessions, 6, "four and two sub-agents");
    let firsts: Vec<_> = (0..sessions)
        .map(|session| trace.requests.iter().find(|request| request.session == session).unwrap())
        .collect();
    let started: Vec<_> = firsts.iter().filter_map(|first| Some((first.session, first.after?))).collect();
    assert_eq!(started.len(), 2, "{started:?}");
    for (session, parent) in started {
        assert_ne!(trace.requests[parent as usize].session, session);
        let think_s = firsts[session as usize].think_s.expect("it waits for its parent");
        assert!(think_s < 2.0, "it starts when its parent's answer ends, not {think_s} s later");
    }
}

#[test]
fn forks_of_a_session_are_left_out_and_heads_are_shared_unless_told_otherwise() {
    let session = |id: &str, output: u32| {
        format!(
            "{{\"id\": \"{id}\", \"block_size\": 64, \"hash_id_scope\": \"local\", \"tool_tokens\": 100, \"system_tokens\": 60, \
             \"requests\": [{{\"t\": 0.0, \"in\": 320, \"out\": {output}, \"hash_ids\": [1, 2, 3, 4, 5]}}, \
             {{\"t\": 9.0, \"in\": 400, \"out\": 7, \"think_time\": 2.5, \"hash_ids\": [1, 2, 3, 4, 5, 6]}}]}}\n"
        )
    };
    let text = [session("a", 5), session("b", 5), session("c", 6)].concat();
    let trace = read(text.as_bytes(), &Options::default()).unwrap();
    assert_eq!(trace.requests.len(), 4);
    assert!(trace.notes.iter().any(|note| note.contains("left out 1 sessions")), "{:?}", trace.notes);
    let of_session = |trace: &Trace, session: u32| -> Vec<u32> {
        let of = trace.requests.iter().filter(|request| request.session == session);
        of.map(|request| request.shared_blocks).collect()
    };
    assert_eq!((of_session(&trace, 0), of_session(&trace, 1)), (vec![0, 5], vec![2, 5]));
    assert_eq!(trace.requests.iter().filter_map(|request| request.think_s).collect::<Vec<_>>(), [2.5, 2.5]);
    let apart = read(text.as_bytes(), &Options { shared_head: false, ..Options::default() }).unwrap();
    assert_eq!((of_session(&apart, 0), of_session(&apart, 1)), (vec![0, 5], vec![0, 5]));
    let wrong = read(text.replace("6]}]", "6, 7, 8]}]").as_bytes(), &Options::default()).unwrap_err();
    assert_eq!(wrong.to_string(), "trace line 1, hash_ids: 8 ids for 400 tokens in blocks of 64");
}

#[test]
fn a_directory_of_indented_sessions_is_one_trace() {
    let directory = tempfile::tempdir().unwrap();
    for (n, line) in String::from_utf8(bytes("weka_packed.jsonl")).unwrap().lines().enumerate() {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        let text = serde_json::to_string_pretty(&value).unwrap();
        std::fs::write(directory.path().join(format!("trace_{n}.json")), text).unwrap();
    }
    std::fs::write(directory.path().join("README.md"), "not a session").unwrap();
    let options = Options { format: Some(Format::Weka), ..Options::default() };
    assert_eq!(open(directory.path(), &options).unwrap(), sample("weka_packed.jsonl"));
}

#[test]
fn bailian_turns_follow_their_parent_and_partial_blocks_do_not_count() {
    let (text, _) = &texts()[4];
    let trace = read(&text[..], &Options::default()).unwrap();
    assert_eq!((trace.requests[1].session, trace.requests[1].after), (0, Some(0)));
    assert_eq!((trace.requests[1].shared_blocks, trace.requests[1].arrival_s), (2, 61.114));
}

#[test]
fn burstgpt_turns_begin_with_prompt_and_answer_of_the_turn_before() {
    let (text, _) = &texts()[5];
    let trace = read(&text[..], &Options { jitter: Jitter::Off, ..Options::default() }).unwrap();
    let branch =
        |i: usize| (trace.requests[i].session, trace.requests[i].after, trace.requests[i].shared_blocks);
    assert_eq!([branch(0), branch(1), branch(2)], [(0, None, 0), (0, Some(0), 10), (1, None, 0)]);
    let older = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n";
    assert_eq!(read(older.as_bytes(), &Options::default()).unwrap().requests.len(), 1);
}

#[test]
fn a_recording_keeps_sessions_and_shared_prefixes() {
    let (text, _) = &texts()[6];
    let trace = read(&text[..], &Options::default()).unwrap();
    let second = trace.requests[1];
    assert_eq!((second.session, second.base, second.shared_blocks, second.arrival_s), (0, Some(0), 7, 3.0));
}

#[test]
fn a_recording_shows_which_requests_waited_and_for_how_long() {
    let line = |rest: &str| {
        format!(
            "{{\"sent_s\":0.0,\"end_s\":2.0,\"prompt_tokens\":10,\"output_tokens\":3,\"status\":200,{rest}}}\n"
        )
    };
    let text = [
        line("\"id\":7,\"scheduled_s\":0.0,\"session\":4"),
        line("\"id\":8,\"scheduled_s\":1.0,\"session\":5"),
        line("\"id\":9,\"scheduled_s\":3.0,\"session\":4,\"after\":7,\"think_s\":0.5"),
        line("\"id\":10,\"scheduled_s\":4.0,\"session\":5,\"after\":8"),
        line("\"id\":11,\"scheduled_s\":5.0,\"session\":6,\"after\":99,\"think_s\":1.0"),
    ]
    .concat();
    let trace = read(text.as_bytes(), &Options::default()).unwrap();
    let waits: Vec<_> = trace.requests.iter().map(|request| (request.after, request.think_s)).collect();
    assert_eq!(waits, [(None, None), (None, None), (Some(0), Some(0.5)), (Some(1), None), (None, None)]);
    let wrong = text.replace("\"think_s\":0.5", "\"think_s\":-0.5");
    assert!(read(wrong.as_bytes(), &Options::default()).unwrap_err().to_string().contains("think_s"));
}

#[test]
fn a_session_s_delay_counts_from_the_turn_before() {
    let text = "{\"session_id\": \"x\", \"timestamp\": 1000, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [1, 2]}\n\
                {\"session_id\": 7, \"timestamp\": 1500, \"input_length\": 600, \"output_length\": 5}\n\
                {\"session_id\": \"x\", \"delay\": 2000, \"input_length\": 1600, \"output_length\": 5, \"hash_ids\": [1, 3, 4, 5]}\n";
    let trace = read(text.as_bytes(), &Options::default()).unwrap();
    let third = trace.requests[2];
    assert_eq!((third.session, third.after, third.think_s), (0, Some(0), Some(2.0)));
    assert_eq!((third.arrival_s, third.shared_blocks, trace.requests[1].session), (3.0, 1, 1));
    let open = read(text.as_bytes(), &Options { open_loop: true, ..Options::default() }).unwrap();
    assert_eq!((open.requests[2].session, open.requests[2].after, open.requests[2].think_s), (0, None, None));
}

/// The error of a format's text in which `from` is `to`, and what is left with the line skipped.
fn check_bad(format: Format, from: &str, to: &str, expect: &str) {
    let (text, _) = texts().into_iter().find(|(_, of)| *of == format).expect("a text");
    let text = String::from_utf8(text).expect("text").replacen(from, to, 1);
    let options = Options { format: Some(format), ..Options::default() };
    let error = read(text.as_bytes(), &options).unwrap_err().to_string();
    assert!(error.contains(expect), "{error}");
    if let Ok(trace) = read(text.as_bytes(), &Options { skip_bad: true, ..options }) {
        assert!(trace.notes.iter().any(|note| note.contains(expect)), "{:?}", trace.notes);
    }
}

#[test]
fn a_bad_line_is_named_with_its_field() {
    check_bad(
        Format::Azure,
        ",109",
        ",109x",
        "trace line 3, GeneratedTokens: 109x is not a number of tokens from 0",
    );
    check_bad(
        Format::Azure,
        ",374,",
        ",0,",
        "trace line 2, ContextTokens: 0 is not a number of tokens from 1",
    );
    check_bad(
        Format::Azure,
        ",374,44",
        ",374,44,5",
        "trace line 2, line: 4 values, the header has 3 columns",
    );
    check_bad(Format::Azure, "2023-11-16 18", "2023-13-16 18", "trace line 2, TIMESTAMP: ");
    check_bad(
        Format::Azure,
        "ContextTokens",
        "Context",
        "trace line 1, ContextTokens: the header has no such column",
    );
    check_bad(Format::Bailian, "\"chat_id\": 159", "\"chat\": 1", "trace line 2, chat_id: missing");
    check_bad(Format::Bailian, "61.114", "-1", "trace line 2, timestamp: -1 is not a time in seconds");
    check_bad(Format::Bailian, "[1, 2, 3]", "[1]", "trace line 1, hash_ids: 1 ids, but 33 tokens");
    check_bad(Format::BurstGpt, "45,a", "noon,a", "trace line 3, Timestamp: \"noon\"");
    check_bad(Format::BurstGpt, ",300,", ",-3,", "trace line 3, Request tokens: -3");
    check_bad(
        Format::Recording,
        "\"prompt_tokens\":200",
        "\"prompt_tokens\":0",
        "trace line 2, prompt_tokens: 0",
    );
    check_bad(Format::Recording, "\"end_s\":4.0", "\"end\":4.0", "trace line 2, line: missing field `end_s`");
    check_bad(Format::Weka, "\"in\":15485", "\"in\":0", "trace line 1, in: 0 is not a number");
    check_bad(Format::Weka, "\"block_size\":64", "\"block_size\":16", "trace line 1, block_size: 16");
    check_bad(Format::Normal, "\"in\":7200", "\"in\":\"x\"", "trace line 2, line: ");
    check_bad(Format::Normal, "\"t\":", "\"time\":", "trace line 2, line: unknown field `time`");
    check_bad(Format::Normal, "1000}", "1000,\"s\":9}", "trace line 2, s: 9 skips a number");
    check_bad(
        Format::Normal,
        "out\":1000}",
        "out\":1000,\"base\":3,\"shared\":1}",
        "trace line 2, base: 3 is not an earlier request",
    );
    check_bad(Format::Normal, "\"kvlane_trace\":1", "\"kvlane_trace\":2", "version 2 of the format");
    check_bad(
        Format::Normal,
        "\"requests\":5",
        "\"requests\":6",
        "the file has 5 requests, its header says 6",
    );
}

#[test]
fn gzip_that_is_cut_short_or_damaged_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("chat.jsonl.gz");
    let trace = chat(3000);
    normal::save(&trace, &path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    assert!(whole.starts_with(&[0x1f, 0x8b]));
    assert_eq!(open(&path, &Options::default()).unwrap().requests.len(), 3000);
    // Cut within what the format is known by, and beyond it.
    for length in [60, whole.len() / 10, whole.len() / 2, whole.len() - 1] {
        let error = read(&whole[..length], &Options { skip_bad: true, ..Options::default() })
            .unwrap_err()
            .to_string();
        assert!(error.contains("the gzip stream is cut short"), "{length}: {error}");
    }
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle..middle + 40].fill(0xa5);
    let error = read(&damaged[..], &Options::default()).unwrap_err().to_string();
    assert!(error.contains("the gzip stream is damaged") || error.contains("trace line"), "{error}");
}

proptest! {
    /// Invariant: No bytes make a trace reader panic, and an invalid line is reported with its field.
    ///
    /// Also held by `no_damage_makes_a_reader_panic`, `a_bad_line_is_named_with_its_field`.
    #[test]
    fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), skip_bad: bool) {
        for &format in Format::ALL {
            let options = Options { format: Some(format), skip_bad, ..Options::default() };
            if let Ok(trace) = read(&bytes[..], &options) {
                prop_assert!(!trace.requests.is_empty());
            }
        }
        prop_assert!(Format::detect(&bytes).is_none_or(|format| Format::ALL.contains(&format)));
    }

    #[test]
    fn no_damage_makes_a_reader_panic(
        which in 0usize..8,
        at in any::<prop::sample::Index>(),
        with in prop::sample::select(vec!["", "0", "-", "9999999999", "1e9", "\"", "[", "}", ",", "\n", "4294967295"]),
        cut in any::<Option<prop::sample::Index>>(),
        skip_bad: bool,
    ) {
        let (mut text, format) = texts().swap_remove(which);
        let start = at.index(text.len());
        text.splice(start..(start + 1).min(text.len()), with.bytes());
        if let Some(cut) = cut {
            text.truncate(cut.index(text.len().max(1)));
        }
        let options = Options { format: Some(format), skip_bad, ..Options::default() };
        if let Ok(trace) = read(&text[..], &options) {
            let mut ids = Vec::new();
            for index in 0..trace.requests.len() as u32 {
                trace.blocks(index, &mut ids);
                prop_assert_eq!(ids.len() as u32, trace.prompt_blocks(index));
            }
            prop_assert!(trace.requests.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s));
        }
    }

    /// Invariant: The normal trace form is read as it was written.
    #[test]
    fn the_normal_form_is_read_as_it_was_written(seed: u64, count in 1u32..80, which in 0usize..Workload::KINDS.len()) {
        let mut workload = Workload::by_kind(Workload::KINDS[which]).expect("a kind");
        workload.set_arrivals(Arrivals::Poisson { rate: 0.5, count: Some(count), seconds: None });
        let mut trace = generate(&workload, seed).expect("defaults make sense");
        // Arrivals are rounded to microseconds; all else is exact.
        trace.requests.iter_mut().for_each(|request| request.arrival_s = (request.arrival_s * 1e6).round() / 1e6);
        let mut text = Vec::new();
        normal::write(&trace, &mut text).expect("memory takes all");
        let back = read(&text[..], &Options::default()).expect("what is written is right");
        prop_assert_eq!(&back, &trace);
        let mut again = Vec::new();
        normal::write(&back, &mut again).expect("memory takes all");
        prop_assert_eq!(again, text);
    }
}

/// An answer that broke off is shorter in a record than the one that the replayed trace went on from.
#[test]
fn no_request_shares_more_than_its_base_has_and_a_read_trace_can_be_written() {
    let record = |id: u32, tokens: u32, more: &str| {
        format!(
            r#"{{"id":{id},"scheduled_s":{id}.5,"sent_s":{id}.5,"end_s":9.0,"prompt_tokens":{tokens},"output_tokens":3,"status":200{more}}}"#
        )
    };
    let text = [record(0, 100, ""), record(1, 400, r#","base":0,"shared_tokens":320"#)].join("\n");
    let trace = read(text.as_bytes(), &Options::default()).expect("two records");
    assert_eq!((trace.requests[1].base, trace.requests[1].shared_blocks), (Some(0), 7), "103 tokens");
    let mut written = Vec::new();
    normal::write(&trace, &mut written).expect("memory takes all");
    let again = read(&written[..], &Options::default()).expect("what was written is read");
    assert_eq!(again.requests, trace.requests);
}
