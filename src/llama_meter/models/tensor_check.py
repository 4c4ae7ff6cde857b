"""Whether a file's tensors are those its metadata requires, of usable types and in the right places.

Weights are read only in models/check.py.
"""

from collections.abc import Iterator

from llama_meter.models.finding import AGAIN, Finding, block, listed, printable
from llama_meter.models.header import Header, TensorRecord
from llama_meter.models.mistaken import REST
from llama_meter.models.registry import ModelSpec
from llama_meter.models.tensors import NEWER, stays_f32, unknown_type

NO_WEIGHTS = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}  # ggml multiplies with none of these
SCALES = (".scale", ".input_scale")  # of a whole tensor: llama.cpp loads them beside any matrix, the oracle knows none
KEEP = "quantize again with --keep ssm_out=bf16: " + "plamo-study models quantize"


def layout_findings(header: Header) -> list[Finding]:
    """Findings about types, row lengths and places: llama.cpp requires the tensors contiguous and in header order."""
    findings: list[Finding] = []
    expected = 0
    for tensor in header.tensors:
        name, weights = printable(tensor.name), tensor.block[0]
        if not weights:
            return [*findings, block("tensor-type", unknown_type(tensor), NEWER)]
        if tensor.dims[0] % weights:
            why = f"rows of {name} hold {tensor.dims[0]:,} weights, no multiple of {tensor.type_name}'s {weights}"
            return [*findings, block("tensor-shape", why)]
        if tensor.offset != expected:
            return [*findings, _misplaced(tensor, expected, header.alignment)]
        expected += -(-tensor.n_bytes // header.alignment) * header.alignment
    if header.tensors:
        last = header.tensors[-1]
        findings += _cut(header, header.data_start + last.offset + last.n_bytes)
    return findings


def _misplaced(tensor: TensorRecord, expected: int, alignment: int) -> Finding:
    if tensor.offset % alignment:
        how = f"which is no multiple of the alignment {alignment}"
    else:
        how = "inside the tensor before it" if tensor.offset < expected else "behind a gap"
    why = f"{printable(tensor.name)} starts at {tensor.offset:,}, {how}; {expected:,} is where llama.cpp wants it"
    return block("tensor-offset", why)


def _cut(header: Header, need: int) -> list[Finding]:
    if need <= header.size:
        return []
    why = f"is cut short: the tensors end at {need:,} bytes, the file at {header.size:,} ({header.size / need:.1%})"
    return [block("cut-short", why, REST)]


def tensor_findings(header: Header, spec: ModelSpec) -> list[Finding]:
    """Findings about missing, additional and misshapen tensors, and types that llama.cpp cannot use there."""
    wanted, here = spec.tensor_shapes(), {tensor.name: tensor for tensor in header.tensors}
    scales = {name for name in here if name.endswith(SCALES) and f"{name.rpartition('.')[0]}.weight" in wanted}
    return [
        *_names("tensor-missing", "are missing", wanted.keys() - here.keys()),
        *_names(
            "tensor-extra", "belong to no such model; llama.cpp refuses them", here.keys() - wanted.keys() - scales
        ),
        *_scaled(scales),
        *_shapes({name: here[name] for name in wanted if name in here}, wanted),
        *_types(header.tensors),
    ]


def _scaled(scales: set[str]) -> Iterator[Finding]:
    if scales:
        why = f"{len(scales)} tensors scale others as a whole: {listed(sorted(scales))}; the oracle does not"
        yield Finding("note", "tensor-scale", why, "give the file to a study: its gate holds the engine against itself")


def _names(code: str, what: str, names: set[str]) -> Iterator[Finding]:
    if names:
        yield block(code, f"{len(names)} tensors {what}: {listed(sorted(names))}")


def _shapes(here: dict[str, TensorRecord], wanted: dict[str, tuple[int, ...]]) -> Iterator[Finding]:
    wrong = [(name, tensor.shape, _core(wanted[name])) for name, tensor in here.items()]
    wrong = [(name, is_, should) for name, is_, should in wrong if is_ != should]
    if wrong:
        name, is_, should = wrong[0]
        others = f", and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        yield block("tensor-shape", f"{name} is {is_}, the metadata asks for {should}{others}")


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without leading ones: (1, 128) and (128,) are the same to ggml."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _types(tensors: list[TensorRecord]) -> Iterator[Finding]:
    if useless := [t.name for t in tensors if t.type_name in NO_WEIGHTS]:
        yield block("tensor-type", f"whole numbers or internal types where weights belong: {listed(useless)}")
    if small := [t.name for t in tensors if stays_f32(t.name) and t.type_name != "F32"]:
        why = f"norms, biases and Mamba scalars that are not F32: {listed(small)}; llama.cpp may refuse or round them"
        yield Finding("warning", "tensor-type", why, AGAIN)


def ssm_out_findings(header: Header, gpu: bool) -> list[Finding]:
    """Half-precision overflow (D5): the input of `ssm_out` is unnormalised, and Metal's kernels may cast it to F16.

    Read in llama.cpp 0c1e57098, ggml-metal/kernels/mul_mm.metal: from nine columns on, in every type but BF16. `gpu`:
    the engine has one.
    """
    types = sorted({t.type_name for t in header.tensors if t.name.endswith("ssm_out.weight")} - {"BF16"})
    if not types:
        return []
    why = f"ssm_out is {listed(types)}: Metal casts a prompt's input of it to F16, which ends at 65,504 (D5)"
    return [Finding("warning" if gpu else "note", "ssm-out-type", why, KEEP)]
