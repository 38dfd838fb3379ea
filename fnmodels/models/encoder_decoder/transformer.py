"""The stacks of the first Transformer (arXiv 1706.03762), of BART and its relatives and of Whisper.

LayerNorms before or after each sublayer, biases, an MLP without a gate, cross attention in the decoder; the sizes of
both stacks in one Config, under the names of config.json that these families share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.spec import attention_leaves, layer_norm_leaves, plain_mlp_leaves
from fnmodels.ops import ACTIVATIONS, layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.ops.dropout import Dropout
from fnmodels.tree import Tree

from .cross_attention import attend_to_memory
from .stacks import check_stack

NORM_EPS = 1e-5  # of all norms; no field of the file
SIZES = {"vocab_size": "vocab_size", "d_model": "hidden_size"}
SIZES |= {"encoder_layers": "num_hidden_layers", "encoder_attention_heads": "num_attention_heads"}
SIZES |= {"encoder_ffn_dim": "intermediate_size", "decoder_layers": "num_decoder_layers"}
SIZES |= {"decoder_attention_heads": "decoder_attention_heads", "decoder_ffn_dim": "decoder_intermediate_size"}
# Fields that no forward pass of these models reads: of training, and the number of layers once more.
IGNORED = ("decoder_layerdrop", "encoder_layerdrop", "num_hidden_layers")
# Of the trait `dropout`.
DROPOUT = {"dropout": ("attention", "mlp", "embedding"), "attention_dropout": ("weights",)}
DROPOUT |= {"activation_dropout": ("neurons",)}
NAMES = {
    "input_layernorm": "self_attn_layer_norm",
    "attention": "self_attn",
    "cross_attention_layernorm": "encoder_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "post_attention_layernorm": "final_layer_norm",
    "norm": "layer_norm",
    "up": "fc1",
    "down": "fc2",
    "embed_norm": "layernorm_embedding",
}


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """The Config fields of such models. Those of the first lines are the encoder's; in `decoder`, the decoder's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_decoder_layers: int = 0
    decoder_attention_heads: int = 0
    decoder_intermediate_size: int = 0
    hidden_act: str = "gelu"
    stack: str = "both"
    head: str = "lm"
    norm_first: bool = True
    decoder_start_token_id: int = 0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    dropout: Dropout = Dropout()  # noqa: RUF009 - frozen
    # kept for saving only
    model_type: str = field(default="", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_stack(self)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        below = ("decoder_attention_heads", "decoder_intermediate_size", "num_decoder_layers")
        both = self.stack == "both"
        decoder.check_sizes(self, *sizes, "max_position_embeddings", *(below if both else ()))
        for name in ("num_attention_heads", *(below[:1] if both else ())):
            if self.hidden_size % getattr(self, name):
                raise ConfigError(f"hidden_size {self.hidden_size} is not a multiple of {name} {getattr(self, name)}.")
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {self.hidden_act!r} is unknown; known are {', '.join(ACTIVATIONS)}.")

    @property
    def head_dim(self) -> int:
        """The width of a head of queries, keys and values."""
        return self.hidden_size // self.num_attention_heads

    @property
    def encoder(self) -> Self:
        """The encoder of both stacks, for its own `prepare` and `forward`."""
        return replace(self, stack="encoder", **_NO_DECODER)

    @property
    def decoder(self) -> Self:
        """The decoder of both stacks."""
        sizes: dict[str, Any] = {
            "intermediate_size": self.decoder_intermediate_size,
            "num_hidden_layers": self.num_decoder_layers,
            "num_attention_heads": self.decoder_attention_heads,
        }
        return replace(self, stack="decoder", **(_NO_DECODER | sizes))

    def to_hf(self) -> ConfigJson:
        """A config.json, which each family writes."""
        raise NotImplementedError


_NO_DECODER: dict[str, Any] = {"num_decoder_layers": 0, "decoder_attention_heads": 0, "decoder_intermediate_size": 0}


def pair_fields(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of PairConfig from a config.json, but positions. defaults: the model type's, by names of the file."""
    sizes: dict[str, Any] = {}
    for name, ours in SIZES.items():
        deep = {"high": LAYERS_LIMIT} if name.endswith("_layers") else {}
        sizes[ours] = fields.integer(name, defaults[name], **deep)
    return sizes | {
        "hidden_act": fields.choice("activation_function", tuple(ACTIVATIONS), defaults["activation_function"]),
        "decoder_start_token_id": fields.integer("decoder_start_token_id", defaults["decoder_start_token_id"], low=0),
        "initializer_range": fields.number("init_std", 0.02, above=-1e-9),
    }


def pair_to_hf(config: PairConfig) -> ConfigJson:
    """The fields of config.json that `pair_fields` reads; ConfigError for one of the stacks, which no class reads."""
    if config.stack != "both":
        raise ConfigError(f"The {config.stack} is saved with its other stack: save the params of the config of both.")
    values = {name: getattr(config, ours) for name, ours in SIZES.items()}
    values |= {"activation_function": config.hidden_act, "init_std": config.initializer_range}
    return values | {"decoder_start_token_id": config.decoder_start_token_id, "is_encoder_decoder": True}


def layer_leaves(config: Any) -> Tree:
    """The parameters of a layer of one stack."""
    D, N, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    attention = attention_leaves(D, N, N, config.head_dim, std=std, qkv_bias=True, o_bias=True)
    layer: Tree = {**layer_norm_leaves("input_layernorm", D, "embed"), "attention": attention}
    if config.stack == "decoder":
        layer |= layer_norm_leaves("cross_attention_layernorm", D, "embed") | {"cross_attention": attention}
    layer |= layer_norm_leaves("post_attention_layernorm", D, "embed")
    return layer | {"mlp": plain_mlp_leaves(D, config.intermediate_size, std=std)}


def stack_name(path: str, config: Any) -> str:
    """The name on disk of a parameter of a stack; path: that of the whole model, or of one stack's tree."""
    stack, _, inner = path.partition(".") if config.stack == "both" else (config.stack, "", path)
    kind = "bias" if inner.endswith("_bias") else "weight"
    *above, last = inner.removesuffix("_bias").removesuffix("_proj").split(".")
    if above[-1:] == ["mlp"]:
        above.pop()
    elif above and above[-1] in NAMES:
        above[-1], last = NAMES[above[-1]], f"{'out' if last == 'o' else last}_proj"
    return ".".join(("model", stack, *above, NAMES.get(last, last), kind))


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Any, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, head = layer["attention"], {"head_dim": config.head_dim, "scale": config.head_dim**-0.5}

    def before(x: Tensor, name: str) -> Tensor:
        return _norm(layer, x, name) if config.norm_first else x

    def after(x: Tensor, name: str) -> Tensor:
        return x if config.norm_first else _norm(layer, x, name)

    name = "input_layernorm"
    q, k, v = project_qkv(weights, before(x, name), head_dim=config.head_dim)
    mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=head["scale"]))
    x = after(x + ctx.tap("attention", mixed), name)
    if kind == "causal":
        name = "cross_attention_layernorm"
        read = attend_to_memory(layer["cross_attention"], before(x, name), ctx, **head)
        x = after(x + ctx.tap("cross_attention", read), name)
    x, name = ctx.tap("middle", x), "post_attention_layernorm"
    fed = plain_mlp(layer["mlp"], before(x, name), activation=config.hidden_act, tap=ctx.tap)
    return after(x + ctx.tap("mlp", fed), name)


def _norm(layer: Tree, x: Tensor, name: str) -> Tensor:
    return layer_norm(x, layer[name], layer[f"{name}_bias"], eps=NORM_EPS)


def final_norm(params: Tree, x: Tensor) -> Tensor:
    """x [B, S, D] through the stack's last norm, where it has one."""
    return _norm(params, x, "norm") if "norm" in params else x
