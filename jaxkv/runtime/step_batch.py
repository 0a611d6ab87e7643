"""The input of one step: a few small int arrays in the static shapes of a bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import struct

from jaxkv.runtime.arrays import HostOrDevice
from jaxkv.runtime.sampler import SamplingFlags

MIN_ROWS = 8
"""No step has fewer token rows: narrower matmuls are no faster, and by XLA on CPU slower."""
FROM_SLOT = -1
"""In place of a token id: the slot's newest token, which the device may know before the host does."""
_ROW_MULTIPLE = 32
_MIN_TABLE_WIDTH = 1024
_TABLE_GROWTH = 8


@struct.dataclass
class StepBatch:
    """One step's tokens on a flat axis. T rows, S sequences, W page-table columns; unused entries are padding."""

    tokens: HostOrDevice  # [T] int32, or FROM_SLOT
    positions: HostOrDevice  # [T] int32
    token_seqs: HostOrDevice  # [T] int32: which of the S sequences a row belongs to
    write_pages: HostOrDevice  # [T] int32; the trash page for rows that must not write
    write_offsets: HostOrDevice  # [T] int32
    targets: HostOrDevice  # [T] int32: the following prompt token, for prompt_logprobs
    page_table: HostOrDevice  # [S, W] int32
    cu_q_lens: HostOrDevice  # [S + 1] int32
    kv_lens: HostOrDevice  # [S] int32
    slots: HostOrDevice  # [S] int32; the padding slot for unused entries
    samples: HostOrDevice  # [S] bool: whether the sequence's last row is sampled from
    num_seqs: HostOrDevice  # [] int32
    flags: SamplingFlags


@dataclass(frozen=True, slots=True)
class Buckets:
    """The static shapes that steps come in.

    tokens: row counts, ascending. widths: page-table columns, ascending. max_num_seqs: most sequences of a step.
    """

    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    max_num_seqs: int

    def shapes(self) -> list[tuple[int, int]]:
        """All (T, W) of the engine, largest first."""
        return [(T, W) for W in reversed(self.widths) for T in reversed(self.tokens)]

    def fit(self, num_tokens: int, num_pages: int) -> tuple[int, int]:
        """The smallest (T, W) that holds a step."""
        T = next(size for size in self.tokens if size >= num_tokens)
        W = next(size for size in self.widths if size >= num_pages)
        return T, W

    def sequences(self, T: int) -> int:
        """S of a bucket of T rows: never more sequences than rows, nor fewer logit rows than MIN_ROWS."""
        return min(T, max(self.max_num_seqs, MIN_ROWS))


def make_buckets(*, max_num_batched_tokens: int, max_num_seqs: int, max_pages: int) -> Buckets:
    """Powers of two from MIN_ROWS up to the step's token limit; few page-table widths, as a wide table costs little."""
    tokens, size = [], MIN_ROWS
    while size < max_num_batched_tokens:
        tokens.append(size)
        size *= 2
    tokens.append(min(size, -(-max_num_batched_tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE))
    widths, width = [], _MIN_TABLE_WIDTH
    while width < max_pages:
        widths.append(width)
        width *= _TABLE_GROWTH
    return Buckets(tuple(tokens), (*widths, max_pages), max_num_seqs)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's part of a step, as the batch builder needs it.

    tokens: ids of the rows, or FROM_SLOT. start: position of the first row.
    write_start: rows below this position do not write K and V. block_ids: pages in order of position.
    targets: for prompt_logprobs the tokens that follow each row, else empty.
    """

    tokens: Seq[int]
    start: int
    write_start: int
    block_ids: Seq[int]
    slot: int
    samples: bool
    targets: Seq[int] = ()


def build_batch(
    chunks: Seq[Chunk], flags: SamplingFlags, buckets: Buckets, *, page_size: int, trash_page: int
) -> StepBatch:
    """Lays the chunks onto the flat axis, in their order. Host arrays (numpy)."""
    total = sum(len(chunk.tokens) for chunk in chunks)
    T, W = buckets.fit(total, max((len(chunk.block_ids) for chunk in chunks), default=1))
    S = buckets.sequences(T)
    batch = empty_batch(T, W, S, flags, trash_page=trash_page, padding_slot=buckets.max_num_seqs)
    row = 0
    for s, chunk in enumerate(chunks):
        count = len(chunk.tokens)
        rows = slice(row, row + count)
        positions = np.arange(chunk.start, chunk.start + count, dtype=np.int32)
        pages = np.asarray(chunk.block_ids, np.int32)
        batch.tokens[rows] = chunk.tokens
        batch.positions[rows] = positions
        batch.token_seqs[rows] = s
        batch.write_pages[rows] = np.where(positions >= chunk.write_start, pages[positions // page_size], trash_page)
        batch.write_offsets[rows] = positions % page_size
        if chunk.targets:
            batch.targets[row : row + len(chunk.targets)] = chunk.targets
        batch.page_table[s, : len(pages)] = pages
        row += count
        batch.cu_q_lens[s + 1] = row
        batch.kv_lens[s] = chunk.start + count
        batch.slots[s] = chunk.slot
        batch.samples[s] = chunk.samples
    batch.cu_q_lens[len(chunks) + 1 :] = row
    return dataclasses.replace(batch, num_seqs=np.int32(len(chunks)))


def empty_batch(T: int, W: int, S: int, flags: SamplingFlags, *, trash_page: int, padding_slot: int) -> StepBatch:
    """A batch of padding only: it writes to the trash page and touches no slot that anybody reads."""
    return StepBatch(
        tokens=np.zeros(T, np.int32),
        positions=np.zeros(T, np.int32),
        token_seqs=np.full(T, S - 1, np.int32),
        write_pages=np.full(T, trash_page, np.int32),
        write_offsets=np.zeros(T, np.int32),
        targets=np.zeros(T, np.int32),
        page_table=np.full((S, W), trash_page, np.int32),
        cu_q_lens=np.zeros(S + 1, np.int32),
        kv_lens=np.zeros(S, np.int32),
        slots=np.full(S, padding_slot, np.int32),
        samples=np.zeros(S, np.bool_),
        num_seqs=np.int32(0),
        flags=flags,
    )


def no_flags() -> SamplingFlags:
    flags: dict[str, Any] = dict.fromkeys(SamplingFlags.__dataclass_fields__, np.bool_(False))
    return SamplingFlags(**flags)
