"""The machine's two ceilings, measured: read bandwidth, and matrix throughput in the engine's own kernels."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
from threadpoolctl import threadpool_limits

from plamo_study.engine.library import ggml
from plamo_study.engine.nodes import Tensor

GGML_TYPES = {  # ggml.h, enum ggml_type
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8,
    "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30,
}  # fmt: skip
PACKED = b"CPU_REPACK"  # ggml-cpu/repack.cpp: the buffer whose tensors are laid out for the processor's own kernels
ACCELERATOR = 3  # ggml-backend.h, enum ggml_backend_dev_type: used together with the CPU backend, as BLAS is
Kernel = Literal["packed", "blas", "plain"]  # of a product: repacked weights, BLAS, or the backend's own
DISTINCT_ROWS = 64  # of a random matrix; the other rows repeat them, which does not affect speed
SEED = 0
_int64 = ctypes.c_int64


class _InitParams(ctypes.Structure):  # ggml.h, struct ggml_init_params
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def read_times(n_bytes: int, n_threads: int, repetitions: int) -> list[int]:
    """Nanoseconds to read `n_bytes` once with `n_threads` pinned threads, per repetition.

    The kernel is BLAS sdot of an array with itself: two FLOPs per four bytes and no store. Use at least four times the
    last-level cache as `n_bytes`. macOS cannot pin threads; there they only run in parallel.
    """
    parts = np.array_split(np.ones(n_bytes // 4, dtype=np.float32), n_threads)
    with threadpool_limits(1):
        return [_in_parallel([partial(np.dot, part, part) for part in parts]) for _ in range(repetitions)]


def matmul_times(
    dtype: str, shape: tuple[int, int, int], n_threads: int, gpu: bool, repetitions: int, packed: bool = False
) -> tuple[list[int], Kernel]:
    """Nanoseconds for one ggml product of weights (rows x inner, type `dtype`) and inputs (inner x columns, F32).

    `shape` is (rows, inner, columns): 2 * rows * inner * columns FLOPs. Many columns measure the compute ceiling of a
    prefill; one column, the bandwidth ceiling of a decode step. `gpu`: use ggml's best device, else the backend the
    engine uses for weights in host memory. `packed`: repack the weights as the engine does when it loads a model, if it
    has a packed kernel for them. Returns one time per repetition and the kernel used.
    """
    rows, inner, columns = shape
    base, registry = ggml("ggml-base"), ggml("ggml")
    store, context = (_call(base.ggml_init, _InitParams(1 << 20, None, True)) for _ in range(2))
    weights = _call(base.ggml_new_tensor_2d, store, GGML_TYPES[dtype], _int64(inner), _int64(rows))
    inputs = _call(base.ggml_new_tensor_2d, context, GGML_TYPES["F32"], _int64(inner), _int64(columns))
    graph, product = _call(base.ggml_new_graph, context), _call(base.ggml_mul_mat, context, weights, inputs)
    base.ggml_build_forward_expand(graph, product)
    backend = _call(registry.ggml_backend_init_best) if gpu else _call(registry.ggml_backend_init_by_type, 0, None)
    buffers = [
        _place(base, store, weights, backend, packed),
        _call(base.ggml_backend_alloc_ctx_tensors, context, backend),
    ]
    kernel: Kernel = "packed" if not gpu and Tensor.from_address(weights.value or 0).extra else "plain"
    other = None if gpu or kernel == "packed" else _accelerator(base, registry, product)
    if other:
        kernel = "blas"
    if not gpu:
        _set_threads(base, other or backend, n_threads)
    _fill(base, weights, dtype, rows, inner)
    _fill(base, inputs, "F32", columns, inner)
    times = [_timed(lambda: base.ggml_backend_graph_compute(other or backend, graph)) for _ in range(repetitions)]
    for buffer in buffers:
        base.ggml_backend_buffer_free(buffer)
    for each in (backend, other):
        base.ggml_backend_free(each)
    for each in (context, store):
        base.ggml_free(each)
    return times, kernel


def matrix_bytes(dtype: str, rows: int, inner: int) -> int:
    """Bytes of a weight matrix in ggml's layout."""
    base = ggml("ggml-base")
    base.ggml_row_size.restype = ctypes.c_size_t
    return rows * int(base.ggml_row_size(GGML_TYPES[dtype], _int64(inner)))


