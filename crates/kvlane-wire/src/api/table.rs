//! Every path of vLLM 0.32, SGLang 0.5.23 and llama.cpp build 11434, one row each, with what routing a request to it needs.
//!
//! The list is closed: engines also serve their administration on the same port, some of it below `/v1`, and a path that is
//! not listed is not relayed. Sources: the routes in vLLM's `vllm/entrypoints/**/api_router.py`, SGLang's
//! `sglang/srt/entrypoints/http_server.py`, llama.cpp's `tools/server/server.cpp`, and OpenAI's and Anthropic's API
//! references. `docs/apis.md` is generated from it.

use super::Api;
use super::path::matches;
use crate::engine::calls::SERVICE_PATH;

/// A path of an engine.
#[derive(Debug, PartialEq, Eq)]
pub struct EnginePath {
    /// The path; `{}` stands for one segment. A path below `/v1` is also reached without `/v1` unless that is a row of its
    /// own.
    pub path: &'static str,
    /// The accepted methods, in the format of `Allow`.
    pub methods: &'static str,
    /// How its body is read.
    pub body: Body,
    /// What the engine keeps after the request.
    pub keeps: Keeps,
    /// Whether a request that may have reached an engine may be sent to another one.
    pub repeats: Repeats,
    /// How its answer arrives.
    pub streams: Streams,
    /// Who may call it.
    pub audience: Audience,
    /// The engines that serve it, by their [names](crate::engine::EngineKind::name); empty: other servers.
    pub engines: &'static [&'static str],
    /// Methods that fewer of them serve, each with those that do; empty: other servers.
    pub fewer: &'static [(&'static str, &'static [&'static str])],
}

/// How the body of a request is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// Parsed: its prompt is counted, and matched against the endpoints' caches.
    Parsed(Api),
    /// JSON of which only `model` is read.
    Json,
    /// A form (`multipart/form-data`) of which only the field `model` is read.
    Form,
    /// JSON or a form, of which only `model` is read.
    Any,
    /// None. The model is taken from the query; of a gRPC method, whose message is not read, from a header.
    Empty,
}

/// State that an engine keeps after a request, and that another tenant's request could access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// No state that a request can address.
    Nothing,
    /// The prompt's blocks, if the body is a JSON object: a `cache_salt` separates tenants.
    Prompt,
    /// An object with an id (a file, a batch, a stored response), accessible to any client that knows the id.
    Object,
}

/// Whether a request that may have reached an engine may be sent to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// It may: a second answer costs work and changes nothing.
    Yes,
    /// Only if no engine can have received it: it creates or changes something.
    Unsent,
}

/// How an answer arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streams {
    /// Whole.
    No,
    /// As events, if the body has `"stream": true`.
    OnRequest,
    /// As bytes of unknown length, such as audio.
    Bytes,
    /// As messages of a WebSocket, if the request asks for one.
    Socket,
}

/// Who may call a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Clients.
    Clients,
    /// Operators: keys with the role `viewer`.
    Operators,
    /// Nobody, unless `server.extra_paths` opens it: it is administration of one engine.
    Closed,
}

const VLLM: &[&str] = &["vllm"];
const SGLANG: &[&str] = &["sglang"];
const LLAMACPP: &[&str] = &["llamacpp"];
const ALL: &[&str] = &["vllm", "sglang", "llamacpp"];
const BOTH: &[&str] = &["vllm", "sglang"];
const OTHERS: &[&str] = &[];

