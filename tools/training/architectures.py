"""PLaMo 2 and PLaMo 3 as PyTorch modules, whole windows at a time, with the tensors of a GGUF as parameters.

The same computation as `llama_meter.oracle`, in trainable form: attention over all pairs, the Mamba scan in its
quadratic form, a piece of the window at a time. Parameters carry the names and shapes of `ModelSpec.tensor_shapes`,
norm gains are the effective ones, and `ssm_a` is kept as log(-a), so that it stays negative.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_meter.models.registry import ModelSpec

CHUNK = 128  # tokens of the scan computed as one matrix
NORMS = {"post_attention_norm": 1 / 5, "post_ffw_norm": 1 / (5 * math.sqrt(5))}  # gains a release starts from
EMBEDDING_STD = 0.05


class Plamo(nn.Module):
    """A decoder of either architecture with tied embeddings, starting from random weights."""

    def __init__(self, spec: ModelSpec, seed: int = 0):
        super().__init__()
        self.spec = spec
        random = torch.Generator().manual_seed(seed)
        self.tensors = nn.ParameterDict(
            {_key(name): nn.Parameter(_start(name, shape, random)) for name, shape in spec.tensor_shapes().items()}
        )

    def tensor(self, name: str) -> Tensor:
        """A parameter by its name in the file."""
        return self.tensors[_key(name)]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (n_windows, n_tokens, n_vocab) of token ids (n_windows, n_tokens); every window starts a text."""
        x = functional.embedding(tokens, self.tensor("token_embd.weight"))
        for layer in range(self.spec.layers):
            block = f"blk.{layer}."
            mixer = self._mamba if self.spec.is_mamba(layer) else self._attention
            x = x + self._norm(mixer(layer, self._norm(x, block + "attn_norm.weight")), block + "post_attention_norm")
            x = x + self._norm(
                self._feed_forward(block, self._norm(x, block + "ffn_norm.weight")), block + "post_ffw_norm"
            )
        return functional.linear(self._norm(x, "output_norm.weight"), self.tensor("token_embd.weight"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.tensor(name) * rms(x, self.spec.rms_eps)

    def _feed_forward(self, block: str, x: Tensor) -> Tensor:
        a, b = functional.linear(x, self.tensor(block + "ffn_up.weight")).chunk(2, dim=-1)
        return functional.linear(functional.silu(a) * b, self.tensor(block + "ffn_down.weight"))

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        spec, block = self.spec, f"blk.{layer}."
        qkv = (
            functional.linear(x, self.tensor(block + "attn_qkv.weight"))
            .unflatten(-1, (-1, spec.head_dim))
            .transpose(1, 2)
        )
        q, k, v = qkv.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        slides = spec.is_sliding(layer)
        cos, sin = rotation(x.shape[1], spec.head_dim, spec.rope_theta_swa if slides else spec.rope_theta)
        q = rotate(_per_head(self.tensor(block + "attn_q_norm.weight")) * rms(q, spec.rms_eps), cos, sin)
        k = rotate(_per_head(self.tensor(block + "attn_k_norm.weight")) * rms(k, spec.rms_eps), cos, sin)
        k, v = (part.repeat_interleave(spec.heads // spec.kv_heads, dim=1) for part in (k, v))
        mask = _window_mask(x.shape[1], spec.window) if slides and x.shape[1] > spec.window else None
        mixed = functional.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask, is_causal=mask is None
        )
        return functional.linear(mixed.transpose(1, 2).flatten(-2), self.tensor(block + "attn_output.weight"))

    def _mamba(self, layer: int, x: Tensor) -> Tensor:
        spec, block = self.spec, f"blk.{layer}.ssm_"
        zx = functional.linear(x, self.tensor(block + "in.weight")).unflatten(
            -1, (spec.mamba_heads, 2, spec.mamba_head_dim)
        )
        z, signal = zx.unbind(-2)
        kernel = self.tensor(block + "conv1d.weight")
        padded = functional.pad(signal.flatten(-2), (0, 0, spec.d_conv - 1, 0))
        n_tokens = x.shape[1]
        u = functional.silu(
            sum((padded[:, j : j + n_tokens] * kernel[:, j] for j in range(spec.d_conv)), start=torch.zeros(()))
        )
        bcdt = functional.linear(u, self.tensor(block + "x.weight")).split(
            [spec.d_state, spec.d_state, spec.dt_dim], dim=-1
        )
        B, C, dt = (self._norm(part, f"{block}{name}_norm") for part, name in zip(bcdt, ("b", "c", "dt"), strict=True))
        dt = functional.softplus(
            functional.linear(dt, self.tensor(block + "dt.weight")).float() + self.tensor(block + "dt.bias")
        )
        u = u.unflatten(-1, (spec.mamba_heads, spec.mamba_head_dim))
        y = scan(u, dt, -self.tensor(block + "a").exp(), B, C) + self.tensor(block + "d")[:, None] * u
        return functional.linear((functional.silu(z) * y).flatten(-2), self.tensor(block + "out.weight"))


def rms(x: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) over the last axis, in float32."""
    return functional.rms_norm(x.float(), (x.shape[-1],), eps=eps)


def rotation(n_tokens: int, d: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (n_tokens, d / 2) of the rotary angles t · theta^(-2i/d)."""
    angle = torch.arange(n_tokens, dtype=torch.float64)[:, None] * theta ** (-torch.arange(0, d, 2).double() / d)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on (..., n_tokens, d): feature i rotates with feature i + d/2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def scan(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """h_t = exp(dt_t a) h_{t-1} + dt_t x_t B_tᵀ and y_t = h_t C_t per head, from h = 0 (Dao & Gu, arXiv:2405.21060).

    x (n, T, heads, d), dt (n, T, heads), a (heads), B and C (n, T, d_state); y like x. Within a piece of `CHUNK`
    tokens y_t = Σ_{s≤t} exp(Σ_{s<r≤t} dt_r a) (C_t · B_s) dt_s x_s; between pieces the state is carried over.
    """
    pieces, state = [], None
    for start in range(0, x.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        y, state = _piece(x[:, part], dt[:, part], a, B[:, part], C[:, part], state, start + CHUNK >= x.shape[1])
        pieces.append(y)
    return torch.cat(pieces, dim=1)


def _piece(
    x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, state: Tensor | None, last: bool
) -> tuple[Tensor, Tensor | None]:
    """One piece of the scan and the state after it, (n, heads, d, d_state); none after the last piece."""
    decay = (dt * a).cumsum(dim=1).transpose(1, 2)  # (n, heads, T): log of the remaining share of the initial state
    n_tokens = x.shape[1]
    future = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, -torch.inf).exp()
    drive = (dt[..., None] * x).transpose(1, 2)  # (n, heads, T, d)
    y = (between * (C @ B.transpose(1, 2))[:, None]) @ drive
    if state is not None:
        y = y + decay.exp()[..., None] * (C[:, None].to(state.dtype) @ state.transpose(-1, -2))
    if not last:
        left = (decay[..., -1:] - decay).exp()[..., None] * drive
        added = left.transpose(-1, -2) @ B[:, None].to(left.dtype)
        state = added if state is None else added + decay[..., -1, None, None].exp() * state
    return y.transpose(1, 2), None if last else state


def _per_head(gain: Tensor) -> Tensor:
    """Gains of query or key norms, one row for all heads (PLaMo 3) or one per head, as (heads or 1, 1, head_dim)."""
    return gain.reshape(-1, 1, gain.shape[-1])


def _window_mask(n_tokens: int, window: int) -> Tensor:
    distance = torch.arange(n_tokens)[:, None] - torch.arange(n_tokens)
    return (distance >= 0) & (distance < window)


def _key(name: str) -> str:
    return name.replace(".", "/")


def _start(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Initial values: matrices of spread 1/√inputs, norm gains of one or a release's, Mamba's usual rates."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    n = shape[0]
    if name == "token_embd.weight":
        return EMBEDDING_STD * torch.randn(shape, generator=random)
    if kind.endswith("_norm") or kind == "ssm_d":
        return torch.full(shape, NORMS.get(kind, 1.0))
    if kind == "ssm_a":  # log(-a): rates from 1 to 16
        return torch.linspace(1, 16, n).log()
    if kind == "bias":  # the softplus of dt between 0.001 and 0.1
        dt = torch.logspace(-3, -1, n)
        return dt + torch.log(-torch.expm1(-dt))
    return torch.randn(shape, generator=random) / math.sqrt(shape[-1])
