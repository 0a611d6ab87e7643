"""What the TPU kernels decide before they are traced: how heads are grouped, block sizes, and what they cannot do."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.ragged_paged_attention.tuning import tpu_numbers

LANES = 128
SUBLANES = 8
NARROW = 2 * LANES
"""The fewest tokens that scores are taken of at once, of which a block holds whole multiples: FP8 splits them into a register of even
and one of odd tokens."""
WIDE = 2 * NARROW
"""Without a mask, so many tokens of one head cost less than half as many of two (tuning/tpu.json)."""
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
DTYPES = ("float32", "bfloat16", "int8", *FLOAT8)


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """What of a TPU's core the plan depends on."""

    matrix_side: int  # rows and columns of one matrix unit
    vmem_bytes: int


def this_chip() -> Chip:
    """The chip that is being compiled for; a small one where kernels are only interpreted."""
    try:
        info = pltpu.get_tpu_info()
    except ValueError:
        return Chip(matrix_side=128, vmem_bytes=64 * 2**20)
    return Chip(matrix_side=info.mxu_column_size, vmem_bytes=info.vmem_capacity_bytes)


class AtOnce(NamedTuple):
    """So many KV heads, and tokens of a block, a prefill folds into its softmax at once."""

    heads: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Static choices of one call.

    head_lanes: lanes of a head's key operand. For D = 64 it is the shared (key | value) register.
    heads_per_group: KV heads whose queries are stacked into one matmul of a decode; `rows` are their query heads, padded to
      whole registers.
    block_pages: pages of a KV block. slots: KV blocks in memory, one in use and the others in flight.
    query_tile: queries of a prefill tile. unmasked, masked: its `AtOnce`, of tokens that all of its queries see and of others.
    """

    num_kv_heads: int
    queries_per_kv: int
    head_dim: int
    page_size: int
    heads_per_group: int
    block_pages: int
    query_tile: int
    unmasked: AtOnce
    masked: AtOnce
    slots: int
    vmem_limit: int

    @property
    def head_lanes(self) -> int:
        return max(self.head_dim, LANES)

    @property
    def value_lane(self) -> int:
        """Where a head's values start within the lanes of its value operand."""
        return self.head_lanes - self.head_dim

    @property
    def groups(self) -> int:
        return self.num_kv_heads // self.heads_per_group

    @property
    def rows(self) -> int:
        return -(-self.heads_per_group * self.queries_per_kv // SUBLANES) * SUBLANES

    @property
    def group_lanes(self) -> int:
        return self.heads_per_group * self.head_lanes

    @property
    def page_lanes(self) -> int:
        return self.num_kv_heads * 2 * self.head_dim

    @property
    def block_tokens(self) -> int:
        return self.block_pages * self.page_size


def _heads_per_group(num_kv_heads: int, queries_per_kv: int, head_lanes: int, matrix_side: int) -> int:
    """As many heads as fill the 8 rows of a register, then enough to fill the depth of the matrix unit."""
    divisors = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0]
    fitting = [n for n in divisors if n * queries_per_kv <= SUBLANES]
    chosen = max(fitting, default=1)
    deep = [n for n in divisors if n * head_lanes >= matrix_side]
    return max(chosen, min(deep, default=1))


