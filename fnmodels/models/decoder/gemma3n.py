"""Gemma 3n, the text models (Google, 2025): E2B and E4B.

The residual stream has several rows, of which a layer reads and computes one (AltUp, `fnmodels.ops.streams.altup`).
Beside attention there is a residual connection of low rank (LAuReL, arXiv 2411.07501). The first layers' MLPs use the
largest gates alone. As in Gemma 4, scores are not scaled, values are normalized, the last layers read the keys and
values of earlier ones (kinds with "_reuse"), and each layer an embedding of the token of its own. Other towers of a
gemma3n checkpoint are not read, and coefficients are not clipped in training.
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.mask import Create, MaskLike
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed_by_width as embed  # noqa: F401
from fnmodels.models.common.deepseek_v4.streams import by_ends, with_ends
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers import per_layer
from fnmodels.models.common.layers.per_layer import layer_inputs  # noqa: F401
from fnmodels.models.common.rope_config import rope_to_hf, ropes_by_layer_type
from fnmodels.models.common.spec import decoder_leaves, head_norms, norm, usual_attention, usual_mlp, weight
from fnmodels.models.common.storage import Stack, Stored, renamed
from fnmodels.ops import ACTIVATIONS, Rope, apply_rotary, gated_mlp, project_out, split_heads
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear, linears
from fnmodels.ops.mlp import glu
from fnmodels.ops.norm import rms_norm, rms_norm_fp32_weight
from fnmodels.ops.streams import altup, hyper
from fnmodels.ops.torch_internals import traced_as_constant
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("gemma3n_text", "gemma3n")
TRAITS = Traits(
    kinds=tuple(
        see + reuse + few for few in ("", "_sparse") for reuse in ("", "_reuse") for see in ("full", "sliding")
    ),
    unread={"vision": r"model\.(vision_tower|embed_vision)\..*", "audio": r"model\.(audio_tower|embed_audio)\..*"},
)
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_OTHERS = (  # of the towers and their tokens
    *("vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "boa_token_id"),
    *("eoa_token_id", "audio_token_id", "audio_soft_tokens_per_image", "vision_soft_tokens_per_image"),
)
# Of training, and without effect in transformers.
_IGNORED = ("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar")


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. sparsity: the share of neurons that sparse layers leave out, if gates were normal."""

    local_rope: Rope = Rope()  # noqa: RUF009 - of sliding layers
    rope: Rope = Rope(1e6)  # noqa: RUF009 - of full layers
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    hidden_act: str = "gelu_pytorch_tanh"
    sliding_window: int | None = 512
    final_softcap: float | None = 30.0
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: int = 262144
    residual_streams: int = 4
    laurel_rank: int = 64
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_sizes(self, "hidden_size_per_layer_input", "laurel_rank")
        if self.residual_streams < 2 or self.num_hidden_layers < 2:
            raise ConfigError("Gemma 3n has at least 2 streams (altup_num_inputs) and 2 layers.")
        if any("_sparse" in kind for kind in self.layer_kinds) and not 0 < self.sparsity < 1:
            raise ConfigError(f"sparsity is {self.sparsity}; it must be above 0 and below 1.")
        lending = [kind for kind in self.layer_kinds if "_reuse" not in kind]
        for index, kind in enumerate(parsed(self.layer_kinds)):
            if kind.source and kind.source not in lending[1:]:  # the first layer's kind has a word of its own
                raise ConfigError(f"Layer {index} is {kind.name!r}, and no earlier one from 1 on is {kind.source!r}.")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name.

        For model type gemma3n only `text_config` is used.
        """
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        if model_type == "gemma3n":
            tied = Fields({"tie_word_embeddings": True, **values}, fields.where)
            fields = decoder.text_part(tied, "gemma3n_text", ignored=_OTHERS)
        fields = Fields({**fields.values, **_one_width(fields)}, fields.where)
        sizes = decoder.decoder_sizes(fields, max_positions=32768, tied=True, kv_heads=2, head_dim=256)
        layers = sizes["num_hidden_layers"]
        slides = decoder.sliding_layers(fields, [(i + 1) % 5 != 0 for i in range(layers)])
        thetas = {"full_attention": 1e6, "sliding_attention": fields.number("rope_local_base_freq", 1e4)}
        how = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        ropes = ropes_by_layer_type(fields, thetas, scaled="full_attention", **how)
        fields.expect("altup_active_idx", 0)
        fields.expect("altup_correct_scale", True)
        shares = _shares(fields, layers)
        first = layers - fields.integer("num_kv_shared_layers", 15, low=0, high=layers - 1)  # that reuses
        config = Config(
            **sizes,
            rope=ropes["full_attention"],
            local_rope=ropes["sliding_attention"],
            **fields.plain(rms_norm_eps=1e-6, attention_bias=False, sliding_window=512),
            **fields.plain(hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, laurel_rank=64),
            hidden_act=fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
            final_softcap=decoder.softcap(fields, "final_logit_softcapping", 30.0),
            residual_streams=fields.integer("altup_num_inputs", 4, high=64),
            sparsity=max(shares),
            layer_kinds=tuple(
                ("sliding" if near else "full") + "_reuse" * (i >= first) + "_sparse" * (share > 0)
                for i, (near, share) in enumerate(zip(slides, shares, strict=True))
            ),
            model_type=model_type,
        )
        return decoder.finished(config, fields, ignored=_IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the published form; for model type gemma3n with `text_config` but no other tower."""
        if self.model_type == "gemma3n":
            text = replace(self, model_type="gemma3n_text")
            object.__setattr__(text, "extra", self.extra)
            outer: ConfigJson = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
            outer |= {"tie_word_embeddings": self.tie_word_embeddings, "text_config": text.to_hf()}
            return decoder.expressible(self, outer)
        layers = parsed(self.layer_kinds)
        own: ConfigJson = {
            "hidden_activation": self.hidden_act,
            "final_logit_softcapping": self.final_softcap,
            "altup_num_inputs": self.residual_streams,
            "num_kv_shared_layers": sum(kind.source is not None for kind in layers),
            "layer_types": decoder.layer_types([kind.slides for kind in layers]),
            "activation_sparsity_pattern": [self.sparsity * ("_sparse" in kind) for kind in self.layer_kinds],
        }
        ropes = {"full_attention": rope_to_hf(self.rope), "sliding_attention": rope_to_hf(self.local_rope)}
        names = ["rms_norm_eps", "attention_bias", "sliding_window", "laurel_rank"]
        names += ["hidden_size_per_layer_input", "vocab_size_per_layer_input"]
        return decoder.decoder_to_hf(self, "Gemma3nForCausalLM", *names, rope_parameters=ropes, **own)


