"""MiniMax-Text-01 and M1 (arXiv 2501.08313): seven layers of lightning attention to one of softmax attention.

Lightning attention is linear attention whose state decays at a rate of each head and layer. Each sublayer adds to its
normed input, by factors, and each layer has a mixture of experts.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.mask import Create, MaskLike
from fnmodels.inputs.order import Segments, last_segment
from fnmodels.inputs.values import constants
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields, renamed, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.moe import block_sparse_names, check_experts, experts_from_hf
from fnmodels.models.common.rope_config import rope_to_hf, with_rotary_dim
from fnmodels.models.common.spec import Leaf, decoder_leaves, layer_leaves, moe_leaves, norm, usual_attention, weight
from fnmodels.models.common.storage import Stored, fuse
from fnmodels.ops import ACTIVATIONS, Rope, apply_rotary, project_out, project_qkv, rms_norm, split_heads, upcast
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear, linears
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.ops.recurrent.ssd import ssd
from fnmodels.ops.rotary import no_rotation
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("minimax", "minimax_text_01", "minimax_m1")  # transformers' type, then those of published files
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")
TRAITS = Traits(
    kinds=("full_moe", "linear_moe"),
    routed=True,
    router=ROUTER,
    in_memory={r"\.block_sparse_moe\.": ".mlp."},
    classes={"minimax_text_01": "MiniMaxText01ForCausalLM", "minimax_m1": "MiniMaxM1ForCausalLM"},
    leftovers=(r"model\.layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)",),  # see `as_stated`
)
_FACTORS = tuple(f"{part}_{name}_factor" for part in ("full_attn", "linear_attn", "mlp") for name in ("alpha", "beta"))
_PARTS = {"full_attention": "full_attn", "linear_attention": "linear_attn", "mlp": "mlp"}
# {factor in published files: its name in transformers}
_PUBLISHED = {f"layernorm_{p}_{end}": f"{q}_{end}_factor" for p, q in _PARTS.items() for end in ("alpha", "beta")}
_EPS = 1e-6  # of the norm of a linear layer's heads, which config.json does not say


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of one expert.

    *_factor: alpha multiplies the normed input of a sublayer, beta what it adds to that.
    """

    num_local_experts: int
    num_experts_per_tok: int
    rope: Rope = Rope(1e6)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072
    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    linear_attn_alpha_factor: float = 1.0
    linear_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0
    block_size: int = field(default=256, compare=False)  # of the publisher's code; changes no result

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_local_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = with_rotary_dim(_todays(Fields(values)), 0)
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=1e6, max_positions=131072, kv_heads=8, partial=1.0)
        layers = usual["num_hidden_layers"]
        for name, value in {"router_jitter_noise": 0.0, "shared_intermediate_size": 0, "postnorm": True}.items():
            fields.expect(name, value)
        fields.expect("sliding_window", None)
        experts, chosen = experts_from_hf(fields, 8, 2, layers)
        linear_ones = decoder.sliding_layers(fields, [i % 2 == 1 for i in range(layers)], "linear_attention")
        fields.expect("attn_type_list", [0 if is_linear else 1 for is_linear in linear_ones])
        factors: dict[str, Any] = {name: fields.number(name, 1.0, above=-1e9) for name in _FACTORS}
        config = Config(
            **usual,
            num_local_experts=experts,
            num_experts_per_tok=chosen,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            block_size=fields.integer("block_size", 256),
            layer_kinds=tuple("linear_moe" if is_linear else "full_moe" for is_linear in linear_ones),
            **factors,
        )
        return decoder.finished(config, fields, ("shared_moe_mode",))

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        types = decoder.layer_types([kind.ordered for kind in parsed(self.layer_kinds)], "linear_attention")
        names = ("rms_norm_eps", "hidden_act", "num_local_experts", "num_experts_per_tok", "block_size", *_FACTORS)
        rope = rope_to_hf(self.rope) | {"partial_rotary_factor": self.rope.partial}  # written even if it is 1
        return decoder.decoder_to_hf(self, "MiniMaxForCausalLM", *names, rope_parameters=rope, layer_types=types)


