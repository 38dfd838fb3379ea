"""GPT-J 6B (EleutherAI, 2021) and CodeGen (Salesforce; arXiv 2203.13474).

Parallel attention and MLP, which share one LayerNorm, interleaved rotary embedding of a part of each head, biases in
the MLP alone, and an output head with a bias. CodeGen fuses q, v and k, in this order, in four blocks of heads.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, older  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, decoder_leaves, layer_norm_leaves, plain_mlp_leaves, usual_attention
from fnmodels.models.common.storage import Stored, StoredNames, TensorSlice
from fnmodels.ops import Rope, apply_rotary_interleaved, layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("gptj", "codegen")
TRAITS = Traits(
    dropout={"attn_pdrop": ("weights",), "resid_pdrop": ("attention", "mlp"), "embd_pdrop": ("embedding",)},
    # mask buffers in older files, and tables of sines
    leftovers=(r"transformer\.h\.\d+\.attn\.((masked_)?bias|causal_mask|embed_positions)",),
)
_ARCHITECTURES = {"gptj": "GPTJForCausalLM", "codegen": "CodeGenForCausalLM"}
_BLOCKS = 4  # of CodeGen's fused weight: the processors of its training
_ON_DISK = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.": ".attn.",
    ".o_proj.": ".out_proj.",
    ".input_layernorm.": ".ln_1.",
    ".up_proj.": ".fc_in.",
    ".down_proj.": ".fc_out.",
}


@dataclass(frozen=True)
class Config(older.OlderConfig):
    """Sizes and switches."""

    hidden_act: str = "gelu_new"
    max_position_embeddings: int = 2048

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields, usual = older.older_fields(
            values, MODEL_TYPES, older.GPT_NAMES, positions=2048, tied=False, activation="gelu_new"
        )
        head_dim = usual["hidden_size"] // usual["num_attention_heads"]
        rotated = fields.integer("rotary_dim", 64, high=head_dim)
        fields.expect("scale_attn_weights", True)
        fields.expect("rotary", True)
        config = Config(**usual, rope=Rope(partial=rotated / head_dim))
        return decoder.finished(config, fields, older.UNUSED)

    def to_hf(self) -> ConfigJson:
        """A config.json under the names of published files."""
        rotated = self.rope.dim(self.head_dim)
        return older.older_to_hf(self, _ARCHITECTURES[self.model_type], older.GPT_NAMES, rotary_dim=rotated)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. The output head has a bias even if its weight is tied."""
    layer = {
        **layer_norm_leaves("input_layernorm", config.hidden_size, "embed"),
        "attention": usual_attention(config),
        "mlp": plain_mlp_leaves(config.hidden_size, config.intermediate_size, std=config.initializer_range),
    }
    tree = decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)
    return tree | {"lm_head_bias": bias(config.vocab_size, "vocab")} if decoder.is_lm(config) else tree


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows in each block of qkv_proj}."""
    names: StoredNames = {path: decoder.decoder_name(path) for path in flatten(spec(config))}
    for ours, theirs in _ON_DISK.items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    if "lm_head_bias" in names:
        names["lm_head_bias"] = "lm_head.bias"
    return {path: _fused(name, config.hidden_size) for path, name in names.items()} if _is_codegen(config) else names


def _is_codegen(config: Config) -> bool:
    return config.model_type == "codegen"


def _fused(name: str, width: int) -> Stored:
    for place, which in enumerate("qvk"):
        if f".{which}_proj." in name:
            rows = width // _BLOCKS
            name = name.replace(f".{which}_proj.", ".qkv_proj.")
            return TensorSlice(name, place * rows, (place + 1) * rows, 3 * width, groups=_BLOCKS)
    return name


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights = layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=config.layer_norm_eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = x + ctx.tap("attention", project_out(weights, mixed))
    return x + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


unembed = decoder.unembed_layer_norm  # whose head has a bias

_SIZES = ("n_embd", "n_layer", "n_head", "rotary_dim")
PRESETS = {
    name: {"model_type": model_type, "vocab_size": vocab, **dict(zip(_SIZES, sizes, strict=True))}
    for name, model_type, vocab, *sizes in (
        ("gpt-j-6b", "gptj", 50400, 4096, 28, 16, 64),
        ("codegen-350m", "codegen", 51200, 1024, 20, 16, 32),
        ("codegen-2b", "codegen", 51200, 2560, 32, 32, 64),
        ("codegen-6b", "codegen", 51200, 4096, 33, 16, 64),
        ("codegen-16b", "codegen", 51200, 6144, 34, 24, 64),
    )
}
