"""docs/tutorial.ipynb runs from top to bottom."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests import quick_compilation

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"


@pytest.mark.long
def test_the_notebook_runs_and_resumes():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute(
        env={**os.environ, **quick_compilation.ENVIRONMENT}
    )
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert "resumed from step 60" in printed
    assert "step 90/90" in printed
