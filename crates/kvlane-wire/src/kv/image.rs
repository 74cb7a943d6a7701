//! The key that vLLM adds to each block with a part of an image.

/// Appends the key as KV events have it: the image's name, and where it begins, counted from the block's first token
/// (vLLM, `v1/core/kv_cache_utils.py`, `_gen_mm_extra_hash_keys`).
pub fn image_key(name: &str, offset: i64, out: &mut Vec<u8>) {
    // An array of two.
    out.push(0x92);
    let length = name.len();
    match length {
        0..32 => out.push(0xa0 | length as u8),
        32..256 => out.extend([0xd9, length as u8]),
        256..65_536 => {
            out.push(0xda);
            out.extend((length as u16).to_be_bytes());
        }
        _ => {
            out.push(0xdb);
            out.extend((length as u32).to_be_bytes());
        }
    }
    out.extend_from_slice(name.as_bytes());
    // The shortest form, as msgspec writes numbers.
    match offset {
        -32..128 => out.push(offset as u8),
        128..256 => out.extend([0xcc, offset as u8]),
        -128..-32 => out.extend([0xd0, offset as u8]),
        256..65_536 => {
            out.push(0xcd);
            out.extend((offset as u16).to_be_bytes());
        }
        -32_768..-128 => {
            out.push(0xd1);
            out.extend((offset as i16).to_be_bytes());
        }
        _ => {
            out.push(if offset < 0 { 0xd2 } else { 0xce });
            out.extend((offset as i32).to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::Scanner;

    #[test]
    fn a_key_is_written_in_its_shortest_form() {
        for (length, before) in [(1, 1), (31, 1), (32, 2), (255, 2), (256, 3), (65_536, 5)] {
            for (offset, behind) in [
                (0, 1),
                (127, 1),
                (128, 2),
                (300, 3),
                (70_000, 5),
                (-32, 1),
                (-33, 2),
                (-128, 2),
                (-129, 3),
                (-40_000, 5),
            ] {
                let (name, mut key) = ("n".repeat(length), Vec::new());
                image_key(&name, offset, &mut key);
                let mut scanner = Scanner::new(&key);
                assert_eq!(scanner.array(), Ok(2));
                assert_eq!(scanner.str(), Ok(name.as_str()));
                assert_eq!(scanner.int(), Ok(i128::from(offset)));
                assert_eq!((scanner.remaining(), key.len()), (0, 1 + before + length + behind));
            }
        }
    }
}
