//! Commands and files with placeholders: `{port}`, `{workers}` and so on.
//!
//! A command is split into words as a shell does, at blanks outside of quotes, and is run without a shell. Engines
//! are lists: in a command each word, in a file each line with an engine's placeholder (`{url}`, `{address}`,
//! `{index}`, `{engine:NAME}`) is repeated for each of them. A word with the policy's placeholder is left out if
//! there is no policy.

use std::collections::BTreeMap;

/// Placeholders of an engine in a router's command and file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnginePlace {
    /// `http://host:port`.
    pub url: String,
    /// Its ports by name: `{port:NAME}` in its command.
    pub ports: BTreeMap<String, u16>,
}

/// Values of placeholders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Values {
    /// By name, such as `port` and `program`. Words with a placeholder that is `None` are left out.
    pub plain: BTreeMap<String, Option<String>>,
    /// The engines.
    pub engines: Vec<EnginePlace>,
}

/// An invalid command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// An unterminated quote.
    #[error("unterminated quote: {0}")]
    Quote(String),
    /// An unknown placeholder.
    #[error("unknown placeholder {{{name}}}; known are {}", .known.iter().map(|name| format!("{{{name}}}")).collect::<Vec<_>>().join(", "))]
    Unknown {
        /// Its name.
        name: String,
        /// The known names.
        known: Vec<String>,
    },
    /// The command has no word.
    #[error("the command is empty")]
    Empty,
}

/// Placeholders of all engines together.
const WORKERS: &str = "workers";
/// Placeholders of one engine.
const OF_AN_ENGINE: [&str; 3] = ["url", "address", "index"];
const ENGINE_PORT: &str = "engine:";

/// The names in braces of `text`, such as `port` and `port:metrics`. Other braces are text.
pub fn names(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(open) = rest.find('{') {
        rest = &rest[open + 1..];
        let Some(close) = rest.find('}') else { break };
        if is_name(&rest[..close]) {
            found.push(&rest[..close]);
            rest = &rest[close + 1..];
        }
    }
    found
}

/// Names of the ports in `texts`: `NAME` of each `{port:NAME}`.
pub fn port_names<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut ports: Vec<&str> =
        texts.into_iter().flat_map(names).filter_map(|name| name.strip_prefix("port:")).collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

/// The words of a command.
///
/// # Errors
/// If a quote is unterminated, or a placeholder unknown.
pub fn command(text: &str, values: &Values) -> Result<Vec<String>, TemplateError> {
    let mut words = Vec::new();
    for word in split(text)? {
        let named = names(&word);
        for name in &named {
            values.known(name)?;
        }
        if named.iter().any(|name| values.plain.get(*name).is_some_and(Option::is_none)) {
            continue;
        }
        if word == format!("{{{WORKERS}}}") {
            words.extend(values.engines.iter().map(|engine| engine.url.clone()));
        } else if named.iter().any(|name| values.of_an_engine(name)) {
            words.extend((0..values.engines.len()).map(|index| values.fill(&word, Some(index))));
        } else {
            words.push(values.fill(&word, None));
        }
    }
    if words.is_empty() { Err(TemplateError::Empty) } else { Ok(words) }
}

/// A file. Unknown placeholders are left unchanged, because files have braces of their own.
pub fn file(text: &str, values: &Values) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        if names(line).into_iter().any(|name| values.of_an_engine(name)) {
            for index in 0..values.engines.len() {
                out.push_str(&values.fill(line, Some(index)));
                out.push('\n');
            }
        } else {
            out.push_str(&values.fill(line, None));
            out.push('\n');
        }
    }
    out
}

// === impl Values ===

impl Values {
    /// Sets a value; the last one counts.
    pub fn set(&mut self, name: &str, value: impl Into<String>) {
        self.plain.insert(name.to_owned(), Some(value.into()));
    }

    /// Whether a name is an engine's placeholder: in an engine's own command `{index}` is its own.
    fn of_an_engine(&self, name: &str) -> bool {
        of_an_engine(name) && !self.plain.contains_key(name)
    }

    fn known(&self, name: &str) -> Result<(), TemplateError> {
        let of_engines = name == WORKERS || of_an_engine(name);
        let port_of_engines = name.strip_prefix(ENGINE_PORT);
        let engine_has =
            |port: &str| self.engines.first().is_some_and(|engine| engine.ports.contains_key(port));
        let known = match port_of_engines {
            Some(port) => engine_has(port),
            None => self.plain.contains_key(name) || (of_engines && !self.engines.is_empty()),
        };
        if known {
            return Ok(());
        }
        let mut names: Vec<String> = self.plain.keys().cloned().collect();
        if let Some(engine) = self.engines.first() {
            names.extend([WORKERS].iter().chain(&OF_AN_ENGINE).map(ToString::to_string));
            names.extend(engine.ports.keys().map(|port| format!("{ENGINE_PORT}{port}")));
        }
        Err(TemplateError::Unknown { name: name.to_owned(), known: names })
    }

