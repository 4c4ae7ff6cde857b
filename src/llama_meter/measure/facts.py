"""Facts about machines, engines and models: plain names, and what a fact from elsewhere must hold.

Names are shown in Markdown, HTML, charts and terminals, by hundreds of lines that need not know where they came from.
So a name contains nothing that any of these obeys: it is recorded that way, refused from elsewhere otherwise, and
cleaned again where rows become frames.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from llama_meter.disk import plain_name as plain

# Of a fact: tables show them, and escape what they show
SENTENCES = ("assumptions", "build", "description", "engine_description")


def plainly(value: Any) -> Any:
    """A fact, or a part of one, with all its names plain, keys too; sentences stay unchanged."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list | tuple):
        return type(value)(map(plainly, value))
    if isinstance(value, dict):
        return {plain(key): part if key in SENTENCES else plainly(part) for key, part in value.items()}
    return value


Name = Annotated[str, Meta(min_length=1, max_length=200)]
Said = Annotated[str, Meta(max_length=2000)]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Meta(ge=1, le=2**40)]
Amount = Annotated[int, Meta(ge=0, le=2**60)]
Size = Annotated[int, Meta(ge=0, le=2**24)]  # of a model's shape
Layers = Annotated[int, Meta(ge=1, le=2**12)]
Real = Annotated[float, Meta(ge=0, le=1e12)]


class Gpu(Struct, kw_only=True):
    """A board that the engine found."""

    name: Name
    chip: Name
    memory_bytes: Amount
    tensor: bool | None = None  # whether Metal's tensor units are used


class Machine(Struct, kw_only=True):
    """`identity.of_machine`: of `machine.facts`, and of what the engine found there."""

    chip: Name
    cores: Annotated[int, Meta(ge=1, le=9999)] | None  # None: the system does not say
    performance_cores: Annotated[int, Meta(ge=1, le=9999)]
    memory_bytes: Annotated[int, Meta(gt=2**28, lt=2**50)]
    last_level_cache_bytes: Amount
    os: Name
    architecture: Said
    python: Said
    compiler: Said = ""  # this and the build of macOS in facts from before there was a `System`
    wired_limit_mb: Said
    gpu_cores: Annotated[int, Meta(ge=1, le=9999)] | None = None  # these three of a Mac
    efficiency_cores: Annotated[int, Meta(ge=0, le=9999)] | None = None
    macos_build: Said = ""
    gpus: Annotated[list[Gpu], Meta(min_length=1, max_length=64)] | None = None


class Engine(Struct, kw_only=True):
    """`identity.of_engine`: of `library.describe`."""

    binding: Name
    ggml: Name
    build: Said
    gpu_offload: bool
    llama: Name = ""  # this and the commit where its release tells them
    commit: Name = ""
    sha256: Hash | None = None  # only of libraries from unknown sources, and in facts from before there was a `System`
    libraries: Annotated[list[Name], Meta(max_length=64)] = []
    compiler: Said = ""
    description: Said = ""
    corrects: Annotated[list[Name], Meta(max_length=64)] = []
    environment: Annotated[list[Name], Meta(max_length=64)] = []  # settings of its process: NAME=VALUE
    window: Size = 0


class System(Struct, kw_only=True):
    """What of a machine and an engine an update changes: `identity.system`."""

    os: Name
    python: Said
    compiler: Said
    memory_bytes: Amount
    macos_build: Said = ""
    engine_sha256: Hash | None = None
    engine_description: Said = ""


class Sums(Struct, kw_only=True):
    """Sums over some tensors."""

    count: Count
    n_elements: Count
    n_bytes: Count


class Tensors(Sums, kw_only=True):
    """Sums over tensors of one kind; where they have several types, by type too."""

    type: Name
    by_type: Annotated[dict[Name, Sums], Meta(min_length=1, max_length=64)] = {}


class Shape(Struct, kw_only=True):
    """Hyper-parameters."""

    arch: Name
    hidden: Annotated[int, Meta(ge=1, le=2**24)]
    layers: Layers
    heads: Size
    kv_heads: Size
    head_dim: Size
    ffn: Size
    vocab: Annotated[int, Meta(ge=1, le=2**24)]
    context_length: Count
    rms_eps: Real
    rope_theta: Real
    tied: bool
    rope_theta_swa: Real
    window: Size
    window_pattern: Size
    mamba_heads: Size
    mamba_head_dim: Size
    d_state: Size
    d_conv: Size

    def __post_init__(self) -> None:
        """Raise ValueError for a window without a pattern of layers."""
        if self.window and not self.window_pattern:
            raise ValueError("a window without a pattern of layers")


class Model(Struct, kw_only=True):
    """`files.model_fact`."""

    name: Name
    scale: Name
    dtype: Name
    synthetic: bool
    sha256: Hash
    file_bytes: Count
    n_params: Count
    assumptions: Annotated[list[Said], Meta(max_length=64)]
    shape: Shape
    tensors: Annotated[dict[Name, Tensors], Meta(min_length=1, max_length=1000)]
    findings: Annotated[list[Name], Meta(max_length=1000)] = []
    trained: bool = False


KINDS: dict[str, Any] = {"machine": Machine, "engine": Engine, "model": Model, "system": System}