def _blocks(layout: KVLayout, chip: Chip, longest: int, block_tokens: int | None = None) -> tuple[int, int]:
    """(tokens of a KV block, blocks in memory) for contexts of `longest` tokens. Raises ValueError where they exceed the VMEM."""
    numbers = tpu_numbers()
    bytes_per_token = 2 * layout.num_kv_heads * layout.head_dim * jnp.dtype(layout.dtype).itemsize
    if block_tokens is None:
        # Larger blocks spread the latency of their matmuls over more tokens, up to where nothing is gained (tuning/tpu.json);
        # what is left of a context is taken in shorter stretches anyway.
        budget = min(numbers.block_bytes, chip.vmem_bytes // 16)
        block_tokens = min(max(budget // bytes_per_token, 128), numbers.block_tokens)
    granule = math.lcm(layout.page_size, NARROW)
    block_tokens = max(block_tokens // granule, 1) * granule
    block_tokens = min(block_tokens, -(-longest // granule) * granule)
    block_bytes = block_tokens * bytes_per_token
    slots = numbers.slots if numbers.slots * block_bytes <= chip.vmem_bytes // 2 else 2
    if slots * block_bytes > chip.vmem_bytes * 5 // 8:
        raise ValueError(
            f"attention backend 'mosaic_tpu' needs {slots} blocks of {block_tokens} tokens in VMEM, {slots * block_bytes} bytes "
            f"of a {layout.dtype} pool: too much for this chip's {chip.vmem_bytes}; use a smaller KV dtype, smaller pages or "
            "more devices"
        )
    return block_tokens, slots


def _at_once(num_kv_heads: int, scores_per_query: int, block_tokens: int, tokens: int) -> AtOnce:
    """`tokens`, if a block and the scores have room for them, of as many heads as there is room for: that many scores hide the latencies
    of a fold."""
    if tokens > scores_per_query or block_tokens % tokens:
        tokens = NARROW
    fitting = (n for n in range(2, num_kv_heads + 1) if num_kv_heads % n == 0 and n * tokens <= scores_per_query)
    return AtOnce(max(fitting, default=1), tokens)


def make_plan(
    layout: KVLayout,
    *,
    num_heads: int,
    num_tokens: int,
    pages_per_seq: int,
    block_tokens: int | None = None,
    query_tile: int | None = None,
) -> Plan:
    """The plan for pools of `layout` on the chip that is being compiled for."""
    check(layout, num_heads=num_heads)
    chip = this_chip()
    queries_per_kv = num_heads // layout.num_kv_heads
    longest = pages_per_seq * layout.page_size
    block_tokens, slots = _blocks(layout, chip, longest, block_tokens)
    head_lanes = max(layout.head_dim, LANES)
    if query_tile is None:
        query_tile = 16
        # Of one query: itself, and maximum, sum and output, of every head.
        state_bytes = 4 * (2 * LANES + 2 * head_lanes) * num_heads
        most = min(512 // queries_per_kv, num_tokens, 128, chip.vmem_bytes // 4 // state_bytes)
        while query_tile * 2 <= most:
            query_tile *= 2
    scores = min(tpu_numbers().scores_at_once, chip.vmem_bytes // 128)
    at_once = functools.partial(_at_once, layout.num_kv_heads, scores // (queries_per_kv * query_tile), block_tokens)
    return Plan(
        num_kv_heads=layout.num_kv_heads,
        queries_per_kv=queries_per_kv,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        heads_per_group=_heads_per_group(layout.num_kv_heads, queries_per_kv, head_lanes, chip.matrix_side),
        block_pages=block_tokens // layout.page_size,
        query_tile=query_tile,
        unmasked=at_once(tokens=WIDE),
        masked=at_once(tokens=NARROW),
        slots=slots,
        vmem_limit=chip.vmem_bytes * 7 // 8 if chip.vmem_bytes <= 2**24 else chip.vmem_bytes * 3 // 4,
    )


def check(layout: KVLayout, *, num_heads: int) -> None:
    """Raises ValueError that names what the TPU kernels cannot do for this pool."""
    if layout.order != "token_major":
        raise ValueError(f"attention backend 'mosaic_tpu' reads pools in token_major order, not {layout.order}")
    if jnp.dtype(layout.dtype).name not in DTYPES:
        raise ValueError(f"attention backend 'mosaic_tpu' reads pools of {', '.join(DTYPES)}, not {layout.dtype}")
    if layout.head_dim != 64 and layout.head_dim % LANES:
        raise ValueError(
            f"attention backend 'mosaic_tpu' needs a head_dim of 64 or a multiple of 128, not {layout.head_dim}: "
            "use the reference backend"
        )
    if layout.page_size % 16 or (LANES % layout.page_size and layout.page_size % LANES):
        raise ValueError(
            f"attention backend 'mosaic_tpu' needs a page size of 16, 32, 64 or a multiple of 128, not {layout.page_size}"
        )
    if num_heads % layout.num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot be grouped over {layout.num_kv_heads} KV heads: one must divide the other"
        )
    local = dataclasses.replace(layout, num_kv_heads=layout.num_kv_heads // layout.shards, shards=1)
    _blocks(local, this_chip(), longest=2**20)
