"""Common parts of vision towers: Config fields, leaves, the embedding of patches, and the block.

A row holds the tokens of one or several images, which `segment_ids` [B, S] tell apart. A token is a patch, whose input
is its pixels, or a special token (class token, registers), whose input is not read. `positions` [B, S, 4] are (row,
column, rows, columns): where a patch is in its image, and how many patches the image has. The k-th of n special tokens
is at row and column k - n.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.documents import Documents, pool
from fnmodels.inputs.mask import Create, MaskLike, build_mask
from fnmodels.inputs.rules import Everything
from fnmodels.inputs.segments import text_order
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.ops.embedding import look_up
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp, plain_mlp
from fnmodels.ops.norm import layer_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import apply_rotary, apply_rotary_interleaved, no_rotation
from fnmodels.tree import Tree, flatten

from .config_json import LAYERS_LIMIT, Fields
from .context import Context, with_context
from .decoder import check_sizes, expressible
from .heads import check_problem, problem_field, problem_to_hf
from .spec import (
    Leaf,
    Normal,
    attention_leaves,
    bias,
    gated_mlp_leaves,
    layer_leaves,
    layer_norm_leaves,
    norm,
    plain_mlp_leaves,
    weight,
)

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_IMAGE = ("patch_size", "image_size", "num_channels")


class TowerConfig(Protocol):
    """The fields that leaves of layers are made from, of vision and of text towers."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def initializer_range(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The Config fields of every tower. image_size: of the square images that a learned position table is made for."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    image_size: int = 224
    num_channels: int = 3
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    head: str = "none"  # or "classification": logits of `num_labels` labels for each image
    num_labels: int = 0
    problem_type: str = ""
    # kept for saving only
    model_type: str = field(default="", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(self, *_SIZES, *_IMAGE)
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}."
            )
        check_problem(self)

    @property
    def head_dim(self) -> int:
        """The width of a head of queries, keys and values."""
        return self.hidden_size // self.num_attention_heads

    @property
    def mlp_act(self) -> str:
        """The activation of the MLP."""
        return self.hidden_act

    @property
    def side(self) -> int:
        """The rows and columns of the learned position table."""
        return self.image_size // self.patch_size

    @property
    def channels_last(self) -> bool:
        """Whether the pixels of a patch are [p, p, C] and not [C, p, p]."""
        return False

    @property
    def interleaved(self) -> bool:
        """Whether neighbors in a head rotate together, and not its halves."""
        return False

    @property
    def special_tokens(self) -> int:
        """The number of tokens before an image's patches, such as the class token."""
        return 1


def vision_fields(
    fields: Fields,
    model_types: Sequence[str],
    *,
    eps: float,
    activation: str = "gelu",
    sizes: tuple[int, int, int, int] = (768, 3072, 12, 12),
    patch: int = 16,
    image: int = 224,
    inner: Callable[[Fields, int], int] | None = None,
) -> dict[str, Any]:
    """The fields of VisionConfig except the head, from a config.json; keywords are the family's defaults.

    sizes: of the four fields in the order of VisionConfig. inner: (fields, hidden_size) -> intermediate_size where the
    file has no such field.
    """
    fields.expect("is_encoder_decoder", False)
    for name in ("vocab_size", "tie_word_embeddings"):  # in files of transformers 4; a tower has no tokens
        fields.take(name, None)
    model_type = fields.choice("model_type", model_types)
    hidden = fields.integer("hidden_size", sizes[0])
    return {
        "hidden_size": hidden,
        "intermediate_size": inner(fields, hidden) if inner else fields.integer("intermediate_size", sizes[1]),
        "num_hidden_layers": fields.integer("num_hidden_layers", sizes[2], high=LAYERS_LIMIT),
        "num_attention_heads": fields.integer("num_attention_heads", sizes[3]),
        "patch_size": _square(fields, "patch_size", patch),
        "image_size": _square(fields, "image_size", image),
        "num_channels": fields.integer("num_channels", 3),
        "hidden_act": fields.choice("hidden_act", tuple(ACTIVATIONS), activation),
        "layer_norm_eps": fields.number("layer_norm_eps", eps),
        "initializer_range": fields.number("initializer_range", 0.02, above=-1e-9),
        "model_type": model_type,
    }


def _square(fields: Fields, name: str, default: int) -> int:
    """A size that files may give as one number or as two equal ones."""
    value = fields.take(name, default)
    if isinstance(value, list | tuple):
        if len(value) != 2 or value[0] != value[1]:
            raise UnsupportedError(f"{fields.where}: {name!r} is {list(value)}; only squares are supported.")
        fields = Fields({name: value[0]}, fields.where)
    return fields.integer(name, default)


