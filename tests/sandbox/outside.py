"""Things that a program must not reach: files, listeners and the judging process."""

import contextlib
import os
import pathlib
import resource
import signal
import socket


class Outside(contextlib.ExitStack):
    """A folder with a secret and a victim, and listeners; `changes` lists what programs changed.

    Attributes:
      names: values for `attacks.filled`.
    """

    def __init__(self, folder: pathlib.Path):
        super().__init__()
        self._folder = folder
        (folder / "within").mkdir()
        for name in ("secret", "victim", "removed", "renamed", "within/file"):
            (folder / name).write_text(f"this is {name}")
        path = os.path.relpath(folder / "socket")  # names of sockets are short
        abstract = socket.socket(socket.AF_UNIX)
        tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(str(folder / "socket") if len(str(folder)) < 90 else path)
        port = tcp.getsockname()[1]
        abstract.bind(f"\0kvjax-{port}")
        self._listeners = (tcp, unix, abstract)
        for listener in (unix, abstract):
            listener.listen()
        self._udp = udp
        for end in (*self._listeners, udp):
            end.settimeout(0)
            self.enter_context(end)
        self.callback(pathlib.Path(f"/tmp/kvjax-link-{port}").unlink, missing_ok=True)
        self._signals = []
        before = signal.signal(signal.SIGURG, lambda number, frame: self._signals.append(number))
        self.callback(signal.signal, signal.SIGURG, before)
        self.names = dict(
            FOLDER=folder,
            PORT=port,
            UDP=udp.getsockname()[1],
            PARENT=os.getpid(),
            HOST=socket.gethostname(),
        )
        self._before = self._state()

    def changes(self) -> list[str]:
        """Returns differences from the initial state."""
        state = self._state()
        differences = [name for name in state if state[name] != self._before[name]]
        for listener in self._listeners:
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                differences.append(f"a connection to {listener.getsockname()!r}")
        with contextlib.suppress(BlockingIOError):
            differences.append(f"a datagram {self._udp.recv(100)!r}")
        if self._signals:
            differences.append(f"signals {self._signals}")
        return differences

    def _state(self) -> dict[str, object]:
        files = {
            str(path): (path.lstat().st_mode, path.lstat().st_uid, path.lstat().st_mtime_ns)
            + ((path.read_bytes(),) if path.is_file() else ())
            for path in sorted(self._folder.rglob("*"))
        }
        shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        return {
            "files": files,
            "links": [name for name in os.listdir("/tmp") if name.startswith("kvjax-link")],
            "shared memory": {name for name in shared if name.startswith("psm_")},
            "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
            "cores": os.sched_getaffinity(0),
            "host": socket.gethostname(),
        }
