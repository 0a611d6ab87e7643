"""The alphabet in which byte-level BPE vocabularies are written: one printable character for each of the 256 bytes."""

from __future__ import annotations


def _alphabet() -> list[str]:
    """Printable Latin-1 bytes stand for themselves; the other 68 get the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


BYTE_TO_CHAR: list[str] = _alphabet()
_CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


def piece_to_bytes(piece: str) -> bytes:
    """The bytes that a vocabulary entry spells. An entry outside the alphabet stands for its own UTF-8 bytes."""
    try:
        return bytes([_CHAR_TO_BYTE[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8")
