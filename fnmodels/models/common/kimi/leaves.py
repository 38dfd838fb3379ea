"""The parameters of Kimi K3 and their names on disk; those that its files have in fp32 stay so."""

from dataclasses import replace
from typing import Any

from fnmodels.tree import Tree, flatten

from .. import mla
from .. import moe as mixture
from ..family import LayerKind, parsed
from ..layers import delta
from ..registry import family_of
from ..spec import Leaf, gated_mlp_leaves, latent_attention_leaves, layer_leaves, moe_leaves, norm, weight
from ..storage import Stored, TensorSlice, renamed

_PAD = 128  # A_log is padded with zeros to a multiple of so many heads
_WIDE = ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias", "norm")
_READS = {"attention_read": "self_attention_res", "mlp_read": "mlp_res"}
_LATENT = {"latent_in_proj": "routed_expert_down_proj", "latent_norm": "routed_expert_norm"}
_LATENT |= {"latent_out_proj": "routed_expert_up_proj"}


def leaves_of(config: Any, kind: LayerKind, index: int) -> Tree:
    """The parameters of layer `index`: weights [out, in].

    attention_read, mlp_read: the query of what a sublayer reads, "proj" times "norm"; fold: that of the final norm. The
    attention of the first layer has one state to choose from, so that its query has no gradient.
    """
    attention: Tree = _delta_leaves(config) if kind.ordered else _gated_latent_leaves(config)
    query = {"proj": norm(config.hidden_size, "embed", 0.0), "norm": norm(config.hidden_size, "embed")}
    fixed = {name: replace(leaf, trainable=False) for name, leaf in query.items()}
    tree = layer_leaves(config.hidden_size, attention, _mlp_leaves(config, kind))
    tree |= {"attention_read": query if index else fixed, "mlp_read": query}
    return tree | ({"fold": query} if index == config.num_hidden_layers - 1 else {})


def _delta_leaves(config: Any) -> dict[str, Leaf]:
    """As `delta.narrow_leaves`, but with a projection z of full width to the output gate."""
    D, heads, d = config.hidden_size, config.linear_num_heads, config.linear_head_dim
    leaves = {name: leaf for name, leaf in delta.narrow_leaves(config).items() if name not in ("g_a_proj", "g_b_proj")}
    leaves["z_proj"] = weight((heads * d, D), ("linear_heads", "embed"), config.initializer_range, unit=d)
    return leaves | {name: replace(leaves[name], keep_dtype=True) for name in _WIDE}


def _gated_latent_leaves(config: Any) -> dict[str, Leaf]:
    rows, D = config.num_attention_heads * config.v_head_dim, config.hidden_size
    gate = weight((rows, D), ("heads", "embed"), config.initializer_range, unit=config.v_head_dim)
    return latent_attention_leaves(config) | {"gate_proj": gate}


def _mlp_leaves(config: Any, kind: LayerKind) -> Tree:
    """A gated MLP, or a router of the residual stream, experts of a narrower one, and a shared expert."""
    D, inner, width, std = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.latent_size,
        config.initializer_range,
    )
    if not kind.routed:
        return gated_mlp_leaves(D, config.intermediate_size, std=std)
    E, shared = config.n_routed_experts, config.n_shared_experts * inner
    leaves = moe_leaves(D, E, inner, std=std, shared=shared, selection_bias=True)
    narrow = moe_leaves(width, E, inner, std=std)["experts"]
    axis = {"embed": "moe_latent"}
    leaves["experts"] = {
        name: replace(leaf, axes=tuple(axis.get(one, one) for one in leaf.axes)) for name, leaf in narrow.items()
    }
    return leaves | {
        "latent_in_proj": weight((width, D), ("moe_latent", "embed"), std),
        "latent_norm": norm(width, "moe_latent"),
        "latent_out_proj": weight((D, width), ("embed", "moe_latent"), std),
    }


def hf_names(config: Any) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    flat = flatten(family_of(config).spec(config))
    names = mla.latent_names(mixture.block_sparse_names(flat, config.n_routed_experts))
    D, heads = config.hidden_size, config.linear_num_heads
    padded = -(-heads // _PAD) * _PAD
    for index, kind in enumerate(parsed(config.layer_kinds)):
        at, there = f"layers.{index}", f"model.layers.{index}"
        if kind.ordered:
            names |= delta.separate_names(f"{at}.attention", f"{there}.self_attn", _delta_leaves(config))
            names[f"{at}.attention.A_log"] = TensorSlice(f"{there}.self_attn.A_log", 0, heads, padded)
        else:
            names[f"{at}.attention.gate_proj"] = f"{there}.self_attn.g_proj.weight"
        if kind.routed:
            moe = f"{there}.block_sparse_moe"
            names[f"{at}.mlp.selection_bias"] = f"{moe}.gate.e_score_correction_bias"
            names |= {f"{at}.mlp.{ours}": f"{moe}.{theirs}.weight" for ours, theirs in _LATENT.items()}
            for leaf in ("gate_proj", "up_proj", "down_proj") if config.n_shared_experts else ():
                names[f"{at}.mlp.shared_expert.{leaf}"] = f"{moe}.shared_experts.{leaf}.weight"
        for ours, theirs in _READS.items():
            names |= _query(f"{at}.{ours}", f"{there}.{theirs}", D)
    names |= _query(f"layers.{config.num_hidden_layers - 1}.fold", "model.output_attn_res", D)
    return {path: renamed(name, r"^(?=model\.|lm_head\.)", "language_model.") for path, name in names.items()}


def _query(ours: str, theirs: str, width: int) -> dict[str, Stored]:
    proj = TensorSlice(f"{theirs}_proj.weight", 0, width, width, ones=(1, 0))
    return {f"{ours}.proj": proj, f"{ours}.norm": f"{theirs}_norm.weight"}