    /// `text` with known placeholders filled in, for one engine if given.
    fn fill(&self, text: &str, engine: Option<usize>) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(open) = rest.find('{') {
            out.push_str(&rest[..open]);
            rest = &rest[open..];
            let value = rest.find('}').and_then(|close| {
                let name = &rest[1..close];
                is_name(name).then(|| self.value(name, engine)).flatten().map(|value| (close, value))
            });
            match value {
                Some((close, value)) => {
                    out.push_str(&value);
                    rest = &rest[close + 1..];
                }
                None => {
                    out.push('{');
                    rest = &rest[1..];
                }
            }
        }
        out.push_str(rest);
        out
    }

    fn value(&self, name: &str, engine: Option<usize>) -> Option<String> {
        if let Some(value) = self.plain.get(name) {
            return value.clone();
        }
        if name == WORKERS {
            let urls: Vec<&str> = self.engines.iter().map(|engine| engine.url.as_str()).collect();
            return Some(urls.join(","));
        }
        let index = engine?;
        let engine = self.engines.get(index)?;
        match name {
            "url" => Some(engine.url.clone()),
            "address" => Some(engine.url.trim_start_matches("http://").trim_end_matches('/').to_owned()),
            "index" => Some(index.to_string()),
            _ => Some(engine.ports.get(name.strip_prefix(ENGINE_PORT)?)?.to_string()),
        }
    }
}

fn of_an_engine(name: &str) -> bool {
    OF_AN_ENGINE.contains(&name) || name.starts_with(ENGINE_PORT)
}

fn is_name(text: &str) -> bool {
    let mut letters = text.chars();
    letters.next().is_some_and(|c| c.is_ascii_lowercase())
        && letters.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:-".contains(c))
}

/// The words of a line: separated by blanks, except within quotes of either kind.
fn split(text: &str) -> Result<Vec<String>, TemplateError> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for letter in text.chars() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(letter),
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, _) if letter.is_whitespace() => words.extend(word.take()),
            (None, _) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    if quote.is_some() { Err(TemplateError::Quote(text.to_owned())) } else { Ok(words) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, prop_assert, proptest};

    use super::*;

    fn values() -> Values {
        let engine = |port: u16| EnginePlace {
            url: format!("http://127.0.0.1:{port}"),
            ports: BTreeMap::from([("events".to_owned(), port + 1000)]),
        };
        let mut values = Values { plain: BTreeMap::new(), engines: vec![engine(8001), engine(8002)] };
        values.set("port", "9000");
        values.set("port:metrics", "9001");
        values.plain.insert("policy".to_owned(), None);
        values
    }

    fn check(text: &str, expect: &[&str]) {
        assert_eq!(command(text, &values()).unwrap(), expect, "{text}");
    }

    #[test]
    fn engines_are_words_of_their_own_or_joined_by_commas() {
        check(
            "r {workers} -p {port}",
            &["r", "http://127.0.0.1:8001", "http://127.0.0.1:8002", "-p", "9000"],
        );
        check("r --to={workers}", &["r", "--to=http://127.0.0.1:8001,http://127.0.0.1:8002"]);
    }

    #[test]
    fn a_word_that_names_an_engine_is_there_once_for_each() {
        check("r {index}={address}", &["r", "0=127.0.0.1:8001", "1=127.0.0.1:8002"]);
        check(
            "r --events={url}=tcp://127.0.0.1:{engine:events}",
            &[
                "r",
                "--events=http://127.0.0.1:8001=tcp://127.0.0.1:9001",
                "--events=http://127.0.0.1:8002=tcp://127.0.0.1:9002",
            ],
        );
    }

    #[test]
    fn in_an_engines_own_command_its_index_is_its_own() {
        let mut values = Values::default();
        values.set("index", "3");
        assert_eq!(command("e --seed {index}", &values).unwrap(), ["e", "--seed", "3"]);
    }

    #[test]
    fn a_word_that_names_no_policy_is_left_out() {
        check("r --policy={policy} {port}", &["r", "9000"]);
        let mut values = values();
        values.set("policy", "random");
        assert_eq!(command("r --policy={policy}", &values).unwrap(), ["r", "--policy=random"]);
    }

    #[test]
    fn quotes_keep_words_together_and_braces_of_json_are_text() {
        check(
            r#"r --c '{"a": "tcp://*:{port}"}' "x y"'z' ''"#,
            &["r", "--c", r#"{"a": "tcp://*:9000"}"#, "x yz", ""],
        );
    }

    #[test]
    fn what_is_unknown_is_an_error_in_a_command_and_text_in_a_file() {
        let said = command("r {prot}", &values()).unwrap_err().to_string();
        assert!(
            said.contains("{prot}") && said.contains("{port}") && said.contains("{engine:events}"),
            "{said}"
        );
        assert!(command("r {engine:replay}", &values()).is_err());
        assert!(command("r 'x", &values()).is_err());
        assert_eq!(command(" ", &values()), Err(TemplateError::Empty));
        assert_eq!(file("a {prot} { x }", &values()), "a {prot} { x }\n");
    }

    #[test]
    fn a_line_of_a_file_that_names_an_engine_is_there_once_for_each() {
        let text = "listen {port}; location / { x }\n  server e{index} {address};\nend\n";
        let expect =
            "listen 9000; location / { x }\n  server e0 127.0.0.1:8001;\n  server e1 127.0.0.1:8002;\nend\n";
        assert_eq!(file(text, &values()), expect);
    }

    #[test]
    fn ports_are_known_by_their_names() {
        assert_eq!(port_names(["a {port:b} {port:a}", "{port:b} {port} {x:y}"]), ["a", "b"]);
    }

    proptest! {
        #[test]
        fn any_text_is_words_or_an_error(text in any::<String>(), braces in prop::collection::vec("[{}a-z:'\" ]{0,12}", 0..6)) {
            let text = text + &braces.concat();
            if let Ok(words) = command(&text, &values()) {
                prop_assert!(!words.is_empty());
            }
            prop_assert!(file(&text, &values()).ends_with('\n') || text.is_empty());
        }
    }
}
