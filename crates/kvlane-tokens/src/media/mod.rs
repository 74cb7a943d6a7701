//! Images in a conversation. A template prints one placeholder for an image, and the engine puts as many tokens there as
//! the image's size needs. How many that is only the model's own code knows, so an engine is asked once for each size;
//! the keys of the blocks have the image's name, which is computed here as vLLM does.

mod header;
mod name;
pub(crate) mod question;

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kvlane_core::recent::Recent;
use serde_json::json;

use crate::json::{Json, Map};
use crate::prompt::Placed;
use crate::unknown::Unknown;

use header::{Header, header};
pub use question::NewImage;
use question::Size;

/// Sizes that are remembered: of a model that splits images by their proportions, each may have thousands of tokens, but
/// few different ones in a row.
const SIZES_MAX: usize = 4096;

/// An image as the client sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Image<'a> {
    /// The client's name for it, vLLM's `uuid`.
    name: Option<Cow<'a, str>>,
    /// Where it is: a `data:` URL, or another one.
    url: Option<Cow<'a, str>>,
}

/// Tokens as runs of equal ones.
type Runs = Vec<(u32, u32)>;

/// The tokens for images of each size; none where an engine's answer could not be understood.
pub(crate) struct Images {
    /// The token that a template prints for an image (`image_token_id` or `image_token_index` in `config.json`).
    placeholder: u32,
    sizes: Mutex<Recent<Size, Option<Runs>>>,
}

// === impl Image ===

impl<'a> Image<'a> {
    /// From a content part of OpenAI's APIs.
    pub(crate) fn of_part(part: &mut Map<'a>) -> Result<Self, Unknown> {
        let url = match part.take("image_url") {
            None => None,
            Some(Json::Str(url)) => Some(url),
            Some(Json::Map(mut inner)) => match inner.take("url") {
                Some(Json::Str(url)) => Some(url),
                _ => None,
            },
            Some(_) => return Err(Unknown::Media("images without a URL")),
        };
        let name = match part.take("uuid") {
            Some(Json::Str(name)) => Some(name),
            _ => None,
        };
        if url.is_none() && name.is_none() {
            return Err(Unknown::Media("images without a URL"));
        }
        Ok(Self { name, url })
    }

    fn file(&self) -> Result<Option<Vec<u8>>, Unknown> {
        let Some(data) = self.url.as_deref().and_then(|url| url.strip_prefix("data:")) else {
            return Ok(None);
        };
        let payload = data.split_once(";base64,").map(|(_, payload)| payload);
        let file = payload.and_then(|payload| STANDARD.decode(payload).ok());
        file.map(Some).ok_or(Unknown::Media("images that are not in base64"))
    }

    /// Its name in the keys of blocks, and its size.
    fn identify(&self, root: &str) -> Result<(String, Size), Unknown> {
        let file = self.file()?;
        let header: Option<Header> = file.as_deref().and_then(header);
        let name = match (&self.name, &file) {
            (Some(name), _) => name.clone().into_owned(),
            (None, Some(file)) => name::name(root, file, header),
            (None, None) => return Err(Unknown::Media("images that only the engine can fetch")),
        };
        let size = match header {
            Some(Header { width, height, .. }) => Size::Pixels(width, height),
            None => Size::OfImage(name.clone()),
        };
        Ok((name, size))
    }

    fn ask(&self, size: Size) -> NewImage {
        let mut part = json!({"type": "image_url", "image_url": {"url": self.url}});
        if let Some(name) = &self.name {
            part["uuid"] = json!(name);
        }
        NewImage { size, messages: json!([{"role": "user", "content": [part]}]) }
    }
}

// === impl Images ===

impl Images {
    pub(crate) fn new(placeholder: u32) -> Self {
        Self { placeholder, sizes: Mutex::new(Recent::new(SIZES_MAX)) }
    }

