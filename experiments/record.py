"""How a result is written down: with the command, machine, versions and commit that made it."""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import subprocess
import sys

import jax
import psutil

RESULTS = pathlib.Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


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


def provenance() -> dict:
    """What somebody needs to make the result again."""
    program = pathlib.Path(sys.argv[0])
    git = lambda *args: subprocess.run(
        ["git", *args], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": " ".join(["python -m experiments." + program.stem, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--short") else ""),
        "machine": f"{_processor()}, {psutil.cpu_count()} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()
