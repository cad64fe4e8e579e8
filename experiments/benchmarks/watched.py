"""A command in a process of its own, and the highest memory that it takes. Needs Linux."""

from collections.abc import Sequence
import pathlib
import subprocess
import tempfile
import time

from kvjax.foundation.errors import UserError

_EVERY = 0.2  # seconds between two looks at a process's memory


def check() -> None:
    """Raises a UserError where a process's anonymous memory is not told."""
    if not pathlib.Path("/proc/self/status").exists():
        raise UserError("/proc is not there: only Linux tells a process's anonymous memory")


def run(command: Sequence[str]) -> dict:
    """Seconds of a command, and its highest bytes of anonymous and of all resident memory.

    Files that are read and written lie in the system's cache besides, which gives way: they are
    resident and not anonymous.

    Raises:
      UserError: it failed, with the end of what it said.
    """
    begun, peak = time.perf_counter(), dict(RssAnon=0, VmRSS=0)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            for name, size in _memory(process.pid).items():
                peak[name] = max(peak[name], size)
            time.sleep(_EVERY)
        log.seek(0)
        if process.returncode:
            raise UserError(f"{' '.join(command)}: {log.read()[-500:]}")
    seconds = time.perf_counter() - begun
    return dict(seconds=seconds, anonymous=peak["RssAnon"], resident=peak["VmRSS"])


def _memory(pid: int) -> dict[str, int]:
    """Bytes of anonymous and of all resident memory of a process; none of one that has ended."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    lines = dict(line.split(":", 1) for line in status.splitlines())
    wanted = [name for name in ("RssAnon", "VmRSS") if name in lines]
    return {name: 1024 * int(lines[name].split()[0]) for name in wanted}
