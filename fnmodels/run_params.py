"""Params that carry how a run calls the model: a train step, a mesh or a pipeline adapts forward passes through them.

    loss(RunParams(params, run), batch)          # in it, fnmodels.hidden(params, ...) does what `run` makes of the call

So a function of (params, batch) needs no keyword for what a run adds: state is in the params, and nothing is global.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from .inputs.mask import MaskLike
from .options import ForwardOptions
from .tree import Tree, pytree_dict


class Run(Protocol):
    """What adapts the calls of a model."""

    def adapted(self, options: ForwardOptions, masks: Mapping[str, MaskLike]) -> ForwardOptions:
        """The options with which layers run, from those that the caller gave."""
        ...

    def hidden(
        self,
        params: RunParams,
        inputs: Tree,
        masks: Mapping[str, MaskLike],
        freqs_cis: Mapping[str, Tensor],
        config: Any,
        taps: tuple[str, ...],
        options: ForwardOptions,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(final hidden states, taps), as `fnmodels.hidden` of the plain params with adapted options."""
        ...


@pytree_dict
class RunParams(dict[str, Any]):
    """A params tree with the `Run` that adapts calls with it. `fnmodels.tree.map` of one (a cast, say) is one again."""

    def __init__(self, params: Mapping[str, Any], run: Run) -> None:
        super().__init__(params)
        self.run = run

    def with_entries(self, entries: Mapping[str, Any], /) -> RunParams:
        """Other params for the same run."""
        return RunParams(entries, self.run)


def with_run(params: Tree, entries: dict[str, Any]) -> dict[str, Any]:
    """`entries` for the run of `params`, where these have one."""
    return params.with_entries(entries) if isinstance(params, RunParams) else entries
