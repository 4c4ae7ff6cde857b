"""A model hub on loopback: as much of the protocol as the real client needs, and every way it can fail.

Small files answer at /<repository>/resolve/<revision>/<file> itself, safetensors redirect from there to a second
origin (another port), as released weights do. Files, commits and faults are attributes that a test sets.
"""

import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

PIECE = 1 << 16


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    start: int  # first byte asked for
    token: str  # of the Authorization header


@dataclass(frozen=True)
class Refusal:
    """An answer that is none: for requests whose path contains `where`."""

    where: str
    status: int
    code: str = ""
    message: str = ""
    body: str = ""


@dataclass
class Hub:
    """One repository. `publish` makes a commit of it the main branch."""

    repository: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    sent: int = 0  # bytes of bodies
    url: str = ""
    storage: str = ""
    stopped: bool = False

    refusals: list[Refusal] = field(default_factory=list)
    announced: dict[str, str] = field(default_factory=dict)  # file → SHA-256 that it is said to have
    replaced: dict[str, bytes] = field(default_factory=dict)  # file → body that comes instead
    cuts: list[int] = field(default_factory=list)  # bytes after which the next bodies of safetensors are cut
    endless: str = ""  # requests whose path contains it get a body without end
    drip: str = ""  # and these theirs a byte at a time
    coding: str = ""  # content encoding that answers are said to have
    reset: bool = False  # a cut is a reset instead of an end
    stalls: list[int] = field(default_factory=list)  # bytes after which the next ones stop, connection open
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def publish(self, files: dict[str, bytes]) -> str:
        """Make `files` the main branch; returns the commit."""
        digest = hashlib.sha1(str(len(self.commits)).encode())
        for name, body in sorted(files.items()):
            digest.update(name.encode() + body)
        commit = digest.hexdigest()
        self.commits[commit], self.branches["main"] = dict(files), commit
        return commit

    def paths(self, part: str) -> list[str]:
        """The paths of all requests so far that contain `part`."""
        return [request.path for request in self.requests if part in request.path]


def is_large(name: str) -> bool:
    """Whether a file is kept in large file storage."""
    return name.endswith(".safetensors")


