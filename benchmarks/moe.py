"""Times mixtures of experts against transformers, with its eager and its grouped experts, in one process.

    python benchmarks/moe.py                     both parts, fp32 and bf16; written to results/moe.md
    python benchmarks/moe.py --quick             one short round of small sizes, to check that everything runs
    python benchmarks/moe.py --part block --dtype float32 --threads 1

The block is one layer of experts (2,048 tokens, 16 experts, 2 each, width 512, inner width 1,024), forward and backward
to its input and all its weights. The step is a training step (forward, backward, AdamW) of a small Qwen 3 MoE.
Contenders take turns, A B C, A B C, ..., so that a slow minute of the machine hits all of them; the report has medians
and ratios of medians. Before anything is timed, all must agree on outputs and gradients, or on the first loss.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import train
from fnmodels import qwen_moe, tree
from fnmodels.models.decoder.qwen_moe import ROUTER
from fnmodels.ops.mlp import glu
from fnmodels.ops.moe.layer import moe
from fnmodels.ops.moe.router import softmax_top_k

BLOCK = {"tokens": 2048, "num_experts": 16, "num_experts_per_tok": 2, "hidden_size": 512, "moe_intermediate_size": 1024}
# Qwen3-30B-A3B at an eighth of its width and a twelfth of its depth: 8 of 128 experts, each 3/8 of the width of the
# model; the head has the same share, a tenth, of the weights that a token passes through.
MODEL = {
    "vocab_size": 1280,
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}
BATCH = (4, 512)
REFERENCES = {"transformers eager": "eager", "transformers grouped": "grouped_mm"}
OURS = {"fnmodels": "auto", "fnmodels loop": "loop"}
# The largest difference between two contenders, relative to the size of the values compared: bf16 has 8 bits.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
Contenders = dict[str, Callable[[], Any]]


def block(dtype: torch.dtype, sizes: dict[str, int], device: str = "cpu") -> Contenders:
    """One layer of experts: functions that return (output, gradients in the order of `leaves`)."""
    tokens, dim, experts, inner = (
        sizes[name] for name in ("tokens", "hidden_size", "num_experts", "moe_intermediate_size")
    )
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device, dtype)

    leaves = {"router": 4 * draw(experts, dim), "gate_proj": draw(experts, inner, dim)}
    leaves |= {"up_proj": draw(experts, inner, dim), "down_proj": draw(experts, dim, inner)}
    x, grad_output = draw(1, tokens, dim) * dim**0.5, draw(1, tokens, dim)
    valid = torch.ones(1, tokens, dtype=torch.bool, device=device)
    route = functools.partial(softmax_top_k, k=sizes["num_experts_per_tok"], renormalize=True)
    act = functools.partial(glu, activation="silu")

    def ours(path: str) -> tuple[Tensor, ...]:
        given = {name: leaf.detach().requires_grad_() for name, leaf in {"x": x, **leaves}.items()}
        layer = {"router": given["router"], "experts": {n: given[n] for n in ("gate_proj", "up_proj", "down_proj")}}
        y, _ = moe(layer, given["x"], route, valid=valid, act=act, experts=path, dtypes=ROUTER)
        return y.detach(), *torch.autograd.grad(y, list(given.values()), grad_output)

    def module(path: str) -> Callable[[], tuple[Tensor, ...]]:
        names = {k: v for k, v in sizes.items() if k != "tokens"}
        config = Qwen3MoeConfig(**names, norm_topk_prob=True)
        config._experts_implementation = path
        layer = Qwen3MoeSparseMoeBlock(config).to(device, dtype)
        with torch.no_grad():
            layer.gate.weight.copy_(leaves["router"])
            layer.experts.gate_up_proj.copy_(torch.cat((leaves["gate_proj"], leaves["up_proj"]), dim=1))
            layer.experts.down_proj.copy_(leaves["down_proj"])

        def run() -> tuple[Tensor, ...]:
            given = x.detach().requires_grad_()
            y = layer(given)
            wanted = [given, layer.gate.weight, layer.experts.gate_up_proj, layer.experts.down_proj]
            to_x, router, both, down = torch.autograd.grad(y, wanted, grad_output)
            return y.detach(), to_x, router, *both.chunk(2, dim=1), down

        return run

    contenders: Contenders = {name: functools.partial(ours, path) for name, path in OURS.items()}
    return contenders | {name: module(path) for name, path in REFERENCES.items()}


def step(dtype: torch.dtype, sizes: dict[str, Any], batch: tuple[int, int]) -> Contenders:
    """A training step of the model: functions that return (the loss before the update,)."""
    config = qwen_moe.Config.from_hf({"model_type": "qwen3_moe", **sizes})
    spec = qwen_moe.spec(config)
    tokens = torch.randint(config.vocab_size, batch, generator=torch.Generator().manual_seed(0))
    labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], -100)), dim=1)
    positions = torch.arange(batch[1]).expand(batch)
    given = {"tokens": tokens, "positions": positions, "segment_ids": torch.ones_like(tokens), "labels": labels}

    def model(path: str) -> torch.nn.Module:
        torch.manual_seed(0)
        hf = Qwen3MoeConfig(**sizes, use_cache=False, attn_implementation="sdpa", experts_implementation=path)
        hf._experts_implementation = path
        return Qwen3MoeForCausalLM(hf).to(dtype).train()

    state = {name: tensor.detach() for name, tensor in model("eager").state_dict().items()}
    start = _tree(config, state)

    def ours(path: str) -> Callable[[], tuple[Tensor, ...]]:
        optimizer = train.adamw(1e-4, weight_decay=0.1, spec=spec)
        how: dict[str, Any] = {} if path == "auto" else {"experts": path}
        run = train.make_step(functools.partial(train.next_token_loss, config=config, **how), optimizer)
        held = [train.init_state(start, optimizer)]

        def one() -> tuple[Tensor, ...]:
            held[0], metrics = run(held[0], given)
            return (metrics["loss"],)

        return one

    def theirs(path: str) -> Callable[[], tuple[Tensor, ...]]:
        net = model(path)
        decays = [p for p in net.parameters() if p.ndim > 1]
        rest = [p for p in net.parameters() if p.ndim == 1]
        groups = [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

        def one() -> tuple[Tensor, ...]:
            logits = net(input_ids=tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return (loss.detach(),)

        return one

    contenders = {name: ours(path) for name, path in OURS.items()}
    return contenders | {name: theirs(path) for name, path in REFERENCES.items()}


def _tree(config: Any, state: dict[str, Tensor]) -> Any:
    """Our parameters from the reference's in memory, which fuses gate and up of all experts into one tensor."""
    flat: dict[str, Tensor] = {}
    for path, stored in qwen_moe.hf_names(config).items():
        if isinstance(stored, str):
            flat[path] = state[stored]
            continue
        layer, _, name = path.rpartition(".experts.")
        fused = state[f"model.{layer}.experts.{'down_proj' if name == 'down_proj' else 'gate_up_proj'}"]
        flat[path] = fused if name == "down_proj" else fused.chunk(2, dim=1)[name == "up_proj"]
    return tree.unflatten(flat)


