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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PIECE = 1 << 16


@dataclass(frozen=True)
class Request:
    """One request as it came."""

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
    informs: str = ""  # and these informational answers without end
    pause_s: float = 0.0  # between two of those
    coding: str = ""  # content encoding that answers are said to have
    raw: dict[str, bytes] = field(default_factory=dict)  # part of a path → all that comes, headers and body
    unranged: bool = False  # ranges are ignored: every body begins at its first byte
    listed: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # what the list of files says instead
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

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(ranged[1]) if ranged and not hub.unranged else 0
        hub.requests.append(Request(path, start, self.headers.get("Authorization", "")))
        if hub.stopped:
            self.close_connection = True
            return
        for where, answer in hub.raw.items():
            if where in path:
                self.close_connection = True
                with suppress(OSError):
                    self.wfile.write(answer)
                return None
        if hub.informs and hub.informs in path:
            return self._inform()
        if hub.endless and hub.endless in path:
            return self._without_end(500 if "storage" in path else 200)
        for refusal in hub.refusals:
            if refusal.where in path:
                return self._refuse(refusal)
        repository = re.escape(hub.repository)
        if match := re.fullmatch(f"/api/models/{repository}(?:/revision/(.+))?", path):
            return self._list(match[1] or "main")
        if match := re.fullmatch(f"/{repository}/resolve/([^/]+)/(.+)", path):
            commit, name = match.groups()
            if name not in hub.commits.get(commit, {}):
                return self._refuse(Refusal("", 404, "EntryNotFound"))
            if is_large(name):
                location = f"{hub.storage}/storage/{commit}/{name}"
                return self._answer(302, b"", {"Location": location})
            return self._send(commit, name, start)
        if match := re.fullmatch(r"/storage/([^/]+)/(.+)", path):
            return self._send(match[1], match[2], start)
        return self._refuse(Refusal("", 404, "RepoNotFound", "Repository not found"))

    def _inform(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            while not self.hub.stopped:
                self.wfile.write(b"HTTP/1.1 102 Processing\r\n\r\n")
                time.sleep(self.hub.pause_s)

    def _without_end(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):  # until the client has gone
            while not self.hub.stopped:
                self.wfile.write(b'{"siblings": [' + b'{"rfilename": "x"},' * 3000)

    def _list(self, revision: str) -> None:
        commit = self.hub.branches.get(revision, revision)
        if commit not in self.hub.commits:
            return self._refuse(Refusal("", 404, "RevisionNotFound", "Invalid rev id"))
        siblings = [self._sibling(name, body) for name, body in self.hub.commits[commit].items()]
        listed = {"id": self.hub.repository, "sha": commit, "gated": False, "siblings": siblings}
        if self.hub.listed is not None:
            listed |= self.hub.listed(listed)
        return self._answer(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def _sibling(self, name: str, body: bytes) -> dict[str, object]:
        git = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        entry: dict[str, object] = {"rfilename": name, "size": len(body), "blobId": git}
        if is_large(name):
            sha256 = self.hub.announced.get(name) or hashlib.sha256(body).hexdigest()
            entry["lfs"] = {"sha256": sha256, "size": len(body), "pointerSize": 134}
        return entry

    def _send(self, commit: str, name: str, start: int) -> None:
        """A file from byte `start`, whole or cut as a test wants it."""
        hub = self.hub
        body = hub.replaced.get(name, hub.commits[commit][name])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        rest = memoryview(body)[start:]
        stall = hub.stalls.pop(0) if hub.stalls and is_large(name) else None
        cut = hub.cuts.pop(0) if hub.cuts and is_large(name) else stall
        self._pieces(rest[:cut])
        if stall is not None:
            hub.stalled.set()
            hub.go_on.wait(60)
        if cut is not None:
            self.close_connection = True
            if hub.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

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

    def _refuse(self, refusal: Refusal) -> None:
        message = refusal.message.replace("{token}", self.headers.get("Authorization", ""))
        headers = {"Content-Type": "text/html" if refusal.body else "application/json"}
        headers |= {"X-Error-Code": refusal.code} if refusal.code else {}
        headers |= {"X-Error-Message": message, "X-HF-Warning": f"told; {message}"} if message else {}
        self._answer(refusal.status, (refusal.body or json.dumps({"error": message})).encode(), headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        headers |= {"Content-Length": str(len(body))} | (
            {"Content-Encoding": self.hub.coding} if self.hub.coding else {}
        )
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self._pieces(memoryview(body))
