"""FLOPs per token for model FLOPs utilization (MFU), and peak memory.

    MFU = tokens per second x FLOPs per token / the machine's peak in FLOP/s
    FLOPs per token = 6 W + 4 W_frozen + 6 S x (width of all heads, summed over the layers)

W counts the matmul weights applied to a token: the head, but not the embedding table; of E experts the k that are
routed to, and a layer as often as it runs. Each weight costs 2 FLOPs in the forward pass and 4 in the backward pass, or
2 where it is frozen. Attention is causal over a row of S tokens that is one document, so each token attends to S / 2 on
average (arXiv 2204.02311, appendix B, counts S). Recurrent layers count by their weights alone. Rematerialization is
not counted.
"""

import math
import resource
import sys
from collections import Counter

from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.models.common.spec import Leaf
from fnmodels.tree import Tree
from params.axes import EXPERT, HEADS

TABLES = ("embed_tokens", "embed_positions", "embed_tokens_per_layer")


def flops_per_token(config: DecoderConfig, spec: Tree, length: int) -> float:
    """FLOPs of forward and backward per token, in rows of `length`. spec: the family's, or `params.lora.spec`'s."""
    leaves = {path.removesuffix(".weight"): leaf for path, leaf in tree.flatten(spec).items()}
    tables = TABLES if "lm_head" in leaves else TABLES[1:]  # a tied embedding table is the head too
    passes, flops = Counter(field_of(config, "passes")), 0.0
    for path, leaf in leaves.items():
        if len(leaf.shape) < 2 or path in tables or path.endswith("_bias") or path.startswith("mtp."):
            continue
        active = field_of(config, "num_experts_per_tok") / leaf.shape[0] if leaf.axes[0] == EXPERT else 1.0
        times = passes[int(path.split(".")[1])] if passes and path.startswith("layers.") else 1
        flops += times * (6 if leaf.trainable else 4) * math.prod(leaf.shape) * active
        flops += times * 6 * length * _heads_width(config, path, leaf)
    return flops


def _heads_width(config: DecoderConfig, path: str, leaf: Leaf) -> int:
    """The width of all heads, where the leaf is the first that reads what they return; else 0."""
    if path.endswith(".o_proj") and leaf.axes[1] == HEADS:
        return leaf.shape[1]
    return config.num_attention_heads * config.head_dim if path.endswith(".attention.o_a") else 0  # by groups of heads


def peak_memory() -> int:
    """The peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS reports bytes, Linux KiB
