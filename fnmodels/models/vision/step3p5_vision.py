"""The vision tower of Step 3.7 Flash (StepFun, 2026), a Perception Encoder (arXiv 2504.13181) with rotary positions.

Layer scales, a LayerNorm before the layers and none after them, positions learned and rotary, and two convolutions of
stride 2 behind the layers: 4 x 4 patches become one feature. `forward` returns the hidden states [B, S, D] of the last
layer, `downsampled` the features that the convolutions make of them.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.decoder import expressible
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Leaf, Normal, bias, embedding, layer_norm_leaves
from fnmodels.models.common.storage import StoredNames, fuse, separate_heads
from fnmodels.models.common.vision import attention_masks, block, kinds  # noqa: F401
from fnmodels.models.vision.common import position_table, qwen_tower
from fnmodels.models.vision.common.qwen_tower import unembed  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("step3p5_vision",)
# Of the trait `in_memory`, of models with this tower too.
IN_MEMORY = {
    r"conv1\.": "embeddings.patch_embedding.",
    r"positional_embedding": "embeddings.position_embedding.weight",
    r"transformer\.resblocks\.": "layers.",
    r"ln_pre\.": "pre_layernorm.",
    r"vit_downsampler": "downsampler",
    r"\.ls_(\d)\.gamma": r".lambda_\1",
    r"\.attn\.out_proj\.": ".self_attn.out_proj.",
    r"\.ln_1\.": ".layernorm_before.",
    r"\.ln_2\.": ".layernorm_after.",
    r"\.mlp\.c_fc\.": ".mlp.fc1.",
    r"\.mlp\.c_proj\.": ".mlp.fc2.",
}
TRAITS = Traits(inputs="patches", causal=False, in_memory=IN_MEMORY)
STRIDE = 4  # of both convolutions together
_LAYER = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "attention.o_proj": "attn.out_proj"}
_LAYER |= {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
# Of published files: their names, and what they say that is so of this tower.
_PUBLISHED = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
_PUBLISHED |= {"ls_init_value": "layer_scale_init_value"}
_FIXED: dict[str, Any] = {
    "use_cls_token": False,
    "use_ln_pre": True,
    "use_ln_post": False,
    "use_abs_posemb": True,
    "use_rope2d": True,
}
_FIXED |= {"pool_type": "none", "output_dim": None}


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches. layer_scale: the initial value of layer scales."""

    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    layer_scale: float = 0.1
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 4:
            raise ConfigError(f"The heads are {self.head_dim} wide, but must be a multiple of 4, for rows and columns.")

    @property
    def special_tokens(self) -> int:
        """0: every token of an image is a patch."""
        return 0

    @property
    def interleaved(self) -> bool:
        """Neighbors in a head rotate together."""
        return True

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = renamed(Fields(values), {name: new for name, new in _PUBLISHED.items() if name in values})
        for name, value in _FIXED.items():
            fields.expect(name, value)
        sizes, act = (1536, 8960, 47, 16), "quick_gelu"
        usual = vision.vision_fields(
            fields, MODEL_TYPES, eps=1e-5, activation=act, sizes=sizes, patch=14, image=728, inner=_inner
        )
        rope = Fields(fields.take("rope_parameters", {}), f"{fields.where}, rope_parameters")
        rope.expect("rope_type", "axial", "default")
        layer_scale = fields.number("layer_scale_init_value", 0.1)
        config = Config(**usual, layer_scale=layer_scale, rope_theta=rope.number("rope_theta", 10000.0))
        object.__setattr__(config, "extra", fields.finish(("max_position_embeddings",)))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        ratio = self.intermediate_size / self.hidden_size
        if int(self.hidden_size * ratio) != self.intermediate_size:  # it is rounded down on reading
            ratio = math.nextafter(ratio, math.inf)
        own = {"mlp_ratio": ratio, "layer_scale_init_value": self.layer_scale}
        rope = {"rope_type": "axial", "rope_theta": self.rope_theta}
        return expressible(self, vision.vision_to_hf(self, "Step3p7Vision", rope_parameters=rope, **own))


