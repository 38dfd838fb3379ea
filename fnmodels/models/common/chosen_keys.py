"""The choice of a few keys for each query, by an indexer or as it was made before: what `Context.choose` does."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from fnmodels.inputs.convert import shape_of
from fnmodels.inputs.mask import MaskLike
from fnmodels.ops.attention.choice import Choice, reads_choices
from fnmodels.ops.indexer import (
    Indexer,
    all_visible,
    choose,
    chosen,
    chosen_places,
    index_keys,
    keys_of,
    keys_of_ranks,
)
from fnmodels.ops.invariant.attention import plan_tiles
from fnmodels.ops.mla import query_latent
from fnmodels.ops.slots import Entry
from fnmodels.options import ForwardOptions

NO_CHOICE = (
    "This layer takes the choice of keys of an earlier one, which is not run here: begin at a layer that has an "
    "indexer, or pass `choices` or `carried`."
)


class Layer(Protocol):
    """The members of a `Context` that the choice of keys reads, or records itself in."""

    options: ForwardOptions
    tensors: Mapping[str, Any]
    aux: dict[str, Any]

    def extend(self, new: Entry) -> Entry: ...

    def wants(self, name: str) -> bool: ...

    def tap(self, name: str, value: Tensor) -> Tensor: ...


class ChoiceHooks:
    """Methods of a `Context` by which a subclass follows the choice of blocks and windows of keys, or changes it.

    `choose_blocks`, `choose_windows` and `attend_to_windows` call them with what they were given and have made.
    """

    def chose_blocks(self, weights: Any, x: Any, freqs: Any, mask: Any, seen: Any, *, indexer: Any, groups: int) -> Any:
        """What attention sees of a mask: `seen`, made by `choose_blocks` of its other arguments; x has no gradient."""
        return seen

    def chose_windows(
        self, weights: Any, inputs: Any, mask: Any, freqs: Any, choices: Tensor | None, *, indexer: Any, keys: Any
    ) -> Tensor | None:
        """The names of the windows that are read: `choices`, made of the other arguments without gradients.

        inputs: x [B, S, D] and what queries are projected from, without gradients. keys: a function that returns
        `WindowKeys` of the index keys of all windows, with gradients.
        """
        return choices

    def saw_windows(
        self, q: Tensor, keys: Tensor, seen: Tensor | Choice, tokens: int, *, scale: float, sinks: Tensor | None
    ) -> None:
        """Attention of q [B, Q, N, H] over keys [B, K, 1, H], of which the first are of tokens and the rest of windows.

        seen: bool [B, 1, Q, K], or their places. tokens: how many keys are of tokens.
        """


def chosen_keys(
    layer: Layer, weights: Mapping[str, Any], x: Tensor, freqs: Tensor, mask: MaskLike, indexer: Indexer
) -> Any:
    """The mask of the keys that a layer chooses, or takes of an earlier one: `Context.choose`, without gradients."""
    indexer_weights, choices, kernel = weights.get("indexer"), layer.tensors.get("choices"), layer.options.kernel
    ranks = keys_of_ranks(kernel)
    whole = mask if ranks is None else ranks.mask(mask)
    everything, cached = choices is None and shape_of(whole)[-1] <= indexer.count, "cache" in layer.tensors
    k: Tensor | None = None
    if indexer_weights is not None and (cached or (choices is None and not everything)):
        k = index_keys(indexer_weights, x, freqs, indexer)
        k = layer.extend({"index": k})["index"] if cached else k
        k = k if ranks is None or everything else ranks.gather(k)
    if everything:
        if indexer_weights is not None and layer.wants("choices"):
            layer.aux["choices"] = all_visible(keys_of(whole)).expand(x.shape[0], -1, -1)
        return mask
    if kernel in ("blocks", "varlen"):
        raise ValueError(
            f'kernel="{kernel}" reads rules, and here each query sees {indexer.count} keys that the layer chose: '
            '"auto", "sdpa" and kernel="math" take any mask.'
        )
    keys = keys_of(whole)
    if choices is None:
        if indexer_weights is None or k is None:
            raise ValueError(NO_CHOICE)
        choices = choose(indexer_weights, x, query_latent(weights, x, indexer.latent_eps), k, freqs, keys, indexer)
    if indexer_weights is not None:
        choices = layer.aux["chosen"] = layer.tap("choices", choices)
    if reads_choices(kernel) and shape_of(whole)[1] == 1:
        return chosen_places(keys, choices)
    allowed = chosen(keys, choices)
    return plan_tiles(mask, allowed) if layer.options.invariant else allowed
