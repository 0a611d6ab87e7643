"""From what a user calls a model to where it lies on disk, fetching it first if need be."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from jaxkv.core.errors import ModelLoadError
from jaxkv.weights.catalog import CATALOG
from jaxkv.weights.catalog_fetch import fetch_catalog_model
from jaxkv.weights.hf_hub import fetch_hub_repo
from jaxkv.weights.source import ModelSource

_REPO_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def resolve(name: str, revision: str | None = None, *, cache_dir: Path | None = None) -> ModelSource:
    """Finds a model, in this order: a catalog alias, an existing path, a repository of the Hugging Face hub.

    name: alias, directory with config.json, .gguf file, or "owner/name". revision: of a hub repository only.
    cache_dir: where fetched models are kept; None = the user's cache directory, and the hub's own.
    Raises ModelLoadError with one line that says what to do.
    """
    path = Path(os.path.expanduser(name))
    entry = CATALOG.get(name)
    exists = bool(name) and os.path.exists(path)  # unlike Path.exists, False for names that the system cannot take
    if (entry or exists) and revision is not None:
        raise ModelLoadError(
            f"revision {revision!r} was given, but only hub repositories have revisions: {name} is none"
        )
    if entry is not None:
        return ModelSource("gguf", fetch_catalog_model(entry, cache_dir), name)
    if exists:
        return _local(path, name)
    if path.suffix != ".gguf" and not name.startswith((".", "/", "~")) and _REPO_ID.fullmatch(name):
        return ModelSource("hf_dir", fetch_hub_repo(name, revision, cache_dir and cache_dir / "hub"), name)
    raise ModelLoadError(_unknown(name))


def _local(path: Path, name: str) -> ModelSource:
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource("hf_dir", path, name)
        files = sorted(path.glob("*.gguf"))
        hint = f"; it holds {files[0].name}: pass that file" if files else ""
        raise ModelLoadError(f"{path} has no config.json, so it is not a model directory{hint}")
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path} is a file, but not a .gguf: pass a .gguf file or the directory of a model")
    return ModelSource("gguf", path, name)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, CATALOG, n=1, cutoff=0.5)
    meant = f" Did you mean {close[0]}?" if close else ""
    return (
        f"no model {name!r}: it is neither a path that exists, nor a catalog alias ({', '.join(CATALOG)}), nor a hub "
        f'repository "owner/name".{meant}'
    )
