use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::bodies::is_of_the_answer;
use super::*;
use crate::api::Api;
use crate::openai::parse;

/// The object of a first answer of vLLM 0.32, with a field that this version does not have.
const PARAMS: &str = concat!(
    r#"{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3]], "#,
    r#""remote_engine_id": "f784a5b2-7fcf-4362-af5f-6050b18e7beb", "remote_request_id": "chatcmpl-0f138542-9873746e", "#,
    r#""remote_host": "127.0.0.1", "remote_port": 58103, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "#,
    r#""remote_num_tokens": 411, "remote_blocks_expiry_time": null, "transfer_mode": "pull", "#,
    r#""remote_prefill_cached_tokens": 288, "of_tomorrow": {"a": [null]}}"#
);

const ASKS: &str = concat!(
    r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"#,
    r#""remote_block_ids":null,"remote_host":null,"remote_port":null}"#
);

fn split(connector: Connector, api: Api) -> Split<'static> {
    let source = Source {
        host: "10.0.0.1".into(),
        port: 5600,
        engine_id: "engine-1_dp0".into(),
        tp_size: 2,
        ..Source::default()
    };
    Split { connector, api, request_id: "0f138542", room: u64::MAX - 1, source }
}

fn prefill(connector: Connector, api: Api, body: &str) -> String {
    let body = split(connector, api).prefill_body(body.as_bytes()).expect(body);
    String::from_utf8(body.into()).expect("UTF-8")
}

fn decode(connector: Connector, api: Api, body: &str) -> String {
    let body = split(connector, api).decode_body(body.as_bytes(), None).expect(body);
    String::from_utf8(body.into()).expect("UTF-8")
}