def head_of(fields: Fields, classes: str) -> dict[str, Any]:
    """The Config fields of the head: classes + "Model" or classes + "ForImageClassification"."""
    declared, known = fields.take("architectures", None), {f"{classes}Model": "none"}
    known[f"{classes}ForImageClassification"] = "classification"
    if declared is None:
        return {}
    if not isinstance(declared, list) or len(declared) != 1 or declared[0] not in known:
        raise UnsupportedError(f"{fields.where}: 'architectures' is {declared}; supported are {', '.join(known)}.")
    labels = fields.take("id2label", None)
    count = len(labels) if isinstance(labels, Mapping) else fields.integer("num_labels", 2)
    head = known[declared[0]]
    if head == "classification":
        fields.expect("num_labels", count)
    return {"head": head, "num_labels": count if head == "classification" else 0, **problem_field(fields, head)}


def kept_fields(fields: Fields, ignored: Sequence[str] = ()) -> tuple[tuple[str, str], ...]:
    """The entries of `extra`: those of `Fields.finish`, and the names of labels."""
    labels = fields.values.get("id2label")
    named = () if labels is None else (("id2label", json.dumps(labels, sort_keys=True)),)
    return fields.finish(ignored) + named


def vision_to_hf(config: Any, classes: str, *names: str, **rest: Any) -> ConfigJson:
    """A config.json: the fields of VisionConfig, those kept for saving, and `names` and `rest` of the family.

    A field of `rest` that is None is left out.
    """
    kept = {name: json.loads(value) for name, value in config.extra}
    labels = kept.pop("id2label", None) or {}
    out = {name: getattr(config, name) for name in (*_SIZES, *_IMAGE)} | kept
    out |= {name: getattr(config, name) for name in ("hidden_act", "layer_norm_eps", "initializer_range")}
    out |= {"model_type": config.model_type, "architectures": [f"{classes}Model"]}
    if config.head == "classification":
        if len(labels) != config.num_labels:
            labels = {str(i): f"LABEL_{i}" for i in range(config.num_labels)}
        out |= {"architectures": [f"{classes}ForImageClassification"], "id2label": labels}
        out["label2id"] = {name: int(i) for i, name in labels.items()}
        out |= problem_to_hf(config)
    out |= {name: getattr(config, name) for name in names} | rest
    return expressible(config, {name: value for name, value in out.items() if value is not None})


def vector(size: int, std: float, *lead: int, axis: str = "special") -> Leaf:
    """An embedding [*lead, size] as it is on disk: normal init, no weight decay."""
    return Leaf((*lead, size), torch.float32, (*(axis,) * len(lead), "embed"), Normal(std), decay=False)


def patch_leaves(config: VisionConfig, *, biases: bool = True) -> dict[str, Leaf]:
    """The embedding of patches: the weight of a convolution [D, C, p, p] and its bias."""
    p, D = config.patch_size, config.hidden_size
    axes = ("embed", "channel", "patch_row", "patch_column")
    leaf = Leaf((D, config.num_channels, p, p), torch.float32, axes, Normal(config.initializer_range))
    return {"patch_proj": leaf} | ({"patch_bias": bias(D, "embed")} if biases else {})


def vision_layer(
    config: TowerConfig,
    *,
    qkv_bias: bool = True,
    key_bias: bool = True,
    gated: bool = False,
    scale: float | None = None,
) -> Tree:
    """The parameters of a pre-norm layer with LayerNorms. scale: the initial layer scale, None: there is none."""
    D, heads, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    attention = attention_leaves(D, heads, heads, config.head_dim, std=std, qkv_bias=qkv_bias, o_bias=True)
    if not key_bias:
        attention.pop("k_bias", None)
    inner = config.intermediate_size
    mlp = gated_mlp_leaves(D, inner, std=std, biases=True) if gated else plain_mlp_leaves(D, inner, std=std)
    layer = layer_leaves(D, attention, mlp, norm_bias=True)
    scales = {} if scale is None else {name: norm(D, "embed", scale) for name in ("attention_scale", "mlp_scale")}
    return layer | scales


def head_leaves(config: VisionConfig, width: int) -> dict[str, Leaf]:
    """The classifier on features of this width, if the config has that head."""
    if config.head != "classification":
        return {}
    weights = weight((config.num_labels, width), ("label", "embed"), config.initializer_range)
    return {"classifier": weights, "classifier_bias": bias(config.num_labels, "label")}


def last_norm(config: TowerConfig) -> dict[str, Leaf]:
    """The LayerNorm after the layers."""
    return layer_norm_leaves("norm", config.hidden_size, "embed")


def layer_names(config: TowerConfig, layer: str, parts: Mapping[str, str]) -> dict[str, str]:
    """{path: name on disk} of weights and biases: parts {path in a layer: name in the layer}, layer its prefix."""
    found: dict[str, str] = {}
    for i in range(config.num_hidden_layers):
        for path, name in parts.items():
            found |= weight_and_bias(f"layers.{i}.{path}", f"{layer}{i}.{name}")
    return found


