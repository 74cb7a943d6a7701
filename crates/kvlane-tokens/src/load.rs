//! Loads a model's files as `transformers` does: the tokenizer, its special tokens, its chat templates.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::bpe::Bpe;
use crate::encode::{AddedToken, Encoder, Parts};
use crate::source::{Config, LoadError, Source};
use crate::template::Template;
use crate::tiktoken;

/// Largest accepted file. Gemma's `tokenizer.json`, with 262,144 tokens, has 33 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Tokenizer attributes available to templates (transformers, `SPECIAL_TOKENS_ATTRIBUTES`).
const SPECIALS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Architectures whose conversations vLLM 0.32 renders in code instead of by template (`config/model.py`,
/// `renderers/registry.py`; `gpt_oss` in `renderers/online_renderer.py`).
const ENGINE_RENDERS: [(&str, &str); 8] = [
    ("GptOssForCausalLM", "harmony"),
    ("KimiK3ForConditionalGeneration", "kimi_k3"),
    ("DeepseekV32ForCausalLM", "deepseek_v32"),
    ("DeepseekV4ForCausalLM", "deepseek_v4"),
    ("DeepseekV4ForConditionalGeneration", "deepseek_v4"),
    ("DeepseekV41ForCausalLM", "deepseek_v41"),
    ("InklingForCausalLM", "inkling"),
    ("InklingForConditionalGeneration", "inkling"),
];

/// The loaded contents of a source.
pub(crate) struct Loaded {
    pub(crate) encoder: Encoder,
    pub(crate) template: Option<Template>,
    /// The separate template for requests with tools, if any.
    pub(crate) tool_template: Option<Template>,
    /// Special tokens by attribute, for templates.
    pub(crate) specials: Vec<(&'static str, String)>,
    pub(crate) vocab_size: usize,
    /// The engine's renderer for this model, if the engine renders its conversations without a template.
    pub(crate) engine_renders: Option<&'static str>,
    /// The token that the template prints for an image, if the model takes images.
    pub(crate) image_token: Option<u32>,
}

/// The files of a model's directory.
struct Files {
    dir: PathBuf,
    tokenizer: PathBuf,
    /// `tokenizer_config.json`.
    config: Value,
    /// `config.json`.
    model: Value,
    specials_map: Value,
}

/// The contents of a tokenizer file.
struct Tokens {
    parts: Parts,
    vocab_size: usize,
}

pub(crate) fn load(source: &Source, config: &Config) -> Result<Loaded, LoadError> {
    let files = Files::find(&source.path)?;
    let specials = files.specials();
    let read = if files.tokenizer.extension().is_some_and(|extension| extension == "json") {
        files.tokenizer_json(config, &specials)?
    } else {
        files.ranks(config)?
    };
    let encoder =
        Encoder::new(read.parts).map_err(|why| LoadError::Format { path: files.tokenizer.clone(), why })?;
    let (template, tool_template) = files.templates(source.chat_template.as_deref(), config)?;
    Ok(Loaded {
        encoder,
        template,
        tool_template,
        specials,
        vocab_size: read.vocab_size,
        engine_renders: files.engine_renders(),
        image_token: files.image_token(),
    })
}

// === impl Files ===

impl Files {
    fn find(path: &Path) -> Result<Files, LoadError> {
        let absent = |error| LoadError::Absent { path: path.to_owned(), error };
        let meta = fs::metadata(path).map_err(absent)?;
        let (dir, tokenizer) = if meta.is_dir() {
            (path.to_owned(), tokenizer_in(path)?)
        } else {
            (path.parent().map(Path::to_owned).unwrap_or_default(), path.to_owned())
        };
        let config = json(&dir.join("tokenizer_config.json"))?.unwrap_or(Value::Null);
        let specials_map = json(&dir.join("special_tokens_map.json"))?.unwrap_or(Value::Null);
        let model = json(&dir.join("config.json"))?.unwrap_or(Value::Null);
        Ok(Files { dir, tokenizer, config, model, specials_map })
    }

    /// Named special tokens, each a string or an object with a content.
    fn specials(&self) -> Vec<(&'static str, String)> {
        let named = |map: &Value, name: &str| {
            let token = &map[name];
            token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned)
        };
        SPECIALS
            .iter()
            .filter_map(|name| {
                let token = named(&self.config, name).or_else(|| named(&self.specials_map, name))?;
                Some((*name, token))
            })
            .collect()
    }

    fn tokenizer_json(
        &self,
        config: &Config,
        specials: &[(&'static str, String)],
    ) -> Result<Tokens, LoadError> {
        let format = |why: String| LoadError::Format { path: self.tokenizer.clone(), why };
        let text = read(&self.tokenizer)?.ok_or_else(|| format("the file was removed".into()))?;
        let mut library: tokenizers::Tokenizer =
            text.parse().map_err(|error: tokenizers::Error| format(error.to_string()))?;
        // `transformers` sets both per call and ignores the file.
        library.with_truncation(None).map_err(|error| format(error.to_string()))?;
        library.with_padding(None);
        self.add_missing(&mut library).map_err(&format)?;

        let parsed: Value = serde_json::from_str(&text).map_err(|error| format(error.to_string()))?;
        drop(text);
        let own = Bpe::from_tokenizer(&parsed).ok();
        let positional = mentions_first(&parsed["pre_tokenizer"]);
        drop(parsed);

        let mut added: Vec<AddedToken> = library
            .get_added_tokens_decoder()
            .into_iter()
            .map(|(id, token)| AddedToken {
                id,
                content: token.content,
                lstrip: token.lstrip,
                rstrip: token.rstrip,
                single_word: token.single_word,
                normalized: token.normalized,
            })
            .collect();
        added.sort_by_key(|token| token.id);
        let (before, behind) = self.ends(&library, specials).map_err(&format)?;
        let vocab_size = library.get_vocab_size(true);
        Ok(Tokens {
            parts: Parts {
                own,
                library: Some(library),
                added,
                before,
                behind,
                positional,
                cache_bytes_max: config.cache_bytes_max,
            },
            vocab_size,
        })
    }

    /// Adds the tokens that `tokenizer_config.json` lists and `tokenizer.json` lacks, in the order of their ids.
    fn add_missing(&self, library: &mut tokenizers::Tokenizer) -> Result<(), String> {
        let known: Vec<String> =
            library.get_added_tokens_decoder().into_values().map(|token| token.content).collect();
        for (id, token, special) in listed(&self.config) {
            if known.contains(&token.content) {
                continue;
            }
            let added = tokenizers::AddedToken::from(token.content.clone(), special)
                .lstrip(token.lstrip)
                .rstrip(token.rstrip)
                .single_word(token.single_word)
                .normalized(token.normalized);
            let one = [added];
            if special { library.add_special_tokens(one) } else { library.add_tokens(one) }
                .map_err(|error| error.to_string())?;
            if library.token_to_id(&token.content) != Some(id) {
                return Err(format!(
                    "tokenizer_config.json gives {:?} id {id}, which does not fit tokenizer.json; are both files from the same model?",
                    token.content
                ));
            }
        }
        Ok(())
    }

    /// Ids before and after a text. `add_bos_token` and `add_eos_token` are used if one of them is present
    /// (transformers 5, `tokenization_utils_tokenizers.py`), otherwise the post-processor.
    fn ends(
        &self,
        library: &tokenizers::Tokenizer,
        specials: &[(&'static str, String)],
    ) -> Result<(Vec<u32>, Vec<u32>), String> {
        let wanted = |key: &str| self.config.get(key).and_then(Value::as_bool);
        let id = |name: &str| {
            let token = specials.iter().find(|(attribute, _)| *attribute == name).map(|(_, token)| token);
            token.and_then(|token| library.token_to_id(token))
        };
        if let (bos, eos) = (wanted("add_bos_token"), wanted("add_eos_token"))
            && (bos.is_some() || eos.is_some())
        {
            let end = |wanted: Option<bool>, name| {
                if wanted == Some(true) { id(name).into_iter().collect() } else { Vec::new() }
            };
            return Ok((end(bos, "bos_token"), end(eos, "eos_token")));
        }
        let ids = |special| {
            let encoding = library.encode_fast("a", special).map_err(|error| error.to_string())?;
            Ok::<_, String>(encoding.get_ids().to_vec())
        };
        let (plain, whole) = (ids(false)?, ids(true)?);
        let at = whole
            .windows(plain.len().max(1))
            .position(|window| window == plain)
            .ok_or("its post-processor does more than add tokens at the ends")?;
        Ok((whole[..at].to_vec(), whole[at + plain.len()..].to_vec()))
    }

    fn ranks(&self, config: &Config) -> Result<Tokens, LoadError> {
        let format = |why: String| LoadError::Format { path: self.tokenizer.clone(), why };
        let text = read(&self.tokenizer)?.ok_or_else(|| format("the file was removed".into()))?;
        let ranks = tiktoken::ranks(&text).map_err(&format)?;
        let pattern = tiktoken::pattern(&self.tokenizer, &self.config).map_err(&format)?;
        let added: Vec<AddedToken> = listed(&self.config).into_iter().map(|(_, token, _)| token).collect();
        let vocab_size = ranks.len() + added.len();
        let own = Bpe::from_ranks(ranks.into_iter(), pattern).map_err(|error| format(error.to_string()))?;
        Ok(Tokens {
            parts: Parts {
                own: Some(own),
                library: None,
                added,
                before: Vec::new(),
                behind: Vec::new(),
                positional: false,
                cache_bytes_max: config.cache_bytes_max,
            },
            vocab_size,
        })
    }

    /// The template for conversations, and the one for those with tools if it differs.
    fn templates(
        &self,
        given: Option<&Path>,
        config: &Config,
    ) -> Result<(Option<Template>, Option<Template>), LoadError> {
        let compile = |path: &Path, source: &str| {
            Template::compile(source, config)
                .map_err(|why| LoadError::Template { path: path.to_owned(), why })
        };
        if let Some(path) = given {
            let absent = || LoadError::Read { path: path.to_owned(), error: io::ErrorKind::NotFound.into() };
            let text = read(path)?.ok_or_else(absent)?;
            if path.extension().is_some_and(|extension| extension == "json") {
                let parsed = json(path)?.unwrap_or(Value::Null);
                return self.named(path, &parsed["chat_template"], compile);
            }
            return Ok((Some(compile(path, &text)?), None));
        }
        let path = self.dir.join("chat_template.jinja");
        if let Some(text) = read(&path)? {
            let more = self.dir.join("additional_chat_templates").join("tool_use.jinja");
            let tools = read(&more)?.map(|text| compile(&more, &text)).transpose()?;
            return Ok((Some(compile(&path, &text)?), tools));
        }
        let path = self.dir.join("chat_template.json");
        if let Some(parsed) = json(&path)? {
            return self.named(&path, &parsed["chat_template"], compile);
        }
        self.named(&self.dir.join("tokenizer_config.json"), &self.config["chat_template"], compile)
    }

    /// One template, or a list of named ones.
    fn named(
        &self,
        path: &Path,
        value: &Value,
        compile: impl Fn(&Path, &str) -> Result<Template, LoadError>,
    ) -> Result<(Option<Template>, Option<Template>), LoadError> {
        if let Some(source) = value.as_str() {
            return Ok((Some(compile(path, source)?), None));
        }
        let by_name = |name: &str| {
            value.get(name).and_then(Value::as_str).or_else(|| {
                let named = value.as_array()?.iter().find(|entry| entry["name"] == name)?;
                named["template"].as_str()
            })
        };
        let compiled = |name| by_name(name).map(|source| compile(path, source)).transpose();
        Ok((compiled("default")?, compiled("tool_use")?))
    }

    /// `image_token_id` (Qwen, GLM, Idefics) or `image_token_index` (Llava, Pixtral, Llama 4).
    fn image_token(&self) -> Option<u32> {
        let id = self.model["image_token_id"].as_u64().or_else(|| self.model["image_token_index"].as_u64());
        id.and_then(|id| u32::try_from(id).ok())
    }

    fn engine_renders(&self) -> Option<&'static str> {
        let architectures = self.model["architectures"].as_array().map(Vec::as_slice).unwrap_or_default();
        let by_architecture = ENGINE_RENDERS
            .iter()
            .find(|(name, _)| architectures.iter().any(|architecture| architecture == name))
            .map(|(_, renderer)| *renderer);
        let mistral = || {
            let names =
                fs::read_dir(&self.dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
            let names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
            let weights = |name: &String| name.starts_with("consolidated") && name.ends_with(".safetensors");
            let tokenizer = |name: &String| name == "tekken.json" || name.starts_with("tokenizer.model.v");
            (names.iter().any(weights) && names.iter().any(tokenizer)).then_some("mistral")
        };
        by_architecture.or_else(mistral)
    }
}

/// Tokens in `tokenizer_config.json` under `added_tokens_decoder`, with their id and whether they are special.
fn listed(config: &Value) -> Vec<(u32, AddedToken, bool)> {
    let mut listed: Vec<(u32, AddedToken, bool)> = Vec::new();
    for (id, token) in config["added_tokens_decoder"].as_object().into_iter().flatten() {
        let (Ok(id), Some(content)) = (id.parse(), token["content"].as_str()) else { continue };
        let flag = |name: &str, default| token[name].as_bool().unwrap_or(default);
        let special = flag("special", false);
        let added = AddedToken {
            id,
            content: content.to_owned(),
            lstrip: flag("lstrip", false),
            rstrip: flag("rstrip", false),
            single_word: flag("single_word", false),
            normalized: flag("normalized", !special),
        };
        listed.push((id, added, special));
    }
    listed.sort_by_key(|(id, _, _)| *id);
    listed
}

fn tokenizer_in(dir: &Path) -> Result<PathBuf, LoadError> {
    let json = dir.join("tokenizer.json");
    if json.is_file() {
        return Ok(json);
    }
    let entries = fs::read_dir(dir).map_err(|error| LoadError::Read { path: dir.to_owned(), error })?;
    let mut ranks: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.extension().is_some_and(|extension| extension == "tiktoken")
                || path.file_name().is_some_and(|name| name == "tiktoken.model")
        })
        .collect();
    ranks.sort();
    ranks.into_iter().next().ok_or_else(|| LoadError::NoTokenizer { path: dir.to_owned() })
}

/// Whether a pre-tokenizer treats the start of a text differently (Metaspace, `prepend_scheme`).
fn mentions_first(value: &Value) -> bool {
    match value {
        Value::Object(map) => map
            .iter()
            .any(|(key, value)| (key == "prepend_scheme" && value == "first") || mentions_first(value)),
        Value::Array(items) => items.iter().any(mentions_first),
        _ => false,
    }
}

/// A file's text; `None` if the file does not exist.
fn read(path: &Path) -> Result<Option<String>, LoadError> {
    let failed = |error| LoadError::Read { path: path.to_owned(), error };
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(LoadError::TooLarge { path: path.to_owned(), bytes, max: FILE_BYTES_MAX });
    }
    let mut text = String::with_capacity(bytes as usize);
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
    Ok(Some(text))
}

fn json(path: &Path) -> Result<Option<Value>, LoadError> {
    let Some(text) = read(path)? else { return Ok(None) };
    let parsed = serde_json::from_str(&text);
    parsed
        .map(Some)
        .map_err(|error| LoadError::Format { path: path.to_owned(), why: format!("not JSON: {error}") })
}
