"""Runs one rank's stages on the microbatches of a batch, by torch's own schedules.

A schedule receives only the numbers of the microbatches, so no tensor passes through torch's chunking, which silently
splits tensors without a batch dimension, and a mask may have any form.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fnmodels import tree
from fnmodels.tree import Tree
from train.batch import Entries
from train.parallel.padding import entry_of_tokens
from train.parallel.tensor.leaf_roles import path_in_layer

from .boundary import received
from .microbatch import Microbatch, microbatches
from .schedule import SINGLE, Pipeline
from .staged_loss import StagedLoss
from .tree_split import check_share, cut


class _Stage(nn.Module):
    """The module that torch's stages expect; its parameters are the trainable ones of `params`.

    index: the number of a microbatch, the only input that the schedule splits. takes, gives: like what the stage
    receives and sends, by name, in order.
    """

    def __init__(
        self,
        run: Callable[..., tuple[dict[str, Tensor], Any, dict[str, Tensor]]],
        takes: Mapping[str, Tensor],
        gives: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self.run, self.takes, self.gives = run, takes, gives
        self.bind({}, ())

    def bind(self, params: Tree, parts: Sequence[Microbatch]) -> None:
        self.params, self.parts = params, parts
        self.found: list[tuple[Any, dict[str, Tensor]]] = []
        self._parameters.clear()
        for path, leaf in tree.flatten(params).items():
            if isinstance(leaf, nn.Parameter):
                self.register_parameter(path.replace(".", "/"), leaf)

    def forward(self, *received: Tensor, index: Tensor) -> Tensor | tuple[Tensor, ...]:
        own = (_Received.apply(x) if x.requires_grad else x for x in received)
        named = dict(zip(self.takes, own, strict=True))
        found, count, aux = self.run(self.params, named, self.parts[int(index)])
        self.found.append((count, aux))
        self._check_sent(found)
        # Copies, since torch detaches outputs in place, and what is passed on or sliced is a view.
        sent = tuple(found[name] if name in ("x", "total") else _copy(found[name]) for name in self.gives)
        if torch.is_grad_enabled():
            # Without a trainable parameter up to here: the next stage sends gradients in any case.
            sent = tuple(x.detach().requires_grad_() if _lacks_gradient(x) else x for x in sent)
        return sent if len(sent) > 1 else sent[0]

    def _check_sent(self, found: Mapping[str, Tensor]) -> None:
        """RuntimeError for tensors that would be read as if they fitted the next stage's buffers."""
        if found.keys() != self.gives.keys():
            raise RuntimeError(f"A stage sends {sorted(found)}, and the next one receives {sorted(self.gives)}.")
        for name, like in self.gives.items():
            if name != "total" and (found[name].shape, found[name].dtype) != (like.shape, like.dtype):
                raise RuntimeError(
                    f"A stage sends {name} {list(found[name].shape)} in {found[name].dtype}, and the next one receives "
                    f"{list(like.shape)} in {like.dtype}: what runs in its layers must keep shape and dtype."
                )


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _lacks_gradient(x: Tensor) -> bool:
    return x.is_floating_point() and not x.requires_grad


class _Received(torch.autograd.Function):
    """The same tensor, whose gradient is contiguous, as messages must be."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


Found = list[list[tuple[Any, dict[str, Tensor]]]]  # [stage of this rank][microbatch]: (count, aux)
StagesRun = Callable[[Tree, Sequence[Entries], bool], tuple[list[Tensor], Found]]


def runner(staged: StagedLoss, group: dist.ProcessGroup | None) -> StagesRun:
    """run(params, parts, train) -> (losses of the last stage, `Found`); gradients are left in the parameters' .grad.

    ValueError for a process group of another size than the pipeline.
    """
    pipe = staged.pipe
    if dist.get_world_size(group) != pipe.size:
        raise ValueError(f"The pipeline has {pipe.size} ranks, but its process group {dist.get_world_size(group)}.")
    stages = pipe.stages(dist.get_rank(group))
    made: dict[Any, tuple[dict[int, _Stage], Any]] = {}

    def run(params: Tree, parts: Sequence[Entries], train: bool) -> tuple[list[Tensor], Found]:
        check_share(params, pipe.config, pipe, stages)
        ready = microbatches(staged.loss, pipe, params, parts)
        cuts = {stage: cut(params, pipe.config, pipe, (stage,)) for stage in stages}
        device = entry_of_tokens(ready[0].batch).device
        in_layers = [leaf for path, leaf in tree.flatten(params).items() if path_in_layer(path)]
        largest: Tensor = max(in_layers, key=Tensor.numel)  # others (norms, biases) may be wider
        dtype = staged.hooks.dtype or largest.dtype
        later = [received(pipe.config, lo, ready[0], dtype, staged.hooks.sharing) for lo, _ in pipe.layers[1:]]
        sent: list[dict[str, Tensor]] = [{}, *later, {"total": torch.empty((), device="meta")}]
        key = (len(ready), device, train, *((name, t.shape, t.dtype) for one in sent for name, t in one.items()))
        if key not in made:
            made.clear()  # torch keeps a receive buffer per microbatch: varying lengths would fill the memory
            modules = {
                stage: _Stage(functools.partial(staged.run, stage), sent[stage], sent[stage + 1]) for stage in stages
            }
            made[key] = modules, _schedule(pipe, modules, len(ready), sent, train, device, group)
        modules, schedule = made[key]
        for stage, module in modules.items():
            module.bind(cuts[stage], ready)
        numbers, losses = torch.arange(len(ready)), list[Tensor]()
        act = schedule.step if train else schedule.eval
        failed = None
        try:
            act(index=numbers, target=numbers, losses=losses, return_outputs=False)
        except RuntimeError as error:
            failed = error.__cause__  # what the loss or a layer raised, where torch says only which stage failed
            if failed is None or "failed to run" not in str(error):
                raise
        if failed is not None:
            raise failed
        found = [module.found for module in modules.values()]
        for module in modules.values():
            module.bind({}, ())  # frees the batch
        return losses, found

    return run


def _schedule(
    pipe: Pipeline,
    modules: Mapping[int, _Stage],
    count: int,
    sent: Sequence[Mapping[str, Tensor]],
    train: bool,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Any:
    """torch's schedule of this rank's stages for `count` microbatches.

    sent: like what each stage receives, and at last what the last one returns, on the meta device.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as torchs

    last = len(pipe.layers) - 1
    like = [tuple(x.requires_grad_(train and x.is_floating_point()) for x in one.values()) for one in sent]
    made = [
        PipelineStage(
            module,
            stage,
            last + 1,
            device,
            input_args=like[stage],
            output_args=like[stage + 1],
            group=group,
        )
        for stage, module in modules.items()
    ]
    kind: Any = torchs.get_schedule_class(pipe.schedule)
    # Losses are sums: torch would divide the gradients by the number of microbatches.
    single = pipe.schedule in SINGLE
    schedule = kind(
        made[0] if single else made, n_microbatches=count, loss_fn=lambda total, _: total, scale_grads=False
    )
    if not single and not train:
        waiting = schedule.bwd_recv_ops  # instead of the schedule, which would be a reference cycle

        def passed(action: Any, _: Any) -> None:
            waiting.pop((action.stage_index, action.microbatch_index), None)  # the next step would find it

        # Its `eval` visits the backward passes too, and waits for gradients between the two stages of a rank in a V.
        for act in (torchs.FULL_BACKWARD, torchs.BACKWARD_INPUT, torchs.BACKWARD_WEIGHT):
            schedule.register_custom_function(act, passed)
    return schedule
