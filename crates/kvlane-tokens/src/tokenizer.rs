//! A loaded tokenizer with its chat templates.

use std::fmt;

use kvlane_wire::api::Api;
use minijinja::Value;

use crate::encode::Encoder;
use crate::json::{Json, Map};
use crate::load::{Loaded, load};
use crate::media::{Image, Images, NewImage};
use crate::prompt::{Prompt, UnixTime};
use crate::python::is_space;
use crate::request::{Chat, Reading, Request, Shape, Side, Truncate, Wants, conversation, read};
use crate::source::{Config, LoadError, Source};
use crate::template::{Template, strftime_now};
use crate::unknown::Unknown;

/// Marker that transformers appends to a message to be continued, to find its end in the rendering
/// (`utils/chat_template_utils.py`).
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// The conversation of [`NewImage::question`], without the image.
const ONE_IMAGE: &[u8] =
    br#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]}]}"#;

/// A model's tokenizer and chat templates, shared by all threads.
pub struct Tokenizer {
    encoder: Encoder,
    template: Option<Template>,
    tool_template: Option<Template>,
    specials: Vec<(&'static str, String)>,
    vocab_size: usize,
    engine_renders: Option<&'static str>,
    images: Option<Images>,
    reading: Reading,
}

/// Where a text may be cut before encoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cut {
    /// At added tokens: pieces encoded separately give the ids of the whole, checked with a set of texts at load time.
    AtSpecialTokens,
    /// Nowhere, for this reason: every prompt is encoded as a whole.
    Never(String),
}

/// Size and counters of the encoding cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes in use, including overhead.
    pub cache_bytes: u64,
    /// Cached pieces.
    pub cache_entries: u64,
    /// Pieces found in the cache.
    pub hits: u64,
    /// Pieces not found.
    pub misses: u64,
    /// Tokens taken from the cache.
    pub tokens_reused: u64,
    /// Tokens encoded after a cache miss.
    pub tokens_encoded: u64,
}

