"""The vision tower of Llama 4 (Meta, 2025): LayerNorms, a plain MLP, positions learned and rotary, tiles of one size.

`forward` returns the hidden states [B, S, D] after the last norm. The class token comes before the patches here, and
reads the last entry of the position table.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.image_places import gather_cells
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Leaf, embedding, layer_norm_leaves, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import attention_masks, kinds, unembed  # noqa: F401
from fnmodels.models.vision.common import position_table
from fnmodels.ops import project_out, project_qkv
from fnmodels.ops.dtypes import in_fp64
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import plain_mlp
from fnmodels.ops.norm import layer_norm
from fnmodels.ops.rotary import Rope, apply_rotary_interleaved, frequencies
from fnmodels.tree import Tree

MODEL_TYPES = ("llama4_vision_model",)
TRAITS = Traits(inputs="patches", causal=False, optional={"adapter": "adapter"})
EPS = 1e-5  # of every norm, fixed in the reference

_LAYER = {f"attention.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"}
_LAYER |= {name: name for name in ("input_layernorm", "post_attention_layernorm")}
_LAYER |= {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
_FIXED = {"vision_feature_select_strategy": "default", "multi_modal_projector_bias": False, "vision_feature_layer": -1}


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches. merge: the patches of a side of a cell; output_dim: the width of the adapter's features.

    adapter: 1 if the tower has the MLP of `adapted`, as in a folder of it alone; in Llama 4 the projector has it.
    """

    rope_theta: float = 10000.0
    merge: int = 2
    output_dim: int = 4096
    adapter: int = 0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = vision.vision_fields(fields, MODEL_TYPES, eps=EPS, sizes=(768, 5632, 34, 16), patch=14, image=448)
        fields.expect("hidden_act", "gelu")
        fields.expect("norm_eps", EPS)
        for name, value in _FIXED.items():
            fields.expect(name, value)
        rope = Fields(fields.take("rope_parameters", {}), "rope_parameters")
        rope.expect("rope_type", "default")
        theta = fields.number("rope_theta", rope.number("rope_theta", 10000.0))
        ratio, width = fields.number("pixel_shuffle_ratio", 0.5), fields.integer("projector_output_dim", 4096)
        merge = round(1 / ratio)
        # what the reference needs to run at all
        fields.expect("pixel_shuffle_ratio", 1 / merge)
        fields.expect("projector_input_dim", width)
        fields.expect("vision_output_dim", width)
        fields.expect("intermediate_size", usual["hidden_size"] * merge**2)
        alone = fields.take("architectures", None) == ["Llama4VisionModel"]
        config = Config(**usual, rope_theta=theta, merge=merge, output_dim=width, adapter=int(alone))
        object.__setattr__(config, "extra", fields.finish(ignored=("projector_dropout",)))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        widths = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), self.output_dim)
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        rest = {"pixel_shuffle_ratio": 1 / self.merge, "norm_eps": EPS, "rope_parameters": rope, "layer_norm_eps": None}
        return vision.vision_to_hf(self, "Llama4Vision", **widths | rest | _FIXED)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C p p]."""
    D, std = config.hidden_size, config.initializer_range
    tree: Tree = {"patch_proj": weight((D, config.num_channels * config.patch_size**2), ("embed", "pixel"), std)}
    tree |= {
        "class_token": vision.vector(D, std),
        "embed_positions": embedding(config.side**2 + 1, D, std, axis="position"),
    }
    tree |= layer_norm_leaves("first_norm", D, "embed") | vision.last_norm(config)
    tree |= {"adapter": adapter_leaves(config, std)} if config.adapter else {}
    return tree | {"layers": [vision.vision_layer(config) for _ in range(config.num_hidden_layers)]}


def adapter_leaves(config: Config, std: float) -> dict[str, Leaf]:
    """The weights of `adapted`, [out, in]."""
    wide, cell = config.output_dim, config.hidden_size * config.merge**2
    return {
        "up": weight((wide, cell), ("projection", "embed"), std),
        "out": weight((wide, wide), ("embed", "projection"), std),
    }


def adapted(weights: Tree, x: Tensor, places: Tensor, /) -> Tensor:
    """Features [1, cells, output_dim] of the tower's hidden states x [rows, slots, D], by the weights of the adapter.

    places: of the patches of each cell of `merge` patches a side, see `fnmodels.inputs.image_places.cells`.
    """
    inner = F.gelu(linear(gather_cells(x, places).flatten(1)[None], weights["up"]))
    return F.gelu(linear(inner, weights["out"]))


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = {"patch_proj": "patch_embedding.linear.weight", "class_token": "class_embedding"}
    adapter = {"adapter.up": "vision_adapter.mlp.fc1.weight", "adapter.out": "vision_adapter.mlp.fc2.weight"}
    names |= adapter if config.adapter else {}
    names |= {"embed_positions": "positional_embedding_vlm"} | vision.layer_names(config, "model.layers.", _LAYER)
    return (
        names | vision.weight_and_bias("first_norm", "layernorm_pre") | vision.weight_and_bias("norm", "layernorm_post")
    )


def batch_inputs(config: Config, positions: Tensor) -> dict[str, Tensor]:
    """The entries of the position table that each token reads; resampled as in CLIP for a tile of another size."""
    found = position_table.table_inputs(config, positions, resample=position_table.bicubic, placed=0)
    index, weights = found["table_index"], found["table_weight"]
    special, first = positions[..., :1] < 0, torch.arange(index.shape[-1], device=index.device) == 0
    index = torch.where(special, config.side**2, index)
    return {"table_index": index, "table_weight": torch.where(special, first.to(weights.dtype), weights)}


@in_fp64
def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{"full": fp32 [B, S, H/2, 2]}: half of the angles turn with the column, half with the row, both from 1.

    The class token does not turn.
    """
    freqs = frequencies(Rope(theta=config.rope_theta), config.head_dim // 2, device=positions.device)
    angles = torch.cat([(positions[..., axis, None] + 1).clamp(min=0).double() * freqs for axis in (1, 0)], -1)
    return {"full": torch.stack((angles.cos(), angles.sin()), -1).float()}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches and their positions, normalized."""
    placed = position_table.table_positions(params["embed_positions"], inputs)
    x = vision.embed_patches(params, inputs, config=config) + placed
    return layer_norm(x, params["first_norm"], params["first_norm_bias"], eps=EPS)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights = layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=EPS)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = layer_norm(x, layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"], eps=EPS)
    return x + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation="gelu", tap=ctx.tap))
