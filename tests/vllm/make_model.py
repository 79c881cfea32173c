"""Run by the engine's Python: a random two-layer Llama with the Qwen3 tokenizer, small enough to serve on one CPU core.

python make_model.py SOURCE TARGET      SOURCE holds tokenizer.json.xz and chat_template.jinja
"""

import json
import lzma
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

END = "<|im_end|>"


def main(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = lzma.decompress((source / "tokenizer.json.xz").read_bytes())
    (target / "tokenizer.json").write_bytes(tokenizer)
    added = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": (source / "chat_template.jinja").read_text(),
        "eos_token": END,
        "model_max_length": 4096,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=151_936,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            eos_token_id=added[END],
            bos_token_id=None,
        )
    )
    model.to(torch.bfloat16).save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
