"""The vision tower of Llama 3.2 Vision (Meta, 2024): tiles of a picture in one sequence, then gated global layers.

Every tile has a class token, its patches, and padding up to a multiple of 8 tokens; a picture has as many tiles as the
model allows, the last ones empty. Padding and empty tiles see the picture and are seen by it, but not by each other:
the published weights were trained so. `hidden` returns the hidden states [B, S, D] after the last layer.

patches, positions = tile_rows(images, config)
x, tapped = fnmodels.hidden(params, *fnmodels.prepare(config, patches, positions=positions), config=config, taps=...)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.images import patches_of
from fnmodels.inputs.mask import Create, MaskLike, build_mask
from fnmodels.inputs.rules import Range, Rule, Tokens
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import (
    Leaf,
    Normal,
    attention_leaves,
    layer_leaves,
    layer_norm_leaves,
    norm,
    plain_mlp_leaves,
)
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import freqs_cis, kinds  # noqa: F401
from fnmodels.ops import look_up, plain_mlp, project_out, project_qkv
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree

TRAITS = Traits(heads=("none",), inputs="patches", causal=False)
_RENAMED = {"attention_heads": "num_attention_heads", "norm_eps": "layer_norm_eps"}
_EPS = 1e-5  # of the norms around the layers
_LAYER = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
_LAYER |= {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
_ALIGNED = 8
_ASPECTS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))


@dataclass(frozen=True)
class NotBothEmpty(Rule):
    """Every key of the same segment, but no pair of two tokens at position 1, which hold nothing of the picture."""

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return (q.segments == kv.segments) & (q.positions * kv.positions == 0)

    def covers(self, q: Range, kv: Range) -> bool:
        return q[1] == 0 or kv[1] == 0


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes. num_hidden_layers: with the `global_layers` last ones, which are gated.

    image_size: of a tile. aspects: (rows, columns) of tiles that a picture may have. read_layers: the layers whose
    inputs are features beside the output of the last one.
    """

    layer_norm_eps: float = 1e-5
    global_layers: int = 8
    max_tiles: int = 4
    aspects: tuple[tuple[int, int], ...] = _ASPECTS
    read_layers: tuple[int, ...] = (3, 7, 15, 23, 30)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.global_layers < self.num_hidden_layers:
            raise ConfigError(f"num_global_layers is {self.global_layers}; there must be global and other layers.")
        if not self.aspects or any(rows * columns > self.max_tiles for rows, columns in self.aspects):
            raise ConfigError(f"supported_aspect_ratios must name at most max_num_tiles {self.max_tiles} tiles each.")
        if any(not 0 <= layer < self.num_hidden_layers - self.global_layers for layer in self.read_layers):
            raise ConfigError(
                f"intermediate_layers_indices {list(self.read_layers)} must be of layers before global ones."
            )

    @property
    def tile_tokens(self) -> int:
        """The tokens of a tile: the class token, patches, and padding."""
        return -(-(self.side**2 + 1) // _ALIGNED) * _ALIGNED

    @property
    def features(self) -> int:
        """The width of what the text model's projection reads."""
        return self.hidden_size * (1 + len(self.read_layers))

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a `vision_config`; raises ConfigError or UnsupportedError with the field's name."""
        named = {name: new for name, new in _RENAMED.items() if name in values}
        fields = renamed(Fields(values, "config.json, vision_config"), named)
        sizes = (1280, 5120, 32, 16)
        usual = vision.vision_fields(fields, ("mllama_vision_model",), eps=1e-5, sizes=sizes, patch=14, image=448)
        beyond = fields.integer("num_global_layers", 8)
        config = Config(
            **usual | {"num_hidden_layers": usual["num_hidden_layers"] + beyond},
            global_layers=beyond,
            max_tiles=fields.integer("max_num_tiles", 4),
            aspects=_pairs(fields, "supported_aspect_ratios"),
            read_layers=_integers(fields, "intermediate_layers_indices", (3, 7, 15, 23, 30)),
        )
        fields.expect("vision_output_dim", config.features)
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> ConfigJson:
        """A `vision_config`."""
        fields: ConfigJson = {"num_hidden_layers": self.num_hidden_layers - self.global_layers, "layer_norm_eps": None}
        fields |= {"num_attention_heads": None, "attention_heads": self.num_attention_heads}
        fields |= {"norm_eps": self.layer_norm_eps, "num_global_layers": self.global_layers}
        fields |= {
            "max_num_tiles": self.max_tiles,
            "supported_aspect_ratios": [list(aspect) for aspect in self.aspects],
        }
        fields |= {"intermediate_layers_indices": list(self.read_layers), "vision_output_dim": self.features}
        return vision.vision_to_hf(self, "MllamaVision", **fields)


def _integers(fields: Fields, name: str, default: Sequence[int]) -> tuple[int, ...]:
    integers = fields.take(name, None)
    integers = list(default) if integers is None else integers
    if not isinstance(integers, list) or not all(
        type(integer) is int and 0 <= integer < 1 << 16 for integer in integers
    ):
        raise ConfigError(f"{fields.where}: {name!r} is {shown(integers)}; it must be a list of integers.")
    return tuple(integers)


def _pairs(fields: Fields, name: str) -> tuple[tuple[int, int], ...]:
    pairs = fields.take(name, None)
    pairs = [list(aspect) for aspect in _ASPECTS] if pairs is None else pairs
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n > 0 for n in pair) for pair in pairs
    ):
        raise ConfigError(f"{fields.where}: {name!r} is {shown(pairs)}; it must be a list of [rows, columns] of tiles.")
    return tuple((rows, columns) for rows, columns in pairs)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; tables have a row for every aspect, from 1."""
    D, heads, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    rows, places = len(config.aspects) + 1, config.side**2 + 1

    def table(width: int) -> Leaf:
        return Leaf((rows, config.max_tiles * width), torch.float32, ("position", "one"), Normal(std), decay=False)

    attention = attention_leaves(D, heads, heads, config.head_dim, std=std)
    mlp = plain_mlp_leaves(D, config.intermediate_size, std=std)
    layer: Tree = layer_leaves(D, attention, mlp, norm_bias=True)
    gated = layer | {"attention_gate": norm(1, "one", 0.785), "mlp_gate": norm(1, "one", 0.785)}
    first = gated | layer_norm_leaves("entry_norm", D, "embed")
    layers = [layer] * (config.num_hidden_layers - config.global_layers)
    layers += [first] + [gated] * (config.global_layers - 1)
    return {
        **vision.patch_leaves(config, biases=False),
        "class_token": vision.vector(D, std),
        "embed_positions": vision.vector(D, std, places, axis="position"),
        "tile_positions": table(places * D),
        "tile_gate": norm(1, "one", 0.0),
        "tiles_before": table(D),
        "before_gate": norm(1, "one", 0.0),
        "tiles_after": table(D),
        "after_gate": norm(1, "one", 0.0),
        **layer_norm_leaves("first_norm", D, "embed"),
        "layers": layers,
    }


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}, without the prefix of the model that it is part of."""
    places = "gated_positional_embedding"
    names: dict[str, str] = {"patch_proj": "patch_embedding.weight", "class_token": "class_embedding"}
    names |= {"embed_positions": f"{places}.embedding", "tile_gate": f"{places}.gate"}
    names |= {"tile_positions": f"{places}.tile_embedding.weight"}
    for where, name in (("before", "pre"), ("after", "post")):
        names[f"tiles_{where}"] = f"{name}_tile_positional_embedding.embedding.weight"
        names[f"{where}_gate"] = f"{name}_tile_positional_embedding.gate"
    names |= vision.weight_and_bias("first_norm", "layernorm_pre")
    first = config.num_hidden_layers - config.global_layers
    names |= vision.weight_and_bias(f"layers.{first}.entry_norm", "layernorm_post")
    for i in range(config.num_hidden_layers):
        at = f"global_transformer.layers.{i - first}" if i >= first else f"transformer.layers.{i}"
        for path, name in _LAYER.items():
            names |= vision.weight_and_bias(f"layers.{i}.{path}", f"{at}.{name}")
        names |= {f"layers.{i}.attention.{n}_proj": f"{at}.self_attn.{n}_proj.weight" for n in "qkvo"}
        if i >= first:
            names |= {f"layers.{i}.{n}_gate": f"{at}.gate_{t}" for n, t in (("attention", "attn"), ("mlp", "ffn"))}
    return dict(names)


