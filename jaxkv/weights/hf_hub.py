"""Repositories of the Hugging Face hub, through its own cache."""

from __future__ import annotations

import errno
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxkv.core.errors import ModelLoadError

_WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
)
_UNWANTED = ("*/*", "consolidated*")


def fetch_hub_repo(repo_id: str, revision: str | None, cache_dir: Path | None) -> Path:
    """The directory of the repository's snapshot: the cached one where the hub cannot be reached.

    cache_dir: of the hub's files; None = where huggingface_hub keeps them. Raises ModelLoadError with one line.
    """
    name = repo_id if revision is None else f"{repo_id} at revision {revision}"
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=list(_WANTED),
                ignore_patterns=list(_UNWANTED),
            )
        )
    except GatedRepoError as error:
        raise ModelLoadError(f"{name} is gated: accept its terms on the hub and log in with `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{repo_id} has no revision {revision} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"{repo_id} does not exist on the hub, or needs a login with `hf auth login`") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{name} is not cached, and the hub cannot be reached (or HF_HUB_OFFLINE is set): check the network, or "
            "pass a local directory or .gguf file"
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(f"{repo_id!r} is not a valid repository id") from error
    except OSError as error:
        why = "the disk is full" if error.errno == errno.ENOSPC else _first_line(error)
        raise ModelLoadError(f"{name} could not be fetched: {why}") from error
    except Exception as error:  # errors of the transport below the hub's client, which differ from version to version
        raise ModelLoadError(f"{name} could not be fetched: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
