"""The decode kernel stays under its own copies: static rooflines of the Llama-3-8B shape, against fixed bounds."""

import pytest
from fixtures.tpu_ahead_of_time import needs_libtpu

from pallas_kernels.inspection.tpu import Shape, inspect_decode

pytestmark = [pytest.mark.aot, pytest.mark.slow, needs_libtpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("shape", "bound", "bytes_per_token"),
    [
        (Shape("v5e", 128, "bfloat16"), 0.45, 4096),
        (Shape("v5e", 16, "bfloat16"), 0.52, 4096),
        (Shape("v5e", 128, "float8_e4m3fn", "static"), 0.9, 2048),
        (Shape("v5e", 32, "float8_e4m3fn", "static"), 1.0, 2048),
        (Shape("v5e", 128, "int8", "static"), 0.9, 2048),
        (Shape("v5e", 128, "int8", "token"), 0.9, 2048 + 64),
        (Shape("v5e", 128, "float8_e4m3fn", "token"), 0.9, 2048 + 64),
        (Shape("v6e", 128, "bfloat16"), 0.95, 4096),
        (Shape("v6e", 128, "float8_e4m3fn", "static"), 1.6, 2048),
        (Shape("v6e", 128, "int8", "static"), 1.6, 2048),
        (Shape("v5e", 128, "bfloat16", head_dim=64), 1.0, 2048),
    ],
    ids=str,
)
def test_cycles_over_copy_cycles(shape: Shape, bound: float, bytes_per_token: int) -> None:
    report = inspect_decode(shape)
    assert report.bytes_per_token == bytes_per_token, "no byte moves that is not a key, a value or a scale"
    assert report.ratio <= bound
    assert abs(report.total_cycles / report.compiler_cycles - 1) < 0.12, "the scoreboard left the compiler's own count"
