"""Llama-Nemotron Super and Ultra (NVIDIA, arXiv 2411.19146 and 2505.00949): Llama after a search for faster layers.

Each layer has its own number of key heads and its own width of the MLP, and may lack either sublayer. Layers that lack
both do nothing: they have no place in the params, whose layers are those that are left.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits
from fnmodels.models.common.spec import attention_leaves, decoder_leaves, gated_mlp_leaves, norm
from fnmodels.models.common.storage import Stored
from fnmodels.ops import apply_rotary, gated_mlp, no_rotation, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("nemotron-nas",)
TRAITS = Traits(kinds=("full", "mlp"))


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches.

    layers: of each published layer, the query heads of a key head, and the width of the MLP over two thirds of the
    hidden size, before it is rounded up to a multiple of 256; 0 for a sublayer that it does not have.
    """

    intermediate_size: int = field(init=False)  # of the widest MLP
    num_hidden_layers: int = field(init=False)  # that have a sublayer
    num_key_value_heads: int = field(init=False)  # the most that a layer has
    layer_kinds: tuple[str, ...] = field(default=(), init=False)
    layers: tuple[tuple[int, float], ...]
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        decoder.check_sizes(self, "hidden_size", "num_attention_heads")
        if not self.sublayers or not all(self.num_attention_heads % (group or 1) == 0 for group, _ in self.layers):
            raise ConfigError(
                f"layers is {shown(self.layers)}; one at least has a sublayer, and the first number of each is 0 or "
                f"divides num_attention_heads, {self.num_attention_heads}."
            )
        kinds = tuple("full" if heads else "mlp" for _, heads, _ in self.sublayers)
        for name, value in (("layer_kinds", kinds), ("num_hidden_layers", len(kinds))):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "num_key_value_heads", max(1, *(heads for _, heads, _ in self.sublayers)))
        object.__setattr__(self, "intermediate_size", max(width for _, _, width in self.sublayers))
        super().__post_init__()

    @property
    def sublayers(self) -> list[tuple[int, int, int]]:
        """(number in files, key heads, width of the MLP) of each layer that has a sublayer."""
        found = [
            (i, self.num_attention_heads // group if group else 0, _width(ratio, self.hidden_size))
            for i, (group, ratio) in enumerate(self.layers)
        ]
        return [layer for layer in found if layer[1] or layer[2]]

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        count, blocks = fields.integer("num_hidden_layers", high=LAYERS_LIMIT), fields.take("block_configs")
        if not isinstance(blocks, list) or len(blocks) != count:
            raise ConfigError(f"{fields.where}: 'block_configs' must be a list of {count} layers, num_hidden_layers.")
        layers = tuple(_layer(one, f"{fields.where}, block_configs[{i}]") for i, one in enumerate(blocks))
        for name in ("num_key_value_heads", "intermediate_size"):  # which are each layer's own
            fields.expect(name, None)
        fields = Fields({**values, "intermediate_size": 1, "num_key_value_heads": 1}, fields.where)
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=1e4, max_positions=2048)
        fields.take("block_configs")
        for name in ("num_hidden_layers", "num_key_value_heads", "intermediate_size"):
            del usual[name]
        switches = fields.plain(rms_norm_eps=1e-6, attention_bias=False, mlp_bias=False)
        return decoder.finished(Config(**usual, **switches, layers=layers), fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the published dialect."""
        blocks = _blocks(*((1, group, ratio) for group, ratio in self.layers))
        own: ConfigJson = {"block_configs": blocks, "num_hidden_layers": len(blocks), "num_key_value_heads": None}
        names = ("rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias")
        return decoder.decoder_to_hf(self, "DeciLMForCausalLM", *names, **own, intermediate_size=None)


def _width(ratio: float, hidden_size: int) -> int:
    return -(-int(2 * ratio * hidden_size / 3) // 256) * 256


def _layer(values: Any, where: str) -> tuple[int, float]:
    """An entry of Config.layers. Linear maps in place of sublayers, and sinks, are in no file at hand: refused."""
    fields = Fields(values, where)
    attention = Fields(fields.take("attention"), f"{where}, attention")
    mlp = Fields(fields.take("ffn"), f"{where}, ffn")
    for part in (attention, mlp):
        part.expect("replace_with_linear", False)
        part.expect("sparsify", None)
    for name, value in (("num_sink_tokens", None), ("window_length", None)):
        attention.expect(name, value)
    for name in ("unshifted_sink", "use_prefill_window_in_sink_attention"):
        attention.expect(name, False)
    group = 0 if attention.boolean("no_op", False) else attention.integer("n_heads_in_group")
    ratio = 0.0 if mlp.boolean("no_op", False) else mlp.number("ffn_mult", high=1e3)
    for part, name in ((attention, "n_heads_in_group"), (mlp, "ffn_mult")):
        part.take(name, 0)
    for part in (fields, attention, mlp):
        part.finish()
    return group, ratio


def _blocks(*runs: tuple[int, int, float]) -> list[ConfigJson]:
    """`block_configs` of runs of layers (how many, query heads of a key head, ratio of the MLP; 0: it has none)."""
    return [
        {
            "attention": {"no_op": not group, "n_heads_in_group": group or None},
            "ffn": {"no_op": not ratio, "ffn_mult": ratio or None},
        }
        for count, group, ratio in runs
        for _ in range(count)
    ]


def kinds(config: Config) -> tuple[str, ...]:
    """One per layer: attention by its number of key heads, or "mlp"."""
    return tuple(f"full_{heads}" if heads else "mlp" for _, heads, _ in config.sublayers)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, heads, std = config.hidden_size, config.head_dim, config.num_attention_heads, config.initializer_range
    biases = {"qkv_bias": config.attention_bias, "o_bias": config.attention_bias}
    layers: list[Tree] = []
    for _, kv_heads, width in config.sublayers:
        layer: dict[str, Tree] = {}
        if kv_heads:
            attention = attention_leaves(D, heads, kv_heads, H, std=std, **biases)
            layer |= {"input_layernorm": norm(D, "embed"), "attention": attention}
        if width:
            mlp = gated_mlp_leaves(D, width, std=std, biases=config.mlp_bias)
            layer |= {"post_attention_layernorm": norm(D, "embed"), "mlp": mlp}
        layers.append(layer)
    return decoder_leaves(config, layers)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, where layers are numbered with those that do nothing."""
    names: dict[str, Stored] = {}
    for path in flatten(spec(config)):
        first, _, rest = path.partition(".")
        number, _, rest = rest.partition(".")
        own = f"layers.{config.sublayers[int(number)][0]}.{rest}" if first == "layers" else path
        names[path] = decoder.decoder_name(own)
    return names


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}: causal, the same for all; of an MLP alone it says what is padding."""
    mask = causal_masks({"full": None}, positions, segment_ids, create=create)["full"]
    return dict.fromkeys(sorted(set(kinds(config))), mask)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}; R is 0 for layers without attention."""
    tables: Mapping[str, Tensor] = decoder.freqs_cis(config, positions, length=length)
    still = no_rotation(positions)
    return {
        kind: tables["full"] if LayerKind.parse(kind).attends == "full" else still
        for kind in sorted(set(kinds(config)))
    }


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps = config.rms_norm_eps
    if "attention" in layer:
        weights, normed = layer["attention"], rms_norm(x, layer["input_layernorm"], eps=eps)
        q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
        q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
        mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
        x = x + ctx.tap("attention", project_out(weights, mixed))
    x = ctx.tap("middle", x)
    if "mlp" not in layer:
        return x
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


# The width of most MLPs is that of Llama 3.1 70B, 28672.
_SUPER: list[tuple[int, int, float]] = [
    *((1, 8, 2.625), (5, 8, 5.25), (2, 0, 2.625), (3, 8, 5.25), (1, 0, 3.28125), (30, 8, 5.25), (1, 0, 1.3125)),
    *((2, 0, 2.625), (1, 0, 1.3125), (1, 0, 5.25), (1, 0, 1.3125), (1, 0, 2.625), (3, 0, 1.3125), (1, 8, 5.25)),
    *((1, 0, 1.3125), (2, 0, 1.0), (1, 0, 1.3125), (3, 0, 1.0), (2, 0, 1.3125), (2, 0, 0.5), (2, 0, 1.0)),
    *((2, 0, 0.5), (1, 0, 1.0), (2, 0, 0.5), (9, 8, 5.25)),
]
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PRESETS: dict[str, ConfigJson] = {
    "llama-3.3-nemotron-super-49b-v1": {"model_type": "nemotron-nas", "vocab_size": 128256, "hidden_size": 8192}
    | {"num_hidden_layers": 80, "num_attention_heads": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
    | {"rope_theta": 5e5, "rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 8192}}
    | {"block_configs": _blocks(*_SUPER)}
}
