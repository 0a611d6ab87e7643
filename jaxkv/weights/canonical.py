"""Builds the canonical parameter tree from a checkpoint, tensor by tensor, into arrays that are allocated once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxkv.core.errors import ModelLoadError
from jaxkv.models.config import ModelConfig
from jaxkv.models.params import Params, ParamSpec, declare_params
from jaxkv.weights.tensor_reader import FloatArray, TensorReader
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, quantize

_CHUNK_ELEMENTS = 16 * 2**20
"""A tensor is read in pieces of about this many elements: 64 MiB of float32 is all that is held beside the result."""

_EMBED = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
_DERIVED = ".rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies, which the configuration gives."""

_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor of the checkpoint and its place in the tree: `target` is the same data with the first axis split."""

    name: str
    shape: tuple[int, ...]
    target: NDArray[Any] | QuantizedWeight


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """name, shape: Hugging Face's; chunks: its rows in order, heads in Hugging Face's order, checked to be finite."""

    name: str
    shape: tuple[int, ...]
    chunks: Iterator[FloatArray]


def build_params(config: ModelConfig, reader: TensorReader, dtype: str, quantization: str | None = None) -> Params:
    """The host tree (numpy) of `declare_params(config)`: norms in float32, everything else in `dtype`.

    dtype: "float32" or "bfloat16". quantization: "int8" makes everything but norms QuantizedWeights, chunk by chunk while reading,
    one scale per output. Raises ModelLoadError that names a tensor which is missing, left over or of a wrong
    shape (before any is read), or not finite.
    """
    specs = declare_params(config)
    try:
        _check_accounted(config, reader, _tree(specs, _stand_in))
        params = _tree(specs, lambda spec: _allocate(spec, dtype, quantization))
    except (MemoryError, ValueError) as error:  # numpy's words for "too large"
        raise ModelLoadError(f"{reader.where}: the weights in {dtype} do not fit in memory: {error}") from error
    for slot in _slots(config, params):
        _fill(slot, reader)
    return params


def checkpoint_tensors(config: ModelConfig, reader: TensorReader) -> list[CheckpointTensor]:
    """Every tensor that the model has, in the order of its layers; each is read when its chunks are asked for.

    Raises ModelLoadError as `build_params` does: for what is missing, left over or of a wrong shape at once.
    """
    stand_ins = _tree(declare_params(config), _stand_in)
    _check_accounted(config, reader, stand_ins)
    return [
        CheckpointTensor(slot.name, slot.shape, (values for _, values in _chunks(slot, reader)))
        for slot in _slots(config, stand_ins)
    ]


def _tree(specs: dict[str, Any], make: Callable[[ParamSpec], Any]) -> Params:
    return {name: _tree(spec, make) if isinstance(spec, dict) else make(spec) for name, spec in specs.items()}


def _allocate(spec: ParamSpec, dtype: str, quantization: str | None) -> Any:
    if spec.norm or quantization is None:
        return np.empty(spec.shape, np.float32 if spec.norm else _DTYPES[dtype])
    values: Any = np.empty(spec.shape, np.int8)
    scales: Any = np.empty(spec.shape[: len(spec.shape) - spec.inputs], np.float32)
    return QuantizedWeight(values, scales, kind="int8", rotated=True)


def _part(weight: Any, *at: Any) -> Any:
    """A view of a weight, quantized or not."""
    return jax.tree.map(lambda array: array[at], weight)


def _stand_in(spec: ParamSpec) -> NDArray[Any]:
    """An array of the right shape and no memory, so that a configuration is checked before anything is allocated for it."""
    return np.broadcast_to(np.zeros((), np.int8), spec.shape)


def _slots(config: ModelConfig, params: Params) -> Iterator[_Slot]:
    E, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    K, G, D = config.num_kv_heads, config.group_size, config.head_dim
    layers = params["layers"]
    yield _Slot(_EMBED, (V, E), params["embed"])
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        yield _Slot(prefix + "input_layernorm.weight", (E,), layers["attn_norm"][i])
        yield _Slot(prefix + "self_attn.q_proj.weight", (K * G * D, E), _part(layers["qkv"], i, slice(None), slice(G)))
        yield _Slot(prefix + "self_attn.k_proj.weight", (K * D, E), _part(layers["qkv"], i, slice(None), G))
        yield _Slot(prefix + "self_attn.v_proj.weight", (K * D, E), _part(layers["qkv"], i, slice(None), G + 1))
        yield _Slot(prefix + "self_attn.o_proj.weight", (E, K * G * D), _part(layers["o"], i))
        yield _Slot(prefix + "post_attention_layernorm.weight", (E,), layers["mlp_norm"][i])
        yield _Slot(prefix + "mlp.gate_proj.weight", (F, E), _part(layers["gate_up"], i, 0))
        yield _Slot(prefix + "mlp.up_proj.weight", (F, E), _part(layers["gate_up"], i, 1))
        yield _Slot(prefix + "mlp.down_proj.weight", (E, F), _part(layers["down"], i))
    yield _Slot("model.norm.weight", (E,), params["final_norm"])
    if not config.tie_embeddings:
        yield _Slot(_LM_HEAD, (V, E), params["lm_head"])


def _check_accounted(config: ModelConfig, reader: TensorReader, stand_ins: Params) -> None:
    shapes = reader.shapes
    missing = (slot.name for slot in _slots(config, stand_ins) if slot.name not in shapes)
    if first := [reader.spelled(name) for name in itertools.islice(missing, 3)]:
        raise ModelLoadError(f"{reader.where} lacks {_listed(first)}")
    needed = {slot.name: slot.shape for slot in _slots(config, stand_ins)}
    unread = [name for name in shapes if name not in needed and not name.endswith(_DERIVED)]
    if config.tie_embeddings and _LM_HEAD in unread:
        _check_same(reader, _LM_HEAD, _EMBED)
        unread.remove(_LM_HEAD)
    if unread:
        names = _listed([reader.spelled(name) for name in unread])
        raise ModelLoadError(f"{reader.where} has {names}, which this architecture does not use")
    for name, shape in needed.items():
        if shapes[name] != shape:
            raise ModelLoadError(
                f"{reader.where}: tensor {reader.spelled(name)} has shape {list(shapes[name])}, the configuration asks "
                f"for {list(shape)}"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"tensor{'s' if len(names) > 1 else ''} {shown}"


def _check_same(reader: TensorReader, name: str, other: str) -> None:
    """Some tied checkpoints carry the table twice; two different tables are a contradiction."""
    rows, *rest = reader.shapes[name]
    step = max(1, _CHUNK_ELEMENTS // math.prod(rest))
    same = reader.shapes[name] == reader.shapes[other] and all(
        np.array_equal(reader.read(name, at, min(at + step, rows)), reader.read(other, at, min(at + step, rows)))
        for at in range(0, rows, step)
    )
    if not same:
        raise ModelLoadError(
            f"{reader.where}: tie_word_embeddings is true, but {reader.spelled(name)} differs from "
            f"{reader.spelled(other)}: set it to false in config.json"
        )


def _fill(slot: _Slot, reader: TensorReader) -> None:
    for part, values in _chunks(slot, reader):
        _store(_part(slot.target, part), values)


def _chunks(slot: _Slot, reader: TensorReader) -> Iterator[tuple[slice, FloatArray]]:
    """Pieces along the target's first axis, so that one of query or key rows always holds whole heads."""
    steps = jax.tree.leaves(slot.target)[0].shape[0]
    rows = slot.shape[0] // steps
    chunk = max(1, _CHUNK_ELEMENTS * steps // math.prod(slot.shape))
    for start in range(0, steps, chunk):
        stop = min(start + chunk, steps)
        values = reader.read(slot.name, start * rows, stop * rows)
        if not _all_finite(values):
            raise ModelLoadError(f"{reader.where}: tensor {reader.spelled(slot.name)} holds NaN or infinity")
        yield slice(start, stop), values


def _store(target: Any, values: FloatArray) -> None:
    """Copies rows into a part of the tree, quantizing them on the way where it is quantized."""
    if isinstance(target, QuantizedWeight):
        quantized = quantize(values.reshape(math.prod(target.scales.shape), -1), "int8", rotated=True)
        target.values[...] = quantized.values.reshape(target.values.shape)
        target.scales[...] = quantized.scales.reshape(target.scales.shape)
    else:
        target[...] = values.reshape(target.shape)


def _all_finite(values: FloatArray) -> bool:
    """NaN and infinity show in the extremes, so no array of flags is needed; bfloat16 goes by its exponent bits."""
    if values.dtype == ml_dtypes.bfloat16:
        return int((values.view(np.uint16) & 0x7F80).max()) < 0x7F80
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))
