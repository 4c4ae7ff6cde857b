"""Loaded before pytest's plugins: the package keeps jsonschema from building a grammar, a second in each process.

And asks every notebook, when its cells were compared with their outputs, whether it loaded the engine: on recorded rows
none may.
"""

import pytest

import plamo_study  # noqa: F401

ASKED = """
import sys
loaded = [each for each in sys.modules if each.split(".")[0] == "llama_cpp"]
assert not loaded, loaded
"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After the last cell of a notebook: an error of that cell where its kernel has loaded the engine."""
    last = nextitem is None or nextitem.parent is not item.parent
    kernel = getattr(item.parent, "kernel", None)
    if last and kernel is not None and kernel.is_alive():
        asked = kernel.execute_cell_input(ASKED)
        while (reply := kernel.get_message("shell", timeout=60))["parent_header"].get("msg_id") != asked:
            pass
        assert reply["content"]["status"] == "ok", reply["content"]["evalue"]
    return (yield)
