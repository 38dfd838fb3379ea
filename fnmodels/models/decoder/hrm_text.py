"""HRM-Text (Sapient, 1B): two stacks of layers that run several times, over a slow and a fast state.

The residual stream has two rows, the high state and the low state. In each of `high_cycles` cycles

    low  = rms(L(low + high))      `low_cycles` times
    high = rms(H(high + low))      once

where L and H are stacks of `layers_per_stack` layers, and norms have no weights. The high state begins as the embedding
and ends as what the head reads; the low state begins as a constant vector. Attention has a sigmoid gate per element.

Every run of a layer is a pass, which has its index, its taps and its entry in a cache (`family.stored_layers`). In
training, gradients flow through the last `low_gradients` passes of L in each high cycle; earlier ones are constant.

Published models may let the tokens of a prompt see each other (`prefix_lm`); here every token sees earlier ones alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, decoder_leaves, usual_attention, usual_mlp, weight
from fnmodels.models.common.storage import StoredNames, fuse
from fnmodels.ops import apply_rotary, embed_tokens, gated_mlp, project_out, project_qkv, rms_norm, split_heads
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("hrm_text",)
TRAITS = Traits(
    in_memory={
        r"\.attn\.(?:gqkv_proj|o_proj)\.": ".self_attn.{leaf}_proj.",
        r"\.mlp\.gate_up_proj\.": ".mlp.{leaf}_proj.",
    }
)


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches.

    low_gradients: how many of the last low passes of each of the last high cycles have gradients; before these 1.
    """

    num_hidden_layers: int = field(init=False)  # of all passes
    num_key_value_heads: int = field(init=False)  # num_attention_heads
    layer_kinds: tuple[str, ...] = field(default=(), init=False)
    residual_streams: int = field(default=2, init=False)
    rms_norm_eps: float = 1e-6
    layers_per_stack: int
    high_cycles: int
    low_cycles: int
    low_gradients: tuple[int, ...] = (2,)
    embedding_multiplier: float = 50.0

    def __post_init__(self) -> None:
        decoder.check_sizes(self, "layers_per_stack", "high_cycles", "low_cycles")
        object.__setattr__(self, "num_hidden_layers", self.layers_per_stack * self.high_cycles * (self.low_cycles + 1))
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        super().__post_init__()
        if not all(isinstance(count, int) and count >= 0 for count in self.low_gradients):
            raise ConfigError(f"low_gradients is {self.low_gradients}; it must be integers of at least 0.")

    @property
    def passes(self) -> tuple[int, ...]:
        """The layer of each pass: those of L come first in the params, then those of H."""
        return tuple(stored for stored, _ in _passes(self))

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        high, low = fields.integer("H_cycles", 2, high=LAYERS_LIMIT), fields.integer("L_cycles", 3, high=LAYERS_LIMIT)
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=1e4, max_positions=2048, head_dim=128)
        # Older files have the layers of a stack as num_hidden_layers, later ones beside the number of passes.
        layers = fields.integer("num_layers_per_stack", usual["num_hidden_layers"], high=LAYERS_LIMIT)
        passes = layers * high * (low + 1)
        if passes > LAYERS_LIMIT:
            raise ConfigError(
                f"{fields.where}: {layers} layers of each stack run {passes} times; {LAYERS_LIMIT} is most."
            )
        if fields.take("num_layers_per_stack", None) is not None:
            fields.expect("num_hidden_layers", passes)
        fields.expect("num_key_value_heads", usual["num_attention_heads"])
        fields.expect("attention_bias", False)
        fields.expect("mlp_bias", False)
        fields.boolean("prefix_lm", True)  # of batches with token types, which no batch here has
        std = usual["initializer_range"]
        for name in ("num_hidden_layers", "num_key_value_heads"):
            del usual[name]
        config = Config(
            **usual,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            layers_per_stack=layers,
            high_cycles=high,
            low_cycles=low,
            low_gradients=_low_gradients(fields),
            embedding_multiplier=fields.number("embedding_scale", 1 / std if std else 1.0),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own: ConfigJson = {
            "num_layers_per_stack": self.layers_per_stack,
            "H_cycles": self.high_cycles,
            "L_cycles": self.low_cycles,
            "L_bp_cycles": list(self.low_gradients),
            "embedding_scale": self.embedding_multiplier,
        }
        made = decoder.decoder_to_hf(self, "HrmTextForCausalLM", "rms_norm_eps", "hidden_act", **own)
        del made["num_key_value_heads"]
        return made


def _low_gradients(fields: Fields) -> tuple[int, ...]:
    known = fields.take("L_bp_cycles", [2])
    if not isinstance(known, list) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in known):
        raise ConfigError(f"{fields.where}: 'L_bp_cycles' is {shown(known)}, but must be a list of integers from 0 on.")
    return tuple(known)


