"""500 damaged released folders: every one is converted or refused, soon, in little memory, and leaves nothing."""

import json
import subprocess
import sys
from pathlib import Path

import mutated_folders
import pytest
from hf_folders import MODELS, make_files

SEED, N = 4, 250  # mutations per model


@pytest.mark.parametrize(("name", "seed"), [(name, SEED + i) for i, name in enumerate(MODELS)])
def test_every_mutated_folder_is_converted_or_refused_within_5_s_and_1_gib(name, seed, tmp_path):
    source = make_files(tmp_path).repository(name, shards=2)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, mutated_folders.__file__, source, scratch, str(seed), str(N)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["outcomes"].keys() == {"converted", "refused"}, found["outcomes"]
    assert found["outcomes"]["refused"] > N / 2
    assert found["slowest_s"] < 5
    assert found["left"] == []


def test_the_generator_repeats_itself(tmp_path):
    source = make_files(tmp_path / "files").repository(MODELS[0], shards=2)
    said = [mutated_folders.mutate(source, tmp_path / str(copy), SEED, 7) for copy in (0, 1)]
    one, two = ({file.name: file.read_bytes() for file in Path(tmp_path / str(copy)).iterdir()} for copy in (0, 1))
    assert said[0] == said[1]
    assert one == two
