"""Times one recurrent layer beside transformers': Gated DeltaNet, Kimi Delta Attention and SSD.

    python benchmarks/recurrent.py             S from 512 to 16,384
    python benchmarks/recurrent.py --quick     short rows and one round, to check that everything runs
    python benchmarks/recurrent.py --device cuda --dtypes bfloat16

gdn   the layer of Qwen3.5-0.8B: width 1024, 16 heads of keys and values of 128, kernel 4
kda   the layer of Kimi Linear at the same sizes
ssd   the layer of Mamba2-130M: width 768, 24 heads of 64, state 128, one group, kernel 4

One row of one document, and with "packed" the same row as documents of 100 tokens, which transformers cannot compute.
"projections" are the layer's linear maps alone: no form of the recurrence makes the layer faster than these, and what
a contender takes more is what it needs for the recurrence. transformers' KDA holds 64 numbers per token, head and
channel, so rows above --longest are timed without transformers.

On CUDA there are more contenders:
fnmodels, compiled    by torch.compile, for rows up to --longest-compiled: the graph of kda repeats the operations of a
                      chunk for each 64 tokens, so that compiling takes minutes
transformers, torch   by torch's operations, as "transformers" is on a CPU
transformers, fla     with the kernels of flash-linear-attention (the wheel fla-core), where that is installed; "packed"
                      has its convolution too, for torch's does not keep documents apart

Contenders take turns; the report has medians of tokens per second and of the peak of memory above the start. Before a
layer is timed, both must agree on its output and on the gradient of its input.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from turns import Taken, give_back_memory, take_turns, take_turns_on_cuda

import fnmodels
from fnmodels.models.common.context import Context
from fnmodels.models.common.layers import delta
from fnmodels.models.decoder import kimi_linear, qwen3_next
from fnmodels.ops import project_out
from fnmodels.ops.linear import linear
from fnmodels.ops.recurrent.conv import short_conv
from fnmodels.ops.recurrent.gated_norm import silu_then_group_norm
from fnmodels.ops.recurrent.ssd import ssd
from fnmodels.options import ForwardOptions

Layer = Callable[[Tensor, Any], Tensor]  # (x, segment ids) -> y

DOCUMENT = 100  # tokens of each document of a packed row


class Layers(NamedTuple):
    """One layer with the same weights in each form."""

    ours: Layer
    theirs: Layer  # transformers', by torch's operations
    projections: Layer
    fla: Layer | None = None  # theirs with fla's kernels: (x, borders of the documents, or None for one document) -> y


def projections(inward: list[Tensor], outward: Tensor) -> Layer:
    """Products with the weights `inward`; `outward` is that of the layer's output, here of the first product."""

    def layer(x: Tensor, _: Tensor) -> Tensor:
        products = [linear(x, weight) for weight in inward]
        return sum((y.sum() for y in products[1:]), linear(products[0][..., : outward.shape[1]], outward).sum())

    return layer


def gdn(dtype: torch.dtype) -> Layers:
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

    values: dict[str, Any] = {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "num_attention_heads": 8}
    values |= {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 1, "num_key_value_heads": 2}
    given: Any = configuration_qwen3_5.Qwen3_5TextConfig(**values, vocab_size=64, layer_types=["linear_attention"])
    theirs: Any = modeling_qwen3_5.Qwen3_5GatedDeltaNet(given, 0).to(dtype)
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
            weights, x, fnmodels.inputs.Segments(segment_ids), config, context, eps=config.rms_norm_eps
        )

    inward = [weights[f"{name}_proj"] for name in "qkvzba"]
    by_torch, by_fla = by_torch_and_fla(
        theirs, modeling_qwen3_5, "torch_chunk_gated_delta_rule", "gated_delta_rule", "chunk_gated_delta_rule"
    )
    return Layers(ours, by_torch, projections(inward, weights["o_proj"]), by_fla)


def by_torch_and_fla(theirs: Any, modeling: Any, rule: str, place: str, kernel: str) -> tuple[Layer, Layer | None]:
    """transformers' layer by torch's operations alone; and with fla's kernels, where that is installed.

    Where it is, transformers itself takes `kernel` of fla.ops.`place` for the function `rule` of `modeling`. The layer
    looks the function up in each call, so each call sets it.
    """
    torch_rule, torch_conv = (inspect.unwrap(getattr(modeling, name)) for name in (rule, "causal_conv1d_fn"))
    assert inspect.isfunction(torch_rule), f"{rule} is no function: what is wrapped in it is not known."

    def layer(x: Tensor, chunked: Callable[..., Any], conv: Callable[..., Any]) -> Tensor:
        vars(modeling).update({rule: chunked, "causal_conv1d_fn": conv})
        y: Tensor = theirs(x)
        return y

    def by_torch(x: Tensor, _: Any) -> Tensor:
        return layer(x, torch_rule, torch_conv)

    if importlib.util.find_spec("fla") is None:
        return by_torch, None
    fla_rule = getattr(importlib.import_module(f"fla.ops.{place}"), kernel)
    fla_conv = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d

    def by_fla(x: Tensor, borders: Tensor | None) -> Tensor:
        def chunked(*args: Any, **kwargs: Any) -> Any:
            return fla_rule(*args, **kwargs | {"cu_seqlens": borders})

        def conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:  # of x [B, channels, S]
            y: Tensor = fla_conv(x.mT, weight, bias, activation=activation, cu_seqlens=borders)[0]
            return y.mT

        return layer(x, chunked, torch_conv if borders is None else conv)

    return by_torch, by_fla


