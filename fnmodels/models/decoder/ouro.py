"""Ouro (ByteDance, arXiv 2510.25741): a Llama with norms around both sublayers, whose stack of layers runs in a loop.

The final norm follows every pass of the stack, and the next pass reads what it returns. An exit gate reads each of
these states, h_t = norm(stack(h_{t-1})), which the head can read:

    lambda_t = sigmoid(gate(h_t));    p_t = lambda_t prod_{s<t} (1 - lambda_s), and what is left of 1 in the last pass

`exit` says which of them the head reads: "last"; "threshold", for each token the first whose p_1 + ... + p_t reaches
`exit_threshold`; or "expected", sum_t p_t h_t, whose logits are those that the published code trains, since its head
is linear. All passes run in each case. Every run of a layer is a pass, with its index, its taps and its entry in a
cache (`family.stored_layers`).

transformers has no code of it: the maths are those of the published modeling_ouro.py, read in LoopedLMs/ouro_rl,
ouro_rl/modeling, at 0d7e8e4998d0. There the file's threshold chooses, and "expected" is an argument; a threshold of 1
is "last" here, which differs only where a gate is 1 to the last bit.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed  # noqa: F401
from fnmodels.models.common.spec import bias, decoder_leaves, layer_leaves, norm, usual_attention, usual_mlp, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.ops import apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("ouro",)
EXITS = ("last", "threshold", "expected")


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches.

    layers: those of the stack. loops: how often it runs. exit: the states that the head reads, see above.
    """

    num_hidden_layers: int = field(init=False)  # of all passes
    layer_kinds: tuple[str, ...] = field(default=(), init=False)
    rms_norm_eps: float = 1e-6
    layers: int
    loops: int = 4
    exit: str = "last"
    exit_threshold: float = 1.0

    def __post_init__(self) -> None:
        decoder.check_sizes(self, "layers", "loops")
        object.__setattr__(self, "num_hidden_layers", self.layers * self.loops)
        super().__post_init__()
        if self.exit not in EXITS:
            raise ConfigError(f"exit is {self.exit!r}; it must be one of {', '.join(EXITS)}.")
        if not 0 <= self.exit_threshold <= 1:
            raise ConfigError(f"exit_threshold is {self.exit_threshold}; it must be from 0 to 1.")

    @property
    def passes(self) -> tuple[int, ...]:
        """The layer of each pass."""
        return tuple(range(self.layers)) * self.loops

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=1e4, max_positions=32768, kv_heads=32)
        layers, loops = usual.pop("num_hidden_layers"), fields.integer("total_ut_steps", 4, high=LAYERS_LIMIT)
        if layers * loops > LAYERS_LIMIT:
            raise ConfigError(f"{fields.where}: {layers} layers run {loops} times; {LAYERS_LIMIT} passes are most.")
        fields.expect("use_sliding_window", False)
        fields.expect("layer_types", ["full_attention"] * layers)
        fields.expect("early_exit_step", None)  # total_ut_steps that are fewer do the same without idle passes
        for unused in ("sliding_window", "max_window_layers"):
            fields.take(unused, None)
        threshold = fields.number("early_exit_threshold", 1.0)
        config = Config(
            **usual,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            layers=layers,
            loops=loops,
            exit_threshold=threshold,
            exit=fields.choice("exit", EXITS, "last" if threshold >= 1 else "threshold"),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect; "exit" is a field of ours where the threshold does not say it."""
        own: ConfigJson = {"total_ut_steps": self.loops, "early_exit_threshold": self.exit_threshold}
        if self.exit != ("last" if self.exit_threshold >= 1 else "threshold"):
            own["exit"] = self.exit
        own |= {"num_hidden_layers": self.layers, "rope_theta": self.rope.theta}  # where the remote code reads it
        return decoder.decoder_to_hf(self, "OuroForCausalLM", "rms_norm_eps", "hidden_act", **own)


def kinds(config: Config) -> tuple[str, ...]:
    """One per pass: "leaves", the last layer of the stack; "folds", the last of all.

    "joins" where `exit` reads earlier passes, whose states the layers pass on.
    """
    found = []
    for index, stored in enumerate(config.passes):
        flags = {
            "joins": config.exit != "last" and index >= config.layers,
            "leaves": stored == config.layers - 1,
            "folds": index == config.num_hidden_layers - 1,
        }
        found.append("_".join(("full", *(word for word, on in flags.items() if on))))
    return tuple(found)


def left_shape(config: Config, index: int) -> tuple[int, int]:
    """(n, D): the states of n earlier passes of the stack, which the layer before `index` leaves."""
    return index // config.layers, config.hidden_size


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. The stack's last layer has the final norm and the gate."""
    D, std = config.hidden_size, config.initializer_range
    layer = layer_leaves(D, usual_attention(config), usual_mlp(config))
    layer |= {"input_layernorm_2": norm(D, "embed"), "post_attention_layernorm_2": norm(D, "embed")}
    gate = {"weight": weight((1, D), ("one", "embed"), std), "bias": bias(1, "one")}
    if config.exit != "expected":  # no logits have a gradient of it
        gate = {name: replace(leaf, trainable=False) for name, leaf in gate.items()}
    last = layer | {"final_norm": norm(D, "embed"), "exit_gate": gate}
    tree = decoder_leaves(config, [layer] * (config.layers - 1) + [last])
    return {name: leaf for name, leaf in tree.items() if name != "norm"}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names: StoredNames = decoder.hf_names(config)
    at = f"layers.{config.layers - 1}"
    gate = {f"{at}.exit_gate.{name}": f"model.early_exit_gate.{name}" for name in ("weight", "bias")}
    return names | {f"{at}.final_norm": "model.norm.weight"} | gate


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}: causal, the same for every pass."""
    mask = decoder.attention_masks(config, positions, segment_ids, create=create)["full"]
    return dict.fromkeys(sorted(set(kinds(config))), mask)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}, the same for every pass."""
    return dict.fromkeys(sorted(set(kinds(config))), decoder.freqs_cis(config, positions, length=length)["full"])


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Output head: logits [B, S, V]. The last pass has normed x."""
    return decoder.project(params, x, config)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """A pass of a layer: x [B, S, D] -> x."""
    eps, weights, words = config.rms_norm_eps, layer["attention"], kind.split("_")
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    attended = project_out(weights, ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5))
    x = ctx.tap("middle", x + ctx.tap("attention", rms_norm(attended, layer["input_layernorm_2"], eps=eps)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap)
    x = x + ctx.tap("mlp", rms_norm(fed, layer["post_attention_layernorm_2"], eps=eps))
    x = rms_norm(x, layer["final_norm"], eps=eps) if "leaves" in words else x
    if config.exit == "last":
        return x
    states = (ctx.left(),) if "joins" in words else ()
    states = (*states, x.unsqueeze(-2)) if "leaves" in words else states
    if not states:
        return x
    left = torch.cat(states, -2)
    if "folds" in words:
        return _exit(layer["exit_gate"], left, config, ctx)
    ctx.leave(left)
    return x


def _exit(gate: Tree, states: Tensor, config: Config, ctx: Context) -> Tensor:
    """What the head reads [B, S, D] of the states of all passes [B, S, n, D]."""
    chances = elementwise(torch.sigmoid, upcast(linear(states, gate["weight"], gate["bias"])[..., 0]))
    before = torch.cumprod(1 - chances[..., :-1], -1)  # the chance that no pass up to this one was the last
    exits = torch.cat((torch.ones_like(before[..., :1]), before), -1)
    exits = ctx.tap("exits", torch.cat((chances[..., :-1], torch.ones_like(before[..., :1])), -1) * exits)
    if config.exit == "expected":
        return (exits.to(states.dtype).unsqueeze(-1) * states).sum(-2)
    # The last pass ends all: sums of fp32 may stay below a threshold of 1.
    reached = exits.cumsum(-1) >= config.exit_threshold
    first = torch.cat((reached[..., :-1], torch.ones_like(reached[..., :1])), -1).to(torch.int8).argmax(-1)
    return states.take_along_dim(first[..., None, None], -2).squeeze(-2)


_OURO: ConfigJson = {"model_type": "ouro", "vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 5632}
_OURO |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "rope_theta": 1e6}
_OURO |= {"max_position_embeddings": 65536, "total_ut_steps": 4}
PRESETS: dict[str, ConfigJson] = {
    "ouro-1.4b": _OURO | {"num_hidden_layers": 24},
    "ouro-2.6b": _OURO | {"num_hidden_layers": 48},
}
