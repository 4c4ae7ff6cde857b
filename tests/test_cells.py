"""Types of cells: names in JSON, keys, changes."""

import msgspec
import pytest
from conftest import mini

from llama_meter import cells
from llama_meter.cells import KINDS, ORDER, Decode, Prefill, Quality, canonical, columns
from llama_meter.errors import StudyError
from llama_meter.measure import plan
from llama_meter.rows import row_key


def test_every_name_stands_in_the_order_and_means_one_default():
    fields = [field for kind in KINDS.values() for field in msgspec.structs.fields(kind)]
    assert {field.encode_name for field in fields} <= set(ORDER)
    known: dict[str, object] = {}
    for field in fields:
        assert known.setdefault(field.encode_name, field.default) == field.default, (
            f"two defaults of {field.encode_name}"
        )


@pytest.mark.parametrize("name", KINDS)
def test_a_cell_of_every_workload_is_read_as_it_was_written(name):
    cell = msgspec.convert({"workload": name, "seed": 7, "n_threads": 2}, cells.Cell)
    assert cell.workload == name
    assert msgspec.json.decode(msgspec.json.encode(cell), type=cells.Cell) == cell
    assert set(columns(cell)) == set(ORDER)


def test_a_key_does_not_depend_on_where_a_type_has_its_fields():
    cell = Decode(seed=1, depth=16, model="m", n_threads=2, use_mmap=False)
    told = b'{"workload":"decode","model":"m","n_prompt":16,"n_threads":2,"use_mmap":false,"seed":1}'
    assert bytes(canonical(cell)) == told
    assert row_key("s", cell, "m", "e", "h", 0) == row_key(
        "s", msgspec.json.decode(told, type=Decode), "m", "e", "h", 0
    )


def test_a_field_that_a_cell_lacks_is_named():
    with pytest.raises(StudyError, match=r"Decode: has no field n_prompt\n.*depth"):
        plan.change(Prefill(), workload="decode", n_prompt=16)
    with pytest.raises(msgspec.ValidationError, match="calls"):
        mini("quality", calls=())
    assert plan.change(Quality(), n_ctx=5) == Quality(n_ctx=5)


def test_a_key_covers_every_file():
    told = ("s", Decode(), "target", "e", "m", 0)
    assert len({row_key(*told), row_key(*told, "draft"), row_key(*told, "another")}) == 3
