"""Released PLaMo weights (Hugging Face safetensors) as a GGUF file, without PyTorch and without remote code.

Tensors are converted a chunk at a time, so memory does not depend on the model. The file has the tensors, order and
types of `tensors.planned_table`: `tensors.stays_f32` tensors are F32, the rest has the requested type. head_count
is one number, not the per-layer array of llama.cpp's own conversion, which makes the engine lose RoPE.

`hf_config` interprets the configuration, `hf_names` converts values, and `vocabulary` converts the tokenizer. This
module does not fetch and does not check quality: `check` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from llama_meter.errors import StudyError, of_memory
from llama_meter.models import gguf_file, hf, hf_config, registry, tensors, values as numbers, vocabulary
from llama_meter.models.finding import printable
from llama_meter.models.gguf_file import Progress
from llama_meter.models.hf import Rule, Stored
from llama_meter.models.hf_config import Configuration
from llama_meter.models.registry import ModelSpec
from llama_meter.models.tensors import TensorInfo

MARGIN = 64 << 20  # bytes on disk for header and vocabulary, below 16 MiB, and for other writers
UNUSED = ".rotary_emb.inv_freq"  # end of names of tensors that follow from the configuration


@dataclass(frozen=True)
class Step:
    """One tensor to convert: what the file will hold, where the weights lie, and how their values change."""

    tensor: TensorInfo
    source: Stored
    rule: Rule


def convert(source: Path, out: Path, dtype: str, progress: Progress | None = None) -> Path:
    """Convert the folder `source` to the GGUF file `out` with weights of type F32, F16, BF16 or Q8_0; returns `out`.

    `progress` is called with (bytes done, bytes in all). An existing `out` is replaced once the new file is whole;
    nothing is left behind on failure.
    Raises StudyError for a folder that is damaged or no PLaMo 2 or 3, a tensor that is missing, extra or has
    another shape, a number that is not finite or that `dtype` cannot hold, and too little free space.
    """
    registry.check_dtype(dtype)
    configuration = hf_config.read(source)
    steps = plan(source, configuration.spec, dtype)
    words = vocabulary.read_hf(source, configuration.spec.vocab)
    with gguf_file.writing(out, configuration.spec.arch) as writer:
        gguf_file.check_space(out, sum(step.tensor.n_bytes for step in steps) + MARGIN)
        _add_metadata(writer, configuration, dtype)
        words.add_to(writer)
        gguf_file.stream(writer, [(step.tensor, _items(step)) for step in steps], progress)
    return out


def plan(source: Path, spec: ModelSpec, dtype: str) -> list[Step]:
    """Every tensor of the file to be, in order, with its source. Reads headers only; StudyError as `convert`."""
    stored = hf.stored_tensors(source)
    rules = hf.rules(spec)
    needed = {rule.name for rule in rules.values()}
    ignored = {name for name in stored if name.endswith(UNUSED)}
    if spec.tied:  # the reference then uses the embeddings, whatever the file holds
        ignored.add("lm_head.weight")
    if missing := [name for name in needed if name not in stored]:
        raise hf.damaged(f"{source}, tensor {min(missing)}", f"is missing, {len(missing)} of {len(needed)} are")
    if extra := sorted(stored.keys() - needed - ignored):
        name = extra[0]
        why = f"is not part of the model that config.json describes, {len(extra)} are not"
        raise hf.damaged(f"{stored[name].path}, tensor {printable(name)}", why)
    table = tensors.planned_table(spec, dtype)
    steps = [Step(tensor, stored[rules[tensor.name].name], rules[tensor.name]) for tensor in table]
    for step in steps:
        _check_shape(step)
    return steps


def _check_shape(step: Step) -> None:
    what = f"{step.source.path}, tensor {step.rule.name}"
    if step.source.shape != step.rule.shape:
        why = f"has shape {printable(step.source.shape)}, config.json asks for {step.rule.shape}"
        raise hf.damaged(what, why)
    if step.tensor.dtype == "Q8_0" and step.tensor.shape[-1] % numbers.BLOCK:
        why = f"has rows of {step.tensor.shape[-1]} numbers, Q8_0 needs multiples of {numbers.BLOCK}"
        raise StudyError(what, why, "convert to F16, BF16 or F32")


def _items(step: Step) -> Iterator[NDArray[Any]]:
    """One tensor as the file will hold it, a chunk at a time."""
    what = f"{step.source.path}, tensor {step.rule.name}"
    try:
        with step.source.path.open("rb") as file:
            for values in numbers.chunks(file, step.source.start, step.source.n_elements, step.source.dtype):
                items = numbers.narrow(step.rule.to_gguf(values), step.tensor.dtype)
                if not numbers.is_finite(items, step.tensor.dtype):
                    raise _not_finite(what, step.tensor.dtype, bool(np.isfinite(values).all()))
                yield items
    except (OSError, EOFError) as error:
        raise of_memory(error, what) or hf.damaged(what, f"cannot be read ({error})") from error


def _not_finite(what: str, dtype: str, source_is: bool) -> StudyError:
    if source_is:
        return StudyError(what, f"holds numbers that {dtype} cannot hold", "convert to BF16 or F32")
    return hf.damaged(what, "holds numbers that are not finite")


def _add_metadata(writer: gguf.GGUFWriter, configuration: Configuration, dtype: str) -> None:
    """The keys llama.cpp's loader reads, from the configuration alone."""
    writer.add_name(configuration.spec.name)
    writer.add_description(_description(configuration))
    gguf_file.add_shape(writer, configuration.spec, dtype)
    if configuration.yarn:  # the reference's constants, as llama.cpp's conversion writes them
        factor, original = configuration.yarn
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_yarn_beta_fast(32.0)
        writer.add_rope_scaling_yarn_beta_slow(1.0)


def _description(configuration: Configuration) -> str:
    text = "Converted from released weights by plamo-study."
    if configuration.window:
        text += (
            f" The reference model's attention looks back {configuration.window:,} tokens; llama.cpp applies no window"
            " to this architecture, so the two agree up to that length only."
        )
    return text
