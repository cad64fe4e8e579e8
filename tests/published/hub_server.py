"""A local server with the endpoints of a hub that kvjax uses."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading
import urllib.parse

COMMIT = "a" * 40


class Hub:
    """A hub with the files of one folder.

    Attributes:
      url: its HF_ENDPOINT.
      requests: "GET /path" in order.
      failing: paths that are refused with status 403.
    """

    def __init__(self, repository: str, folder: pathlib.Path, *, kind: str = "model"):
        self.prefix = dict(model="", dataset="datasets/")[kind]
        self.api = f"/api/{kind}s/{repository}"
        self.repository, self.folder = repository, folder
        self.requests, self.failing = [], set()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                hub.requests.append(f"{self.command} {self.path}")
                status, headers, body = hub.answer(urllib.parse.unquote(self.path))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str) -> tuple[int, dict, bytes]:
        path, _, query = path.partition("?")
        if path in self.failing:
            return 403, {}, b""
        if path in (self.api, *(f"{self.api}/revision/{name}" for name in ("main", COMMIT))):
            return 200, {}, json.dumps(dict(id=self.repository, sha=COMMIT)).encode()
        if path.startswith(f"{self.api}/revision/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if path.startswith(f"{self.api}/tree/{COMMIT}"):
            below = path.removeprefix(f"{self.api}/tree/{COMMIT}").strip("/")
            return (
                200,
                {},
                json.dumps(list(self._tree(below, "recursive=true" in query.lower()))).encode(),
            )
        resolve = f"/{self.prefix}{self.repository}/resolve/{COMMIT}/"
        file = self.folder / path.removeprefix(resolve)
        if path.startswith(resolve) and file.is_file():
            body = file.read_bytes()
            digest = hashlib.sha256(body).hexdigest()
            return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'}, body
        missing = "EntryNotFound" if path.startswith(resolve) else "RepoNotFound"
        return 404, {"X-Error-Code": missing}, b""

    def _tree(self, below: str, recursive: bool):
        root = self.folder / below
        for path in sorted(root.rglob("*") if recursive else root.iterdir()):
            name = path.relative_to(self.folder).as_posix()
            kind, size = ("file", path.stat().st_size) if path.is_file() else ("directory", 0)
            oid = hashlib.sha1(name.encode()).hexdigest()
            yield dict(type=kind, path=name, size=size, oid=oid)

    def downloaded(self) -> list[str]:
        """Returns the files that were downloaded."""
        downloads = [r for r in self.requests if r.startswith("GET") and "/resolve/" in r]
        return sorted(urllib.parse.unquote(r.partition(f"{COMMIT}/")[2]) for r in downloads)

    @contextlib.contextmanager
    def serving(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
