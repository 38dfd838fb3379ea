"""Measures time and memory of token log-probabilities and entropies for a large vocabulary, chunked and dense.

    python benchmarks/dev/logprobs.py                  8,192 tokens, 131,072 words, fp32; needs about 16 GiB
    python benchmarks/dev/logprobs.py --quick          small sizes, one round, to check that everything runs
    python benchmarks/dev/logprobs.py --tokens 2048 --backward-tokens 512

It compares the part that differs: final norm, head, log-probability of the label and entropy, from hidden states.
"dense" is the usual expression over all logits, which frees and reuses what it can. Forward is without gradients, as
when answers are scored; forward + backward has its own number of tokens, because dense holds several times more there.
Nothing is timed before values are within 1e-6 of dense ones in fp64 (the dense entropies in fp32 are not; their
distance is printed too), and gradients within 1e-5 of dense. Peaks are of resident memory, above that before the call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import above  # noqa: F401
import torch
import torch.nn.functional as F
from torch import Tensor
from turns import give_back_memory, take_turns

from fnmodels import llama
from train.losses import head_logprobs

PEAK, TIME = 0.125, 1.3  # targets, ours over dense
Scores = tuple[Tensor, Tensor]


def build(tokens: int, vocab: int, dim: int) -> tuple[Any, dict[str, Tensor], Tensor, Tensor]:
    """config, parameters of a head, hidden states [1, T, D], labels [1, T]; logits have a standard deviation of 2."""
    config = llama.Config(vocab, dim, dim, 1, 8, 8, tie_word_embeddings=False)
    draws = torch.Generator().manual_seed(0)
    head = torch.randn(vocab, dim, generator=draws).mul_(2 * dim**-0.5)
    x, labels = torch.randn(1, tokens, dim, generator=draws), torch.randint(vocab, (1, tokens), generator=draws)
    return config, {"norm": torch.ones(dim), "lm_head": head}, x, labels


def dense(params: dict[str, Tensor], x: Tensor, labels: Tensor, eps: float) -> Scores:
    logits = F.linear(F.rms_norm(x, x.shape[-1:], params["norm"], eps), params["lm_head"])
    every = torch.log_softmax(logits, -1)
    del logits
    logp = every.gather(-1, labels[..., None])[..., 0]
    p = every.exp()
    return logp, -(p * every if p.requires_grad else p.mul_(every)).sum(-1)


def exact(tokens: int, vocab: int, dim: int) -> Scores:
    """Dense in fp64, by chunks, because its logits do not fit in memory."""
    config, params, x, labels = build(tokens, vocab, dim)
    params = {name: leaf.double() for name, leaf in params.items()}
    with torch.no_grad():
        rows = zip(x.double().split(256, 1), labels.split(256, 1), strict=True)
        parts = [dense(params, *some, config.rms_norm_eps) for some in rows]
    logp, entropy = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return logp, entropy


def contenders(tokens: int, vocab: int, dim: int, chunk: int | None, backward: bool) -> dict[str, Callable[[], Any]]:
    config, params, x, labels = build(tokens, vocab, dim)
    weights = torch.randn(2, 1, tokens, generator=torch.Generator().manual_seed(1))
    how = {} if chunk is None else {"chunk": chunk}

    def ours(params: dict[str, Tensor], x: Tensor) -> Scores:
        return head_logprobs(params, x, labels, config=config, **how)[:2]

    def theirs(params: dict[str, Tensor], x: Tensor) -> Scores:
        return dense(params, x, labels, config.rms_norm_eps)

    def forward(function: Callable[..., Scores]) -> Callable[[], Any]:
        def run() -> Scores:
            with torch.no_grad():
                return function(params, x)

        return run

    def both(function: Callable[..., Scores]) -> Callable[[], Any]:
        def run() -> tuple[Tensor, ...]:
            leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
            given = x.detach().requires_grad_()
            logp, entropy = function(leaves, given)
            return torch.autograd.grad((weights[0] * logp + weights[1] * entropy).sum(), [given, *leaves.values()])

        return run

    make = both if backward else forward
    return {"fnmodels": make(ours), "dense": make(theirs)}


def apart(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest entry of each result."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.detach() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs)


def part(title: str, runs: dict[str, Callable[[], Any]], truth: Scores | None, limit: float, rounds: int) -> None:
    """Without `truth`, results are compared with dense."""
    theirs = runs["dense"]()
    off = apart(runs["fnmodels"](), truth or theirs)
    known = f" (of dense in fp64; dense in fp32: {apart(theirs, truth):.1e})" if truth else ""
    if not off <= limit:
        raise SystemExit(f"fnmodels and dense differ by {off:.1e} of the largest entry, more than {limit:.0e}{known}.")
    print(f"\n{title}; largest difference {off:.1e}{known}")
    del theirs
    taken = take_turns(runs, rounds)
    for name, one in taken.items():
        print(f"  {name:10s}{one.wall:9.3f} s{one.cpu:9.3f} s of CPU{one.peak / 2**20:11,.0f} MiB")
    ours, peer = taken["fnmodels"], taken["dense"]
    print(
        f"  peak {ours.peak / max(peer.peak, 1):.3f} x (target {PEAK}), time {ours.wall / peer.wall:.2f} x, "
        f"CPU {ours.cpu / peer.cpu:.2f} x (target {TIME})",
        flush=True,
    )


def main() -> None:
    give_back_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--backward-tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--dim", type=int, default=512, help="width of the hidden states")
    parser.add_argument("--chunk", type=int, help="tokens at a time; default: that of token_logprobs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="small sizes and one round")
    given = parser.parse_args()
    if given.quick:
        given.tokens, given.backward_tokens, given.vocab, given.dim = 256, 128, 1024, 64
        given.rounds, given.chunk = 1, 48
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, {given.threads} threads, {given.vocab:,} words, width {given.dim}, fp32")
    for title, tokens, backward in (
        ("forward", given.tokens, False),
        ("forward + backward", given.backward_tokens, True),
    ):
        runs = contenders(tokens, given.vocab, given.dim, given.chunk, backward)
        truth = None if backward else exact(tokens, given.vocab, given.dim)
        part(f"{title}, {tokens:,} tokens", runs, truth, 1e-5 if backward else 1e-6, given.rounds)


if __name__ == "__main__":
    main()
