"""The KV pool as a list of pages, for people who want to look at it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jaxkv.scheduling.blocks import BlockLedger, BlockState
from jaxkv.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PageView:
    """One page. request_ids: the requests that hold it, sorted; places: (choice's sequence id, index within its pages)."""

    block: int
    state: BlockState
    request_ids: tuple[str, ...]
    places: tuple[tuple[str, int], ...]


def view_pages(ledger: BlockLedger, sequences: Iterable[Sequence]) -> list[PageView]:
    """All pages in order of block id."""
    places: dict[int, list[tuple[str, int]]] = defaultdict(list)
    requests: dict[int, set[str]] = defaultdict(set)
    for seq in sequences:
        for index, block in enumerate(seq.block_ids):
            places[block].append((seq.seq_id, index))
            requests[block].add(seq.request_id)
    return [
        PageView(block, ledger.state(block), tuple(sorted(requests[block])), tuple(places[block]))
        for block in range(ledger.num_blocks)
    ]
