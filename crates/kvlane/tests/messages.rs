//! `docs/messages.md` lists the log lines, error texts and error codes of the binary, read from the sources.
//!
//! `KVLANE_WRITE_MESSAGES=1 cargo test -p kvlane --test messages` writes the document again.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Item, Lit, LitStr, Meta, Token};

/// The crates of the binary, the lowest first.
const CRATES: [&str; 15] = [
    "kvlane-core",
    "kvlane-wire",
    "kvlane-tokens",
    "kvlane-http",
    "kvlane-fleet",
    "kvlane-k8s",
    "kvlane-proxy",
    "kvlane-control",
    "kvlane-admin",
    "kvlane-gateway",
    "kvlane-trace",
    "kvlane-sim",
    "kvlane-mock",
    "kvlane-lab",
    "kvlane",
];

/// Files whose other texts are those of reports, of engines, and of metrics, which docs/metrics.md lists.
const NO_OTHER_TEXTS: [&str; 6] =
    ["report/", "report.rs", "show.rs", "failure.rs", "trace_stats/", "metrics/"];

/// Functions whose arguments are texts of errors.
const FAILING: [&str; 8] =
    ["Err", "context", "custom", "map_err", "ok_or", "ok_or_else", "other", "with_context"];

/// Levels of log lines, then the kinds of texts, in the order of the document.
const KINDS: [&str; 7] = ["ERROR", "WARN", "INFO", "DEBUG", "error", "text", "code"];

/// The messages of one file.
#[derive(Default)]
struct Collector {
    /// Index into `KINDS`, text, and the fields of a log line.
    messages: BTreeSet<(usize, String, Vec<String>)>,
    /// Modules in files of their own.
    modules: Vec<String>,
    /// Literals are arguments of a function of `FAILING`.
    failing: bool,
    /// Literals elsewhere are collected, too.
    other_texts: bool,
}

/// Whether the attributes keep an item out of the binary.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            ["test", "\"testing\"", "\"chaos\""].iter().any(|end| condition.ends_with(end))
        }
        _ => false,
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        _ => &[],
    }
}

/// The arguments of a macro, split at its commas.
fn arguments(tokens: TokenStream) -> Vec<Vec<TokenTree>> {
    let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ',');
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    tokens.split(is_comma).map(<[TokenTree]>::to_vec).collect()
}

/// The string that an argument consists of.
fn literal(argument: &[TokenTree]) -> Option<String> {
    let [token] = argument else { return None };
    syn::parse_str::<LitStr>(&token.to_string()).ok().map(|text| text.value())
}

/// The name of a log line's field: `error` in `error = %err`, in `%error` and in `%self.error`.
fn field(argument: &[TokenTree]) -> Option<String> {
    let text: String = argument.iter().map(ToString::to_string).take_while(|token| token != "=").collect();
    let name = text.rsplit(['.', '%', '?', '&', '*']).next().unwrap_or_default().to_owned();
    (!name.is_empty() && !name.contains(':')).then_some(name)
}

/// Whether a text is a phrase of at least three words, not a format, a pattern or a piece of a protocol.
fn is_phrase(text: &str) -> bool {
    let is_word = |word: &&str| word.len() > 1 && word.chars().all(|letter| letter.is_ascii_alphabetic());
    let words = text.split_whitespace().map(|word| word.trim_matches([',', ':', ';', '.']));
    !text.contains(['\n', '\\', '<']) && words.filter(is_word).count() > 2
}

impl Collector {
    fn add(&mut self, kind: &str, text: String, fields: Vec<String>) {
        let kind = KINDS.iter().position(|name| *name == kind).expect("one of the kinds");
        if text.chars().any(char::is_alphabetic) && !["{error}", "{message}"].contains(&text.as_str()) {
            self.messages.insert((kind, text, fields));
        }
    }

