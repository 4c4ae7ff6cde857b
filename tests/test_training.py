"""The embedded models and how they are trained: what they know, and that torch, oracle and engine compute the same."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from training import baselines, card, corpus, scoring

from llama_meter import paths
from llama_meter.engine.library import capture_log
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.engine.tokenizer import Tokenizer
from llama_meter.errors import StudyError
from llama_meter.models import embedded, registry, synthetic, tensors
from llama_meter.oracle import layers as oracle_mamba
from llama_meter.oracle.compare import agreement
from llama_meter.oracle.forward import Oracle

NAMES = ("plamo-2-1b", "plamo-3-nict-2b")
DRAFTS = ("plamo-2-draft", "plamo-3-draft")
EXACT_CACHE = SessionConfig(1024, type_k="f32", type_v="f32", flash_attn="off", n_gpu_layers=0)
LIMIT = 1.45  # bits per byte
TINY = {"hidden": 64, "layers": 4, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 64, "vocab": 400}


def file(name: str) -> Path:
    return synthetic.make(name, "mini", "F16")


def held_out() -> dict[str, str]:
    """Path and text of every held-out module, cut from the committed file as the record says."""
    raw, texts = (paths.DATA / "corpus" / "python-heldout.txt").read_bytes(), {}
    for path, n_bytes in card.read()["corpus"]["held_out_modules"]:
        texts[path], raw = raw[:n_bytes].decode(), raw[n_bytes:]
    assert not raw
    return texts


# ---------------------------------------------------------------- the committed files


@pytest.mark.parametrize("name", NAMES)
def test_a_trained_mini_is_small_says_its_licence_and_has_the_planned_tensors(name):
    path, spec = file(name), registry.spec(name, "mini")
    assert path.stat().st_size <= 6_000_000
    assert tensors.metadata(path)["general.license"] == "MIT"
    assert "not the released weights" in tensors.metadata(path)["general.description"]
    assert tensors.tensor_table(path) == tensors.planned_table(spec, "F16")


@pytest.mark.parametrize(("name", "target"), list(zip(DRAFTS, NAMES, strict=True)))
def test_a_model_that_drafts_is_under_a_megabyte_and_has_its_targets_vocabulary(name, target):
    path = file(name)
    assert path.stat().st_size <= 1_000_000
    assert tensors.metadata(path)["general.license"] == "MIT"
    assert registry.spec(name, "mini").arch == registry.spec(target, "mini").arch
    with Tokenizer(path) as drafts, Tokenizer(file(target)) as own:
        text = held_out()["gettext.py"][:6000]
        assert drafts.encode(text).tolist() == own.encode(text).tolist()
    assert scoring.bits_per_byte(path, [text]) < card.read()["baselines"]["byte 3-gram"]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_trained_mini_predicts_held_out_python_and_not_the_same_backwards(name):
    texts = held_out()
    part = [texts["dis.py"][:6000], texts["gettext.py"][:6000]]
    assert scoring.bits_per_byte(file(name), part) <= LIMIT
    assert scoring.bits_per_byte(file(name), [texts["fractions.py"][:2000][::-1]]) > 2 * LIMIT
    assert card.read()["models"][name]["bits_per_byte"] <= LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_what_a_trained_mini_goes_on_with_is_python_and_no_stutter(name):
    said = scoring.continuation(file(name), n_tokens=40)
    lines = (scoring.PROMPT + said).splitlines()
    while not parses(lines):  # the last statement may be cut off
        lines.pop()
    assert len(lines) > len(scoring.PROMPT.splitlines())
    assert "return" in said
    with Tokenizer(file(name)) as tokenizer:
        assert len(set(tokenizer.encode(said).tolist())) > 10


def parses(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_oracle_and_engine_agree_on_a_trained_mini(name):
    capture_log([])
    with Tokenizer(file(name)) as tokenizer:
        ids = [tokenizer.bos, *tokenizer.encode(held_out()["fractions.py"])[:599].tolist()]
    with Session(file(name), EXACT_CACHE) as session:
        theirs = session.prefill({0: ids}, every=True)[0]
    verdict = agreement(theirs, Oracle(file(name), rounds_as="CPU").logits(ids))
    assert verdict.ok, verdict
    assert verdict.top1_checked > 400


def test_tokens_spell_any_text():
    texts = ["", *held_out().values(), "\tif x:\r\n\fend\0", "日本語とpython", "<|plamo:> <0x41> é\u2028"]
    with Tokenizer(file(NAMES[0])) as tokenizer:
        for text in texts:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids).decode() == text
            assert not len(ids) or ids.min() > 4
        ids = tokenizer.encode(held_out()["gettext.py"])
        assert len(ids) < len(held_out()["gettext.py"]) / 2.5


@pytest.mark.parametrize("name", NAMES)
def test_other_types_are_written_from_the_committed_numbers(name, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    spec = registry.spec(name, "mini")
    files = {dtype: synthetic.make(name, "mini", dtype) for dtype in registry.DTYPES}
    assert {dtype: tensors.sha256(path) for dtype, path in files.items()} == spec.sha256
    f32, f16, q8 = (gguf.GGUFReader(files[dtype]).tensors for dtype in ("F32", "F16", "Q8_0"))
    for a, b, c in zip(f32, f16, q8, strict=True):
        np.testing.assert_array_equal(a.data, b.data.astype(np.float32))
        step = np.abs(a.data).max() / 127
        np.testing.assert_allclose(gguf.dequantize(c.data, c.tensor_type), a.data, atol=step)


def test_a_changed_or_absent_committed_file_names_the_command_that_brings_it_back(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    path = file(NAMES[0])
    with path.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"!")
    with pytest.raises(StudyError, match=r"differs[\s\S]*git checkout"):
        file(NAMES[0])
    path.unlink()
    monkeypatch.setattr(embedded, "COMMITTED", tmp_path / "nowhere")
    with pytest.raises(StudyError, match=r"is committed[\s\S]*git checkout"):
        synthetic.make(NAMES[0], "mini", "Q8_0")


# ---------------------------------------------------------------- record, card, corpus, baselines


def test_the_card_is_what_the_record_says():
    record = card.read()
    assert card.CARD.read_text() == card.render(record)
    for name, model in record["models"].items():
        assert model["sha256"] == registry.spec(name, "mini").sha256["F16"]
        assert model["bits_per_byte"] < min(record["baselines"].values())


def test_the_english_of_the_held_out_modules_is_their_docstrings():
    modules = [corpus.Module(path, text) for path, text in held_out().items()]
    assert (paths.DATA / "corpus" / "english-heldout.txt").read_text(encoding="utf-8") == corpus.prose(modules)
    said = " ".join(["word"] * 20)
    module = corpus.Module("m.py", f'"""{said}"""\ndef f():\n    """Too short."""\n    return "{said}"\n')
    assert corpus.prose([module]) == f"{said}\n\n"


def test_the_corpus_leaves_out_tables_tests_and_duplicates_and_splits_by_path(tmp_path):
    texts = {"a.py": "def f():\n    return 1\n", "b.py": "def f():\n    return 1\n", "table.py": "'a',\n'b',\n'c',\n"}
    texts |= {"test/c.py": "x = 1\n", "pack/d.py": "y = 2\n", "latin.py": "z = 'é'\n"}
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(text.encode("latin-1"))
    found = corpus.modules(tmp_path)
    assert [module.path for module in found] == ["a.py", "pack/d.py"]
    train, held = corpus.split(found)
    assert {m.path for m in held} == {m.path for m in found if corpus.is_held_out(m.path)}
    assert sorted(train + held, key=lambda m: m.path) == found


def test_ngram_probabilities_sum_to_one_and_longer_histories_help():
    train = b"the cat sat on the mat, the rat sat on the cat. " * 20
    every = [baselines._grams(train[:10] + bytes([byte]), 3)[-1] for byte in range(256)]
    p = np.full(256, 1 / 256)
    for n in (1, 2, 3):
        asked = np.array(every, np.uint64) & np.uint64(256**n - 1)
        p = baselines._interpolated(baselines._Counts(train, n), asked, p)
        assert p.sum() == pytest.approx(1)
    found = baselines.ngram(train, b"the rat sat on the mat.")
    assert max(found[5], found[3]) < found[1] < 8


# ---------------------------------------------------------------- with PyTorch (extra `train`)


def pytorch():
    """PyTorch on one thread; without it the test is skipped."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return torch


