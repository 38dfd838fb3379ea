"""The text of BLIP (arXiv 2201.12086): BERT's layers and head, causal, that attend to an image in every layer.

Layers read inputs["memory"], the hidden states of an image, where inputs["memory_mask"] lets a token see them:
`blip.image_memory` makes both. A token that sees no image passes cross attention and its norm unchanged, as in
transformers where a whole text has none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds, older  # noqa: F401
from fnmodels.models.common.decoder.older import no_freqs as freqs_cis  # noqa: F401
from fnmodels.models.common.encoder_storage import bert_names, encoder_names
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, embedding, layer_norm_leaves, plain_mlp_leaves, usual_attention, weight
from fnmodels.models.encoder_decoder.cross_attention import attend_to_memory, keys_of_memory
from fnmodels.models.encoder_decoder.cross_attention import optional_memory as shared  # noqa: F401
from fnmodels.ops import ACTIVATIONS, layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("blip_text_model",)
TRAITS = Traits(
    kinds=("full_nope",),
    heads=("lm",),
    dropout={},
    leftovers=(r"bert\.embeddings\.position_ids",),
    copies_saved=False,
)
_CLASS = "BlipTextLMHeadModel"
# What files may leave out.
_DEFAULTS: ConfigJson = {"vocab_size": 30524, "hidden_size": 768, "encoder_hidden_size": 768}
_DEFAULTS |= {"intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 8, "layer_norm_eps": 1e-12}
_NORMS = ("post_attention_layernorm", "post_cross_attention_layernorm", "post_feedforward_layernorm")
_HEAD = {"head.dense": "transform.dense", "head.norm": "transform.LayerNorm", "lm_head": "decoder"}


@dataclass(frozen=True)
class Config(older.PlacedConfig):
    """Sizes and switches. memory_size: the width of the tower's hidden states. end_token: the id that ends a text."""

    hidden_act: str = "gelu"
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 512
    layer_norm_eps: float = 1e-12
    memory_size: int = 768
    end_token: int = 102

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        given = {name: value for name, value in values.items() if value is not None}
        fields, usual = older.older_fields(
            {**_DEFAULTS, **given}, MODEL_TYPES, {}, positions=512, tied=True, activation="gelu"
        )
        if fields.take("architectures", [_CLASS]) != [_CLASS]:
            declared = shown(fields.values["architectures"])
            raise UnsupportedError(f"{fields.where}: 'architectures' has {declared}; only {_CLASS} is supported.")
        fields.expect("tie_word_embeddings", True)
        fields.expect("is_decoder", True)
        config = Config(
            **usual,
            memory_size=fields.integer("encoder_hidden_size"),
            end_token=fields.integer("sep_token_id", 102, low=0),
        )
        return decoder.finished(config, fields, ("projection_dim", "label_smoothing", "initializer_factor"))

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        own = {"encoder_hidden_size": self.memory_size, "sep_token_id": self.end_token, "is_decoder": True}
        return older.older_to_hf(self, _CLASS, {}, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std = config.hidden_size, config.initializer_range
    attention = usual_attention(config, qkv_bias=True, o_bias=True)
    read = {
        name: weight((D, config.memory_size), ("kv_heads", "embed"), std, unit=config.head_dim)
        for name in ("k_proj", "v_proj")
    }
    layer: Tree = {"attention": attention, "cross_attention": attention | read}
    layer["mlp"] = plain_mlp_leaves(D, config.intermediate_size, std=std)
    for name in _NORMS:
        layer |= layer_norm_leaves(name, D, "embed")
    tree: Tree = {"embed_tokens": embedding(config.vocab_size, D, std)}
    tree |= {"embed_positions": older.position_table(config)} | layer_norm_leaves("embed_norm", D, "embed")
    tree["layers"] = [layer] * config.num_hidden_layers
    tree["head"] = {"dense": weight((D, D), ("features", "embed"), std), "dense_bias": bias(D, "embed")}
    tree["head"] |= layer_norm_leaves("norm", D, "embed")
    if not config.tie_word_embeddings:
        tree["lm_head"] = weight((config.vocab_size, D), ("vocab", "embed"), std)
    return tree | {"lm_head_bias": bias(config.vocab_size, "vocab")}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = bert_names("bert.")
    crossed = {path: name for path, name in names.items() if path.startswith("attention.")}
    crossed["post_attention_layernorm"] = names["post_attention_layernorm"]
    for path, name in crossed.items():
        where = path.replace("attention", "cross_attention")
        names[where] = name.replace("}.attention.", "}.crossattention.")
    names |= {path: f"cls.predictions.{name}" for path, name in _HEAD.items()}
    return encoder_names(config, names | {"lm_head_bias": "cls.predictions.bias"})


def hf_copies(config: Config) -> dict[str, str]:
    """{name on disk: path of the parameter that it repeats}, beside the tied head."""
    return {"cls.predictions.decoder.bias": "lm_head_bias"}


def memory_keys(layer: Tree, memory: Tensor, /, *, config: Config) -> tuple[Tensor, Tensor]:
    """(k, v), each [B, K, N, H], of an image's hidden states [B, K, memory_size] for a cache."""
    return keys_of_memory(layer["cross_attention"], memory, head_dim=config.head_dim)


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: the norm of token (or given) embeddings plus learned positions, of zeros for padding."""
    x = decoder.without_padding(older.embed_placed(params, inputs, config=config), inputs)
    return _norm(params, x, "embed_norm", config)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, head = layer["attention"], {"head_dim": config.head_dim, "scale": config.head_dim**-0.5}
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=head["scale"]))
    x = _norm(layer, x + ctx.tap("attention", mixed), _NORMS[0], config)
    if (seen := ctx.shared("memory_mask")) is not None:
        read = attend_to_memory(layer["cross_attention"], x, ctx, **head)
        crossed = _norm(layer, x + ctx.tap("cross_attention", read), _NORMS[1], config)
        x = crossed.where(seen.any(-1)[:, 0, :, None], x)
    x = ctx.tap("middle", x)
    fed = plain_mlp(layer["mlp"], x, activation=config.hidden_act, tap=ctx.tap)
    return _norm(layer, x + ctx.tap("mlp", fed), _NORMS[2], config)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The head's dense layer, activation and norm, and the tied projection: logits [B, S, V]."""
    weights = params["head"]
    x = elementwise(ACTIVATIONS[config.hidden_act], linear(x, weights["dense"], weights["dense_bias"]))
    return decoder.project(params, _norm(weights, x, "norm", config), config)


def _norm(owner: Mapping[str, Any], x: Tensor, name: str, config: Config) -> Tensor:
    return layer_norm(x, owner[name], owner[f"{name}_bias"], eps=config.layer_norm_eps)
