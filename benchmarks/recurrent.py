"""Times one recurrent layer beside transformers' torch path: Gated DeltaNet, Kimi Delta Attention and SSD.

    python benchmarks/recurrent.py             S from 512 to 16,384
    python benchmarks/recurrent.py --quick     short rows and one round, to check that everything runs
    python benchmarks/recurrent.py --device cuda --layers gdn ssd

gdn   the layer of Qwen3.5-0.8B: width 1024, 16 heads of keys and values of 128, kernel 4
kda   the layer of Kimi Linear at the same sizes
ssd   the layer of Mamba2-130M: width 768, 24 heads of 64, state 128, one group, kernel 4

One row of one document, and with "packed" the same row as documents of 100 tokens, which transformers cannot compute.
"projections" are the layer's linear maps alone: no form of the recurrence makes the layer faster than these, and what
a contender takes more is what it needs for the recurrence. transformers' KDA holds 64 numbers per token, head and
channel, so rows above --longest are timed without transformers.
On CUDA "compiled" is our layer by torch.compile; where flash-linear-attention is installed, "fla" is transformers'
layer with its kernels, and "transformers" that with torch's operations.
Contenders take turns; the report has medians of tokens per second and of the peak of memory above the start. Before a
layer is timed, both must agree on its output and on the gradient of its input.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from turns import give_back_memory, take_turns, take_turns_on_cuda

import fnmodels
from fnmodels.models import kimi_linear, qwen3_next
from fnmodels.models.common import delta
from fnmodels.models.common.context import Context
from fnmodels.ops import project_out
from fnmodels.ops.linear import linear
from fnmodels.ops.recurrent.conv import short_conv
from fnmodels.ops.recurrent.gated_norm import silu_then_group_norm
from fnmodels.ops.recurrent.ssd import ssd
from fnmodels.options import ForwardOptions

Layer = Callable[[Tensor, Tensor], Tensor]  # (x, segment ids) -> y
# ours, transformers' with the same weights, our projections alone, transformers' with fla's kernels if there are any
Layers = tuple[Layer, Layer, Layer, Layer | None]


def projections(inward: list[Tensor], outward: Tensor) -> Layer:
    """Products with the weights `inward`; `outward` is that of the layer's output, here of the first product."""

    def layer(x: Tensor, _: Tensor) -> Tensor:
        products = [linear(x, weight) for weight in inward]
        return sum((y.sum() for y in products[1:]), linear(products[0][..., : outward.shape[1]], outward).sum())

    return layer


def gdn(dtype: torch.dtype) -> Layers:
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "num_attention_heads": 8}
    values = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 1, "num_key_value_heads": 2, **heads}
    theirs: Any = modeling_qwen3_5.Qwen3_5GatedDeltaNet(
        configuration_qwen3_5.Qwen3_5TextConfig(**values, vocab_size=64, layer_types=["linear_attention"]), 0
    ).to(dtype)
    config = qwen3_next.Config.from_hf(
        {**values, "model_type": "qwen3_5_text", "vocab_size": 64, "layer_types": ["linear_attention"]}
    )
    state = theirs.state_dict()
    q, k, v = state["in_proj_qkv.weight"].split((2048, 2048, 2048))
    taps = state["conv1d.weight"].split((2048, 2048, 2048))
    weights = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": state["out_proj.weight"], "norm": state["norm.weight"]}
    weights |= {f"{name}_conv": tap for name, tap in zip("qkv", taps, strict=True)}
    weights |= {f"{name}_proj": state[f"in_proj_{name}.weight"] for name in "zba"}
    weights |= {name: state[name] for name in ("A_log", "dt_bias")}
    weights = {name: leaf.detach().clone().requires_grad_() for name, leaf in weights.items()}

    def ours(x: Tensor, segment_ids: Tensor) -> Tensor:
        context = Context(ForwardOptions(), (), {})
        return delta.gated_delta_net(
            weights, x, fnmodels.Segments(segment_ids), config, context, eps=config.rms_norm_eps
        )

    inward = [weights[f"{name}_proj"] for name in "qkvzba"]
    return ours, *with_and_without_fla(theirs, modeling_qwen3_5, projections(inward, weights["o_proj"]))


