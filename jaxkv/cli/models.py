"""`jaxkv models`: the catalog as a table."""

from __future__ import annotations


def models() -> None:
    """List the models that have a short name."""
    from rich.console import Console
    from rich.table import Table

    from jaxkv.weights.catalog import list_models

    table = Table("model", "what it is")
    for entry in list_models():
        table.add_row(entry.name, entry.description)
    Console().print(table)
