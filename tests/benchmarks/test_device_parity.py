"""The parity part of the device check: right kernels pass, and each planted mistake is seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import device_parity
from benchmarks.device_cases import LAYER, Case, parity_cases
from pallas_kernels.backends import Backend
from pallas_kernels.kv_layout import KVPages

CASES = {(case.op, case.name): case for case in parity_cases()}
right = device_parity.kernel
Mistake = Callable[[Callable[..., Any], tuple[Any, ...]], Any]


def find(op: str, name: str) -> Case:
    """A parity case, with a small head and short sequences: compiling is what takes time here."""
    case = CASES[op, name]
    return dataclasses.replace(
        case, lens=case.lens and ((1, 40), (20, 33), (1, 16)), shape=dataclasses.replace(case.shape, inputs=256, outputs=128)
    )  # fmt: skip


def check(case: Case, backend: Backend, monkeypatch: pytest.MonkeyPatch, mistake: Mistake | None = None) -> Any:
    """Of plain XLA on the pool of `backend`, with a mistake."""

    def planted(case: Case, layout: Any, used: str) -> Callable[..., Any]:
        exact = right(case, layout, "reference")
        if used == "reference" or mistake is None:
            return exact
        return lambda *args: mistake(exact, args)

    monkeypatch.setattr(device_parity, "kernel", planted)
    return device_parity.check(case, backend)


RIGHT = [
    ("ragged_paged_attention", "bfloat16 D128", "mosaic_gpu"),
    ("ragged_paged_attention", "int8 D64", "mosaic_tpu"),
    ("ragged_paged_attention", "window, cap, sinks", "mosaic_gpu"),
    ("kv_write", "bfloat16", "mosaic_gpu"),
    ("kv_write", "int8", "mosaic_tpu"),
    ("kv_write", "float8_e4m3fn", "mosaic_gpu"),
    ("page_copy", "bfloat16", "mosaic_tpu"),
    ("page_copy", "float8_e4m3fn", "mosaic_gpu"),
    ("flash_attention", "window, cap, sinks", "mosaic_gpu"),
    ("quantized_matmul", "int4", "mosaic_tpu"),
]


@pytest.mark.parametrize(("op", "name", "backend"), RIGHT)
def test_plain_xla_passes(op: str, name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    row = check(find(op, name), backend, monkeypatch)
    assert row["passed"], row
    assert row["error"] < row["limit"] / 2
    assert row["unseen"] == []


def _of_scales(change: Callable[[jax.Array], jax.Array]) -> Mistake:
    return lambda run, args: run(*(KVPages(a.pages, change(a.scales)) if isinstance(a, KVPages) else a for a in args))


def _only_keys(change: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda scales: scales.at[:, :, 0].set(change(scales)[:, :, 0])


def _instead(at: int, value: Any) -> Mistake:
    """Another argument than was given."""
    return lambda run, args: run(*args[:at], value(args[at]), *args[at + 1 :])


def _pool(change: Callable[[KVPages, KVPages], KVPages]) -> Mistake:
    """Another pool than is right, from that before and that after."""
    return lambda run, args: change(args[0], run(*args))


def _sound(scales: jax.Array) -> jax.Array:
    """Scales without the poison, which alone would show."""
    return jnp.where(jnp.isnan(scales), 2.0**-6, scales)


MISTAKES: dict[str, tuple[str, str, Backend, Mistake]] = {
    "scales reversed over pages": (
        "ragged_paged_attention", "int8 D64", "mosaic_gpu", _of_scales(lambda s: _sound(s)[:, ::-1])),
    "scales of keys rolled over pages": (
        "ragged_paged_attention", "int8 D64", "mosaic_gpu", _of_scales(_only_keys(lambda s: jnp.roll(_sound(s), 1, 1)))),
    "scales rolled over tokens": (
        "ragged_paged_attention", "int8 D64", "mosaic_gpu", _of_scales(lambda s: jnp.roll(_sound(s), 1, -1))),
    "scales of TPU pages reversed": (
        "ragged_paged_attention", "int8 D64", "mosaic_tpu", _of_scales(lambda s: _sound(s)[:, ::-1])),
    "another layer": ("ragged_paged_attention", "bfloat16 D128", "mosaic_gpu", _instead(3, lambda _: jnp.int32(0))),
    "a key too many": ("ragged_paged_attention", "bfloat16 D128", "mosaic_gpu", _instead(6, lambda lens: lens + 1)),
    "one key forgotten": (
        "ragged_paged_attention", "bfloat16 D128", "mosaic_gpu", _instead(6, lambda lens: lens.at[0].add(-1))),
    "a query late": (
        "ragged_paged_attention", "bfloat16 D128", "mosaic_gpu", lambda run, args: jnp.roll(run(*args), 1, 0)),
    "no sinks": ("ragged_paged_attention", "window, cap, sinks", "mosaic_gpu", _instead(2, jnp.zeros_like)),
    "NaN in padding": (
        "ragged_paged_attention", "bfloat16 D128", "mosaic_gpu", lambda run, args: run(*args).at[-1].set(jnp.nan)),
    "nothing written": ("kv_write", "bfloat16", "mosaic_gpu", _pool(lambda old, _: old)),
    "nothing written on TPU": ("kv_write", "int8", "mosaic_tpu", _pool(lambda old, _: old)),
    "scales not stored": ("kv_write", "int8", "mosaic_gpu", _pool(lambda old, new: KVPages(new.pages, old.scales))),
    "TPU scales not stored": ("kv_write", "int8", "mosaic_tpu", _pool(lambda old, new: KVPages(new.pages, old.scales))),
    "numbers not stored": ("kv_write", "int8", "mosaic_gpu", _pool(lambda old, new: KVPages(old.pages, new.scales))),
    "one token not written": (
        "kv_write", "bfloat16", "mosaic_gpu", _instead(4, lambda pages: pages.at[3].set(pages[-1]))),
    "written to another layer": ("kv_write", "bfloat16", "mosaic_gpu", _instead(1, lambda _: jnp.int32(0))),
    "one number more written": (
        "kv_write", "bfloat16", "mosaic_gpu",
        _pool(lambda _, new: KVPages(new.pages.at[0, -1, 0, 0, 0, 0].set(9)))),
    "one scale more written": (
        "kv_write", "int8", "mosaic_gpu",
        _pool(lambda _, new: KVPages(new.pages, new.scales.at[LAYER - 1].add(1e-6)))),
    "nothing copied": ("page_copy", "bfloat16", "mosaic_gpu", _pool(lambda old, _: old)),
    "scales not copied": ("page_copy", "float8_e4m3fn", "mosaic_gpu", _pool(lambda old, new: KVPages(new.pages, old.scales))),
    "scales of TPU pages not copied": (
        "page_copy", "float8_e4m3fn", "mosaic_tpu", _pool(lambda old, new: KVPages(new.pages, old.scales))),
    "one layer copied": ("page_copy", "bfloat16", "mosaic_gpu", _pool(lambda old, new: KVPages(new.pages.at[0].set(old.pages[0])))),
    "the trash page written": (
        "page_copy", "bfloat16", "mosaic_gpu", _pool(lambda _, new: KVPages(new.pages.at[:, -1].set(new.pages[:, 0])))),
    "outputs too large": ("quantized_matmul", "int4", "mosaic_gpu", lambda run, args: run(*args) * 1.1),
    "scales of other rows": (
        "quantized_matmul", "int8", "mosaic_gpu",
        lambda run, args: run(args[0], args[1].replace(scales=args[1].scales[:, ::-1]), args[2])),
    "no zero points": (
        "quantized_matmul", "int4", "mosaic_gpu",
        lambda run, args: run(args[0], args[1].replace(zero_points=args[1].zero_points + 1), args[2])),
    "a longer context": ("flash_attention", "window, cap, sinks", "mosaic_gpu", _instead(5, lambda lens: lens - 1)),
    "padding not zero": ("flash_attention", "window, cap, sinks", "mosaic_gpu", lambda run, args: run(*args).at[0, -1].set(1e-3)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, name, backend, planted = MISTAKES[mistake]
    row = check(find(op, name), backend, monkeypatch, planted)
    assert not row["passed"], row


@pytest.mark.parametrize(
    ("op", "name", "unseen"),
    [
        ("flash_attention", "D128", ["one vector too large"]),
        ("page_copy", "bfloat16", ["one number wrong"]),
        ("kv_write", "int8", ["one number wrong", "nothing written"]),
    ],
)
def test_a_comparison_that_sees_nothing_fails(
    op: str, name: str, unseen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right kernels, compared by something that calls every output right."""
    monkeypatch.setattr(device_parity, "_compare", lambda *_: (0.0, 0))
    row = check(find(op, name), "mosaic_gpu", monkeypatch)
    assert row["unseen"] == unseen
    assert not row["passed"]


