"""Measures the error between a sampler's log-probabilities and the trainer's, with and without the sampler's experts.

    python benchmarks/dev/routing_replay.py              a small mixture of experts, trained on the text of docs/
    python benchmarks/dev/routing_replay.py --quick      a few steps and answers, to check that everything runs

The trainer computes in fp32. The sampler has the same weights in bf16, or has stale ones: those of some updates before.
An answer is drawn by `train.generate` from a piece of text, at temperature 1; the trainer scores it in packed rows.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import above  # noqa: F401
import torch
from torch import Tensor

import params as P
import train
from fnmodels import qwen_moe, tree
from train.data.token_budget import token_budget, unpacked
from train.generation.routing import replayable

DOCS = Path(__file__).parents[2] / "docs"
SIZES: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


def text() -> Tensor:
    return torch.tensor(list(b"\n".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))))


def batch_of(corpus: Tensor, rows: int, length: int, draws: torch.Generator) -> dict[str, Tensor]:
    starts = torch.randint(len(corpus) - length - 1, (rows,), generator=draws)
    tokens = torch.stack([corpus[start : start + length + 1] for start in starts])
    positions = torch.arange(length).expand(rows, -1)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions}
    return batch | {"segment_ids": torch.ones_like(positions)}


def learned(config: Any, corpus: Tensor, steps: int, more: int) -> tuple[Any, Any]:
    """(weights after `steps` updates, those after `more` of a small rate)."""
    draws = torch.Generator().manual_seed(0)
    loss, optimizer = functools.partial(train.next_token_loss, config=config), train.adamw(3e-3)
    step = train.make_step(loss, optimizer, clip=1.0)
    state = train.init_state(P.init(config, seed=0), optimizer)
    for number in range(steps):
        state, metrics = step(state, batch_of(corpus, 8, 128, draws))
        if (number + 1) % 50 == 0:
            print(f"step {number + 1}: loss {float(metrics['loss']):.3f}", flush=True)
    before = tree.map(torch.clone, state.params)
    small = train.adamw(3e-4)
    step = train.make_step(loss, small, clip=1.0)
    state = train.init_state(state.params, small)
    for _ in range(more):
        state, _ = step(state, batch_of(corpus, 8, 128, draws))
    return before, state.params


def scored(params: Any, config: Any, tokens: list[Tensor], routing: list[Tensor] | None) -> list[Tensor]:
    """The log-probability of each token after the first."""
    entries: dict[str, Any] = {"tokens": tokens} | ({} if routing is None else {"routing": routing})
    (rows,) = token_budget(entries, 2048)
    with torch.no_grad():
        found = [train.token_logprobs(params, row.batch, config=config)[0] for row in rows]
    return [logp[:-1] for logp in unpacked(rows, found).values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    steps, more, answers, new = (4, 1, 4, 8) if args.quick else (300, 8, 128, 96)
    config = qwen_moe.Config.from_hf(SIZES)
    corpus = text()
    before, trainer = learned(config, corpus, steps, more)
    draws = torch.Generator().manual_seed(1)
    starts = torch.randint(len(corpus) - 64, (answers,), generator=draws).tolist()
    prompts = [corpus[start : start + 32].tolist() for start in starts]
    half = tree.map(lambda leaf: leaf.bfloat16(), trainer)
    samplers: dict[str, tuple[Any, dict[str, Any]]] = {
        "fp32, the same weights": (trainer, {}),
        "bf16, the same weights": (half, {}),
        "bf16, keys and values in int8": (half, {"kv_dtype": torch.int8}),
        f"fp32, weights {more} updates older": (before, {}),
    }
    print("| sampler | experts | mean error | 99.9% | largest | KL | tokens with other experts |")
    print("|---|---|---|---|---|---|---|")
    for name, (params, options) in samplers.items():
        found = train.generate(
            params, config, prompts, max_new=new, seeds=5, compile="none", record_routing=True, **options
        )
        tokens = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, found.tokens, strict=True)]
        full = [replayable(own, len(row)) for own, row in zip(found.routing, tokens, strict=True)]
        again = [_chosen(trainer, config, row) for row in tokens]
        other = torch.cat(
            [
                (a[31:-1].sort(-1).values != b[31:-1].sort(-1).values).flatten(1).any(1)
                for a, b in zip(full, again, strict=True)
            ]
        )
        for how, routing in (("the trainer's own", None), ("replayed", full)):
            ours = scored(trainer, config, tokens, routing)
            error = torch.cat([own[31:] - theirs for own, theirs in zip(ours, found.logp, strict=True)])
            size, kl = error.abs(), (error.exp() - 1 - error).mean()
            most = float(size.quantile(0.999))
            print(
                f"| {name} | {how} | {float(size.mean()):.1e} | {most:.1e} | {float(size.max()):.1e} | {float(kl):.1e} "
                f"| {100 * float(other.float().mean()):.1f}% |",
                flush=True,
            )


def _chosen(params: Any, config: Any, tokens: Tensor) -> Tensor:
    """The experts that the trainer's routers choose, [T, layers with experts, k]."""
    import fnmodels
    from train.generation.routing import TAPS, recorded

    with torch.no_grad():
        _, tapped = fnmodels.forward(params, *fnmodels.prepare(config, tokens[None]), config=config, taps=TAPS)
    return recorded(tapped)[0].long()


if __name__ == "__main__":
    main()
