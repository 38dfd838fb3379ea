"""Trains the 26M-parameter Llama for 100 steps here and in a plain transformers loop: the loss curves must be equal.

    python benchmarks/dev/curves.py                         fp32, 4 rows of 512 tokens a step; writes results/curves.*
    python benchmarks/dev/curves.py --quick                 a tiny model and 10 steps, writes nothing
    python benchmarks/dev/curves.py --layers 2 --dim 128 --ffn 352 --heads 2 --kv-heads 1 --sequence 128 --out somewhere

Both start from the same weights and take the same rows in the same order. The transformers loop is what its users
write: the model's own loss, backward, clip_grad_norm_, torch's fused AdamW with a warmup by LambdaLR. Ours is
`train.make_step`. They take turns, step by step. The text is Python's standard library, each word hashed to an id, so
that nothing needs to be downloaded and the loss falls as on any text.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import params as P
import train
from fnmodels import llama

HERE = Path(__file__).parent
LIMIT = 1e-4
RATE, WARMUP, CLIP = 1e-3, 10, 1.0
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Step = Callable[[Tensor], tuple[float, float]]  # tokens [B, S] -> (loss, norm of the gradient before clipping)


def text(words: int, vocab: int) -> Tensor:
    """The first `words` words and signs of the standard library's sources, in the order of the files' names."""
    found: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        found += [zlib.crc32(word.encode()) % vocab for word in re.findall(r"\w+|[^\w\s]|\n", source)]
        if len(found) >= words:
            return torch.tensor(found[:words])
    raise SystemExit(
        f"The standard library has {len(found):,} words; {words:,} are needed: take fewer or shorter rows."
    )


def batches(given: argparse.Namespace) -> Iterator[Tensor]:
    """[B, S] per step: the rows of the text in an order drawn from the seed."""
    rows = text(given.steps * given.batch * given.sequence, given.vocab).view(-1, given.sequence)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(given.seed))
    yield from rows[order].split(given.batch)


def ours(config: llama.Config, start: Any) -> Step:
    def rate(step: Tensor) -> Any:
        return RATE * (step / WARMUP).clamp(max=1.0)

    optimizer = train.adamw(rate, **ADAMW)
    step = train.make_step(functools.partial(train.next_token_loss, config=config), optimizer, clip=CLIP)
    held = [train.init_state(start, optimizer)]

    def one(tokens: Tensor) -> tuple[float, float]:
        labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], -100)), dim=1)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        batch = {"tokens": tokens, "positions": positions, "segment_ids": torch.ones_like(tokens), "labels": labels}
        held[0], metrics = step(held[0], batch)
        return float(metrics["loss"]), float(metrics["grad_norm"])

    return one


def theirs(config: llama.Config, start: Any) -> Step:
    settings = {k: v for k, v in config.to_hf().items() if k != "architectures"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, attn_implementation="sdpa"))
    names, flat = llama.hf_names(config), P.flatten(start)
    model.load_state_dict({names[path]: leaf for path, leaf in flat.items()}, strict=True)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True, **ADAMW)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / WARMUP))

    def one(tokens: Tensor) -> tuple[float, float]:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), float(norm)

    return one


def table(losses: dict[str, list[float]]) -> str:
    pairs = list(zip(*losses.values(), strict=True))
    shown = sorted({0, len(pairs) - 1, *range(9, len(pairs), 10)})
    lines = [f"| step | {' | '.join(losses)} | difference |", "|---:|---:|---:|---:|"]
    lines += [f"| {i + 1} | {a:.6f} | {b:.6f} | {a - b:+.1e} |" for i, (a, b) in enumerate(pairs) if i in shown]
    return "\n".join(lines)


def picture(losses: dict[str, list[float]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    (name, mine), (other, reference) = losses.items()
    steps = range(1, len(mine) + 1)
    above.plot(steps, reference, linewidth=3.0, color="#e0a030", label=other)
    above.plot(steps, mine, linewidth=1.0, color="#1b6ca8", label=name)
    above.set(ylabel="loss (nats per token)", title=title)
    above.legend()
    below.semilogy(steps, [max(abs(a - b), 1e-9) for a, b in zip(mine, reference, strict=True)], color="#7a5195")
    below.axhline(LIMIT, color="#8f8f8f", linestyle="--", linewidth=1)
    below.set(xlabel="step", ylabel="difference")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 100, "batch": 4, "sequence": 512, "layers": 6, "dim": 512, "ffn": 1408, "heads": 8, "kv_heads": 4}
    sizes |= {"vocab": 8192, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a tiny model and 10 steps")
    parser.add_argument("--out", type=Path, help="folder for curves.png, .md and .json; default: results; quick: none")
    given = parser.parse_args()
    if given.quick:
        given.steps, given.batch, given.sequence, given.layers, given.dim, given.ffn = 10, 2, 64, 2, 64, 176
        given.vocab = 512
    torch.set_num_threads(given.threads)
    config = llama.Config(
        given.vocab, given.dim, given.ffn, given.layers, given.heads, given.kv_heads, rms_norm_eps=1e-5
    )
    start = P.init(config, given.seed)
    size = f"Llama of {P.count(config) / 1e6:.1f}M parameters, {given.batch} x {given.sequence} tokens a step, fp32"
    print(f"{size}; torch {torch.__version__}, transformers {transformers.__version__}")
    steps: dict[str, Step] = {"fnmodels": ours(config, start), "transformers": theirs(config, start)}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    norms: dict[str, list[float]] = {name: [] for name in steps}
    for index, tokens in enumerate(batches(given)):
        for name, step in steps.items():
            loss, norm = step(tokens)
            losses[name].append(loss)
            norms[name].append(norm)
        if index % 10 == 9:
            print(
                f"  step {index + 1}: " + ", ".join(f"{name} {many[-1]:.6f}" for name, many in losses.items()),
                flush=True,
            )
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    verdict = f"largest difference of the loss over {given.steps} steps: {apart:.1e} (limit {LIMIT:.0e})"
    print("\n" + table(losses) + f"\n\n{verdict}")
    out = given.out or (None if given.quick else HERE / "results")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "curves.md").write_text(f"{size}; {verdict}.\n\n{table(losses)}\n")
        record = {"sizes": {name: getattr(given, name) for name in sizes}, "losses": losses, "norms": norms}
        (out / "curves.json").write_text(json.dumps(record, indent=1) + "\n")
        picture(losses, size, out / "curves.png")
        print(f"written to {out}: curves.png, curves.md, curves.json")
    if not apart <= LIMIT:
        raise SystemExit(f"The curves differ by {apart:.1e}, more than {LIMIT:.0e}.")


if __name__ == "__main__":
    main()
