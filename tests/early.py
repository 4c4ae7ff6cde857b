"""Loaded before pytest's plugins: asks every notebook whether it loaded the engine, once its outputs were compared.

On recorded rows none may. What a chart draws is compared too: it stands in the metadata of an output, where nbval does
not look. Its picture is not, so none is painted, but for a chart without data, which may be a text instead. Whether
charts can be painted, tests of `publish` ask: of an article, and of every page in a browser.

The notebooks of a process share one kernel, as starting one and loading Altair and SciPy takes longer than most pages.
Each finds no name of the one before it, no theme and no recording that was read.
"""

import json

import pytest

SPEC_KEY = "plamo_study_vegalite"  # of show.theme, which loads Altair

ASKED = """
import sys
loaded = [each for each in sys.modules if each.split(".")[0] == "llama_cpp"]
assert not loaded, loaded
"""

UNPAINTED = """
def unpainted(paint):
    from base64 import b64decode
    dot = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
    return lambda spec, **how: dot if all(spec.get("datasets", {}).values()) else paint(spec, **how)
import vl_convert
vl_convert.vegalite_to_png = unpainted(vl_convert.vegalite_to_png)
del unpainted, vl_convert
"""

AFRESH = """
import altair
from plamo_study import measurements
measurements.recording.cache_clear()
altair.theme.enable("default")
altair.renderers.enable("default")
get_ipython().reset(new_session=False)
"""
running = []  # the kernel


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After the last cell of a notebook: an error of that cell where its kernel has loaded the engine."""
    last = nextitem is None or nextitem.parent is not item.parent
    kernel = getattr(item.parent, "kernel", None)
    if last and kernel is not None and kernel.is_alive():
        asked = kernel.execute_cell_input(ASKED)
        while (reply := kernel.get_message("shell", timeout=60))["parent_header"].get("msg_id") != asked:
            pass
        if reply["content"]["status"] != "ok":
            kernel.stop()
        assert reply["content"]["status"] == "ok", reply["content"]["evalue"]
    return (yield)


def pytest_configure():
    """Let nbval see the data of charts, and paint no picture."""
    from nbval.plugin import IPyNbCell, IPyNbFile  # only now, when pytest has rewritten its assertions

    compare, start = IPyNbCell.compare_outputs, IPyNbFile.setup

    def compared(cell, test, ref, skip_compare=None):
        return compare(cell, [*map(with_data, test)], [*map(with_data, ref)], skip_compare)

    def started(file):
        if running and running[0].is_alive():
            file.kernel = running[0]
            file.setup_sanitize_files()
            file.kernel.execute_cell_input(AFRESH)
        else:
            start(file)
            running[:] = [file.kernel]
            file.kernel.execute_cell_input(UNPAINTED)

    IPyNbCell.compare_outputs, IPyNbFile.setup, IPyNbFile.teardown = compared, started, lambda file: None


def pytest_unconfigure():
    """Stop the kernel."""
    for kernel in running:
        if kernel.is_alive():
            kernel.stop()


def with_data(output):
    """An output of a notebook; where it is a chart, with what is drawn as one more form of it."""
    spec = output.get("metadata", {}).get(SPEC_KEY)
    if spec is None:
        return output
    drawn = sorted(json.dumps(rounded(each), indent=0, sort_keys=True) for each in spec.get("datasets", {}).values())
    return type(output)(output | {"data": output["data"] | {"data of the chart": "\n".join(drawn)}})


def rounded(data):
    """The same data with numbers of six digits."""
    if isinstance(data, dict):
        return {name: rounded(each) for name, each in data.items()}
    if isinstance(data, list):
        return [*map(rounded, data)]
    return float(f"{data:.6g}") if isinstance(data, float) else data
