"""Masked diffusion language models: LLaDA (arXiv 2502.09992), Dream (arXiv 2508.15487), SDAR (arXiv 2510.06303).

Llama's, Qwen 2's and Qwen 3's layers, whose tokens see their whole document; of SDAR all tokens of their own block of
`block_size` and of the blocks before it. The head says what stands in place of a mask token; of Dream, one place
later. `train.losses.masked_tokens` trains them, and `train.generation.unmask` writes with them.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Causal, Chunk, Everything
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.decoder.stated import stated
from fnmodels.models.common.dropout import with_dropout
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import decoder_leaves, head_norms, layer_leaves, usual_attention, usual_mlp
from fnmodels.ops import apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree

_CLASSES = {"llada": "LLaDAModelLM", "Dream": "DreamModel", "sdar": "SDARForCausalLM"}
MODEL_TYPES = tuple(_CLASSES)
TRAITS = Traits(heads=("lm",), causal=False)
_MASKS = {"llada": 126336, "Dream": 151666, "sdar": 151669}
_RENAMED = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
_RENAMED |= {"n_kv_heads": "num_key_value_heads", "mlp_hidden_size": "intermediate_size"}
_RENAMED |= {"max_sequence_length": "max_position_embeddings", "weight_tying": "tie_word_embeddings"}
_RENAMED |= {"activation_type": "hidden_act", "init_std": "initializer_range", "include_qkv_bias": "attention_bias"}
_OURS = {ours: theirs for theirs, ours in _RENAMED.items()}
# What LLaDA's code, which is OLMo's, can do and its models do not.
_FIXED: dict[str, tuple[Any, ...]] = {"alibi": (False,), "block_type": ("llama",), "rope": (True,)}
_FIXED |= {"layer_norm_type": ("rms",), "attention_layer_norm": (False,), "layer_norm_with_affine": (True,)}
_FIXED |= {"bias_for_layer_norm": (False,), "include_bias": (False,), "input_emb_norm": (False,)}
_FIXED |= {"scale_logits": (False,), "block_group_size": (1,), "multi_query_attention": (None, False)}
_UNUSED: tuple[str, ...] = (
    "alibi_bias_max",
    "attention_layer_norm_with_affine",
    "flash_attention",
    "mlp_ratio",
    "precision",
)
_UNUSED += ("rope_full_precision", "max_window_layers", "fuse_cross_entropy")
_ON_DISK = {
    r"^model\.embed_tokens\.": "model.transformer.wte.",
    r"^model\.norm\.": "model.transformer.ln_f.",
    r"^lm_head\.": "model.transformer.ff_out.",
    r"^model\.layers\.": "model.transformer.blocks.",
    r"\.input_layernorm\.": ".attn_norm.",
    r"\.post_attention_layernorm\.": ".ff_norm.",
    r"\.self_attn\.o_proj\.": ".attn_out.",
    r"\.self_attn\.": ".",
    r"\.mlp\.gate_proj\.": ".ff_proj.",
    r"\.mlp\.up_proj\.": ".up_proj.",
    r"\.mlp\.down_proj\.": ".ff_out.",
}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. block_size: tokens of a block of SDAR; None: a token sees its whole document.

    mask_token_id: stands where a token is to be found; `forward` knows no difference.
    """

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False  # of q, k and v
    qk_norm: bool = False
    block_size: int | None = None
    mask_token_id: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_sizes(self, *(() if self.block_size is None else ("block_size",)))

    @property
    def shift(self) -> int:
        """The distance by which a token's logits precede it: 1 for Dream, 0 for LLaDA."""
        return int(self.model_type == "Dream")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        model_type = Fields(values).choice("model_type", MODEL_TYPES)
        llada, sdar = model_type == "llada", model_type == "sdar"
        fields = renamed(Fields(values), _RENAMED) if llada else Fields(values)
        declared = fields.take("architectures", [_CLASSES[model_type]])
        if declared != [_CLASSES[model_type]]:
            raise UnsupportedError(
                f"{fields.where}: 'architectures' has {shown(declared)}; supported is {_CLASSES[model_type]}."
            )
        for name, only in _FIXED.items() if llada else ():
            fields.expect(name, *only)
        usual = decoder.base_fields(
            fields, MODEL_TYPES, max_positions=4096 if llada else 32768, theta=5e5 if llada else 1e6
        )
        for name in ("use_sliding_window", "mlp_bias"):
            fields.expect(name, False)
        fields.take("sliding_window", None)
        fields.expect("embedding_size", usual["vocab_size"])
        config = Config(
            **usual,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5 if llada else 1e-6),
            attention_bias=fields.boolean("attention_bias", model_type == "Dream"),
            qk_norm=sdar,
            block_size=fields.integer("block_size", 4) if sdar else None,
            mask_token_id=fields.integer("mask_token_id", _MASKS[model_type], low=0),
        )
        object.__setattr__(config, "extra", fields.finish((*_UNUSED, *stated(config, fields))))
        return with_dropout(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json under the published names."""
        own: ConfigJson = {"mask_token_id": self.mask_token_id, "attention_bias": self.attention_bias}
        own |= {"block_size": self.block_size} if self.model_type == "sdar" else {}
        names = ("rms_norm_eps", "hidden_act")
        return decoder.decoder_to_hf(self, _CLASSES[self.model_type], *names, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = usual_attention(config, qkv_bias=config.attention_bias)
    attention |= head_norms(config) if config.qk_norm else {}
    layer = layer_leaves(config.hidden_size, attention, usual_mlp(config))
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = decoder.hf_names(config)
    for ours, theirs in _ON_DISK.items() if config.model_type == "llada" else ():
        names = {path: re.sub(ours, theirs, str(name)) for path, name in names.items()}
    return {path: str(name) for path, name in names.items()}


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]."""
    rule = Everything() if config.block_size is None else Causal() | Chunk(config.block_size)
    return masks_of({"full": rule}, positions, segment_ids, create=create)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    if config.qk_norm:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


PRESETS: dict[str, ConfigJson] = {
    "llada-8b": {"model_type": "llada", "vocab_size": 126464, "d_model": 4096, "n_layers": 32, "n_heads": 32}
    | {"n_kv_heads": 32, "mlp_hidden_size": 12288},
    "dream-7b": {"model_type": "Dream", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
    | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    | {"max_position_embeddings": 131072},
    "sdar-8b": {"model_type": "sdar", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288}
    | {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}
