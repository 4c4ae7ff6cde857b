"""The mapping of tensor names and values between released PLaMo files and GGUF files.

Released norms are offsets from the number a layer starts with, and decay rates are logarithms: `Rule` converts each
tensor to the engine's form, as llama.cpp's conversion/plamo.py does.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plamo_study.models.registry import ModelSpec

BLOCK_NORMS = {
    "attn_norm.weight": ("pre_mixer_norm.weight", 1.0),
    "post_attention_norm": ("post_mixer_norm.weight", 1 / 5),
    "ffn_norm.weight": ("pre_mlp_norm.weight", 1.0),
    "post_ffw_norm": ("post_mlp_norm.weight", 1 / 5**1.5),
}
LOCAL = {
    "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_qkv.weight": "mixer.qkv_proj.weight",
    "attn_output.weight": "mixer.o_proj.weight",
    "ssm_in.weight": "mixer.in_proj.weight",
    "ssm_conv1d.weight": "mixer.conv1d.weight",
    "ssm_x.weight": "mixer.bcdt_proj.weight",
    "ssm_dt.weight": "mixer.dt_proj.weight",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_out.weight": "mixer.out_proj.weight",
    "ssm_dt_norm": "mixer.dt_norm_weight",
    "ssm_b_norm": "mixer.B_norm_weight",
    "ssm_c_norm": "mixer.C_norm_weight",
}
QK_NORMS = {  # PLaMo 2: whole, one row per head; PLaMo 3: offsets from 1
    "plamo2": {"attn_q_norm.weight": ("mixer.q_weight", 0.0), "attn_k_norm.weight": ("mixer.k_weight", 0.0)},
    "plamo3": {"attn_q_norm.weight": ("mixer.q_norm.weight", 1.0), "attn_k_norm.weight": ("mixer.k_norm.weight", 1.0)},
}
OUTER = {
    "token_embd.weight": ("model.embed_tokens.weight", 0.0),
    "output_norm.weight": ("model.norm.weight", 1.0),
    "output.weight": ("lm_head.weight", 0.0),
}


@dataclass(frozen=True)
class Rule:
    """One tensor: its released name and shape, and how its values become those of the GGUF file.

    value = −exp(released) where `logarithm`, else released + `offset` in float32.
    """

    name: str
    shape: tuple[int, ...]
    offset: float = 0.0
    logarithm: bool = False

    def to_gguf(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Released values (float32 or float64) in the engine's form. exp is rounded once, from float64."""
        with np.errstate(all="ignore"):  # what does not fit becomes infinite: the caller checks
            if self.logarithm:
                return (-np.exp(values.astype(np.float64))).astype(np.float32)
            values = values.astype(np.float32, copy=False)
            return values + np.float32(self.offset) if self.offset else values


def rules(spec: ModelSpec) -> dict[str, Rule]:
    """The rule of every tensor of a file of this spec, by its GGUF name, in file order."""
    local = {name: (released, 0.0) for name, released in LOCAL.items()} | BLOCK_NORMS | QK_NORMS[spec.arch]
    found: dict[str, Rule] = {}
    for name, shape in spec.tensor_shapes().items():
        if name in OUTER:
            released, offset = OUTER[name]
        else:
            _, layer, kind = name.split(".", 2)
            released, offset = local[kind]
            released = f"model.layers.layers.{layer}.{released}"
        if name.endswith("ssm_conv1d.weight"):  # PyTorch's depthwise convolution has an axis of one input channel
            shape = (shape[0], 1, shape[1])
        found[name] = Rule(released, shape, offset, logarithm=name.endswith("ssm_a"))
    return found
