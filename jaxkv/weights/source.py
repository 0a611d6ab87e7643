"""Where a model lies on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelSource:
    """kind: "hf_dir" (`path` is a directory with config.json) or "gguf" (one file); name: what the user asked for."""

    kind: Literal["hf_dir", "gguf"]
    path: Path
    name: str
