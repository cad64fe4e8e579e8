"""A stand-in for Google Cloud Storage with a latency: serves byte ranges of a folder's files.

Implements the requests of ArrayRecord: GET of an object's bytes (JSON API, alt=media). ArrayRecord
finds it by $CLOUD_STORAGE_EMULATOR_ENDPOINT. The folder's subfolder `x` is the bucket gs://x.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent import futures
import contextlib
import functools
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import urllib.parse

ENDPOINT = "CLOUD_STORAGE_EMULATOR_ENDPOINT"
_ROOT = pathlib.Path(__file__).parents[2]
_OBJECT = re.compile(rb"GET \S*/b/([^/?]+)/o/([^?\s]+)\S* ")
_RANGE = re.compile(rb"\r\n[Rr]ange: bytes=(\d*)-(\d*)")
_HEAD = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Type: application/octet-stream\r\n"
    b"Content-Range: bytes %d-%d/%d\r\nContent-Length: %d\r\n\r\n"
)
_SENT_AHEAD = 1 << 16  # limit of bytes in flight per connection, as in a network
_CODE = (
    "import sys; from experiments.benchmarks import object_store; object_store.main(*sys.argv[1:])"
)


class Store:
    """Serves the files of a folder.

    Args:
      before: awaited before each answer, with the object's path and the range's first byte; a
        PermissionError becomes status 403.
    """

    def __init__(self, folder: os.PathLike | str, before: Callable[[str, int], Awaitable]):
        self._folder, self._before = os.fspath(folder), before
        self.requests: list[tuple[str, int, int]] = []  # path, first byte, bytes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one connection until its client leaves."""
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_AHEAD)
        ends = (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError)
        with contextlib.suppress(*ends):
            while True:
                await self._answer(await reader.readuntil(b"\r\n\r\n"), writer)
        writer.close()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        match = _OBJECT.match(head)
        names = [urllib.parse.unquote(name.decode()) for name in match.groups()] if match else [""]
        path = "/".join(names)
        try:
            with open(os.path.join(self._folder, path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                first, end = _requested_range(head, size)
                self.requests.append((path, first, end - first))
                await self._before(path, first)
                writer.write(_HEAD % (first, end - 1, size, end - first))
                for start in range(first, end, _SENT_AHEAD):
                    writer.write(os.pread(file.fileno(), min(end - start, _SENT_AHEAD), start))
                    await writer.drain()
        except (PermissionError, FileNotFoundError, IsADirectoryError) as error:
            status = "403 Forbidden" if isinstance(error, PermissionError) else "404 Not Found"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())


def _requested_range(head: bytes, size: int) -> tuple[int, int]:
    """Returns the start and the end (exclusive) of the requested range of bytes."""
    match = _RANGE.search(head)
    if not match:
        return 0, size
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    return min(int(first), size), min(int(last) + 1, size) if last else size


@contextlib.contextmanager
def threaded(folder: os.PathLike, before: Callable[[str, int], Awaitable]) -> Iterator[Store]:
    """Runs a store in a thread, and points $CLOUD_STORAGE_EMULATOR_ENDPOINT to it."""
    store, started = Store(folder, before), futures.Future()

    async def serve():
        server = await asyncio.start_server(store.serve, "127.0.0.1", 0)
        stop = asyncio.Event()
        port = server.sockets[0].getsockname()[1]
        started.set_result((port, functools.partial(loop.call_soon_threadsafe, stop.set)))
        await stop.wait()

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=runner.run, args=(serve(),))
        thread.start()
        port, stop = started.result()
        try:
            with _endpoint_at(port):
                yield store
        finally:
            stop()
            thread.join()


@contextlib.contextmanager
def process(folder: os.PathLike, seconds: float) -> Iterator[None]:
    """Runs a store in a process of its own; each answer takes `seconds`."""
    command = [sys.executable, "-c", _CODE, os.fspath(folder), str(seconds)]
    child = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    try:
        with _endpoint_at(int(child.stdout.readline())):
            yield
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def _endpoint_at(port: int) -> Iterator[None]:
    before = os.environ.get(ENDPOINT)
    os.environ[ENDPOINT] = f"http://127.0.0.1:{port}"
    try:
        yield
    finally:
        del os.environ[ENDPOINT]
        if before is not None:
            os.environ[ENDPOINT] = before


def main(folder: str, seconds: str) -> None:
    """Serves a folder until it is killed; prints its port."""

    async def serve():
        async def wait(path: str, first: int) -> None:
            await asyncio.sleep(float(seconds))

        server = await asyncio.start_server(Store(folder, wait).serve, "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(serve())