def with_and_without_fla(theirs: Any, modeling: Any, alone: Layer) -> tuple[Layer, Layer, Layer | None]:
    """(transformers' layer by torch's operations, alone, the layer as it is where it found fla's kernels).

    transformers takes fla's function where it is installed, in a wrapper of its own.
    """
    found = modeling.torch_chunk_gated_delta_rule

    def by(rule: Callable[..., Any]) -> Layer:
        def layer(x: Tensor, _: Tensor) -> Tensor:
            modeling.torch_chunk_gated_delta_rule = rule
            y: Tensor = theirs(x)
            modeling.torch_chunk_gated_delta_rule = found
            return y

        return layer

    return by(inspect.unwrap(found)), alone, by(found) if importlib.util.find_spec("fla") else None


def kda(dtype: torch.dtype) -> Layers:
    from transformers.models.kimi_linear import configuration_kimi_linear, modeling_kimi_linear

    values = {"hidden_size": 1024, "num_hidden_layers": 1, "linear_num_heads": 16, "linear_head_dim": 128}
    values |= {"vocab_size": 64, "layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]}
    values |= {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 2048, "kv_lora_rank": 512}
    values |= {"num_experts": 8, "moe_intermediate_size": 64, "rms_norm_eps": 1e-5}
    given = configuration_kimi_linear.KimiLinearConfig(**values, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    theirs: Any = modeling_kimi_linear.KimiLinearDeltaAttention(given, 0)
    torch.nn.init.uniform_(theirs.forget_gate.A_log, 0.0, 2.7)
    torch.nn.init.constant_(theirs.forget_gate.dt_bias, -4.0)
    state = theirs.to(dtype).state_dict()
    config = kimi_linear.Config.from_hf(given.to_dict())
    weights = {name: state[f"{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "b_proj", "o_proj")}
    weights |= {f"g_{part}_proj": state[f"g_{part}_proj.weight"] for part in "ab"}
    weights |= {f"f_{part}_proj": state[f"forget_gate.f_{part}_proj.weight"] for part in "ab"}
    weights |= {f"{name}_conv": tap for name, tap in zip("qkv", state["conv1d.weight"].chunk(3), strict=True)}
    weights |= {"A_log": state["forget_gate.A_log"].flatten(), "dt_bias": state["forget_gate.dt_bias"]}
    weights["norm"] = state["o_norm.weight"]
    weights = {name: leaf.detach().clone().requires_grad_() for name, leaf in weights.items()}

    def ours(x: Tensor, segment_ids: Tensor) -> Tensor:
        context = Context(ForwardOptions(), (), {})
        mixed = kimi_linear.kimi_delta_attention(weights, x, fnmodels.Segments(segment_ids), config, context)
        return project_out(weights, mixed)

    inward = [weights[f"{name}_proj"] for name in ("q", "k", "v", "b", "f_a", "g_a")]
    return ours, lambda x, _: theirs(x), projections(inward, weights["o_proj"]), None


def mamba2(dtype: torch.dtype) -> Layers:
    from transformers.models.mamba2 import configuration_mamba2, modeling_mamba2

    values = {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1}
    theirs: Any = modeling_mamba2.Mamba2Mixer(
        configuration_mamba2.Mamba2Config(**values, num_hidden_layers=1, vocab_size=64), 0
    ).to(dtype)
    w = {name: leaf.detach().clone().requires_grad_() for name, leaf in theirs.state_dict().items()}

    def ours(x: Tensor, segment_ids: Tensor) -> Tensor:
        z, mixed, dt = linear(x, w["in_proj.weight"]).split((1536, 1536 + 256, 24), -1)
        mixed, _ = short_conv(mixed, w["conv1d.weight"][:, 0], w["conv1d.bias"], segment_ids, silu=True)
        inner, B, C = mixed.split((1536, 128, 128), -1)
        A, rate = -w["A_log"].float().exp(), F.softplus(dt + w["dt_bias"])
        y, _ = ssd(inner.unflatten(-1, (24, 64)), rate, A, B[:, :, None], C[:, :, None], w["D"], segment_ids)
        normed = silu_then_group_norm(y.flatten(2), z, w["norm.weight"], eps=1e-5, overwrite=True)
        return linear(normed.to(x.dtype), w["out_proj.weight"])

    return ours, lambda x, _: theirs(x), projections([w["in_proj.weight"]], w["out_proj.weight"]), None


LAYERS = {"gdn": (gdn, 1024), "kda": (kda, 1024), "ssd": (mamba2, 768)}  # {name: (maker, width)}


def check(ours: Layer, theirs: Layer, width: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(1, 300, width).to(device, dtype).requires_grad_()
    one = torch.ones(1, 300, dtype=torch.long, device=device)
    y, wanted = ours(x, one), theirs(x, one)
    grads = []
    for out in (y, wanted):  # with the gradients of all weights, which then are there when peaks are measured
        x.grad = None
        out.float().square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad.float())
    bound = 1e-4 if dtype == torch.float32 else 5e-2
    for got, want in ((y, wanted), grads):
        off = float(((got - want).float().norm() / want.float().norm()).detach())
        assert off < bound, f"Ours differs from transformers' by {off:.1e}, relative to its norm."


def measure(name: str, length: int, dtype: torch.dtype, width: int, layers: Layers, args: argparse.Namespace) -> None:
    ours, theirs, alone, fla = layers
    rounds, device, cuda = 1 if args.quick else args.rounds, args.device, args.device == "cuda"
    x = torch.randn(1, length, width).to(device, dtype).requires_grad_()
    one = torch.ones(1, length, dtype=torch.long, device=device)
    many = torch.arange(length, device=device)[None] // 100 + 1
    contenders = {"fnmodels": (ours, one), "fnmodels, packed": (ours, many), "projections": (alone, one)}
    if cuda:
        torch.compiler.reset()
        compiled = torch.compile(ours)
        contenders |= {"fnmodels, compiled": (compiled, one), "fnmodels, compiled, packed": (compiled, many)}
    if length <= args.longest:
        contenders["transformers"] = (theirs, one)
    if fla is not None:
        contenders["fla"] = (fla, one)

    def forward(layer: Layer, ids: Tensor) -> None:
        with torch.no_grad():
            layer(x, ids)

    def both(layer: Layer, ids: Tensor) -> None:
        layer(x, ids).sum().backward()

    for how, run in (("forward", forward), ("forward + backward", both)):
        runs = {who: lambda run=run, given=given: run(*given) for who, given in contenders.items()}
        taken = (take_turns_on_cuda if cuda else take_turns)(runs, rounds)
        base = taken.get("transformers")
        for who, it in taken.items():
            speed, cpu, peak = (
                ("-", "-", "-")
                if base is None
                else (f"{base.wall / it.wall:.2f}", f"{base.cpu / it.cpu:.2f}", f"{it.peak / max(base.peak, 1):.2f}")
            )
            print(
                f"| {name} | {str(dtype).removeprefix('torch.')} | {length} | {how} | {who} | "
                f"{length / it.wall:,.0f} | {speed} | {cpu} | {it.peak / 2**20:,.0f} | {peak} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096, 16384])
    parser.add_argument("--longest", type=int, default=16384, help="the longest row that transformers computes")
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    give_back_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    lengths = [64] if args.quick else args.lengths
    print(
        "| layer | dtype | S | pass | who | tokens/s | x of transformers | by CPU time | peak MiB | of transformers' |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in args.layers:
        make, width = LAYERS[name]
        for dtype in (getattr(torch, each) for each in args.dtypes):
            with torch.device(args.device):
                layers = make(dtype)
            check(*layers[:2], width, dtype, args.device)
            for length in lengths:
                measure(name, length, dtype, width, layers, args)


if __name__ == "__main__":
    main()
