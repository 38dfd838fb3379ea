"""Times functions of fnmodels.research beside hooks on transformers, TransformerLens and nnsight: the same Llama, fp32.

    python benchmarks/research.py                     26M parameters, 9 rounds
    python benchmarks/research.py --quick             a tiny model, one round, to check that everything runs
    python benchmarks/research.py --only hvp lens     these sections

    cache      a forward pass that returns the residual stream, the attention and the MLP of every layer
    all        ... and the attention pattern, the output of each head, and the neurons before and after the activation
    grid       activation patching of 8 layers x 64 positions (target 3); "rows": all positions of a layer as one batch
    hvp        one Hessian-vector product; transformers: double backward (target 1.1)
    kept       one more, on a kept graph
    lens       the Jacobian of the last state by every layer's, in 32 directions; transformers: a backward pass for each
               (target 1.2)
    harvest    activations of documents of 4 to 256 tokens: packed, against padded batches (target 4)
    rows       per-sample gradients; vmap of grad on transformers, and Opacus (target 1.15)
    none, none_gradient, none_decode
               a forward pass, a loss with its gradients and a step on a cache where no taps and edits are given,
               against the same code without them (1: they cost nothing)

Results must agree. Contenders take turns, and a ratio is the median of the rounds' ratios of processor time: the other
library's divided by ours. TransformerLens and nnsight are contenders of the first three, and Opacus of rows, where they
are installed:

    python -m pip install -c constraints.txt transformer-lens nnsight opacus
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.metadata
import importlib.util
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import research_without
import torch
from research_activations import FEW, MANY, cache, grid, missing
from research_setting import FULL, QUICK, Contenders, Setting, opacus_module, summed
from torch import Tensor

import fnmodels
import params as P
from fnmodels import research, tree


def hvp(at: Setting) -> Contenders:
    direction = tree.map(torch.randn_like, at.params)
    vectors = at.ordered(direction)
    batch = (at.prepared, at.labels)

    def theirs() -> list[Tensor]:
        leaves = list(at.leaves.values())
        gradients = torch.autograd.grad(summed(at.run(at.tokens), at.labels), leaves, create_graph=True)
        return list(torch.autograd.grad(gradients, leaves, vectors))

    return {"fnmodels": lambda: at.ordered(research.hvp(at.loss, at.params, batch)(direction)), "transformers": theirs}


def kept(at: Setting) -> Contenders:
    direction = tree.map(torch.randn_like, at.params)
    vectors, leaves = at.ordered(direction), list(at.leaves.values())
    operator = research.hvp(at.loss, at.params, (at.prepared, at.labels))
    gradients = torch.autograd.grad(summed(at.run(at.tokens), at.labels), leaves, create_graph=True)
    return {
        "fnmodels": lambda: at.ordered(operator(direction)),
        "transformers": lambda: list(torch.autograd.grad(gradients, leaves, vectors, retain_graph=True)),
    }


def lens(at: Setting) -> Contenders:
    directions = torch.randn(32, at.config.hidden_size, generator=at.generator)

    def theirs() -> list[Tensor]:
        states: list[Tensor] = []

        def begin(module: Any, inputs: Any, output: Tensor) -> Tensor:
            states.append(output.detach().requires_grad_())
            return states[0]

        handles = [at.model.model.embed_tokens.register_forward_hook(begin)]
        for layer in at.model.model.layers:
            handles.append(layer.register_forward_hook(lambda module, inputs, output: states.append(output)))
        at.run(at.tokens)
        for handle in handles:
            handle.remove()
        rows = []
        for direction in directions:
            cotangent = direction.expand_as(states[-1])
            found = torch.autograd.grad(states[-1], states, cotangent, retain_graph=True)
            rows.append(torch.stack([gradient.sum((0, 1)) for gradient in found]))
        return [torch.stack(rows, 1) / at.tokens.numel()]

    def ours() -> list[Tensor]:
        return [research.jacobian_lens(at.params, at.prepared, config=at.config, directions=directions)]

    for leaf in at.leaves.values():  # neither needs gradients of parameters
        leaf.requires_grad_(False)
    return {"fnmodels": ours, "transformers": theirs}


def harvest(at: Setting, longest: int) -> Contenders:
    """Lengths as of web pages: most are short, a few are long."""
    lengths = [max(4, int(longest * 2.0 ** (-6 * i / 31))) for i in range(32)]
    order = torch.randperm(32, generator=at.generator).tolist()
    documents = [at.draw(lengths[i]) for i in order]
    total, name = sum(lengths), f"layers.{at.config.num_hidden_layers // 2}.output"
    packed = fnmodels.pack(documents, longest, method="first_fit")

    def ours() -> list[Tensor]:
        inputs = fnmodels.prepare(at.config, packed.tokens, positions=packed.positions, segment_ids=packed.segment_ids)
        layout = fnmodels.layout(inputs[1])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "activations")
            found = research.harvest(at.params, [inputs], path, name, config=at.config, rows=total, layout=layout)
            return [found.sum(0)]

    @torch.no_grad()
    def theirs(stops: bool = False, by_length: bool = False) -> list[Tensor]:
        found: list[Tensor] = []

        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            found.append(output)
            if stops:
                raise _Stop

        handle = at.model.model.layers[at.config.num_hidden_layers // 2].register_forward_hook(hook)
        rows, given = [], sorted(documents, key=len) if by_length else documents
        for start in range(0, len(given), 8):
            part = given[start : start + 8]
            tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            valid = torch.arange(tokens.shape[1]) < torch.tensor([len(one) for one in part])[:, None]
            with contextlib.suppress(_Stop):
                at.run(tokens, attention_mask=valid.long())
            rows.append(found.pop()[valid])
        handle.remove()
        with tempfile.TemporaryDirectory() as folder:
            size = (total, at.config.hidden_size)
            out = torch.from_file(str(Path(folder, "activations")), shared=True, size=size[0] * size[1]).view(size)
            out.copy_(torch.cat(rows))
            return [out.sum(0)]

    return {
        "fnmodels": ours,
        "transformers, padded batches": theirs,
        "..., which stop at the layer": functools.partial(theirs, stops=True),
        "..., and are sorted by length": functools.partial(theirs, stops=True, by_length=True),
    }


class _Stop(Exception):
    """Ends a forward pass of transformers at a hook."""


def rows(at: Setting) -> Contenders:
    batch = (at.prepared, at.labels)
    detached = {name: leaf.detach() for name, leaf in at.leaves.items()}

    def loss(named: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        call = torch.func.functional_call(at.model, named, (), {"input_ids": tokens[None], "use_cache": False})
        return summed(call.logits, labels)

    def theirs() -> list[Tensor]:
        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(detached, at.tokens, at.labels)
        return [gradients[name] for name in at.leaves]

    ours = fnmodels.per_sample_gradients
    contenders = {"fnmodels": lambda: at.ordered(ours(at.loss, at.params, batch)[0]), "vmap of grad": theirs}
    return contenders | ({"Opacus": _opacus(at)} if importlib.util.find_spec("opacus") else {})


def _opacus(at: Setting) -> Callable[[], list[Tensor]]:
    model = opacus_module(copy.deepcopy(at.model).train())

    def run() -> list[Tensor]:
        summed(model(input_ids=at.tokens, use_cache=False).logits, at.labels).backward()
        found = [parameter.grad_sample for parameter in model.parameters()]
        model.zero_grad()
        return found

    return run


def check(name: str, other: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    for got, want in zip(found, wanted, strict=True):
        error = float((got.flatten() - want.flatten()).abs().max() / want.abs().max())
        if not error < 1e-3:
            raise SystemExit(f"{name}: the results of {other} differ by {error:.2g} of the largest entry.")


def timed(name: str, contenders: Contenders, rounds: int, *, warm: bool) -> dict[str, tuple[float, float]]:
    """{contender: (median seconds, median of the rounds' ratios to ours)}; results of the first round are compared.

    warm: one more round, the first, does not count.
    """
    seconds: dict[str, list[float]] = {other: [] for other in contenders}
    for index in range(rounds + warm):
        results = {}
        for other, run in contenders.items():
            begin = time.process_time()
            results[other] = run()
            seconds[other].append(time.process_time() - begin)
            if index == 0:
                check(name, other, results[other], results["fnmodels"])
    counted = {other: found[warm:] for other, found in seconds.items()}
    ours = counted["fnmodels"]
    ratios = {other: [b / a for a, b in zip(ours, found, strict=True)] for other, found in counted.items()}
    return {other: (statistics.median(found), statistics.median(ratios[other])) for other, found in counted.items()}


SECTIONS: dict[str, tuple[float | None, int, int, Callable[[Setting], Contenders]]] = {
    # target, rows and tokens of the batch, contenders
    "cache": (None, 2, 128, functools.partial(cache, taps=FEW)),
    "all": (None, 2, 128, functools.partial(cache, taps=MANY)),
    "grid": (3.0, 1, 64, grid),
    "hvp": (1.1, 2, 64, hvp),
    "kept": (None, 2, 64, kept),
    "lens": (1.2, 1, 64, lens),
    "harvest": (4.0, 1, 256, lambda at: harvest(at, at.tokens.shape[1])),
    "rows": (1.15, 4, 64, rows),
    "none": (None, 2, 64, research_without.forward),
    "none_gradient": (None, 2, 64, research_without.gradient),
    "none_decode": (None, 1, 65, research_without.decode),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="fnmodels.research beside hooks, TransformerLens and nnsight.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message="There is a performance drop")
    base, rounds = (QUICK, 1) if options.quick else (FULL, options.rounds)
    print(f"{P.count(base) / 1e6:.1f}M parameters, {options.threads} threads, {rounds} rounds, processor time")
    present = [name for name in ("transformers", "transformer-lens", "nnsight") if name not in missing()]
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in present))
    print("".join(f"{name} is not installed.\n" for name in missing()), end="")
    print("| section | contender | seconds | ratio | target |\n|---|---|---|---|---|")
    for name in options.only:
        target, count, length, contenders_of = SECTIONS[name]
        config = base
        if name == "grid" and not options.quick:
            config = replace(base, num_hidden_layers=8, layer_kinds=())
        contenders = contenders_of(Setting(config, count, length // 8 if options.quick else length))
        long = name == "grid"  # two minutes a round
        for other, (seconds, ratio) in timed(name, contenders, 1 if long else rounds, warm=not long).items():
            ours = other == "fnmodels"
            more = "" if ours or not target else target
            print(f"| {name} | {other} | {seconds:.4f} | {'' if ours else f'{ratio:.2f}'} | {more} |", flush=True)


if __name__ == "__main__":
    main()
