"""The shared vocabulary of the trained models: a unigram model's pieces, in the form the plamo2 tokenizer wants.

The `tokenizers` library learns the pieces (Kudo 2018, arXiv:1804.10959). The engine finds the likeliest segmentation of
a text into them, regardless of where the learner cut it. It does not tokenize.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama_meter.models.vocabulary import DEFAULTS, Vocabulary
from training.corpus import Module

LONGEST = 16  # characters of a piece
# The learner cuts into: a word with the space before it and the punctuation after it, punctuation, a line end with the
# next line's indentation, spaces. A piece lies within one such part.
PARTS = r"[^\S\n]?\w+[^\w\s]*(?:\n[ \n]*)?|[^\w\s]+(?:\n[ \n]*)?|\n[ \n]*| +"
ASCII = "\n\t" + "".join(map(chr, range(0x20, 0x7F)))
NEVER = -20.0  # log-probability of a character that never occurs alone in the text


def learn(train: Iterable[Module], n_vocab: int) -> Vocabulary:
    """A vocabulary of `n_vocab` tokens: 5 special ones, 256 bytes, and pieces with log-probabilities as scores.

    Lines with non-ASCII characters are left out; such characters are spelt in bytes.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    texts = ["".join(filter(str.isascii, module.text.splitlines(keepends=True))) for module in train]
    tokenizer: Any = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PARTS), "isolated")
    n_pieces = n_vocab - len(DEFAULTS) - 256
    trainer = trainers.UnigramTrainer(
        vocab_size=n_pieces, initial_alphabet=list(ASCII), max_piece_length=LONGEST, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    learnt = {text: score for text, score in json.loads(tokenizer.to_str())["model"]["vocab"]}
    return vocabulary(learnt, n_pieces)


def vocabulary(learnt: dict[str, float], n_pieces: int) -> Vocabulary:
    """The likeliest `n_pieces` of `learnt` (text to log-probability) and every ASCII character, as a vocabulary."""
    single = {c: learnt.get(c, NEVER) for c in ASCII}
    longer = sorted(((s, t) for t, s in learnt.items() if len(t) > 1 and t.isascii()), reverse=True)
    pieces = single | {text: score for score, text in longer[: n_pieces - len(single)]}
    ranked = sorted(pieces.items(), key=lambda item: (-item[1], item[0]))
    special, byte = list(DEFAULTS.values()), [f"<0x{b:02X}>" for b in range(256)]
    return Vocabulary(
        tokens=[*special, *byte, *(text for text, _ in ranked)],
        scores=[0.0] * (len(special) + 256) + [round(max(score, NEVER), 4) for _, score in ranked],
        types=[2] + [3] * 4 + [6] * 256 + [1] * len(ranked),  # unknown, control, byte, normal
        special={role: i for i, role in enumerate(DEFAULTS)},
        flags={"add_bos_token": True},
    )


def kept(path: Path, train: Iterable[Module], n_vocab: int) -> Vocabulary:
    """The vocabulary in `path`, learnt and written first if the file is missing."""
    if not path.exists():
        path.write_text(
            json.dumps(asdict(learn(train, n_vocab)), ensure_ascii=False, indent=0) + "\n", encoding="utf-8"
        )
    return Vocabulary(**json.loads(path.read_text(encoding="utf-8")))
