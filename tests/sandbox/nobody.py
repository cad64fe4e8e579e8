"""Runs Python as the user `nobody`, who cannot read this user's files."""

import contextlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

from kvjax.sandbox.layers import base_interpreter

_BECOME = "setpriv --reuid 65534 --regid 65534 --clear-groups"
_ROOT = pathlib.Path(__file__).parents[2]
_COPIED = ("kvjax/__init__.py", "kvjax/sandbox", "tests/__init__.py", "tests/sandbox")


def why_not() -> str | None:
    """Returns why Python cannot be run as `nobody`; None if it can."""
    if os.geteuid():
        return "only root becomes another user"
    if not shutil.which("setpriv") or not shutil.which("unshare"):
        return "setpriv or unshare is not installed"
    return None


def run(arguments: list[str]) -> subprocess.CompletedProcess:
    """Returns the output of `python` in a copy of the sandbox and its tests."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        for name in _COPIED:
            source, target = _ROOT / name, folder / "copy" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if source.is_dir() else shutil.copyfile
            copy(source, target)
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        (folder / "cache").mkdir(mode=0o700)
        shutil.chown(folder / "cache", 65534, 65534)
        interpreter = base_interpreter()
        packages = next((path for path in sys.path if path.endswith("site-packages")), "")
        environment = [
            f"PATH={os.environ['PATH']}",
            f"PYTHONPATH={folder / 'copy'}:{packages}",
            f"XDG_CACHE_HOME={folder / 'cache'}",
        ]
        command = [interpreter, "-B", "-s", *arguments]
        become = f"exec {_BECOME} env -i {shlex.join(environment)} {shlex.join(command)}"
        script = f"set -e; {_mounts(folder / 'prefix')} cd {folder / 'copy'}; {become}"
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False
        )


def _mounts(hold: pathlib.Path) -> str:
    prefix = shlex.quote(sys.base_prefix)
    readable = subprocess.run(
        [*_BECOME.split(), "test", "-x", f"{sys.base_prefix}/lib"], check=False
    )
    if readable.returncode == 0:
        return ""
    hold.mkdir()
    top = shlex.quote("/" + sys.base_prefix.split("/")[1])
    return (
        f"mount --bind {prefix} {hold}; mount -t tmpfs -o mode=755 tmpfs {top}; "
        f"mkdir -p {prefix}; mount --bind {hold} {prefix};"
    )
