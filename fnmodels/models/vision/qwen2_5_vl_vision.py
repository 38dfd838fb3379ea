"""The vision tower of Qwen2.5-VL (arXiv 2502.13923): RMSNorms, a gated MLP, and attention within windows.

EXAONE 4.5's has fewer heads of keys and values.
All layers but those of `full_layers` attend within squares of patches, counted from the image's corner. `forward`
returns the hidden states [B, S, D] of the last layer, which have no norm. Images may have any size whose rows and
columns of patches are multiples of `merge`; see `common.qwen_tower` for the frames of a patch.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import attention_leaves, gated_mlp_leaves, layer_leaves
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.vision.common import qwen_tower
from fnmodels.models.vision.common.qwen_tower import freqs_cis, unembed  # noqa: F401
from fnmodels.ops import apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree

# Model types, and what the names of their classes begin with.
_CLASSES = {"qwen2_5_vl_vision": "Qwen2_5_VLVision", "exaone4_5_vision": "Exaone4_5_Vision"}
MODEL_TYPES = tuple(_CLASSES)
TRAITS = Traits(kinds=("full", "window"), inputs="patches", causal=False)
EPS = 1e-6  # of every norm, fixed in the reference

_LAYER = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
_LAYER |= {f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class Config(qwen_tower.QwenTowerConfig):
    """Sizes and switches. layer_norm_eps is not read.

    out_hidden_size: the text's width. window: the patches of a side of a window, a multiple of `merge`.
    tokens_per_second: of videos, in the text's positions. kv_heads: 0: as many as query heads.
    """

    out_hidden_size: int = 3584
    window: int = 8
    full_layers: tuple[int, ...] = ()
    tokens_per_second: int = 4
    kv_heads: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.window % self.merge:
            raise ConfigError(f"A window of {self.window} patches a side is no multiple of a cell of {self.merge}.")

    @property
    def num_key_value_heads(self) -> int:
        """The heads of keys and values."""
        return self.kv_heads or self.num_attention_heads

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return tuple("full" if i in self.full_layers else "window" for i in range(self.num_hidden_layers))

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields, usual = qwen_tower.tower_fields(
            Fields(values), MODEL_TYPES, sizes=(3584, 3420, 32, 16), patch=14, activation="silu"
        )
        size, patch = fields.integer("window_size", 112), usual["patch_size"]
        layers = qwen_tower.layer_list(fields, "fullatt_block_indexes", [7, 15, 23, 31])
        exaone = usual["model_type"] == "exaone4_5_vision"
        config = Config(
            **usual,
            kv_heads=fields.integer("num_key_value_heads", 8) if exaone else 0,
            **fields.plain(out_hidden_size=3584, tokens_per_second=4),
            # whole cells, as the reference rounds
            window=size // usual["merge"] // patch * usual["merge"],
            full_layers=tuple(sorted({i for i in layers if i < usual["num_hidden_layers"]})),
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own: ConfigJson = {"out_hidden_size": self.out_hidden_size, "window_size": self.window * self.patch_size}
        own |= {"fullatt_block_indexes": list(self.full_layers), "tokens_per_second": self.tokens_per_second}
        if self.model_type == "exaone4_5_vision":
            own |= {"num_key_value_heads": self.num_key_value_heads, "tokens_per_second": None}
        return qwen_tower.tower_to_hf(self, _CLASSES.get(self.model_type, "Qwen2_5_VLVision"), **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, T, p, p]."""
    D, heads, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    kv_heads = config.num_key_value_heads
    attention = attention_leaves(D, heads, kv_heads, config.head_dim, std=std, qkv_bias=True, o_bias=True)
    layer = layer_leaves(D, attention, gated_mlp_leaves(D, config.intermediate_size, std=std, biases=True))
    return {"patch_proj": qwen_tower.patch_leaf(config), "layers": [layer for _ in range(config.num_hidden_layers)]}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = {"patch_proj": "patch_embed.proj.weight"} | qwen_tower.layer_names(config, _LAYER)
    return vision.of_spec(spec(config), names)


def kinds(config: Config) -> tuple[str, ...]:
    """ "full" for layers that see the whole image, "window" for the others."""
    return config.layer_kinds


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}: every token sees all tokens of its image, or of its window. positions [B, S, 4]."""
    return qwen_tower.window_masks(config, positions, segment_ids, config.window, create=create)


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches."""
    return vision.embed_patches(params, inputs, config=config)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights = layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=EPS), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=EPS)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))