/// Text or ids to be converted to tokens.
enum Text<'a> {
    Ids(Vec<u32>, Option<Truncate>),
    Plain(std::borrow::Cow<'a, str>, Shape),
    Rendered(Shape, Vec<Image<'a>>),
    List(Vec<Request<'a>>),
}

// === impl Tokenizer ===

impl Tokenizer {
    /// Reads the files of `source` and checks where texts may be cut. Takes about a second for a large vocabulary.
    pub fn load(source: &Source, config: &Config) -> Result<Tokenizer, LoadError> {
        let Loaded { encoder, template, tool_template, specials, vocab_size, engine_renders, image_token } =
            load(source, config)?;
        let reading = Reading {
            exclude_tools_when_none: config.exclude_tools_when_tool_choice_none,
            ..Reading::default()
        };
        let images = image_token.map(Images::new);
        let mut tokenizer = Tokenizer {
            encoder,
            template,
            tool_template,
            specials,
            vocab_size,
            engine_renders,
            images,
            reading,
        };
        // Without a template vLLM merges system messages, to be safe.
        let system_first = tokenizer.templates().any(|template| template.system_first);
        tokenizer.reading.system_first = system_first;
        tokenizer.reading.disabled_effort_low = tokenizer.cannot_disable_thinking();
        Ok(tokenizer)
    }

    /// The tokens of a request to `api`; of a list of prompts, those of the first, and the number of the others. After
    /// [`Unknown`], `out` has the known first tokens.
    ///
    /// # Errors
    ///
    /// Why the engine's tokens cannot be determined here.
    pub fn prompt(&self, api: Api, body: &[u8], now: UnixTime, out: &mut Prompt) -> Result<(), Unknown> {
        out.clear();
        let Prompt { tokens, reused_tokens, text, apart, other_tokens, root, placed } = out;
        let mut of_text = self.text_of(api, body, now, text)?;
        let images = match &mut of_text {
            Text::Rendered(_, images) => std::mem::take(images),
            _ => Vec::new(),
        };
        let Text::List(prompts) = of_text else {
            *reused_tokens = self.encode(of_text, text, *apart, tokens)?;
            return match &self.images {
                _ if images.is_empty() => Ok(()),
                Some(known) => known.expand(&images, root.as_deref().unwrap_or_default(), tokens, placed),
                None => Err(Unknown::Media("images: the model's config.json names no token for them")),
            };
        };
        let mut prompts = prompts.into_iter();
        for first in prompts.by_ref().take(1) {
            *reused_tokens = self.encode(self.whole(first, now, text)?, text, *apart, tokens)?;
        }
        let mut other = Vec::new();
        for prompt in prompts {
            other.clear();
            self.encode(self.whole(prompt, now, text)?, text, *apart, &mut other)?;
            *other_tokens = other_tokens.saturating_add(other.len() as u32);
        }
        Ok(())
    }

    /// The tokens of a text, or of `rendered`; returns how many of them cost no encoding.
    fn encode(
        &self,
        text: Text<'_>,
        rendered: &str,
        apart: u64,
        tokens: &mut Vec<u32>,
    ) -> Result<u32, Unknown> {
        let (reused, shape) = match text {
            Text::Ids(ids, truncate) => {
                *tokens = ids;
                (tokens.len(), Shape { add_special: false, truncate })
            }
            Text::Plain(plain, shape) => {
                (self.encoder.encode(&plain, shape.add_special, apart, tokens)?, shape)
            }
            Text::Rendered(shape, _) => {
                (self.encoder.encode(rendered, shape.add_special, apart, tokens)?, shape)
            }
            Text::List(_) => return Err(Unknown::Body("a list of lists of prompts".into())),
        };
        if let Some(truncate) = shape.truncate {
            self.truncate(truncate, shape.add_special, tokens);
        }
        Ok(reused.min(tokens.len()) as u32)
    }

    /// Remembers how many tokens an image has: an engine's answer to [`NewImage::question`].
    pub fn learn_image(&self, image: &NewImage, answer: &[u32], now: UnixTime) {
        let Some(images) = &self.images else { return };
        let (mut text, mut tokens) = (String::new(), Vec::new());
        let ours = self.text_of(Api::ChatCompletions, ONE_IMAGE, now, &mut text);
        let ours = ours.and_then(|ours| self.encode(ours, &text, 0, &mut tokens));
        images.learn(image, if ours.is_ok() { &tokens } else { &[] }, answer);
    }

    /// The text that the engine would encode for a request to `api`; empty if the prompt is given as ids.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::prompt`].
    pub fn render(&self, api: Api, body: &[u8], now: UnixTime, out: &mut String) -> Result<(), Unknown> {
        out.clear();
        if let Text::Plain(plain, _) = self.text_of(api, body, now, out)? {
            out.push_str(&plain);
        }
        Ok(())
    }

    /// Appends the tokens of a text; `add_special` adds the tokenizer's own special tokens at both ends.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails on the text.
    pub fn text(&self, text: &str, add_special: bool, out: &mut Vec<u32>) -> Result<(), Unknown> {
        self.encoder.encode(text, add_special, 0, out).map(|_| ())
    }

    /// Whether the model has a chat template.
    pub fn has_template(&self) -> bool {
        self.templates().next().is_some()
    }

    /// Number of ids, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Where texts may be cut.
    pub fn cut(&self) -> Cut {
        self.encoder.cut().clone()
    }

    /// Whether our own encoder is used instead of the slower library.
    pub fn is_fast(&self) -> bool {
        self.encoder.is_own()
    }

    /// Size and counters of the encoding cache.
    pub fn stats(&self) -> Stats {
        self.encoder.stats()
    }

    fn templates(&self) -> impl Iterator<Item = &Template> {
        self.template.iter().chain(&self.tool_template)
    }

    fn text_of<'a>(
        &self,
        api: Api,
        body: &'a [u8],
        now: UnixTime,
        out: &mut String,
    ) -> Result<Text<'a>, Unknown> {
        self.whole(read(api, body, self.reading)?, now, out)
    }

    fn whole<'a>(&self, request: Request<'a>, now: UnixTime, out: &mut String) -> Result<Text<'a>, Unknown> {
        Ok(match request {
            Request::Ids(ids, truncate) => Text::Ids(ids, truncate),
            Request::Text(text, shape) => Text::Plain(text, shape),
            Request::Chat(chat) => {
                let shape = chat.shape;
                let images = self.chat(*chat, now, out)?;
                if !images.is_empty() && shape.truncate.is_some() {
                    return Err(Unknown::Field("truncate_prompt_tokens"));
                }
                Text::Rendered(shape, images)
            }
            Request::List(prompts) => Text::List(prompts),
        })
    }

    /// Renders a conversation; returns its images.
    fn chat<'a>(&self, chat: Chat<'a>, now: UnixTime, out: &mut String) -> Result<Vec<Image<'a>>, Unknown> {
        if let Some(renderer) = self.engine_renders {
            return Err(Unknown::EngineRenders(renderer));
        }
        let template = match &self.tool_template {
            Some(template) if chat.tools.is_some() => template,
            _ => self.template.as_ref().ok_or(Unknown::NoTemplate)?,
        };
        let mut images = Vec::new();
        let wants = Wants::new(template.content, template.developer, chat.calls_as_they_are);
        let mut messages = conversation(chat.messages, wants, &mut images)?;
        let ending = if chat.continue_final_message {
            if chat.add_generation_prompt {
                return Err(Unknown::Refused(
                    "continue_final_message and add_generation_prompt are both set".into(),
                ));
            }
            Some(mark_end(&mut messages)?)
        } else {
            None
        };
        let messages: Vec<Value> = messages.into_iter().map(Map::into_value).collect();
        let mut context: Vec<(Value, Value)> = Vec::with_capacity(16);
        let mut set = |name: &str, value| context.push((Value::from(name), value));
        // Later variables override earlier ones.
        for (name, token) in &self.specials {
            set(name, Value::from(token.as_str()));
        }
        set("strftime_now", strftime_now(now));
        set("tools", chat.tools.map_or(Value::from(()), Json::into_value));
        set("documents", Value::from(()));
        for (name, value) in chat.kwargs.0 {
            set(&name, value.into_value());
        }
        if let Some(documents) = chat.documents {
            set("documents", documents.into_value());
        }
        set("messages", Value::from(messages));
        set("add_generation_prompt", Value::from(chat.add_generation_prompt));
        template.render(Value::from_pairs(context), out)?;
        if let Some(ending) = ending {
            end_at_mark(&ending, out)?;
        }
        Ok(images)
    }

    /// Keeps the requested number of tokens. If a side is given, all tokens are cut there; otherwise the tokenizer
    /// cuts, which vLLM configures to cut on the left, between the special tokens it adds (`renderers/params.py`,
    /// `tokenizers/registry.py`).
    fn truncate(&self, truncate: Truncate, add_special: bool, tokens: &mut Vec<u32>) {
        let keep = truncate.tokens as usize;
        if tokens.len() <= keep {
            return;
        }
        let surplus = tokens.len() - keep;
        let (before, behind) =
            if add_special { (self.encoder.before.len(), self.encoder.behind.len()) } else { (0, 0) };
        match truncate.side {
            Some(Side::Right) => tokens.truncate(keep),
            Some(Side::Left) => drop(tokens.drain(..surplus)),
            None if before + behind <= keep => drop(tokens.drain(before..before + surplus)),
            None => drop(tokens.drain(..surplus)),
        }
    }

    /// Whether the template rejects or ignores the effort `none`, so that vLLM uses `low` for Anthropic's disabled
    /// `thinking` (`entrypoints/anthropic/serving.py`, `_probe_disabled_thinking_effort`).
    fn cannot_disable_thinking(&self) -> bool {
        let rendered = |effort: &str| {
            let body = serde_json::json!({
                "messages": [{"role": "user", "content": "Hi"}],
                "reasoning_effort": effort,
            });
            let mut out = String::new();
            let body = body.to_string();
            self.render(Api::ChatCompletions, body.as_bytes(), UnixTime::default(), &mut out)
                .ok()
                .map(|()| out)
        };
        let none = rendered("none");
        none.is_none()
            || ["low", "medium", "high", "xhigh", "max"].iter().any(|effort| rendered(effort) == none)
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size)
            .field("template", &self.has_template())
            .field("cut", self.encoder.cut())
            .finish_non_exhaustive()
    }
}

