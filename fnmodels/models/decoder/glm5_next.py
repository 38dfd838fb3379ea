"""GLM 5.3 Flash (Z.ai, 2026, 320B-A18B), the text model: delta layers and latent attention to chosen blocks of keys.

Three layers of Kimi Delta Attention to one of multi-head latent attention without a rotary embedding, whose queries
attend to blocks of keys that an indexer chooses (`fnmodels.ops.indexers.gated_pools`). The residual stream has rows
that manifold-constrained hyper-connections mix (`fnmodels.ops.streams.hyper`); the head reads their mean. Gates and
values of every MLP and expert are clamped.

The choice has no gradient, so a loss on logits does not train the indexer. Files may have an MTP head, see
`fnmodels.mtp`: the layer after the last one, of latent attention and experts on one residual stream. It reads the mean
of the rows after the final norm, as in vLLM (vllm/models/glm5next/nvidia/mtp.py).
"""

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed, unembed  # noqa: F401
from fnmodels.models.common.decoder.block_choice import choose_blocks
from fnmodels.models.common.deepseek_v4.streams import by_ends, tap_mean, through, with_ends
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.glm5_next.fields import IGNORED, SIZES, fields_from_hf
from fnmodels.models.common.glm5_next.leaves import hf_names, leaves_of, plain_leaves  # noqa: F401
from fnmodels.models.common.layers import delta
from fnmodels.models.common.spec import decoder_leaves
from fnmodels.ops import Rope, no_rotation, project_out, rms_norm, split_heads
from fnmodels.ops.indexers.gated_pools import GatedPoolIndexer
from fnmodels.ops.linear import linear
from fnmodels.ops.mla import Widths
from fnmodels.ops.mlp import acting_mlp, clamped_glu
from fnmodels.ops.moe.router import RouterDtypes
from fnmodels.ops.streams import hyper
from fnmodels.ops.streams.hyper import HyperConnection
from fnmodels.tree import Tree

MODEL_TYPES = ("glm5_next_text", "glm5_next")
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")
_ATTENTION = ("linear", "indexed", "indexed_shared")
TRAITS = Traits(
    kinds=tuple(attention + mlp for mlp in ("_moe", "") for attention in _ATTENTION),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    unread={"vision": r"model\.visual\..*"},
    in_memory={
        r"\.self_attn\.(f_a_proj\.|f_b_proj\.|dt_bias|A_log)": r".self_attn.forget_gate.\1",
        r"\.hc_(attn|ffn)_": r".\1_hc.",
    },
)


@dataclass(frozen=True, kw_only=True)
class Config(mixture.GroupedConfig):
    """Sizes and switches. linear_lower_bound: of the logarithm of a delta layer's decay; None: it has no bound.

    indexer_budget: keys in the complete blocks of a query, `index_topk` in files. indexer_compress_ratio: positions of
    a block.
    """

    num_key_value_heads: int = field(init=False)  # as many as query heads
    head_dim: int = field(init=False)  # of queries and keys
    rope: Rope = field(default=Rope(), init=False, compare=False)
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False  # of the projections of latent attention that read x, and of o
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int = field(default=0, init=False, compare=False)
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int = 4
    linear_lower_bound: float | None = -5.0
    swiglu_limit: float = 10.0
    residual_streams: int = 4
    sinkhorn_iterations: int = 20
    hyper_eps: float = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        object.__setattr__(self, "head_dim", self.qk_nope_head_dim)
        super().__post_init__()
        decoder.check_sizes(self, *SIZES.values())
        if self.residual_streams < 2:
            raise ConfigError(f"residual_streams is {self.residual_streams} and must be at least 2.")
        if self.indexer_budget % self.indexer_compress_ratio:
            raise ConfigError(
                f"indexer_budget {self.indexer_budget} is not a multiple of indexer_compress_ratio "
                f"{self.indexer_compress_ratio}."
            )
        for index, (before, kind) in enumerate(itertools.pairwise(parsed(("", *self.layer_kinds)))):
            if kind.shares_choice and (before.shares_choice or not before.indexed):
                raise ConfigError(
                    f"Layer {index} takes the choice of keys of the layer before it, which must have an indexer; "
                    "indexer_types and layer_types say otherwise."
                )
        mtp.check_kinds(self, mtp_kinds(self))

    @property
    def index_topk(self) -> int:
        """Names of blocks in a query's choice, those at both ends of what it sees among them."""
        return self.indexer_budget // self.indexer_compress_ratio + 2

    @property
    def index_block_size(self) -> int:
        """The positions of a block that a choice names."""
        return self.indexer_compress_ratio

    @property
    def index_least_keys(self) -> int:
        """The least keys of a row in which queries choose."""
        return self.indexer_budget + self.indexer_compress_ratio

    @property
    def hyper(self) -> HyperConnection:
        """The settings of its hyper-connections."""
        return HyperConnection(self.sinkhorn_iterations, self.hyper_eps, self.rms_norm_eps)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name.

        For model type glm5_next only `text_config` is used, or the fields beside it where there is none.
        """
        fields, found = fields_from_hf(values, MODEL_TYPES)
        return decoder.finished(Config(**found), fields, ignored=IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect; for model type glm5_next with `text_config` but no tower."""
        if self.model_type == "glm5_next":
            text = replace(self, model_type=MODEL_TYPES[0])
            object.__setattr__(text, "extra", self.extra)
            outer: ConfigJson = {"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next"}
            outer |= {"tie_word_embeddings": self.tie_word_embeddings, "text_config": text.to_hf()}
            return decoder.expressible(self, outer)
        layers = parsed(self.layer_kinds)
        own = mixture.grouped_to_hf(self) | {"mlp_layer_types": mixture.mlp_types(layers)}
        own |= {"layer_types": ["linear_attention" if kind.ordered else "indexed_attention" for kind in layers]}
        own |= {"indexer_types": ["shared" if kind.shares_choice else "full" for kind in layers]}
        own |= {name: getattr(self, ours) for name, ours in SIZES.items()}
        own["num_nextn_predict_layers"] = self.num_nextn_predict_layers
        own |= {"qk_rope_head_dim": 0, "hc_eps": self.hyper_eps, "linear_lower_bound": self.linear_lower_bound}
        del own["first_k_dense_replace"]
        names = ("rms_norm_eps", "swiglu_limit", "attention_bias", "hidden_act")
        made = decoder.decoder_to_hf(self, "Glm5NextForCausalLM", *names, **own)
        return {name: value for name, value in made.items() if name not in ("head_dim", "rope_parameters")}


