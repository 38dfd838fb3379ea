"""Runs one rank's stages on the microbatches of a batch, by torch's own schedules.

A schedule receives only the numbers of the microbatches, so no tensor passes through torch's chunking, which silently
splits tensors without a batch dimension, and a mask may have any form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fnmodels import tree
from fnmodels.tree import Tree
from train.losses.model_loss import Batch, ModelLoss

from .microbatch import microbatches
from .schedule import SINGLE, Pipeline
from .staged_loss import Result, loss_result, run_stage
from .tree_split import check_share, cut, width_of
from .types import Microbatch, StageHooks


class _Stage(nn.Module):
    """The module that torch's stages expect; its parameters are the trainable ones of `params`.

    index: the number of a microbatch, the only input that the schedule splits.
    """

    def __init__(self, run: Callable[..., tuple[tuple[Tensor, Tensor], dict[str, Tensor]]]) -> None:
        super().__init__()
        self.run = run
        self.params: Tree = {}
        self.parts: Sequence[Microbatch] = ()
        self.found: list[tuple[Tensor, dict[str, Tensor]]] = []

    def bind(self, params: Tree, parts: Sequence[Microbatch]) -> None:
        self.params, self.parts, self.found = params, parts, []
        self._parameters.clear()
        for path, leaf in tree.flatten(params).items():
            if isinstance(leaf, nn.Parameter):
                self.register_parameter(path.replace(".", "/"), leaf)

    def forward(self, *x: Tensor, index: Tensor) -> Tensor:
        (out, beside), sums = self.run(self.params, x[0] if x else None, self.parts[int(index)])
        self.found.append((beside, sums))
        if torch.is_grad_enabled() and not out.requires_grad:
            # No parameter up to here is trainable, but the next stage sends a gradient in any case.
            out = out.detach().requires_grad_()
        return out


Found = list[list[tuple[Any, dict[str, Tensor]]]]  # [stage of this rank][microbatch]: (count or term, aux)
Run = Callable[[Tree, Sequence[Batch], bool], tuple[list[Tensor], Found]]


def runner(
    loss: ModelLoss,
    pipe: Pipeline,
    group: dist.ProcessGroup | None,
    hooks: StageHooks,
    result: Result = loss_result,
) -> Run:
    """run(params, parts, train) -> (losses of the last stage, `Found`); gradients are left in the parameters' .grad.

    ValueError for a process group of another size than the pipeline.
    """
    if dist.get_world_size(group) != pipe.size:
        raise ValueError(f"The pipeline has {pipe.size} ranks, but its process group {dist.get_world_size(group)}.")
    stages, width = pipe.stages(dist.get_rank(group)), width_of(pipe.config)
    made: dict[Any, tuple[list[_Stage], Any]] = {}

    def run(params: Tree, parts: Sequence[Batch], train: bool) -> tuple[list[Tensor], Found]:
        check_share(params, pipe.config, pipe, stages)
        ready = microbatches(loss, pipe, params, parts)
        cuts = [cut(params, pipe.config, pipe, (stage,)) for stage in stages]
        sizes, device = ready[0].batch["tokens"].shape[:2], ready[0].batch["tokens"].device
        dtype = hooks.dtype or _main_dtype(params["layers"])
        state = torch.empty(*sizes, width, dtype=dtype, device="meta", requires_grad=train)
        key = (len(ready), state.shape, state.dtype, device, train)
        if key not in made:
            made.clear()  # torch keeps a receive buffer per microbatch: varying lengths would fill the memory
            modules = [_Stage(functools.partial(_run, loss, pipe, stage, hooks, result)) for stage in stages]
            made[key] = modules, _schedule(pipe, modules, stages, len(ready), state, device, group, train)
        modules, schedule = made[key]
        for module, part in zip(modules, cuts, strict=True):
            module.bind(part, ready)
        numbers, losses = torch.arange(len(ready)), list[Tensor]()
        act = schedule.step if train else schedule.eval
        act(index=numbers, target=numbers, losses=losses, return_outputs=False)
        found = [module.found for module in modules]
        for module in modules:
            module.bind({}, ())  # frees the batch
        return losses, found

    return run


def _run(
    loss: ModelLoss,
    pipe: Pipeline,
    stage: int,
    hooks: StageHooks,
    result: Result,
    params: Tree,
    x: Tensor | None,
    part: Microbatch,
) -> tuple[tuple[Tensor, Any], dict[str, Tensor]]:
    return run_stage(loss, params, x, part, pipe, stage, hooks=hooks, result=result)


def _schedule(
    pipe: Pipeline,
    modules: Sequence[_Stage],
    stages: Sequence[int],
    count: int,
    state: Tensor,
    device: torch.device,
    group: dist.ProcessGroup | None,
    train: bool,
) -> Any:
    """torch's schedule for `count` microbatches with hidden states of the shape and dtype of `state`."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    last = len(pipe.layers) - 1
    total = torch.empty((), device="meta", requires_grad=train)
    made = [
        PipelineStage(
            module,
            stage,
            last + 1,
            device,
            input_args=() if stage == 0 else (state,),
            output_args=(total,) if stage == last else (state,),
            group=group,
        )
        for module, stage in zip(modules, stages, strict=True)
    ]
    kind: Any = get_schedule_class(pipe.schedule)
    # Losses are sums: torch would divide the gradients by the number of microbatches.
    single = pipe.schedule in SINGLE
    schedule = kind(made[0] if single else made, n_microbatches=count, loss_fn=_the_loss, scale_grads=False)
    if single:
        return schedule
    if not train:
        from torch.distributed.pipelining import schedules

        waiting = schedule.bwd_recv_ops  # instead of the schedule, which would be a reference cycle

        def passed(action: Any, _: Any) -> None:
            waiting.pop((action.stage_index, action.microbatch_index), None)  # the next step would find it

        # Its `eval` visits the backward passes too, and waits for gradients between the two stages of a rank in a V.
        for act in (schedules.FULL_BACKWARD, schedules.BACKWARD_INPUT, schedules.BACKWARD_WEIGHT):
            schedule.register_custom_function(act, passed)
    return schedule


def _the_loss(output: Tensor, _: Tensor) -> Tensor:
    """The output of the last stage, which is the loss."""
    return output


def _main_dtype(layers: Tree) -> torch.dtype:
    """The dtype of the largest parameter: others (norms, selection biases) may be wider."""
    largest: Tensor = max(tree.leaves(layers), key=lambda leaf: leaf.numel())
    return largest.dtype
