"""A server that answers as completions do, or misbehaves in one named way: python misbehaving.py PORT [WAY]."""

import gzip
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
GIGABYTE = 1 << 30
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e \r[/red]"

NO_GZIP = (200, b"this was never compressed", {"Content-Encoding": "gzip"})
REFUSALS = {  # bodies of HTTP 400 to a prompt that does not fit; each says that a slot has 200 tokens
    "small_slot": {"error": {"message": "request (%d tokens) exceeds the available context size (200 tokens)"}},
    "small_slot_by_field": {"error": {"message": "too long, try increasing it", "n_prompt_tokens": 300, "n_ctx": 200}},
    "small_slot_in_words": {"detail": "This model's maximum context length is 200 tokens. You requested 334 tokens"},
}
LISTS = {  # answers to who lists the models
    "a_bomb": (200, gzip.compress(bytes(GIGABYTE >> 5), 1), {"Content-Encoding": "gzip"}),
    "no_gzip": NO_GZIP,
    "deeply": (200, b'{"found": ' + b"[" * 100_000),
    "infinity": (200, b'{"data": [{"id": Infinity}]}'),
    "several": (200, b'{"data": [{"id": "one"}, {"id": "two"}]}'),
}
REPLIES = {  # to who asks for a completion
    "compresses": NO_GZIP,
    "refuses": (503, b'{"error": {"message": "all slots are busy"}}'),
    "refuses_with_escapes": (404, json.dumps({"error": {"message": ESCAPES}}).encode()),
    "wants_a_key": (401, b'{"error": "no key"}'),
    "knows_no_such_model": (404, b'{"object": "error", "message": "no such model"}'),
    "is_down": (502, b"<html><title>Bad Gateway</title></html>"),
    "is_busy": (429, b""),
    "is_a_page": (200, b"<!doctype html>", {"Content-Type": "text/html"}),
}
STREAMS = {  # the one event of an answer that then ends
    "counts_a_billion": b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1000000000}}',
    "counts_infinity": b'{"usage": {"prompt_tokens": 1, "completion_tokens": Infinity}}',
    "counts_beyond": b'{"timings": {"predicted_ms": 1' + b"0" * 400 + b"}}",
    "says_deeply": b'{"error": ' + b"[" * 100_000,
    "says_numbers": b'{"choices": [{"text": 5}]}',
    "says_no_text": b'{"choices": [{"text": "\xff"}]}',
    "nests_text": b'{"choices": [{"text": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    "says_error": b'{"error": {"message": "out of memory"}}',
    "malformed": b"{this is no JSON",
    "wrong_kind": b"[1, 2, 3]",
    "truncated": b'{"choices": [{"text": "one "}]}',
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    way = ""
    busy = 0
    dying = False
    asking: ClassVar[list[str]] = []  # prompts that are being answered
    asked_before = 0
    keys: ClassVar[list[str]] = []
    models: ClassVar[set[str]] = set()  # that were asked

    def do_GET(self):
        if self.way in LISTS:
            return self.reply(*LISTS[self.way])
        return self.quietly(getattr(self, f"lists_{self.way}", self.lists))

    def quietly(self, tell):
        try:
            tell()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.keys.append(self.headers.get("Authorization", ""))
        Handler.models.add(asked.get("model", ""))
        Handler.busy += 1
        Handler.asking.append(prompt := asked.get("prompt", ""))
        try:
            if not asked["stream"]:
                choice = {"text": "".join(WORDS)}
                usage = {"prompt_tokens": 3, "completion_tokens": len(WORDS)}
                self.reply(200, json.dumps({"choices": [choice], "usage": usage}).encode())
            else:
                self.complete(asked)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            Handler.busy -= 1
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

    # ---------------------------------------------------------------- ways to list models

    def lists(self):
        self.reply(200, json.dumps({"data": [{"id": "stand-in", "owned_by": "nobody"}]}).encode())

    def lists_without_end(self):
        self.begin()
        self.chunk(b'{"data": [')
        while True:
            self.chunk(b'{"id": "x"},' * 10_000)

    def lists_in_drops(self):
        self.begin()
        while True:
            self.chunk(b" ")
            time.sleep(0.05)

    # ---------------------------------------------------------------- ways to refuse

    def small_slot(self, asked):
        if len(asked["prompt"]) > 600:
            return self.reply(400, json.dumps(REFUSALS[self.way]).replace("%d", "300").encode())
        return self.well(asked)

    small_slot_by_field = small_slot_in_words = small_slot

    # ---------------------------------------------------------------- ways

    def holds_back(self, asked):
        """As behind a proxy that buffers: all of it at the end."""
        self.held = b""
        self.at_length(asked)

    def holds_back_some(self, asked):
        """And by sixteen pieces."""
        self.most_held = 16
        self.holds_back(asked)

    def counts_nothing(self, asked):
        self.well(asked, counts=False)

    def drips_later(self, asked):
        self.well(asked) if asked["prompt"] == "Hello" else self.drips(asked)

    def drips(self, asked):
        self.begin()
        while True:
            self.chunk(b"d")
            time.sleep(0.05)

    def well(self, asked, counts=True):
        self.begin()
        words = [*WORDS, asked["prompt"][:8]][: asked["max_tokens"]]
        for word in words:
            self.tell(word)
            time.sleep(0.002)
        self.end(len(words) if counts else None, max(len(asked["prompt"]) // 3, 3))

    def at_length(self, asked, name="text"):
        """As many tokens as asked for, in fields of a name."""
        self.begin()
        for _ in range(asked["max_tokens"]):
            time.sleep(0.002)
            self.event({"choices": [{"text": "", name: "word "}]})
        self.end(asked["max_tokens"], max(len(asked["prompt"]) // 3, 3))

    def thinks_at_length(self, asked):
        """All of it is reasoning."""
        self.at_length(asked, "reasoning")

    def mixes(self, asked):
        """The answer depends on who else is asking."""
        time.sleep(0.05)
        others = Handler.busy
        self.begin()
        self.tell("alone" if others == 1 else f"with {others}")
        self.end(1)

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

    def rounds_untold(self, asked):
        """The same, and the server gives no log probabilities."""
        self.rounds(asked | {"logprobs": None})

    def rounds_everything(self, asked):
        self.speak(asked, bool(self.others(asked)), lead=0.05)

    def samples(self, asked):
        """Every third answer is another one, neighbours or not."""
        Handler.asked_before += 1
        self.speak(asked, len(asked["prompt"]) > 100 and Handler.asked_before % 3 == 0)

    def limits(self, asked):
        """One request at a time; others are refused."""
        if self.others(asked):
            self.reply(429, b'{"error": {"message": "slow down"}}')
        else:
            self.speak(asked)

    def repeats(self, asked):
        """The same answer to every prompt."""
        self.begin()
        self.tell("I cannot help with that.")
        self.end(6)

    def floods(self, asked):
        """Answers as asked, beside four megabytes of comments."""
        self.begin()
        for _ in range(64 if len(asked["prompt"]) > 100 else 0):
            self.chunk(b":" + b"." * (1 << 16) + b"\n")
        self.tell(asked["prompt"][:8])
        self.end(1)

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
        time.sleep(0.05)
        self.die_if_not_alone()
        self.well(asked)

    def die_if_not_alone(self):
        """Ends as a large process does: it answers nobody any more, and holds its port until its memory is written."""
        Handler.dying |= Handler.busy > 1
        if Handler.dying:
            sys.stdout.write("GGML_ASSERT(fits) failed\n")
            sys.stdout.flush()
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGABRT)).start()
            raise ConnectionResetError

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
        if "prompt" in asked:
            return self.reply(404, b"{}")
        return self.thinks(asked)

    def thinks(self, asked):
        self.begin()
        self.event({"choices": [{"delta": {"reasoning_content": "hm"}}]})
        self.event({"choices": [{"delta": {"content": "yes"}}]})
        self.end(2)

    def hangs(self, asked):
        self.begin()
        self.tell("one ")
        time.sleep(30)

    def cut(self, asked):
        self.begin()
        self.tell("one ")
        self.close_connection = True

    def redirects(self, asked):
        self.send_response(307)
        self.send_header("Location", "http://127.0.0.1:1/v1/completions")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def by_bytes(self, asked):
        """10,000 chunks of HTTP of one byte each."""
        self.begin()
        word = "x" * 9_900
        data = b"data: " + json.dumps({"choices": [{"text": word}]}).encode() + b"\n\n"
        assert len(data) < 10_000
        data += b":" + b"." * (10_000 - len(data) - 2) + b"\n"
        for at in range(len(data)):
            self.chunk(data[at : at + 1])
        self.end(1)

    def gigabyte(self, asked):
        self.begin()
        piece = b"data: " + json.dumps({"choices": [{"text": "x" * 60_000}]}).encode() + b"\n\n"
        for _ in range(GIGABYTE // len(piece)):
            self.chunk(piece)

    def one_line(self, asked):
        self.begin()
        for _ in range(64):
            self.chunk(b"x" * 100_000)

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
        if n_gen is not None:
            told = {"usage": {"prompt_tokens": n_prompt, "completion_tokens": n_gen}}
            told |= {"timings": {"predicted_ms": 2.0 * n_gen}}
            self.event({"choices": []} | told)
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    held = None  # what is held back; None for nothing
    most_held, n_held = 1 << 30, 0  # pieces

    def chunk(self, data):
        framed = f"{len(data):x}\r\n".encode() + data + b"\r\n"
        if self.held is not None:
            self.held, self.n_held = self.held + framed, self.n_held + 1
            if data and self.n_held < self.most_held:
                return
            framed, self.held, self.n_held = self.held, b"", 0
        self.wfile.write(framed)
        self.wfile.flush()

    def reply(self, code, body, headers=None):
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
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
        f"#!/bin/sh\n{before}\n[ $1 = --version ] && exec echo 'version: 1 (stand-in)'\n"
        f"while [ $1 != --port ]; do shift; done\nexec {sys.executable} {__file__} $2 {way}\n"
    )
    path.chmod(0o755)
    return path


@contextmanager
def standing_in(monkeypatch):
    """A function that starts such a server within this process, misbehaving in a way, and gives its address."""
    running = []

    def start(way=""):
        monkeypatch.setattr(Handler, "keys", [])
        monkeypatch.setattr(Handler, "models", set())
        monkeypatch.setattr(Handler, "asked_before", 0)
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
