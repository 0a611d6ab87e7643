"""Tensors of a GGUF file, dequantized, under Hugging Face's names and in its head order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf.quants import dequantize

from jaxkv.core.errors import ModelLoadError
from jaxkv.models.config import ModelConfig
from jaxkv.weights.gguf_header import GGUFHeader, GGUFTensor
from jaxkv.weights.tensor_reader import FloatArray

ROPE_FACTORS = "rope_freqs.weight"
"""Read with the configuration, not as a weight."""

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ROTATED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


class GGUFTensors:
    """A TensorReader over a GGUF file of architecture `llama`."""

    def __init__(self, header: GGUFHeader, config: ModelConfig) -> None:
        self._header, self._head_dim = header, config.head_dim
        self._names = _hf_names(config.num_layers)
        self._file_names = {hf: own for own, hf in self._names.items()}
        self.files: tuple[Path, ...] = (header.path,)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            self._names.get(own, own): tensor.shape for own, tensor in header.tensors.items() if own != ROPE_FACTORS
        }

    @property
    def where(self) -> str:
        return str(self._header.path)

    def spelled(self, name: str) -> str:
        return self._file_names.get(name, name)

    def read(self, name: str, start: int, stop: int) -> FloatArray:
        values = read_rows(self._header, self._header.tensors[self.spelled(name)], start, stop)
        return _rotate_half_order(values, self._head_dim) if name.endswith(_ROTATED) else values


def read_rows(header: GGUFHeader, tensor: GGUFTensor, start: int, stop: int) -> FloatArray:
    """Rows [start, stop) of a tensor's first axis as float32 (elements, for a vector)."""
    if len(tensor.shape) == 1:
        return _dequantize(header, tensor, tensor.start, 1, tensor.row_bytes)[0, start:stop]
    return _dequantize(header, tensor, tensor.start + start * tensor.row_bytes, stop - start, tensor.row_bytes)


def _dequantize(header: GGUFHeader, tensor: GGUFTensor, at: int, rows: int, row_bytes: int) -> FloatArray:
    stored = np.memmap(header.path, np.uint8, "r", offset=at, shape=(rows, row_bytes))
    try:
        with np.errstate(all="ignore"):  # a damaged scale shows as NaN or infinity, which the builder reports by name
            values: FloatArray = dequantize(stored, tensor.type)
    except NotImplementedError:
        raise ModelLoadError(
            f"{header.path}: tensor {tensor.name} is {tensor.type.name}, which the gguf package cannot dequantize"
        ) from None
    return values


def _hf_names(num_layers: int) -> dict[str, str]:
    names = dict(_OUTER)
    for layer in range(num_layers):
        names.update({f"blk.{layer}.{own}": f"model.layers.{layer}.{hf}" for own, hf in _PER_LAYER.items()})
    return names


def _rotate_half_order(rows: FloatArray, head_dim: int) -> FloatArray:
    """Undoes llama-style GGUF's order: there row 2i of a head is dimension i, and row 2i + 1 dimension i + D/2."""
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return heads.swapaxes(1, 2).reshape(rows.shape)
