"""`RunParams`: a params tree that carries a `Run`, through which a train step, mesh or pipeline adapts forward passes.

    loss(RunParams(params, run), batch)          # fnmodels.hidden(params, ...) inside the loss calls run.prepare

A loss of (params, batch) thus needs no keyword for the options of a run, and there is no global state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from .inputs.mask import MaskLike
from .options import ForwardOptions
from .tree import Tree, pytree_dict


class Stage(Protocol):
    """A stage of a pipeline, whose layers may be of an encoder and of its decoder."""

    @property
    def layers(self) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """Called instead of the model's layers with (params, inputs, masks, freqs_cis, config, taps, options) -> (final
        hidden states [B, S, D], taps), equal to those of `fnmodels.hidden` with the full params."""
        ...


class Run(Protocol):
    """Adapts the forward passes of a model to a run (its mesh, remat, layout)."""

    @property
    def stage(self) -> Stage | None:
        """The stage of a pipeline that runs in place of all layers; None: all layers run."""
        ...

    def prepare(
        self,
        config: Any,
        inputs: Tree,
        masks: Mapping[str, MaskLike],
        freqs_cis: Mapping[str, Tensor],
        options: ForwardOptions,
        /,
    ) -> tuple[Mapping[str, Tensor], ForwardOptions]:
        """(freqs_cis, options) with which the layers run, from the arguments of the call."""
        ...


@pytree_dict
class RunParams(dict[str, Any]):
    """A params tree and the `Run` that adapts its forward passes. `fnmodels.tree.map` (a cast, say) keeps the run.

    A part with layers of its own, such as a tower of a model that reads images, is RunParams of the same run.
    """

    def __init__(self, params: Mapping[str, Any], run: Run) -> None:
        super().__init__(params)
        self.run = run

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return RunParams(value, self.run) if type(value) is dict and "layers" in value else value

    def with_entries(self, entries: Mapping[str, Any], /) -> RunParams:
        """`entries` as the params of the same run."""
        return RunParams(entries, self.run)


def with_run(params: Tree, entries: dict[str, Any]) -> dict[str, Any]:
    """`entries` as RunParams with the run of `params`, or unchanged if `params` is a plain tree."""
    return params.with_entries(entries) if isinstance(params, RunParams) else entries
