"""Messages to a prompt, through the model's own chat template (Jinja, sandboxed, as Hugging Face models expect it)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxkv.core.errors import ConfigError, RequestError
from jaxkv.text.chat_messages import checked_messages
from jaxkv.text.encodable import check_encodable

_OWN_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message")
# The space at its end tells whether the template trims the content.
_CONTINUE_MARK = "\ue000continue here\ue000 "


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant tokens for training; here it only shows its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


@lru_cache(maxsize=16)
def compile_chat_template(source: str) -> jinja2.Template:
    """Compiles a template; call it when the engine is built. Raises ConfigError with the line that is wrong."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template cannot be compiled: line {error.lineno}: {error.message}; "
            "give another by --chat-template"
        ) from error
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"the chat template cannot be compiled: {error}; give another by --chat-template") from error


def render_chat(
    template: str | None,
    messages: object,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, object] | None = None,
    **variables: object,
) -> str:
    """The prompt of a chat, special tokens spelled out: encode it without adding special tokens.

    messages: see `checked_messages`. continue_final_message: the prompt ends with the last message's text, open.
    template_kwargs: the request's own variables (`chat_template_kwargs`). variables: the model's (bos_token, ...).
    Raises RequestError whose param is the field at fault, also for what the template refuses or cannot render, and
    ConfigError for a template that cannot be compiled.
    """
    checked = checked_messages(messages)
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message goes on with the last message, add_generation_prompt starts a new one: "
            "set only one of them",
            param="continue_final_message",
        )
    if template is None:
        raise RequestError(
            "this model has no chat template: start the engine with one (--chat-template), or send a plain prompt",
            param="messages",
        )
    kwargs = _checked_kwargs({} if template_kwargs is None else template_kwargs)
    if continue_final_message:
        checked[-1]["content"] += _CONTINUE_MARK
    context = {"tools": None, "documents": None, **variables, **kwargs, "add_generation_prompt": add_generation_prompt}
    prompt = _render(compile_chat_template(template), checked, context)
    if continue_final_message:
        prompt = _cut_at_mark(prompt)
    check_encodable(prompt, "the rendered chat", "messages")
    return prompt


def _checked_kwargs(kwargs: object) -> dict[str, object]:
    if not isinstance(kwargs, Mapping):
        raise RequestError(
            f"chat_template_kwargs is a value of type {type(kwargs).__name__}: it must be an object",
            param="chat_template_kwargs",
        )
    for name in _OWN_VARIABLES:
        if name in kwargs:
            raise RequestError(
                f"chat_template_kwargs sets {name}: that is a field of the request, set it there",
                param="chat_template_kwargs",
            )
    return dict(kwargs)


def _render(template: jinja2.Template, messages: list[dict[str, Any]], context: dict[str, object]) -> str:
    try:
        return template.render({**context, "messages": messages})
    except RequestError:
        raise
    except Exception as error:
        # A template is a program that comes with the model: whatever it raises, it is these messages that it refuses.
        raise RequestError(
            f"the model's chat template cannot render these messages: {type(error).__name__}: {error}", param="messages"
        ) from error


def _cut_at_mark(prompt: str) -> str:
    start = prompt.rfind(_CONTINUE_MARK.rstrip())
    if start < 0:
        raise RequestError(
            "the model's chat template does not show the last message, so it cannot be continued", param="messages"
        )
    kept = prompt[:start]
    return kept if prompt.startswith(_CONTINUE_MARK, start) else kept.rstrip()


def _raise_exception(message: str) -> NoReturn:
    raise RequestError(f"the model's chat template refuses these messages: {message}", param="messages")


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
