"""The commands put together. Whatever goes wrong on purpose is one line on stderr and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import jaxkv
from jaxkv.cli.bench import bench_serve
from jaxkv.cli.convert import convert
from jaxkv.cli.generate import generate
from jaxkv.cli.models import models
from jaxkv.cli.serve import serve
from jaxkv.core.errors import JaxkvError

FAILED = 1
MISUSED = 2
INTERRUPTED = 130

app = typer.Typer(
    name="jaxkv",
    help="Serve large language models from a paged KV cache.",
    add_completion=False,
    rich_markup_mode=None,  # the framed help cuts long flag names off
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure a server.", rich_markup_mode=None)
bench.command("serve")(bench_serve)
app.command()(serve)
app.command()(generate)
app.command()(models)
app.command()(convert)
app.add_typer(bench, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"jaxkv {jaxkv.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Serve large language models from a paged KV cache."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command line (without the program's name). Returns the exit code: 0, 1 failed, 2 misused."""
    if not arguments:
        app(["--help"], prog_name="jaxkv", standalone_mode=False)
        return MISUSED
    try:
        code = app(list(arguments), prog_name="jaxkv", standalone_mode=False)
    except typer.TyperException as error:
        return _complain(f"{error.format_message()} (see jaxkv --help)", MISUSED)
    except JaxkvError as error:
        return _complain(str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    print(f"jaxkv: error: {' '.join(message.split())}", file=sys.stderr)
    return code