def git_blob(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, to publish."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def serve(files: dict[str, bytes], repository: str = "pfnet/plamo-2-1b") -> Iterator[Hub]:
    """A hub that runs while the block does, with `files` as its main branch."""
    hub = Hub(repository)
    hub.publish(files)
    handler = type("Handler", (_Handler,), {"hub": hub})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
    hub.url, hub.storage = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.stopped = True
        hub.go_on.set()
        for server in servers:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start, token = int(ranged[1]) if ranged else 0, self.headers.get("Authorization", "")
        self.hub.requests.append(Request(self.command, path, start, token))
        if self.hub.stopped:
            self.close_connection = True
            return
        if self.hub.endless and self.hub.endless in path:
            return self._without_end(500 if "storage" in path else 200)
        for refusal in self.hub.refusals:
            if refusal.where in path:
                return self._refuse(refusal)
        repository = re.escape(self.hub.repository)
        if match := re.fullmatch(f"/api/models/{repository}(?:/(revision|tree)/(.+))?", path):
            return self._api(match[1] or "revision", match[2] or "main")
        if match := re.fullmatch(f"/{repository}/resolve/([^/]+)/(.+)", path):
            return self._resolve(match[1], match[2], start)
        if match := re.fullmatch(r"/storage/([^/]+)/(.+)", path):
            return self._send(self._body(match[1], match[2]), start, match[2], {})
        return self._refuse(Refusal("", 404, "RepoNotFound", "Repository not found"))

    def _without_end(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):  # until the client has gone
            while not self.hub.stopped:
                self.wfile.write(b'{"siblings": [' + b'{"rfilename": "x"},' * 3000)

    def _api(self, kind: str, revision: str) -> None:
        commit = self.hub.branches.get(revision, revision)
        if commit not in self.hub.commits:
            return self._refuse(Refusal("", 404, "RevisionNotFound", "Invalid rev id"))
        files = self.hub.commits[commit].items()
        if kind == "tree":
            return self._json([self._tree_entry(name, body) for name, body in files])
        siblings = [self._sibling(name, body) for name, body in files]
        return self._json({"id": self.hub.repository, "sha": commit, "gated": False, "siblings": siblings})

    def _sha256(self, name: str, body: bytes) -> str:
        return self.hub.announced.get(name) or hashlib.sha256(body).hexdigest()

    def _sibling(self, name: str, body: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"rfilename": name, "size": len(body), "blobId": git_blob(body)}
        if is_large(name):
            entry["lfs"] = {"sha256": self._sha256(name, body), "size": len(body), "pointerSize": 134}
        return entry

    def _tree_entry(self, name: str, body: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(body), "oid": git_blob(body)}
        if is_large(name):
            entry["lfs"] = {"oid": self._sha256(name, body), "size": len(body), "pointerSize": 134}
        return entry

    def _resolve(self, revision: str, name: str, start: int) -> None:
        commit = self.hub.branches.get(revision, revision)
        body = self.hub.commits.get(commit, {}).get(name)
        if body is None:
            code = "EntryNotFound" if commit in self.hub.commits else "RevisionNotFound"
            return self._refuse(Refusal("", 404, code))
        if not is_large(name):
            return self._send(
                self._body(commit, name), start, name, {"X-Repo-Commit": commit, "ETag": f'"{git_blob(body)}"'}
            )
        self.send_response(302)
        self.send_header("Location", f"{self.hub.storage}/storage/{commit}/{name}")
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Etag", f'"{self._sha256(name, body)}"')
        self.send_header("X-Linked-Size", str(len(body)))
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def _body(self, commit: str, name: str) -> bytes:
        return self.hub.replaced.get(name, self.hub.commits[commit][name])

    def _send(self, body: bytes, start: int, name: str, headers: dict[str, str]) -> None:
        self.send_response(206 if start else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = memoryview(body)[start:]
        cut = self.hub.cuts.pop(0) if self.hub.cuts and is_large(name) else len(rest)
        stall = self.hub.stalls.pop(0) if self.hub.stalls and is_large(name) else -1
        self._pieces(rest[:cut] if stall < 0 else rest[:stall])
        if stall >= 0:
            self.hub.stalled.set()
            self.hub.go_on.wait(60)
        if cut < len(rest) or stall >= 0:
            self._cut()

    def _pieces(self, body: memoryview) -> None:
        slow = bool(self.hub.drip) and self.hub.drip in self.path
        piece = 1 if slow else PIECE
        try:
            for offset in range(0, len(body), piece):
                self.wfile.write(body[offset : offset + piece])
                self.hub.sent += len(body[offset : offset + piece])
                time.sleep(0.02 * slow)
        except OSError:  # the client has gone
            self.close_connection = True

    def _cut(self) -> None:
        self.close_connection = True
        if self.hub.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def _refuse(self, refusal: Refusal) -> None:
        message = refusal.message.replace("{token}", self.headers.get("Authorization", ""))
        body = refusal.body or json.dumps({"error": message})
        self.send_response(refusal.status)
        if refusal.code:
            self.send_header("X-Error-Code", refusal.code)
        if message:
            self.send_header("X-Error-Message", message)
            self.send_header("X-HF-Warning", f"told; {message}")
        self._finish(body, "text/html" if refusal.body else "application/json")

    def _json(self, answer: object) -> None:
        self.send_response(200)
        self._finish(json.dumps(answer), "application/json")

    def _finish(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.hub.coding:
            self.send_header("Content-Encoding", self.hub.coding)
        self.end_headers()
        if self.command != "HEAD":
            self._pieces(memoryview(body))
