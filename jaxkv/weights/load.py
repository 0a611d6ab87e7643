"""A model on disk -> its configuration, its host weights in canonical form, and what else serving needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxkv.core.config import Quantization
from jaxkv.core.tokenizer_data import TokenizerData
from jaxkv.models.config import ModelConfig
from jaxkv.models.params import Params
from jaxkv.weights.canonical import build_params
from jaxkv.weights.gguf_config import gguf_model_config
from jaxkv.weights.gguf_header import read_gguf_header
from jaxkv.weights.gguf_tensors import GGUFTensors
from jaxkv.weights.gguf_tokenizer import gguf_tokenizer_data
from jaxkv.weights.hf_config import hf_eos_ids, read_hf_config
from jaxkv.weights.json_file import read_json
from jaxkv.weights.safetensors_dir import SafetensorsDir
from jaxkv.weights.sampling_defaults import GGUF_SPELLING, HF_SPELLING, sampling_defaults
from jaxkv.weights.source import ModelSource
from jaxkv.weights.tensor_reader import TensorReader

WeightDType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, its headers read and checked, its weights not yet.

    reader: of the weights; files: where they lie. tokenizer_data: for GGUF, chat template included; None for an HF directory, whose
    tokenizer lies in `source.path`. generation_config: the model's own defaults, of temperature, top_k, top_p, min_p,
    repetition_penalty those it sets. eos_ids: every token id that ends the model's turn, by these files.
    """

    source: ModelSource
    config: ModelConfig
    reader: TensorReader
    files: tuple[Path, ...]
    tokenizer_data: TokenizerData | None
    generation_config: dict[str, int | float]
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A Checkpoint whose weights are in memory.

    params: the tree of `jaxkv.models.params.declare_params(config)` as host numpy arrays. The other fields are the Checkpoint's.
    """

    source: ModelSource
    config: ModelConfig
    params: Params
    tokenizer_data: TokenizerData | None
    generation_config: dict[str, int | float]
    eos_ids: tuple[int, ...]
    files: tuple[Path, ...]


def read_config(source: ModelSource) -> ModelConfig:
    """The configuration alone, without reading weights. Raises ModelLoadError."""
    if source.kind == "gguf":
        return gguf_model_config(read_gguf_header(source.path))
    return read_hf_config(source.path)


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Everything but the weights. Raises ModelLoadError that names the file and the key at fault."""
    return _open_gguf(source) if source.kind == "gguf" else _open_hf_dir(source)


def load_model(source: ModelSource, dtype: WeightDType, quantization: Quantization | None = None) -> LoadedModel:
    """Loads the whole model into host memory, weights in `dtype`, or int8, norms in float32.

    Beside the result it holds one piece of one tensor at a time. Raises ModelLoadError that names the file and the key
    or tensor at fault.
    """
    opened = open_checkpoint(source)
    return LoadedModel(
        source=source,
        config=opened.config,
        params=build_params(opened.config, opened.reader, dtype, quantization),
        tokenizer_data=opened.tokenizer_data,
        generation_config=opened.generation_config,
        eos_ids=opened.eos_ids,
        files=opened.files,
    )


def _open_gguf(source: ModelSource) -> Checkpoint:
    header = read_gguf_header(source.path)
    config = gguf_model_config(header)
    tokenizer = gguf_tokenizer_data(header)
    reader = GGUFTensors(header, config)
    ends = (tokenizer.eos_id, tokenizer.eot_id, tokenizer.eom_id)
    return Checkpoint(
        source=source,
        config=config,
        reader=reader,
        files=reader.files,
        tokenizer_data=tokenizer,
        generation_config=sampling_defaults(header.metadata, str(header.path), GGUF_SPELLING),
        eos_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
    )


def _open_hf_dir(source: ModelSource) -> Checkpoint:
    config = read_hf_config(source.path)
    generation_path = source.path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    reader = SafetensorsDir(source.path)
    return Checkpoint(
        source=source,
        config=config,
        reader=reader,
        files=reader.files,
        tokenizer_data=None,
        generation_config=sampling_defaults(generation, str(generation_path), HF_SPELLING),
        eos_ids=hf_eos_ids(generation, read_json(source.path / "config.json")),
    )