def _one_width(fields: Fields) -> ConfigJson:
    """{"intermediate_size"}: one number, where the file lists the same one for each layer."""
    width = fields.values.get("intermediate_size")
    if not isinstance(width, list):
        return {}
    if not width or any(one != width[0] for one in width):
        raise UnsupportedError(f"{fields.where}: 'intermediate_size' is {shown(width)}; layers must have one width.")
    return {"intermediate_size": width[0]}


def _shares(fields: Fields, layers: int) -> list[float]:
    """The share of neurons that each layer leaves out: 0, or one number."""
    shares = fields.take("activation_sparsity_pattern", None)
    if shares is None:
        shares = [0.95 * (i < 10 < layers) for i in range(layers)]
    known = isinstance(shares, list) and all(type(share) in (int, float) and 0 <= share < 1 for share in shares)
    if not known or len(shares) != layers or len({share for share in shares if share}) > 1:
        raise UnsupportedError(
            f"{fields.where}: 'activation_sparsity_pattern' is {shown(shares)}; it must list {layers} shares below 1, "
            "each 0 or the same number."
        )
    return [float(share) for share in shares]


def kinds(config: Config) -> tuple[str, ...]:
    """One per layer; the first and the last have words of their own, see `with_ends`."""
    return with_ends(config.layer_kinds)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    layers = [_layer(config, kind) for kind in parsed(config.layer_kinds)]
    ends = weight((config.residual_streams - 1, *[config.hidden_size] * 2), ("one", "one", "embed"))
    layers[0] = layers[0] | {"open": ends}
    layers[-1] = layers[-1] | {"fold": ends}
    return decoder_leaves(config, layers) | per_layer.table_leaves(config)