@pytest.mark.parametrize("name", NAMES)
def test_torch_and_oracle_agree_on_a_trained_mini(name):
    torch = pytorch()
    from training.run import load

    model = load(registry.spec(name, "mini"), file(name))
    ids = np.random.default_rng(0).integers(5, 2048, 600)
    with torch.no_grad():
        ours = model(torch.from_numpy(ids)[None])[0].numpy()
    verdict = agreement(ours, Oracle(file(name)).logits(ids), 3e-4)
    assert verdict.ok, verdict


def test_the_quadratic_scan_is_the_recurrent_one():
    torch = pytorch()
    from training import architectures

    random = np.random.default_rng(0)
    x, B, C = (random.normal(size=shape).astype(np.float32) for shape in ((300, 3, 8), (300, 16), (300, 16)))
    dt, a = random.uniform(1e-3, 1, (300, 3)).astype(np.float32), -np.array([0.1, 1, 16], np.float32)
    expected = oracle_mamba.scan(x, dt, a, B, C)
    found = architectures.scan(*(torch.from_numpy(part)[None] for part in (x, dt)), torch.from_numpy(a),
                               *(torch.from_numpy(part)[None] for part in (B, C)))  # fmt: skip
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_short_training_lowers_the_loss_can_be_continued_and_gives_a_file_that_loads(name, tmp_path):
    pytorch()
    from training import export, optimise, run
    from training.architectures import Plamo

    spec = replace(registry.spec(name, "mini"), **TINY)
    stream = np.tile(np.arange(5, 105, dtype=np.int32), 60)
    recipe = optimise.Recipe(steps=20, batch=512, stages=((0.5, 64), (0.5, 128)), warm_up=2)

    def train(steps: int, checkpoint: Path) -> tuple[Plamo, optimise.Progress]:
        model = Plamo(spec)
        stop = replace(recipe, steps=20)
        return model, optimise.train(model, stream, stop, lambda m: 0.0, checkpoint, 10, _stop_at(steps))

    with pytest.raises(KeyboardInterrupt):
        train(10, tmp_path / "a")
    model, continued = train(0, tmp_path / "a")
    _, at_once = train(0, tmp_path / "b")
    assert [point[2] for point in continued.curve] == pytest.approx([point[2] for point in at_once.curve], rel=1e-3)
    assert continued.tokens_seen == 20 * 512
    assert continued.curve[-1][2] < 0.8 * continued.curve[0][2]
    path = export.write(spec, run.weights(model), _vocabulary(spec.vocab), tmp_path / "m.gguf")
    assert tensors.tensor_table(path) == tensors.planned_table(spec, "F16")
    with Session(path, SessionConfig(256)) as session:
        assert np.isfinite(session.prefill({0: stream[:200]})[0]).all()


def _stop_at(step: int):
    def report(model: object, progress: object) -> None:
        if getattr(progress, "step") == step:  # noqa: B009
            raise KeyboardInterrupt

    return report


def _vocabulary(n: int):
    from training import pieces

    learnt = {f"word{i}": -5.0 - i / 100 for i in range(200)} | {c: -3.0 for c in "abc \n"}
    return pieces.vocabulary(learnt, n - 261)


def test_the_vocabulary_is_what_the_tokenizer_wants():
    vocabulary = _vocabulary(400)
    assert len(set(vocabulary.tokens)) == len(vocabulary.tokens) == 400
    assert set(map(chr, range(0x20, 0x7F))) <= set(vocabulary.tokens)
    assert all(np.isfinite(score) and score > -1000 for score in vocabulary.scores)
    assert json.dumps(vocabulary.special) == json.dumps({"unk": 0, "bos": 1, "eos": 2, "pad": 3, "eot": 4})
