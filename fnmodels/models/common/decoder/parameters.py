"""The usual parameters of a decoder, and their names in checkpoints."""

from collections.abc import Mapping, Sequence

from fnmodels.models.common.storage import StoredNames
from fnmodels.tree import Tree, flatten

from ..family import DecoderConfig, UsualConfig
from ..registry import family_of
from ..spec import Leaf, decoder_leaves, layer_leaves, usual_attention, usual_mlp
from ..storage import TensorSlice, fuse


def spec(config: UsualConfig) -> Tree:
    """The parameters of a pre-norm decoder with grouped-query attention, a gated MLP and no biases."""
    layer = layer_leaves(config.hidden_size, usual_attention(config), usual_mlp(config))
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: DecoderConfig) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    return {path: decoder_name(path) for path in flatten(family_of(config).spec(config))}


def decoder_name(path: str) -> str:
    """The default Hugging Face name of the parameter at `path`, such as model.layers.0.self_attn.q_proj.weight."""
    if path in ("lm_head", "score"):
        return f"{path}.weight"
    if path == "score_bias":
        return "score.bias"
    path = path.replace(".attention.", ".self_attn.")
    head, _, last = path.rpartition("_")
    if last != "bias":
        return f"model.{path}.weight"
    return f"model.{head}.bias" if head.endswith("norm") else f"model.{head}_proj.bias"


def fused(flat: Mapping[str, Leaf], where: str, name: str, leaves: Sequence[str]) -> dict[str, TensorSlice]:
    """{path: TensorSlice} for the `leaves` at `where` that are concatenated along rows in one tensor `name` on disk."""
    return fuse(
        decoder_name(f"{where}.{name}"), {f"{where}.{leaf}": flat[f"{where}.{leaf}"].shape[0] for leaf in leaves}
    )
