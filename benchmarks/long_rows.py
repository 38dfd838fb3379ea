"""Times a training step over one long row: time and memory must be linear in its length where documents or windows end.

    python benchmarks/long_rows.py             rows of 8,192 to 131,072 tokens
    python benchmarks/long_rows.py --quick     short rows, to check that everything runs

The model is a Mistral of 2 layers, width 256, 4 heads and 8,192 words, in fp32; the loss is computed in chunks and each
layer is recomputed in the backward pass (`remat`).
window  one document, of which each token sees the last 1,024: of a mask of S x S bools 131,072 tokens would take 16 GiB
packed  documents of 1,024 tokens, no window
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
from turns import give_back_memory, take_turns

import params as P
import train
from fnmodels.models.decoder import llama

REACH = 1024  # tokens of a window and of a packed document
MODEL = {
    "model_type": "mistral",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
}


def training_step(length: int, reach: int, window: bool) -> Callable[[], float]:
    """A function that makes one training step over a row of `length` tokens and returns its loss."""
    config = llama.Config.from_hf(MODEL | {"sliding_window": reach if window else None})
    tokens = torch.randint(MODEL["vocab_size"], (1, length), generator=torch.Generator().manual_seed(0))
    place = torch.arange(length)[None]
    row = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    row |= {"positions": place if window else place % reach}
    row |= {"segment_ids": torch.ones_like(tokens) if window else 1 + place // reach}
    optimizer = train.adamw(1e-4)
    step = train.make_step(functools.partial(train.next_token_loss, config=config), optimizer, remat="full")
    held = [train.init_state(P.init(config, seed=0), optimizer)]

    def run() -> float:
        held[0], metrics = step(held[0], row)
        return float(metrics["loss"])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    args = parser.parse_args()
    give_back_memory()
    torch.set_num_threads(args.threads)
    lengths, reach, rounds = ([256, 512], 64, 1) if args.quick else (args.lengths, REACH, args.rounds)
    for kind in ("window", "packed"):
        runs = {f"{length:,}": training_step(length, reach, kind == "window") for length in lengths}
        taken = take_turns(runs, rounds)
        print(f"| {kind} of {reach:,} | seconds | tokens/s | by CPU time | peak MiB | KiB per token |")
        print("|---|---|---|---|---|---|")
        for length, (name, one) in zip(lengths, taken.items(), strict=True):
            print(
                f"| {name} | {one.wall:.2f} | {length / one.wall:,.0f} | {length / one.cpu:,.0f} |"
                f" {one.peak / 2**20:,.0f} | {one.peak / length / 2**10:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
