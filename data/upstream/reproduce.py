"""Two defects of llama.cpp's PLaMo 2 graph on any PLaMo 2 GGUF, with llama-cpp-python alone: reproduce.py FILE."""

import sys

import llama_cpp.llama_cpp as llama
import numpy as np


def logits(calls: list[list[tuple[int, int]]]) -> dict[int, np.ndarray]:
    """Run calls of (sequence, tokens) from an empty context; the last logits of each sequence."""
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch = 4096, 4, 2048
    context, past, found = llama.llama_init_from_model(model, params), dict.fromkeys(range(4), 0), {}
    for call in calls:
        batch = llama.llama_batch_init(2048, 0, 1)
        for seq, count in call:
            for _ in range(count):
                row, batch.n_tokens = batch.n_tokens, batch.n_tokens + 1
                batch.token[row], batch.pos[row], batch.logits[row] = tokens[seq][past[seq]], past[seq], 1
                batch.n_seq_id[row], batch.seq_id[row][0], past[seq] = 1, seq, past[seq] + 1
        assert llama.llama_decode(context, batch) == 0
        ends = np.cumsum([count for _, count in call]) - 1
        for (seq, _), row in zip(call, ends.tolist(), strict=True):
            found[seq] = np.array(llama.llama_get_logits_ith(context, row)[:n_vocab])
    return found


model = llama.llama_model_load_from_file(sys.argv[1].encode(), llama.llama_model_default_params())
n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
tokens = np.random.default_rng(0).integers(5, n_vocab, (4, 300)).tolist()
alone = {seq: logits([[(seq, 256)]])[seq] for seq in range(4)}
for seq, row in logits([[(seq, 256) for seq in range(4)]]).items():  # D2: four prompts in one call
    print(f"packed prompts, sequence {seq}: error {np.linalg.norm(row - alone[seq]) / np.linalg.norm(row):.2g}")
prompts = [[(seq, 256)] for seq in range(4)]
expected = logits([*prompts, [(3, 1)]])[3]
row = logits([*prompts, [(1, 1), (2, 1)], [(3, 1)]])[3]  # D3: slots 1 and 2 step, slot 3 is not in that call
print(f"bystander, sequence 3: error {np.linalg.norm(row - expected) / np.linalg.norm(expected):.2g}")
