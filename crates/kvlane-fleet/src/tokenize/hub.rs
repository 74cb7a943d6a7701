//! Tokenizers by the id of a model at the Hugging Face Hub, such as `Qwen/Qwen3-8B`.
//!
//! They are searched in the cache on this machine that Hugging Face's own libraries share. If the configuration allows it,
//! what is missing is downloaded there. The client is ours: the crate `hf-hub` brings a second HTTP stack (`reqwest`), and
//! what is needed are two paths, `/api/models/ID/revision/main` and `/ID/resolve/COMMIT/FILE`.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::StatusCode;
use kvlane_http::download::Download;
use kvlane_http::secret::Secret;
use serde::Deserialize;

/// The Hub, unless `HF_ENDPOINT` names another one.
const ENDPOINT: &str = "https://huggingface.co";
/// Files that a tokenizer is loaded from. Weights are not.
const FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "tiktoken.model",
    "additional_chat_templates/tool_use.jinja",
];
/// Files of which a tokenizer needs one.
const TOKENIZERS: [&str; 2] = ["tokenizer.json", "tiktoken.model"];
/// Longest download of one file, and largest file.
const FILE_LIMIT: Duration = Duration::from_secs(300);
const FILE_BYTES_MAX: usize = 256 << 20;

/// The Hub as this machine knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hub {
    /// The directory of the cache.
    cache: PathBuf,
    endpoint: String,
    token: Option<String>,
    /// Whether what is missing is downloaded.
    downloads: bool,
}

/// What the Hub says about a model.
#[derive(Deserialize)]
struct Model {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// Whether a path may be the id of a model: `owner/name`, or `name` alone.
pub fn is_id(path: &Path) -> bool {
    let Some(text) = path.to_str() else { return false };
    let is_name = |part: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty() && !part.starts_with(['.', '-']) && part.len() <= 96 && part.chars().all(is_plain)
    };
    text.split('/').count() <= 2 && text.split('/').all(is_name)
}

// === impl Hub ===

impl Hub {
    /// The Hub that the environment names, by the variables of Hugging Face's libraries.
    pub fn of_environment(downloads: bool) -> Self {
        Self::of(|name| env::var_os(name).filter(|value| !value.is_empty()), downloads)
    }

    fn of(variable: impl Fn(&str) -> Option<OsString>, downloads: bool) -> Self {
        let dir = |name: &str| variable(name).map(PathBuf::from);
        let base = || dir("XDG_CACHE_HOME").or_else(|| Some(dir("HOME")?.join(".cache")));
        let home = || dir("HF_HOME").or_else(|| Some(base()?.join("huggingface")));
        let cache = dir("HF_HUB_CACHE")
            .or_else(|| dir("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| Some(home()?.join("hub")));
        let text = |name: &str| variable(name)?.into_string().ok();
        let written = || fs::read_to_string(home()?.join("token")).ok();
        let token = text("HF_TOKEN").or_else(written).map(|token| token.trim().to_owned());
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        Self {
            cache: cache.unwrap_or_else(|| ".cache/huggingface/hub".into()),
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.filter(|token| !token.is_empty()),
            downloads,
        }
    }

    /// The directory of the tokenizer of the model `id`. Downloads it if that is allowed and it is not in the cache.
    ///
    /// # Errors
    /// Why there is none, and what to do.
    pub fn tokenizer_of(&self, id: &str) -> Result<PathBuf, String> {
        match self.find(id) {
            Some(dir) => Ok(dir),
            None if self.downloads => self.download(id),
            None => Err(format!(
                "there is no directory {id}, and no tokenizer of a model {id} in the Hugging Face cache {}; set \
                 --allow-download (tokens.allow_download), or give the model's directory",
                self.cache.display()
            )),
        }
    }

    /// The snapshot of a model in the cache: that of `main`, else any with a tokenizer.
    pub fn find(&self, id: &str) -> Option<PathBuf> {
        let model = self.model_dir(id);
        let snapshots = model.join("snapshots");
        let main = fs::read_to_string(model.join("refs/main")).ok().map(|hash| snapshots.join(hash.trim()));
        let others = fs::read_dir(&snapshots).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut others: Vec<PathBuf> = others.collect();
        others.sort();
        let has_tokenizer = |dir: &PathBuf| TOKENIZERS.iter().any(|name| dir.join(name).is_file());
        main.into_iter().chain(others).find(has_tokenizer)
    }

    fn model_dir(&self, id: &str) -> PathBuf {
        self.cache.join(format!("models--{}", id.replace('/', "--")))
    }

    /// Downloads the tokenizer's files into the cache. Blocks.
    fn download(&self, id: &str) -> Result<PathBuf, String> {
        // The caller may be on a runtime, which must not wait for another one.
        let downloaded = std::thread::scope(|scope| {
            let work = scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.map_err(|error| error.to_string())?.block_on(self.fetch_all(id))
            });
            work.join().unwrap_or_else(|_| Err("the download panicked".into()))
        });
        downloaded
            .map_err(|why| format!("cannot download the tokenizer of {id} from {}: {why}", self.endpoint))
    }