/// Every path of an engine. The paths that most requests have come first.
pub const ENGINE_PATHS: &[EnginePath] = &[
    // Prompts.
    parsed("/v1/chat/completions", Api::ChatCompletions, ALL).streaming(),
    parsed("/v1/completions", Api::Completions, ALL).streaming(),
    parsed("/v1/messages", Api::Messages, ALL).streaming(),
    parsed("/v1/responses", Api::Responses, ALL).streaming(),
    parsed("/generate", Api::Generate, SGLANG).streaming().with_put(&[]),
    parsed("/inference/v1/generate", Api::TokensIn, VLLM).streaming(),
    parsed("/completion", Api::Completion, LLAMACPP).streaming(),
    parsed("/infill", Api::Infill, LLAMACPP).streaming(),
    parsed("/invocations", Api::Invocations, BOTH).streaming(),
    parsed("/v1/embeddings", Api::Embeddings, ALL),
    parsed("/embedding", Api::Embedding, LLAMACPP),
    parsed("/encode", Api::Pooling, SGLANG).with_put(&[]),
    parsed("/classify", Api::Pooling, BOTH).with_put(&[("PUT", SGLANG)]),
    parsed("/v1/classify", Api::Pooling, SGLANG),
    parsed("/pooling", Api::Pooling, VLLM),
    parsed("/v1/pooling", Api::Pooling, OTHERS),
    parsed("/rerank", Api::Rerank, &["vllm", "llamacpp"]),
    parsed("/v1/rerank", Api::Rerank, ALL).with_put(&[("PUT", SGLANG)]),
    parsed("/v2/rerank", Api::Rerank, VLLM),
    parsed("/reranking", Api::Rerank, LLAMACPP),
    parsed("/v1/reranking", Api::Rerank, LLAMACPP),
    parsed("/score", Api::Score, VLLM),
    parsed("/v1/score", Api::Score, BOTH),
    grpc("/vllm.grpc.engine.VllmEngine/Generate", Body::Parsed(Api::EngineGenerate)).streaming(),
    grpc("/vllm.grpc.engine.VllmEngine/Embed", Body::Parsed(Api::EngineEmbed)),
    json("/v1/chat/completions/batch", Keeps::Prompt, VLLM),
    json("/v2/embed", Keeps::Prompt, VLLM),
    json("/generative_scoring", Keeps::Prompt, VLLM),
    json("/v1/systemone", Keeps::Prompt, ALL),
    json("/v1/decisions", Keeps::Prompt, SGLANG),
    json("/cohere/v2/chat", Keeps::Prompt, VLLM).streaming(),
    json("/vertex_generate", Keeps::Prompt, SGLANG),
    json("/api/chat", Keeps::Prompt, SGLANG).streaming(),
    json("/api/generate", Keeps::Prompt, SGLANG).streaming(),
    json("/v1/moderations", Keeps::Prompt, OTHERS),
    // Text and tokens.
    parsed("/tokenize", Api::Tokenize, ALL),
    parsed("/v1/tokenize", Api::Tokenize, SGLANG),
    parsed("/detokenize", Api::Detokenize, ALL),
    parsed("/v1/detokenize", Api::Detokenize, SGLANG),
    json("/v1/messages/count_tokens", Keeps::Nothing, ALL),
    json("/v1/chat/completions/input_tokens", Keeps::Nothing, LLAMACPP),
    json("/v1/responses/input_tokens", Keeps::Nothing, LLAMACPP),
    json("/v1/chat/completions/render", Keeps::Nothing, VLLM),
    json("/v1/completions/render", Keeps::Nothing, VLLM),
    json("/v1/messages/render", Keeps::Nothing, VLLM),
    json("/v1/responses/render", Keeps::Nothing, VLLM),
    json("/cohere/v2/chat/render", Keeps::Nothing, VLLM),
    json("/v1/chat/completions/derender", Keeps::Nothing, VLLM),
    json("/v1/completions/derender", Keeps::Nothing, VLLM),
    json("/apply-template", Keeps::Nothing, LLAMACPP),
    json("/parse_function_call", Keeps::Nothing, SGLANG),
    json("/separate_reasoning", Keeps::Nothing, SGLANG),
    // Sound and pictures.
    form("/v1/audio/transcriptions", ALL).streaming(),
    form("/v1/audio/translations", VLLM).streaming(),
    json("/v1/audio/speech", Keeps::Prompt, OTHERS).bytes(),
    json("/v1/images/generations", Keeps::Prompt, OTHERS),
    form("/v1/images/edits", OTHERS),
    form("/v1/images/variations", OTHERS),
    socket("/v1/realtime", BOTH),
    // What an engine keeps.
    EnginePath { fewer: &[("DELETE", OTHERS)], ..object("/v1/responses/{}", "GET, DELETE", BOTH) },
    object("/v1/responses/{}/cancel", "POST", BOTH),
    object("/v1/responses/{}/input_items", "GET", OTHERS),
    object("/v1/files", "GET, POST", OTHERS),
    object("/v1/files/{}", "GET, DELETE", OTHERS),
    object("/v1/files/{}/content", "GET", OTHERS),
    object("/v1/uploads", "POST", OTHERS),
    object("/v1/uploads/{}/parts", "POST", OTHERS),
    object("/v1/uploads/{}/complete", "POST", OTHERS),
    object("/v1/uploads/{}/cancel", "POST", OTHERS),
    object("/v1/batches", "GET, POST", OTHERS),
    object("/v1/batches/{}", "GET", OTHERS),
    object("/v1/batches/{}/cancel", "POST", OTHERS),
    object("/v1/conversations", "POST", OTHERS),
    object("/v1/conversations/{}", "GET, POST, DELETE", OTHERS),
    object("/v1/conversations/{}/items", "GET, POST", OTHERS),
    object("/v1/messages/batches", "GET, POST", OTHERS),
    object("/v1/messages/batches/{}", "GET, DELETE", OTHERS),
    object("/v1/messages/batches/{}/cancel", "POST", OTHERS),
    object("/v1/messages/batches/{}/results", "GET", OTHERS),
    object("/v1/videos", "GET, POST", OTHERS),
    object("/v1/videos/{}", "GET, DELETE", OTHERS),
    object("/v1/videos/{}/content", "GET", OTHERS),
    // What an engine says of itself.
    about("/version", VLLM, Audience::Clients),
    about("/get_model_info", SGLANG, Audience::Clients),
    about("/model_info", SGLANG, Audience::Clients),
    about("/api/tags", SGLANG, Audience::Clients),
    json("/api/show", Keeps::Nothing, SGLANG),
    grpc("/vllm.grpc.engine.VllmEngine/HealthCheck", Body::Empty),
    grpc("/vllm.grpc.engine.VllmEngine/GetModelInfo", Body::Empty),
    grpc("/vllm.grpc.engine.VllmEngine/GetServerInfo", Body::Empty),
    grpc("/vllm.grpc.engine.VllmEngine/GetLoads", Body::Empty),
    grpc("/vllm.grpc.engine.VllmEngine/GetTokenizer", Body::Empty),
    grpc("/vllm.grpc.engine.VllmEngine/Abort", Body::Empty),
    about("/server_info", BOTH, Audience::Operators),
    about("/get_server_info", SGLANG, Audience::Operators),
    about("/props", LLAMACPP, Audience::Operators),
    about("/slots", LLAMACPP, Audience::Operators),
    about("/lora-adapters", LLAMACPP, Audience::Operators),
    about("/v1/loads", SGLANG, Audience::Operators),
    about("/kv_event_sources", VLLM, Audience::Operators),
    about("/tokenizer_info", VLLM, Audience::Operators),
    // Administration of one engine.
    closed("/v1/load_lora_adapter", VLLM),
    closed("/v1/unload_lora_adapter", VLLM),
    closed("/load_lora_adapter", SGLANG),
    closed("/load_lora_adapter_from_tensors", SGLANG),
    closed("/unload_lora_adapter", SGLANG),
    closed("/reset_prefix_cache", VLLM),
    closed("/reset_mm_cache", VLLM),
    closed("/reset_encoder_cache", VLLM),
    closed("/vllm.grpc.engine.VllmEngine/FlushCache", VLLM),
    closed("/vllm.grpc.engine.VllmEngine/StartProfile", VLLM),
    closed("/vllm.grpc.engine.VllmEngine/StopProfile", VLLM),
    closed("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents", VLLM),
    closed("/flush_cache", SGLANG),
    closed("/sleep", VLLM),
    closed("/wake_up", VLLM),
    closed("/is_sleeping", VLLM),
    closed("/release_kv_cache_memory", VLLM),
    closed("/collective_rpc", VLLM),
    closed("/start_profile", BOTH),
    closed("/stop_profile", BOTH),
    closed("/pause", VLLM),
    closed("/resume", VLLM),
    closed("/is_paused", VLLM),
    closed("/abort_requests", VLLM),
    closed("/inference/v1/abort_requests", VLLM),
    closed("/init_weight_transfer_engine", VLLM),
    closed("/shutdown_weight_transfer_engine", VLLM),
    closed("/start_weight_update", VLLM),
    closed("/start_draft_weight_update", VLLM),
    closed("/update_weights", VLLM),
    closed("/finish_weight_update", VLLM),
    closed("/update_weight_version", BOTH),
    closed("/weight_info", VLLM),
    closed("/weight_checker", VLLM),
    closed("/get_world_size", VLLM),
    closed("/scale_elastic_ep", BOTH),
    closed("/is_scaling_elastic_ep", BOTH),
    closed("/fault_tolerance/apply", VLLM),
    closed("/fault_tolerance/status", VLLM),
    closed("/abort_request", SGLANG),
    closed("/pause_generation", SGLANG),
    closed("/continue_generation", SGLANG),
    closed("/set_internal_state", SGLANG),
    closed("/dumper/{}", SGLANG),
    closed("/add_external_corpus", SGLANG),
    closed("/remove_external_corpus", SGLANG),
    closed("/list_external_corpora", SGLANG),
    closed("/hicache/storage-backend", SGLANG),
    closed("/hicache/storage-backend/clear", SGLANG),
    closed("/get_hicache_l3_cache_layout", SGLANG),
    closed("/set_trace_level", SGLANG),
    closed("/freeze_gc", SGLANG),
    closed("/start_expert_distribution_record", SGLANG),
    closed("/stop_expert_distribution_record", SGLANG),
    closed("/dump_expert_distribution_record", SGLANG),
    closed("/update_weights_from_disk", SGLANG),
    closed("/update_weights_from_tensor", SGLANG),
    closed("/update_weights_from_distributed", SGLANG),
    closed("/update_weights_from_ipc", SGLANG),
    closed("/begin_weight_update", SGLANG),
    closed("/end_weight_update", SGLANG),
    closed("/init_weights_update_group", SGLANG),
    closed("/destroy_weights_update_group", SGLANG),
    closed("/init_weights_send_group_for_remote_instance", SGLANG),
    closed("/send_weights_to_remote_instance", SGLANG),
    closed("/get_remote_instance_transfer_engine_info", SGLANG),
    closed("/remote_instance_transfer_engine_info", SGLANG),
    closed("/register_transfer_engine_info", SGLANG),
    closed("/get_transfer_engine_info", SGLANG),
    closed("/get_weights_by_name", SGLANG),
    closed("/weights_checker", SGLANG),
    closed("/release_memory_occupation", SGLANG),
    closed("/resume_memory_occupation", SGLANG),
    closed("/slow_down", SGLANG),
    closed("/pd_role_switch", SGLANG),
    closed("/open_session", SGLANG),
    closed("/close_session", SGLANG),
    closed("/configure_logging", SGLANG),
    closed("/slots/{}", LLAMACPP),
    closed("/v1/chat/completions/control", LLAMACPP),
    closed("/v1/stream", LLAMACPP),
    closed("/v1/streams/lookup", LLAMACPP),
    closed("/tools", LLAMACPP),
    closed("/cors-proxy", LLAMACPP),
    closed("/models/sse", LLAMACPP),
    closed("/models/load", LLAMACPP),
    closed("/models/unload", LLAMACPP),
];

