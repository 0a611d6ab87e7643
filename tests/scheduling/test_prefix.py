from __future__ import annotations

import pytest
from scheduling.kv_simulator import SimulatedDevice, drain, expected_output, make_scheduler, make_sequence

from jaxkv.scheduling import sequence_blocks
from jaxkv.scheduling.prefix import PrefixIndex, block_digest, root_digest

ROOT = root_digest()


def test_digests_of_different_content_differ() -> None:
    roots = [
        root_digest(cache_salt=salt, weight_version=version)
        for salt in (None, "", "a", "b", "a\0", "weight_version", "\ud800")
        for version in (0, 1, 10)
    ]
    chains = [
        block_digest(parent, tokens)
        for parent in roots
        for tokens in ([1, 2, 3], [1, 2], [12, 3], [123], [3, 2, 1], [2**40], [-1])
    ]
    assert len({*roots, *chains}) == len(roots) + len(chains)
    assert all(len(digest) == 32 for digest in roots + chains)


def test_the_same_content_has_the_same_digest() -> None:
    assert root_digest(cache_salt="s", weight_version=3) == root_digest(cache_salt="s", weight_version=3)
    assert block_digest(ROOT, [5, 6]) == block_digest(ROOT, [5, 6])


def test_the_first_block_keeps_a_digest_and_forget_frees_it() -> None:
    index = PrefixIndex()
    digest = block_digest(ROOT, [1, 2])
    assert index.publish(7, digest, ROOT, [1, 2])
    assert not index.publish(8, digest, ROOT, [1, 2])
    assert index.find(digest, ROOT, [1, 2]) == index.block_of(digest) == 7
    assert index.parents() == {7: ROOT}
    index.forget(7)
    assert index.find(digest, ROOT, [1, 2]) is None
    assert len(index) == 0
    assert index.publish(8, digest, ROOT, [1, 2])


def test_a_hit_is_confirmed_by_token_ids_and_parent() -> None:
    index = PrefixIndex()
    digest = block_digest(ROOT, [1, 2])
    index.publish(7, digest, ROOT, [1, 2])
    assert index.find(digest, ROOT, [1, 3]) is None
    assert index.find(digest, root_digest(cache_salt="x"), [1, 2]) is None


def test_colliding_digests_give_no_wrong_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_blocks, "block_digest", lambda *_: b"the same for all")
    scheduler = make_scheduler()
    device = SimulatedDevice(scheduler)
    sequences = [make_sequence(f"s{i}", [i, 1, 2, 3], max_tokens=3) for i in range(6)]
    for seq in sequences:
        scheduler.add(seq)
        drain(scheduler, device)
    assert [seq.output_ids for seq in sequences] == [expected_output(seq) for seq in sequences]
