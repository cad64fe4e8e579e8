"""Executes notebooks from top to bottom; as a command, also stores their outputs.

python -m tests.notebooks                         # all of them, in place, on the CPU
python -m tests.notebooks notebooks/launch.ipynb
"""

import os
import pathlib
import sys
import tempfile
import time

import nbclient
import nbformat

from kvjax.foundation.checkout import ROOT

NOTEBOOKS = tuple(sorted((ROOT / "notebooks").glob("*.ipynb")))
_CELL_SECONDS = 1200  # limit for a cell that hangs; a whole notebook takes two to three minutes


def execute(path: pathlib.Path, folder: pathlib.Path) -> nbformat.NotebookNode:
    """Executes a notebook in a folder on the CPU; returns it with outputs, without writing it.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=_CELL_SECONDS,
        coalesce_streams=True,
        record_timing=False,
        resources=dict(metadata=dict(path=str(folder))),
    )
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = dict(JAX_PLATFORMS="cpu", PYTHONPATH=paths)
    environment |= dict(TMPDIR=str(folder), IPYTHONDIR=str(folder / "ipython"))
    client.execute(env=os.environ | environment)
    notebook.metadata.language_info = dict(name="python")  # without this machine's version
    return notebook


def pictures(notebook: nbformat.NotebookNode) -> int:
    """Returns the number of pictures among the outputs."""
    return sum("image/png" in output.get("data", ()) for output in outputs(notebook))


def text(notebook: nbformat.NotebookNode) -> str:
    """Returns the text that cells printed or returned."""
    parts = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs(notebook))
    return "\n".join(parts)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


if __name__ == "__main__":
    for path in map(pathlib.Path, sys.argv[1:] or NOTEBOOKS):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(path, pathlib.Path(folder)), path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