def tile_rows(images: Sequence[Tensor], config: Config) -> tuple[Tensor, Tensor]:
    """(patches [images, tokens, C p p], positions [images, tokens, 4]) of images [C, rows * side, columns * side].

    side: `config.image_size`, of a tile. positions: (place in the tile, -1 for the class token; tile; rows and columns
    of tiles). ValueError for an image that is not one of `config.aspects`.
    """
    tokens, patch = config.tile_tokens, config.patch_size
    made, positions = [], []
    for image in images:
        aspect = aspect_of(image, config)
        cells = patches_of(image, patch)
        tiles = cells.unflatten(1, (aspect[1], -1)).unflatten(0, (aspect[0], -1)).transpose(1, 2).flatten(2, 3)
        row = image.new_zeros(config.max_tiles, tokens, cells.shape[-1])
        row[: aspect[0] * aspect[1], 1 : 1 + config.side**2] = tiles.flatten(0, 1)
        at = torch.tensor((0, 0, *aspect), device=image.device).expand(config.max_tiles, tokens, 4).clone()
        at[..., 0] = torch.arange(tokens, device=image.device) - 1
        at[..., 1] = torch.arange(config.max_tiles, device=image.device)[:, None]
        made.append(row.flatten(0, 1))
        positions.append(at.flatten(0, 1))
    return torch.stack(made), torch.stack(positions)