def _layer(config: Config, kind: LayerKind) -> Tree:
    D, n, r, std = config.hidden_size, config.residual_streams, config.laurel_rank, config.initializer_range
    biased = config.attention_bias
    attention = usual_attention(config, qkv_bias=biased, o_bias=biased) | head_norms(config)
    absent = ("k_", "v_") if kind.source else ()
    mlp = usual_mlp(config)
    if "_sparse" in kind.name:  # every process of tensor parallelism has all of it
        axes = {"mlp": "whole_mlp"}
        mlp = {name: replace(leaf, axes=tuple(axes.get(a, a) for a in leaf.axes)) for name, leaf in mlp.items()}
    return {
        **{name: norm(D, "embed") for name in _NORMS},
        "attention": {name: leaf for name, leaf in attention.items() if not name.startswith(absent)},
        "mlp": mlp,
        "laurel": {
            "left": weight((r, D), ("laurel", "embed"), std),
            "right": weight((D, r), ("embed", "laurel"), std),
            "norm": norm(D, "embed"),
        },
        "altup": {
            "router_norm": norm(D, "embed"),
            "modality": weight((n, D), ("one", "embed"), std),
            "predict": weight((n * n, n), ("one", "one"), std),
            "correct": weight((n, n), ("one", "one"), std),
            "output_scale": norm(D, "embed"),
        },
        **per_layer.gate_leaves(config),
    }


_NAMES = {
    ".open": "altup_projections",
    ".fold": "altup_unembed_projections",
    ".laurel.left": "laurel.linear_left.weight",
    ".laurel.right": "laurel.linear_right.weight",
    ".laurel.norm": "laurel.post_laurel_norm.weight",
    ".altup.modality": "altup.modality_router.weight",
    ".altup.router_norm": "altup.router_norm.weight",
    ".altup.predict": "altup.prediction_coefs.weight",
    ".altup.correct": "altup.correction_coefs.weight",
    ".altup.output_scale": "altup.correct_output_scale",
}


def _prefix(config: Config) -> str:
    return "model.language_model." if config.model_type == "gemma3n" else "model."


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; the projections of streams are a tensor for each of them."""
    names: dict[str, Stored] = {}
    for path in flatten(spec(config)):
        end = next((end for end in _NAMES if path.endswith(end)), None)
        if end in (".open", ".fold"):
            rows = range(config.residual_streams - 1)
            names[path] = Stack(tuple(f"model.{_NAMES[end]}.{row}.weight" for row in rows))
        else:
            names[path] = f"model.{path.removesuffix(end)}.{_NAMES[end]}" if end else decoder.decoder_name(path)
    return {path: renamed(name, r"^model\.", _prefix(config)) for path, name in names.items()}


def leftovers(config: Config) -> tuple[str, ...]:
    """The keys and values of layers that read those of others, which files may hold."""
    borrowing = "|".join(str(index) for index, kind in enumerate(parsed(config.layer_kinds)) if kind.source)
    return (rf"{_prefix(config)}layers\.({borrowing})\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)",)


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}, causal, with a window for sliding layers; positions and segment_ids [B, S]."""
    masks = decoder.attention_masks(config, positions, segment_ids, create=create)
    return by_ends(config.layer_kinds, masks)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, H/2, 2]}, one for full and one for sliding layers."""
    tables = decoder.freqs_cis_by_window(config, positions, length=length)
    return by_ends(config.layer_kinds, tables)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: streams [B, S, n, D] -> the same; the first reads [B, S, D], and the last returns it."""
    eps = config.rms_norm_eps

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm_fp32_weight(x, layer[name], eps=eps)

    if x.ndim == 3:  # a layer alone, without what opens the streams, reads equal ones
        x = altup.opened(layer["open"], x) if "open" in layer else hyper.opened(x, config.residual_streams)
    predicted = altup.predict(layer["altup"], x, eps=eps)
    active = predicted[..., 0, :]
    read = normed(active, "input_layernorm")
    mixed = normed(_attention(layer["attention"], read, mask, freqs, config, kind, ctx), "post_attention_layernorm")
    beside = _laurel(layer["laurel"], read, eps)
    active = ctx.tap("middle", (active + ctx.tap("attention", mixed) + beside) * 2**-0.5)
    read = normed(active, "pre_feedforward_layernorm")
    feed = _sparse_mlp if "_sparse" in kind else _mlp
    fed = feed(layer["mlp"], read, config, ctx)
    active = active + ctx.tap("mlp", normed(fed, "post_feedforward_layernorm"))
    first, *others = altup.correct(layer["altup"], predicted, active, eps=eps).unbind(-2)
    added = per_layer.of_layer(layer, first * layer["altup"]["output_scale"], config, ctx)
    x = ctx.tap("streams", torch.stack([first, *(other + added for other in others)], -2))
    return altup.folded(layer["fold"], x) if "fold" in layer else x


