"""Times small Llamas beside thirty hand-written functional lines, transformers and JAX, and counts what they execute.

    python benchmarks/small.py                           every task at every size, eager contenders
    python benchmarks/small.py --sizes tiny --tasks step grad
    python benchmarks/small.py --compiled                compiled contenders too: tens of seconds for each first call
    python benchmarks/small.py --counts                  Python calls and aten operations instead of times
    python benchmarks/small.py --quick                   one round, to check that everything runs

All torch contenders are in one process and take turns; JAX is in a process of its own, where it is installed. A figure
is the median over rounds of the milliseconds of one call, by CPU time and by wall, and its ratio to the hand-written
model of benchmarks/small_reference.py. Before anything is timed, all results are compared with that model's.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import small_reference as reference
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fnmodels
import params as P
import train
from fnmodels import llama, tree

VOCAB, HEADS, KV_HEADS, LR = 256, 4, 2, 1e-3
TASKS = ("forward", "step", "grad", "per-sample", "decode")
PREFIX, ROOM = 8, 512  # tokens in the cache before the timed decoding steps, and at most
Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Size:
    """Layers, width, and the batch [rows, length]."""

    layers: int
    width: int
    rows: int
    length: int

    @property
    def head_dim(self) -> int:
        return self.width // HEADS


SIZES = {
    "grok": Size(1, 128, 512, 5),
    "tiny": Size(2, 64, 8, 32),
    "small": Size(4, 256, 16, 128),
    "mid": Size(12, 768, 1, 64),
    "deep": Size(12, 128, 8, 32),
}


class Setting:
    """One size: config, params, batch, and the same for the contenders."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.values = {
            "vocab_size": VOCAB,
            "hidden_size": size.width,
            "intermediate_size": 2 * size.width,
            "num_hidden_layers": size.layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": max(size.length, 512),
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
        self.config = llama.Config.from_hf({"model_type": "llama", "rope_theta": 1e4, **self.values})
        self.params = P.init(self.config, 0)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, VOCAB, (size.rows, size.length), generator=generator)
        self.labels = torch.cat((self.tokens[:, 1:], torch.full_like(self.tokens[:, :1], -100)), 1)
        positions = torch.arange(size.length).expand(size.rows, -1).contiguous()
        segments = torch.ones_like(positions)
        self.batch = {"tokens": self.tokens, "positions": positions, "segment_ids": segments, "labels": self.labels}
        self.table = reference.rotary_table(512, size.head_dim)

    @functools.cached_property
    def model(self) -> Any:
        """transformers' model with the same weights."""
        import transformers

        rope = {"rope_type": "default", "rope_theta": 1e4}
        config = transformers.LlamaConfig(**self.values, rope_parameters=rope, attn_implementation="sdpa")
        model = transformers.LlamaForCausalLM(config)
        named = llama.hf_names(self.config)
        flat = {named[path]: leaf.clone() for path, leaf in P.flatten(self.params).items()}
        model.load_state_dict(flat, strict=True)
        return model

    @property
    def hand(self) -> Callable[[Any, Tensor, Tensor], Tensor]:
        """The hand-written mean loss of (params, tokens, labels)."""
        table = tuple(t[: self.size.length] for t in self.table)
        return lambda params, tokens, labels: reference.loss(params, tokens, labels, table, self.size.head_dim)

    def our_loss(self, params: Any, batch: Any) -> Tensor:
        total, count = train.next_token_loss(params, batch, config=self.config)
        return total / count


def forwards(at: Setting, compiled: bool) -> Calls:
    prepared = fnmodels.prepare(at.config, at.tokens)
    table = tuple(t[: at.size.length] for t in at.table)
    calls: Calls = {
        "hand-written": lambda: reference.forward(at.params, at.tokens, table, at.size.head_dim),
        "transformers": lambda: at.model(input_ids=at.tokens, use_cache=False).logits,
        "fnmodels": lambda: fnmodels.forward(at.params, *prepared, config=at.config),
    }
    if compiled:
        graph = torch.compile(lambda p: reference.forward(p, at.tokens, table, at.size.head_dim), fullgraph=True)
        ours = torch.compile(lambda p: fnmodels.forward(p, *prepared, config=at.config), fullgraph=True)
        calls |= {"hand-written compiled": lambda: graph(at.params), "fnmodels compiled": lambda: ours(at.params)}
    return {name: torch.no_grad()(call) for name, call in calls.items()}


def steps(at: Setting, compiled: bool) -> Calls:
    """Training steps by AdamW; each returns the loss before its update."""
    calls: Calls = {"hand-written": _hand_step(at), "transformers": _transformers_step(at), "fnmodels": _our_step(at)}
    if compiled:
        calls["hand-written compiled"] = _hand_step(at, compiled=True)
        calls |= {f"fnmodels {how}": _our_step(at, compile=how) for how in ("block", "whole")}
    return calls