def kinds(config: Config) -> tuple[str, ...]:
    """One per layer; the first and the last have words of their own, see `deepseek_v4.streams`."""
    return with_ends(config.layer_kinds)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    leaves = decoder_leaves(config, [leaves_of(config, kind) for kind in parsed(config.layer_kinds)])
    return leaves | mtp.heads(config, plain_leaves(config, LayerKind.parse(mtp_kinds(config)[0])))


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is the block of an MTP head: with an indexer, and with experts like the last layer."""
    return ("indexed_moe" if LayerKind.parse(config.layer_kinds[-1]).routed else "indexed",)


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors of MTP heads that the config does not count: layers after the last one."""
    if config.num_nextn_predict_layers:
        return ()
    first = config.num_hidden_layers
    return (rf"model\.(language_model\.)?layers\.({'|'.join(map(str, range(first, first + 8)))})\..*",)


def attention_masks(config: Config, positions: Tensor, segment_ids: Tensor, **options: Any) -> dict[str, Any]:
    """{kind: mask}: causal; of linear layers `fnmodels.inputs.Segments`."""
    return by_ends(config.layer_kinds, decoder.attention_masks(config, positions, segment_ids, **options))


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """Nothing rotates."""
    return dict.fromkeys(kinds(config), no_rotation(positions))


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: streams [B, S, n, D] -> the same; the first reads [B, S, D], and the last returns it.

    The block of an MTP head, which has no hyper-connections: [B, S, D] -> [B, S, D].
    """
    eps, how, weights = config.rms_norm_eps, config.hyper, layer["attention"]

    def attend(x: Tensor) -> Tensor:
        normed = rms_norm(x, layer["input_layernorm"], eps=eps)
        if LayerKind.parse(kind).ordered:
            bound = config.linear_lower_bound
            mixed = delta.narrow_kimi_delta(weights, normed, mask, config, ctx, bound=bound)
        else:
            mixed = _latent_attention(weights, normed, mask, freqs, config, ctx)
        return ctx.tap("attention", project_out(weights, mixed))

    def feed(x: Tensor) -> Tensor:
        normed, mlp = rms_norm(x, layer["post_attention_layernorm"], eps=eps), layer["mlp"]
        act = functools.partial(clamped_glu, activation=config.hidden_act, limit=config.swiglu_limit)
        if "router" not in mlp:
            return ctx.tap("mlp", acting_mlp(mlp, normed, act=act, tap=ctx.tap))
        acts = functools.partial(clamped_glu, activation="silu", limit=config.swiglu_limit), act
        return ctx.tap("mlp", ctx.moe(mlp, normed, mixture.grouped_route(mlp, config), act=acts, dtypes=ROUTER))

    if "attention_hyper" not in layer:
        x = ctx.tap("middle", x + attend(x))
        return x + feed(x)
    x = hyper.opened(x, config.residual_streams) if x.ndim == 3 else x
    x = tap_mean(ctx, "middle", through(layer["attention_hyper"], x, attend, how))
    x = ctx.tap("streams", through(layer["mlp_hyper"], x, feed, how))
    return hyper.mean(x) if "folds" in kind.split("_") else x


def _latent_attention(weights: Tree, x: Tensor, mask: Any, freqs: Tensor, config: Config, ctx: Context) -> Tensor:
    """The heads [B, S, N, Hv] of latent attention of x [B, S, D] to the blocks of keys that are chosen."""
    eps, width = config.rms_norm_eps, config.qk_nope_head_dim
    latent = rms_norm(linear(x, weights["q_a_proj"], weights.get("q_a_bias")), weights["q_a_layernorm"], eps=eps)
    indexer = GatedPoolIndexer(config.index_topk - 2, config.indexer_compress_ratio)
    given = (x, latent)
    mask = choose_blocks(ctx, weights.get("indexer"), given, freqs, mask, heads=(1, 1), indexer=indexer)
    q, widths = split_heads(linear(latent, weights["q_b_proj"]), width), Widths(width, 0, config.v_head_dim, eps=eps)
    return ctx.attend_latent(weights, x, freqs, mask, widths=widths, rotate=_unrotated, scale=width**-0.5, queries=q)


def _unrotated(x: Tensor, freqs: Tensor) -> Tensor:
    return x


PRESETS: dict[str, ConfigJson] = {"glm-5.3-flash": {"model_type": "glm5_next_text", "index_kpool": 4}}
