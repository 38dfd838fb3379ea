"""The vision embedder of Gemma 4 12B (Google, 2026): patches of 48 x 48 pixels through norms and a linear map.

Nothing attends: `forward` returns one hidden state [B, S, D] per patch. The only layer is the last LayerNorm, after the
positions, which have an entry per column and one per row. Pixels are from 0 to 1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import expressible
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Leaf, Normal, bias, layer_norm_leaves, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import attention_masks, freqs_cis, kinds  # noqa: F401
from fnmodels.ops import look_up
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("gemma4_unified_vision",)
TRAITS = Traits(inputs="patches", causal=False)
EPS = 1e-5  # of the LayerNorms, fixed in the reference


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes. patch_size: of what becomes a feature, `merged` patches a side in the processor's words.

    positions: the rows and columns of which the position table has one entry each. layer_norm_eps: of the norm before
    the projection to the text.
    """

    merged: int = 3
    positions: int = 1120

    @property
    def channels_last(self) -> bool:
        """The pixels of a patch are [p, p, C]."""
        return True

    @property
    def special_tokens(self) -> int:
        """0: every token of an image is a patch."""
        return 0

    @property
    def pooled(self) -> int:
        """The side of the square of patches that is a feature."""
        return 1

    @property
    def feature_scale(self) -> float:
        """The factor of hidden states before the norm of features."""
        return 1.0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES, MODEL_TYPES[0])
        fields.expect("is_encoder_decoder", False)
        for name in ("vocab_size", "tie_word_embeddings"):  # there are no tokens
            fields.take(name, None)
        width, merged = fields.integer("mm_embed_dim", 3840), fields.integer("pooling_kernel_size", 3)
        patch = fields.integer("patch_size", 16) * merged
        fields.expect("output_proj_dims", width)
        fields.expect("model_patch_size", patch)
        config = Config(
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=1,
            num_attention_heads=1,
            patch_size=patch,
            merged=merged,
            positions=fields.integer("mm_posemb_size", 1120),
            layer_norm_eps=fields.number("rms_norm_eps", 1e-6),
            initializer_range=fields.number("initializer_range", 0.02, above=-1e-9),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        out: ConfigJson = {"model_type": self.model_type, "patch_size": self.patch_size // self.merged}
        out |= {"pooling_kernel_size": self.merged, "mm_embed_dim": self.hidden_size, "mm_posemb_size": self.positions}
        out |= {"output_proj_dims": self.hidden_size, "rms_norm_eps": self.layer_norm_eps}
        return expressible(self, out | {"initializer_range": self.initializer_range})


def spec(config: Config) -> Tree:
    """The parameters: the weight [out, in] of patches of p p C pixels, norms, and the entries of columns and rows."""
    D, std, pixels = config.hidden_size, config.initializer_range, config.num_channels * config.patch_size**2
    tree: Tree = layer_norm_leaves("pixel_norm", pixels, "pixel") | layer_norm_leaves("patch_norm", D, "embed")
    tree |= {"patch_proj": weight((D, pixels), ("embed", "pixel"), std), "patch_bias": bias(D, "embed")}
    axes = ("position", "axis", "embed")
    tree["embed_positions"] = Leaf((config.positions, 2, D), torch.float32, axes, Normal(std), decay=False)
    return tree | {"layers": [layer_norm_leaves("position_norm", D, "embed")]}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names: dict[str, Any] = {"embed_positions": "pos_embedding"}
    parts = {"pixel_norm": "patch_ln1", "patch_proj": "patch_dense", "patch_norm": "patch_ln2"}
    for path, name in (parts | {"layers.0.position_norm": "pos_norm"}).items():
        names |= vision.weight_and_bias(path, name)
    return names


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches between two LayerNorms, and the positions of their columns and rows."""
    pixels = inputs["tokens"].to(params["patch_proj"].dtype)
    normed = layer_norm(pixels, params["pixel_norm"], params["pixel_norm_bias"], eps=EPS)
    x = linear(normed, params["patch_proj"], params["patch_bias"])
    x = layer_norm(x, params["patch_norm"], params["patch_norm_bias"], eps=EPS)
    row, column = inputs["positions"][..., :2].unbind(-1)
    columns, rows = params["embed_positions"].unbind(1)
    return x + look_up(columns, column, "columns of patches") + look_up(rows, row, "rows of patches")


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """The last norm: x [B, S, D] -> x."""
    return layer_norm(x, layer["position_norm"], layer["position_norm_bias"], eps=EPS)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The hidden states, unchanged."""
    return x