    /// Puts the tokens of each image in the place of its placeholder. After an error, `tokens` ends before the first
    /// image whose tokens are unknown.
    pub(crate) fn expand(
        &self,
        images: &[Image<'_>],
        root: &str,
        tokens: &mut Vec<u32>,
        placed: &mut Vec<Placed>,
    ) -> Result<(), Unknown> {
        let given = std::mem::take(tokens);
        let count = given.iter().filter(|token| **token == self.placeholder).count();
        let mut images = images.iter();
        for part in given.split_inclusive(|token| *token == self.placeholder) {
            let Some(text) = part.strip_suffix(&[self.placeholder]) else {
                tokens.extend_from_slice(part);
                break;
            };
            tokens.extend_from_slice(text);
            let Some(image) = images.next().filter(|_| count == images.len() + placed.len() + 1) else {
                return Err(Unknown::Media("images that the template does not print one by one"));
            };
            let (name, size) = image.identify(root)?;
            let first = tokens.len();
            match self.sizes.lock().unwrap_or_else(PoisonError::into_inner).get(&size) {
                Some(Some(runs)) => {
                    for (token, times) in runs {
                        tokens.resize(tokens.len() + *times as usize, *token);
                    }
                }
                Some(None) => return Err(Unknown::Media("images that the engine does not put in one place")),
                None => return Err(Unknown::NewImage(Box::new(image.ask(size)))),
            }
            placed.push(Placed { first, tokens: tokens.len() - first, name });
        }
        match images.next() {
            None => Ok(()),
            Some(_) => Err(Unknown::Media("images that the template does not print one by one")),
        }
    }

    /// Remembers what an engine puts in the place of an image. `ours` are the tokens of the question with a placeholder,
    /// `theirs` those that the engine told; where the two differ in more than this place, nothing can be said of the size.
    pub(crate) fn learn(&self, image: &NewImage, ours: &[u32], theirs: &[u32]) {
        let mut halves = ours.splitn(2, |token| *token == self.placeholder);
        let between = |before: &[u32], behind: &[u32]| {
            let middle = theirs.strip_prefix(before)?.strip_suffix(behind)?;
            (!middle.is_empty() && !behind.contains(&self.placeholder)).then(|| runs(middle))
        };
        let runs = match (halves.next(), halves.next()) {
            (Some(before), Some(behind)) => between(before, behind),
            _ => None,
        };
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner).insert(image.size.clone(), runs);
    }
}