def scale_names(config: TowerConfig, layer: str) -> dict[str, str]:
    """{path: name on disk} of the layer scales of DINO's towers."""
    pairs = (("attention_scale", "layer_scale1"), ("mlp_scale", "layer_scale2"))
    every = range(config.num_hidden_layers)
    return {f"layers.{i}.{path}": f"{layer}{i}.{name}.lambda1" for i in every for path, name in pairs}


def weight_and_bias(path: str, name: str) -> dict[str, str]:
    """{path: name on disk} of a weight and its bias: x_proj and x_bias, or x and x_bias."""
    return {path: f"{name}.weight", f"{path.removesuffix('_proj')}_bias": f"{name}.bias"}


def of_spec(tree: Tree, names: Mapping[str, str]) -> dict[str, str]:
    """The names of those parameters that the tree has."""
    return {path: names[path] for path in flatten(tree)}


def kinds(config: TowerConfig) -> tuple[str, ...]:
    """Every layer is "full"."""
    return ("full",) * config.num_hidden_layers


def attention_masks(
    config: Any, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{"full": mask}: every token sees all tokens of its image. positions [B, S, 4]; segment_ids [B, S]."""
    if positions.ndim != 3 or positions.shape[-1] != 4:
        raise ValueError(
            "The positions of an image's tokens are (row, column, rows, columns), [B, S, 4], not "
            f"{list(positions.shape)}: fnmodels.inputs.patch_rows makes them with the patches."
        )
    return {"full": build_mask(Everything(), text_order(positions[..., :2], segment_ids), segment_ids, create=create)}


def freqs_cis(config: Any, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{"full": fp32 [B, S, 0, 2]}: nothing rotates."""
    return {"full": no_rotation(positions)}


def embed_patches(params: Tree, inputs: Any, *, config: Any) -> Tensor:
    """x [B, S, D] without positions: patches through their projection, and the rows of "special" for special tokens.

    inputs: those of `prepare`; "masked", bool [B, S], if given, says where `mask_token` replaces patches.
    """
    if not isinstance(inputs, Mapping):
        raise ValueError(
            "A vision tower needs the dict of inputs that fnmodels.prepare makes, with patches and positions."
        )
    weights = params["patch_proj"]
    flat = weights if weights.ndim == 2 else weights.flatten(1)  # of a convolution
    x = linear(inputs["tokens"].to(weights.dtype), flat, params.get("patch_bias"))
    if "masked" in inputs:
        x = torch.where(inputs["masked"][..., None], params["mask_token"].reshape(-1), x)
    names = [name for name in ("class_token", "register_tokens") if name in params]
    if not names:
        return x
    special = torch.cat([params[name].reshape(-1, config.hidden_size) for name in names])
    row = inputs["positions"][..., 0]
    chosen = look_up(special, (row + len(special)).clamp(0, len(special) - 1), "special tokens")
    return torch.where((row < 0)[..., None], chosen, x)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Any, kind: str, ctx: Context) -> Tensor:
    """One pre-norm layer: x [B, S, D] -> x."""
    eps, weights, mlp = config.layer_norm_eps, layer["attention"], layer["mlp"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    rotate = apply_rotary_interleaved if getattr(config, "interleaved", False) else apply_rotary
    q, k = rotate(q, freqs), rotate(k, freqs)
    mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5))
    scales = [layer.get(name) for name in ("attention_scale", "mlp_scale")]
    x = ctx.tap("middle", x + ctx.tap("attention", mixed if scales[0] is None else mixed * scales[0]))
    normed = layer_norm(x, layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"], eps=eps)
    feed = gated_mlp if "gate_proj" in mlp else plain_mlp
    y = feed(mlp, normed, activation=config.mlp_act, tap=ctx.shown)
    return x + ctx.tap("mlp", y if scales[1] is None else y * scales[1])


def unembed(params: Tree, x: Tensor, /, *, config: Any) -> Tensor:
    """The hidden states after the last LayerNorm, [B, S, D]."""
    return layer_norm(x, params["norm"], params["norm_bias"], eps=config.layer_norm_eps)


def classified(params: Tree, features: Tensor) -> Tensor:
    """Logits [N, labels] of features [N, width]."""
    return linear(features, params["classifier"], params["classifier_bias"])


def class_tokens(x: Tensor, documents: Documents) -> Tensor:
    """[N, D]: the hidden state of each image's first token. documents: those of `fnmodels.documents`."""
    return pool(x, documents, how="first")


def mean_of_patches(x: Tensor, documents: Documents, special: int) -> Tensor:
    """[N, D]: the mean of the hidden states of each image's tokens but the first `special` ones."""
    patches = documents.number.where(documents.rank >= special, len(documents))
    return pool(x, replace(documents, number=patches), how="mean")
