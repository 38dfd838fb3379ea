"""Latent attention against the formulas of its paper, head by head; every kernel on its unequal widths."""

import math

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import deepseek
from fnmodels.inputs import Causal, build_mask
from fnmodels.models.common.spec import latent_attention_leaves
from fnmodels.ops.attention.select import attention
from fnmodels.ops.mla import LATENT_EPS, Widths, expanded, latent_keys, latent_queries, latent_scale
from fnmodels.ops.rotary import Rope, apply_rotary, apply_rotary_interleaved, rotary_table
from tests.support.cases import generic

D, N, P, R, HV, RANK = 14, 3, 5, 4, 7, 6
ROPE = Rope(100.0)


def weights_of(q_rank: int | None, *, biases: bool) -> dict[str, Tensor]:
    sizes = {"vocab_size": 2, "hidden_size": D, "intermediate_size": 2, "num_hidden_layers": 1, "kv_lora_rank": RANK}
    sizes |= {"qk_nope_head_dim": P, "qk_rope_head_dim": R, "v_head_dim": HV, "num_attention_heads": N}
    experts = {"moe_intermediate_size": 2, "n_routed_experts": 1, "num_experts_per_tok": 1}
    config = deepseek.Config(**sizes, **experts, q_lora_rank=q_rank, attention_bias=biases)
    leaves = latent_attention_leaves(config)
    return {name: generic(name, torch.empty(leaf.shape)).double() for name, leaf in leaves.items()}


def reference(w: dict[str, Tensor], x: Tensor, position: int, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """One token x [D]: q and k [N, P + R], v [N, Hv]; equations 37 to 47 of arXiv 2405.04434, pair by pair."""

    def norm(c: Tensor, weight: Tensor) -> Tensor:
        return c / (c.square().mean() + LATENT_EPS).sqrt() * weight

    def turn(part: Tensor) -> Tensor:
        out = part.clone()
        for i in range(R // 2):
            one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + R // 2)
            angle = position * ROPE.theta ** (-2 * i / R)
            out[one] = part[one] * math.cos(angle) - part[other] * math.sin(angle)
            out[other] = part[other] * math.cos(angle) + part[one] * math.sin(angle)
        return out

    if "q_a_proj" in w:
        q = w["q_b_proj"] @ norm(w["q_a_proj"] @ x + w.get("q_a_bias", 0), w["q_a_layernorm"])
    else:
        q = w["q_proj"] @ x
    joint = w["kv_a_proj"] @ x + w.get("kv_a_bias", 0)
    kv = w["kv_b_proj"] @ norm(joint[:RANK], w["kv_a_layernorm"])
    heads = [(q[n * (P + R) :][: P + R], kv[n * (P + HV) :][: P + HV]) for n in range(N)]
    return (
        torch.stack([torch.cat((one[:P], turn(one[P:]))) for one, _ in heads]),
        torch.stack([torch.cat((two[:P], turn(joint[RANK:]))) for _, two in heads]),
        torch.stack([two[P:] for _, two in heads]),
    )


@pytest.mark.parametrize("q_rank", [None, 8])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_keys_and_values(q_rank: int | None, biases: bool, interleaved: bool) -> None:
    weights = weights_of(q_rank, biases=biases)
    assert any(name.endswith("bias") for name in weights) == biases
    x, positions = generic("x", torch.empty(2, 5, D)).double(), torch.tensor([[0, 1, 2, 0, 1], [7, 8, 9, 10, 11]])
    rotate = apply_rotary_interleaved if interleaved else apply_rotary
    how = {"widths": Widths(P, R, HV), "rotate": rotate}
    table = rotary_table(ROPE, R, positions)
    got = (
        latent_queries(weights, x, table, **how),
        *expanded(weights, *latent_keys(weights, x, table, **how), widths=how["widths"]),
    )
    for b in range(2):
        for t in range(5):
            wanted = reference(weights, x[b, t], int(positions[b, t]), interleaved)
            for one, other in zip(got, wanted, strict=True):
                assert (one[b, t] - other).abs().max() < 1e-6  # the table is fp32


def test_the_scale_of_scores() -> None:
    """1/sqrt of the joint width; yarn's temperature squared only where mscale_all_dim is said (arXiv 2309.00071)."""
    assert latent_scale(Rope(), 192) == 192**-0.5
    yarn = Rope(kind="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0)
    assert latent_scale(yarn, 192) == 192**-0.5
    scaled = Rope(kind="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
    assert latent_scale(scaled, 192) == pytest.approx(192**-0.5 * (1 + 0.0707 * math.log(40)) ** 2, rel=1e-12)
    assert latent_scale(Rope(kind="yarn", factor=0.5, mscale_all_dim=1.0), 192) == 192**-0.5


@pytest.mark.parametrize("kernel", ["sdpa", "blocks", "auto"])
@pytest.mark.parametrize("v_width", [HV, P + R, 16])
@pytest.mark.parametrize("length", [24, 300])  # from 256 on "blocks" works in tiles
def test_kernels_agree_on_unequal_widths(kernel: str, v_width: int, length: int) -> None:
    """Values narrower and wider than keys: result and all gradients as those of "math"."""
    positions = torch.arange(length)[None].expand(2, -1)
    segment_ids = (positions >= 9).long() + 1
    mask = build_mask(Causal(), positions, segment_ids)
    layout = fnmodels.layout({"full": mask})
    shapes = [(2, length, N, P + R)] * 2 + [(2, length, N, v_width)]
    q, k, v = (generic(n, torch.empty(s)).requires_grad_() for n, s in zip("qkv", shapes, strict=True))
    results = []
    for name in (kernel, "math"):
        out = attention(q, k, v, mask, kernel=name, scale=0.3, layout=layout)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).abs().max() < 2e-5 * max(1.0, float(wanted.detach().abs().max()))
