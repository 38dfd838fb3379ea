"""Low-rank adapters (LoRA, arXiv 2106.09685) as a rewrite of the parameter tree; models need no change.

    params = P.lora.add(config, params, rank=8, targets=("q_proj", "v_proj"), seed=0)
    optimizer = train.adamw(1e-4, spec=P.lora.spec(config, params))     # trains the adapters only
    P.lora.save_adapters("adapters", config, params)                    # in PEFT's format
    params = P.lora.merge(params)                                       # plain weights again

A target becomes a node `Lora` of three leaves, at path.weight, path.a and path.b. Passed to `F.linear` as the weight,
it computes x W^T + scale (x A^T) B^T, so that the gradient of the full weight is never computed. With DoRA (arXiv
2402.09353) a fourth, path.magnitude, replaces the norm of each row of W + scale B A. `per_row` gives each row of a
batch its own adapters. `unfreeze` trains parameters in full beside the adapters: a node `Replaced`.

Where the weight is a DTensor, so is its adapter: b is sharded like the weight's rows and a like its columns, so that
the shards of both make up the shard of the weight, and nothing here communicates.
"""

from .adapt import adapters, add, attach, merge, per_row, spec, unfreeze, weights
from .adapter_config import CONFIG
from .leaves import is_linear, map_leaves, targets
from .nodes import Lora, Replaced, RowLora, TwoUses
from .peft_load import WEIGHTS, load_adapters
from .peft_save import export_adapters, peft_config, save_adapters

__all__ = ["add", "unfreeze", "merge", "spec", "targets", "adapters", "weights", "attach", "per_row", "Lora"]
__all__ += ["RowLora", "Replaced", "TwoUses", "save_adapters", "load_adapters", "export_adapters", "peft_config"]
__all__ += ["is_linear", "map_leaves", "CONFIG", "WEIGHTS"]
