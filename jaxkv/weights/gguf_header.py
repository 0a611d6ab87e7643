"""The header of a GGUF file: metadata and the table of tensors, every length checked against the file's size."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxkv.core.errors import ModelLoadError

_SUPPORTED_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """shape: row-major, [out, in]; row_bytes: stored bytes of one row (last axis); start: offset in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata values are int, float, bool, str, or a list of one of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Reads metadata and tensor table. Raises ModelLoadError that says where a truncated or corrupt file goes wrong."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(path, data))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist") from None
    except ValueError as error:  # mmap refuses an empty file
        raise ModelLoadError(f"{path} is not a GGUF file: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error


class _Cursor:
    """Reads little-endian values one after the other; `item` names what is being read, for errors."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size = path, data, len(data)
        self.at = 0
        self.item = "the header"

    def fail(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {self.item} {why}: the file is truncated or corrupt, fetch it again")

    def skip(self, count: int) -> int:
        """Moves over `count` bytes and returns where they start."""
        start = self.at
        if count > self.size - start:
            raise self.fail(f"goes to byte {start + count}, the file has {self.size}")
        self.at = start + count
        return start

    def scalar(self, layout: str) -> Any:
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"is not valid UTF-8 ({error.reason})") from error

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            if count * 8 > self.size - self.at:
                raise self.fail(f"announces {count} strings, more than the file can hold")
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self.fail(f"is an array of value type {kind}, which is not known")
        dtype = np.dtype(_SCALARS[kind])
        start = self.skip(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self.data[start : self.at], dtype).tolist()
        return values

    def value(self) -> Any:
        kind = self.scalar("<I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise self.fail(f"has value type {kind}, which is not known")
        return self.scalar(_SCALARS[kind])


def _parse(cursor: _Cursor) -> GGUFHeader:
    if cursor.data[:4] != b"GGUF":
        raise ModelLoadError(f"{cursor.path} is not a GGUF file: it does not start with 'GGUF'")
    cursor.skip(4)
    version = cursor.scalar("<I")
    if version not in _SUPPORTED_VERSIONS:
        big = ", a big-endian file" if version & 0xFFFF == 0 else ""
        raise ModelLoadError(f"{cursor.path}: GGUF version {version}{big} is not supported, versions 2 and 3 are")
    tensor_count, key_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for index in range(key_count):
        cursor.item = f"metadata entry {index}"
        key = cursor.string()
        cursor.item = f"metadata key {key}"
        if key in metadata:
            raise cursor.fail("stands twice")
        metadata[key] = cursor.value()
    entries: dict[str, GGUFTensor] = {}
    for index in range(tensor_count):
        cursor.item = f"tensor entry {index}"
        entry = _tensor_entry(cursor)
        if entry.name in entries:
            raise cursor.fail("stands twice")
        entries[entry.name] = entry
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"{cursor.path}: general.alignment is {alignment!r}: it must be a positive number")
    base = -(-cursor.at // alignment) * alignment
    tensors = {name: _place(cursor, entry, base) for name, entry in entries.items()}
    return GGUFHeader(cursor.path, metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> GGUFTensor:
    """One row of the table; `start` is still relative to the data section."""
    name = cursor.string()
    cursor.item = f"tensor {name}"
    dimensions = cursor.scalar("<I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.fail(f"has {dimensions} dimensions, 1 to {_MAX_DIMENSIONS} are possible")
    shape = tuple(cursor.scalar("<Q") for _ in range(dimensions))[::-1]
    number = cursor.scalar("<I")
    offset = cursor.scalar("<Q")
    try:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelLoadError(
            f"{cursor.path}: tensor {name} has type {number}, which the gguf package does not know"
        ) from None
    if min(shape) < 1 or shape[-1] % block:
        raise cursor.fail(f"has shape {list(shape)}, whose rows are no whole blocks of {block} ({kind.name})")
    return GGUFTensor(name, shape, kind, offset, shape[-1] // block * block_bytes)


def _place(cursor: _Cursor, entry: GGUFTensor, base: int) -> GGUFTensor:
    cursor.item = f"tensor {entry.name}"
    start = base + entry.start
    end = start + math.prod(entry.shape[:-1]) * entry.row_bytes
    if end > cursor.size:
        raise cursor.fail(f"goes to byte {end}, the file has {cursor.size}")
    return GGUFTensor(entry.name, entry.shape, entry.type, start, entry.row_bytes)