def _attention(weights: Tree, x: Tensor, mask: Any, freqs: Tensor, config: Config, kind: str, ctx: Context) -> Tensor:
    """Attention of x [B, S, D], whose scores are not scaled."""
    how = {"eps": config.rms_norm_eps}
    own = [name for name in "qkv" if f"{name}_proj" in weights]
    heads = {n: split_heads(t, config.head_dim) for n, t in zip(own, linears(x, weights, own), strict=True)}
    q = apply_rotary(rms_norm_fp32_weight(heads["q"], weights["q_norm"], **how), freqs)
    if LayerKind.parse(kind).source:
        return project_out(weights, ctx.attend_borrowed(q, mask, scale=1.0))
    k = apply_rotary(rms_norm_fp32_weight(heads["k"], weights["k_norm"], **how), freqs)
    lend = any(other.source == kind for other in parsed(config.layer_kinds))
    return project_out(weights, ctx.attend(q, k, rms_norm(heads["v"], None, **how), mask, scale=1.0, lend=lend))


def _laurel(weights: Tree, x: Tensor, eps: float) -> Tensor:
    return x + rms_norm_fp32_weight(linear(linear(x, weights["left"]), weights["right"]), weights["norm"], eps=eps)


def _mlp(weights: Tree, x: Tensor, config: Config, ctx: Context) -> Tensor:
    return gated_mlp(weights, x, activation=config.hidden_act, tap=ctx.tap)


def _sparse_mlp(weights: Tree, x: Tensor, config: Config, ctx: Context) -> Tensor:
    """A gated MLP whose gates are cut off where a normal distribution has the share `sparsity`."""
    gate, up = linears(x, weights, ("gate", "up"))
    gate = altup.most_of_normal(ctx.tap("mlp.pre", gate), _deviations(config.sparsity))
    neurons = glu(gate, up, activation=config.hidden_act)
    return linear(ctx.tap("mlp.neurons", neurons), weights["down_proj"])


@traced_as_constant
def _deviations(share: float) -> float:
    """The quantile of the standard normal distribution at this share."""
    return statistics.NormalDist().inv_cdf(share)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm, output head and soft-cap if configured: logits [B, S, V]."""
    normed = rms_norm_fp32_weight(x, params["norm"], eps=config.rms_norm_eps)
    logits, cap = decoder.project(params, normed, config), config.final_softcap
    return cap * elementwise(torch.tanh, logits / cap) if cap is not None and decoder.is_lm(config) else logits


_E: ConfigJson = {"model_type": "gemma3n_text", "vocab_size": 262400, "hidden_size": 2048, "num_attention_heads": 8}
PRESETS = {
    "gemma-3n-e2b": _E | {"num_hidden_layers": 30, "intermediate_size": [8192] * 30, "num_kv_shared_layers": 10},
    "gemma-3n-e4b": _E | {"num_hidden_layers": 35, "intermediate_size": [16384] * 35},
}
