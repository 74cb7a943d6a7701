//! Size and colours of an image, from the first bytes of its file.

/// What the header of an image's file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Width in pixels.
    pub(super) width: u32,
    /// Height in pixels.
    pub(super) height: u32,
    /// Whether the pixels are stored as red, green and blue, so that an engine takes them as they are.
    pub(super) is_rgb: bool,
}

/// The header of a PNG, JPEG, WebP or GIF file; `None` for other files, and for a JPEG with Exif data, which may turn
/// the image.
pub(super) fn header(file: &[u8]) -> Option<Header> {
    png(file).or_else(|| jpeg(file)).or_else(|| webp(file)).or_else(|| gif(file))
}

/// PNG, chunk `IHDR` (W3C, Portable Network Graphics, 11.2.2).
fn png(file: &[u8]) -> Option<Header> {
    let body = file.strip_prefix(b"\x89PNG\r\n\x1a\n")?;
    if body.get(4..8)? != b"IHDR" {
        return None;
    }
    let number = |at: usize| Some(u32::from_be_bytes(*body.get(at..)?.first_chunk()?));
    Some(Header { width: number(8)?, height: number(12)?, is_rgb: *body.get(17)? == 2 })
}

/// JPEG, a start-of-frame segment (ITU-T T.81, B.2.2).
fn jpeg(file: &[u8]) -> Option<Header> {
    let mut rest = file.strip_prefix(b"\xff\xd8")?;
    loop {
        let [0xff, marker, high, low, ..] = *rest else { return None };
        let length = usize::from(u16::from_be_bytes([high, low]));
        let segment = rest.get(4..2 + length)?;
        match marker {
            0xe1 if segment.starts_with(b"Exif") => return None,
            0xc0..=0xcf if !matches!(marker, 0xc4 | 0xc8 | 0xcc) => {
                let [_, h, eight, w, ight, components, ..] = *segment else { return None };
                let side = |high, low| u32::from(u16::from_be_bytes([high, low]));
                return Some(Header {
                    width: side(w, ight),
                    height: side(h, eight),
                    is_rgb: components == 3,
                });
            }
            _ => rest = rest.get(2 + length..)?,
        }
    }
}

/// WebP: lossy, lossless, or with the extended header (RFC 9649).
fn webp(file: &[u8]) -> Option<Header> {
    let chunk = file.strip_prefix(b"RIFF")?.get(4..)?.strip_prefix(b"WEBP")?;
    let byte = |at: usize| chunk.get(at).copied().map(u32::from);
    let short = |at: usize| Some(byte(at)? | byte(at + 1)? << 8);
    match chunk.get(..4)? {
        b"VP8 " => Some(Header { width: short(14)? & 0x3fff, height: short(16)? & 0x3fff, is_rgb: true }),
        b"VP8L" => {
            let bits = short(9)? | short(11)? << 16;
            let (width, height) = ((bits & 0x3fff) + 1, ((bits >> 14) & 0x3fff) + 1);
            Some(Header { width, height, is_rgb: bits & (1 << 28) == 0 })
        }
        b"VP8X" => {
            let side = |at| Some((short(at)? | byte(at + 2)? << 16) + 1);
            Some(Header { width: side(12)?, height: side(15)?, is_rgb: byte(8)? & 0x10 == 0 })
        }
        _ => None,
    }
}

/// GIF, the logical screen (GIF89a, 18); its pixels are indices.
fn gif(file: &[u8]) -> Option<Header> {
    let rest = file.strip_prefix(b"GIF89a").or_else(|| file.strip_prefix(b"GIF87a"))?;
    let [w, idth, h, eight, ..] = *rest else { return None };
    let side = |low, high| u32::from(u16::from_le_bytes([low, high]));
    Some(Header { width: side(w, idth), height: side(h, eight), is_rgb: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(width: u32, height: u32, is_rgb: bool) -> Option<Header> {
        Some(Header { width, height, is_rgb })
    }

    #[test]
    fn a_header_gives_size_and_colours() {
        let png = |colour| {
            let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\x02\x80\0\0\x01\xe0\x08".to_vec();
            file.extend([colour, 0, 0, 0]);
            file
        };
        assert_eq!(header(&png(2)), of(640, 480, true));
        assert_eq!(header(&png(6)), of(640, 480, false));
        let jpeg = |components| {
            let mut file = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc2\x00\x09\x08\x01\xe0\x02\x80".to_vec();
            file.extend([components, 0]);
            file
        };
        assert_eq!(header(&jpeg(3)), of(640, 480, true));
        assert_eq!(header(&jpeg(1)), of(640, 480, false));
        assert_eq!(
            header(b"RIFF....WEBPVP8 ....\x30\x01\x00\x9d\x01\x2a\x80\x02\xe0\x01"),
            of(640, 480, true)
        );
        // 639 and 479 in 14 bits each, then the bit of alpha.
        let bits = 639u32 | 479 << 14;
        let lossless = |alpha: u32| {
            let mut file = b"RIFF....WEBPVP8L....\x2f".to_vec();
            file.extend((bits | alpha << 28).to_le_bytes());
            file
        };
        assert_eq!(header(&lossless(0)), of(640, 480, true));
        assert_eq!(header(&lossless(1)), of(640, 480, false));
        assert_eq!(header(b"RIFF....WEBPVP8X....\x10\0\0\0\x7f\x02\0\xdf\x01\0"), of(640, 480, false));
        assert_eq!(header(b"GIF89a\x80\x02\xe0\x01\0"), of(640, 480, false));
    }

    #[test]
    fn what_is_cut_short_or_may_be_turned_has_none() {
        let exif = b"\xff\xd8\xff\xe1\x00\x08Exif\0\0\xff\xc2\x00\x09\x08\x01\xe0\x02\x80\x03\x00";
        assert_eq!(header(exif), None);
        for file in [
            &b""[..],
            b"\xff\xd8",
            b"\xff\xd8\xff\xe0\0\0",
            b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0",
            b"BM",
            b"RIFF....WEBPVP8X",
        ] {
            assert_eq!(header(file), None, "{file:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(start in 0usize..5, rest in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..64)) {
            let starts: [&[u8]; 5] = [b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"RIFF....WEBP", b"GIF89a", b""];
            header(&[starts[start], &rest].concat());
        }
    }
}
