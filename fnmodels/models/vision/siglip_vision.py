"""SigLIP's vision tower (arXiv 2303.15343) and SigLIP 2's with images of any shape (NaFlex, arXiv 2502.14786).

Idefics 3's and SmolVLM's has positions by fractions of the image, and no head. PaddleOCR-VL's (arXiv 2510.14528) has
rotary positions beside the learned ones, and no head that is read.
`forward` returns the hidden states [B, S, D] after the last norm, `features` one row per image: attention of a learned
query to the image's patches, and an MLP.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.documents import Documents
from fnmodels.models.common import text_tower, vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Leaf, attention_leaves, embedding, layer_norm_leaves, plain_mlp_leaves, weight
from fnmodels.models.common.storage import Stored, fuse
from fnmodels.models.common.vision import attention_masks, block, kinds, unembed  # noqa: F401
from fnmodels.models.vision.common import position_table, qwen_tower
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import plain_mlp
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree
from fnmodels.tree import map as map_tree

_BUCKETED = ("idefics3_vision", "smolvlm_vision")
_ROTARY = "paddleocr_vl_vision"
MODEL_TYPES = ("siglip_vision_model", "siglip2_vision_model", *_BUCKETED, _ROTARY)
TRAITS = Traits(
    inputs="patches",
    causal=False,
    leftovers=(r"(vision_model\.)?embeddings\.position_ids",),
    in_memory={r"^vision_model\.": ""},
)


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches. naflex: SigLIP 2's: patches [p, p, C], a table that is resampled with antialiasing.

    bucketed: Idefics 3's: a patch has the entry of the table's grid in which it begins. rope_theta: PaddleOCR-VL's, of
    rotary positions by row and column; 0: nothing rotates. merge: the side of the cells of patches that become one
    feature there.
    """

    hidden_act: str = "gelu_pytorch_tanh"
    vision_use_head: bool = True
    naflex: bool = False
    bucketed: bool = False
    rope_theta: float = 0.0
    merge: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_theta and self.head_dim % 4:
            raise ConfigError(f"The heads are {self.head_dim} wide, but must be a multiple of 4, for rows and columns.")

    @property
    def channels_last(self) -> bool:
        """Whether the pixels of a patch are [p, p, C] and not [C, p, p]."""
        return self.naflex

    @property
    def special_tokens(self) -> int:
        """0: every token of an image is a patch."""
        return 0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        bucketed, rotary = values.get("model_type") in _BUCKETED, values.get("model_type") == _ROTARY
        sizes, patch = ((1152, 3072, 12, 16), 32) if bucketed else ((768, 3072, 12, 12), 16)
        sizes, patch, image = ((1152, 4304, 27, 16), 14, 384) if rotary else (sizes, patch, 224)
        act = "gelu_pytorch_tanh"
        usual = vision.vision_fields(
            fields, MODEL_TYPES, eps=1e-6, activation=act, sizes=sizes, patch=patch, image=image
        )
        naflex = usual["model_type"] == "siglip2_vision_model"
        if naflex:
            count = fields.integer("num_patches", 256)
            if math.isqrt(count) ** 2 != count:
                raise ConfigError(f"{fields.where}: 'num_patches' is {count}, but must be a square.")
            usual["image_size"] = math.isqrt(count) * usual["patch_size"]
        head = not bucketed and not rotary and fields.boolean("vision_use_head", True)
        config = Config(**usual, vision_use_head=head, naflex=naflex, bucketed=bucketed, **_turns(fields, rotary))
        # of the processors of SmolVLM and PaddleOCR-VL
        ignored = ("size", "max_image_size") if bucketed else ("temporal_patch_size", "tokens_per_second") * rotary
        object.__setattr__(config, "extra", fields.finish(ignored))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        if self.bucketed:
            return vision.vision_to_hf(self, "SmolVLMVision" if "smol" in self.model_type else "Idefics3Vision")
        if self.rope_theta:
            own = {"rope_parameters": {"rope_type": "axial", "rope_theta": self.rope_theta}}
            return vision.vision_to_hf(self, "PaddleOCRVision", spatial_merge_size=self.merge, **own)
        if not self.naflex:
            return vision.vision_to_hf(self, "SiglipVision", "vision_use_head")
        sizes = {"num_patches": self.side**2, "image_size": None}
        return vision.vision_to_hf(self, "Siglip2Vision", "vision_use_head", **sizes)


