//! Chat templates, rendered like transformers' `apply_chat_template` (`utils/chat_template_utils.py`): trimmed blocks,
//! `break` and `continue`, `raise_exception`, `strftime_now`, Python's methods on text and dicts, `tojson` as
//! `json.dumps(ensure_ascii=False)`.
//!
//! A template is trusted: it comes with the model or from a flag, never from a request. The conversation comes from the
//! client, so a rendering is limited in output, instructions and depth.

mod content;

use std::io;

use minijinja::syntax::SyntaxConfig;

use minijinja::value::{Kwargs, Tuple, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use crate::prompt::UnixTime;
use crate::python::{Dumps, display, is_space, strftime};
use crate::source::{Config, ContentFormat};
use crate::unknown::Unknown;

/// The name of the one template in an environment.
const NAME: &str = "chat";

/// Deepest nesting of macros, loops and conditions.
const RECURSION_MAX: usize = 300;

/// A compiled chat template.
pub(crate) struct Template {
    env: Environment<'static>,
    /// The expected form of contents.
    pub(crate) content: ContentFormat,
    /// Whether it supports the role `developer`; otherwise vLLM uses `system` (`renderers/hf.py`).
    pub(crate) developer: bool,
    /// Whether it rejects a system message after the first; vLLM then merges Anthropic's into the first
    /// (`entrypoints/anthropic/serving.py`).
    pub(crate) system_first: bool,
    text_bytes_max: usize,
}

/// The error of `raise_exception`, to distinguish a rejection from a failure.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// An output that refuses to grow beyond its limit.
struct Bounded<'a> {
    text: &'a mut String,
    bytes_max: usize,
    is_full: bool,
}

// === impl Template ===

impl Template {
    /// Compiles `source`. The error has the position and the problem.
    pub(crate) fn compile(source: &str, config: &Config) -> Result<Template, String> {
        let mut env = Environment::new();
        env.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(|error| error.to_string())?,
        );
        env.set_debug(false);
        env.set_recursion_limit(RECURSION_MAX);
        env.set_fuel(Some(u64::from(config.template_fuel_k).saturating_mul(1000)));
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_unknown_method_callback(method);
        env.set_formatter(|out, _, value| {
            if let Some(text) = value.as_str() {
                return Ok(out.write_str(text)?);
            }
            let mut text = String::new();
            display(value, &mut text)?;
            Ok(out.write_str(&text)?)
        });
        env.add_filter("tojson", tojson);
        env.add_filter("trim", trim);
        env.add_filter("int", int);
        env.add_filter("float", float);
        env.add_test("sequence", |value: &Value| {
            matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
        });
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
        });
        let (source, generation) = without_generation_tags(source);
        env.add_template_owned(NAME, source.clone()).map_err(|error| error.to_string())?;
        let content = match config.content_format {
            ContentFormat::Auto => content::format(&source),
            given => given,
        };
        let mut template = Template {
            env,
            content,
            developer: source.contains("\"developer\"") || source.contains("'developer'"),
            system_first: false,
            text_bytes_max: config.text_bytes_max,
        };
        template.system_first = generation || template.refuses_a_later_system_message();
        Ok(template)
    }

    /// Renders with `context`, which is a map.
    pub(crate) fn render(&self, context: Value, out: &mut String) -> Result<(), Unknown> {
        let template = self.env.get_template(NAME).map_err(|error| failed(&error))?;
        out.clear();
        let mut sink = Bounded { text: out, bytes_max: self.text_bytes_max, is_full: false };
        match template.render_captured_to(context, &mut sink) {
            Ok(_) => Ok(()),
            Err(_) if sink.is_full => {
                Err(Unknown::Limit(format!("its output exceeds {} bytes", self.text_bytes_max).into()))
            }
            Err(error) => Err(failed(&error)),
        }
    }

    /// Renders system, user, system, user, like vLLM's check: with the messages as the only variable, so that a
    /// template that calls `strftime_now` or marks generated text also counts as rejecting.
    fn refuses_a_later_system_message(&self) -> bool {
        let message = |role: &str| Value::from_pairs([("role", role), ("content", "t")]);
        let messages: Vec<Value> = ["system", "user", "system", "user"].map(message).into();
        let context = Value::from_pairs([
            ("messages", Value::from(messages)),
            ("add_generation_prompt", Value::from(false)),
        ]);
        self.render(context, &mut String::new()).is_err()
    }
}

/// The function `strftime_now` at `now`, for a context. Engines use their host's time zone; this uses UTC.
pub(crate) fn strftime_now(now: UnixTime) -> Value {
    Value::from_function(move |format: String| {
        strftime(&format, now).ok_or_else(|| {
            Error::new(ErrorKind::InvalidOperation, format!("strftime_now cannot print {format:?}"))
        })
    })
}