def _todays(fields: Fields) -> Fields:
    """The fields in transformers' dialect, which published files, of types of their own, do not have."""
    if fields.choice("model_type", MODEL_TYPES) == "minimax":
        return fields
    heads = fields.integer("num_attention_heads")
    if heads & (heads - 1):  # the publisher's code takes their decays from those of two powers of two
        raise UnsupportedError(
            f"{fields.where}: 'num_attention_heads' is {heads}; only a power of two is supported in published files."
        )
    layers, kinds = fields.integer("num_hidden_layers", high=LAYERS_LIMIT), fields.take("attn_type_list")
    if not isinstance(kinds, list) or len(kinds) != layers or any(type(k) is not int or k not in (0, 1) for k in kinds):
        raise ConfigError(
            f"{fields.where}: 'attn_type_list' is {shown(kinds)}; it must have 0 (linear attention) or 1 (softmax "
            f"attention) for each of {layers} layers."
        )
    types = decoder.layer_types([kind == 0 for kind in kinds], "linear_attention")
    # The publisher's default of postnorm adds to the input before the norm.
    known = {"postnorm": False, "layer_types": types} | {n: v for n, v in fields.values.items() if v is not None}
    return renamed(Fields(known | {"model_type": "minimax"}, fields.where), _PUBLISHED)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std = config.hidden_size, config.initializer_range
    mlp = moe_leaves(D, config.num_local_experts, config.intermediate_size, std=std)
    mixers = {True: _lightning_leaves(config), False: usual_attention(config)}
    return decoder_leaves(config, [layer_leaves(D, mixers[k.ordered], mlp) for k in parsed(config.layer_kinds)])


def _lightning_leaves(config: Config) -> dict[str, Leaf]:
    """Projections to q, k, v and output gate z of the heads, the norm of all heads together, and the output."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    rows = config.num_attention_heads * H
    leaves = {f"{name}_proj": weight((rows, D), ("linear_heads", "embed"), std, unit=H) for name in "qkvz"}
    leaves["norm"] = norm(rows, "linear_heads", unit=H)
    return leaves | {"o_proj": weight((D, rows), ("embed", "linear_heads"), std, unit=H)}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert, and q, k and v of each head as one."""
    names = block_sparse_names(flatten(spec(config)), config.num_local_experts)
    heads, rows = config.num_attention_heads, config.num_attention_heads * config.head_dim
    for i, kind in enumerate(parsed(config.layer_kinds)):
        if kind.ordered:
            ours, theirs = f"layers.{i}.attention", f"model.layers.{i}.self_attn"
            names |= fuse(f"{theirs}.qkv_proj.weight", {f"{ours}.{n}_proj": rows for n in "qkv"}, groups=heads)
            own = {"z_proj": "output_gate", "norm": "norm", "o_proj": "out_proj"}
            names |= {f"{ours}.{leaf}": f"{theirs}.{name}.weight" for leaf, name in own.items()}
    return names


def kinds(config: Config) -> tuple[str, ...]:
    """One kind per layer; layers of lightning attention have one each, because their decays differ."""
    return tuple(f"{k.name}_{i}" if k.ordered else k.name for i, k in enumerate(parsed(config.layer_kinds)))


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}, causal, or `Segments`; positions and segment_ids [B, S]. create: see `build_mask`."""
    masks = decoder.attention_masks(config, positions, segment_ids, create=create)
    return {name: masks[kind] for name, kind in zip(kinds(config), config.layer_kinds, strict=True)}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Any]:
    """{kind: fp32 [B, S, R/2, 2]}; of lightning attention {"table": no rotation, "slopes": fp32 [B, S, heads]}."""
    tables: dict[str, Any] = {**decoder.freqs_cis(config, positions, length=length)}
    found = {}
    for i, (name, kind) in enumerate(zip(kinds(config), config.layer_kinds, strict=True)):
        found[name] = tables[kind]
        if LayerKind.parse(kind).ordered:
            slopes = constants(decay_rates(config, i), torch.float32, positions.device).expand(*positions.shape, -1)
            found[name] = {"table": no_rotation(positions), "slopes": slopes}
    return found


def decay_rates(config: Config, layer: int) -> Sequence[float]:
    """The rate at which the logarithm of each head's state falls with a token: less in later layers."""
    heads, last = config.num_attention_heads, config.num_hidden_layers - 1
    factor = 1 - layer / (last + 1e-5) + 1e-5
    return tuple(2.0 ** (-8 / heads * (head + 1)) * factor for head in range(heads))


