//! Command lines of sglang-router, SMG and vllm-router, alone or in a shell script.

use anyhow::{Result, anyhow};
use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args as _, Command, FromArgMatches as _};

use super::draft::Draft;
use crate::config::ConfigArgs;

/// Programs whose flags these are: what comes after them are flags.
const PROGRAMS: &[&str] = &[
    "sglang_router.launch_router",
    "launch_router",
    "sglang-router",
    "smg",
    "vllm-router",
    "sgl-model-gateway",
];

/// The keys that a command line sets; `None` if the text is none.
pub(super) fn read(text: &str) -> Result<Option<Draft>> {
    let mut words = words(text)?;
    let is_program = |word: &String| PROGRAMS.contains(&word.rsplit('/').next().unwrap_or_default());
    let is_kvlane_serve = words.iter().any(|word| word.rsplit('/').next() == Some("kvlane"));
    match words.iter().position(is_program) {
        Some(at) => _ = words.drain(..=at),
        None => match words.iter().position(|word| word.starts_with("--")) {
            Some(at) => _ = words.drain(..at),
            None => return Ok(None),
        },
    }
    let mut draft =
        Draft::new("Check it with `kvlane check --config FILE`, start it with `kvlane serve --config FILE`.");
    if !is_kvlane_serve {
        without_key(&mut words, &mut draft);
    }
    let args = loop {
        let line = ["kvlane".to_owned()].into_iter().chain(words.iter().cloned());
        // Variables of this shell are not those of the other router.
        let command =
            ConfigArgs::augment_args(Command::new("kvlane")).mut_args(|arg| arg.env(Resettable::Reset));
        match command.try_get_matches_from(line) {
            Ok(matches) => break ConfigArgs::from_arg_matches(&matches)?,
            Err(error) => leave_out(&mut words, &mut draft, &error)?,
        }
    };
    let (settings, remarks) = args.settings()?;
    for (flag, key, value) in settings {
        draft.set(key.trim_end_matches('+'), value, &flag);
    }
    remarks.into_iter().for_each(|remark| draft.remark(remark));
    if draft.is_empty() {
        return Ok(None);
    }
    Ok(Some(draft))
}

/// The words of the first command; what a shell does with its output is left out.
fn words(text: &str) -> Result<Vec<String>> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
    let joined = lines.join("\n").replace("\\\n", " ");
    let words = shlex::split(&joined).ok_or_else(|| anyhow!("a quote is not closed"))?;
    let is_shell = |word: &String| {
        matches!(word.trim_start_matches(['1', '2']).chars().next(), Some('>' | '|' | '&' | ';' | '<'))
    };
    Ok(words.into_iter().take_while(|word| !is_shell(word)).collect())
}

/// Takes out the workers' key, which has another name here and should not stand in a file.
fn without_key(words: &mut Vec<String>, draft: &mut Draft) {
    let Some(at) = words.iter().position(|word| word == "--api-key" || word.starts_with("--api-key=")) else {
        return;
    };
    let values = if words[at].contains('=') { 1 } else { 2 };
    words.drain(at..(at + values).min(words.len()));
    draft.remark(
        "--api-key is the key that workers want there: set the variable KVLANE_WORKER_API_KEY, or `upstream.api_key: {file: FILE}`. \
         A key that clients must send is KVLANE_API_KEY.",
    );
}

/// Leaves out what is not understood, and says so.
fn leave_out(words: &mut Vec<String>, draft: &mut Draft, error: &clap::Error) -> Result<()> {
    let said = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(said))) => said.clone(),
        _ => return Err(anyhow!("{}", error.to_string().lines().next().unwrap_or_default().to_owned())),
    };
    let is_it = |word: &String| *word == said || word.starts_with(&format!("{said}="));
    let Some(at) = words.iter().position(is_it) else {
        return Err(anyhow!("{said} is not understood"));
    };
    let end = words[at + 1..].iter().position(|word| word.starts_with("--"));
    let end = if said.starts_with("--") { end.map_or(words.len(), |next| at + 1 + next) } else { at + 1 };
    words.drain(at..end);
    draft.remark(format!("{said} is not a flag that kvlane knows, and was left out"));
    Ok(())
}
