"""What the Hopper decode kernel copies in the interpreter: no key or value outside of a window but what shares a copy with one inside."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import pytest
from fixtures.attention_backends import batch_for, check, compare
from fixtures.attention_cases import Case
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels.ragged_paged_attention import mosaic_gpu_decode_produce as produce

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(300)]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """How many copies to shared memory there were of each shape."""
    shapes: Counter[tuple[int, ...]] = Counter()
    copy = gpu_callbacks.copy_gmem_to_smem

    def counted(*, src_allocation_key_as_array: Any, src_transforms: Any, **rest: Any) -> Any:
        memory = gpu_callbacks._get_shared_memory()
        key = gpu_callbacks.HostAllocationKey.from_array(src_allocation_key_as_array)
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(src_transforms))
        shapes[memory.access(key, transforms).shape] += 1
        return copy(src_allocation_key_as_array=src_allocation_key_as_array, src_transforms=src_transforms, **rest)

    monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", counted)
    return shapes


# Of 200 keys with a window of 100 those from 100 on are seen: from 96 on in copies of 16 keys, to 208.
@pytest.mark.parametrize(
    ("page_size", "dtype", "window", "rows", "keys"),
    [
        (64, "bfloat16", 100, 16, 208 - 96),
        (128, "int8", 100, 16, 208 - 96),
        (64, "bfloat16", None, 64, 256),
        (32, "bfloat16", 1000, 32, 224),
    ],
)
def test_copies_outside_of_the_window_are_not_made(
    page_size: int, dtype: str, window: int | None, rows: int, keys: int, copied: Counter[tuple[int, ...]]
) -> None:
    case = Case("one decode", ((1, 200),), kv_heads=1, group=4, page=page_size, dtype=dtype, window=window)
    check("mosaic_gpu", case, decode_only=True, num_sms=1)
    wanted = {(rows, 64): 2 * keys // rows} | ({(rows,): 2 * keys // rows} if dtype == "int8" else {})
    assert {shape: n for shape, n in copied.items() if shape[0] == rows} == wanted
    assert sum(copied.values()) - sum(wanted.values()) <= 2 * 2, "queries"


def test_a_copy_too_few_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that a window begins in is left out: those values are then what shared memory held before."""
    copy_tile = produce.copy_tile
    monkeypatch.setattr(
        produce, "copy_tile", lambda *args, first_key, **rest: copy_tile(*args, first_key=first_key + 16, **rest)
    )
    case = Case("one decode", ((1, 200),), kv_heads=1, group=4, page=64, dtype="bfloat16", window=100)
    assert not compare("mosaic_gpu", batch_for("mosaic_gpu", case), decode_only=True, num_sms=1).is_right