fn runs(tokens: &[u32]) -> Runs {
    tokens.chunk_by(|a, b| a == b).map(|run| (run[0], run.len() as u32)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::parse;

    const PAD: u32 = 9;

    /// The header of a PNG of this size, and a byte by which files differ.
    fn png(width: u8, height: u8, byte: u8) -> String {
        let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
        file.extend([0, 0, 0, width, 0, 0, 0, height, 8, 2, byte]);
        format!("data:image/png;base64,{}", STANDARD.encode(file))
    }

    fn image(part: &str) -> Result<Image<'_>, Unknown> {
        let Ok(Json::Map(mut part)) = parse(part) else { panic!("an object") };
        Image::of_part(&mut part)
    }

    fn at(url: String) -> Image<'static> {
        Image { name: None, url: Some(Cow::Owned(url)) }
    }

    /// The expanded tokens; the known ones before an error.
    fn expanded(
        known: &Images,
        images: &[Image<'_>],
        tokens: &[u32],
    ) -> (Vec<u32>, Result<Vec<Placed>, Unknown>) {
        let (mut tokens, mut placed) = (tokens.to_vec(), Vec::new());
        let done = known.expand(images, "/m", &mut tokens, &mut placed);
        (tokens, done.map(|()| placed))
    }

    fn new_image(known: &Images, image: &Image<'_>) -> NewImage {
        match expanded(known, std::slice::from_ref(image), &[PAD]).1 {
            Err(Unknown::NewImage(new)) => *new,
            other => panic!("a new image, not {other:?}"),
        }
    }

    #[test]
    fn an_engine_is_asked_once_about_a_size() {
        let known = Images::new(PAD);
        let first = at(png(2, 3, 0));
        let new = new_image(&known, &first);
        let question = new.question("m");
        assert_eq!(question["model"], "m");
        assert_eq!(question["messages"][0]["content"][0]["image_url"]["url"], png(2, 3, 0));
        known.learn(&new, &[1, PAD, 2], &[1, PAD, PAD, 7, PAD, 2]);

        let (tokens, placed) = expanded(&known, &[at(png(2, 3, 1))], &[5, 6, PAD, 8]);
        let placed = placed.expect("a known size");
        assert_eq!(tokens, [5, 6, PAD, PAD, 7, PAD, 8]);
        assert_eq!((placed[0].first, placed[0].tokens), (2, 4));
        assert_ne!(placed[0].name, expanded(&known, &[first], &[PAD]).1.expect("known")[0].name);
        new_image(&known, &at(png(3, 2, 0)));
    }

    #[test]
    fn what_comes_before_an_unknown_image_is_known() {
        let known = Images::new(PAD);
        known.learn(&new_image(&known, &at(png(1, 1, 0))), &[PAD], &[PAD, PAD]);
        let images = [at(png(1, 1, 5)), at(png(2, 2, 0))];
        let (tokens, unknown) = expanded(&known, &images, &[1, PAD, 2, PAD, 3]);
        assert_eq!(tokens, [1, PAD, PAD, 2]);
        assert!(matches!(unknown, Err(Unknown::NewImage(_))));
    }

    #[test]
    fn an_answer_that_is_no_image_in_its_place_is_asked_for_once() {
        for (ours, theirs) in [
            (&[1, PAD, 2][..], &[1, 2][..]),
            (&[1, PAD, 2], &[3, PAD, PAD, 2]),
            (&[1, PAD, PAD], &[1, PAD, PAD, PAD]),
            (&[], &[1, PAD]),
        ] {
            let known = Images::new(PAD);
            let image = at(png(2, 3, 0));
            known.learn(&new_image(&known, &image), ours, theirs);
            let (_, unknown) = expanded(&known, &[image], &[PAD]);
            assert_eq!(unknown.expect_err("unknown").name(), "media", "{ours:?} {theirs:?}");
        }
    }

    #[test]
    fn a_template_must_print_each_image() {
        let known = Images::new(PAD);
        known.learn(&new_image(&known, &at(png(1, 1, 0))), &[PAD], &[PAD, PAD]);
        let one = at(png(1, 1, 0));
        for (images, tokens) in [(1, &[1, 2][..]), (1, &[PAD, PAD]), (2, &[PAD])] {
            let images = vec![one.clone(); images];
            assert_eq!(expanded(&known, &images, tokens).1.expect_err("unknown").name(), "media");
        }
    }

    #[test]
    fn a_part_is_read_in_every_form() {
        let url = Some("data:a");
        for part in [r#"{"image_url": {"url": "data:a", "detail": "low"}}"#, r#"{"image_url": "data:a"}"#] {
            let image = image(part).expect("an image");
            assert_eq!((image.url.as_deref(), image.name), (url, None));
        }
        assert_eq!(
            image(r#"{"image_url": null, "uuid": "u"}"#).expect("an image").name.as_deref(),
            Some("u")
        );
        for part in [r#"{"image_url": null}"#, r#"{"image_url": 1}"#, "{}"] {
            assert_eq!(image(part).expect_err("no image").name(), "media");
        }
        // What only an engine can fetch has no name here; a client's own name does for it.
        let known = Images::new(PAD);
        let fetched = image(r#"{"image_url": "http://127.0.0.1/a.png"}"#).expect("an image");
        assert_eq!(expanded(&known, &[fetched], &[PAD]).1.expect_err("unknown").name(), "media");
        let named = image(r#"{"image_url": "http://127.0.0.1/a.png", "uuid": "u"}"#).expect("an image");
        known.learn(&new_image(&known, &named), &[PAD], &[PAD, PAD, PAD]);
        assert_eq!(expanded(&known, &[named], &[PAD]).1.expect("known")[0].name, "u");
        for url in ["data:image/png;base64,%%%", "data:image/png,abc"] {
            let image = at(url.into());
            assert_eq!(expanded(&known, &[image], &[PAD]).1.expect_err("unknown").name(), "media");
        }
    }
}
