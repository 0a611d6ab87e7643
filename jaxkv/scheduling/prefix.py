"""The prefix index: which block already holds the keys and values of a given token prefix.

A full block is named by a SHA-256 digest over its parent's digest and its own token ids, so that a digest stands for
the whole prefix. The chain starts at a root that hashes everything else that keys and values depend on.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass


def root_digest(*, cache_salt: str | None = None, weight_version: int = 0) -> bytes:
    """The parent of a first block. Different salts (None and "" too) or weight versions never share a block."""
    keys = {b"weight_version": str(weight_version).encode()}
    if cache_salt is not None:
        keys[b"cache_salt"] = cache_salt.encode("utf-8", "surrogatepass")
    encoded = b"".join(struct.pack("<QQ", len(tag), len(value)) + tag + value for tag, value in sorted(keys.items()))
    return hashlib.sha256(b"root\0" + encoded).digest()


def block_digest(parent: bytes, tokens: list[int]) -> bytes:
    """Digest of a full block that follows the prefix named by parent (32 bytes). Token ids take 8 bytes each."""
    return hashlib.sha256(b"block" + parent + struct.pack(f"<{len(tokens)}q", *tokens)).digest()


@dataclass(frozen=True, slots=True)
class _Published:
    block: int
    parent: bytes
    tokens: list[int]


class PrefixIndex:
    """Digest -> block, for published blocks only (held or cached). Eviction order is the ledger's."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, _Published] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, digest: bytes, parent: bytes, tokens: list[int]) -> int | None:
        """The block with this content, confirmed by its token ids, or None."""
        found = self._by_digest.get(digest)
        if found is None or found.tokens != tokens or found.parent != parent:
            return None
        return found.block

    def block_of(self, digest: bytes) -> int | None:
        """The block published under a digest, or None."""
        found = self._by_digest.get(digest)
        return None if found is None else found.block

    def publish(self, block: int, digest: bytes, parent: bytes, tokens: list[int]) -> bool:
        """Enters a block. False, and nothing changes, when the digest is taken: the first block to have it keeps it."""
        if digest in self._by_digest:
            return False
        self._by_digest[digest] = _Published(block, parent, tokens)
        self._digest_of[block] = digest
        return True

    def forget(self, block: int) -> None:
        """Removes a published block: its content is about to be overwritten."""
        del self._by_digest[self._digest_of.pop(block)]

    def parents(self) -> dict[int, bytes]:
        """Block -> digest of its parent, for every published block."""
        return {entry.block: entry.parent for entry in self._by_digest.values()}