/// Appends the marker to the last text of the last message; returns the text.
fn mark_end(messages: &mut [Map<'_>]) -> Result<String, Unknown> {
    let nothing = || Unknown::Refused("no text to continue in the final message".into());
    let content = messages.last_mut().and_then(|message| message.get_mut("content")).ok_or_else(nothing)?;
    let text = match content {
        text @ Json::Str(_) => text,
        Json::List(parts) => parts
            .iter_mut()
            .rev()
            .find_map(|part| match part {
                Json::Map(part) => part.get_mut("text"),
                _ => None,
            })
            .ok_or_else(nothing)?,
        _ => return Err(nothing()),
    };
    let ending = text.as_str().ok_or_else(nothing)?.to_owned();
    *text = Json::text(format!("{ending}{CONTINUE_TAG}"));
    Ok(ending)
}

/// Truncates the rendering at the marker, and removes white space before it if the template has trimmed the message.
fn end_at_mark(ending: &str, out: &mut String) -> Result<(), Unknown> {
    let tag = CONTINUE_TAG.trim_end();
    let at = out.rfind(tag).filter(|_| out.contains(ending.trim_matches(is_space)));
    let at =
        at.ok_or_else(|| Unknown::Refused("the template does not print the final message unchanged".into()))?;
    let whole = out[at..].starts_with(CONTINUE_TAG);
    out.truncate(at);
    if !whole {
        out.truncate(out.trim_end_matches(is_space).len());
    }
    Ok(())
}
