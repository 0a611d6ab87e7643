"""`jaxkv models`: the catalog as a table."""

from __future__ import annotations


def models() -> None:
    """List the models that have a short name."""
    from rich.console import Console
    from rich.table import Column, Table

    from jaxkv.weights.catalog import list_models

    table = Table(Column("model", no_wrap=True), "what it is", Column("size", no_wrap=True), "on this machine")
    for model in list_models():
        size = f"{model.size / 2**20:.0f} MiB"
        table.add_row(model.alias, model.description, size, "yes" if model.cached else "fetched on first use")
    Console().print(table)
