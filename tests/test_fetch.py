"""A file of a repository comes whole, with its hash, or not at all."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from llama_meter import paths
from llama_meter.errors import StudyError
from llama_meter.models import fetch

BODY = b"GGUF and more"


class Hub(BaseHTTPRequestHandler):
    """Two files of one repository: a.gguf, and gated.gguf, for which a licence is due."""

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer(BODY)

    def answer(self, body=b""):
        gated = self.path.endswith("gated.gguf")
        self.send_response(403 if gated else 200 if self.path.endswith("/a.gguf") else 404)
        if not self.path.endswith("/a.gguf"):
            self.send_header("X-Error-Code", "GatedRepo" if gated else "EntryNotFound")
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    yield
    server.shutdown()


def test_a_file_comes_with_its_hash_which_is_held_against_the_expected_one(tmp_path):
    path, sha256 = fetch.fetch("owner/name", "a.gguf")
    assert path.read_bytes() == BODY
    assert path.is_relative_to(tmp_path)
    assert sha256 == hashlib.sha256(BODY).hexdigest()
    with pytest.raises(StudyError, match="its SHA-256 is"):
        fetch.fetch("owner/name", "a.gguf", sha256="0" * 64)


@pytest.mark.parametrize(("name", "why"), [("gated.gguf", "is gated"), ("other.gguf", "404")])
def test_what_the_hub_refuses_is_one_sentence(name, why):
    with pytest.raises(StudyError, match=why):
        fetch.fetch("owner/name", name)
