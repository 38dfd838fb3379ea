"""Times a training step on packed rows with one loss in several forms, in one process and over a mesh.

    python benchmarks/dev/loss_forms.py                     the 26M Llama of train_step.py, one process and fsdp=2
    python benchmarks/dev/loss_forms.py --forms partial lambda --worlds 2
    python benchmarks/dev/loss_forms.py --quick             a tiny model, one round, to check that everything runs

A row has 2,048 tokens in five documents; a mesh of n processes takes n such rows. All contenders start from the same
weights, take turns within a round and in starting it, and must agree on the losses of the first two steps. The report
has medians over timed steps: wall time of the slowest process, CPU time of all of them, and their ratios to the first.

    partial        functools.partial(train.next_token_loss, config=config)
    lambda         the same call in a lambda
    closure        the same call in a nested function
    own            a loss of the user's own, from fnmodels.prepare, fnmodels.hidden and train.losses.head_loss
    transformers   its Llama on the same row, which it splits by position_ids (in one process only)
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from typing import Any

import above  # noqa: F401
import torch
import torch.distributed as dist
import torch.nn.functional as F
from contenders import BETAS, DECAY, EPS, LR, our_llama, torch_step, transformers_llama
from packed_rows import packed_rows
from parallel import TINY, Step, in_turns, stepping
from ranks import together
from record import cpu_flags
from train_step import CONFIG, draw

import fnmodels
import params as P
import train
from fnmodels import llama, tree
from train.parallel import Mesh
from train.parallel.placement import rules_of

LENGTHS = (700, 500, 400, 300, 148)
FORMS = ("partial", "lambda", "closure", "own")
TOLERANCE = 1e-5  # relative, between losses in fp32


def losses(config: llama.Config) -> dict[str, Any]:
    """{form: a loss of (params, batch)}."""

    def closure(params: Any, batch: Any) -> Any:
        return train.next_token_loss(params, batch, config=config)

    def own(params: Any, batch: Any) -> Any:
        inputs, masks, freqs_cis = fnmodels.prepare(
            config, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"]
        )
        x = fnmodels.hidden(params, inputs, masks, freqs_cis, config=config)
        return train.losses.head_loss(params, x, batch["labels"], config=config)

    return {
        "partial": functools.partial(train.next_token_loss, config=config),
        "lambda": lambda params, batch: train.next_token_loss(params, batch, config=config),
        "closure": closure,
        "own": own,
    }


def steps(config: dict[str, Any], lengths: tuple[int, ...], forms: list[str]) -> dict[str, Step]:
    """{contender: one step of this process, and its loss}."""
    world = dist.get_world_size()
    flat = {name: leaf for name, leaf in draw(config, 0).items() if "." in name}
    ours, weights = our_llama(config, flat)
    batch = packed_rows(lengths, world, ours.vocab_size)
    optimizer = train.adamw(LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    mesh = Mesh(fsdp=world) if world > 1 else None

    def params() -> Any:
        """A new copy: a step overwrites its State."""
        if mesh is None:
            return tree.map(torch.clone, weights)
        plan = P.plan(llama.spec(ours), rules_of(mesh, ours), mesh.device_mesh("cpu"))
        return tree.map(lambda how, leaf: how.distribute(leaf[how.local_box()].clone()), plan, weights)

    def step(loss_fn: Any) -> Step:
        return stepping(train.make_step(loss_fn, optimizer, mesh=mesh), train.init_state(params(), optimizer), batch)

    written = losses(ours)
    found = {form: step(written[form]) for form in forms}
    return found if mesh else found | {"transformers": hugging_face(config, flat, batch)}


def hugging_face(config: dict[str, Any], flat: dict[str, Any], batch: dict[str, torch.Tensor]) -> Step:
    """A step of transformers' Llama, whose masks come from positions that start again at each document."""
    model = transformers_llama(config, flat).train()
    forward = functools.partial(model, input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False)
    labels = batch["labels"].flatten()
    return torch_step(model, lambda: F.cross_entropy(forward().logits.flatten(0, 1), labels, ignore_index=-100))


def take_turns(
    config: dict[str, Any], lengths: tuple[int, ...], forms: list[str], rounds: int, number: int
) -> dict[str, Any]:
    return in_turns(steps(config, lengths, forms), rounds, number)


def check(found: dict[str, Any]) -> None:
    """SystemExit if the losses of the first two steps differ; they cover the batch in every process."""
    first, *others = found
    for name in others:
        pairs = zip(found[name]["losses"], found[first]["losses"], strict=True)
        off = max(abs(one / base - 1) for one, base in pairs)
        if not off < TOLERANCE:
            raise SystemExit(f"{name} and {first} differ in their losses by {off:.1e}.")


def report(found: list[dict[str, Any]], tokens: int) -> None:
    medians = {
        name: [
            statistics.median(map(join, zip(*(process[name][what] for process in found), strict=True)))
            for what, join in (("wall", max), ("cpu", sum))
        ]
        for name in found[0]
    }
    base = next(iter(medians))
    print(f"| | tokens/s | a step | of {base} | processor | of {base} |\n|---|" + "---:|" * 5)
    for name, both in medians.items():
        cells = [f"{own:.3f} s | {own / one:.3f}x" for own, one in zip(both, medians[base], strict=True)]
        print(f"| {name} | {tokens / both[0]:,.0f} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="ratios are to the first")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="timed steps in one turn")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    lengths = tuple(n // 16 for n in LENGTHS) if given.quick else LENGTHS
    config = {**CONFIG, **(TINY if given.quick else {}), "batch": 1, "sequence": sum(lengths)}
    rounds, number = (1, 1) if given.quick else (given.rounds, given.steps)
    print(f"{cpu_flags()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores")
    for world in given.worlds:
        tokens = world * sum(lengths)
        print(f"\n{world} processes of {given.threads} threads, {tokens} tokens in {len(lengths)} documents per row")
        found = together(world, take_turns, config, lengths, given.forms, rounds, number, threads=given.threads)
        check(found[0])
        report(found, tokens)


if __name__ == "__main__":
    main()