def as_stated(config: Config, name: str, value: Tensor) -> bool:
    """Whether the decays that transformers stores, and computes with, are those of `decay_rates` but for rounding.

    query_decay and key_decay [heads, block, 1] are those from the begin and to the end of a block of tokens, and
    diagonal_decay [1, heads, block, block] those between two of them; all are at most 1.
    """
    found, heads, block = re.fullmatch(TRAITS.leftovers[0], name), config.num_attention_heads, config.block_size
    if found is None:
        return True
    shapes = {None: (heads, 1, 1), "diagonal": (1, heads, block, block)}
    if value.shape != shapes.get(found[2], (heads, block, 1)) or not value.is_floating_point():
        return False
    rates = torch.tensor(decay_rates(config, int(name.split(".")[2])), dtype=torch.float64)[:, None, None]
    places = torch.arange(block, dtype=torch.float64)[:, None] + 1
    steps = {
        "query": places,
        "key": block - places,
        "diagonal": (places - places.T).where(places >= places.T, torch.inf),
    }
    wanted = rates if found[2] is None else torch.exp(-rates * steps[found[2]])
    number = torch.finfo(value.dtype)
    slack = max(4, heads / 4) * number.eps * (rates if found[2] is None else 1)  # it takes powers up to `heads`
    return bool(((value.double().cpu() - wanted).abs() <= slack + number.smallest_normal).all())


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Any, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    if LayerKind.parse(kind).ordered:
        mixed = lightning_attention(weights, normed, mask, freqs["slopes"], config, ctx)
        alpha, beta = config.linear_attn_alpha_factor, config.linear_attn_beta_factor
    else:
        q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
        q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
        mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5))
        alpha, beta = config.full_attn_alpha_factor, config.full_attn_beta_factor
    x = ctx.tap("middle", normed * alpha + ctx.tap("attention", mixed * beta))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    route = functools.partial(softmax_top_k, k=config.num_experts_per_tok, renormalize=True)
    fed = ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER)
    return normed * config.mlp_alpha_factor + ctx.tap("mlp", fed * config.mlp_beta_factor)


def lightning_attention(
    weights: Tree, x: Tensor, mask: Segments, slopes: Tensor, config: Config, ctx: Context
) -> Tensor:
    """Lightning attention of x [B, S, D]: [B, S, D]. slopes: [B, S, heads].

    A head's state h [H, H] is the sum of v k^T of the tokens so far, which decays by exp(-slope) with each, and h q is
    what a query reads: `ssd` with steps of its slope.
    """
    state, ids = ctx.state() or {}, mask.segment_ids
    last, act = state.get("segment"), ACTIVATIONS[config.hidden_act]
    projected = (elementwise(act, each) for each in linears(x, weights, "qkv"))
    q, k, v = (split_heads(each, config.head_dim) for each in projected)
    wide = upcast(v)
    slopes, heads = slopes.to(wide.dtype), wide.new_ones(slopes.shape[-1])
    scaled = wide / slopes[..., None]  # which a step multiplies by itself
    before = ids, state.get("state"), last
    y, S = ssd(scaled, slopes, -heads, k, q, torch.zeros_like(heads), *before, kernel=ctx.options.kernel)
    ctx.keep(state=S, segment=last_segment(ids, last).expand(x.shape[0]))
    gate = elementwise(torch.sigmoid, linear(x, weights["z_proj"]))
    return linear(gate * rms_norm(y.flatten(2).to(x.dtype), weights["norm"], eps=_EPS), weights["o_proj"])


PRESETS: dict[str, ConfigJson] = {
    "minimax-text-01": {"model_type": "minimax", "vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 9216}
    | {"num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128, "rotary_dim": 64, "rope_theta": 1e7}
    | {"num_local_experts": 32, "max_position_embeddings": 10240000}
    | {"layer_types": decoder.layer_types([(i + 1) % 8 != 0 for i in range(80)], "linear_attention")}
    | {f"{part}_alpha_factor": 3.5565588200778455 for part in ("full_attn", "linear_attn", "mlp")}
}
