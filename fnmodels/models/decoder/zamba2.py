"""Zamba 2 (Zyphra, arXiv 2411.15242): Mamba-2 layers, and a few transformer blocks that many of them share.

    linear            x += mamba(norm(x))
    full_U            left = MLP(norm(attention(norm([x | embedding]))))      of a shared block
    linear_joins      x += mamba(norm(x + linear(left)))

The last two are one published layer, "hybrid". Its block is one of `shared_blocks`, in turn, whose parameters stand
once, after those of the Mamba layers; projections have adapters of low rank for each use. U counts the uses of a block.
A block runs several times, so that layers are passes, see `family.stored_layers`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits
from fnmodels.models.common.mamba import Mamba, mamba, mamba_from_hf, mamba_leaves, mamba_names, mamba_to_hf
from fnmodels.models.common.spec import Leaf, attention_leaves, decoder_leaves, norm, usual_mlp, weight
from fnmodels.models.common.storage import Stored, disk_names, fuse
from fnmodels.ops import apply_rotary, no_rotation, project_out, rms_norm, split_heads
from fnmodels.ops.linear import linear, linears
from fnmodels.ops.mlp import glu
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("zamba2",)
TRAITS = Traits(kinds=("linear", "full", "linear_joins"), copies_saved=False)
_MIXER: dict[str, tuple[str, Any]] = {
    "heads": ("n_mamba_heads", 8),
    "head_dim": ("mamba_headdim", "auto"),
    "groups": ("mamba_ngroups", 1),
    "state": ("mamba_d_state", 64),
    "kernel": ("mamba_d_conv", 4),
    "proj_bias": ("add_bias_linear", False),
}
_TYPES = {"linear_attention": False, "mamba": False, "hybrid": True}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. hybrid_layers: those of the `mamba_layers` that read a shared block."""

    num_hidden_layers: int = field(init=False)  # of all passes
    layer_kinds: tuple[str, ...] = field(default=(), init=False)
    mixer: Mamba
    mamba_layers: int
    hybrid_layers: tuple[int, ...]
    shared_blocks: int = 1
    adapter_rank: int = 128
    attention_adapters: bool = False
    rotary: bool = False
    mlp_bias: bool = False
    rms_norm_eps: float = 1e-5
    hidden_act: str = "gelu"

    def __post_init__(self) -> None:
        decoder.check_sizes(self, "mamba_layers", "shared_blocks", "adapter_rank")
        if self.hybrid_layers != tuple(i for i in range(self.mamba_layers) if i in self.hybrid_layers):
            raise ConfigError(f"hybrid_layers is {self.hybrid_layers}; it lists layers below {self.mamba_layers}.")
        if self.shared_blocks > max(1, len(self.hybrid_layers)):
            raise ConfigError(f"shared_blocks is {self.shared_blocks}; {len(self.hybrid_layers)} layers read one.")
        if self.attention_adapters and self.num_key_value_heads != self.num_attention_heads:
            raise ConfigError(
                f"num_key_value_heads is {self.num_key_value_heads}; with adapters of attention it must be "
                f"num_attention_heads, {self.num_attention_heads}."
            )
        each = (("full", "linear_joins") if i in self.hybrid_layers else ("linear",) for i in range(self.mamba_layers))
        object.__setattr__(self, "layer_kinds", tuple(kind for layer in each for kind in layer))
        object.__setattr__(self, "num_hidden_layers", len(self.layer_kinds))
        super().__post_init__()

    @property
    def hidden_size_per_layer_input(self) -> int:
        """The width of the embedding, which shared blocks read."""
        return self.hidden_size

    @property
    def passes(self) -> tuple[int, ...]:
        """The layer of each pass: the Mamba layers come first in the params, then the shared blocks."""
        found: list[int] = []
        for layer in range(self.mamba_layers):
            if layer in self.hybrid_layers:
                found.append(self.mamba_layers + self.hybrid_layers.index(layer) % self.shared_blocks)
            found.append(layer)
        return tuple(found)

    def uses(self, block: int) -> range:
        """Which of the uses of all blocks are those of one."""
        return range(block, len(self.hybrid_layers), self.shared_blocks)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        inner = fields.integer("intermediate_size", 4 * width)
        fields = Fields({**values, "intermediate_size": inner, "num_hidden_layers": 1}, fields.where)
        usual = decoder.base_fields(
            *(fields, MODEL_TYPES),
            theta=1e4,
            max_positions=4096,
            tied=True,
            head_dim=2 * width // heads,
            activation="gelu",
        )
        fields.expect("tie_word_embeddings", True)  # without, transformers has blocks that are not shared either
        types = _hybrid_layers(fields, Fields(values, fields.where).integer("num_hidden_layers", 54, high=LAYERS_LIMIT))
        hybrid = tuple(i for i, reads in enumerate(types) if reads)
        # what transformers derives and writes, and another scale of the rotary table
        own = {"attention_hidden_size": 2 * width, "attention_head_dim": usual["head_dim"], "use_long_context": False}
        own |= {"kv_channels": width // heads, "num_query_groups": heads, "hybrid_layer_ids": list(hybrid)}
        for name, value in (own | {"use_conv_bias": True}).items():
            fields.expect(name, value)
        least = fields.number("time_step_min", 1e-3, above=-1e-9), float("inf")
        mixer = mamba_from_hf(fields, fields.integer("mamba_expand", 2) * width, _MIXER, limits=least)
        del usual["num_hidden_layers"]
        config = Config(
            **usual,
            mixer=mixer,
            mamba_layers=len(types),
            hybrid_layers=hybrid,
            shared_blocks=fields.integer("num_mem_blocks", 1),
            adapter_rank=fields.integer("adapter_rank", 128),
            attention_adapters=fields.boolean("use_shared_attention_adapter", False),
            rotary=fields.boolean("use_mem_rope", False),
            mlp_bias=mixer.proj_bias,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        )
        unused = ("time_step_max", "time_step_floor", "use_mamba_kernels", "use_mem_eff_path", "num_logits_to_keep")
        return decoder.finished(config, fields, unused)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own = mamba_to_hf(self.mixer, _MIXER) | {"mamba_expand": self.mixer.rows["x"] // self.hidden_size}
        del own["time_step_limit"]
        own |= {"time_step_min": self.mixer.limits[0], "num_hidden_layers": self.mamba_layers}
        types = [("linear_attention", "hybrid")[i in self.hybrid_layers] for i in range(self.mamba_layers)]
        own |= {"layers_block_type": types, "num_mem_blocks": self.shared_blocks}
        own |= {"use_shared_attention_adapter": self.attention_adapters, "use_mem_rope": self.rotary}
        return decoder.decoder_to_hf(
            self,
            "Zamba2ForCausalLM",
            "hidden_act",
            "adapter_rank",
            "rms_norm_eps",
            attention_head_dim=self.head_dim,
            **own,
        )


def _hybrid_layers(fields: Fields, layers: int) -> list[bool]:
    listed = decoder.listed_kinds(fields, ("layers_block_type", "layer_types"), {name: name for name in _TYPES})
    types = (
        [i in (*range(6, 43, 6), 47, 51) for i in range(54)] if listed is None else [_TYPES[name] for name in listed]
    )
    if len(types) != layers:
        raise ConfigError(
            f"{fields.where}: 'layers_block_type' names {len(types)} layers; it must name {layers}, num_hidden_layers."
        )
    return types


def kinds(config: Config) -> tuple[str, ...]:
    """One per pass; that of a shared block ends in the number of its use."""
    layers = iter(range(len(config.hybrid_layers)))
    return tuple(
        f"full_{next(layers) // config.shared_blocks}" if kind == "full" else kind for kind in config.layer_kinds
    )


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; those of the Mamba layers, then those of the shared blocks."""
    D, std = config.hidden_size, config.initializer_range
    mixer = {"input_layernorm": norm(D, "embed"), "attention": mamba_leaves(D, config.mixer, std=std)}
    joining = mixer | {"left_proj": weight((D, D), ("embed", "embed"), std)}
    layers: list[Tree] = [joining if i in config.hybrid_layers else mixer for i in range(config.mamba_layers)]
    blocks = range(config.shared_blocks if config.hybrid_layers else 0)
    return decoder_leaves(config, [*layers, *(_block_leaves(config, len(config.uses(i))) for i in blocks)])


def _block_leaves(config: Config, uses: int) -> Tree:
    D, std = config.hidden_size, config.initializer_range
    heads, kv_heads, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    attention = {
        name: replace(leaf, axes=(leaf.axes[0], "embed_twice"))
        for name, leaf in attention_leaves(2 * D, heads, kv_heads, H, std=std).items()
    }
    attention["o_proj"] = weight((D, heads * H), ("embed", "heads"), std, unit=H)
    return {
        "input_layernorm": norm(2 * D, "embed_twice"),
        "attention": attention,
        "post_attention_layernorm": norm(D, "embed"),
        "mlp": usual_mlp(config, biases=config.mlp_bias),
        "adapters": [_adapter_leaves(config, attention) for _ in range(uses)],
    }


def _adapter_leaves(config: Config, attention: dict[str, Leaf]) -> Tree:
    """{projection_a_proj: [rank, in], projection_b_proj: [out, rank]}; gate and up have the first in common."""
    D, F, rank, std = config.hidden_size, config.intermediate_size, config.adapter_rank, config.initializer_range
    leaves = {"mlp_a_proj": weight((rank, D), ("activation", "embed"), std)}
    leaves |= {f"{name}_b_proj": weight((F, rank), ("mlp", "activation"), std) for name in ("gate", "up")}
    for name in "qkv" if config.attention_adapters else "":
        full = attention[f"{name}_proj"]
        leaves[f"{name}_a_proj"] = weight((rank, 2 * D), ("latent", "embed_twice"), std)
        leaves[f"{name}_b_proj"] = weight((full.shape[0], rank), (full.axes[0], "latent"), std, unit=full.unit)
    return leaves


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; a shared block stands in the first layer that reads it."""
    names: dict[str, Stored] = {path: decoder.decoder_name(path) for path in flatten(spec(config))}
    names["norm"] = "model.final_layernorm.weight"
    for layer in range(config.mamba_layers):
        ours = there = f"layers.{layer}"
        if layer in config.hybrid_layers:
            names[f"{ours}.left_proj"], there = f"model.{ours}.linear.weight", f"{ours}.mamba_decoder"
        names[f"{ours}.input_layernorm"] = f"model.{there}.input_layernorm.weight"
        names |= mamba_names(config.mixer, f"{ours}.attention", f"model.{there}.mamba")
    for block, layer in enumerate(config.hybrid_layers[: config.shared_blocks]):
        ours, there = f"layers.{config.mamba_layers + block}", f"model.layers.{layer}.shared_transformer"
        for path in [path for path in names if path.startswith(f"{ours}.")]:
            names[path] = _of_block(path.removeprefix(f"{ours}."), there)
        for last, theirs in (("proj", "weight"), *(("bias", "bias"),) * config.mlp_bias):
            rows = {f"{ours}.mlp.{name}_{last}": config.intermediate_size for name in ("gate", "up")}
            names |= fuse(f"{there}.feed_forward.gate_up_proj.{theirs}", rows)
        for number, use in enumerate(config.uses(block)):
            names |= _adapter_names(f"{ours}.adapters.{number}", there, use, config)
    return names


def hf_copies(config: Config) -> dict[str, str]:
    """{name on disk: path of the parameter that it repeats}: of the later layers that read a shared block."""
    copies: dict[str, str] = {}
    for path, stored in hf_names(config).items():
        block = int(path.split(".")[1]) - config.mamba_layers if path.startswith("layers.") else -1
        for use in config.uses(block)[1:] if block >= 0 else ():
            first, layer = (f"model.layers.{config.hybrid_layers[i]}." for i in (block, use))
            copies |= {name.replace(first, layer): path for name in disk_names(stored)}
    return copies


def _of_block(path: str, there: str) -> str:
    own = f".{path}".replace("post_attention", "pre_ff").replace(".mlp.", ".feed_forward.")
    return decoder.decoder_name(own).replace("model.", f"{there}", 1)


def _adapter_names(ours: str, there: str, use: int, config: Config) -> dict[str, Stored]:
    attention, mlp = f"{there}.self_attn.linear_", f"{there}.feed_forward.gate_up_proj_adapter_list.{use}"
    names: dict[str, Stored] = {f"{ours}.mlp_a_proj": f"{mlp}.0.weight"}
    names |= fuse(f"{mlp}.1.weight", {f"{ours}.{name}_b_proj": config.intermediate_size for name in ("gate", "up")})
    for name in "qkv" if config.attention_adapters else "":
        halves = {half: f"{attention}{name}_adapter_list.{use}.{i}.weight" for i, half in enumerate("ab")}
        names |= {f"{ours}.{name}_{half}_proj": stored for half, stored in halves.items()}
    return names


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}: causal for shared blocks, `fnmodels.inputs.Segments` for Mamba layers."""
    masks = decoder.attention_masks(config, positions, segment_ids, create=create)
    return {
        kind: masks["full" if LayerKind.parse(kind).attends == "full" else kind] for kind in sorted(set(kinds(config)))
    }


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}; R is 0 in Mamba layers, and in all of a model without positions."""
    still = no_rotation(positions)
    tables = decoder.freqs_cis(config, positions, length=length) if config.rotary else {"full": still}
    return {
        kind: tables["full"] if LayerKind.parse(kind).attends == "full" else still
        for kind in sorted(set(kinds(config)))
    }


def layer_inputs(params: Tree, inputs: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """[B, S, passes, D]: x, the embedding, for each."""
    return x[:, :, None].expand(-1, -1, config.num_hidden_layers, -1)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One pass: x [B, S, D] -> x, which a shared block returns as it is."""
    eps = config.rms_norm_eps
    if LayerKind.parse(kind).ordered:
        read = x + linear(ctx.left(), layer["left_proj"]) if kind == "linear_joins" else x
        normed = rms_norm(read, layer["input_layernorm"], eps=eps)
        return x + ctx.tap("attention", mamba(layer["attention"], normed, mask, config.mixer, ctx, eps=1e-5))
    weights, mlp, adapters = layer["attention"], layer["mlp"], layer["adapters"][int(kind.split("_")[1])]
    normed = rms_norm(torch.cat((x, ctx.layer_input()), -1), layer["input_layernorm"], eps=eps)
    projected: Iterable[Tensor] = linears(normed, weights, "qkv")
    if config.attention_adapters:
        projected = _adapted(projected, linears(normed, adapters, ("q_a", "k_a", "v_a")), adapters, "qkv")
    q, k, v = (split_heads(one, config.head_dim) for one in projected)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=(config.head_dim / 2) ** -0.5))
    normed = rms_norm(mixed, layer["post_attention_layernorm"], eps=eps)
    inner = linear(normed, adapters["mlp_a_proj"])
    gate, up = _adapted(linears(normed, mlp, ("gate", "up")), (inner, inner), adapters, ("gate", "up"))
    neurons = ctx.tap("mlp.neurons", glu(ctx.tap("mlp.pre", gate), up, activation=config.hidden_act))
    ctx.leave(linear(neurons, mlp["down_proj"], mlp.get("down_bias")))
    return x.view_as(x)  # another tensor: rematerialisation in a transform returns no input as it is


def _adapted(full: Iterable[Tensor], inner: Iterable[Tensor], adapters: Tree, names: Iterable[str]) -> list[Tensor]:
    """What the projections of these names return, `full`, with what their adapters add to it."""
    both = zip(full, inner, names, strict=True)
    return [whole + linear(low, adapters[f"{name}_b_proj"]) for whole, low, name in both]


PRESETS: dict[str, ConfigJson] = {
    "zamba2-2.7b": {"model_type": "zamba2", "vocab_size": 32000, "hidden_size": 2560, "num_hidden_layers": 54}
    | {"num_attention_heads": 32, "n_mamba_heads": 80, "num_mem_blocks": 2}
}
