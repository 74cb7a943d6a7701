//! The ids by which an answer names objects that its engine keeps.
//!
//! Only members of the outermost object count, and of `response` in an event: an object also holds text of its client, such
//! as `metadata`, in which a client could write the id of an object of another one.

use std::borrow::Cow;

use crate::json::{JsonError, Kind, Scanner};

/// Longest id that is used.
pub const ID_BYTES_MAX: usize = 256;

/// Members whose value is an id, or an object with one: of the object itself, of the files of a batch, of the file of an
/// upload, of the conversation of a response.
const NAMES: [&str; 5] = ["id", "output_file_id", "error_file_id", "file", "conversation"];

/// The ids in the beginning of an answer, JSON or a stream of events, and whether it needs not be read further.
pub fn object_ids(beginning: &[u8]) -> (Vec<String>, bool) {
    let text = match std::str::from_utf8(beginning) {
        Ok(text) => text,
        // A character may be cut.
        Err(error) => std::str::from_utf8(&beginning[..error.valid_up_to()]).unwrap_or_default(),
    };
    let mut ids = Vec::new();
    if text.trim_ascii_start().starts_with('{') {
        let read = members(&mut Scanner::new(text), &mut ids, false);
        return (ids, read.is_ok());
    }
    // An event names the response that it belongs to; the first one suffices.
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        if let Some(data) = line.strip_prefix("data:")
            && members(&mut Scanner::new(data), &mut ids, true).is_ok()
            && !ids.is_empty()
        {
            return (ids, true);
        }
    }
    (ids, false)
}

/// Adds the ids among the members of an object, of `response` if it is an event.
fn members(scanner: &mut Scanner<'_>, ids: &mut Vec<String>, is_event: bool) -> Result<(), JsonError> {
    let mut walk = scanner.object()?;
    while let Some(key) = walk.key(scanner)? {
        let (key, kind) = (key.decode(), scanner.peek()?);
        if is_event {
            match (&*key, kind) {
                ("response", Kind::Object) => members(scanner, ids, false)?,
                _ => _ = scanner.skip()?,
            }
        } else if !NAMES.contains(&&*key) {
            scanner.skip()?;
        } else if kind == Kind::String {
            // The file of an upload is an object: as a text it is none of the engine's ids.
            let id = scanner.string()?.decode();
            ids.extend(usable(id).filter(|_| key != "file"));
        } else if kind == Kind::Object && key != "id" {
            let mut inner = scanner.object()?;
            while let Some(key) = inner.key(scanner)? {
                if key.decode() == "id" && scanner.peek()? == Kind::String {
                    ids.extend(usable(scanner.string()?.decode()));
                } else {
                    scanner.skip()?;
                }
            }
        } else {
            scanner.skip()?;
        }
    }
    Ok(())
}

fn usable(id: Cow<'_, str>) -> Option<String> {
    let usable = (1..=ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    usable.then(|| id.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_names_its_object_and_those_that_it_made() {
        for (answer, expected) in [
            (r#"{"id":"resp_1","output":[{"id":"msg_1"}]}"#, &["resp_1"][..]),
            (
                r#"{"object":"response", "id" : "resp_1", "conversation":{"id":"conv_1"}}"#,
                &["resp_1", "conv_1"],
            ),
            (
                r#"{"id":"batch_1","input_file_id":"file-1","output_file_id":"file-2","error_file_id":"file-3"}"#,
                &["batch_1", "file-2", "file-3"],
            ),
            (r#"{"id":"upload_1","file":{"object":"file","id":"file-1"}}"#, &["upload_1", "file-1"]),
            (r#"{"object":"list","data":[{"id":"file-1"}],"first_id":"file-1"}"#, &[]),
            (r#"{"id":7,"file":null,"output_file_id":""}"#, &[]),
            (r#"{"id":"a b"}"#, &[]),
        ] {
            let expected: Vec<String> = expected.iter().map(|id| (*id).into()).collect();
            assert_eq!(object_ids(answer.as_bytes()), (expected, true), "{answer}");
        }
    }

    /// Invariant: No text of a client in an answer makes an id that it contains an object of that client.
    #[test]
    fn what_a_client_has_written_names_no_object() {
        let answer = r#"{"metadata":{"id":"file-9","output_file_id":"file-9","file":{"id":"file-9"}},"id":"batch_1",
            "file":"file-9"}"#;
        assert_eq!(object_ids(answer.as_bytes()).0, ["batch_1"]);
        let event =
            "data: {\"delta\":\"\\\"id\\\":\",\"id\":\"file-9\",\"response\":{\"id\":\"resp_1\"}}\n\n";
        assert_eq!(object_ids(event.as_bytes()).0, ["resp_1"]);
    }

    #[test]
    fn an_answer_that_has_come_in_part_names_what_has_come() {
        let answer = r#"{"id":"batch_1","é":"é","output_file_id":"file-2"}"#;
        for cut in 0..answer.len() {
            let (ids, complete) = object_ids(&answer.as_bytes()[..cut]);
            assert!(!complete && ids.iter().all(|id| id == "batch_1" || id == "file-2"), "{ids:?} at {cut}");
            assert_eq!(ids.is_empty(), cut < r#"{"id":"batch_1""#.len(), "at {cut}");
        }
    }

    #[test]
    fn the_first_event_of_a_stream_names_its_response() {
        let stream = ": ping\n\nevent: response.created\r\ndata: {\"type\":\"response.created\",\"response\":{\"id\" : \
            \"resp_2\"}}\r\n\r\n";
        assert_eq!(object_ids(stream.as_bytes()), (vec!["resp_2".into()], true));
        for cut in 0..stream.len() - 3 {
            assert_eq!(object_ids(&stream.as_bytes()[..cut]), (vec![], false), "at {cut}");
        }
    }
}
