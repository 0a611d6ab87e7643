"""Makes the small random checkpoints under tiny/. Run once, with the oracle's Python; the files are committed.

The weights are larger than a trained model's would be at this size, so that attention is sharp and an error in rotary
embedding, head order or masking moves the logits visibly. Norm weights differ from 1 for the same reason.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

TINY = Path(__file__).parent / "tiny"
_SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

# name -> (what differs from _SHAPE, stored dtype, most bytes of a shard)
LLAMAS: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    "default": ({}, torch.bfloat16, "1GB"),
    "linear": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}, torch.float16, "1GB"),
    "llama3": ({"rope_parameters": _LLAMA3, "tie_word_embeddings": False}, torch.bfloat16, "60KB"),
    "yarn": ({"rope_parameters": _YARN}, torch.float32, "1GB"),
    "untied_mha": ({"tie_word_embeddings": False, "num_key_value_heads": 4}, torch.bfloat16, "1GB"),
    "wide_heads": ({"head_dim": 32}, torch.float16, "1GB"),
}
MISTRAL = ({"sliding_window": 8, "tie_word_embeddings": False}, torch.bfloat16, "1GB")


def main() -> None:
    for seed, (name, (changes, dtype, shard)) in enumerate(LLAMAS.items()):
        save(name, LlamaForCausalLM(LlamaConfig(**{**_SHAPE, **changes})), seed, dtype, shard)
    changes, dtype, shard = MISTRAL
    save("mistral_window", MistralForCausalLM(MistralConfig(**{**_SHAPE, **changes})), len(LLAMAS), dtype, shard)
    spell_as_before("linear")


def save(name: str, model: torch.nn.Module, seed: int, dtype: torch.dtype, max_shard_size: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.25 * noise if parameter.ndim == 1 else 0.15 * noise)
    directory = TINY / name
    shutil.rmtree(directory, ignore_errors=True)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)


def spell_as_before(name: str) -> None:
    """Rewrites the rope keys as transformers 4 spelled them: rope_theta at the top, rope_scaling with "type"."""
    path = TINY / name / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
