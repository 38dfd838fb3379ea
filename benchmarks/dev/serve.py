"""Times continuous batching beside transformers' static batches, and the prefill of a cache beside a forward pass.

    python benchmarks/dev/serve.py              64 requests to the 26M Llama of train_step.py, 16 at a time
    python benchmarks/dev/serve.py --quick      a tiny model and few requests, to check that everything runs

The lengths of prompts and answers are exponential with the means of Alpaca in vLLM's paper (arXiv 2309.06180, section
6.1: 19.31 and 58.45 tokens; --prompt and --answer), cut off at six times the mean; all answers are greedy.
transformers pads the prompts of a batch on the left and generates until its longest answer is complete; its batches are
taken in the order of arrival, or sorted by the length of the answers, which nobody knows in practice.
Only tokens that were asked for count. What is compared must have the same answers but for ties.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import above  # noqa: F401
import torch
from contenders import transformers_llama
from generate import QUICK, SIZES, configs
from torch import Tensor
from turns import give_back_memory, take_turns

import fnmodels
import params as P
import train

Answers = list[list[int]]


@dataclass(frozen=True)
class Load:
    """Requests: prompts as token ids, the tokens wanted of each answer, and how many run at once."""

    prompts: list[list[int]]
    new: list[int]
    rows: int

    @property
    def room(self) -> int:
        return max(map(len, self.prompts)) + max(self.new)


def load(requests: int, rows: int, means: tuple[float, float], vocab: int) -> Load:
    draw = torch.Generator().manual_seed(0)

    def drawn(mean: float, least: int) -> list[int]:
        return torch.empty(requests).exponential_(1 / mean, generator=draw).clamp(least, 6 * mean).long().tolist()

    sizes, new = drawn(means[0], 1), drawn(means[1], 2)
    return Load([torch.randint(1, vocab, (size,), generator=draw).tolist() for size in sizes], new, rows)


def served(params: Any, config: Any, asked: Load, **options: Any) -> Answers:
    greedy = train.Sampling(temperature=0)
    return train.generate(
        params, config, asked.prompts, max_new=asked.new, sampling=greedy, slots=asked.rows, **options
    ).tokens


def batched(model: Any, asked: Load, order: list[int]) -> Answers:
    """transformers.generate of consecutive requests of `order`."""
    found: dict[int, list[int]] = {}
    for begin in range(0, len(order), asked.rows):
        chosen = order[begin : begin + asked.rows]
        width = max(len(asked.prompts[i]) for i in chosen)
        ids, mask = torch.zeros(2, len(chosen), width, dtype=torch.int64)
        for row, i in enumerate(chosen):
            prompt = torch.tensor(asked.prompts[i])
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        most = max(asked.new[i] for i in chosen)
        how = {"max_new_tokens": most, "min_new_tokens": most, "do_sample": False, "pad_token_id": 0, "use_cache": True}
        out = model.generate(ids, attention_mask=mask, eos_token_id=None, **how)[:, width:]
        found |= {i: out[row, : asked.new[i]].tolist() for row, i in enumerate(chosen)}
    return [found[i] for i in range(len(order))]


def contenders(
    sizes: dict[str, int], asked: Load, dtype: torch.dtype
) -> tuple[dict[str, Callable[[], Answers]], Callable[[Tensor], dict[str, Callable[[], Tensor]]]]:
    """(answers by each contender, a function from tokens [B, S] to both ways to the logits of each row's last)."""
    given, config = configs(sizes, asked.room)
    wide = P.init(config, seed=0)
    flat = {name: leaf.numpy() for name, leaf in P.export(config, wide)}
    model = transformers_llama(given, flat).to(dtype).eval()
    params = fnmodels.tree.map(lambda leaf: leaf.to(dtype), wide)
    fast = P.packed(params) if dtype is torch.float32 else params
    arrival = list(range(len(asked.prompts)))
    step = fnmodels.compiled_step(config)
    by_answer = sorted(arrival, key=lambda i: asked.new[i])

    def prefills(tokens: Tensor) -> dict[str, Callable[[], Tensor]]:
        def forward() -> Tensor:
            prepared = fnmodels.prepare(config, tokens)
            x = fnmodels.hidden(params, *prepared, config=config)
            found: Tensor = fnmodels.family_of(config).unembed(params, x[:, -1:], config=config)[:, 0]
            return found

        empty = fnmodels.init_cache(config, *tokens.shape, dtype=dtype)  # a value: it serves every prefill

        def prefill() -> Tensor:
            step = fnmodels.prepare_step(config, tokens, empty)
            return fnmodels.prefill(params, *step, empty, config=config)[0]

        return {"forward": forward, "prefill": prefill}

    return {
        "transformers, in order": lambda: batched(model, asked, arrival),
        "train.generate": lambda: served(params, config, asked, dtype=dtype),
        "train.generate, packed": lambda: served(fast, config, asked, dtype=dtype),
        "train.generate, packed, compiled": lambda: served(fast, config, asked, dtype=dtype, compile=step),
        "transformers, by answer": lambda: batched(model, asked, by_answer),
    }, prefills


def agreement(found: Answers, wanted: Answers) -> float:
    """The share of tokens up to the first difference of each answer."""
    same = [
        next((n for n, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(found, wanted, strict=True)
    ]
    return sum(same) / sum(map(len, wanted))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=16, help="requests at a time (default 16)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=float, default=19.31, help="mean tokens of a prompt (default 19.31)")
    parser.add_argument("--answer", type=float, default=58.45, help="mean tokens of an answer (default 58.45)")
    args = parser.parse_args()
    give_back_memory()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    if args.quick:
        torch.compiler.set_stance("force_eager")  # tests of compiled steps are others
    sizes, shapes = (QUICK, [(1, 8)]) if args.quick else (SIZES, [(1, 128), (1, 1024), (8, 128)])
    asked = (
        load(5, 2, (8, 3), 64) if args.quick else load(64, args.rows, (args.prompt, args.answer), sizes["vocab_size"])
    )
    found, prefills = contenders(sizes, asked, dtype)
    total = sum(asked.new)
    prompts = list(map(len, asked.prompts))
    print(f"{len(prompts)} requests, {asked.rows} at a time, {args.dtype}: {sum(prompts)} tokens of prompts", end=" ")
    print(f"of {min(prompts)} to {max(prompts)}, {total} of answers of {min(asked.new)} to {max(asked.new)}")
    print("| who | tokens/s | x of transformers in order | by CPU time | same tokens |")
    print("|---|---|---|---|---|")
    first: tuple[float, float, Answers] | None = None
    found["train.generate, packed, compiled"]()  # the first run compiles
    for name, run in found.items():  # once each: a run is hundreds of steps
        wall, cpu = time.perf_counter(), time.process_time()
        answers = run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        first = first or (wall, cpu, answers)
        same = agreement(answers, first[2])
        print(
            f"| {name} | {total / wall:.0f} | {first[0] / wall:.2f} | {first[1] / cpu:.2f} | {same:.3f} |", flush=True
        )
    print("\n| B | tokens | forward ms | prefill ms | ratio | by CPU time |")
    print("|---|---|---|---|---|---|")
    for rows, length in shapes:
        both = prefills(torch.randint(1, sizes["vocab_size"], (rows, length)))
        torch.testing.assert_close(both["prefill"](), both["forward"](), rtol=1e-2, atol=1e-2)
        times = take_turns(both, 1 if args.quick else 9)
        forward, prefill = times["forward"], times["prefill"]
        cells = f"{forward.wall * 1e3:.1f} | {prefill.wall * 1e3:.1f} | {prefill.wall / forward.wall:.3f}"
        print(f"| {rows} | {length} | {cells} | {prefill.cpu / forward.cpu:.3f} |", flush=True)


if __name__ == "__main__":
    main()
