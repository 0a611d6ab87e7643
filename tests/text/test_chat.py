"""Chat templates: what models ship must render as written, and what requests get wrong must be a RequestError."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import pytest
from fixtures.byte_tokenizer import CHAT_TEMPLATE
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.core.errors import ConfigError, RequestError
from jaxkv.text.chat import compile_chat_template, render_chat

HI = [{"role": "user", "content": "Hi"}]


def render(template: str | None, messages: object = HI, **options: Any) -> str:
    options.setdefault("add_generation_prompt", False)
    options.setdefault("continue_final_message", False)
    return render_chat(template, messages, **options)


def test_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHAT_TEMPLATE, messages) == expected
    assert render(CHAT_TEMPLATE, messages, add_generation_prompt=True) == expected + "<|im_start|>assistant\n"


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_white_space_control_as_models_expect() -> None:
    template = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend\n"
    assert render(template) == "Hi\nend"


def test_loop_controls_and_generation_tag() -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(template, HI * 2) == "Hi"


def test_tojson_keeps_html_and_unicode() -> None:
    assert render("{{ x | tojson }}", template_kwargs={"x": {"a": "<é&'>"}}) == '{"a": "<é&\'>"}'
    assert render("{{ x | tojson(indent=2) }}", template_kwargs={"x": [1]}) == "[\n  1\n]"


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year + shift) for shift in (-1, 0)}


def test_variables_of_model_and_request() -> None:
    assert (
        render("{{ bos_token }}{{ mode }}{{ tools is none }}", bos_token="<s>", template_kwargs={"mode": 1})
        == "<s>1True"
    )
    assert render("{{ self_name }}{{ self is defined }}", template_kwargs={"self": 1, "self_name": "x"}).startswith("x")


@pytest.mark.parametrize("content", ["Sure: ", "Sure:", "  a\n"])
def test_continue_final_message(content: str) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    prompt = render(CHAT_TEMPLATE, messages, continue_final_message=True)
    assert prompt == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{content}"


def test_continue_final_message_where_the_template_trims() -> None:
    messages = [*HI, {"role": "assistant", "content": "Sure "}]
    assert render(
        "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", messages, continue_final_message=True
    ) == ("[Hi][Sure")


def test_continue_leaves_the_callers_messages_alone() -> None:
    messages = [{"role": "assistant", "content": "x"}]
    render(CHAT_TEMPLATE, messages, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": "x"}]


def test_assistant_with_tool_calls_may_have_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert render("{{ messages[0].tool_calls[0].function.name }}{{ messages[0].content }}", [call]) == "f"


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        ([], "empty"),
        ("hi", "str"),
        (None, "missing"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "'robot'"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([*HI, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 7}], "int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "a\ud83d"}], "U+D83D"),
    ],
)
def test_bad_messages_are_named(messages: object, names: str) -> None:
    with pytest.raises(RequestError, match="messages") as caught:
        render(CHAT_TEMPLATE, messages)
    assert names in str(caught.value)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (None, "--chat-template"),
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_what_a_template_refuses_is_a_request_error(template: str | None, names: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(template)
    assert names in str(caught.value)
    assert caught.value.param == "messages"


def test_last_message_that_is_not_shown_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match="cannot be continued"):
        render("constant", continue_final_message=True)


def test_both_prompt_options_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        render(CHAT_TEMPLATE, add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message"])
def test_kwargs_cannot_replace_request_fields(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(CHAT_TEMPLATE, template_kwargs={name: True})
    assert caught.value.param == "chat_template_kwargs"


def test_kwargs_must_be_an_object() -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs is a value of type list"):
        render(CHAT_TEMPLATE, template_kwargs=[1])


def test_lone_surrogate_from_a_variable_is_refused() -> None:
    with pytest.raises(RequestError, match=r"U\+DC00"):
        render("{{ x }}", template_kwargs={"x": "\udc00"})


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x", "{% unknown_tag %}", "{{ x | no_such_filter }}", "{% generation %}"]
)
def test_template_that_cannot_be_compiled_is_a_config_error(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template cannot be compiled"):
        compile_chat_template(source)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner)
    ),
    max_leaves=8,
)


@given(
    messages=json_values
    | st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": json_values}), max_size=3)
)
def test_any_json_renders_or_is_refused(messages: object) -> None:
    with contextlib.suppress(RequestError):
        render(CHAT_TEMPLATE, messages).encode("utf-8")
