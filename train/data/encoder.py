"""Texts as token ids. Run as a script it does so for another process, which `train.data.encoder_pool` starts and
speaks to.

It imports nothing of its package, which would be torch: a process is there in a fraction of a second.
"""

import pickle
import sys
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

Talk = tuple[str, list[tuple[int, int]]]  # a rendered conversation, and where what is learnt stands in it


def encode(tokenizer: Tokenizer, texts: Sequence[str], end: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 [T] of all texts in one line, and how many of them each has, int64 [N].

    Each with what the tokenizer puts before it, and with the token `end` after it.
    """
    take_all(tokenizer)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" written in a text is text, not the end of a document
    tail = [] if end is None else [end]
    found = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    found = [ids if ids[-1:] == tail else ids + tail for ids in found]
    lengths = np.array([len(ids) for ids in found], np.int64)
    return np.concatenate([np.zeros(0, np.int32), *(np.array(ids, np.int32) for ids in found)]), lengths


def encode_talks(tokenizer: Tokenizer, talks: Sequence[Talk]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids int32 [T], lengths int64 [N] and what is learnt, bool [T], of rendered conversations.

    A token that begins before a turn and reaches into it is not learnt: the assistant never chooses it.
    """
    take_all(tokenizer)
    tokenizer.encode_special_tokens = False  # the template writes them as text
    after, tokenizer.post_processor = tokenizer.post_processor, None  # GPT-NeoX's moves offsets past a token's spaces
    try:
        found = tokenizer.encode_batch([text for text, _ in talks], add_special_tokens=False)
    finally:
        tokenizer.post_processor = after
    ids, learnt = [np.zeros(0, np.int32)], [np.zeros(0, bool)]
    for encoding, (_, turns) in zip(found, talks, strict=True):
        begins = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 0]
        ids.append(np.array(encoding.ids, np.int32))
        learnt.append(np.zeros(len(begins), bool))
        for start, stop in turns:
            learnt[-1] |= (start <= begins) & (begins < stop)
    return np.concatenate(ids), np.array([len(some) for some in ids[1:]], np.int64), np.concatenate(learnt)


def take_all(tokenizer: Tokenizer) -> None:
    """A tokenizer.json may tell to cut every text at so many tokens and to pad it: its trainer's batches, not ours."""
    tokenizer.no_truncation()
    tokenizer.no_padding()


def answer(tokenizer: Tokenizer, kind: str, end: int | None, items: Sequence) -> tuple[np.ndarray, ...]:
    """Of "texts" or "talks"."""
    return encode(tokenizer, items, end) if kind == "texts" else encode_talks(tokenizer, items)


def serve() -> None:
    """First a tokenizer and what is to be done, then lists of items until the other side closes, each answered."""
    source, kind, end = pickle.load(sys.stdin.buffer)
    tokenizer = Tokenizer.from_str(source)
    while True:
        try:
            items = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(answer(tokenizer, kind, end, items), sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