def _passes(config: Config) -> Iterator[tuple[int, str]]:
    """The layer and the kind of each pass."""
    n, last, index = config.layers_per_stack, config.num_hidden_layers - 1, 0
    before = config.high_cycles - len(config.low_gradients)
    for trained in (*[1] * before, *config.low_gradients)[: config.high_cycles]:
        for cycle in range(config.low_cycles + 1):
            high, still = cycle == config.low_cycles, cycle < config.low_cycles - trained
            for i in range(n):
                flags = {
                    "high" if high else "low": True,
                    "still": still,
                    "enters": i == 0,
                    "leaves": i == n - 1,
                    "opens": index == 0,
                    "folds": index == last,
                }
                yield i + n * high, "_".join(("full", *(word for word, on in flags.items() if on)))
                index += 1


def kinds(config: Config) -> tuple[str, ...]:
    """One per pass: "high" or "low" is the state that it changes, "still" that it has no gradient.

    "enters" and "leaves" are the first and the last layer of a stack, "opens" and "folds" those of the model.
    """
    return tuple(kind for _, kind in _passes(config))


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. The first layer has the low state's beginning, which is not trained."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    gate = weight((config.num_attention_heads * H, D), ("heads", "embed"), std, unit=H)
    layer = {"attention": usual_attention(config) | {"gate_proj": gate}, "mlp": usual_mlp(config)}
    layers: list[Tree] = [layer] * (2 * config.layers_per_stack)
    layers[0] = layer | {"low_state": replace(bias(D, "embed"), trainable=False)}
    return {name: leaf for name, leaf in decoder_leaves(config, layers).items() if name != "norm"}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names: StoredNames = decoder.hf_names(config)
    flat, n = flatten(spec(config)), config.layers_per_stack
    for index in range(2 * n):
        at, where = f"layers.{index}", f"model.{'LH'[index // n]}_module.layers.{index % n}"
        projections = {f"{at}.attention.{name}_proj": flat[f"{at}.attention.{name}_proj"].shape[0] for name in "qkv"}
        gate = {f"{at}.attention.gate_proj": flat[f"{at}.attention.gate_proj"].shape[0]}
        names |= fuse(f"{where}.attn.gqkv_proj.weight", gate | projections)
        halves = {f"{at}.mlp.{name}_proj": config.intermediate_size for name in ("gate", "up")}
        names |= fuse(f"{where}.mlp.gate_up_proj.weight", halves)
        names[f"{at}.attention.o_proj"] = f"{where}.attn.o_proj.weight"
        names[f"{at}.mlp.down_proj"] = f"{where}.mlp.down_proj.weight"
    return names | {"layers.0.low_state": "model.z_L_init"}


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}: causal, the same for every pass."""
    return dict.fromkeys(
        sorted(set(kinds(config))), decoder.attention_masks(config, positions, segment_ids, create=create)["full"]
    )


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}, the same for every pass."""
    return dict.fromkeys(sorted(set(kinds(config))), decoder.freqs_cis(config, positions, length=length)["full"])


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: token or given embeddings times embedding_multiplier, as in transformers."""
    return embed_tokens(params["embed_tokens"], inputs) * config.embedding_multiplier


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Output head: logits [B, S, V]. The last pass has normed x."""
    return decoder.project(params, x, config)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """A pass of a layer: states (high, low) [B, S, 2, D] -> the same; the first reads [B, S, D], the last returns it.

    It changes one of the states.
    """
    words = kind.split("_")
    high, low = (x, torch.zeros_like(x) + layer["low_state"].to(x.dtype)) if "opens" in words else x.unbind(-2)
    state = high if "high" in words else low
    state = high + low if "enters" in words else state
    if "still" in words:
        with torch.no_grad():
            state = _through(layer, state, mask, freqs, config, ctx, words)
        state = state.detach()  # of a forward derivative too
    else:
        state = _through(layer, state, mask, freqs, config, ctx, words)
    x = ctx.tap("streams", torch.stack((state, low) if "high" in words else (high, state), -2))
    return x[..., 0, :] if "folds" in words else x


def _through(
    layer: Tree, x: Tensor, mask: Any, freqs: Tensor, config: Config, ctx: Context, words: list[str]
) -> Tensor:
    """One layer of a state x [B, S, D], and the norm after the last layer of a stack."""
    weights, eps = layer["attention"], config.rms_norm_eps
    normed = rms_norm(x, None, eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    gate = split_heads(elementwise(torch.sigmoid, linear(normed, weights["gate_proj"])), config.head_dim)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed * gate)))
    fed = gated_mlp(layer["mlp"], rms_norm(x, None, eps=eps), activation=config.hidden_act, tap=ctx.tap)
    x = x + ctx.tap("mlp", fed)
    return rms_norm(x, None, eps=eps) if "leaves" in words else x


PRESETS: dict[str, ConfigJson] = {
    "hrm-text-1b": {"model_type": "hrm_text", "vocab_size": 151808, "hidden_size": 1536, "intermediate_size": 4096}
    | {"num_hidden_layers": 16, "num_attention_heads": 12, "head_dim": 128, "max_position_embeddings": 2048}
}