fn failed(error: &Error) -> Unknown {
    if error.kind() == ErrorKind::OutOfFuel {
        return Unknown::Limit("it executes too many instructions".into());
    }
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref::<Raised>() {
            return Unknown::Refused(message.clone());
        }
        source = cause.source();
    }
    Unknown::Template(error.to_string().chars().take(400).collect())
}

/// Training code marks an assistant's text with `{% generation %}`, which prints nothing. It is replaced by `with`,
/// which preserves its scope. Also returns whether there were any.
fn without_generation_tags(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let mut any = false;
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let inner = tag.trim_start_matches(['-', '+']);
        let open = &tag[..tag.len() - inner.len()];
        let name = inner.trim_start();
        let space = &inner[..inner.len() - name.len()];
        let word_bytes = name.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(name.len());
        let replacement = match &name[..word_bytes] {
            "generation" => {
                any = true;
                "with"
            }
            "endgeneration" => "endwith",
            word => word,
        };
        out.push_str(open);
        out.push_str(space);
        out.push_str(replacement);
        rest = &name[word_bytes..];
    }
    out.push_str(rest);
    (out, any)
}

/// `json.dumps(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, with its arguments in its order.
fn tojson(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let given = |positional: Option<Value>, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = kwargs.get(name)?;
        Ok(positional.or(named).filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let ensure_ascii = given(ensure_ascii, "ensure_ascii")?;
    let indent = given(indent, "indent")?;
    let separators = given(separators, "separators")?;
    let sort_keys = given(None, "sort_keys")?;
    kwargs.assert_all_used()?;
    let mut dumps = Dumps {
        ensure_ascii: ensure_ascii.is_some_and(|value| value.is_true()),
        sort_keys: sort_keys.is_some_and(|value| value.is_true()),
        ..Dumps::default()
    };
    if let Some(indent) = indent {
        const INDENT_MAX: usize = 64;
        dumps.indent = Some(match indent.as_str() {
            Some(text) => text.chars().take(INDENT_MAX).collect(),
            None => " ".repeat(indent.as_usize().unwrap_or(0).min(INDENT_MAX)),
        });
        dumps.item_separator = ",".into();
    }
    if let Some(separators) = separators {
        dumps.item_separator = separators.get_item_by_index(0)?.to_string();
        dumps.key_separator = separators.get_item_by_index(1)?.to_string();
    }
    let mut out = String::new();
    dumps.write(value, &mut out)?;
    Ok(Value::from(out))
}

/// Jinja's `int`, which returns its default for a value that is not a number.
fn int(value: &Value, default: Option<Value>) -> Value {
    let number = match value.as_str() {
        Some(text) => {
            let text = text.trim();
            text.parse().ok().or_else(|| text.parse::<f64>().ok().filter(|x| x.is_finite()).map(|x| x as i64))
        }
        None if value.is_integer() => return value.clone(),
        None if value.kind() == ValueKind::Bool => Some(i64::from(value.is_true())),
        None => f64::try_from(value.clone()).ok().filter(|x| x.is_finite()).map(|x| x as i64),
    };
    number.map(Value::from).or(default).unwrap_or(Value::from(0))
}

/// Jinja's `float`, which does the same.
fn float(value: &Value, default: Option<Value>) -> Value {
    let number = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    number.map(Value::from).or(default).unwrap_or(Value::from(0.0))
}

/// Jinja's `trim`, which is `str.strip`.
fn trim(value: &Value, characters: Option<&str>) -> Value {
    match value.as_str() {
        Some(text) => strip(text, characters, true, true, value),
        None => {
            let text = value.to_string();
            strip(&text, characters, true, true, &Value::UNDEFINED)
        }
    }
}

/// `text` stripped of the characters; `whole`, a cheap clone, if nothing is stripped.
fn strip(text: &str, characters: Option<&str>, start: bool, end: bool, whole: &Value) -> Value {
    let strips = |c: char| characters.map_or_else(|| is_space(c), |characters| characters.contains(c));
    let mut stripped = text;
    if start {
        stripped = stripped.trim_start_matches(strips);
    }
    if end {
        stripped = stripped.trim_end_matches(strips);
    }
    if stripped.len() == text.len() && !whole.is_undefined() { whole.clone() } else { Value::from(stripped) }
}

/// Python's methods: those that are missing in `pycompat` or differ there, then `pycompat`.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args);
    };
    let first = args.first().and_then(Value::as_str);
    match (name, first) {
        ("strip", _) if args.is_empty() || first.is_some() => Ok(strip(text, first, true, true, value)),
        ("lstrip", _) if args.is_empty() || first.is_some() => Ok(strip(text, first, true, false, value)),
        ("rstrip", _) if args.is_empty() || first.is_some() => Ok(strip(text, first, false, true, value)),
        ("removeprefix", Some(prefix)) => Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text))),
        ("removesuffix", Some(suffix)) => Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text))),
        ("partition", Some(separator)) if !separator.is_empty() => Ok(match text.split_once(separator) {
            Some((head, tail)) => triple([head, separator, tail]),
            None => triple([text, "", ""]),
        }),
        ("rpartition", Some(separator)) if !separator.is_empty() => Ok(match text.rsplit_once(separator) {
            Some((head, tail)) => triple([head, separator, tail]),
            None => triple(["", "", text]),
        }),
        ("split", None) if args.is_empty() => Ok(list(text.split(is_space).filter(|word| !word.is_empty()))),
        ("rsplit", Some(separator)) if !separator.is_empty() => {
            let count =
                args.get(1).and_then(Value::as_usize).map_or(usize::MAX, |most| most.saturating_add(1));
            let mut parts: Vec<&str> = text.rsplitn(count, separator).collect();
            parts.reverse();
            Ok(list(parts))
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn triple(texts: [&str; 3]) -> Value {
    Value::from(Tuple::from(texts.map(Value::from)))
}

fn list<'a>(texts: impl IntoIterator<Item = &'a str>) -> Value {
    Value::from(texts.into_iter().map(Value::from).collect::<Vec<_>>())
}