def kda(dtype: torch.dtype) -> Layers:
    from transformers.models.kimi_linear import configuration_kimi_linear, modeling_kimi_linear

    values: dict[str, Any] = {"hidden_size": 1024, "linear_num_heads": 16, "linear_head_dim": 128, "vocab_size": 64}
    values |= {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]}
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
        mixed = kimi_linear.kimi_delta_attention(weights, x, fnmodels.inputs.Segments(segment_ids), config, context)
        return project_out(weights, mixed)

    inward = [weights[f"{name}_proj"] for name in ("q", "k", "v", "b", "f_a", "g_a")]
    by_torch, by_fla = by_torch_and_fla(theirs, modeling_kimi_linear, "chunk_kimi_delta_attention", "kda", "chunk_kda")
    return Layers(ours, by_torch, projections(inward, weights["o_proj"]), by_fla)


def mamba2(dtype: torch.dtype) -> Layers:
    from transformers.models.mamba2 import configuration_mamba2, modeling_mamba2

    values: dict[str, Any] = {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1}
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
        normed = silu_then_group_norm(y.flatten(2), z, w["norm.weight"], eps=1e-5)
        return linear(normed.to(x.dtype), w["out_proj.weight"])

    return Layers(ours, lambda x, _: theirs(x), projections([w["in_proj.weight"]], w["out_proj.weight"]))


LAYERS = {"gdn": (gdn, 1024), "kda": (kda, 1024), "ssd": (mamba2, 768)}  # {name: (maker, width)}


def check(ours: Layer, theirs: Layer, width: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(1, 300, width).to(device, dtype).requires_grad_()
    one = torch.ones(1, 300, dtype=torch.long, device=device)
    y, wanted = ours(x, one), theirs(x, one)
    grads: list[Tensor] = []
    for out in (y, wanted):  # with the gradients of all weights, which then are there when peaks are measured
        x.grad = None
        out.float().square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad.float())
    bound = 1e-4 if dtype == torch.float32 else 5e-2
    for got, want in ((y, wanted), grads):
        off = float(((got - want).float().norm() / want.float().norm()).detach())
        assert off < bound, f"Ours differs from transformers' by {off:.1e}, relative to its norm."


def contenders_of(layers: Layers, length: int, args: argparse.Namespace) -> dict[str, tuple[Layer, Any]]:
    """{name: (layer, its second argument)}."""
    cuda = args.device == "cuda"
    one = torch.ones(1, length, dtype=torch.long, device=args.device)
    many = torch.arange(length, device=args.device)[None] // DOCUMENT + 1
    found: dict[str, tuple[Layer, Any]] = {
        "fnmodels": (layers.ours, one),
        "fnmodels, packed": (layers.ours, many),
        "projections": (layers.projections, one),
    }
    if cuda and length <= args.longest_compiled:
        torch.compiler.reset()  # or the graph of a second length would be one for all lengths
        compiled = torch.compile(layers.ours)
        found |= {"fnmodels, compiled": (compiled, one), "fnmodels, compiled, packed": (compiled, many)}
    if length <= args.longest:
        found[theirs_on(args.device)] = (layers.theirs, one)
    if cuda and layers.fla is not None:
        borders = torch.tensor([*range(0, length, DOCUMENT), length], device=args.device)
        found |= {"transformers, fla": (layers.fla, None), "transformers, fla, packed": (layers.fla, borders)}
    return found


def theirs_on(device: str) -> str:
    return "transformers, torch" if device == "cuda" else "transformers"


def measure(name: str, length: int, dtype: torch.dtype, width: int, layers: Layers, args: argparse.Namespace) -> None:
    x = torch.randn(1, length, width).to(args.device, dtype).requires_grad_()
    contenders, rounds = contenders_of(layers, length, args), 1 if args.quick else args.rounds

    def forward(layer: Layer, ids: Any) -> None:
        with torch.no_grad():
            layer(x, ids)

    def both(layer: Layer, ids: Any) -> None:
        layer(x, ids).sum().backward()

    for how, run in (("forward", forward), ("forward + backward", both)):
        runs: dict[str, Callable[[], Any]] = {who: functools.partial(run, *pair) for who, pair in contenders.items()}
        taken: Mapping[str, Taken | str]
        taken = take_turns_on_cuda(runs, rounds) if args.device == "cuda" else take_turns(runs, rounds)
        base = taken.get(theirs_on(args.device))
        for who, it in taken.items():
            row = f"{name} | {str(dtype).removeprefix('torch.')} | {length} | {how} | {who}"
            print(f"| {row} | {cells(it, base, length)} |", flush=True)


def cells(it: Taken | str, base: Taken | str | None, length: int) -> str:
    if isinstance(it, str):
        return f"{it} | | | |"
    speed, cpu, peak = "-", "-", "-"
    if isinstance(base, Taken):
        speed, cpu = f"{base.wall / it.wall:.2f}", f"{base.cpu / it.cpu:.2f}"
        peak = f"{it.peak / max(base.peak, 1):.2f}"
    return f"{length / it.wall:,.0f} | {speed} | {cpu} | {it.peak / 2**20:,.0f} | {peak}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096, 16384])
    parser.add_argument("--longest", type=int, default=16384, help="the longest row that transformers computes")
    parser.add_argument("--longest-compiled", type=int, default=512, help="the longest row of our compiled layer")
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
            try:
                with torch.device(args.device):
                    layers = make(dtype)
            except ImportError as error:  # an older transformers
                print(f"{name} is skipped: {error}", flush=True)
                break
            check(layers.ours, layers.theirs, width, dtype, args.device)
            for length in lengths:
                measure(name, length, dtype, width, layers, args)


if __name__ == "__main__":
    main()