def check(contenders: Contenders, dtype: str) -> None:
    """AssertionError if two contenders differ by more than rounding."""
    results = {name: run() for name, run in contenders.items()}
    wanted = results["transformers grouped"]
    for name, got in results.items():
        for index, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
            apart = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
            assert apart < TOLERANCE[dtype], f"{name}: result {index} is {apart:.1e} from transformers grouped"


def take_turns(contenders: Contenders, rounds: int) -> dict[str, float]:
    """The median seconds of each, called in turn; `check` has warmed them up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def report(title: str, contenders: Contenders, dtype: str, rounds: int) -> None:
    """Prints a Markdown table of medians and their ratios."""
    check(contenders, dtype)
    medians = take_turns(contenders, rounds)
    lines = [f"{title}, {dtype}: target 1.00 x grouped and 2.00 x eager", ""]
    lines += ["| | median | " + " | ".join(f"x {other}" for other in REFERENCES) + " |", "|---|---:|---:|---:|"]
    for name, seconds in medians.items():
        ratios = (f"{medians[other] / seconds:.2f}" for other in REFERENCES)
        lines.append(f"| {name} | {seconds * 1e3:.1f} ms | " + " | ".join(ratios) + " |")
    print("\n" + "\n".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("block", "step"), nargs="+", default=["block", "step"])
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), nargs="+", default=list(TOLERANCE))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {given.threads} threads")
    rounds, sizes, model, batch = given.rounds, BLOCK, MODEL, BATCH
    if given.quick:
        small = {"hidden_size": 64, "num_experts": 8, "moe_intermediate_size": 64}
        rounds, sizes, batch = 1, BLOCK | small | {"tokens": 64}, (1, 32)
        model = MODEL | small | {"num_hidden_layers": 1, "vocab_size": 256, "num_experts_per_tok": 2}
    for dtype in given.dtype:
        if "block" in given.part:
            report("One block, forward and backward", block(getattr(torch, dtype), sizes), dtype, rounds)
        if "step" in given.part:
            contenders = step(getattr(torch, dtype), model, batch)
            report("Training step of a small qwen3_moe", contenders, dtype, rounds)


if __name__ == "__main__":
    main()