def aspect_of(image: Tensor, config: Config) -> tuple[int, int]:
    """(rows, columns) of the tiles of an image [C, H, W]. ValueError for one that is not one of `config.aspects`."""
    side, shape = config.image_size, tuple(image.shape)
    aspect = (shape[1] // side, shape[2] // side) if len(shape) == 3 else (0, 0)
    if shape != (config.num_channels, aspect[0] * side, aspect[1] * side) or aspect not in config.aspects:
        raise ValueError(
            f"An image is floats [{config.num_channels}, H, W] of whole tiles of {side} pixels a side, (rows, "
            f"columns) one of {', '.join(map(str, config.aspects))}, not {list(shape)}."
        )
    return aspect


def shows_picture(config: Config, positions: Tensor) -> Tensor:
    """bool [B, S]: whether tokens at positions [B, S, 4] are of the picture, not padding and not of an empty tile."""
    place, tile, rows, columns = positions.unbind(-1)
    return (place < config.side**2) & (tile < rows * columns)


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{"full": mask}: every token sees its picture, and those of the picture see padding and empty tiles too."""
    empty = (~shows_picture(config, positions)).long()
    return {"full": build_mask(NotBothEmpty(), empty, segment_ids, create=create)}


def _of_tiles(table: Tensor, positions: Tensor, config: Config, place: Tensor | None = None) -> Tensor:
    """[B, S, D]: the entries of a table of tiles, or of places in tiles, for tokens at positions [B, S, 4]."""
    known = torch.tensor(config.aspects, device=positions.device)
    aspect = 1 + (positions[..., None, 2:] == known).all(-1).long().argmax(-1)
    index = aspect * config.max_tiles + positions[..., 1]
    if place is not None:
        index = index * (config.side**2 + 1) + place
    return look_up(table.reshape(-1, config.hidden_size), index, "tiles")


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches and class tokens, their places in the tile and the tile's in the picture; padding is 0."""
    positions = inputs["positions"]
    row, side = positions[..., 0], config.side**2
    place = (row + 1).clamp(max=side)
    before = _of_tiles(params["tiles_before"], positions, config) * params["before_gate"].tanh()
    x = vision.embed_patches(params, inputs, config=config)
    x = x + before.where((row >= 0)[..., None], 0)
    gate = params["tile_gate"].tanh()
    x = x + (1 - gate) * look_up(params["embed_positions"], place, "places")
    x = x + gate * _of_tiles(params["tile_positions"], positions, config, place)
    x = layer_norm(x, params["first_norm"], params["first_norm_bias"], eps=_EPS)
    return x.where((row < side)[..., None], 0)


def shared(params: Tree, inputs: Any, /, *, config: Config) -> dict[str, Tensor]:
    """{"tiles_after" [B, S, D]}: what the first global layer adds to every token of a tile."""
    after = _of_tiles(params["tiles_after"], inputs["positions"], config)
    return {"tiles_after": after * params["after_gate"].tanh()}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.layer_norm_eps, layer["attention"]
    if "entry_norm" in layer:
        after: Tensor = ctx.shared("tiles_after")
        x = layer_norm(x, layer["entry_norm"], layer["entry_norm_bias"], eps=_EPS) + after
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5))
    gates = [layer[f"{n}_gate"].tanh() if "mlp_gate" in layer else 1 for n in ("attention", "mlp")]
    x = ctx.tap("middle", x + ctx.tap("attention", gates[0] * mixed))
    normed = layer_norm(x, layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"], eps=eps)
    return x + ctx.tap("mlp", gates[1] * plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The hidden states, unchanged."""
    return x
