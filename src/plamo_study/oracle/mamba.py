"""The selective state space of PLaMo 2's Mamba layers.

Sources: Gu & Dao 2023 (arXiv:2312.00752) for selectivity and discretisation, Dao & Gu 2024 (arXiv:2405.21060) for one
scalar decay per head. PLaMo 2 adds norms on B, C and dt and interleaves z and x head by head.
"""

import numpy as np

from plamo_study.oracle.layers import silu

SCAN_FLOPS = 6  # per state element and token: decay, input, add (3), output multiply-add (2), and exp's multiply


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
