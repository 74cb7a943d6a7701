//! A made-up fourth engine: every reader must find it through the table.

use serde_json::{Value, json};

use super::kind::{
    Advice, CacheNames, CacheReset, CardNames, ComputedNames, EngineKind, FeedQuery, LoadNames, UsageObject,
};
use super::*;
use crate::api::Api;
use crate::failure::{Fault, fault};
use crate::models;
use crate::sse::{Usage, usage_in_json};

pub(super) static ENGINE: EngineKind = EngineKind {
    name: "madeup",
    title: "Made Up",
    owner: "made-up.example",
    load: LoadNames {
        running: "madeup:active",
        waiting: "madeup:queued",
        kv_usage: &["madeup:kv_ratio"],
        kv_capacity: None,
    },
    cache: CacheNames {
        block_tokens: Some(("madeup:kv_info", "tokens_per_block")),
        queried_tokens: &["madeup:looked_up"],
        hit_tokens: &["madeup:found"],
        external_hit_tokens: &["madeup:fetched"],
    },
    progress: &["madeup:steps"],
    rank_label: Some("replica"),
    dead: &["the made-up core is gone"],
    usage: Some(UsageObject {
        key: "\"madeup_counts\"",
        adds: true,
        names: Some(ComputedNames { computed: "fresh", cached: "reused", output: "made" }),
    }),
    card: CardNames { max_model_len: Some("/limits/context"), trained_len: None },
    continues_messages: true,
    feeds: Some(FeedQuery { path: "/madeup/feeds", parse: |_| Ok(Vec::new()) }),
    tokenize: Tokenize {
        like: "Made Up",
        path: "/madeup/encode",
        apis: &[Api::Completions],
        parse: |answer| Ok(Tokenized { tokens: serde_json::from_slice(answer)?, max_model_len: None }),
        text_path: "/madeup/decode",
        text_body: |_, tokens| json!(tokens),
        text_parse: |answer| serde_json::from_slice(answer).ok(),
    },
    cache_reset: Some(CacheReset { path: "/madeup/reset", needs: None }),
    advice: Advice { cached_tokens: Some("start it with --counts"), ..EngineKind::BARE.advice },
    ..EngineKind::BARE
};

#[test]
fn a_fourth_engine_is_one_file_and_an_entry_in_the_table() {
    let page = concat!(
        "madeup:active{replica=\"1\"} 3\nmadeup:queued{replica=\"1\"} 2\nmadeup:kv_ratio{replica=\"1\"} 0.5\n",
        "madeup:looked_up{replica=\"1\"} 9\nmadeup:found{replica=\"1\"} 4\nmadeup:fetched{replica=\"1\"} 2\nmadeup:steps{replica=\"1\"} 7\n",
        "madeup:kv_info{tokens_per_block=\"64\"} 1\n",
    );
    let (kind, reports) = load_reports(page).expect("its load");
    assert_eq!((kind.name, reports[0].0, reports[0].1.running, reports[0].1.waiting), ("madeup", 1, 3, 2));
    assert_eq!(
        prefix_caches(page),
        [(1, PrefixCache { queried_tokens: 9, hit_tokens: 4, external_hit_tokens: 2 })]
    );
    assert_eq!(block_tokens(page), Some(64));
    assert_eq!(progress(page).into_keys().collect::<Vec<_>>(), [1]);
    let card: Value = json!({"id": "m", "owned_by": "made-up.example", "limits": {"context": 4096}});
    let kind = of_card(&card);
    assert!(kind.is_some_and(|kind| kind.continues_messages));
    assert_eq!(models::max_model_len(&card), Some(4096));
    assert_eq!(tokenize(Some(&card)).path, "/madeup/encode");
    assert_eq!(advice(kind, |advice| advice.cached_tokens), "start it with --counts");
    let answer = br#"{"text":"x","madeup_counts":{"reused":8,"fresh":1,"made":2}}"#;
    let usage = Usage { prompt_tokens: 9, completion_tokens: 2, cached_tokens: Some(8) };
    assert_eq!(usage_in_json(answer), Some(usage));
    assert_eq!(fault(b"500: The made-up core is gone"), Fault::Engine);
}

#[test]
fn an_unknown_engine_has_the_forms_that_others_copy() {
    let card = json!({"id": "m", "owned_by": "kvlane"});
    assert_eq!((of_card(&card), tokenize(Some(&card)).path), (None, "/tokenize"));
    let llamacpp = named("llamacpp");
    assert_eq!(advice(llamacpp, |advice| advice.metrics), "--metrics");
    assert_eq!(advice(None, |advice| advice.metrics), "");
}

#[test]
fn every_engine_has_names_of_its_own() {
    for (n, kind) in ENGINES.iter().enumerate() {
        assert!(!kind.name.is_empty() && !kind.title.is_empty() && !kind.owner.is_empty());
        assert!(kind.load.running.starts_with(kind.name), "{kind:?}");
        let same = |other: &&&EngineKind| other.name == kind.name || other.owner == kind.owner;
        assert_eq!(ENGINES[..n].iter().find(same), None, "{kind:?}");
    }
}
