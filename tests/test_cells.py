"""Types of cells: names in JSON, keys, changes."""

import random

import msgspec
import pytest
from conftest import mini

from llama_meter import cells
from llama_meter.cells import KINDS, ORDER, Decode, Quality, columns
from llama_meter.measure import plan
from llama_meter.rows import row_key


def test_every_name_means_one_default():
    fields = [field for kind in KINDS.values() for field in msgspec.structs.fields(kind)]
    known: dict[str, object] = {}
    for field in fields:
        assert known.setdefault(field.name, field.default) == field.default, f"two defaults of {field.name}"


@pytest.mark.parametrize("name", KINDS)
def test_a_cell_of_every_workload_is_read_as_it_was_written(name):
    cell = msgspec.convert({"workload": name, "seed": 7, "n_threads": 2}, cells.Cell)
    assert cell.workload == name
    assert msgspec.json.decode(msgspec.json.encode(cell), type=cells.Cell) == cell
    assert set(columns(cell)) == set(ORDER)


def other(value):
    """An equal value that is another object, as a computation or a journal gives it; of a number another type."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return type(value)(list(value)) if isinstance(value, tuple) else msgspec.json.decode(msgspec.json.encode(value))


@pytest.mark.parametrize("name", KINDS)
def test_two_equal_cells_have_one_key_however_they_were_written(name):
    kind, chosen = KINDS[name], random.Random(name)
    values = {"n_threads": 7, "repetitions": 300, "seed": 10**6, "model": "some model", "n_batch": 4096}
    for _ in range(20):
        own = {f: values[f] for f in kind.__struct_fields__ if f in values and chosen.random() < 0.5}
        usual = {f.name: other(f.default) for f in msgspec.structs.fields(kind) if chosen.random() < 0.5}
        written = [kind(**own), kind(**usual | own), msgspec.convert({"workload": name} | usual | own, cells.Cell)]
        written += [msgspec.json.decode(msgspec.json.encode(cell), type=cells.Cell) for cell in written[:1]]
        assert len({row_key("s", cell, "m", "e", "h", 0) for cell in written}) == len(set(written)) == 1
    assert len({row_key("s", kind(n_threads=n), "m", "e", "h", 0) for n in (1, 2)}) == 2


def test_a_field_that_a_cell_lacks_is_refused():
    with pytest.raises(msgspec.ValidationError, match="calls"):
        mini("quality", calls=())
    assert plan.change(Quality(), n_ctx=5) == Quality(n_ctx=5)


def test_a_key_covers_every_file():
    told = ("s", Decode(), "target", "e", "m", 0)
    assert len({row_key(*told), row_key(*told, "draft"), row_key(*told, "another")}) == 3