def _inner(fields: Fields, width: int) -> int:
    """The width of MLPs, which transformers computes whatever the file says of it."""
    inner = int(width * fields.number("mlp_ratio", 8960 / 1536))
    fields.expect("intermediate_size", inner)
    return inner


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, p, p], of convolutions [out, in, 3, 3]."""
    D, std = config.hidden_size, config.initializer_range
    tree: Tree = vision.patch_leaves(config, biases=False) | layer_norm_leaves("first_norm", D, "embed")
    tree["embed_positions"] = embedding(config.side**2, D, std, axis="position")
    tree["layers"] = [vision.vision_layer(config, scale=config.layer_scale)] * config.num_hidden_layers
    for name, width, axes in (("conv", D, ("projection", "embed")), ("last_conv", 2 * D, ("embed", "projection"))):
        kernel = Leaf((2 * width, width, 3, 3), torch.float32, (*axes, "patch_row", "patch_column"), Normal(std))
        tree |= {name: kernel, f"{name}_bias": bias(2 * width, axes[0])}
    return tree


def in_memory_forms(config: Config, at: str = "") -> StoredNames:
    """{path: its place in transformers' module} of q, k and v. at: what names begin with there."""
    return separate_heads(config, f"{at}layers.", ".self_attn.")


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    at = "transformer.resblocks."
    names: StoredNames = {"patch_proj": "conv1.weight", "embed_positions": "positional_embedding"}
    for path, name in (("first_norm", "ln_pre"), ("conv", "vit_downsampler1"), ("last_conv", "vit_downsampler2")):
        names |= vision.weight_and_bias(path, name)
    names |= vision.layer_names(config, at, _LAYER)
    for i in range(config.num_hidden_layers):
        names |= {f"layers.{i}.{path}_scale": f"{at}{i}.ls_{n}.gamma" for n, path in ((1, "attention"), (2, "mlp"))}
        for ours, theirs in (("proj", "weight"), ("bias", "bias")):
            rows = {f"layers.{i}.attention.{name}_{ours}": config.hidden_size for name in "qkv"}
            names |= fuse(f"{at}{i}.attn.in_proj_{theirs}", rows)
    return names


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{"full": fp32 [B, S, H/2, 2]}: the first half of the angles turns with the column, the second with the row."""
    return qwen_tower.freqs_cis(config, positions[..., (1, 0)], length=length)


def batch_inputs(config: Config, positions: Tensor) -> dict[str, Tensor]:
    """The entries of the position table that each patch reads; see `position_table.table_inputs`."""
    return position_table.table_inputs(config, positions, resample=position_table.bilinear, placed=0)


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches and their positions, normalized."""
    placed = position_table.table_positions(params["embed_positions"], inputs)
    x = vision.embed_patches(params, inputs, config=config) + placed
    return layer_norm(x, params["first_norm"], params["first_norm_bias"], eps=config.layer_norm_eps)


def windows(positions: Tensor, segment_ids: Tensor) -> Tensor:
    """The (row, slot) of the patches that each feature reads: int64 [features, 9, 9, 2], (-1, -1) outside of the image.

    Those of the 9 results of the first convolution that the second one reads, each made of 9 patches. Features are
    those of image after image, row by row. positions [B, S, 4] and segment_ids [B, S]: those of
    `fnmodels.inputs.patch_rows`, whose order is needed. Reads values: not for use in transforms.
    """
    begins = (segment_ids > 0) & (positions[..., :2] % STRIDE == 0).all(-1)
    row, slot = (one[:, None, None] for one in begins.nonzero().unbind(-1))
    at, size = positions[row, slot].chunk(2, -1)
    steps = torch.cartesian_prod(*[torch.arange(-1, 2, device=positions.device)] * 2)
    middle = at // 2 + steps[:, None]
    patch = 2 * middle + steps
    inside = ((middle >= 0) & (2 * middle < size) & (patch >= 0) & (patch < size)).all(-1)
    offset = (patch[..., 0] - at[..., 0]) * size[..., 1] + patch[..., 1] - at[..., 1]
    places = torch.stack(torch.broadcast_tensors(row, slot + offset), -1)
    return places.where(inside[..., None], -1)


def downsampled(params: Tree, x: Tensor, places: Tensor) -> Tensor:
    """Features [1, features, 4 D] of hidden states x [rows, slots, D]; places: of `windows`.

    Both convolutions have a side of 3, a stride of 2, and zeros around the image.
    """
    inside = (places[..., :1] >= 0).to(x.dtype)
    patches = x[places[..., 0], places[..., 1]] * inside
    x = _convolved(params, "conv", patches) * inside[:, :, 4]  # of the middle patch: what is outside has no bias
    return _convolved(params, "last_conv", x)[None]


def _convolved(params: Tree, name: str, x: Tensor) -> Tensor:
    """[..., out] of x [..., 9, in], windows row by row."""
    kernel = params[name].permute(0, 2, 3, 1).flatten(1)
    return linear(x.flatten(-2), kernel, params[f"{name}_bias"])