def _turns(fields: Fields, rotary: bool) -> dict[str, Any]:
    """The Config fields of rotary positions, and of the cells of PaddleOCR-VL."""
    if not rotary:
        return {}
    rope = Fields(fields.take("rope_parameters", {}), f"{fields.where}, rope_parameters")
    rope.expect("rope_type", "axial", "default")
    return {"rope_theta": rope.number("rope_theta", 1e4), "merge": fields.integer("spatial_merge_size", 2)}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, p, p], with naflex [D, p p C]."""
    D, heads, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    tree: Tree = vision.patch_leaves(config)
    if config.naflex:
        tree["patch_proj"] = weight((D, config.num_channels * config.patch_size**2), ("embed", "pixel"), std)
    tree["embed_positions"] = embedding(config.side**2, D, std, axis="position")
    tree["layers"] = [vision.vision_layer(config) for _ in range(config.num_hidden_layers)]
    tree |= vision.last_norm(config)
    if config.vision_use_head:
        tree["pooler"] = {
            "probe": vision.vector(D, std, 1, 1),
            "attention": attention_leaves(D, heads, heads, config.head_dim, std=std, qkv_bias=True, o_bias=True),
            **layer_norm_leaves("norm", D, "embed"),
            "mlp": plain_mlp_leaves(D, config.intermediate_size, std=std),
        }
        tree["pooler"] = map_tree(_outside_of_layers, tree["pooler"])
    return tree


def _outside_of_layers(leaf: Leaf) -> Leaf:
    """The leaf with axes of its own: tensor parallelism shards heads and neurons of layers alone."""
    return replace(leaf, axes=tuple(axis if axis == "embed" else f"pooler_{axis}" for axis in leaf.axes))


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}."""
    at, D = "" if config.bucketed else "vision_model.", config.hidden_size
    names: dict[str, Stored] = {"embed_positions": f"{at}embeddings.position_embedding.weight"}
    names |= vision.weight_and_bias("patch_proj", f"{at}embeddings.patch_embedding")
    names |= vision.layer_names(config, f"{at}encoder.layers.", text_tower.CLIP_LAYER)
    names |= vision.weight_and_bias("norm", f"{at}post_layernorm")
    if config.vision_use_head:
        for ours, theirs in (("proj", "weight"), ("bias", "bias")):
            rows = {f"pooler.attention.{name}_{ours}": D for name in "qkv"}
            names |= fuse(f"{at}head.attention.in_proj_{theirs}", rows)
        parts = {"attention.o_proj": "attention.out_proj", "norm": "layernorm"}
        for path, name in (parts | {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}).items():
            names |= vision.weight_and_bias(f"pooler.{path}", f"{at}head.{name}")
        names["pooler.probe"] = f"{at}head.probe"
    return names


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{"full": fp32 [B, S, R, 2]}: by row, then by column, or nothing rotates."""
    return (qwen_tower if config.rope_theta else vision).freqs_cis(config, positions, length=length)


def batch_inputs(config: Config, positions: Tensor) -> dict[str, Tensor]:
    """The entries of the position table that each patch reads; see `position_table.table_inputs`."""
    resample = position_table.bilinear_antialias if config.naflex else position_table.bicubic
    resample = position_table.by_fraction if config.bucketed else resample
    resample = position_table.bilinear if config.rope_theta else resample
    return position_table.table_inputs(config, positions, resample=resample, placed=0)


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches and their positions."""
    placed = position_table.table_positions(params["embed_positions"], inputs)
    return vision.embed_patches(params, inputs, config=config) + placed


def features(params: Tree, hidden: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """One row per image, [N, D]. hidden: what `forward` returns; documents: the images."""
    pooler, eps = params["pooler"], config.layer_norm_eps
    x = attend_per_image(pooler["attention"], pooler["probe"].flatten(), hidden, documents, config.head_dim)
    normed = layer_norm(x, pooler["norm"], pooler["norm_bias"], eps=eps)
    return x + plain_mlp(pooler["mlp"], normed, activation=config.hidden_act)


def attend_per_image(weights: Tree, probe: Tensor, x: Tensor, documents: Documents, head_dim: int) -> Tensor:
    """Attention [N, D] of a query, probe [D], to the tokens of each image in x [B, S, D]: a softmax per image, fp32."""
    count, number = len(documents), documents.number.flatten()
    x = x.where((documents.number < count)[..., None], 0).flatten(0, 1)
    q, k, v = (
        linear(of, weights[f"{name}_proj"], weights[f"{name}_bias"]).unflatten(-1, (-1, head_dim))
        for name, of in (("q", probe[None]), ("k", x), ("v", x))
    )
    scores = upcast((q * k).sum(-1)) * head_dim**-0.5  # [B S, heads]
    most = scores.detach().new_full((count + 1, scores.shape[1]), -torch.inf)
    most = most.scatter_reduce(0, number[:, None].expand_as(scores), scores.detach(), "amax")
    powers = (scores - most[number]).exp()
    total = powers.new_zeros(count + 1, powers.shape[1]).index_add(0, number, powers)
    mixed = powers.new_zeros(count + 1, *v.shape[1:]).index_add(0, number, powers[..., None] * v)
    mixed = (mixed[:count] / total[:count, :, None]).to(x.dtype).flatten(1)
    return linear(mixed, weights["o_proj"], weights["o_bias"])
