"""Runs the notebooks of the documentation and stores their outputs: ``notebooks.py
[NAME ...]``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

#: With more threads sums are added in another order, and the last digits of figures
#: differ.
os.environ["OMP_NUM_THREADS"] = "1"
TUTORIALS = Path(__file__).parent / "tutorials"


def executed(path: Path) -> Any:
    """Return a notebook with new outputs, and without what depends on the machine."""
    notebook = nbformat.read(path, as_version=4)
    metadata = notebook.metadata.copy()
    options = {"timeout": 1800, "startup_timeout": 300}
    NotebookClient(
        notebook, record_timing=False, coalesce_streams=True, **options
    ).execute()
    notebook.metadata = metadata  # without versions
    return notebook


def main() -> None:
    """Run the notebooks that the command names, or all."""
    names = sys.argv[1:] or sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
    for name in names:
        path = TUTORIALS / f"{name}.ipynb"
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
