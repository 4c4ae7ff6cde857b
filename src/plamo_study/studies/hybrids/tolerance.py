"""How far off logits may be before rounding no longer explains it. Rows and pages judge by this one rule."""

TIMES = 30.0  # tolerance: so many times the rounding of the sequence alone, but at least
LEAST = {"F32": 5e-4, "F16": 2e-3, "Q8_0": 2e-2}  # by type. Kernels at 17 slots: up to 2e-4; activations that round
AGAIN = 5.0  # times that, where keys that are kept in F16 are rotated once more


def tolerance(question: str, rounding: float, dtype: str = "F32", gpu: bool = False) -> float:
    """Largest relative error of logits that rounding explains.

    On a GPU, F32 counts as F16: CUDA multiplies 4 to 16 columns in TF32, whose mantissa is as short (ggml-cuda/mmf.cu).
    """
    least = LEAST["F16" if gpu and dtype == "F32" else dtype]
    return max(least, TIMES * rounding) * (AGAIN if question == "shifted" else 1)