def _accelerator(base: ctypes.CDLL, registry: ctypes.CDLL, product: ctypes.c_void_p) -> ctypes.c_void_p | None:
    """The accelerator backend that the engine prefers for a product in host memory, None without one.

    On a Mac this is Accelerate, from 32 columns on; elsewhere a build must enable one.
    """
    device = _call(registry.ggml_backend_dev_by_type, ACCELERATOR)
    base.ggml_backend_dev_supports_op.restype = ctypes.c_bool
    if not device or not base.ggml_backend_dev_supports_op(device, product):
        return None
    return _call(base.ggml_backend_dev_init, device, None)


def _set_threads(base: ctypes.CDLL, backend: ctypes.c_void_p, n_threads: int) -> None:
    library = _call(base.ggml_backend_dev_backend_reg, _call(base.ggml_backend_get_device, backend))
    found = _call(base.ggml_backend_reg_get_proc_address, library, b"ggml_backend_set_n_threads")
    if found:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(found.value or 0)(backend, n_threads)


def _place(
    base: ctypes.CDLL, store: ctypes.c_void_p, weights: ctypes.c_void_p, backend: ctypes.c_void_p, packed: bool
) -> ctypes.c_void_p:
    """A buffer for a context of one matrix: packed if requested and supported, else the backend's own."""
    kind = _packed_buffers(base, backend) if packed else None
    if kind:
        buffer = _call(base.ggml_backend_alloc_ctx_tensors_from_buft, store, kind)
        tensor = Tensor.from_address(weights.value or 0)
        if tensor.extra:
            return buffer
        base.ggml_backend_buffer_free(buffer)
        tensor.buffer = tensor.data = None
    return _call(base.ggml_backend_alloc_ctx_tensors, store, backend)


def _packed_buffers(base: ctypes.CDLL, backend: ctypes.c_void_p) -> ctypes.c_void_p | None:
    """The CPU backend's buffer type for packed weights; None for other backends and builds without it."""
    device = _call(base.ggml_backend_get_device, backend)
    library = _call(base.ggml_backend_dev_backend_reg, device)
    found = _call(base.ggml_backend_reg_get_proc_address, library, b"ggml_backend_dev_get_extra_bufts")
    if not found:
        return None
    kinds = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(found.value or 0)(device)
    base.ggml_backend_buft_name.restype = ctypes.c_char_p
    for kind in kinds:
        if not kind or base.ggml_backend_buft_name(ctypes.c_void_p(kind)) == PACKED:
            return ctypes.c_void_p(kind) if kind else None
    return None


def _fill(base: ctypes.CDLL, tensor: ctypes.c_void_p, dtype: str, rows: int, inner: int) -> None:
    distinct = min(rows, DISTINCT_ROWS)
    values = np.random.default_rng(SEED).random((distinct, inner), dtype=np.float32) - np.float32(0.5)
    block = np.empty(matrix_bytes(dtype, distinct, inner), dtype=np.uint8)
    source, target = (array.ctypes.data_as(ctypes.c_void_p) for array in (values, block))
    base.ggml_quantize_chunk(GGML_TYPES[dtype], source, target, _int64(0), _int64(distinct), _int64(inner), None)
    data = np.resize(block, matrix_bytes(dtype, rows, inner))
    base.ggml_backend_tensor_set(
        tensor, data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(0), ctypes.c_size_t(data.nbytes)
    )


def _call(function: Any, *arguments: object) -> ctypes.c_void_p:
    """Call a ggml function that returns a pointer."""
    function.restype = ctypes.c_void_p
    return ctypes.c_void_p(function(*arguments))


def _timed(work: Callable[[], object]) -> int:
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


def _in_parallel(jobs: list[Callable[[], object]]) -> int:
    gate = threading.Barrier(len(jobs) + 1)

    def run(core: int, job: Callable[[], object]) -> None:
        if hasattr(os, "sched_getaffinity"):
            allowed, pin = sorted(os.sched_getaffinity(0)), getattr(os, "sched_setaffinity")  # noqa: B009 # no Mac has it
            pin(0, {allowed[core % len(allowed)]})
        gate.wait()
        job()
        gate.wait()

    threads = [threading.Thread(target=run, args=(core, job)) for core, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    gate.wait()
    elapsed = _timed(gate.wait)
    for thread in threads:
        thread.join()
    return elapsed
