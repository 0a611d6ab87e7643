"""Which devices and compilers each backend takes, and what it says of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from pallas_kernels import backends, cuda_compiler
from pallas_kernels.backends import best_for, check_device, why_not_fp8
from pallas_kernels.quantized_matmul import api as quantized_matmul
from pallas_kernels.ragged_paged_attention.api import prepare

HOPPER = ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H20", "NVIDIA GH200 480GB"]
OTHERS = ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA L40S"]


@pytest.mark.parametrize("kind", HOPPER)
def test_hopper_gets_the_kernels(kind: str) -> None:
    assert best_for("gpu", kind)[0] == "mosaic_gpu"
    check_device("mosaic_gpu", "gpu", kind)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_gpus_get_xla_and_a_reason(kind: str) -> None:
    backend, reason = best_for("gpu", kind)
    assert backend == "reference"
    assert kind in reason
    assert "int8" in reason
    with pytest.raises(ValueError, match=f"Hopper chip.*{kind}.*reference"):
        check_device("mosaic_gpu", "gpu", kind)


def test_platforms() -> None:
    check_device("reference", "gpu", "NVIDIA B200")
    with pytest.raises(ValueError, match="runs on gpu devices, but this is a cpu"):
        check_device("mosaic_gpu", "cpu", "cpu")


@pytest.mark.parametrize(("capability", "emulated"), [("8.0", True), ("8.6", True), ("8.9", False), ("9.0", False)])
def test_fp8_before_its_hardware(capability: str, emulated: bool) -> None:
    assert (why_not_fp8("gpu", capability) is not None) == emulated
    assert why_not_fp8("cpu", "") is None


@pytest.mark.parametrize("kind", [*OTHERS, "TPU v5 lite"])
def test_the_matmul_refuses_other_chips(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "current_device_kind", lambda: kind)
    with pytest.raises(ValueError, match=f"Hopper chip.*{kind}"):
        quantized_matmul.check_supported("mosaic_gpu", "int8", out_features=64, in_features=64)


@pytest.mark.parametrize(
    ("version", "wrong"),
    [("12.6.85", False), ("12.8.93", True), ("12.9.41", True), ("12.9.86", False), ("13.0.88", False)],
)
def test_compilers_that_are_wrong(version: str, wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n")
    ptxas.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert cuda_compiler.find_ptxas() == ptxas
    if wrong:
        with pytest.raises(cuda_compiler.CudaCompilerError, match=f"V{version}.*nvidia-cuda-nvcc-cu12"):
            prepare("mosaic_gpu")
    else:
        prepare("mosaic_gpu")


def test_on_a_gpu_without_a_compiler_the_engine_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compiler, "find_ptxas", lambda: None)
    prepare("mosaic_gpu")  # on a CPU it is interpreted
    monkeypatch.setattr(cuda_compiler.jax, "default_backend", lambda: "gpu")
    with pytest.raises(cuda_compiler.CudaCompilerError, match=r"no ptxas was found.*nvidia-cuda-nvcc-cu12"):
        prepare("mosaic_gpu")