def _hand_step(at: Setting, *, compiled: bool = False) -> Callable[[], Tensor]:
    params = tree.map(lambda t: t.clone().requires_grad_(), at.params)
    leaves = tree.leaves(params)
    first, second = ([torch.zeros_like(t) for t in leaves] for _ in range(2))
    counts = [torch.zeros(()) for _ in leaves]
    loss = torch.compile(at.hand, fullgraph=True) if compiled else at.hand

    def step() -> Tensor:
        value = loss(params, at.tokens, at.labels)
        grads = torch.autograd.grad(value, leaves)
        with torch.no_grad():
            torch._foreach_add_(counts, 1)
            options = {"lr": LR, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
            torch._fused_adamw_(leaves, grads, first, second, [], counts, amsgrad=False, maximize=False, **options)
        return value.detach()

    return step


def _transformers_step(at: Setting) -> Callable[[], Tensor]:
    import copy

    model = copy.deepcopy(at.model)
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.999), weight_decay=0.0, fused=True)

    def step() -> Tensor:
        value = model(input_ids=at.tokens, labels=at.tokens, use_cache=False).loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def _our_step(at: Setting, **options: Any) -> Callable[[], Tensor]:
    optimizer = train.adamw(LR, betas=(0.9, 0.999), weight_decay=0.0)
    step = train.make_step(functools.partial(train.next_token_loss, config=at.config), optimizer, **options)
    held = [train.init_state(at.params, optimizer)]

    def run() -> Tensor:
        held[0], metrics = step(held[0], at.batch)
        return metrics["loss"]

    return run


def grads(at: Setting, compiled: bool) -> Calls:
    """torch.func.grad of the loss; each returns the gradient of the head."""
    hand, ours = torch.func.grad(at.hand), torch.func.grad(at.our_loss)
    return {
        "hand-written": lambda: hand(at.params, at.tokens, at.labels)["lm_head"],
        "fnmodels": lambda: ours(at.params, at.batch)["lm_head"],
    }


def per_sample(at: Setting, compiled: bool) -> Calls:
    """Gradients of each row's loss; each returns those of the head."""
    hand = torch.func.vmap(torch.func.grad(at.hand), (None, 0, 0))
    ours = torch.func.vmap(torch.func.grad(at.our_loss), (None, 0))
    tokens, labels, rows = at.tokens[:, None], at.labels[:, None], fnmodels.rows(at.batch)

    def sums(params: Any, batch: Any) -> Tensor:  # of the rows' means, each of as many labels
        return train.next_token_loss(params, batch, config=at.config, chunk=None)[0] / (at.size.length - 1)

    return {
        "hand-written": lambda: hand(at.params, tokens, labels)["lm_head"],
        "fnmodels vmap(grad)": lambda: ours(at.params, rows)["lm_head"],
        "fnmodels": lambda: fnmodels.per_sample_gradients(sums, at.params, at.batch)[0]["lm_head"],
    }


def decodes(at: Setting, compiled: bool) -> Calls:
    """Decoding steps of one row behind a prefix; each call is a step, and returns logits [1, V]."""
    calls: Calls = {"hand-written": _hand_decode(at), "transformers": _their_decode(at), "fnmodels": _our_decode(at)}
    calls["fnmodels eager_step"] = _our_decode(at, fnmodels.cache.eager_step(at.config))
    if compiled:
        calls["fnmodels compiled"] = _our_decode(at, fnmodels.compiled_step(at.config))
    return {name: torch.no_grad()(call) for name, call in calls.items()}


def _context(at: Setting) -> Tensor:
    return at.tokens.flatten()[:PREFIX][None]


def _hand_decode(at: Setting) -> Callable[[], Tensor]:
    shape = (1, ROOM, KV_HEADS, at.size.head_dim)
    caches, position = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(at.size.layers)], [0]

    def step(token: Tensor) -> Tensor:
        position[0] = position[0] + 1 if position[0] < ROOM else PREFIX + 1
        return reference.decode(at.params, token, at.table, caches, position[0] - 1)

    with torch.no_grad():
        for token in _context(at).split(1, 1):
            step(token)
    return lambda: step(_context(at)[:, :1])


def _their_decode(at: Setting) -> Callable[[], Tensor]:
    import transformers

    held, token = [transformers.DynamicCache(config=at.model.config)], _context(at)[:, :1]

    def call(tokens: Tensor) -> Tensor:
        return at.model(input_ids=tokens, past_key_values=held[0], use_cache=True).logits[:, -1]

    def step() -> Tensor:
        if held[0].get_seq_length() in (0, ROOM):
            held[0] = transformers.DynamicCache(config=at.model.config)
            call(_context(at))
        return call(token)

    return step


