from __future__ import annotations

import pytest

from jaxkv.scheduling import BlockLedger, LedgerError


def balance(ledger: BlockLedger) -> tuple[int, int, int]:
    ledger.check()
    assert ledger.num_free + ledger.num_cached + ledger.num_held == ledger.num_blocks
    return ledger.num_free, ledger.num_cached, ledger.num_held


def test_a_block_goes_from_free_to_held_and_back() -> None:
    ledger = BlockLedger(4)
    blocks = ledger.allocate(3)
    assert len(set(blocks)) == 3
    assert balance(ledger) == (1, 0, 3)
    assert {ledger.state(block) for block in blocks} == {"held"}
    ledger.free(blocks)
    assert balance(ledger) == (4, 0, 0)
    assert {ledger.state(block) for block in blocks} == {"free"}


def test_a_shared_block_is_held_until_its_last_holder_frees_it() -> None:
    ledger = BlockLedger(2)
    [block] = ledger.allocate(1)
    ledger.incref(block)
    ledger.free([block])
    assert (ledger.state(block), ledger.ref_count(block)) == ("held", 1)
    ledger.free([block])
    assert balance(ledger) == (2, 0, 0)


def test_a_published_block_is_cached_and_taken_up_again() -> None:
    ledger = BlockLedger(2)
    [block] = ledger.allocate(1)
    ledger.publish(block)
    ledger.free([block])
    assert balance(ledger) == (1, 1, 0)
    ledger.incref(block)
    assert balance(ledger) == (1, 0, 1)


def test_free_blocks_are_taken_before_cached_ones_and_those_least_recently_used_first() -> None:
    evicted: list[int] = []
    ledger = BlockLedger(4, on_evict=evicted.append)
    blocks = ledger.allocate(3)
    for block in blocks:
        ledger.publish(block)
    ledger.free(blocks)
    ledger.touch(blocks[0])
    ledger.allocate(1)
    assert evicted == []
    assert ledger.allocate(2) == evicted == blocks[1:]
    assert ledger.cached_blocks() == blocks[:1]
    assert not any(ledger.is_published(block) for block in evicted)
    balance(ledger)


def test_allocating_too_many_takes_nothing() -> None:
    ledger = BlockLedger(3)
    ledger.allocate(1)
    with pytest.raises(LedgerError, match=r"asked for 3 blocks, 2 are available"):
        ledger.allocate(3)
    assert balance(ledger) == (2, 0, 1)
    assert ledger.allocate(0) == []


def test_operations_that_the_state_forbids_raise() -> None:
    ledger = BlockLedger(2)
    [block] = ledger.allocate(1)
    ledger.free([block])
    with pytest.raises(LedgerError, match="nobody holds it"):
        ledger.free([block])
    with pytest.raises(LedgerError, match="is free"):
        ledger.incref(block)
    with pytest.raises(LedgerError, match="only a held block"):
        ledger.publish(block)
    assert balance(ledger) == (2, 0, 0)
    with pytest.raises(LedgerError, match="at least 1"):
        BlockLedger(0)


def test_check_finds_books_that_do_not_balance() -> None:
    ledger = BlockLedger(3)
    [block] = ledger.allocate(1)
    ledger._refs[block] = 0
    with pytest.raises(LedgerError):
        ledger.check()
    ledger._refs[block] = 1
    ledger._free.append(block)
    with pytest.raises(LedgerError, match="two states"):
        ledger.check()
