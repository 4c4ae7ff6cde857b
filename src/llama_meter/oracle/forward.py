"""Token ids to logits: the two architectures put together from their layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llama_meter.errors import StudyError
from llama_meter.oracle import layers
from llama_meter.oracle.weights import Weights

ARCHITECTURES = ("plamo2", "plamo3")
SLIDING_PATTERN = 8  # every 8th layer of PLaMo 3 NICT sees the whole text; also the default of a file without the key
SLIDING_THETA = 1e4  # rotary base of the sliding layers where the file names none


class Oracle:
    """The forward pass of one GGUF file of PLaMo 2 or PLaMo 3, for every weight type that `gguf` can dequantise.

    A decoder of pre- and post-normed residual blocks: x ← x + norm(mixer(norm(x))), x ← x + norm(ffn(norm(x))).
    PLaMo 2 mixes by Mamba where `head_count_kv` is 0 and by full attention elsewhere; PLaMo 3 by attention, sliding in
    all layers but every `pattern`-th. `head_count` is read whether it is a scalar or an array with 0 for Mamba layers.

    `path`: the file, or another oracle of it, whose weights and settings are shared.

    Weights are taken as stored and everything else is float32. llama.cpp's backends also round the input of each matrix
    product, to a type that depends on the weights'. `rounds_as`, a backend of `weights.ROUNDED_TO`, does the same, to
    distinguish that rounding from a wrong computation; the logits are then this backend's, not the model's.

    llama.cpp applies no window to PLaMo 2, though its configurations publish one. `window`: that of a build that does,
    in tokens (0 for none); PLaMo 3 has its own in the file. `stepped_from`: the first token that the engine evaluates
    in calls of at most `weights.FEW` tokens, where CUDA's kernels round otherwise; None for none.

    Raises
    ------
    StudyError
        Not PLaMo 2 or 3, scaled rotary positions (YaRN), or a tensor or key is missing.

    """

    def __init__(
        self, path: "Path | str | Oracle", rounds_as: str = "", window: int = 0, stepped_from: int | None = None
    ):
        self._weights: Weights = (
            path._weights if isinstance(path, Oracle) else Weights(path, rounds_as, stepped_from=stepped_from)
        )
        self._window: int = path._window if isinstance(path, Oracle) else window
        self.arch = str(self._weights.value("general.architecture"))
        if self.arch not in ARCHITECTURES:
            raise StudyError(str(path), f"is {self.arch}, not plamo2 or plamo3", "name a PLaMo file")
        if self._value("rope.scaling.type", "none") != "none":
            raise StudyError(str(path), "the oracle knows no rope scaling", "name a file without it")
        self.n_layer = int(self._value("block_count"))
        self._n_head = self._weights.per_layer(f"{self.arch}.attention.head_count", self.n_layer)
        self._n_head_kv = self._weights.per_layer(f"{self.arch}.attention.head_count_kv", self.n_layer)
        self._d_head = int(self._value("attention.key_length"))
        self._eps = float(self._value("attention.layer_norm_rms_epsilon"))
        self._theta = float(self._value("rope.freq_base"))
        self._head = "output.weight" if "output.weight" in self._weights else "token_embd.weight"
        self.n_vocab = self._weights.n_rows(self._head)

    def logits(self, tokens: Sequence[int] | np.ndarray, positions: Sequence[int] | None = None) -> np.ndarray:
        """Logits after each token of a text, or after the tokens at `positions` only.

        Returns float32 (n_tokens or n_positions, n_vocab). Raises ValueError for an empty text or an unknown token.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size == 0 or ids.min() < 0 or ids.max() >= self.n_vocab:
            raise ValueError(f"tokens must be a non-empty sequence of ids below {self.n_vocab}")
        x = self.embedded(ids)
        for layer in range(self.n_layer):
            x = x + self.mixed(layer, x)
            x = x + self.fed(layer, x)
        at = np.arange(len(x)) if positions is None else np.asarray(positions)
        return self.head(x[at], at)

    @property
    def depends_on_calls(self) -> bool:
        """Whether logits depend on `stepped_from`, by the backend's rounding and the file's types."""
        return self._weights.depends_on_calls

    def embedded(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """The input of layer 0, (n_tokens, hidden) float32."""
        return self._weights.rows("token_embd.weight", np.asarray(tokens, dtype=np.int64))

    def is_mamba(self, layer: int) -> bool:
        """Whether a layer mixes by Mamba."""
        return bool(self._n_head_kv[layer] == 0)

    def mixed(self, layer: int, x: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
        """A layer's mixer output, to be added to `x` (n_tokens, hidden); `x` covers the whole text so far.

        `at`: the positions whose output is wanted, (n_positions,); None: all.
        """
        block, mixer = f"blk.{layer}.", self._mamba if self.is_mamba(layer) else self._attention
        at = np.arange(len(x)) if at is None else at
        return self._norm(mixer(layer, self._norm(x, block + "attn_norm.weight"), at), block + "post_attention_norm")

    def fed(self, layer: int, x: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
        """A layer's feed-forward output, to be added to `x` (n_tokens, hidden); `at` as for `Weights.linear`."""
        block = f"blk.{layer}."
        fed = self._feed_forward(block, self._norm(x, block + "ffn_norm.weight"), at)
        return self._norm(fed, block + "post_ffw_norm")

    def head(self, x: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
        """Logits (n_tokens, n_vocab) from the output `x` of the last layer; `at` as for `Weights.linear`."""
        return self._weights.linear(self._norm(x, "output_norm.weight"), self._head, at)

    def _feed_forward(self, block: str, x: np.ndarray, at: np.ndarray | None) -> np.ndarray:
        up = self._weights.linear(x, block + "ffn_up.weight", at)
        return self._weights.linear(layers.gate(up), block + "ffn_down.weight", at)

    def _attention(self, layer: int, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Attention with normed and rotated queries and keys; q, k, v lie in this order in one projection."""
        block, n_head, n_kv = f"blk.{layer}.", int(self._n_head[layer]), int(self._n_head_kv[layer])
        name, n_q = block + "attn_qkv.weight", n_head * self._d_head
        q = self._weights.linear(x[at], name, at)[:, :n_q]
        k, v = np.split(self._weights.linear(x, name, first=n_q), [n_kv * self._d_head], axis=-1)
        window, theta = self._reach(layer)
        q = self._norm(q.reshape(len(at), n_head, -1), block + "attn_q_norm.weight")
        k = self._norm(k.reshape(len(x), n_kv, -1), block + "attn_k_norm.weight")
        q, k = self._rotated(q, theta, at), self._rotated(k, theta, np.arange(len(x)))
        mixed = layers.attend(q, k, v.reshape(len(x), n_kv, -1), self._visible(len(x), window, at))
        return self._weights.linear(mixed, block + "attn_output.weight", at)

    def _mamba(self, layer: int, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Mamba: y = scan(u, dt, B, C) + D u with u = conv(x), then silu(z) · y through the output projection."""
        block, n_head = f"blk.{layer}.ssm_", int(self._value("ssm.time_step_rank"))
        array, linear = self._weights.array, self._projected
        z, signal = layers.split_zx(self._ordered(linear(x, block + "in.weight")), n_head)
        u = layers.causal_convolution(signal.reshape(len(x), -1), array(block + "conv1d.weight"))
        B, C, dt = layers.split_bcdt(linear(u, block + "x.weight"), int(self._value("ssm.state_size")))
        B, C, dt = (self._norm(part, f"{block}{name}_norm") for part, name in ((B, "b"), (C, "c"), (dt, "dt")))
        dt = layers.softplus(linear(dt, block + "dt.weight") + array(block + "dt.bias"))
        u = u.reshape(z.shape)
        y = self._scanned(u, dt, array(block + "a").ravel(), B, C) + array(block + "d").reshape(-1, 1) * u
        return linear(self._gated(layers.silu(z[at]) * y[at]).reshape(len(at), -1), block + "out.weight", at)

    # These steps are separate methods so that judge.py can replace them.

    def _rotated(self, x: np.ndarray, theta: float, at: np.ndarray) -> np.ndarray:
        return layers.rotate(x, theta, at)

    def _visible(self, n_tokens: int, window: int | None, at: np.ndarray) -> np.ndarray:
        return layers.visible(n_tokens, window, at)

    def _projected(self, x: np.ndarray, name: str, at: np.ndarray | None = None) -> np.ndarray:
        return self._weights.linear(x, name, at)

    def _ordered(self, zx: np.ndarray) -> np.ndarray:
        return zx

    def _scanned(self, x: np.ndarray, dt: np.ndarray, a: np.ndarray, B: np.ndarray, C: np.ndarray) -> np.ndarray:
        return layers.scan(x, dt, a, B, C)

    def _gated(self, y: np.ndarray) -> np.ndarray:
        return y

    def _reach(self, layer: int) -> tuple[int | None, float]:
        """Window in tokens (None: the whole text) and rotary base of an attention layer."""
        if self.arch == "plamo2":
            return self._window or None, self._theta
        window = int(self._value("attention.sliding_window", 0))
        if window == 0 or not self._slides(layer):
            return None, self._theta
        return window, float(self._value("rope.freq_base_swa", SLIDING_THETA))

    def _slides(self, layer: int) -> bool:
        """Whether a layer slides: all but every pattern-th do, or an array in the file decides layer by layer."""
        pattern = self._value("attention.sliding_window_pattern", SLIDING_PATTERN)
        if isinstance(pattern, list):
            return bool(pattern[layer])
        return pattern == 0 or (layer + 1) % pattern != 0

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return layers.rms_norm(x, self._weights.array(name), self._eps)

    def _value(self, key: str, default: Any = None) -> Any:
        return self._weights.value(f"{self.arch}.{key}", default)
