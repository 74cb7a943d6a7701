"""Makes a Qwen2-VL of random weights: what `tiny_model.py` makes, for prompts with images.

usage: tiny_vision.py DIRECTORY

An image of 56 x 28 pixels has two tokens, one for each 28 x 28.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from words import BEGIN, END, PAD, START, tokenizer

CONTEXT_TOKENS = 32_768
HIDDEN, LAYERS, HEADS, KV_HEADS = 256, 4, 4, 2
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = f"""
{{%- for message in messages %}}
    {{{{- '{START}' + message.role + '\\n' }}}}
    {{%- if message.content is string %}}{{{{- message.content }}}}
    {{%- else %}}
        {{%- for part in message.content %}}
            {{%- if part.type == 'image' %}}{{{{- '<|vision_start|><|image_pad|><|vision_end|>' }}}}
            {{%- else %}}{{{{- part.text }}}}{{%- endif %}}
        {{%- endfor %}}
    {{%- endif %}}
    {{{{- '{END}\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '{START}assistant\\n' }}}}{{%- endif %}}""".lstrip()


def words():
    own = tokenizer()
    own.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token=BEGIN, eos_token=END, pad_token=PAD, model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def model(words):
    torch.manual_seed(0)
    start, end, image, video = words.convert_tokens_to_ids(SPECIAL)
    text = {
        "vocab_size": len(words), "hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": True, "bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]},
    }
    vision = {
        "depth": 2, "embed_dim": 128, "hidden_size": HIDDEN, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=True,
    )
    return Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    words = words()
    words.save_pretrained(target)
    model(words).save_pretrained(target)
    (target / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor",
        "min_pixels": 56 * 28, "max_pixels": 1280 * 28 * 28, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }))
