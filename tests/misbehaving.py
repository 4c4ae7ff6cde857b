"""A server that answers as completions do, or misbehaves in one named way: python misbehaving.py PORT [WAY]."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

WORDS = ["one ", "two ", "three ", "four "]
REPLIES = {  # to who asks for a completion
    "refuses": (503, b'{"error": {"message": "all slots are busy"}}'),
    "wants_a_key": (401, b'{"error": "no key"}'),
}
STREAMS = {  # the one event of an answer that then ends
    "says_error": b'{"error": {"message": "out of memory"}}',
    "truncated": b'{"choices": [{"text": "one "}]}',
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    way = ""
    dying = False
    asking: ClassVar[list[str]] = []  # prompts that are being answered
    keys: ClassVar[list[str]] = []
    asked: ClassVar[list[tuple[int, str]]] = []  # tokens of an answer, and its prompt

    def do_GET(self):
        models = ("one", "two") if self.way == "several" else ("stand-in",)
        self.reply(200, json.dumps({"data": [{"id": name} for name in models]}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.keys.append(self.headers.get("Authorization", ""))
        Handler.asking.append(prompt := asked.get("prompt", ""))
        Handler.asked.append((asked["max_tokens"], prompt))
        try:
            self.complete(asked)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            Handler.asking.remove(prompt)

    def complete(self, asked):
        if self.way in REPLIES:
            self.reply(*REPLIES[self.way])
        elif self.way in STREAMS:
            self.begin()
            self.chunk(b"data: " + STREAMS[self.way] + b"\n\n")
            self.chunk(b"")
        else:
            getattr(self, self.way, self.well)(asked)

    # ---------------------------------------------------------------- ways

    def well(self, asked):
        self.begin()
        words = [*WORDS, asked["prompt"][:8]][: asked["max_tokens"]]
        for word in words:
            self.tell(word)
            time.sleep(0.002)
        self.end(len(words), max(len(asked["prompt"]) // 3, 3))

    def thinks_at_length(self, asked):
        """As many tokens as asked for, and all of it is reasoning."""
        self.begin()
        for _ in range(asked["max_tokens"]):
            time.sleep(0.002)
            self.event({"choices": [{"delta": {"reasoning": "word "}}]})
        self.end(asked["max_tokens"], max(len(asked.get("prompt", "")) // 3, 3))

    # An answer of its prompt's own, or one that parts from it at the third word: that word led by so many nats alone.

    def mixes_equals(self, asked):
        """Copies of a prompt disturb those that come after the first of them; other prompts do not."""
        first = next(prompt for prompt in Handler.asking if prompt == asked["prompt"]) is asked["prompt"]
        time.sleep(0.05)
        self.speak(asked, not first)

    def mixes_others(self, asked):
        """Other prompts disturb; copies of the same one do not."""
        self.speak(asked, any(prompt != asked["prompt"] for prompt in self.others(asked)))

    def rounds(self, asked):
        """As batch-variant kernels do: the shortest prompts have a near-tie, which the batch decides."""
        self.speak(asked, bool(self.others(asked)) and len(asked["prompt"]) < 700, lead=0.05)

    def others(self, asked):
        """Prompts of those who ask meanwhile."""
        time.sleep(0.05)
        others = list(Handler.asking)
        others.remove(asked["prompt"])
        return others

    def speak(self, asked, otherwise=False, lead=1.0):
        self.begin()
        for number, word in enumerate(("one ", "two ", "tres " if otherwise else "three ", asked["prompt"][:8])):
            logs = {"tokens": [word], "top_logprobs": [{word: -0.1, "else": -0.1 - (lead if number == 2 else 2.0)}]}
            self.event({"choices": [{"text": word} | ({"logprobs": logs} if asked.get("logprobs") else {})]})
        self.end(4)

    def dies_together(self, asked):
        """Ends as a large process does: it answers nobody any more, and holds its port until its memory is written."""
        time.sleep(0.05)
        Handler.dying |= len(Handler.asking) > 1
        if Handler.dying:
            sys.stdout.write("GGML_ASSERT(fits) failed\n")
            sys.stdout.flush()
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGABRT)).start()
            raise ConnectionResetError
        self.well(asked)

    def in_pairs(self, asked):
        """Two tokens a chunk, an empty chunk first."""
        self.begin()
        self.tell("")
        time.sleep(0.02)
        self.tell("one two ")
        time.sleep(0.02)
        self.tell("three four ")
        self.end(4)

    def chats(self, asked):
        """Knows no completions."""
        self.reply(404, b"{}") if "prompt" in asked else self.thinks_at_length(asked)

    def hangs(self, asked):
        if asked["prompt"] == "Hello":
            return self.well(asked)
        self.begin()
        self.tell("one ")
        return time.sleep(30)

    # ---------------------------------------------------------------- pieces

    def begin(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def tell(self, text):
        self.event({"choices": [{"text": text}]})

    def event(self, told):
        self.chunk(b"data: " + json.dumps(told).encode() + b"\n\n")

    def end(self, n_gen, n_prompt=3):
        told = {"usage": {"prompt_tokens": n_prompt, "completion_tokens": n_gen}}
        self.event({"choices": []} | told | {"timings": {"predicted_ms": 2.0 * n_gen}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def reply(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def as_llama_server(folder, way="", before=""):
    """A program that is started as llama-server is, and is this server."""
    path = folder / "llama-server"
    path.write_text(
        f"#!/bin/sh\n{before}\nwhile [ $1 != --port ]; do shift; done\nexec {sys.executable} {__file__} $2 {way}\n"
    )
    path.chmod(0o755)
    return path


@contextmanager
def standing_in(monkeypatch):
    """A function that starts such a server within this process, misbehaving in a way, and gives its address."""
    running = []

    def start(way=""):
        monkeypatch.setattr(Handler, "keys", [])
        monkeypatch.setattr(Handler, "asked", [])
        httpd = Server(("127.0.0.1", 0), type("Handler", (Handler,), {"way": way}))
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        running.append(httpd)
        return f"http://127.0.0.1:{httpd.server_port}"

    yield start
    for httpd in running:
        httpd.shutdown()
        httpd.server_close()


if __name__ == "__main__":
    Handler.way = sys.argv[2] if len(sys.argv) > 2 else ""
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
