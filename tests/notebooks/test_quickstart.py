"""The quickstart notebook runs from top to bottom and shows what it promises."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(600)
# The kernel runs in a process of its own; its client leaves sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
def test_quickstart() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = "".join(output.get("text", "") for output in outputs)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert "Paris" in texts
    assert "num_blocks_held=0" in texts
    assert len(pictures) == 3


def test_is_committed_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