// === impl Bounded ===

impl io::Write for Bounded<'_> {
    /// Writes a piece. Pieces are valid UTF-8, since the template engine writes strings.
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        if self.text.len() + piece.len() > self.bytes_max {
            self.is_full = true;
            return Err(io::Error::other("the text is too long"));
        }
        self.text.push_str(simdutf8::basic::from_utf8(piece).map_err(io::Error::other)?);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, config: &Config) -> Result<String, Unknown> {
        let mut out = String::new();
        let context = Value::from_pairs([
            ("strftime_now", strftime_now(UnixTime(0))),
            ("map", Value::from_pairs([("b", Value::from("é\u{1f642}")), ("a", Value::from(vec![1, 2]))])),
        ]);
        Template::compile(source, config).expect("a template").render(context, &mut out).map(|()| out)
    }

    #[track_caller]
    fn check(source: &str, expect: &str) {
        assert_eq!(render(source, &Config::default()).as_deref(), Ok(expect), "{source}");
    }

    #[test]
    fn json_is_written_as_python_writes_it_with_any_arguments() {
        check("{{ map | tojson }}", "{\"b\": \"é🙂\", \"a\": [1, 2]}");
        check(
            "{{ map | tojson(sort_keys=true, ensure_ascii=True) }}",
            r#"{"a": [1, 2], "b": "\u00e9\ud83d\ude42"}"#,
        );
        check("{{ map | tojson(separators=(',', ':')) }}", "{\"b\":\"é🙂\",\"a\":[1,2]}");
        check("{{ map.a | tojson(indent=1) }}{{ {} | tojson(indent=1) }}", "[\n 1,\n 2\n]{}");
        check("{{ map.a | tojson(false, '-') }}", "[\n-1,\n-2\n]");
        assert!(matches!(render("{{ nothing | tojson }}", &Config::default()), Err(Unknown::Template(_))));
    }

    #[test]
    fn marks_of_generated_text_print_nothing_and_open_a_scope() {
        check(
            "{% set x = 1 %}a{%- generation -%} b{% set x = 2 %}{{ x }}{%- endgeneration %} c{{ x }}",
            "ab2 c1",
        );
        assert!(
            Template::compile("{% generation %}{% endgeneration %}", &Config::default())
                .expect("one")
                .system_first
        );
    }

    #[test]
    fn what_a_template_raises_is_told_from_what_it_gets_wrong() {
        let why = |source| render(source, &Config::default()).expect_err("an error");
        assert_eq!(why("{{ raise_exception('no: ' ~ 1) }}"), Unknown::Refused("no: 1".into()));
        assert!(matches!(why("{{ nothing.at.all }}"), Unknown::Template(_)));
        assert!(matches!(why("{{ strftime_now('%Q') }}"), Unknown::Template(_)));
        check("{{ strftime_now('%d %b %Y') }}", "01 Jan 1970");
    }

    #[test]
    fn a_template_that_never_ends_or_prints_without_end_is_stopped() {
        let config = Config { text_bytes_max: 1000, template_fuel_k: 100, ..Config::default() };
        let why = |source| render(source, &config).expect_err("a limit").name();
        assert_eq!(why("{% for i in range(9999) %}0123456789{% endfor %}"), "limit");
        assert_eq!(
            why("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"),
            "limit"
        );
        assert_eq!(why("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), "template");
        assert_eq!(
            render("{% for i in range(100) %}0123456789{% endfor %}", &config).map(|text| text.len()),
            Ok(1000)
        );
    }
}
