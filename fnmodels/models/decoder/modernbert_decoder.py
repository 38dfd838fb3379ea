"""ModernBERT as a decoder, of the Ettin suite (arXiv 2507.11412): causal, with ModernBERT's layers and head.

The first layer has no norm before its attention: its kind ends in "_first".
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.rope_config import rope_to_hf, ropes_by_layer_type
from fnmodels.models.common.spec import Leaf, bias, decoder_leaves, norm, usual_attention, usual_mlp, weight
from fnmodels.models.common.storage import Stored, StoredNames, fuse
from fnmodels.ops import ACTIVATIONS, Rope, apply_rotary, embed_tokens, gated_mlp, layer_norm, project_out, project_qkv
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.rotary import rotary_table
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("modernbert-decoder",)
TRAITS = Traits(
    kinds=("full", "sliding", "full_first", "sliding_first"),
    heads=("lm", "none"),
    dropout={"attention_dropout": ("weights", "attention"), "embedding_dropout": ("embedding",)},
)
_SWITCHES = {"norm_bias": False, "attention_bias": False, "mlp_bias": False, "decoder_bias": True}
_SWITCHES |= {"classifier_bias": False}
# Fields of its files that choose an implementation, an initialization, or a head that is not read.
_UNUSED = (
    *("classifier_pooling", "cls_token_id", "deterministic_flash_attn", "initializer_cutoff_factor", "layer_norm_eps"),
    *("position_embedding_type", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index"),
    *("sparse_prediction", "causal_mask"),
)
_ON_DISK = {
    "model.embed_tokens.": "model.embeddings.tok_embeddings.",
    "model.embed_norm.": "model.embeddings.norm.",
    "model.norm.": "model.final_norm.",
    "model.head.": "lm_head.",
    ".self_attn.o_proj.": ".attn.Wo.",
    ".self_attn.": ".attn.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
    ".mlp.down_proj.": ".mlp.Wo.",
    "lm_head.weight": "decoder.weight",
}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. sliding_window: half of the file's local_attention. local_rope: of sliding layers.

    classifier_activation, classifier_bias: of the dense layer in the head.
    """

    hidden_act: str = "gelu"
    tie_word_embeddings: bool = True
    local_rope: Rope = Rope()  # noqa: RUF009 - frozen
    sliding_window: int | None = 64
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    decoder_bias: bool = True
    classifier_bias: bool = False
    classifier_activation: str = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_width(self)

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
        half = fields.integer("sliding_window", 64)  # transformers writes it, and 4.57 nothing else
        window = fields.integer("local_attention", 2 * half, low=2) // 2
        fields.expect("sliding_window", window)
        switches: ConfigJson = {name: fields.boolean(name, on) for name, on in _SWITCHES.items()}
        config = Config(
            **sizes,
            **switches,
            rope=ropes["full_attention"],
            local_rope=ropes["sliding_attention"],
            sliding_window=window,
            norm_eps=fields.number("norm_eps", 1e-5),
            hidden_act=fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu"),
            classifier_activation=fields.choice("classifier_activation", tuple(ACTIVATIONS), "gelu"),
            layer_kinds=tuple(("sliding" if slides[i] else "full") + ("" if i else "_first") for i in range(layers)),
            model_type=model_type,
        )
        return decoder.finished(config, fields, _UNUSED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        ropes = {"full_attention": rope_to_hf(self.rope), "sliding_attention": rope_to_hf(self.local_rope)}
        own: ConfigJson = {"hidden_activation": self.hidden_act, "local_attention": 2 * (self.sliding_window or 0)}
        own["layer_types"] = decoder.layer_types([kind.slides for kind in parsed(self.layer_kinds)])
        names = ("norm_eps", "classifier_activation", *_SWITCHES)
        return decoder.decoder_to_hf(self, "ModernBertDecoderForCausalLM", *names, rope_parameters=ropes, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    V, D, std, on = config.vocab_size, config.hidden_size, config.initializer_range, config.attention_bias

    def norms(name: str) -> dict[str, Leaf]:
        return {name: norm(D, "embed")} | ({f"{name}_bias": bias(D, "embed")} if config.norm_bias else {})

    layer = {
        **norms("input_layernorm"),
        "attention": usual_attention(config, qkv_bias=on, o_bias=on),
        **norms("post_attention_layernorm"),
        "mlp": usual_mlp(config, biases=config.mlp_bias),
    }
    first = {name: leaf for name, leaf in layer.items() if not name.startswith("input_layernorm")}
    layers = [first if kind.first else layer for kind in parsed(config.layer_kinds)]
    tree = decoder_leaves(config, layers, norm_bias=config.norm_bias)
    tree = {"embed_tokens": tree["embed_tokens"], **norms("embed_norm")} | tree
    if not decoder.is_lm(config):
        return tree
    dense = {"dense": weight((D, D), ("features", "embed"), std)}
    dense |= {"dense_bias": bias(D, "embed")} if config.classifier_bias else {}
    tree["head"] = dense | norms("norm")
    return tree | ({"lm_head_bias": bias(V, "vocab")} if config.decoder_bias else {})


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows of Wi}."""
    flat = flatten(spec(config))
    names: StoredNames = {path: decoder.decoder_name(path) for path in flat}
    names |= {"head.dense_bias": "lm_head.dense.bias", "lm_head_bias": "decoder.bias"}
    for ours, theirs in _ON_DISK.items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    for i in range(config.num_hidden_layers):
        for end, disk in (("proj", "weight"), ("bias", "bias"))[: 1 + config.mlp_bias]:
            rows = {f"layers.{i}.mlp.{name}_{end}": config.intermediate_size for name in ("gate", "up")}
            names |= fuse(f"model.layers.{i}.mlp.Wi.{disk}", rows)
    return {path: names[path] for path in flat}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, H/2, 2]} of `rope` and `local_rope`."""
    ropes = {"full": config.rope, "sliding": config.local_rope}
    tables = {name: rotary_table(rope, config.head_dim, positions, length) for name, rope in ropes.items()}
    return {kind: tables[LayerKind.parse(kind).attends] for kind in sorted(set(config.layer_kinds))}


def _norm(owner: Tree, name: str, x: Tensor, config: Config) -> Tensor:
    return layer_norm(x, owner[name], owner.get(f"{name}_bias"), eps=config.norm_eps)


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: the norm of token (or given) embeddings, of zeros for padding."""
    x = embed_tokens(params["embed_tokens"], inputs)
    x = decoder.without_padding(x, inputs)
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
    """Final norm, the head's dense layer, activation and norm, and the tied projection: logits [B, S, V]."""
    normed = _norm(params, "norm", x, config)
    if not decoder.is_lm(config):
        return normed
    head = params["head"]
    dense = elementwise(
        ACTIVATIONS[config.classifier_activation], linear(normed, head["dense"], head.get("dense_bias"))
    )
    return decoder.project(params, _norm(head, "norm", dense, config), config)


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
PRESETS = {
    name: {"model_type": "modernbert-decoder", "vocab_size": 50368, "local_rope_theta": 160000.0}
    | dict(zip(_SIZES, sizes, strict=True))
    for name, *sizes in (
        ("ettin-decoder-17m", 256, 384, 7, 4),
        ("ettin-decoder-150m", 768, 1152, 22, 12),
        ("ettin-decoder-400m", 1024, 2624, 28, 16),
        ("ettin-decoder-1b", 1792, 3840, 28, 28),
    )
}
