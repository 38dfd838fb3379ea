"""Layer-by-layer comparison of a checkpoint in fnmodels with the same checkpoint in transformers, for porting a family.

    python -m params.compare CHECKPOINT_FOLDER [--against transformers] [--length TOKENS]

Both load the same files. The names and shapes of their leaves are compared first, then the leaves' values, then the
activations on one short random batch, layer by layer, and the logits where tokens are padded, packed and shifted.
Features that only take effect beyond that length (a sliding window, say) are listed as not compared.

command      the command and its order of comparisons
reference    the model in transformers: how it is loaded and what its tensors are called
batches      arrangements of tokens, those that transformers reads wrongly, features that they do not reach
leaves       differences of leaves; activations: taps of both models
table        activations side by side, and what follows from them
"""

from .batches import their_mistakes
from .command import compare, main

__all__ = ["compare", "main", "their_mistakes"]
