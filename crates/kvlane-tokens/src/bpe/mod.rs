//! Byte-pair encoding of byte-level tokenizers.
