"""Where memory runs out, that is what is said: the files that were read are sound."""

import json
import struct
import subprocess
import sys

import pytest

SPARSE = 8 << 30  # bytes of a file that takes no room on the disk
LIMIT = 3 << 30  # that the process may map
SCRIPT = """
import resource, sys
from pathlib import Path
from plamo_study.errors import StudyError
from plamo_study.models import hf
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
try:
    hf.stored_tensors(Path({folder!r}))
except StudyError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS limits no address space")
def test_a_sound_file_that_does_not_fit_is_not_called_damaged(tmp_path):
    entry = {"x": {"dtype": "F32", "shape": [SPARSE // 4], "data_offsets": [0, SPARSE]}}
    header = json.dumps(entry).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + SPARSE)
    script = SCRIPT.format(limit=LIMIT, folder=str(tmp_path))
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "memory" in said.stdout, said.stderr
    assert "fetch" not in said.stdout
