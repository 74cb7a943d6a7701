//! Prompts as the engine counts them: a request's body becomes the text that the model's chat template makes of it, and
//! the text becomes the token ids of the model's tokenizer.

pub mod bpe;
