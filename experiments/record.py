"""How a result is written down: with the command, machine, versions and commit that made it."""

import json
import pathlib
import sys

from kvjax.provenance import provenance

RESULTS = pathlib.Path(__file__).parent / "results"


def record(name: str, result: dict, *, save: bool) -> None:
    """Prints the result as one JSON line; with `save` also writes results/<name>.json.

    Args:
      name: file name, may contain folders.
      result: JSON-able.
    """
    print(json.dumps({"name": name} | result))
    if not save:
        return
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result | {"made_by": provenance()}, indent=1) + "\n")
    print(f"written: {path.relative_to(RESULTS.parents[1])}", file=sys.stderr)
