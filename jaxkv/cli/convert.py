"""`jaxkv convert`: a model that jaxkv can load, written in another format."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxkv.core.errors import JaxkvError
from jaxkv.weights.source import ModelSource

if TYPE_CHECKING:
    from jaxkv.weights.load import Checkpoint

_FORMATS = ("hf",)


def convert(
    model: Annotated[str, typer.Argument(help="Catalog alias, directory, .gguf file or Hugging Face repo id.")],
    to: Annotated[Path, typer.Option("--to", help="The directory to write; it must not exist, or be empty.")],
    format: Annotated[str, typer.Option("--format", help="hf: a Hugging Face directory with bfloat16 weights.")] = "hf",
) -> None:
    """Write MODEL as a Hugging Face directory, which most other engines load."""
    if format not in _FORMATS:
        raise typer.BadParameter(f"--format is {format!r}: it must be one of {', '.join(_FORMATS)}")
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise typer.BadParameter(f"--to is {to}, which exists: name a new or an empty directory")
    from jaxkv.weights.hub import resolve

    write_hf_dir(resolve(model), to)
    print(f"wrote {to}")


def write_hf_dir(source: ModelSource, target: Path) -> None:
    """Writes `source` as the directory `target`, which appears only when it is whole. Raises JaxkvError."""
    from jaxkv.weights.load import open_checkpoint

    checkpoint = open_checkpoint(source)
    work = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        work.mkdir(parents=True)
        try:
            _write(checkpoint, work)
            os.replace(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise JaxkvError(f"cannot write {target}: {error.strerror or error}") from error


def _write(checkpoint: Checkpoint, directory: Path) -> None:
    from jaxkv.text.hf_tokenizer_writer import copy_hf_tokenizer, write_hf_tokenizer
    from jaxkv.text.tokenizer import Tokenizer
    from jaxkv.weights.hf_writer import write_hf_model

    data = checkpoint.tokenizer_data
    if data is None:
        copy_hf_tokenizer(checkpoint.source.path, directory)
        write_hf_model(checkpoint, directory, bos_id=None, eos_ids=checkpoint.eos_ids)
        return
    tokenizer = Tokenizer.from_gguf_metadata(data)
    write_hf_tokenizer(data, directory, max_length=checkpoint.config.max_position)
    eos_ids = tuple(dict.fromkeys((*checkpoint.eos_ids, *tokenizer.eos_ids)))
    write_hf_model(checkpoint, directory, bos_id=tokenizer.bos_id, eos_ids=eos_ids)