def test_batches_are_ragged_and_poisoned() -> None:
    case = CASES["ragged_paged_attention", "bfloat16 D128"]
    layout = device_parity.layout_of(case.shape, "mosaic_gpu")
    _, kv, _, layer, table, cu_q_lens, kv_lens, num_seqs = device_parity.INPUTS[case.op](case, layout)
    q_lens = np.diff(cu_q_lens)[:num_seqs]
    assert layer == LAYER
    assert (q_lens == 1).any()
    assert (q_lens > 64).any()
    assert len(set(kv_lens.tolist())) > 4
    real = np.arange(table.shape[1]) < -(-kv_lens[:num_seqs, None] // layout.page_size)
    spare = table[:num_seqs][~real]
    assert {-1, 2**30} <= set(spare.tolist())
    assert len(set(table[:num_seqs][real].tolist())) == real.sum()
    unused = np.setdiff1d(np.arange(kv.pages.shape[1]), table[:num_seqs][real])
    numbers = np.asarray(kv.pages, np.float32)
    assert len(unused) == 3
    assert np.isnan(numbers[:, unused]).all()
    assert np.isnan(numbers[1 - LAYER]).all()
    assert np.isfinite(numbers[LAYER]).any()
    assert {case.shape.head_dim for case in CASES.values() if case.lens} == {64, 128, 256}


def test_scales_are_of_several_sizes() -> None:
    for op in ("ragged_paged_attention", "page_copy"):
        name = "int8 D64" if op == "ragged_paged_attention" else "int8"
        layout = device_parity.layout_of(CASES[op, name].shape, "mosaic_tpu")
        kv = next(a for a in device_parity.INPUTS[op](CASES[op, name], layout) if isinstance(a, KVPages))
        scales = np.unique(np.asarray(kv.scales)[np.isfinite(kv.scales)])
        assert len(scales) > 3
