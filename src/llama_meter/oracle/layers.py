"""The layers of PLaMo 2 and 3: norms, attention, and the selective state space of the Mamba layers.

Sources: Gu & Dao 2023 (arXiv:2312.00752) for selectivity and discretisation, Dao & Gu 2024 (arXiv:2405.21060) for one
scalar decay per head. PLaMo 2 adds norms on B, C and dt and interleaves z and x head by head.
"""

import numpy as np


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x)), elementwise (Elfwing et al. 2017, arXiv:1702.03118)."""
    return x * (0.5 * np.tanh(0.5 * x) + 0.5)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """weight · x / √(mean(x²) + eps) over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467).

    The offsets that PLaMo adds to its stored norm weights (1, 1/5, 1/5^1.5) are already in the GGUF's weights.
    """
    mean_square = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return weight * (x / np.sqrt(mean_square + eps)).astype(np.float32)


def rotate(x: np.ndarray, theta: float, at: np.ndarray | None = None) -> np.ndarray:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) over the whole head.

    x is (n_tokens, n_head, d), its rows at the positions `at`, None: from 0 on. Pairs are split by halves: feature i
    rotates with feature i + d/2 by the angle t · theta^(-2i/d). Angles are taken in float64: position · frequency
    loses digits in float32.
    """
    n_tokens, _, d = x.shape
    angle = (np.arange(n_tokens) if at is None else at)[:, None] * theta ** (-np.arange(0, d, 2) / d)
    cos, sin = np.cos(angle)[:, None].astype(np.float32), np.sin(angle)[:, None].astype(np.float32)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def visible(n_tokens: int, window: int | None, at: np.ndarray | None = None) -> np.ndarray:
    """Boolean (query, key): keys up to the query's position are visible, with a window only at distances below it.

    `at`: the positions of the queries; None: all.
    """
    distance = (np.arange(n_tokens) if at is None else at)[:, None] - np.arange(n_tokens)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def key_value_head(head: int, n_head: int, n_head_kv: int) -> int:
    """Key/value head that a query head reads: consecutive query heads share one (Ainslie et al., arXiv:2305.13245)."""
    return head // (n_head // n_head_kv)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """softmax(q kᵀ / √d) v over the keys seen (Vaswani et al. 2017, arXiv:1706.03762), grouped key/value heads.

    q is (n_queries, n_head, d), k (n_tokens, n_head_kv, d), v (n_tokens, n_head_kv, d_v), `seen` (query, key) boolean;
    the result is (n_queries, n_head · d_v).
    """
    _, n_head, d = q.shape
    hidden = np.where(seen, np.float32(0), np.float32(-np.inf))
    heads = []
    for head in range(n_head):
        shared = key_value_head(head, n_head, k.shape[1])
        score = q[:, head] @ k[:, shared].T / np.float32(np.sqrt(d)) + hidden
        weight = np.exp(score - score.max(axis=-1, keepdims=True))
        heads.append(weight @ v[:, shared] / weight.sum(axis=-1, keepdims=True))
    return np.concatenate(heads, axis=-1)


def gate(up: np.ndarray) -> np.ndarray:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): the first half of the features gates the second, silu(a) · b."""
    a, b = np.split(up, 2, axis=-1)
    return silu(a) * b


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)) without overflow."""
    return np.logaddexp(np.float32(0), x)


def split_zx(zx: np.ndarray, n_head: int) -> tuple[np.ndarray, np.ndarray]:
    """Input projection (n_tokens, 2 · d_inner) into gate z and signal x, (n_tokens, n_head, d); z first per head."""
    per_head = zx.reshape(len(zx), n_head, 2, -1)
    return per_head[:, :, 0], per_head[:, :, 1]


def split_bcdt(bcdt: np.ndarray, d_state: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Projection (n_tokens, 2 · d_state + dt_dim) into B, C, each (n_tokens, d_state), and dt (n_tokens, dt_dim)."""
    return bcdt[:, :d_state], bcdt[:, d_state : 2 * d_state], bcdt[:, 2 * d_state :]


def causal_convolution(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """y_t = silu(Σ_j kernel_j · x_{t-K+1+j}) per channel: the last tap is the current token, zeros precede the text.

    x is (n_tokens, d_inner), kernel (d_inner, K).
    """
    taps = kernel.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1]), np.float32), x])
    return silu(sum(padded[j : j + len(x)] * kernel[:, j] for j in range(taps)))


def scan(x: np.ndarray, dt: np.ndarray, a: np.ndarray, B: np.ndarray, C: np.ndarray) -> np.ndarray:
    """h_t = exp(dt_t a) h_{t-1} + dt_t x_t B_tᵀ and y_t = h_t C_t for every head, starting from h = 0.

    x is (n_tokens, n_head, d), dt (n_tokens, n_head), a (n_head,), B and C (n_tokens, d_state); y is shaped like x.
    """
    decay = np.exp(dt * a)[:, :, None, None]
    drive = dt[:, :, None] * x
    state = np.zeros((*x.shape[1:], B.shape[1]), dtype=np.float32)
    y = np.empty_like(x)
    for t in range(len(x)):
        state *= decay[t]
        state += drive[t, :, :, None] * B[t]
        y[t] = state @ C[t]
    return y
