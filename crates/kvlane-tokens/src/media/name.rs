//! The name that vLLM gives to an image (0.32, `multimodal/hasher.py`, `multimodal/media/image.py`): the BLAKE3 hash of
//! the model's name and the image's file, each part behind its length.

use blake3::Hasher;

use super::header::Header;

const SEQUENCE: u8 = 1;
const MAPPING: u8 = 2;
const LEAF: u8 = 3;

/// The name of the image in `file`, in front of a model at `root`.
pub(super) fn name(root: &str, file: &[u8], header: Option<Header>) -> String {
    let mut hash = Framed(Hasher::new());
    // Once for the modality, once for the kind of item.
    hash.part(b"image").one(LEAF).part(b"image");
    if header.is_some_and(|header| header.is_rgb) {
        hash.one(LEAF).part(file);
    } else {
        // The image is converted to colours on a white ground.
        hash.one(MAPPING).length(2).part(b"io_config");
        hash.one(MAPPING).length(2).part(b"image_mode").one(LEAF).part(b"RGB");
        hash.part(b"rgba_background_color").one(SEQUENCE).length(3);
        for _ in 0..3 {
            hash.one(LEAF).part(&255i64.to_le_bytes());
        }
        hash.part(b"data").one(LEAF).part(file);
    }
    hash.part(b"model_id").one(LEAF).part(root.as_bytes());
    hash.0.finalize().to_hex().to_string()
}

struct Framed(Hasher);

// === impl Framed ===

impl Framed {
    fn one(&mut self, tag: u8) -> &mut Self {
        self.0.update(&[tag]);
        self
    }

    fn length(&mut self, length: usize) -> &mut Self {
        self.0.update(&(length as u64).to_le_bytes());
        self
    }

    fn part(&mut self, bytes: &[u8]) -> &mut Self {
        self.length(bytes.len());
        self.0.update(bytes);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::super::header::header;
    use super::*;
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    /// Files of 3 x 2 pixels that Pillow wrote, and what `MultiModalHasher.hash_kwargs` of vLLM 0.32 says of them.
    #[test]
    fn a_name_is_vllms() {
        for (file, expected) in [
            (
                "iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAIAAAASFvFNAAAAEElEQVR4nGNkZ4ACJhiDAQAAwQAL09RtuQAAAABJRU5ErkJggg==",
                "7c3b43f901cb2c6e71f8a361ee251366f2b333df73be0c3498029c49b1914315",
            ),
            (
                "iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAYAAACddGYaAAAAEElEQVR4nGNkZ0AAJiQ2AwAA/QALth4KPgAAAABJRU5ErkJggg==",
                "85d8dd30f94e44084566e9443ea769c60b57acf9dd20d8764ba134515d611b4b",
            ),
            (
                "iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAAAAAC4HznGAAAAEElEQVR4nGNkZ2BgYmBgAAAASQALywrnagAAAABJRU5ErkJggg==",
                "1bc547eaf0dd66d712c3a57a4b25fe36ab31af3a64bfc16011e51970b3d917d8",
            ),
            (
                "R0lGODdhAwACAIAAAAAAAAAAACwAAAAAAwACAAAIBgABCBwYEAA7",
                "b955212deac6fe7c54250e0013509e05a6c49ed7308b21711c2fd3c43b6248f4",
            ),
            (
                "UklGRigAAABXRUJQVlA4IBwAAABQAQCdASoDAAIAAUAmJZwABAAAAP79ITnslkAA",
                "4e53a05ef6c8c0bbb80d55d25473a842ce353b9dad9d08d989e90219196cfe7d",
            ),
        ] {
            let file = STANDARD.decode(file).expect("base64");
            assert_eq!(name("/m/tiny", &file, header(&file)), expected);
        }
    }
}
