"""Ends a text at the first of several stop strings while the text is still arriving."""

from __future__ import annotations

from functools import lru_cache


class StopChecker:
    """Passes a text on until a stop string is in it.

    The match that starts first ends the text; of those that start together, the shortest. The text ends before the
    match, or after it with `include`. However the text is cut into pushes, the joined results are the same: text that
    may still turn out to be (part of) a match is held back, no more than that, and every character is looked at once.

    Attributes:
      stopped_by: the stop string that ended the text, else None.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self._patterns = [_Pattern(text) for text in stop]
        self._include = include
        self._held = ""  # text not passed on yet
        self._held_start = 0  # its position in the whole text
        self._length = 0  # of the whole text so far
        self._match: tuple[int, str] | None = None  # best so far: where it starts, the stop string
        self.stopped_by: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string once one has ended the text (after that always "")."""
        if self.stopped_by is not None or not self._patterns:
            return ("" if self.stopped_by is not None else text), self.stopped_by
        self._held += text
        for char in text:
            self._length += 1
            for pattern in self._patterns:
                if pattern.advance(char):
                    self._consider(self._length - len(pattern.text), pattern.text)
            if self._match is not None and self._match[0] <= self._first_open():
                return self._stop(), self.stopped_by
        start = self._first_open() if self._match is None else min(self._match[0], self._first_open())
        return self._release(start), None

    def finish(self) -> str:
        """The text still held when no more will come. Sets stopped_by if a match only waited for one before it."""
        if self.stopped_by is not None:
            return ""
        return self._release(self._length) if self._match is None else self._stop()

    def _consider(self, start: int, text: str) -> None:
        if self._match is None or (start, len(text)) < (self._match[0], len(self._match[1])):
            self._match = (start, text)

    def _first_open(self) -> int:
        """Where the earliest text starts that may yet become a match; the end of the text if there is none."""
        return self._length - max(pattern.matched for pattern in self._patterns)

    def _release(self, end: int) -> str:
        shown = self._held[: end - self._held_start]
        self._held = self._held[end - self._held_start :]
        self._held_start = end
        return shown

    def _stop(self) -> str:
        assert self._match is not None
        start, self.stopped_by = self._match
        shown = self._release(start + len(self.stopped_by) if self._include else start)
        self._held = ""
        return shown


class _Pattern:
    """Knuth-Morris-Pratt matching of one stop string, one character at a time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """How many of its characters the text so far ends with, short of all."""
        self._borders = _borders(text)

    def advance(self, char: str) -> bool:
        """Takes the next character; true if the stop string is complete with it."""
        matched = self.matched
        while matched and self.text[matched] != char:
            matched = self._borders[matched - 1]
        if self.text[matched] == char:
            matched += 1
        complete = matched == len(self.text)
        # A complete one goes on as its own longest border: what starts later than this match never beats it.
        self.matched = self._borders[matched - 1] if complete else matched
        return complete


@lru_cache(maxsize=256)
def _borders(text: str) -> tuple[int, ...]:
    """For each prefix of the text, the length of the longest shorter prefix that it also ends with."""
    borders = [0] * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = borders[length - 1]
        if text[end] == text[length]:
            length += 1
        borders[end] = length
    return tuple(borders)
