"""Times per-sample gradients of one 26M-parameter Llama, batch 8, 128 tokens, fp32.

    python benchmarks/dev/per_sample.py                      five rounds of every contender
    python benchmarks/dev/per_sample.py --quick              a tiny model and one round, to check that everything runs
    python benchmarks/dev/per_sample.py --threads 1 --contenders "fnmodels fresh" "fnmodels batch"

A result is one gradient per row of the batch for every parameter, [8, *shape]: 832 MB. All contenders start from the
same weights and must first agree with each other. They then take turns in one process, A B C, A B C, ..., so that a
slow minute of the machine hits all of them, and keep the memory that they free; the report has medians of wall and of
CPU time (which a busy machine disturbs less). "batch" is one gradient of the full batch's loss, what a plain training
step takes. "fnmodels out=" overwrites its earlier result, as a training loop does; "fnmodels fresh" makes a new one
like all the others. Both are compared with the best of the others and with our own batch. Opacus is skipped with a
message if it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import above  # noqa: F401
import torch
import torch.nn.functional as F
import transformers
from research_setting import opacus_module
from torch import Tensor
from torch.func import functional_call, grad, vmap

import fnmodels
import params as P
import train
from fnmodels import llama, tree
from fnmodels.tree import Tree

CONFIG = llama.Config(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    rms_norm_eps=1e-5,
)
TINY = llama.Config(256, 64, 128, 2, 4, 2, rms_norm_eps=1e-5)
OURS, FRESH, OWN_BATCH, HF_BATCH = "fnmodels out=", "fnmodels fresh", "fnmodels batch", "transformers batch"
TOLERANCE = 1e-4  # of the largest entry of each parameter's gradient; fp32 sums in another order differ by about 1e-5

Flat = dict[str, Tensor]  # Hugging Face name -> [B, *shape]; of the batch contenders [*shape]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over a row's tokens, so that a batch's loss is the sum of its rows'."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def fnmodels_contenders(
    config: llama.Config, params: Tree, tokens: Tensor, labels: Tensor, kernel: str
) -> dict[str, Callable[[], Flat]]:
    names = llama.hf_names(config)
    # The mask and the tables are made once per batch, like the batch itself.
    batch = (fnmodels.prepare(config, tokens), labels)
    rows = fnmodels.rows(batch)
    whole = fnmodels.layout(batch[0][1])

    def loss(params: Tree, batch: Any, layout: fnmodels.inputs.Layout | None = None) -> Tensor:
        prepared, labels = batch
        logits = fnmodels.forward(params, *prepared, config=config, kernel=kernel, layout=layout)
        return cross_entropy(logits, labels)

    def leaves() -> tuple[dict[str, Tensor], Tree]:
        flat = {path: leaf.detach().requires_grad_() for path, leaf in tree.flatten(params).items()}
        return flat, tree.unflatten(flat)

    def name(paths: Any, values: Any) -> Flat:
        return {names[path]: value for path, value in zip(paths, values, strict=True)}

    def whole_loss(params: Tree, batch: Any) -> Tensor:
        return loss(params, batch, whole)

    # Made once, outside of the timed calls.
    memory = tree.map(lambda leaf: torch.empty(len(tokens), *leaf.shape), params)

    def per_sample() -> Flat:
        out = tree.flatten(fnmodels.per_sample_gradients(whole_loss, params, batch, out=memory)[0])
        return name(out, out.values())

    def fresh() -> Flat:
        out = tree.flatten(fnmodels.per_sample_gradients(whole_loss, params, batch)[0])
        return name(out, out.values())

    def mapped() -> Flat:
        out = tree.flatten(vmap(grad(loss), in_dims=(None, 0))(params, rows))
        return name(out, out.values())

    def loop() -> Flat:
        flat, again = leaves()
        each = [
            torch.autograd.grad(loss(again, tree.map(lambda t, i=i: t[i], rows)), list(flat.values()))
            for i in range(len(tokens))
        ]
        return name(flat, [torch.stack(parts) for parts in zip(*each, strict=True)])

    def plain() -> Flat:
        flat, again = leaves()
        return name(flat, torch.autograd.grad(loss(again, batch, whole), list(flat.values())))

    return {
        OURS: per_sample,
        FRESH: fresh,
        "fnmodels vmap(grad)": mapped,
        "fnmodels loop": loop,
        OWN_BATCH: plain,
    }


def hf_model(config: llama.Config, params: Tree) -> transformers.LlamaForCausalLM:
    settings = transformers.LlamaConfig(**{k: v for k, v in config.to_hf().items() if k != "architectures"})
    settings._attn_implementation = "sdpa"
    model = transformers.LlamaForCausalLM(settings)
    names = llama.hf_names(config)
    model.load_state_dict({names[path]: leaf for path, leaf in tree.flatten(params).items()}, strict=True)
    return model.train()


def transformers_contenders(
    config: llama.Config, params: Tree, tokens: Tensor, labels: Tensor
) -> dict[str, Callable[[], Flat]]:
    model = hf_model(config, params)
    named = dict(model.named_parameters())
    detached = {name: leaf.detach() for name, leaf in named.items()}

    def loss(named: Flat, tokens: Tensor, labels: Tensor) -> Tensor:
        call = functional_call(model, named, (), {"input_ids": tokens[None], "use_cache": False})
        return cross_entropy(call.logits, labels)

    def per_sample() -> Flat:
        return vmap(grad(loss), in_dims=(None, 0, 0))(detached, tokens, labels)

    def of(tokens: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        logits = model(input_ids=tokens, use_cache=False).logits
        return torch.autograd.grad(cross_entropy(logits, labels), list(named.values()))

    def loop() -> Flat:
        each = [of(tokens[i : i + 1], labels[i : i + 1]) for i in range(len(tokens))]
        return dict(zip(named, (torch.stack(parts) for parts in zip(*each, strict=True)), strict=True))

    def plain() -> Flat:
        return dict(zip(named, of(tokens, labels), strict=True))

    return {"transformers vmap(grad)": per_sample, "transformers loop": loop, HF_BATCH: plain}


def opacus_contenders(
    config: llama.Config, params: Tree, tokens: Tensor, labels: Tensor
) -> dict[str, Callable[[], Flat]]:
    model = opacus_module(hf_model(config, params))

    def per_sample() -> Flat:
        cross_entropy(model(input_ids=tokens, use_cache=False).logits, labels).backward()
        out = {}
        for name, leaf in model._module.named_parameters():
            out[name] = leaf.grad_sample
            leaf.grad = leaf.grad_sample = None
        return out

    return {"Opacus": per_sample}


def agree(contenders: dict[str, Callable[[], Flat]]) -> None:
    """Every contender's gradients against the first's; the batch ones against their sum over the rows."""
    first, *rest = sorted(contenders, key=lambda name: name in (OWN_BATCH, HF_BATCH))
    want = {leaf: value.clone() for leaf, value in contenders[first]().items()}
    for name in rest:
        got = contenders[name]()
        if got.keys() != want.keys():
            raise SystemExit(f"{name} differs from {first} in its parameters: {sorted(got.keys() ^ want.keys())}.")
        for leaf, value in got.items():
            reference = want[leaf].sum(0) if value.ndim < want[leaf].ndim else want[leaf]
            error = float((value - reference).abs().max() / reference.abs().max())
            if not error < TOLERANCE:
                raise SystemExit(f"{name} differs from {first} at {leaf} by {error:.2g} of its largest entry.")
    print(f"All agree with {first} within {TOLERANCE:g} of the largest entry of each gradient.")


def measure(contenders: dict[str, Callable[[], Flat]], rounds: int) -> dict[str, dict[str, list[float]]]:
    times: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
            result = run()
            del result  # freeing 832 MB is part of the cost
            after = resource.getrusage(resource.RUSAGE_SELF)
            times[name]["wall"].append(time.perf_counter() - begin)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            times[name]["cpu"].append(cpu)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Per-sample gradients of a 26M-parameter Llama.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--kernel", default="auto", help="of fnmodels")
    parser.add_argument("--contenders", nargs="+", help="only these")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="write all times to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train.keep_freed_memory()
    # torch says for each op that vmap runs it sample by sample; that is part of what is measured here
    warnings.filterwarnings("ignore", message="There is a performance drop")

    config = CONFIG
    if options.quick:
        config, options.rounds, options.batch, options.sequence = TINY, 1, 2, 16
    params = P.init(config, 0)
    tokens = torch.randint(
        config.vocab_size, (options.batch, options.sequence), generator=torch.Generator().manual_seed(0)
    )
    labels = torch.roll(tokens, -1, 1)
    labels[:, -1] = -100
    contenders = fnmodels_contenders(config, params, tokens, labels, options.kernel)
    contenders |= transformers_contenders(config, params, tokens, labels)
    versions = ["torch", "transformers"]
    if importlib.util.find_spec("opacus"):
        contenders |= opacus_contenders(config, params, tokens, labels)
        versions.append("opacus")
    else:
        print("Opacus is not installed: left out.")
    if options.contenders:
        contenders = {name: contenders[name] for name in options.contenders}
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in versions))
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {options.threads} threads; {P.count(config) / 1e6:.1f}M parameters")
    agree(contenders)
    measure(contenders, 1)  # warm up
    times = measure(contenders, options.rounds)
    report(times, options.batch)
    if options.json:
        options.json.write_text(json.dumps(times))


def report(times: dict[str, dict[str, list[float]]], batch: int) -> None:
    middle = {name: {kind: statistics.median(values) for kind, values in of.items()} for name, of in times.items()}
    print(f"\n{'':26s}samples/s  CPU s per sample")
    for name, of in middle.items():
        print(f"{name:26s}{batch / of['wall']:9.2f}{of['cpu'] / batch:18.3f}")
    print()
    others = [n for n in middle if n not in (OWN_BATCH, HF_BATCH) and (n == "fnmodels loop" or "fnmodels" not in n)]
    for kind in ("wall", "cpu"):
        best = min(others, key=lambda name: middle[name][kind], default=None)
        for ours in (OURS, FRESH):
            for other, target in ((best, 1.15), (OWN_BATCH, 0.85)):
                if ours in middle and other in middle:
                    ratio = middle[other][kind] / middle[ours][kind]
                    print(f"{kind:5s}{ours:18s}against {other:26s}{ratio:5.2f} x  (target {target})")


if __name__ == "__main__":
    main()
