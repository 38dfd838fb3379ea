"""Tokenization of texts and rendered conversations; run as a script, a worker process of `train.data.encoder_pool`.

It imports nothing of its package, and so not torch: a worker starts in a fraction of a second.
"""

import json
import sys
from collections.abc import Sequence
from itertools import chain
from typing import IO, Any

import numpy as np
from tokenizers import Tokenizer

RenderedChat = tuple[str, list[tuple[int, int]]]  # a rendered conversation, and the character ranges that are targets


def encode(tokenizer: Tokenizer, texts: Sequence[str], end: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all texts, concatenated, int32 [T], and the number of ids of each text, int64 [N].

    Each text gets the tokenizer's own special tokens in front and, unless it is None, the token `end` behind.
    """
    disable_truncation(tokenizer)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" written in a text is text, not the end of a document
    tail = [] if end is None else [end]
    found = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    found = [ids if ids[-1:] == tail else ids + tail for ids in found]
    lengths = np.array([len(ids) for ids in found], np.int64)
    return np.concatenate([np.zeros(0, np.int32), *(np.array(ids, np.int32) for ids in found)]), lengths


def encode_chats(tokenizer: Tokenizer, chats: Sequence[RenderedChat]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids int32 [T], lengths int64 [N] and loss masks bool [T] of rendered conversations, concatenated.

    A token that begins before a turn and reaches into it is no target: the assistant never generates it.
    """
    disable_truncation(tokenizer)
    tokenizer.encode_special_tokens = False  # the template writes special tokens as text
    # GPT-NeoX's post-processor moves offsets past a token's leading spaces
    after, tokenizer.post_processor = tokenizer.post_processor, None
    try:
        found = tokenizer.encode_batch([text for text, _ in chats], add_special_tokens=False)
    finally:
        tokenizer.post_processor = after
    ids, loss_mask = [np.zeros(0, np.int32)], [np.zeros(0, bool)]
    for encoding, (_, turns) in zip(found, chats, strict=True):
        begins = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 0]
        ids.append(np.array(encoding.ids, np.int32))
        loss_mask.append(np.zeros(len(begins), bool))
        for start, stop in turns:
            loss_mask[-1] |= (start <= begins) & (begins < stop)
    return np.concatenate(ids), np.array([len(chunk) for chunk in ids[1:]], np.int64), np.concatenate(loss_mask)


def added_in_front(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that the tokenizer adds in front of a text, such as <bos>."""
    names = (tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size()))
    # behind a text without ids, such as a letter where digits are all there is, nothing tells front from back
    some = (text for text in chain("a", names) if text and tokenizer.encode(text, add_special_tokens=False).ids)
    encoding = tokenizer.encode(next(some, ""))
    text = (place for place, added in enumerate(encoding.special_tokens_mask) if not added)
    return list(encoding.ids[: next(text, None)])


def beginning_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that goes on: with what the tokenizer adds in front, once, and without what it adds behind."""
    front, ids = added_in_front(tokenizer), list(tokenizer.encode(text, add_special_tokens=False).ids)
    return ids if front and ids[: len(front)] == front else front + ids


def disable_truncation(tokenizer: Tokenizer) -> None:
    """Turns off truncation and padding, which some tokenizer.json files carry from their training batches."""
    tokenizer.no_truncation()
    tokenizer.no_padding()


def encode_items(tokenizer: Tokenizer, kind: str, end: int | None, items: Sequence) -> tuple[np.ndarray, ...]:
    """`encode` for kind "texts", `encode_chats` for kind "chats"."""
    return encode(tokenizer, items, end) if kind == "texts" else encode_chats(tokenizer, items)


def serve() -> None:
    """Reads [tokenizer, kind, end] from stdin, then lists of items until it closes; writes the arrays of each list."""
    source, kind, end = json.loads(sys.stdin.buffer.readline())
    tokenizer = Tokenizer.from_str(source)
    for line in sys.stdin.buffer:
        arrays = encode_items(tokenizer, kind, end, json.loads(line))
        send(sys.stdout.buffer, [(str(array.dtype), len(array)) for array in arrays], *arrays)


def send(pipe: IO[bytes], value: Any, *arrays: np.ndarray) -> None:
    """Writes a line of JSON, and the bytes of arrays that it describes."""
    pipe.write(json.dumps(value).encode() + b"\n")
    for array in arrays:
        pipe.write(array.data)
    pipe.flush()


if __name__ == "__main__":
    serve()
