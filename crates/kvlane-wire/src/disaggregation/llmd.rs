//! llm-d's routing sidecar (`llm-d-router/pkg/sidecar/proxy`): headers that name the other engines of a request.

use crate::json::{JsonError, Kind, Scanner};
use crate::openai::utf8;

/// The header by which the sidecar, in front of a decode engine, learns the prefill engine: `host:port`.
pub const PREFILLER_HEADER: &str = "x-prefiller-host-port";

/// The header by which it learns the encode engines: `host:port` of each, separated by commas. The sidecar sends each
/// image, video and sound of a chat to one of them, in turn.
pub const ENCODERS_HEADER: &str = "x-encoder-hosts-ports";

/// The headers that make a sidecar send a request, or a part of it, to an address. From a client, that would be an
/// address of its choice.
pub const SIDECAR_HEADERS: [&str; 4] =
    [PREFILLER_HEADER, ENCODERS_HEADER, "x-data-parallel-host-port", "x-kv-cache-source-host-port"];

/// Types of the content parts that the sidecar has encoded.
const MEDIA: [&str; 4] = ["image_url", "audio_url", "video_url", "input_audio"];

/// Whether the messages of a chat have parts that the sidecar has encoded.
pub fn has_media(body: &[u8]) -> bool {
    utf8(body).is_ok_and(|body| finds_media(body).unwrap_or(false))
}

fn finds_media(body: &str) -> Result<bool, JsonError> {
    for messages in members(body, "messages")? {
        for message in items(messages)? {
            for content in members(message, "content")? {
                for part in items(content)? {
                    for kind in members(part, "type")? {
                        let mut scanner = Scanner::new(kind);
                        if scanner.peek()? == Kind::String && MEDIA.contains(&&*scanner.string()?.decode()) {
                            return Ok(true);
                        }
                    }
                }
            }
        }
    }
    Ok(false)
}

/// The values of an object's members of this name; none if it is no object.
fn members<'a>(object: &'a str, name: &str) -> Result<Vec<&'a str>, JsonError> {
    let (mut scanner, mut found) = (Scanner::new(object), Vec::new());
    if scanner.peek()? != Kind::Object {
        return Ok(found);
    }
    let mut walk = scanner.object()?;
    while let Some(key) = walk.key(&mut scanner)? {
        let value = scanner.skip()?;
        if key.decode() == name {
            found.push(value);
        }
    }
    Ok(found)
}

/// The items of an array; none if it is no array.
fn items(array: &str) -> Result<Vec<&str>, JsonError> {
    let (mut scanner, mut found) = (Scanner::new(array), Vec::new());
    if scanner.peek()? != Kind::Array {
        return Ok(found);
    }
    let mut walk = scanner.array()?;
    while walk.item(&mut scanner)? {
        found.push(scanner.skip()?);
    }
    Ok(found)
}
