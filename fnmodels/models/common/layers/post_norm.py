"""The layer of OLMo 2 (arXiv 2501.00656): each sublayer's output is normalized; query and key norms span all heads."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fnmodels.ops import apply_rotary, gated_mlp, project_out, rms_norm_fp32_weight, split_heads
from fnmodels.ops.linear import linears
from fnmodels.tree import Tree

from ..context import Context
from ..spec import joint_head_norms, norm, usual_attention, usual_mlp


def post_norm_leaves(config: Any, mlp: Tree | None = None) -> Tree:
    """The parameters of such a layer, with the biases that `config.attention_bias` says; mlp: a gated MLP if None."""
    D, biased = config.hidden_size, config.attention_bias
    return {
        "attention": usual_attention(config, qkv_bias=biased, o_bias=biased) | joint_head_norms(config),
        "post_attention_layernorm": norm(D, "embed"),
        "mlp": usual_mlp(config) if mlp is None else mlp,
        "post_feedforward_layernorm": norm(D, "embed"),
    }


def post_norm_layer(
    layer: Tree,
    x: Tensor,
    mask: Any,
    freqs: Tensor,
    config: Any,
    ctx: Context,
    experts: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """One layer: x [B, S, D] -> x. experts: what is done in place of the gated MLP."""
    weights, eps = layer["attention"], config.rms_norm_eps
    q, k, v = linears(x, weights, "qkv")
    q = rms_norm_fp32_weight(q, weights["q_norm"], eps=eps)  # over all heads together
    k = rms_norm_fp32_weight(k, weights["k_norm"], eps=eps)
    q, k, v = (split_heads(t, config.head_dim) for t in (q, k, v))
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    attended = rms_norm_fp32_weight(project_out(weights, mixed), layer["post_attention_layernorm"], eps=eps)
    x = ctx.tap("middle", x + ctx.tap("attention", attended))
    if experts is None:
        fed = gated_mlp(layer["mlp"], x, activation=config.hidden_act, tap=ctx.tap)
    else:
        fed = experts(x.view_as(x))  # whose gradients are summed before the residual stream's, with padding or without
    return x + ctx.tap("mlp", rms_norm_fp32_weight(fed, layer["post_feedforward_layernorm"], eps=eps))
