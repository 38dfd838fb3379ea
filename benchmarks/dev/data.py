"""Times what stands between files and a training step: reading, tokenizing, packing, and making batches.

    python benchmarks/dev/data.py                    this machine's Python sources, as `make demo` trains on
    python benchmarks/dev/data.py --data FOLDER      another text
    python benchmarks/dev/data.py --quick            a few documents, to check that everything runs

read       the files of the text as documents: decoded, without duplicates; beside reading their bytes alone
tokenize   with a BPE of 4,096 words: our pool of processes beside tokenizers' own threads (encode_batch_fast), and HF
           datasets (map, batched, a process per core) where it is installed; all must give the same ids
pack       whole documents by first fit, and the stream of all, into rows of 512
batches    the batch of a step by (seed, step): 4 random rows of a mixture of two sources, with positions, segments and
           labels; and the same of a terabyte of ids in one memory-mapped file, of which a batch reads its rows only

The last column is the rate beside what the 26M Llama of train_step.py takes in bf16: --step gives its tokens per
second. A text is read, tokenized and packed once per machine and then cached; batches are made in every step.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from train.data import corpus, mixture, rows
from train.data.encoder_pool import encode
from train.data.tokenizer import train_tokenizer

LENGTH, ROWS = 512, 4
Ids = np.ndarray


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """The least of several runs."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def with_threads(tokenizer: Any, texts: Sequence[str]) -> Ids:
    encodings = tokenizer.encode_batch_fast(list(texts))
    return np.concatenate([np.array(one.ids, np.int32) for one in encodings])


def with_datasets(tokenizer: Any, texts: Sequence[str], workers: int, folder: str) -> Ids:
    import datasets

    def encoded(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": [one.ids for one in tokenizer.encode_batch_fast(batch["text"])]}

    given = datasets.Dataset.from_dict({"text": list(texts)})
    how = {"batched": True, "num_proc": workers, "remove_columns": ["text"], "load_from_cache_file": False}
    found = given.map(encoded, cache_file_name=f"{folder}/{time.time()}.arrow", **how)
    return np.concatenate([np.asarray(column, np.int32) for column in found.with_format("numpy")[:]["ids"]])


def tokenizers_of(tokenizer: Any, texts: Sequence[str], workers: int, folder: str) -> dict[str, Callable[[], Ids]]:
    found: dict[str, Callable[[], Ids]] = {
        "tokenize, our processes": lambda: encode(tokenizer, texts, None, workers=workers)[0],
        "tokenize, tokenizers' threads": lambda: with_threads(tokenizer, texts),
    }
    try:
        import datasets
    except ImportError:
        print("HF datasets is not installed here: left out")
        return found
    datasets.disable_progress_bars()
    return found | {"tokenize, datasets.map": lambda: with_datasets(tokenizer, texts, workers, folder)}


def terabyte(folder: str, documents: int) -> mixture.Mixture:
    """A mixture of a terabyte of ids: a sparse file, in which unwritten places are zeros."""
    each = 10**12 // 2 // documents
    ids = np.memmap(f"{folder}/ids", np.uint16, "w+", shape=(documents * each,))
    lengths = np.full(documents, each)
    return mixture.Mixture(("all",), (rows.pack_stream(rows.concatenated(ids, lengths), LENGTH),), (1,))


def measured(options: argparse.Namespace, folder: str) -> dict[str, tuple[float, float]]:
    """{name: (tokens, seconds)}."""
    rounds, workers = options.rounds, options.threads
    files = corpus.read_corpus(options.data)
    documents = files.train[:50] if options.quick else files.train
    texts = [document.text for document in documents]
    tokenizer = train_tokenizer(texts, 300 if options.quick else 4096)
    ids, lengths = encode(tokenizer, texts, None, workers=1)
    total = float(lengths.sum())
    size = sum(len(text.encode()) for text in texts)
    print(f"{len(texts):,} documents, {size / 1e6:,.1f} MB, {total / 1e6:,.2f}M tokens, {workers} cores")
    found: dict[str, tuple[float, float]] = {}
    if not options.quick:
        share = total * sum(len(one.text) for one in (*files.train, *files.heldout)) / sum(map(len, texts))
        found["read"] = share, seconds(lambda: corpus.read_corpus(options.data), rounds)
    for name, run in tokenizers_of(tokenizer, texts, workers, folder).items():
        assert np.array_equal(run(), ids), f"{name} gives other ids"
        found[name] = total, seconds(run, rounds)
    tokens = rows.concatenated(ids, lengths)
    short, _ = rows.truncate_documents(tokens, LENGTH)
    found["pack, documents"] = float(short.total), seconds(lambda: rows.pack_documents(short, LENGTH), rounds)
    found["pack, stream"] = total, seconds(lambda: rows.pack_stream(tokens, LENGTH), rounds)
    both = (rows.pack_stream(tokens, LENGTH), rows.pack_stream(tokens, LENGTH))
    mixed = mixture.Mixture(("one", "other"), both, (2, 1))
    steps = 20 if options.quick else 500
    large = terabyte(folder, 1000 if options.quick else 1_000_000)
    for name, source in {"batches": mixed, "batches of a terabyte": large}.items():

        def run(source: mixture.Mixture = source) -> None:
            for step in range(steps):
                mixture.batch(source, 0, step, ROWS)

        found[name] = float(steps * ROWS * LENGTH), seconds(run, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file or folder of text")
    parser.add_argument("--step", type=float, default=2000.0, help="tokens per second of the 26M step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="processes and threads of tokenizers")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = str(options.threads), "true"
    with tempfile.TemporaryDirectory() as folder:
        found = measured(options, folder)
    print("| | tokens/s | x the step |\n|---|---:|---:|")
    for name, (tokens, taken) in found.items():
        print(f"| {name} | {tokens / taken:,.0f} | {tokens / taken / options.step:,.0f} |")


if __name__ == "__main__":
    main()
