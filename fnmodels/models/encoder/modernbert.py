"""ModernBERT (arXiv 2412.13663): a pre-norm encoder with rotary embedding, gated MLPs and mostly sliding windows.

The first layer has no norm before its attention: its kind ends in "_first".
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.inputs.documents import Documents, pool
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import BidirectionalWindow, Everything
from fnmodels.models.common import decoder, encoder, encoder_storage
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import kinds  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.heads import head_fields
from fnmodels.models.common.rope_config import rope_to_hf, ropes_by_layer_type
from fnmodels.models.common.spec import Leaf, bias, embedding, norm, usual_attention, usual_mlp, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.ops import (
    ACTIVATIONS,
    Rope,
    apply_rotary,
    embed_tokens,
    gated_mlp,
    layer_norm,
    project_out,
    project_qkv,
    rotary_table,
)
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("modernbert",)
HEADS = ("masked_lm", "none", "classification", "tokens", "question_answering")
TRAITS = Traits(
    dropout={"attention_dropout": ("weights", "attention"), "embedding_dropout": ("embedding",)},
    kinds=("full", "sliding", "full_first", "sliding_first"),
    heads=HEADS,
    causal=False,
    resaved={r"model\.(.*)": r"\1"},  # a model without a head may be stored with the prefix of one that has it
)

_POOLINGS = {"cls": "first", "mean": "mean"}
_SWITCHES = {"norm_bias": False, "attention_bias": False, "mlp_bias": False, "decoder_bias": True}
_SWITCHES |= {"classifier_bias": False}
# Fields of its files that choose an implementation, or an initialization.
_IGNORED = (
    *("cls_token_id", "deterministic_flash_attn", "initializer_cutoff_factor", "layer_norm_eps"),
    *("position_embedding_type", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index"),
    "sparse_prediction",
)


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. sliding_window: how far a window reaches to each side. local_rope: of sliding layers.

    classifier_activation, classifier_bias: of the dense layer in the head. classifier_pooling: what a head with one
    result per document reads, its first token ("cls") or all ("mean").
    """

    hidden_act: str = "gelu"
    tie_word_embeddings: bool = True
    local_rope: Rope = Rope()  # noqa: RUF009 - frozen
    sliding_window: int = 64
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    decoder_bias: bool = True
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    classifier_pooling: str = "cls"
    head: str = "masked_lm"
    num_labels: int = 0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder.decoder_sizes(fields, max_positions=8192, tied=True)
        layers, every = sizes["num_hidden_layers"], fields.integer("global_attn_every_n_layers", 3)
        slides = decoder.sliding_layers(fields, [i % every != 0 for i in range(layers)])
        thetas = {
            "full_attention": fields.number("global_rope_theta", 160000.0),
            "sliding_attention": fields.number("local_rope_theta", 1e4),
        }
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        ropes = ropes_by_layer_type(fields, thetas, scaled="full_attention", **where)
        heads = head_fields(fields, "ModernBert", HEADS)
        switches: dict[str, Any] = {name: fields.boolean(name, on) for name, on in _SWITCHES.items()}
        config = Config(
            **sizes,
            **heads,
            **switches,
            rope=ropes["full_attention"],
            local_rope=ropes["sliding_attention"],
            sliding_window=fields.integer("local_attention", 128) // 2,
            norm_eps=fields.number("norm_eps", 1e-5),
            hidden_act=fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu"),
            classifier_activation=fields.choice("classifier_activation", tuple(ACTIVATIONS), "gelu"),
            classifier_pooling=fields.choice("classifier_pooling", tuple(_POOLINGS), "cls"),
            layer_kinds=tuple(("sliding" if slides[i] else "full") + ("" if i else "_first") for i in range(layers)),
            model_type=model_type,
        )
        return encoder.finished(config, fields, _IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        ropes = {"full_attention": rope_to_hf(self.rope), "sliding_attention": rope_to_hf(self.local_rope)}
        names = ("norm_eps", "classifier_activation", "classifier_pooling", *_SWITCHES)
        own = {name: getattr(self, name) for name in names}
        slides = [kind.slides for kind in parsed(self.layer_kinds)]
        own |= {"hidden_activation": self.hidden_act, "layer_types": decoder.layer_types(slides)}
        own["local_attention"] = 2 * self.sliding_window
        return decoder.decoder_to_hf(self, "ModernBert", rope_parameters=ropes, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    V, D, std = config.vocab_size, config.hidden_size, config.initializer_range
    biased = config.attention_bias

    def norms(name: str) -> dict[str, Leaf]:
        return {name: norm(D, "embed")} | ({f"{name}_bias": bias(D, "embed")} if config.norm_bias else {})

    layer = {
        **norms("input_layernorm"),
        "attention": usual_attention(config, qkv_bias=biased, o_bias=biased),
        **norms("post_attention_layernorm"),
        "mlp": usual_mlp(config, biases=config.mlp_bias),
    }
    first = {name: leaf for name, leaf in layer.items() if not name.startswith("input_layernorm")}
    layers = [first if kind.first else layer for kind in parsed(config.layer_kinds)]
    tree: Tree = {"embed_tokens": embedding(V, D, std), **norms("embed_norm"), "layers": layers, **norms("norm")}
    if config.head == "none":
        return tree
    dense = {"dense": weight((D, D), ("features", "embed"), std)}
    dense |= {"dense_bias": bias(D, "embed")} if config.classifier_bias else {}
    tree["head"] = dense | norms("norm")
    if config.head == "masked_lm":
        tree |= {"lm_head_bias": bias(V, "vocab")} if config.decoder_bias else {}
        return tree if config.tie_word_embeddings else tree | {"lm_head": weight((V, D), ("vocab", "embed"), std)}
    tree["head"] |= {"score": weight((config.num_labels, D), ("label", "embed"), std)}
    tree["head"] |= {"score_bias": bias(config.num_labels, "label")}
    return tree


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk, or its rows there}; a model without a head has no prefix there."""
    prefix = "" if config.head == "none" else "model."
    attention, mlp = f"{prefix}layers.{{}}.attn", f"{prefix}layers.{{}}.mlp"
    names = {
        "embed_tokens": f"{prefix}embeddings.tok_embeddings",
        "embed_norm": f"{prefix}embeddings.norm",
        "input_layernorm": f"{attention}_norm",
        **dict.fromkeys(("attention.q", "attention.k", "attention.v"), f"{attention}.Wqkv"),
        "attention.o": f"{attention}.Wo",
        "post_attention_layernorm": f"{mlp}_norm",
        **dict.fromkeys(("mlp.gate", "mlp.up"), f"{mlp}.Wi"),
        "mlp.down": f"{mlp}.Wo",
        "norm": f"{prefix}final_norm",
        "head.dense": "head.dense",
        "head.norm": "head.norm",
        "head.score": "classifier",
        "lm_head": "decoder",
    }
    return encoder_storage.fused_names(config, names)


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}: every token sees its document, in sliding layers the part of it that is near."""
    rules = {"full": Everything(), "sliding": BidirectionalWindow(config.sliding_window)}
    chosen = {kind: rules[LayerKind.parse(kind).attends] for kind in set(config.layer_kinds)}
    return masks_of(chosen, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, H/2, 2]} of `rope` and `local_rope`; arguments as for `decoder.freqs_cis`."""
    ropes = {"full": config.rope, "sliding": config.local_rope}
    tables = {
        kind: rotary_table(ropes[kind], config.head_dim, positions, length)
        for kind in sorted({kind.attends for kind in parsed(config.layer_kinds)})
    }
    return {kind: tables[LayerKind.parse(kind).attends] for kind in sorted(set(config.layer_kinds))}


def _norm(tree: Tree, name: str, x: Tensor, config: Config) -> Tensor:
    return layer_norm(x, tree[name], tree.get(f"{name}_bias"), eps=config.norm_eps)


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: the norm of token (or given) embeddings."""
    x = embed_tokens(params["embed_tokens"], inputs)
    if not isinstance(inputs, Tensor) and "valid" in inputs:  # else a NaN in padding reaches the norm's gradient
        x = x.where(inputs["valid"][..., None], 0)
    return _norm(params, "embed_norm", x, config)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights = layer["attention"]
    normed = x if LayerKind.parse(kind).first else _norm(layer, "input_layernorm", x, config)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = _norm(layer, "post_attention_layernorm", x, config)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V] or [B, S, labels]; without a head the hidden states [B, S, D]."""
    x = _norm(params, "norm", x, config)
    if config.head == "none":
        return x
    x, weights = _dense(params["head"], x, config), params["head"]
    if config.head == "masked_lm":
        return linear(x, decoder.head(params, config), params.get("lm_head_bias"))
    return linear(x, weights["score"], weights["score_bias"])


def _dense(weights: Tree, x: Tensor, config: Config) -> Tensor:
    inner = linear(x, weights["dense"], weights.get("dense_bias"))
    return _norm(weights, "norm", ACTIVATIONS[config.classifier_activation](inner), config)


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """Logits [N, labels] of each document's first token, or of the mean of its tokens."""
    pooled = pool(_norm(params, "norm", x, config), documents, how=_POOLINGS[config.classifier_pooling])
    weights = params["head"]
    return linear(_dense(weights, pooled, config), weights["score"], weights["score_bias"])


_BASE: ConfigJson = {
    "architectures": ["ModernBertForMaskedLM"],
    "model_type": "modernbert",
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "classifier_pooling": "mean",
}
_LARGE = {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16}
PRESETS = {"modernbert-base": _BASE, "modernbert-large": _BASE | _LARGE}
