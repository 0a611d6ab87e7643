"""The inspection command: its floors, its table, and the kernels of every op on absent chips."""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import pytest

from pallas_kernels import inspect
from pallas_kernels.absent_devices import CHIPS, why_unavailable
from pallas_kernels.backends import Backend
from pallas_kernels.inspection import compile_call
from pallas_kernels.inspection.calls import OPS, Shape
from pallas_kernels.inspection.compile_call import Inspection, inspect_call
from pallas_kernels.inspection.nvidia import KernelReport
from pallas_kernels.inspection.tpu_kernels import TPUKernel

SMALL = Shape(num_heads=8, num_kv_heads=2, seqs=4, context=512, tokens=16, outputs=512, inputs=512)


KERNELS = {
    "ragged_paged_attention": {"tpu": "ragged_paged_attention_decode", "gpu": "paged_decode"},
    "flash_attention": {"tpu": "flash_attention", "gpu": "flash_attention"},
    "kv_write": {"tpu": "kv_write", "gpu": "kv_write"},
    "page_copy": {"tpu": "page_copy", "gpu": "page_copy"},
    "quantized_matmul": {"tpu": "quantized_matmul", "gpu": "quantized_matmul"},
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["mosaic_tpu", "mosaic_gpu"])
def test_calls_are_of_their_backends_shapes(op: str, backend: Backend) -> None:
    call = OPS[op](SMALL, backend)
    assert call.bytes > 0
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(call.args))


def test_work_of_the_attention_calls() -> None:
    decode = OPS["ragged_paged_attention"](Shape(), "mosaic_gpu")
    assert decode.flops == 4 * 64 * 2048 * 32 * 128
    assert decode.bytes == 64 * 2048 * 2 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
    whole = OPS["ragged_paged_attention"](Shape(queries=2048), "mosaic_gpu")
    dense = OPS["flash_attention"](Shape(), "mosaic_gpu")
    assert whole.flops == dense.flops == 4 * 64 * 32 * 128 * (2048 * 2049 / 2)


def test_the_floor_is_the_larger_of_bytes_and_flops() -> None:
    def floor(flops: float, moved: float, products: str) -> tuple[float, str]:
        return Inspection("v5e", "kv_write", SMALL, flops=flops, bytes=moved, products=products).floor()

    assert floor(0.0, 819e9, "bfloat16") == (1e6, "bytes")
    assert floor(394e12, 819e9, "bfloat16") == (2e6, "flops")
    assert floor(394e12, 1.0, "int8") == (1e6, "flops")


def test_a_row_for_each_kernel_and_dashes_for_the_unknown() -> None:
    kernel = TPUKernel("copy", vmem_bytes=2**20, spills=0, bundles=7, compiler_cycles=9)
    text = inspect.describe(Inspection("v4", "page_copy", Shape(), bytes=100.0, kernels=(kernel,)))
    assert text.splitlines()[-1].split() == ["copy", "1.0", "0", "7", *"------"]
    failed = inspect.describe(Inspection("v4", "page_copy", Shape(page=4), problem="no"))
    assert failed == "v4 page_copy dtype=bfloat16 page=4\n  does not compile: no"


def test_an_absent_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_call, "why_unavailable", lambda _: "libtpu is not installed")
    with pytest.raises(RuntimeError, match="cannot compile for v5e: libtpu is not installed"):
        inspect_call("v5e", "kv_write", SMALL)


@pytest.mark.aot
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chip", ["v5e", "h100"])
def test_every_op_compiles_and_reports_its_kernels(chip: str) -> None:
    if reason := why_unavailable(chip):
        pytest.skip(reason)
    for op in OPS:
        inspection = inspect_call(chip, op, SMALL)
        assert inspection.problem is None, f"{op}: {inspection.problem}"
        names = {kernel.name for kernel in inspection.kernels}
        assert {name for name in names if name.startswith(KERNELS[op][CHIPS[chip].platform])}, (op, names)
        steady = {kernel.name: kernel.steady for kernel in inspection.kernels if isinstance(kernel, TPUKernel)}
        if op == "ragged_paged_attention" and steady:
            assert steady["ragged_paged_attention_decode"]
        for kernel in inspection.kernels:
            if isinstance(kernel, KernelReport):
                assert kernel.spill_bytes == kernel.stack_bytes == kernel.local_instructions == 0


@pytest.mark.aot
def test_what_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if reason := why_unavailable("h100"):
        pytest.skip(reason)
    monkeypatch.setattr(
        sys, "argv", ["inspect", "--chip", "h100", "--head-dim", "80", "--num-heads", "8", "--seqs", "2"]
    )
    with pytest.raises(SystemExit, match="1"):
        inspect.main()
    assert "does not compile: ValueError: " in capsys.readouterr().out


def test_shapes_travel_to_the_compiling_process() -> None:
    assert Shape(**json.loads(json.dumps(dataclasses.asdict(SMALL)))) == SMALL
