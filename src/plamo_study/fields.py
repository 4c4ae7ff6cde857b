"""Names of a cell's fields in JSON and frames, for every type of cell: the one place that lists them."""

ORDER = (  # the order in the JSON that keys hash, and of frame columns: append new names at the end
    "workload", "model", "scale", "dtype", "n_prompt", "n_gen", "n_seq", "policy", "n_threads", "n_batch", "n_ubatch",
    "type_k", "type_v", "flash_attn", "n_gpu_layers", "use_mmap", "cold", "calls", "label", "candidates", "text",
    "text_sha256", "n_chunks", "size", "repetitions", "seed", "n_arriving", "n_chunk", "way", "kv_unified",
    "n_processes", "killed", "link_bps", "n_requests", "per_second", "n_draft", "accepts", "draft", "draft_dtype",
    "temperature", "back", "server", "n_clients", "pattern", "balance", "proof",
    "planted", "rungs",
)  # fmt: skip
