"""Texts as token ids. Run as a script it does so for another process, which `train.workers` starts and speaks to.

It imports nothing of its package, which would be torch: a process is there in a fraction of a second.
"""

import pickle
import sys
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str], end: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 [T] of all texts in one line, and how many of them each has, int64 [N].

    Each with what the tokenizer puts before it, and with the token `end` after it.
    """
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" written in a text is text, not the end of a document
    tail = [] if end is None else [end]
    found = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    found = [ids if ids[-1:] == tail else ids + tail for ids in found]
    lengths = np.array([len(ids) for ids in found], np.int64)
    return np.concatenate([np.zeros(0, np.int32), *(np.array(ids, np.int32) for ids in found)]), lengths


def serve() -> None:
    """First the tokenizer and `end`, then lists of texts until the other side closes; arrays are the answer to each."""
    source, end = pickle.load(sys.stdin.buffer)
    tokenizer = Tokenizer.from_str(source)
    while True:
        try:
            texts = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(encode(tokenizer, texts, end), sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
