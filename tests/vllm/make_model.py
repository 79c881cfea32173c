"""Run by the engine's Python: random models with the Qwen3 tokenizer, small enough to serve on one CPU core.

    python make_model.py SOURCE TARGET      SOURCE holds tokenizer.json.xz and chat_template.jinja

TARGET/llama    two layers of full attention
TARGET/adapter  a LoRA adapter on it
TARGET/gemma    six layers, two of sliding-window attention to one of full attention
TARGET/vision   Qwen2.5-VL: a vision tower of two layers and a text model of two
"""

import json
import lzma
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

END = "<|im_end|>"
HIDDEN, RANK = 64, 8
WINDOW = 64
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 256 * 28 * 28,  # 256 tokens an image
}


def main(source: Path, target: Path) -> None:
    tokenizer = lzma.decompress((source / "tokenizer.json.xz").read_bytes())
    ids = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    end = ids[END]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": (source / "chat_template.jinja").read_text(),
        "eos_token": END,
        "model_max_length": 4096,
    }
    common = {
        "vocab_size": 151_936,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": end,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    template = (Path(__file__).parent / "vision_template.jinja").read_text()
    models: dict[str, PreTrainedModel] = {
        "llama": LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **common)),
        "gemma": Gemma3ForCausalLM(
            Gemma3TextConfig(num_hidden_layers=6, sliding_window=WINDOW, layer_types=kinds, **common)
        ),
        "vision": vision_model(common, ids),
    }
    for name, model in models.items():
        model.to(torch.bfloat16).save_pretrained(target / name)
        (target / name / "tokenizer.json").write_bytes(tokenizer)
        (target / name / "tokenizer_config.json").write_text(json.dumps(settings))
    (target / "vision" / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    (target / "vision" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    make_adapter(target / "adapter")


def vision_model(text: dict[str, object], ids: dict[str, int]) -> PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1_000_000.0}
    vision = {
        "depth": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "patch_size": PROCESSOR["patch_size"],
        "spatial_merge_size": PROCESSOR["merge_size"],
        "temporal_patch_size": PROCESSOR["temporal_patch_size"],
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config={"num_hidden_layers": 2, "rope_parameters": rope, **text},
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def make_adapter(folder: Path) -> None:
    """On the query projections of both layers; random, so that it changes what is generated."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for layer in range(2):
        place = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{place}.lora_A.weight"] = torch.randn(RANK, HIDDEN, dtype=torch.bfloat16)
        weights[f"{place}.lora_B.weight"] = torch.randn(HIDDEN, RANK, dtype=torch.bfloat16)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
