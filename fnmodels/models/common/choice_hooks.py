"""Methods of a `Context` by which a subclass follows the choice of blocks and windows of keys, or changes it."""

from typing import Any

from torch import Tensor


class ChoiceHooks:
    """What `choose_blocks`, `choose_windows` and `attend_to_windows` call with what they were given and have made."""

    def chose_blocks(self, weights: Any, x: Any, freqs: Any, mask: Any, seen: Any, *, indexer: Any, groups: int) -> Any:
        """What attention sees of a mask: `seen`, made by `choose_blocks` of its other arguments; x has no gradient."""
        return seen

    def chose_windows(
        self, weights: Any, inputs: Any, mask: Any, freqs: Any, among: Tensor | None, *, indexer: Any, how: Any
    ) -> Tensor | None:
        """The windows that are read: `among`, made by `choose_windows` of its other arguments, without gradients."""
        return among

    def saw_windows(
        self, q: Tensor, keys: Tensor, seen: Tensor, tokens: int, *, scale: float, sinks: Tensor | None
    ) -> None:
        """Attention of q [B, Q, N, H] over keys [B, K, 1, H], of which the first are of tokens and the rest of windows.

        seen: bool [B, 1, Q, K]. tokens: how many keys are of tokens.
        """
