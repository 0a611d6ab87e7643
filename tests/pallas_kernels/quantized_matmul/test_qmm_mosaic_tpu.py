"""What only the TPU kernel has: copies done at once, a chip without int8, and how inputs are cut into blocks."""

import dataclasses
from typing import Any

import pytest
from fixtures.quantized_matmul_cases import SMALL_BLOCKS, Case, check

from pallas_kernels.quantized_matmul import mosaic_tpu
from pallas_kernels.quantized_matmul.api import check_supported
from pallas_kernels.quantized_matmul.weights import KINDS

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(120)]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_done_at_once(kind: Any) -> None:
    check("mosaic_tpu", Case("eager", kind, 40, 256, 512, dtype="float32"), dma="eager")


def test_int8_on_a_chip_without_it() -> None:
    tuning = dataclasses.replace(SMALL_BLOCKS["int8"], native_8bit=False)
    check("mosaic_tpu", Case("widened", "int8", 40, 130, 512), tuning=tuning)


def test_input_blocks() -> None:
    assert mosaic_tpu.input_block(4096, 1024, packed=False) == 1024
    assert mosaic_tpu.input_block(1408, 1024, packed=False) == 128
    assert mosaic_tpu.input_block(1408, 1024, packed=True) == 1408
    assert mosaic_tpu.input_block(576, 1024, packed=False) == 576
    check_supported("mosaic_tpu", "int8", out_features=8, in_features=28672)
    with pytest.raises(ValueError, match=r"cannot cut 11136 inputs of an int4 weight .* above 8192 .* multiple of 256"):
        check_supported("mosaic_tpu", "int4", out_features=8, in_features=11136)