#[test]
fn a_first_leg_asks_for_one_token_and_to_keep_the_blocks() {
    use Api::{ChatCompletions, Completions, Messages, Responses};
    for (api, body, expect) in [
        (
            ChatCompletions,
            r#"{"model":"tiny","messages":[{"role":"user","content":"é \"\n"}], "max_tokens": 16, "temperature": 0,
                "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}}"#,
            format!(
                r#"{{"max_tokens":1,"stream":false,{ASKS},"model":"tiny","messages":[{{"role":"user","content":"é \"\n"}}],"temperature":0,"ignore_eos":true}}"#
            ),
        ),
        (
            ChatCompletions,
            r#"{"messages":[],"max_completion_tokens":64,"min_tokens":8,"n":2,"logprobs":true,"top_logprobs":3,"stop":["x"]}"#,
            format!(r#"{{"max_tokens":1,"stream":false,{ASKS},"messages":[],"stop":["x"]}}"#),
        ),
        (
            Completions,
            r#"{"prompt":[1,2],"best_of":2,"echo":true,"cache_salt":"s","kv_transfer_params":{"remote_host":"evil"}}"#,
            format!(r#"{{"max_tokens":1,"stream":false,{ASKS},"prompt":[1,2],"cache_salt":"s"}}"#),
        ),
        (
            Responses,
            r#"{"input":"hi","max_output_tokens":16,"store":true}"#,
            format!(r#"{{"max_output_tokens":1,"stream":false,{ASKS},"store":false,"input":"hi"}}"#),
        ),
        (
            Messages,
            r#"{"messages":[],"max_tokens":16,"system":"s"}"#,
            format!(r#"{{"max_tokens":1,"stream":false,{ASKS},"messages":[],"system":"s"}}"#),
        ),
    ] {
        assert_eq!(prefill(Connector::Nixl, api, body), expect);
        assert_eq!(prefill(Connector::NixlPush, api, body), expect, "they differ only in the second leg");
    }
    assert_eq!(
        prefill(Connector::LmCache, ChatCompletions, r#"{"messages":[],"max_tokens":9}"#),
        r#"{"max_tokens":1,"stream":false,"messages":[]}"#,
        "a shared cache needs no object"
    );
}

#[test]
fn a_second_leg_is_the_clients_body_with_the_object_of_the_first_answer_unchanged() {
    let answer =
        format!(r#"{{"id":"chatcmpl-1","choices":[],"kv_transfer_params": {PARAMS} ,"usage":null}}"#);
    let params = transfer_params(answer.as_bytes()).expect("an object");
    assert_eq!((params.json(), params.prefill_cached_tokens()), (PARAMS, Some(288)));
    let body =
        r#"{"messages":[],"max_tokens":16,"stream":true,"n":2,"min_tokens":8,"kv_transfer_params":null}"#;
    let second = split(Connector::Nixl, Api::ChatCompletions).decode_body(body.as_bytes(), Some(params));
    assert_eq!(
        second.expect(body),
        format!(
            r#"{{"kv_transfer_params":{PARAMS},"messages":[],"max_tokens":16,"stream":true,"n":2,"min_tokens":8}}"#
        )
    );
    assert_eq!(decode(Connector::Nixl, Api::ChatCompletions, body).matches("kv_transfer").count(), 0);
    let source = params.source().expect("where it is");
    assert_eq!((&*source.host, source.port, source.tp_size), ("127.0.0.1", 58103, 1));
}

#[test]
fn legs_that_are_sent_at_once_say_where_the_blocks_are() {
    use Api::{ChatCompletions, Completions, Responses};
    for (api, id) in [
        (ChatCompletions, "chatcmpl-0f138542"),
        (Completions, "cmpl-0f138542-0"),
        (Responses, "resp_0f138542"),
    ] {
        assert_eq!(
            decode(Connector::NixlPush, api, "{}"),
            format!(
                r#"{{"kv_transfer_params":{{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"engine-1_dp0","remote_host":"10.0.0.1","remote_port":5600,"tp_size":2,"remote_request_id":"{id}"}}}}"#
            )
        );
    }
    let body = r#"{"prompt":"a","max_tokens":5,"stop":"x","stop_token_ids":[1],"ignore_eos":false}"#;
    assert_eq!(
        prefill(Connector::Mooncake, Completions, body),
        r#"{"max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-fffffffffffffffe"},"ignore_eos":true,"prompt":"a"}"#,
        "it must end by its length"
    );
    assert_eq!(
        decode(Connector::Mooncake, Completions, body),
        r#"{"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":"xfer-fffffffffffffffe","remote_engine_id":"engine-1_dp0","remote_bootstrap_addr":"http://10.0.0.1:5600"},"prompt":"a","max_tokens":5,"stop":"x","stop_token_ids":[1],"ignore_eos":false}"#
    );
    let body =
        r#"{"text":"a","bootstrap_host":"evil","bootstrap_room":1,"sampling_params":{"max_new_tokens":5}}"#;
    let both = prefill(Connector::Sglang, Api::Generate, body);
    assert_eq!(
        both,
        r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":5600,"bootstrap_room":9223372036854775806,"text":"a","sampling_params":{"max_new_tokens":5}}"#
    );
    assert_eq!(decode(Connector::Sglang, Api::Generate, body), both);
}

#[test]
fn a_source_is_told_as_the_engine_reads_it() {
    let answer =
        format!(r#"{{"kv_transfer_params":{}}}"#, PARAMS.replace("\"pp_size\": 1", "\"pp_size\": 3"));
    let source = transfer_params(answer.as_bytes()).ok().and_then(TransferParams::source).expect("a source");
    assert_eq!((source.tp_size, source.pp_size, source.dcp_size), (1, 3, 1));
    let of = |connector, source| {
        let body = Split { source, ..split(connector, Api::Completions) }.decode_body(b"{}", None);
        String::from_utf8(body.expect("a body").into()).expect("UTF-8")
    };
    assert!(of(Connector::NixlPush, source).contains(r#""tp_size":1,"pp_size":3,"dcp_size":1,"#));
    let source = Source { host: "fd00::1".into(), port: 8998, ..Source::default() };
    assert!(of(Connector::Mooncake, source).contains(r#""remote_bootstrap_addr":"http://[fd00::1]:8998""#));
}

#[test]
fn a_generation_server_gets_what_the_context_server_answers() {
    let body = r#"{"prompt":"a b","max_tokens":5,"prompt_token_ids":[9],"stream":true,"n":1}"#;
    assert_eq!(
        prefill(Connector::TensorRtLlm, Api::Completions, body),
        r#"{"stream":false,"disaggregated_params":{"request_type":"context_only"},"prompt":"a b","max_tokens":5,"prompt_token_ids":[9],"n":1}"#
    );
    let answer = |finish: &str, rest: &str| {
        format!(
            r#"{{"choices":[{{"finish_reason":{finish},"disaggregated_params":{{"request_type":"context_only","ctx_request_id":18446744073709551615}}}}]{rest}}}"#
        )
    };
    let after = |api, answer: &str| {
        let second = split(Connector::TensorRtLlm, api).body_after(body.as_bytes(), answer.as_bytes());
        second.map(|body| String::from_utf8(body.into()).expect("UTF-8"))
    };
    let state =
        r#""disaggregated_params":{"request_type":"generation_only","ctx_request_id":18446744073709551615}"#;
    let ids = r#","prompt_token_ids":[1, 2]"#;
    for (api, answer, expect) in [
        (
            Api::Completions,
            answer("\"length\"", ids),
            format!(
                r#"{{{state},"prompt":[1, 2],"max_tokens":5,"prompt_token_ids":[9],"stream":true,"n":1}}"#
            ),
        ),
        (
            Api::ChatCompletions,
            answer("\"not_finished\"", ids),
            format!(
                r#"{{{state},"prompt_token_ids":[1, 2],"prompt":"a b","max_tokens":5,"stream":true,"n":1}}"#
            ),
        ),
        (
            Api::Completions,
            answer("null", r#","prompt_token_ids":null"#),
            format!("{{{state},{}", &body[1..]),
        ),
    ] {
        assert_eq!(after(api, &answer), Ok(expect));
    }
    let of_another = r#"{"choices":[{"finish_reason":"length"}]}"#;
    for (answer, why) in [
        (answer("\"stop\"", ids), NoParams::Ended),
        (of_another.into(), NoParams::NoContext),
        (r#"{"choices":[]}"#.into(), NoParams::NoContext),
        (r#"{"choices":[{"disaggregated_params":7}]}"#.into(), NoParams::NoContext),
        ("{}".into(), NoParams::NoContext),
        ("[".into(), NoParams::NotJson),
    ] {
        assert_eq!(after(Api::Completions, &answer), Err(why), "{answer}");
    }
}

#[test]
fn media_of_a_chat_are_seen_wherever_they_stand() {
    for (content, has) in [
        (r#""image_url""#, false),
        (r#"[{"type":"text","text":"image_url"}]"#, false),
        (r#"[{"type":"text"},{"type":"image_url","image_url":{"url":"u"}}]"#, true),
        (r#"[{"type":"input\u005faudio"}]"#, true),
        (r#"[{"type":"video_url"}]"#, true),
        (r#"[{"type":["audio_url"]}, null, "image_url"]"#, false),
        (r#"[{"type":"audio_url"}]"#, true),
    ] {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"a"}},{{"content":{content}}}]}}"#);
        assert_eq!(has_media(body.as_bytes()), has, "{content}");
    }
    for body in ["", "[]", "{", r#"{"messages":7}"#, r#"{"prompt":"a"}"#] {
        assert!(!has_media(body.as_bytes()), "{body}");
    }
}

#[test]
fn an_answer_without_a_usable_object_is_rejected() {
    for (answer, why) in [
        (r#"{"kv_transfer_params":null}"#.to_owned(), NoParams::Absent),
        ("{}".to_owned(), NoParams::Absent),
        (r#"{"in":{"kv_transfer_params":{}}}"#.to_owned(), NoParams::Absent),
        ("data: {\"choices\":[]}\n\ndata: [DONE]\n\n".to_owned(), NoParams::NotJson),
        (format!(r#"{{"kv_transfer_params":{PARAMS}"#), NoParams::NotJson),
        ("{\"kv_transfer_params\":[]}".to_owned(), NoParams::Incomplete("do_remote_prefill")),
        (
            format!(r#"{{"kv_transfer_params":{}}}"#, PARAMS.replace("[[1, 2, 3]]", "null")),
            NoParams::Incomplete("remote_block_ids"),
        ),
        (
            format!(r#"{{"kv_transfer_params":{}}}"#, PARAMS.replace("remote_engine_id", "x")),
            NoParams::Incomplete("remote_engine_id"),
        ),
    ] {
        assert_eq!(transfer_params(answer.as_bytes()), Err(why), "{answer}");
    }
}

#[test]
fn what_would_have_another_prompt_or_no_use_is_not_split() {
    use Api::{ChatCompletions, Completions, Messages, Responses};
    use Connector::{LlmdSidecar, Mooncake, Nixl, NixlPush, Sglang, TensorRtLlm};
    let parameter = |name| Err(WhyNot::Parameter(name));
    for (connector, api, body, expect) in [
        (Nixl, Completions, r#"{"prompt":["a","b"]}"#, Err(WhyNot::Prompts)),
        (Nixl, Completions, r#"{"prompt":[[1],[2]]}"#, Err(WhyNot::Prompts)),
        (Nixl, Completions, r#"{"prompt":["a"]}"#, Ok(())),
        (Nixl, Completions, r#"{"prompt":[1,2,3]}"#, Ok(())),
        (Nixl, Completions, r#"{"prompt_embeds":"AA"}"#, Err(WhyNot::Prompts)),
        (Nixl, Completions, r#"{"prompt":"a","use_beam_search":true}"#, parameter("use_beam_search")),
        (Nixl, Completions, r#"{"prompt":"a","use_beam_search":false,"n":2,"best_of":2}"#, Ok(())),
        (Nixl, Completions, r#"{"prompt":"a","echo":true,"logprobs":1}"#, parameter("echo")),
        (Nixl, Completions, r#"{"prompt":"a","echo":true,"logprobs":null}"#, Ok(())),
        (Nixl, ChatCompletions, r#"{"messages":[],"prompt_logprobs":0}"#, parameter("prompt_logprobs")),
        (Nixl, ChatCompletions, r#"{"truncate_prompt_tokens":-1}"#, parameter("truncate_prompt_tokens")),
        (Nixl, Responses, r#"{"input":"a","truncation":"auto"}"#, parameter("truncation")),
        (Nixl, Responses, r#"{"input":"a","truncation":"disabled","background":false}"#, Ok(())),
        (Nixl, Responses, r#"{"input":"a","previous_response_id":"r"}"#, parameter("previous_response_id")),
        (Nixl, Responses, r#"{"input":"a","conversation":"c"}"#, parameter("conversation")),
        (Nixl, Messages, r#"{"messages":[]}"#, Ok(())),
        (Nixl, Api::Embeddings, r#"{"input":"a"}"#, Err(WhyNot::Api(Api::Embeddings))),
        (Nixl, Api::Generate, r#"{"text":"a"}"#, Err(WhyNot::Api(Api::Generate))),
        (Nixl, ChatCompletions, "[]", Err(WhyNot::Body)),
        (NixlPush, ChatCompletions, r#"{"messages":[],"n":2}"#, parameter("n")),
        (NixlPush, ChatCompletions, r#"{"messages":[],"n":1}"#, Ok(())),
        (Mooncake, Messages, r#"{"messages":[]}"#, Err(WhyNot::Api(Messages))),
        (TensorRtLlm, ChatCompletions, r#"{"messages":[],"n":2}"#, parameter("n")),
        (TensorRtLlm, Completions, r#"{"prompt":"a","best_of":2}"#, parameter("best_of")),
        (TensorRtLlm, Completions, r#"{"prompt":[1,2]}"#, Ok(())),
        (TensorRtLlm, Responses, r#"{"input":"a"}"#, Err(WhyNot::Api(Responses))),
        (TensorRtLlm, Messages, r#"{"messages":[]}"#, Err(WhyNot::Api(Messages))),
        (Sglang, Responses, r#"{"input":"a"}"#, Err(WhyNot::Api(Responses))),
        (LlmdSidecar, Messages, r#"{"messages":[]}"#, Err(WhyNot::Api(Messages))),
        (LlmdSidecar, ChatCompletions, r#"{"messages":[],"n":2}"#, Ok(())),
        (LlmdSidecar, Responses, r#"{"input":[]}"#, Ok(())),
        (Sglang, Completions, r#"{"prompt":["a"]}"#, Err(WhyNot::Prompts)),
        (Sglang, Api::Generate, r#"{"text":"a"}"#, Ok(())),
        (Sglang, Api::Generate, r#"{"input_ids":[[1,2]]}"#, Err(WhyNot::Prompts)),
        (Sglang, Api::Generate, r#"{"text":"a","sampling_params":{"n":2}}"#, parameter("n")),
        (Sglang, Api::Generate, r#"{"text":"a","return_logprob":true}"#, parameter("return_logprob")),
    ] {
        assert_eq!(may_split(connector, api, body.as_bytes()), expect, "{connector:?} {body}");
        // Where the body has nothing to look at, the API and the connector decide.
        if let Ok(parsed) = parse(api, body.as_bytes(), &mut Vec::new()) {
            assert!(parsed.telling || expect.is_ok() == splits(connector, api), "{connector:?} {body}");
        }
    }
    let plain = r#"{"messages":[],"stream":true,"max_tokens":5,"temperature":0,"echo_":1}"#;
    assert!(!parse(ChatCompletions, plain.as_bytes(), &mut Vec::new()).expect(plain).telling);
}

/// Invariant: A client's own transfer parameters never reach an engine.
#[test]
fn a_clients_own_transfer_parameters_are_noticed_and_removed() {
    let mut prompt = Vec::new();
    for (member, rest) in [
        (r#""kv_transfer_params":{"do_remote_prefill":true}"#, ""),
        (r#""kv\u005ftransfer_params":1"#, ""),
        (r#""ec_transfer_params":{}"#, ""),
        (r#""bootstrap_room":7,"bootstrap_host":"h","bootstrap_port":null"#, ""),
        (r#""disaggregated_params":{"request_type":"generation_only"}"#, ""),
        (r#""vllm_xargs":{"kv_transfer_params":"x"}"#, r#","vllm_xargs":{}"#),
        (r#""vllm_xargs":{"a": 1.50,"kv_transfer\u005fparams":"x"}"#, r#","vllm_xargs":{"a":1.50}"#),
    ] {
        let body = format!(r#"{{"messages":[],{member}}}"#);
        let parsed = parse(Api::ChatCompletions, body.as_bytes(), &mut prompt).expect("a body");
        assert!(parsed.reserved, "{body}");
        let stripped = strip_transfer_params(body.as_bytes()).expect("a body");
        assert_eq!(stripped, format!(r#"{{"messages":[]{rest}}}"#));
        for connector in Connector::ALL {
            let legs = [
                prefill(connector, Api::ChatCompletions, &body),
                decode(connector, Api::ChatCompletions, &body),
            ];
            let plain = r#"{"messages":[]}"#;
            let expect = [
                prefill(connector, Api::ChatCompletions, plain),
                decode(connector, Api::ChatCompletions, plain),
            ];
            let expect = expect.map(|leg| leg.replace('}', ""));
            assert_eq!(legs.map(|leg| leg.replace(rest, "").replace('}', "")), expect, "{connector:?}");
        }
    }
    for body in [
        r#"{"messages":[{"role":"user","content":"kv_transfer_params","kv_transfer_params":1}]}"#,
        r#"{"messages":[],"vllm_xargs":{"a":"kv_transfer_params"},"kv_transfer_param":1}"#,
        r#"{"messages":[],"vllm_xargs":["kv_transfer_params"]}"#,
    ] {
        assert!(!parse(Api::ChatCompletions, body.as_bytes(), &mut prompt).expect(body).reserved, "{body}");
        assert_eq!(strip_transfer_params(body.as_bytes()).expect(body), body);
    }
}

#[test]
fn engine_ids_are_read_by_rank() {
    let answer =
        br#"{"1": {"engine_id": "b_dp1", "worker_addr": {"0": {"0": "h:1"}}}, "0": {"engine_id": "b_dp0"}}"#;
    assert_eq!(engine_ids(answer), Ok(vec![(0, "b_dp0".to_owned()), (1, "b_dp1".to_owned())]));
    for wrong in ["[]", "{", "{}", r#"{"0":{}}"#, r#"{"x":{"engine_id":"a"}}"#] {
        engine_ids(wrong.as_bytes()).expect_err(wrong);
    }
}

#[test]
fn every_connector_has_a_name_of_its_own() {
    for connector in Connector::ALL {
        assert_eq!(Connector::named(connector.name()), Some(connector));
        assert!(connector.name().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'));
    }
    assert_eq!(Connector::named("NixlConnector"), Some(Connector::Nixl));
    assert_eq!(Connector::named("moriio"), None);
}

/// Members of a body in the forms that clients write, with their values' text.
fn members() -> impl Strategy<Value = Vec<(String, String)>> {
    let key = prop_oneof![
        "[a-z\\\\\"é_]{0,6}",
        prop::sample::select(vec![
            "max_tokens",
            "min_tokens",
            "stream",
            "n",
            "messages",
            "kv_transfer_params",
            "bootstrap_host",
            "store",
            "ignore_eos",
            "vllm_xargs",
        ])
        .prop_map(str::to_owned),
    ];
    let value = prop_oneof![
        "[ -~é\\n]{0,12}".prop_map(|text| json!(text).to_string()),
        Just("[1.50, {\"a\" :null}]".into())
    ];
    prop::collection::vec((key, value), 0..8)
}

proptest! {
    /// Invariant: A split request's second leg has every member of the client's body, byte for byte; its first leg has
    /// every one that shapes the prompt.
    #[test]
    fn both_legs_keep_every_other_member_as_it_is(
        members in members(), connector in prop::sample::select(Connector::ALL.to_vec()), gap in "[ \\n]{0,2}"
    ) {
        let write = |members: &[(String, String)]| {
            let members: Vec<String> =
                members.iter().map(|(key, value)| format!("{gap}{}:{gap}{value}", json!(key))).collect();
            format!("{{{}}}", members.join(","))
        };
        let body = write(&members);
        let reserved = |key: &str| matches!(key, "kv_transfer_params" | "bootstrap_host");
        let one_request = |key: &str| matches!(connector, Connector::Sglang | Connector::LlmdSidecar)
            || connector == Connector::TensorRtLlm && key != "stream" || !(is_of_the_answer(key) || connector == Connector::Mooncake && key == "ignore_eos");
        for (leg, keeps) in [
            (prefill(connector, Api::ChatCompletions, &body), &one_request as &dyn Fn(&str) -> bool),
            (decode(connector, Api::ChatCompletions, &body), &|_: &str| true),
        ] {
            prop_assert!(serde_json::from_str::<Map<String, Value>>(&leg).is_ok(), "{leg}");
            let kept: Vec<String> = members
                .iter()
                .filter(|(key, _)| !reserved(key) && keeps(key))
                .map(|(key, value)| format!("{}:{value}", json!(key)))
                .collect();
            prop_assert!(leg.ends_with(&format!("{}}}", kept.join(","))), "{leg}\n{kept:?}");
        }
    }

    #[test]
    fn any_bytes_are_split_or_refused_without_a_panic(body: Vec<u8>) {
        for connector in Connector::ALL {
            prop_assert!(may_split(connector, Api::ChatCompletions, &body).is_err());
            prop_assert!(split(connector, Api::ChatCompletions).prefill_body(&body).is_err());
        }
        prop_assert!(strip_transfer_params(&body).is_err() && transfer_params(&body).is_err());
    }
}
