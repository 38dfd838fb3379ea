"""Common parts of the text towers of CLIP and SigLIP: Config fields, leaves, names and the embedding.

Their layers are `vision.block`.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.documents import Documents
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.ops.embedding import embed_tokens, look_up
from fnmodels.ops.mlp import ACTIVATIONS
from fnmodels.tree import Tree

from .config_json import LAYERS_LIMIT, Fields
from .decoder import check_sizes, expressible
from .spec import embedding
from .vision import last_norm, layer_names, vision_layer, weight_and_bias

CLIP_LAYER = {
    "input_layernorm": "layer_norm1",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.out_proj",
    "post_attention_layernorm": "layer_norm2",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NAMES = (*_SIZES, "max_position_embeddings", "hidden_act", "layer_norm_eps", "initializer_range")


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Sizes and switches. eos_token_id: of the token whose hidden state stands for a text in CLIP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    projection: int = 0  # of the text's features; 0: none
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    eos_token_id: int = 49407
    head: str = "none"
    tie_word_embeddings: bool = False
    # kept for saving only
    model_type: str = field(default="", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(self, *_SIZES, "max_position_embeddings")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}."
            )

    @property
    def head_dim(self) -> int:
        """The width of a head of queries, keys and values."""
        return self.hidden_size // self.num_attention_heads

    @property
    def mlp_act(self) -> str:
        """The activation of the MLP."""
        return self.hidden_act


def text_fields(
    fields: Fields, model_types: tuple[str, ...], sizes: tuple[int, int, int, int, int, int], act: str, eps: float
) -> dict[str, Any]:
    """The fields of TextConfig except projection, from a config.json. sizes: the defaults of the first six fields."""
    fields.expect("is_encoder_decoder", False)
    fields.take("tie_word_embeddings", None)  # there is no head
    return {
        "model_type": fields.choice("model_type", model_types),
        **{name: fields.integer(name, size) for name, size in zip(_SIZES[:3], sizes, strict=False)},
        "num_hidden_layers": fields.integer("num_hidden_layers", sizes[3], high=LAYERS_LIMIT),
        "num_attention_heads": fields.integer("num_attention_heads", sizes[4]),
        "max_position_embeddings": fields.integer("max_position_embeddings", sizes[5]),
        "hidden_act": fields.choice("hidden_act", tuple(ACTIVATIONS), act),
        "layer_norm_eps": fields.number("layer_norm_eps", eps),
        "initializer_range": fields.number("initializer_range", 0.02, above=-1e-9),
        "eos_token_id": fields.integer("eos_token_id", 49407, low=0),
    }


def text_to_hf(config: Any, architecture: str, **rest: Any) -> ConfigJson:
    """A config.json: the fields of TextConfig, those kept for saving, and `rest` of the family."""
    out = {name: json.loads(value) for name, value in config.extra} | {name: getattr(config, name) for name in _NAMES}
    out |= {"model_type": config.model_type, "architectures": [architecture], "eos_token_id": config.eos_token_id}
    return expressible(config, out | rest)


def text_spec(config: TextConfig) -> dict[str, Any]:
    """The parameters without those of the features: weights [out, in]."""
    D, std = config.hidden_size, config.initializer_range
    return {
        "embed_tokens": embedding(config.vocab_size, D, std),
        "embed_positions": embedding(config.max_position_embeddings, D, std, axis="position"),
        "layers": [vision_layer(config) for _ in range(config.num_hidden_layers)],
        **last_norm(config),
    }


def text_names(config: TextConfig) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = {f"embed_{n}s": f"text_model.embeddings.{n}_embedding.weight" for n in ("token", "position")}
    names |= layer_names(config, "text_model.encoder.layers.", CLIP_LAYER)
    return names | weight_and_bias("norm", "text_model.final_layer_norm")


def embed(params: Tree, inputs: Any, /, *, config: TextConfig) -> Tensor:
    """x [B, S, D]: token and position embeddings; bare tokens have no positions and raise."""
    if not isinstance(inputs, dict):
        raise ValueError(
            "A text tower needs the dict of inputs that fnmodels.prepare makes, with tokens and positions."
        )
    placed = look_up(params["embed_positions"], inputs["positions"], "positions")
    return embed_tokens(params["embed_tokens"], inputs) + placed


def first_highest(values: Tensor, documents: Documents) -> Tensor:
    """int64 [N]: the index in its row of each document's token with the highest value, the first of several.

    values: integers of at least 0, [B, S].
    """
    count, width, number = len(documents), values.shape[1], documents.number.flatten()
    keys = (values * width + (width - 1 - documents.rank)).flatten()
    best = keys.new_full((count + 1,), -1).scatter_reduce(0, number, keys, "amax")
    index = torch.arange(width, device=values.device).expand_as(values).flatten()
    chosen = index.where(keys == best[number], -1)
    return index.new_full((count + 1,), -1).scatter_reduce(0, number, chosen, "amax")[:count]
