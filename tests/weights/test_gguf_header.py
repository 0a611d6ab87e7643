"""Truncated and corrupt GGUF headers end in one clear error, never in a crash, a hang or a huge allocation."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.core.errors import ModelLoadError
from jaxkv.weights.gguf_header import GGUFHeader, read_gguf_header


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = b"".join(struct.pack("<Q", size) for size in shape)
    return string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def file_of(keys: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def read(path: Path, content: bytes) -> GGUFHeader:
    (path / "x.gguf").write_bytes(content)
    return read_gguf_header(path / "x.gguf")


GOOD = file_of(
    [
        key("a.string", 8, string("hé")),
        key("a.list", 9, struct.pack("<IQ", 8, 2) + string("x") + string("")),
        key("a.numbers", 9, struct.pack("<IQ", 5, 3) + struct.pack("<3i", 1, -2, 3)),
        key("a.flag", 7, b"\x01"),
        key("a.real", 6, struct.pack("<f", 0.5)),
        key("a.big", 10, struct.pack("<Q", 2**40)),
    ],
    [tensor("w", (32, 4), kind=8), tensor("v", (3,), offset=4 * 34 + 24)],
    bytes(4 * 34 + 24 + 12),
)


def test_values_and_places(tmp_path: Path) -> None:
    header = read(tmp_path, GOOD)
    assert header.metadata == {
        "a.string": "hé",
        "a.list": ["x", ""],
        "a.numbers": [1, -2, 3],
        "a.flag": True,
        "a.real": 0.5,
        "a.big": 2**40,
    }
    w, v = header.tensors["w"], header.tensors["v"]
    assert (w.shape, w.type.name, w.row_bytes) == ((4, 32), "Q8_0", 34)
    assert (v.shape, v.type.name, v.row_bytes, v.start - w.start) == ((3,), "F32", 12, 160)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        with pytest.raises(ModelLoadError, match=r"x\.gguf"):
            read(tmp_path, GOOD[:length])


@given(at=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
def test_a_changed_byte_never_crashes(tmp_path_factory: pytest.TempPathFactory, at: int, value: int) -> None:
    damaged = bytearray(GOOD)
    damaged[at] = value
    with contextlib.suppress(ModelLoadError):
        read(tmp_path_factory.getbasetemp(), bytes(damaged))


HUGE = 2**60


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"PK\x03\x04 something else", "does not start with 'GGUF'"),
        (file_of([], [], version=1), "version 1"),
        (file_of([], [], version=0x03000000), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "tensor entry 0"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "metadata entry 0"),
        (file_of([struct.pack("<Q", HUGE)], []), "metadata entry 0"),
        (file_of([key("k", 8, struct.pack("<Q", HUGE))], []), "metadata key k"),
        (file_of([key("k", 9, struct.pack("<IQ", 8, HUGE))], []), "metadata key k"),
        (file_of([key("k", 9, struct.pack("<IQ", 4, HUGE))], []), "metadata key k"),
        (file_of([key("k", 9, struct.pack("<IQ", 9, 1))], []), "metadata key k"),
        (file_of([key("k", 99, b"")], []), "metadata key k"),
        (file_of([key("k", 8, string(b"\xff"))], []), "metadata key k"),
        (file_of([key("k", 7, b"\x00")] * 2, []), "metadata key k stands twice"),
        (file_of([key("general.alignment", 4, struct.pack("<I", 0))], []), "general.alignment is 0"),
        (file_of([], [tensor("w", (4,))] * 2, bytes(16)), "tensor w stands twice"),
        (file_of([], [tensor("w", (HUGE, HUGE))], bytes(16)), "tensor w goes to byte"),
        (file_of([], [tensor("w", (4,), offset=HUGE)], bytes(16)), "tensor w goes to byte"),
        (file_of([], [tensor("w", (33,), kind=8)], bytes(64)), "tensor w has shape"),
        (file_of([], [tensor("w", (0, 4))], bytes(64)), "tensor w has shape"),
        (file_of([], [tensor("w", ())], bytes(64)), "tensor w has 0 dimensions"),
        (file_of([], [tensor("w", (4,), kind=999)], bytes(64)), "tensor w has type 999"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, named: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, content)
    assert named in str(caught.value)
    assert "x.gguf" in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        read_gguf_header(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_gguf_header(tmp_path)
