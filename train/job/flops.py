"""What a step costs: time, memory, and how much of the machine's peak the model makes use of (MFU).

    MFU = tokens per second x FLOPs per token / the machine's peak in FLOP/s
    FLOPs per token = 6 W + 4 W_frozen + 6 S x (width of all heads, summed over the layers)

W are the weights of matmuls that a token meets: the head counts, the table of embeddings does not; of E experts the k
that are chosen do. Each costs 2 in the forward pass and 4 in the backward, or 2 where it is frozen. Attention is
counted as over a row of S tokens that is one document, each token seeing half of it (arXiv 2204.02311, appendix B,
which counts all of it). Recomputation is not counted.
"""

import math
import resource
import sys
from typing import Any

from fnmodels import tree
from fnmodels.tree import Tree

TABLES = ("embed_tokens", "embed_positions")


def flops_per_token(config: Any, spec: Tree, length: int) -> float:
    """Of forward and backward in a row of `length` tokens. spec: the family's, or `params.lora.spec`'s."""
    leaves = {path.removesuffix(".weight"): leaf for path, leaf in tree.flatten(spec).items()}
    tables = TABLES if "lm_head" in leaves else TABLES[1:]  # a tied table is the head too
    flops = 0.0
    for path, leaf in leaves.items():
        if len(leaf.shape) < 2 or path in tables or path.endswith("_bias") or path.startswith("mtp."):
            continue
        chosen = config.num_experts_per_tok / leaf.shape[0] if leaf.axes[0] == "expert" else 1.0
        flops += (6 if leaf.trainable else 4) * math.prod(leaf.shape) * chosen
        if path.endswith(".o_proj"):
            flops += 6 * length * leaf.shape[1]
    return flops


def peak_memory() -> int:
    """Bytes of main memory that this process has held at most, the text and Python's own among them."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
