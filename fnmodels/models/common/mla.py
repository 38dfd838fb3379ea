"""Default parts of a family with multi-head latent attention (`fnmodels.ops.mla`): Config fields and names on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fnmodels.errors import UnsupportedError
from fnmodels.ops.mla import Widths
from fnmodels.ops.mlp import ACTIVATIONS

from .config_json import ConfigJson, Fields
from .decoder import decoder_sizes
from .family import LatentConfig
from .moe import GroupedConfig
from .storage import Stored

# Fields that `latent_from_hf` reads and `decoder.decoder_to_hf` writes unchanged.
NAMES = (
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("rms_norm_eps", "attention_bias", "hidden_act"),
)

# {name in the files of Kimi Linear and Ling 3: that of families alike}
ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


@dataclass(frozen=True, kw_only=True)
class LatentMixtureConfig(GroupedConfig):
    """The Config fields of latent attention and a mixture with a shared expert, as in DeepSeek V3."""

    num_key_value_heads: int = field(init=False)  # as many as query heads: MLA expands the latent per head
    head_dim: int = field(init=False)  # the rotary dimensions of a head, which Hugging Face's files call head_dim
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: queries without a latent
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False  # of the projections that read x, and of o

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        super().__post_init__()


def latent_from_hf(
    fields: Fields, *, max_positions: int, kv_heads: int, q_rank: int, nope_dim: int, rope_head: bool
) -> dict[str, Any]:
    """The Config fields NAMES, rope_interleave, and those of `decoder_sizes` but head_dim and num_key_value_heads.

    Keywords are the family's defaults. rope_head: the files' head_dim is the part of a head with RoPE, else P + R.
    """
    nope, rotating = fields.integer("qk_nope_head_dim", nope_dim), fields.integer("qk_rope_head_dim", 64)
    head_dim = rotating if rope_head else nope + rotating
    sizes = decoder_sizes(fields, max_positions=max_positions, tied=False, kv_heads=kv_heads, head_dim=head_dim)
    # In these families they follow from other fields, and transformers ignores them.
    for name, value in (("head_dim", head_dim), ("num_key_value_heads", sizes["num_attention_heads"])):
        if sizes.pop(name) != value:
            raise UnsupportedError(f"{fields.where}: {name!r} must be {value} in this family.")
    fields.expect("qk_head_dim", nope + rotating)
    q_rank = 0 if "q_lora_rank" in fields.values else q_rank  # an explicit null
    return sizes | {
        "kv_lora_rank": fields.integer("kv_lora_rank"),
        "q_lora_rank": fields.integer("q_lora_rank", q_rank, low=0) or None,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rotating,
        "v_head_dim": fields.integer("v_head_dim"),
        "rope_interleave": fields.boolean("rope_interleave", True),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention_bias": fields.boolean("attention_bias", False),
        "hidden_act": fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
    }


def under_aliases(values: ConfigJson) -> ConfigJson:
    """A config.json whose fields have the names of ALIASES."""
    published = {name: alias for alias, name in ALIASES.items()}
    return {published.get(name, name): value for name, value in values.items()}


def latent_widths(config: LatentConfig) -> Widths:
    """Widths of a head."""
    return Widths(config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)


def latent_names(names: Mapping[str, Stored]) -> dict[str, Stored]:
    """{path: name on disk} with the name that the joint projection of latent and rotary key has in the files."""
    return {p: n.replace("kv_a_proj", "kv_a_proj_with_mqa") if isinstance(n, str) else n for p, n in names.items()}
