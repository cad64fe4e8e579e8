"""Results saved with the command, commit, machine and versions that reproduce them."""

from collections.abc import Mapping
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time

from etils import epath
import jax

from kvjax.foundation import record_lines, target
from kvjax.foundation.checkout import PACKAGE, ROOT
from kvjax.foundation.command_line import program, say
from kvjax.foundation.errors import UserError

_BEGUN = time.monotonic()  # approximate start of the process: commands import this first
# Lists the changes that mark a commit with "+"; results are left out, as no result depends on them.
_CHANGES = ("status", "--short", "--", ":/", ":(top,exclude)experiments/results")
CODE = ("kvjax", "experiments")  # folders whose Python files determine a result
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def provenance(*packages: str) -> dict:
    """Returns JSON-able software and hardware; `packages` are listed if installed."""
    info = software(*packages)
    machine = f"{_processor()}, {os.cpu_count()} cores, {_memory() / 2**30:.0f} GiB"
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    first = {name: info.pop(name) for name in ("command", "date", "commit", "code")}
    return first | dict(machine=machine, devices=devices) | info


def software(*packages: str) -> dict:
    """Returns `provenance` without machine and devices, so that no device is initialised."""
    versions = {name: _version(name) for name in (*_PACKAGES, *packages)}
    return {
        "command": f"{program()} {shlex.join(sys.argv[1:])}".rstrip(),
        "date": datetime.date.today().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git(*_CHANGES) else ""),
        "code": code_on_disk(),
        "python": platform.python_version(),
        "packages": {name: version for name, version in versions.items() if version},
    }


def save(
    file: pathlib.Path,
    result: dict,
    *packages: str,
    name: str = "",
    quiet: bool = False,
    option: str = "--save",
) -> None:
    """Writes a result with its `made_by`, whole or not at all, and prints the path unless `quiet`.

    `made_by.process_seconds` is the age of the process, which may have made other results before; a
    resumed result may also have been begun by an earlier process.

    Args:
      packages: see `provenance`.
      name: the record's name, if the file has several records (`record_lines`).
      option: the option that names the file, for messages.

    Raises:
      UserError: the file cannot be written; the message says where the result is instead.
    """
    seconds = round(time.monotonic() - _BEGUN, 1)
    record = result | {"made_by": provenance(*packages) | {"process_seconds": seconds}}
    if name:
        record_lines.put(file, name, record, option=option)
    else:
        text = f"{json.dumps(record, indent=1)}\n"
        target.write(epath.Path(file.parent), {file.name: text.encode()}, option)
    if not quiet:
        say(f"written: {os.path.relpath(file)}{f', {name}' if name else ''}")


def check_commit(option: str, path: pathlib.Path) -> None:
    """Raises a UserError if results saved in the checkout would come from uncommitted code.

    Args:
      option: the option that saves them, for the message.
      path: path of the results; paths outside the checkout always pass.
    """
    if path.is_relative_to(ROOT) and (changes := _git(*_CHANGES)):
        first = changes.splitlines()[0].strip()
        raise UserError(
            f"{option}: the checkout has uncommitted changes ({first}), so the result would not be "
            "reproducible; commit them, or leave the option out"
        )


def code_on_disk() -> dict[str, str]:
    """Returns digests of the Python files of each folder in CODE.

    They identify the commit of a result even if the commit is rewritten later.
    """
    return {
        folder: code_digest({_name(path): _blob(path) for path in (ROOT / folder).rglob("*.py")})
        for folder in CODE
        if (ROOT / folder).is_dir()
    }


def code_digest(blobs: Mapping[str, str]) -> str:
    """Returns a digest of files by name and Git blob id (`git ls-tree -r`)."""
    lines = (f"{name} {blob}\n" for name, blob in sorted(blobs.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _blob(path: pathlib.Path) -> str:
    """Returns Git's id of a file's content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*args: str) -> str:
    if not (ROOT / ".git").exists():  # installed; an enclosing repository is another project's
        return ""
    try:
        run = subprocess.run(
            ["git", *args],
            cwd=PACKAGE,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git
        return ""
    return run.stdout.strip()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()
