"""Latent attention whose indexer chooses keys (`fnmodels.ops.indexer`): Config fields, parameters and names on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fnmodels.errors import ConfigError
from fnmodels.models.common.config_json import Fields, shown
from fnmodels.models.common.moe import GroupedConfig
from fnmodels.models.common.spec import Leaf, layer_norm_leaves, weight
from fnmodels.models.common.storage import Stored

ATTENTION = {"indexed_attention": "", "deepseek_sparse_attention": ""}  # what `layer_types` may say
INDEXERS = {"full": "indexed", "shared": "indexed_shared"}  # {entry of `indexer_types`: the beginning of the kind}
MLP = {"dense": "", "sparse": "_moe"}  # {entry of `mlp_layer_types`: the end of the layer's kind}


@dataclass(frozen=True, kw_only=True)
class IndexedConfig(GroupedConfig):
    """The Config fields of latent attention with an indexer and a mixture with a shared expert."""

    num_key_value_heads: int = field(init=False)  # as many as query heads
    head_dim: int = field(init=False)  # the rotary dimensions of a head
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int  # keys of a query
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False  # of the projections that read x, and of o

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        super().__post_init__()
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ConfigError(f"index_head_dim {self.index_head_dim} is below qk_rope_head_dim {self.head_dim}.")


def per_layer(fields: Fields, name: str, known: Mapping[str, str], default: Sequence[str]) -> list[str]:
    """The value in `known` of each layer's entry in the list of field `name`; ConfigError if it is not such a list."""
    given = fields.take(name, default)
    if not isinstance(given, list) or len(given) != len(default) or any(one not in list(known) for one in given):
        wanted = f"a list of {len(default)} entries, each {' or '.join(map(repr, known))}"
        raise ConfigError(f"{fields.where}: {name!r} is {shown(given)}, but must be {wanted}.")
    return [known[one] for one in given]


def indexer_types(fields: Fields, layers: int) -> list[str]:
    """`indexer_types` by the older fields: a pattern of letters, or one indexer in `index_topk_freq` layers."""
    every, offset = fields.integer("index_topk_freq", 1), fields.integer("index_skip_topk_offset", 2, low=0)
    pattern = fields.take("index_topk_pattern", None)
    if pattern is None:
        return ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
    letters = {"F": "full", "S": "shared"}
    if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - set(letters):
        raise ConfigError(f"{fields.where}: 'index_topk_pattern' is {shown(pattern)}, but must be {layers} of F and S.")
    return [letters[letter] for letter in pattern]


def indexer_leaves(config: Any) -> dict[str, Leaf]:
    """Parameters of `fnmodels.ops.indexer`; every process of tensor parallelism has all heads, to choose alike."""
    width, heads, std = config.index_head_dim, config.index_n_heads, config.initializer_range
    leaves = {
        "q_b_proj": weight((heads * width, config.q_lora_rank), ("latent", "latent"), std),
        "k_proj": weight((width, config.hidden_size), ("latent", "embed"), std),
        **layer_norm_leaves("k_norm", width, "latent"),
        "weights_proj": weight((heads, config.hidden_size), ("latent", "embed"), std),
    }
    return {name: replace(leaf, trainable=False) for name, leaf in leaves.items()}


def indexer_names(names: Mapping[str, Stored]) -> dict[str, Stored]:
    """{path: name on disk} with the names that an indexer's projections have in the files."""
    return {
        path: name.replace(".q_b_proj.", ".wq_b.").replace(".k_proj.", ".wk.")
        if isinstance(name, str) and ".indexer." in name
        else name
        for path, name in names.items()
    }