    fn visit_arguments<'ast>(&mut self, name: &str, arguments: impl IntoIterator<Item = &'ast Expr>) {
        let outside = self.failing;
        self.failing |= FAILING.contains(&name);
        arguments.into_iter().for_each(|argument| self.visit_expr(argument));
        self.failing = outside;
    }
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_for_tests(attributes(item)) {
            return;
        }
        match item {
            Item::Mod(module) if module.content.is_none() => self.modules.push(module.ident.to_string()),
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta
            && list.path.is_ident("error")
            && let Some(text) = arguments(list.tokens.clone()).first().and_then(|first| literal(first))
        {
            self.add("error", text, Vec::new());
        }
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        let name = match &*call.func {
            Expr::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
            _ => None,
        };
        self.visit_arguments(&name.unwrap_or_default(), &call.args);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.visit_expr(&call.receiver);
        if call.method != "expect" {
            self.visit_arguments(&call.method.to_string(), &call.args);
        }
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        let name = called.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default();
        let split = arguments(called.tokens.clone());
        let first_text = split.iter().position(|argument| literal(argument).is_some());
        match (name.as_str(), first_text) {
            ("error" | "warn" | "info" | "debug", Some(at)) => {
                let fields = split[..at].iter().filter_map(|argument| field(argument)).collect();
                self.add(&name.to_uppercase(), literal(&split[at]).unwrap_or_default(), fields);
            }
            ("anyhow" | "bail" | "ensure", Some(at)) => {
                self.add("error", literal(&split[at]).unwrap_or_default(), Vec::new());
            }
            ("codes", _) => {
                let ends = split.iter().filter_map(|argument| literal(argument.last_chunk::<1>()?));
                ends.for_each(|code| self.add("code", code, Vec::new()));
            }
            ("panic" | "unreachable", _) => {}
            (assertion, _) if assertion.contains("assert") => {}
            _ => {
                if let Ok(inner) = called.parse_body_with(Punctuated::<Expr, Token![,]>::parse_terminated) {
                    inner.iter().for_each(|expression| self.visit_expr(expression));
                }
            }
        }
    }

    fn visit_lit(&mut self, literal: &'ast Lit) {
        let Lit::Str(text) = literal else { return };
        let text = text.value();
        if self.failing && text.trim().contains(' ') {
            self.add("error", text, Vec::new());
        } else if self.other_texts && is_phrase(&text) {
            self.add("text", text, Vec::new());
        }
    }
}

/// Adds to the page the messages of a file and of the modules below it.
fn collect(krate: &Path, file: &Path, page: &mut String) {
    let name = file.strip_prefix(krate).expect("a file of the crate").to_string_lossy();
    let other_texts = NO_OTHER_TEXTS.iter().all(|part| !name.contains(part));
    let mut collector = Collector { other_texts, ..Collector::default() };
    let source = fs::read_to_string(file).expect("a source file");
    collector.visit_file(&syn::parse_file(&source).expect("Rust"));
    if !collector.messages.is_empty() {
        let _ = write!(page, "\n### {name}\n\n");
    }
    for (kind, text, fields) in &collector.messages {
        let text = text.replace('\n', "\\n");
        let quote = if text.contains('`') { "``" } else { "`" };
        let space = if text.starts_with('`') || text.ends_with('`') { " " } else { "" };
        let fields: Vec<String> = fields.iter().map(|field| format!("`{field}`")).collect();
        let fields = if fields.is_empty() { String::new() } else { format!(" with {}", fields.join(", ")) };
        let _ = writeln!(page, "- {}: {quote}{space}{text}{space}{quote}{fields}", KINDS[*kind]);
    }
    let stem = file.file_stem().expect("a name").to_string_lossy();
    let root = ["lib", "main", "mod"].contains(&&*stem);
    let below = if root { file.with_file_name("") } else { file.with_extension("") };
    for module in collector.modules {
        let file = below.join(format!("{module}.rs"));
        let file = if file.is_file() { file } else { below.join(module).join("mod.rs") };
        collect(krate, &file, page);
    }
}

#[test]
fn the_document_of_messages_is_what_the_sources_say() {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is here");
    let mut page = String::from(
        "# Messages\n\n*Written by `KVLANE_WRITE_MESSAGES=1 cargo test -p kvlane --test messages` from the sources; a test \
         fails if the two differ.*\n\nLog lines have their level in capitals. An `error` is the text of an error or a part \
         of it, a `text` a part of another message, a `code` the `code` of an error response. Names in braces are filled in.\n",
    );
    for name in CRATES {
        let krate = root.join("crates").join(name);
        let lib = krate.join("src/lib.rs");
        let mut messages = String::new();
        collect(&krate, &if lib.is_file() { lib } else { krate.join("src/main.rs") }, &mut messages);
        let _ = write!(page, "\n## {name}\n{messages}");
    }
    assert!(page.lines().count() > 1000, "only {} lines were found", page.lines().count());
    let path = root.join("docs/messages.md");
    if std::env::var_os("KVLANE_WRITE_MESSAGES").is_some() {
        fs::write(&path, &page).expect("the document is written");
    }
    let document = fs::read_to_string(&path).unwrap_or_default();
    assert!(document == page, "docs/messages.md is out of date: see the first lines of this test's file");
}
