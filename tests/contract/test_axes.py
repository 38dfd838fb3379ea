"""Logical axes of every parameter fit its place and size, since sharding and tensor parallelism rely on them."""

import dataclasses
from collections import defaultdict
from typing import Any

import pytest

import fnmodels
from fnmodels import tree
from fnmodels.models.common.family import stored_layers
from fnmodels.models.common.spec import Leaf
from tests.support.cases import Case, block_structures, structures

ON_STREAM = (
    "embed",
    "embed_twice",
    "streams",
    "features",
    "per_layer",
    "one",
    "frequency",
)  # axes of vectors beside sublayers
NORMS_WITHOUT_WEIGHTS = ("nanochat", "olmo", "olmo_clipped", "opt_bare", "hrm_text", "hrm_text_deep")
every_structure = pytest.mark.parametrize("case", structures(), ids=str)


def wrong_axes(config: Any, flat: dict[str, Leaf]) -> list[str]:
    """A message for each leaf whose axes do not fit its place, or whose sizes do not fit the config."""
    matrices: dict[str, set[tuple[str, int]]] = defaultdict(set)  # by layer
    for path, leaf in flat.items():
        if len(leaf.shape) > 1:
            matrices[layer_of(path)] |= set(zip(leaf.axes, leaf.shape, strict=True))
    faults = []
    for path, leaf in flat.items():
        if not leaf.axes:
            continue  # a single number (Apertus) has no axis that could be wrong
        far = hasattr(config, "global_head_dim") and not kind_of(config, path).startswith("sliding")
        names = ("num_global_key_value_heads", "global_head_dim") if far else ("num_key_value_heads", "head_dim")
        kv_heads, head_dim = getattr(config, names[0], config.num_attention_heads), getattr(config, names[1])
        heads = config.num_attention_heads
        if kind_of(config, path).startswith("sliding"):
            heads = getattr(config, "sliding_attention_heads", heads)
            kv_heads = getattr(config, "sliding_key_value_heads", kv_heads)
            head_dim = getattr(config, "sliding_head_dim", head_dim)
        if hasattr(config, "sublayers") and path.startswith("layers."):
            kv_heads = config.sublayers[int(path.split(".")[1])][1]
        for axis, size in zip(leaf.axes, leaf.shape, strict=True):
            wanted = {
                "embed": config.hidden_size,
                "shifted": config.hidden_size,
                "vocab": getattr(config, "embedding_rows", 0) * (path == "embed_tokens") or config.vocab_size,
                "heads": heads * leaf.unit,
                "kv_heads": kv_heads * leaf.unit,
                "head_dim": head_dim,
            }.get(axis, size)
            if size != wanted:
                faults.append(f"{path} has {size} entries along {axis!r}, where the config has {wanted}.")
        inner = path.removeprefix(layer_of(path)).split(".")
        on_stream = not {"attention", "mamba", "mlp"} & set(inner)
        if len(leaf.shape) == 1 and path == "lm_head_bias":
            if leaf.axes != ("vocab",):
                faults.append(f"{path} is added to logits, so its axis is 'vocab', not {leaf.axes[0]!r}.")
        elif len(leaf.shape) == 1 and on_stream and leaf.axes[0] not in ON_STREAM:
            faults.append(f"{path} is a vector on the residual stream, so its axis is 'embed', not {leaf.axes[0]!r}.")
        entry = (leaf.axes[0], leaf.shape[0])
        alone = {"head_dim", "linear_head_dim", "activation", "shifted"} | ({"heads"} if leaf.unit == 1 else set())
        # of windows that overlap, a key has half the width of its projection
        halved = entry[0] == "latent" and (entry[0], 2 * entry[1]) in matrices[layer_of(path)]
        known = entry in matrices[layer_of(path)] or halved
        if len(leaf.shape) == 1 and not on_stream and not known and entry[0] not in alone:
            faults.append(f"{path} has the axis {entry[0]!r} of {entry[1]}, which no matrix of its layer has.")
        if "norm" in inner[-1] and {"attention", "mamba"} & set(inner):
            own, other = {"q": ("heads", "kv_heads"), "k": ("kv_heads", "heads")}.get(inner[-1][0], (None, None))
            if entry[0] in ("embed", other) or (len(leaf.shape) > 1 and entry[0] != own):
                faults.append(f"{path} is a norm within attention, so its axis is not {entry[0]!r}.")
    return faults


def layer_of(path: str) -> str:
    """ "layers.3." of "layers.3.mlp.router", and "" outside of layers."""
    head, _, rest = path.partition(".")
    return f"{head}.{rest.partition('.')[0]}." if head in ("layers", "mtp") else ""


def kind_of(config: Any, path: str) -> str:
    """The kind of the layer that the path is of, "" outside of layers."""
    layer, kinds = layer_of(path), fnmodels.family_of(config).kinds(config)
    return kinds[stored_layers(config, kinds).index(int(layer.split(".")[1]))] if layer.startswith("layers") else ""


@every_structure
def test_axes_fit_places_and_sizes(case: Case) -> None:
    faults = wrong_axes(case.config, tree.flatten(fnmodels.family_of(case.config).spec(case.config)))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("case", block_structures(), ids=str)
def test_a_norm_with_another_axis_is_found(case: Case) -> None:
    flat = tree.flatten(fnmodels.family_of(case.config).spec(case.config))
    norms = {path: leaf for path, leaf in flat.items() if "norm" in path.rpartition(".")[2]}
    assert bool(norms) != (case.name in NORMS_WITHOUT_WEIGHTS)
    for path, leaf in norms.items():
        axes = {"embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "latent"} - set(leaf.axes)
        latent_key = hasattr(case.config, "o_groups")
        # the heads of linear and of full attention may have one size
        same_size = leaf.axes[0] == "linear_head_dim" and leaf.shape[0] == case.config.head_dim
        for axis in axes - ({"head_dim"} if latent_key or same_size else set()):
            planted = {**flat, path: dataclasses.replace(leaf, axes=(axis, *leaf.axes[1:]))}
            assert wrong_axes(case.config, planted), f"{path} as {axis!r} is not found"