    async fn fetch_all(&self, id: &str) -> Result<PathBuf, String> {
        let listed = self.fetch(&format!("/api/models/{id}/revision/main")).await?;
        let model: Model = serde_json::from_slice(&listed)
            .map_err(|error| format!("its list of files is not JSON: {error}"))?;
        let is_plain = !model.sha.is_empty() && model.sha.chars().all(|c| c.is_ascii_alphanumeric());
        if !is_plain {
            return Err("its list of files names no commit".into());
        }
        let wanted = FILES.iter().filter(|name| model.siblings.iter().any(|file| file.rfilename == **name));
        let wanted: Vec<&str> = wanted.copied().collect();
        if !TOKENIZERS.iter().any(|name| wanted.contains(name)) {
            return Err("it has neither tokenizer.json nor tiktoken.model".into());
        }
        let dir = self.model_dir(id);
        let snapshot = dir.join("snapshots").join(&model.sha);
        let mut files = Vec::new();
        for name in wanted {
            tracing::info!(model = id, file = name, "downloading");
            files.push((name, self.fetch(&format!("/{id}/resolve/{}/{name}", model.sha)).await?));
        }
        let cannot = |error: std::io::Error| format!("cannot write {}: {error}", snapshot.display());
        // The tokenizer comes last: with it the snapshot counts as complete.
        files.sort_by_key(|(name, _)| TOKENIZERS.contains(name));
        for (name, body) in files {
            let path = snapshot.join(name);
            fs::create_dir_all(path.parent().unwrap_or(&snapshot)).map_err(cannot)?;
            let part = path.with_extension(format!("part-{}", std::process::id()));
            fs::write(&part, &body).and_then(|()| fs::rename(&part, &path)).map_err(cannot)?;
        }
        fs::create_dir_all(dir.join("refs")).map_err(cannot)?;
        fs::write(dir.join("refs/main"), &model.sha).map_err(cannot)?;
        Ok(snapshot)
    }

    async fn fetch(&self, path: &str) -> Result<bytes::Bytes, String> {
        let url = format!("{}{path}", self.endpoint);
        let token = self.token.as_deref().map(Secret::new);
        let download =
            Download { url: &url, key: token.as_ref(), limit: FILE_LIMIT, bytes_max: FILE_BYTES_MAX };
        let (status, body) = download.run().await?;
        let what = format!("GET {path} answered {}", status.as_u16());
        match status {
            StatusCode::OK => Ok(body),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(format!(
                "{what}: the model does not exist, or needs a token; set HF_TOKEN, and accept its conditions at {}",
                self.endpoint
            )),
            StatusCode::NOT_FOUND => Err(format!("{what}: there is no such model")),
            _ => Err(what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(variables: &[(&str, &str)]) -> Hub {
        let variable =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        Hub::of(variable, false)
    }

    #[test]
    fn the_cache_is_where_hugging_faces_libraries_keep_it() {
        for (variables, expect) in [
            (&[("HOME", "/h")][..], "/h/.cache/huggingface/hub"),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "/f")], "/f/hub"),
            (&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")], "/c"),
        ] {
            assert_eq!(hub(variables).cache, Path::new(expect), "{variables:?}");
        }
        let other = hub(&[("HF_ENDPOINT", "http://mirror/"), ("HF_TOKEN", "hf_x\n")]);
        assert_eq!((other.endpoint.as_str(), other.token.as_deref()), ("http://mirror", Some("hf_x")));
    }

    #[test]
    fn an_id_is_no_path() {
        for id in ["Qwen/Qwen3-8B", "gpt2", "meta-llama/Llama-3.1-8B"] {
            assert!(is_id(Path::new(id)), "{id}");
        }
        for path in ["/models/a", "./a", "../a", "a/b/c", "", "a b", "a/", "~/a"] {
            assert!(!is_id(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn the_snapshot_of_main_is_taken_if_it_has_a_tokenizer() {
        let dir = tempfile::tempdir().expect("a directory");
        let hub = hub(&[("HF_HUB_CACHE", dir.path().to_str().expect("UTF-8"))]);
        assert_eq!(hub.find("a/b"), None);
        let model = dir.path().join("models--a--b");
        for hash in ["1", "2"] {
            fs::create_dir_all(model.join("snapshots").join(hash)).expect("made");
        }
        assert_eq!(hub.find("a/b"), None, "without a tokenizer");
        for hash in ["1", "2"] {
            fs::write(model.join("snapshots").join(hash).join("tokenizer.json"), "{}").expect("written");
        }
        fs::create_dir_all(model.join("refs")).expect("made");
        fs::write(model.join("refs/main"), "2").expect("written");
        assert_eq!(hub.find("a/b"), Some(model.join("snapshots/2")));
        fs::write(model.join("refs/main"), "3").expect("written");
        assert_eq!(hub.find("a/b"), Some(model.join("snapshots/1")), "that of main is gone");
    }
}
