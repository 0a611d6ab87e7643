"""A stop string ends the text at its first match, however the text is cut, and nothing of it is shown before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.text.stop_strings import StopChecker

small_texts = st.text(alphabet="abc", max_size=24)
small_stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4).map(tuple)


def one_shot(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    matches = [(text.find(each), len(each), each) for each in stop if each in text]
    if not matches:
        return text, None
    start, length, found = min(matches)
    return text[: start + length if include else start], found


def streamed(pieces: list[str], stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    checker = StopChecker(stop, include)
    shown = "".join(checker.push(piece)[0] for piece in pieces)
    return shown + checker.finish(), checker.stopped_by


@given(pieces=st.lists(small_texts, max_size=8), stop=small_stops, include=st.booleans())
def test_streamed_equals_one_shot(pieces: list[str], stop: tuple[str, ...], include: bool) -> None:
    assert streamed(pieces, stop, include) == one_shot("".join(pieces), stop, include)


@given(text=small_texts, stop=small_stops)
def test_holds_back_no_more_than_a_possible_match(text: str, stop: tuple[str, ...]) -> None:
    checker = StopChecker(stop)
    seen, shown = "", ""
    for char in text:
        seen += char
        new, stopped = checker.push(char)
        shown += new
        if stopped is not None:
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        assert not held or any(each.startswith(held) or each in held for each in stop)


def test_match_that_spans_pushes() -> None:
    checker = StopChecker(("\n\nUser:",))
    assert checker.push("Fine.\n") == ("Fine.", None)
    assert checker.push("\nUs") == ("", None)
    assert checker.push("er: more") == ("", "\n\nUser:")
    assert checker.push("late") == ("", "\n\nUser:")
    assert checker.finish() == ""


def test_false_start_is_shown_once() -> None:
    checker = StopChecker(("END",))
    assert [checker.push(piece)[0] for piece in ("an E", "N", "ergy")] == ["an ", "", "ENergy"]
    assert checker.finish() == ""


def test_held_text_comes_at_the_end() -> None:
    checker = StopChecker(("END",))
    assert checker.push("the EN") == ("the ", None)
    assert checker.finish() == "EN"
    assert checker.stopped_by is None


def test_earlier_start_beats_earlier_end() -> None:
    assert streamed(list("abcde"), ("c", "bcd"), False) == ("a", "bcd")


def test_match_that_waited_for_an_earlier_one_counts_at_the_end() -> None:
    checker = StopChecker(("c", "bcd"))
    assert checker.push("abc") == ("a", None)
    assert (checker.finish(), checker.stopped_by) == ("b", "c")


def test_shortest_of_those_that_start_together() -> None:
    assert streamed(["xabc"], ("abc", "ab"), True) == ("xab", "ab")


@pytest.mark.parametrize("include", [False, True])
def test_include(include: bool) -> None:
    assert streamed(["one.", " two."], (".",), include) == ("one." if include else "one", ".")


def test_without_stop_strings_everything_passes() -> None:
    checker = StopChecker(())
    assert checker.push("any") == ("any", None)
    assert checker.finish() == ""


@pytest.mark.timeout(20)
def test_long_stop_string_costs_linear_time() -> None:
    stop = "a" * 100_000 + "b"
    text = "a" * 400_000
    assert streamed([text[i : i + 4] for i in range(0, len(text), 4)], (stop,), False) == (text, None)