def _our_decode(at: Setting, graph: Any = None) -> Callable[[], Tensor]:
    token, steps, held = _context(at)[:, :1], [0], [fnmodels.init_cache(at.config, 1, ROOM)]

    def step() -> Tensor:
        steps[0] += 1
        if steps[0] % (ROOM - PREFIX) == 1:  # full, or empty
            cache = fnmodels.init_cache(at.config, 1, ROOM)
            prepared = fnmodels.prepare_step(at.config, _context(at), cache)
            held[0] = fnmodels.decode_(at.params, *prepared, cache, config=at.config)[1]
        if graph is not None:
            logits, held[0] = graph(at.params, token, held[0])
            return logits[:, 0]
        prepared = fnmodels.prepare_step(at.config, token, held[0])
        logits, held[0] = fnmodels.decode_(at.params, *prepared, held[0], config=at.config, at="last")
        return logits

    return step


MAKERS: dict[str, Callable[[Setting, bool], Calls]] = dict(
    zip(TASKS, (forwards, steps, grads, per_sample, decodes), strict=True)
)


def check(task: str, calls: Calls) -> None:
    """Compares each contender's first results with the hand-written ones, and so warms all of them up."""
    for _ in range(3):
        want = calls["hand-written"]()
        for name, call in calls.items():
            have = call() if name != "hand-written" else want
            torch.testing.assert_close(have, want, rtol=2e-4, atol=2e-4, msg=lambda m, n=name: f"{task}, {n}: {m}")


def times(calls: Calls, rounds: int, target: float = 0.05) -> dict[str, tuple[float, float]]:
    """{contender: (CPU ms, wall ms) of a call}, medians over rounds in which all take turns."""
    repeats = {}
    for name, call in calls.items():
        begin = time.process_time()
        call()
        repeats[name] = max(1, min(50, int(target / max(1e-6, time.process_time() - begin))))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(rounds):
        names = list(calls)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(repeats[name]):
                calls[name]()
            spent = time.process_time() - cpu, time.perf_counter() - wall
            found[name].append((spent[0] * 1e3 / repeats[name], spent[1] * 1e3 / repeats[name]))
    return {name: tuple(statistics.median(one) for one in zip(*turns, strict=True)) for name, turns in found.items()}


class _Operations(TorchDispatchMode):
    """Counts aten operations, those of backward passes included."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


def counts(call: Callable[[], Any]) -> tuple[int, int, int]:
    """(calls of Python functions, calls of C functions, aten operations) of one call; the first is warmed up."""
    call()
    python, c = [0], [0]

    def profile(frame: Any, event: str, arg: Any) -> None:
        python[0] += event == "call"
        c[0] += event == "c_call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    with _Operations() as operations:
        call()
    return python[0], c[0], operations.total


def report(task: str, name: str, calls: Calls, rounds: int) -> None:
    print(f"\n{task}, {name}\n\n| | CPU ms | x | wall ms | x |\n|---|---|---|---|---|")
    found = times(calls, rounds)
    base = found["hand-written"]
    for contender, (cpu, wall) in found.items():
        print(f"| {contender} | {cpu:.3f} | {cpu / base[0]:.2f} | {wall:.3f} | {wall / base[1]:.2f} |", flush=True)


def report_counts(task: str, name: str, calls: Calls) -> None:
    print(f"\n{task}, {name}: calls and operations\n\n| | Python | C | aten |\n|---|---|---|---|")
    for contender, call in calls.items():
        python, c, operations = counts(call)
        print(f"| {contender} | {python} | {c} | {operations} |", flush=True)


def report_jax(name: str, size: Size, threads: int, rounds: int) -> None:
    """The jitted step of benchmarks/jax_llama.py, and a scan of 100 of them, in a process of its own."""
    import json
    import os
    import subprocess
    from pathlib import Path

    flags = f"--xla_cpu_multi_thread_eigen={'false' if threads == 1 else 'true'} intra_op_parallelism_threads={threads}"
    shape = [size.layers, size.width, size.rows, size.length, rounds]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "small_jax.py"), json.dumps(shape)],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    print(f"\nstep, {name}, JAX\n\n{done.stdout.strip() or 'left out: ' + done.stderr.strip().splitlines()[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["grok", "tiny", "small", "mid"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--jax", action="store_true")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.quick:
        asked.sizes, asked.rounds = ["tiny"], 1
    train.keep_freed_memory()
    torch.set_num_threads(asked.threads)
    print(f"torch {torch.__version__}, {asked.threads} threads, {torch.backends.cpu.get_cpu_capability()}")
    for name in asked.sizes:
        at = Setting(SIZES[name])
        for task in asked.tasks:
            calls = MAKERS[task](at, asked.compiled)
            check(task, calls)
            if asked.counts:
                report_counts(task, name, calls)
            else:
                report(task, name, calls, asked.rounds)
        if asked.jax:
            report_jax(name, at.size, asked.threads, asked.rounds)


if __name__ == "__main__":
    main()
