"""Writes a tiny checkpoint as GGUF, the way llama.cpp's converter does, so that its reader can be tested."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{HF_TO_GGUF[rest]}.weight"
    return f"{HF_TO_GGUF[stem]}.weight"


def interleaved(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head reordered so that the two of a rotated pair are neighbours."""
    order = [i // 2 + (i % 2) * (head_dim // 2) for i in range(head_dim)]
    heads = [weight[start : start + head_dim][order] for start in range(0, len(weight), head_dim)]
    return np.concatenate(heads)


def to_gguf_tensors(tensors: dict[str, np.ndarray], head_dim: int) -> dict[str, np.ndarray]:
    """Hugging Face's tensors -> GGUF's names, order and float32."""
    result = {}
    for name, tensor in tensors.items():
        values = tensor.astype(np.float32)
        rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
        result[gguf_name(name)] = interleaved(values, head_dim) if rotated else values
    return result


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that a converter writes for a config.json, and a tokenizer of the right size."""
    return {
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
        "general.name": "tiny",
        "somebody.else": [1, 2, 3],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config["vocab_size"])],
        "tokenizer.ggml.token_type": [1] * config["vocab_size"],
        "tokenizer.ggml.merges": ["t 1", "t 2"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }


def llama3_factors(head_dim: int, theta: float, factor: float, original: int) -> np.ndarray:
    """The tensor rope_freqs.weight of a Llama 3.1 file (low_freq_factor 1, high_freq_factor 4)."""
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
) -> None:
    """Matrices are stored as `kind`, vectors as float32. A value of None leaves the key out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add(writer, key, value)
    for name, tensor in tensors.items():
        stored = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_gguf(
    path: Path,
    checkpoint: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    add: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> None:
    """A tiny checkpoint as one GGUF file. add: tensors in place of its own; changes: metadata keys."""
    tensors = {key: value for file in checkpoint.glob("*.safetensors") for key, value in load_file(file).items()}
    config = json.loads((checkpoint / "config.json").read_text())
    converted = to_gguf_tensors(tensors, config["head_dim"])
    write_gguf(path, metadata_of(config) | changes, converted | (add or {}), kind)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