/// A row of which most others differ in few fields.
const fn row(path: &'static str, body: Body, engines: &'static [&'static str]) -> EnginePath {
    EnginePath {
        path,
        methods: "POST",
        body,
        keeps: Keeps::Nothing,
        repeats: Repeats::Yes,
        streams: Streams::No,
        audience: Audience::Clients,
        engines,
        fewer: &[],
    }
}

const fn parsed(path: &'static str, api: Api, engines: &'static [&'static str]) -> EnginePath {
    EnginePath { keeps: Keeps::Prompt, ..row(path, Body::Parsed(api), engines) }
}

const fn grpc(path: &'static str, body: Body) -> EnginePath {
    let keeps = if matches!(body, Body::Parsed(_)) { Keeps::Prompt } else { Keeps::Nothing };
    EnginePath { keeps, ..row(path, body, VLLM) }
}

const fn json(path: &'static str, keeps: Keeps, engines: &'static [&'static str]) -> EnginePath {
    EnginePath { keeps, ..row(path, Body::Json, engines) }
}

const fn form(path: &'static str, engines: &'static [&'static str]) -> EnginePath {
    row(path, Body::Form, engines)
}

const fn object(path: &'static str, methods: &'static str, engines: &'static [&'static str]) -> EnginePath {
    EnginePath { methods, keeps: Keeps::Object, repeats: Repeats::Unsent, ..row(path, Body::Any, engines) }
}

const fn about(path: &'static str, engines: &'static [&'static str], audience: Audience) -> EnginePath {
    EnginePath { methods: "GET", audience, ..row(path, Body::Empty, engines) }
}

const fn socket(path: &'static str, engines: &'static [&'static str]) -> EnginePath {
    EnginePath { methods: "GET", streams: Streams::Socket, ..row(path, Body::Empty, engines) }
}

const fn closed(path: &'static str, engines: &'static [&'static str]) -> EnginePath {
    EnginePath { audience: Audience::Closed, repeats: Repeats::Unsent, ..row(path, Body::Json, engines) }
}

// === impl EnginePath ===

impl EnginePath {
    const fn streaming(self) -> Self {
        Self { streams: Streams::OnRequest, ..self }
    }

    const fn bytes(self) -> Self {
        Self { streams: Streams::Bytes, ..self }
    }

    const fn with_put(self, fewer: &'static [(&'static str, &'static [&'static str])]) -> Self {
        Self { methods: "POST, PUT", fewer, ..self }
    }

    /// The engines that serve one of its methods.
    pub fn engines_of(&self, method: &str) -> &'static [&'static str] {
        self.fewer.iter().find(|(of, _)| *of == method).map_or(self.engines, |(_, engines)| engines)
    }

    /// The row of a path without query string, which must be [plain](super::path::is_plain), and whether the path lacks the
    /// row's `/v1`. One slash at the end is ignored.
    pub fn of(path: &str) -> Option<(&'static Self, bool)> {
        let path = path.strip_suffix('/').unwrap_or(path);
        let exact = ENGINE_PATHS.iter().find(|row| matches(row.path, path)).map(|row| (row, false));
        exact.or_else(|| ENGINE_PATHS.iter().find(|row| row.is_bare(path)).map(|row| (row, true)))
    }

    /// Whether a client calls it by this path without `/v1`. Administration has no second name.
    fn is_bare(&self, path: &str) -> bool {
        let below = self.path.strip_prefix("/v1");
        self.audience != Audience::Closed && below.is_some_and(|below| matches(below, path))
    }

    /// Whether it is a method of a gRPC service.
    pub fn is_grpc(&self) -> bool {
        self.path.starts_with(SERVICE_PATH)
    }

    /// The API that parses its body.
    pub const fn api(&self) -> Option<Api> {
        match self.body {
            Body::Parsed(api) => Some(api),
            Body::Json | Body::Form | Body::Any | Body::Empty => None,
        }
    }

    /// The object id in `path`, if the row has one.
    pub fn object<'a>(&self, path: &'a str) -> Option<&'a str> {
        let at = self.path.split('/').position(|segment| segment == "{}")?;
        path.split('/').nth(at)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::engine::ENGINES;

    #[test]
    fn every_path_has_one_row() {
        let mut seen = BTreeSet::new();
        for row in ENGINE_PATHS {
            assert!(seen.insert(row.path), "{} twice", row.path);
            assert_eq!(EnginePath::of(row.path), Some((row, false)), "{}: an earlier row matches", row.path);
            assert!(
                row.engines.iter().all(|name| ENGINES.iter().any(|kind| kind.name == *name)),
                "{}",
                row.path
            );
            for (method, engines) in row.fewer {
                assert!(row.methods.split(", ").any(|of| of == *method), "{}", row.path);
                assert!(engines.iter().all(|name| row.engines.contains(name)), "{}", row.path);
            }
        }
    }

    #[test]
    fn a_path_is_found_without_its_version_and_with_a_slash_at_its_end() {
        for (path, row, is_bare) in [
            ("/v1/chat/completions", "/v1/chat/completions", false),
            ("/v1/chat/completions/", "/v1/chat/completions", false),
            ("/chat/completions", "/v1/chat/completions", true),
            ("/chat/completions/", "/v1/chat/completions", true),
            ("/responses/resp_1", "/v1/responses/{}", true),
            ("/rerank", "/rerank", false),
            ("/completion", "/completion", false),
            ("/completions", "/v1/completions", true),
        ] {
            let found = EnginePath::of(path).map(|(found, is_bare)| (found.path, is_bare));
            assert_eq!(found, Some((row, is_bare)), "{path}");
        }
        for path in ["", "/", "/V1/messages", "/v1/chat/completions//", "/v1/v1/messages", "/v1/anything"] {
            assert_eq!(EnginePath::of(path), None, "{path}");
        }
    }

    #[test]
    fn administration_is_closed_and_has_one_name() {
        for path in [
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/reset_prefix_cache",
            "/flush_cache",
            "/start_profile",
            "/sleep",
            "/collective_rpc",
            "/update_weights",
            "/abort_request",
            "/slots/3",
        ] {
            let (row, _) = EnginePath::of(path).expect("a row");
            assert_eq!(row.audience, Audience::Closed, "{path}");
        }
        let (sglang, _) = EnginePath::of("/load_lora_adapter").expect("SGLang's own row");
        assert_eq!(sglang.engines, SGLANG);
        let closed = ENGINE_PATHS.iter().filter(|row| row.audience == Audience::Closed);
        for row in closed.filter_map(|row| row.path.strip_prefix("/v1")) {
            assert!(
                EnginePath::of(row).is_none_or(|(found, is_bare)| found.path == row && !is_bare),
                "{row}"
            );
        }
    }

    #[test]
    fn an_object_is_named_by_its_segment() {
        let object = |path| EnginePath::of(path).expect("a row").0.object(path);
        assert_eq!(object("/v1/responses/resp_1"), Some("resp_1"));
        assert_eq!(object("/v1/files/f/content"), Some("f"));
        assert_eq!(object("/v1/files"), None);
    }
}
