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

from llama_meter.engine.bindings import TYPES, InitParams, Library, Tensor, ggml

PACKED = b"CPU_REPACK"  # ggml-cpu/repack.cpp: the buffer whose tensors are laid out for the processor's own kernels
ACCELERATOR = 3  # ggml-backend.h, enum ggml_backend_dev_type: used together with the CPU backend, as BLAS is
Kernel = Literal["packed", "blas", "accelerate", "plain"]  # repacked weights, a BLAS, or the backend's own product
ACCELERATE = b"Accelerate"  # ggml-blas.cpp, ggml_backend_blas_device_get_description: Apple's BLAS
DISTINCT_ROWS = 64  # of a random matrix; the other rows repeat them, which does not affect speed
SEED = 0


def read_times(n_bytes: int, n_threads: int, repetitions: int) -> list[int]:
    """Nanoseconds to read `n_bytes` once with `n_threads` pinned threads, per repetition.

    The kernel is BLAS sdot of an array with itself: two FLOPs per four bytes and no store. Use at least four times the
    last-level cache as `n_bytes`. macOS cannot pin threads; there they only run in parallel.
    """
    parts = np.array_split(np.ones(n_bytes // 4, dtype=np.float32), n_threads)
    with threadpool_limits(1):
        return [_in_parallel([partial(np.dot, part, part) for part in parts]) for _ in range(repetitions)]


def reads_with_accelerate() -> bool:
    """Whether `read_times` runs on Apple's Accelerate: NumPy is built with it for current macOS (numpy.show_config)."""
    config: Any = np.show_config(mode="dicts")
    return str(config["Build Dependencies"]["blas"]["name"]).lower() == "accelerate"


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
    store, context = (base.ggml_init(InitParams(1 << 20, None, True)) for _ in range(2))
    weights = base.ggml_new_tensor_2d(store, TYPES[dtype], inner, rows)
    inputs = base.ggml_new_tensor_2d(context, TYPES["F32"], inner, columns)
    graph, product = base.ggml_new_graph(context), base.ggml_mul_mat(context, weights, inputs)
    base.ggml_build_forward_expand(graph, product)
    backend = registry.ggml_backend_init_best() if gpu else registry.ggml_backend_init_by_type(0, None)
    placed = _place(base, store, weights, backend, packed)
    buffers = [placed, base.ggml_backend_alloc_ctx_tensors(context, backend)]
    kernel: Kernel = "packed" if not gpu and Tensor.from_address(weights).extra else "plain"
    other = None if gpu or kernel == "packed" else _accelerator(base, registry, product)
    if other:
        description = base.ggml_backend_dev_description(base.ggml_backend_get_device(other))
        kernel = "accelerate" if description == ACCELERATE else "blas"
    if not gpu:
        _set_threads(base, other or backend, n_threads)
    _fill(base, weights, dtype, rows, inner)
    _fill(base, inputs, "F32", columns, inner)
    times = [_timed(lambda: base.ggml_backend_graph_compute(other or backend, graph)) for _ in range(repetitions)]
    for buffer in buffers:
        base.ggml_backend_buffer_free(buffer)
    for handle in (backend, other):
        base.ggml_backend_free(handle)
    for handle in (context, store):
        base.ggml_free(handle)
    return times, kernel


def matrix_bytes(dtype: str, rows: int, inner: int) -> int:
    """Bytes of a weight matrix in ggml's layout."""
    return rows * int(ggml("ggml-base").ggml_row_size(TYPES[dtype], inner))


def _accelerator(base: Library, registry: Library, product: int) -> int | None:
    """The accelerator backend that the engine prefers for a product in host memory, None without one.

    On a Mac this is Accelerate, from 32 columns on; elsewhere a build must enable one.
    """
    device = registry.ggml_backend_dev_by_type(ACCELERATOR)
    usable = device and base.ggml_backend_dev_supports_op(device, product)
    return base.ggml_backend_dev_init(device, None) if usable else None


def _set_threads(base: Library, backend: int, n_threads: int) -> None:
    function = _function(base, base.ggml_backend_get_device(backend), b"ggml_backend_set_n_threads")
    if function:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(function)(backend, n_threads)


def _function(base: Library, device: int, name: bytes) -> int | None:
    """The address of a function that only some backends have."""
    address: int | None = base.ggml_backend_reg_get_proc_address(base.ggml_backend_dev_backend_reg(device), name)
    return address


def _place(base: Library, store: int, weights: int, backend: int, packed: bool) -> int | None:
    """A buffer for a context of one matrix: packed if requested and supported, else the backend's own."""
    kind = _packed_buffers(base, backend) if packed else None
    buffer: int | None
    if kind:
        buffer = base.ggml_backend_alloc_ctx_tensors_from_buft(store, kind)
        tensor = Tensor.from_address(weights)
        if tensor.extra:
            return buffer
        base.ggml_backend_buffer_free(buffer)
        tensor.buffer = tensor.data = None
    buffer = base.ggml_backend_alloc_ctx_tensors(store, backend)
    return buffer


def _packed_buffers(base: Library, backend: int) -> int | None:
    """The CPU backend's buffer type for packed weights; None for other backends and builds without it."""
    device = base.ggml_backend_get_device(backend)
    function = _function(base, device, b"ggml_backend_dev_get_extra_bufts")
    if not function:
        return None
    kinds = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(function)(device)
    for kind in kinds:  # the list ends with a null pointer
        if not kind or base.ggml_backend_buft_name(kind) == PACKED:
            return kind
    return None


def _fill(base: Library, tensor: int, dtype: str, rows: int, inner: int) -> None:
    distinct = min(rows, DISTINCT_ROWS)
    values = np.random.default_rng(SEED).random((distinct, inner), dtype=np.float32) - np.float32(0.5)
    block = np.empty(matrix_bytes(dtype, distinct, inner), dtype=np.uint8)
    base.ggml_quantize_chunk(TYPES[dtype], values.ctypes.data, block.ctypes.data, 0, distinct, inner, None)
    data = np.resize(block, matrix_bytes(dtype, rows, inner))
    base.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)


def _timed(work: Callable[[], object]) -> int:
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


def _in_parallel(jobs: list[Callable[[], object]]) -> int:
    """Nanoseconds of these jobs, a thread each, from before the first is let go until the last has ended."""
    times: list[int] = []  # taken by the last thread to arrive, before any is let go
    gate = threading.Barrier(len(jobs), action=lambda: times.append(time.perf_counter_ns()))

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
    for thread in threads:
        thread.join()
    return times[1] - times[0]
