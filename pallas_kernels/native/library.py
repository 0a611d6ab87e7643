"""The native library of this project: one shared object with the CPU kernels of all ops, called through XLA's FFI."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import jax
import jaxlib.version
from platformdirs import user_cache_dir

from pallas_kernels.native.build import NativeBuildError, Source, build

TARGETS = (
    "jaxkv_ragged_paged_attention",
    "jaxkv_kv_write",
    "jaxkv_kv_write_scaled",
    "jaxkv_int8_matmul",
    "jaxkv_dense_matmul",
    "jaxkv_gated_mlp",
    "jaxkv_gated_mlp_int8",
    "jaxkv_pack_weight",
)
OPS = ("ragged_paged_attention", "kv_write", "quantized_matmul", "dense_matmul", "gated_mlp", "packed_weight")
"""The folders of ops that have a `cpu_native.cc`."""

_KERNELS = Path(__file__).resolve().parent.parent
_lock = threading.Lock()
_loaded: list[ctypes.CDLL] = []


def source() -> Source:
    """The sources of the library; every header beside a compiled file, or in this folder, counts."""
    units = tuple(_KERNELS / op / "cpu_native.cc" for op in OPS)
    folders = (Path(__file__).resolve().parent, *(unit.parent for unit in units))
    headers = tuple(header for folder in folders for header in sorted(folder.glob("*.h")))
    return Source("kernels", units, headers, (jax.ffi.include_dir(),), (f"jaxlib {jaxlib.version.__version__}",))


def default_cache_dir() -> Path:
    return Path(user_cache_dir("jaxkv")) / "native"


def load(cache_dir: Path | None = None) -> None:
    """Builds the library if need be (seconds, once for a machine) and registers its FFI targets, once for a process.

    Raises NativeBuildError.
    """
    with _lock:
        if _loaded:
            return
        path = build(source(), cache_dir or default_cache_dir())
        try:
            library = ctypes.CDLL(str(path))
            handlers = [getattr(library, target) for target in TARGETS]
        except (OSError, AttributeError) as error:
            raise NativeBuildError(f"the library {path} cannot be loaded: {error}") from error
        for target, handler in zip(TARGETS, handlers, strict=True):
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
        _loaded.append(library)
