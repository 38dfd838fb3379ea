"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"), and GPT (2018, openai-gpt).

A pre-norm decoder with LayerNorms, learned position embeddings, an MLP without a gate and a tied head. GPT has its
norms after the sublayers, and none at the end. On disk weights are [in, out] ("Conv1D") with q, k and v fused; here
they are [out, in] and separate, as in every family.
"""

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import older
from fnmodels.models.common.decoder.older import embed_placed as embed  # noqa: F401
from fnmodels.models.common.dropout import dropout_to_hf
from fnmodels.models.common.family import Traits
from fnmodels.models.common.heads import check_head, decoder_head_to_hf, with_head
from fnmodels.models.common.spec import attention_leaves, decoder_leaves, layer_leaves, plain_mlp_leaves, weight
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.ops import ACTIVATIONS, layer_norm, no_rotation, plain_mlp
from fnmodels.ops.dropout import Dropout
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.tree import Tree

MODEL_TYPES = ("gpt2", "gpt-sw3", "openai-gpt")
TRAITS = Traits(
    dropout={"attn_pdrop": ("weights",), "resid_pdrop": ("attention", "mlp"), "embd_pdrop": ("embedding",)},
    dropout_defaults={"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    # mask buffers in older files, and GPT's numbers of positions
    leftovers=(r"transformer\.h\.\d+\.attn\.(masked_)?bias", r"(transformer\.)?position_ids"),
)

# The activations of GPT by its names.
_GPT_ACTS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}
_SCALES = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx")


@dataclass(frozen=True)
class Config:
    """Sizes and switches. A position of `max_position_embeddings` or more is an error."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 1024
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    hidden_act: str = "gelu_new"
    scale_attn_weights: bool = True  # scores times 1 / sqrt(head_dim)
    scale_attn_by_inverse_layer_idx: bool = False  # and times 1 / (1 + layer index)
    post_norm: bool = False
    initializer_range: float = 0.02
    dropout: Dropout = Dropout()  # noqa: RUF009 - frozen
    head: str = "lm"  # or "classification", see `common.heads`
    num_labels: int = 0
    problem_type: str = ""
    # kept for saving only
    model_type: str = field(default="gpt2", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_head(self)
        if self.post_norm and (self.scale_attn_by_inverse_layer_idx or not self.scale_attn_weights):
            raise ConfigError("Scores of a model with post_norm are scaled by 1 / sqrt(head_dim) alone.")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"n_embd {self.hidden_size} is not a multiple of n_head {self.num_attention_heads}, "
                "so it cannot be split into heads."
            )

    @property
    def head_dim(self) -> int:
        """The width of a head of queries, keys and values."""
        return self.hidden_size // self.num_attention_heads

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        first = model_type == "openai-gpt"
        if first:
            act = fields.choice("afn", tuple(_GPT_ACTS), "gelu")
            fields = Fields({**fields.values, "activation_function": _GPT_ACTS[act], "afn": None}, fields.where)
            for name in _SCALES:
                fields.expect(name, name == "scale_attn_weights")
            fields.expect("n_inner", 4 * _size(fields, "n_embd"))
        for name in ("add_cross_attention", "is_encoder_decoder"):
            fields.expect(name, False)
        hidden = _size(fields, "n_embd")
        config = Config(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("n_inner", 4 * hidden),
            num_hidden_layers=_size(fields, "n_layer", high=LAYERS_LIMIT),
            num_attention_heads=_size(fields, "n_head"),
            max_position_embeddings=_size(fields, "n_positions", 512 if first else 1024),
            layer_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
            **fields.plain(tie_word_embeddings=True, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
            hidden_act=fields.choice("activation_function", tuple(ACTIVATIONS), "gelu_new"),
            initializer_range=fields.number("initializer_range", 0.02, above=-1e-9),
            post_norm=first,
            model_type=model_type,
        )
        # Scores and softmax in fp32, as they always are here.
        upcast = (("reorder_and_upcast_attn", "true"),) * fields.boolean("reorder_and_upcast_attn", False)
        return with_head(config, fields, fields.finish(older.UNUSED) + upcast)

    def to_hf(self) -> ConfigJson:
        """A config.json under GPT-2's own names."""
        kept = {name: json.loads(value) for name, value in self.extra}
        if self.post_norm:
            kept |= decoder_head_to_hf(self, "OpenAIGPTLMHeadModel", kept) | dropout_to_hf(self, kept)
            names: tuple[str, ...] = ("vocab_size", "tie_word_embeddings", "initializer_range")
            theirs = {act: name for name, act in _GPT_ACTS.items()}
            kept |= {"model_type": self.model_type, "afn": theirs.get(self.hidden_act, self.hidden_act)}
            sizes = [name for name in older.GPT_NAMES if name not in ("n_inner", "activation_function")]
            return decoder.expressible(
                self, kept | {name: getattr(self, older.GPT_NAMES.get(name, name)) for name in (*names, *sizes)}
            )
        kept |= (
            decoder_head_to_hf(self, "GPT2LMHeadModel", kept)
            | dropout_to_hf(self, kept)
            | {"model_type": self.model_type}
        )
        names = ("vocab_size", "tie_word_embeddings", "initializer_range", *_SCALES)
        return kept | {name: getattr(self, older.GPT_NAMES.get(name, name)) for name in (*names, *older.GPT_NAMES)}


def _size(fields: Fields, own: str, default: int | None = None, high: int = 1 << 31) -> int:
    """A size under GPT-2's name or under the common one, which transformers reads too."""
    usual = older.GPT_NAMES[own]
    given = [name for name in (own, usual) if fields.take(name, None) is not None] or [own]
    first, *others = [fields.integer(name, default, high=high) for name in given]
    if others not in ([], [first]):
        raise ConfigError(f"{fields.where}: {own!r} is {first} and {usual!r} is {others[0]}, but they are one size.")
    return first


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. Output projections have a smaller init: the residual stream sums them."""
    D, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
    heads, ends = config.num_attention_heads, std / math.sqrt(2 * config.num_hidden_layers)
    attention = attention_leaves(D, heads, heads, config.head_dim, std=std, qkv_bias=True, o_bias=True)
    attention["o_proj"] = weight((D, D), ("embed", "heads"), ends, unit=config.head_dim)
    mlp = plain_mlp_leaves(D, inner, std=std) | {"down_proj": weight((D, inner), ("embed", "mlp"), ends)}
    layers = [layer_leaves(D, attention, mlp, norm_bias=True) for _ in range(config.num_hidden_layers)]
    tree = decoder_leaves(config, layers, norm_bias=True)
    positions = replace(tree["embed_tokens"], shape=(config.max_position_embeddings, D), axes=("position", "embed"))
    tree = {"embed_tokens": tree["embed_tokens"], "embed_positions": positions} | tree
    return {name: leaf for name, leaf in tree.items() if not (config.post_norm and name in ("norm", "norm_bias"))}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its slice of a transposed tensor}."""
    D, inner = config.hidden_size, config.intermediate_size
    words, places = ("tokens_embed", "positions_embed") if config.post_norm else ("wte", "wpe")
    names: dict[str, Stored] = {"embed_tokens": f"transformer.{words}.weight"}
    names["embed_positions"] = f"transformer.{places}.weight"
    norms = {} if config.post_norm else {"norm": "transformer.ln_f"}
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}", f"transformer.h.{i}"
        norms |= {f"{ours}.input_layernorm": f"{theirs}.ln_1", f"{ours}.post_attention_layernorm": f"{theirs}.ln_2"}
        parts = {f"attention.{q}": ("attn.c_attn", n * D, (n + 1) * D, 3 * D) for n, q in enumerate("qkv")}
        parts |= {"attention.o": ("attn.c_proj", 0, D, D)}
        parts |= {"mlp.up": ("mlp.c_fc", 0, inner, inner), "mlp.down": ("mlp.c_proj", 0, D, D)}
        for path, (name, start, stop, rows) in parts.items():
            names[f"{ours}.{path}_proj"] = TensorSlice(f"{theirs}.{name}.weight", start, stop, rows, transposed=True)
            names[f"{ours}.{path}_bias"] = TensorSlice(f"{theirs}.{name}.bias", start, stop, rows, transposed=True)
    for path, name in norms.items():
        names |= {path: f"{name}.weight", f"{path}_bias": f"{name}.bias"}
    heads = {"lm_head": "lm_head.weight", "score": "score.weight"}
    return names | {path: heads[path] for path in spec(config) if path in heads}


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis: "full", or "full_0", "full_1" and so on if scores are
    scaled by the layer index."""
    layers = config.num_hidden_layers
    return tuple(f"full_{i}" for i in range(layers)) if config.scale_attn_by_inverse_layer_idx else ("full",) * layers


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]. create: see `fnmodels.inputs.mask.build_mask`."""
    return causal_masks(dict.fromkeys(kinds(config)), positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, dict[str, Tensor]]:
    """{kind: {"table": fp32 [B, S, 0, 2]}}: no rotary embedding, since `embed` adds the positions.

    If scores are scaled by the layer index, also "scale", fp32 [B, S], a factor on the queries: a tensor, so that all
    layers compile to one graph.
    """
    tables: dict[str, dict[str, Tensor]] = {kind: {"table": no_rotation(positions)} for kind in kinds(config)}
    if config.scale_attn_by_inverse_layer_idx:
        for i, table in enumerate(tables.values()):
            table["scale"] = torch.full_like(positions, 1 / (i + 1), dtype=torch.float32)
    return tables


@with_context
def block(
    layer: Tree, x: Tensor, mask: Any, freqs: dict[str, Tensor], /, *, config: Config, kind: str, ctx: Context
) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    if config.post_norm:
        return older.post_norm_layer(layer, x, mask, ctx, config=config, scale=config.head_dim**-0.5)
    eps, weights = config.layer_norm_eps, layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    if "scale" in freqs:
        q = q * freqs["scale"][..., None, None].to(q.dtype)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5 if config.scale_attn_weights else 1.0)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = layer_norm(x, layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"], eps=eps)
    return x + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm where there is one, and head: logits [B, S, V]."""
    if not config.post_norm:
        x = layer_norm(x, params["norm"], params["norm_bias"], eps=config.layer_norm_eps)
    return decoder.project(params, x, config)
