"""`State`: step, parameters and optimizer state of a training run between two steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.values import has_values
from fnmodels.ops.torch_internals import transformed
from fnmodels.tree import Tree
from train.comm.dtensor import like_params, local_tree, map_local, of_all_stages
from train.optim.base import Optimizer, check_optimizer

T = TypeVar("T")


@tree.pytree
@dataclass(frozen=True)
class State:
    """The argument and the result of a train step: the training run's state beside its data.

    A step made with inplace=True takes a State over, as a donated argument is in JAX: it writes into the same storage
    and returns a new State; every use of the old one raises.

    Args:
        step: Steps taken so far, a 0-d int64 tensor. Skipped ones count, so that it numbers the batches.
        params: The tree of parameters.
        opt_state: The optimizer's state, as `Optimizer.init` returns it.
    """

    step: Tensor
    params: Tree
    opt_state: Tree

    def __repr__(self) -> str:
        """The sizes, not the tensors: State(step=3, params: 26 leaves, opt_state: 53 leaves, 312.0 MB)."""
        params, opt = tree.leaves(self.params), tree.leaves(self.opt_state)
        size = sum(leaf.nbytes for leaf in (*params, *opt) if isinstance(leaf, Tensor))
        step = int(self.step) if has_values(self.step) else "?"
        return f"State(step={step}, params: {len(params)} leaves, opt_state: {len(opt)} leaves, {size / 1e6:.1f} MB)"

    def __getattr__(self, name: str) -> NoReturn:
        # Python calls this only for missing attributes: a field that `consume` deleted, or a typo.
        if name in {field.name for field in fields(self)}:
            raise RuntimeError(
                "This State was used up by a step with inplace=True, which writes new values into its tensors: "
                "continue with the State that the step returned, or make the step with inplace=False."
            )
        raise AttributeError(f"A State has step, params and opt_state, no {name!r}.")


def init_state(params: Tree, optimizer: Optimizer, *, copy: bool = True) -> State:
    """A State at step 0, with a copy of the parameters, so that in-place steps never write into the caller's tensors.

    Args:
        params: The tree of parameters. If its leaves are DTensors, so are the moments, placed alike. Over pipeline
            stages all processes call this, each with the parameters of its stage.
        optimizer: A `train.Optimizer`, whose state is made.
        copy: False takes the tensors themselves, which in-place steps then overwrite, and saves a second set of
            parameters.

    Returns:
        The State.

    Raises:
        ValueError: One tensor is at two paths, which would become two (a tied weight is one leaf), or patterns of the
            optimizer do not fit the paths. Over pipeline stages an error of one process is raised by all.
        TypeError: The optimizer is no `train.Optimizer`.
    """
    check_optimizer(optimizer)
    return on_all_stages(lambda: _initial(params, optimizer, copy), optimizer, params)


def on_all_stages(prepare: Callable[[], T], optimizer: Optimizer, params: Tree) -> T:
    """prepare(), once it has succeeded on all pipeline stages and the optimizer's patterns fit the leaves of all.

    Without `pp` it is prepare() alone, for the `init` of an optimizer checks a whole model. ValueError on all stages.
    """
    failure: Exception | None = None
    try:
        made = prepare()
    except Exception as error:  # raising here alone would leave the other stages waiting
        failure = error
    words = "" if failure is None else str(failure) or repr(failure)
    stages = of_all_stages(params, (list(tree.flatten(params)), words))
    faults = [fault for _, fault in stages]
    if failure is not None and len(set(faults)) == 1:
        raise failure
    for stage, fault in enumerate(faults):
        if fault:
            raise ValueError(f"Rank {stage} of the pipeline: {fault}") from failure
    if optimizer.traits.check_paths is not None and len(stages) > 1:
        optimizer.traits.check_paths(dict.fromkeys(path for paths, _ in stages for path in paths))
    return made


def _initial(params: Tree, optimizer: Optimizer, copy: bool) -> State:
    seen: dict[int, str] = {}
    for path, leaf in tree.flatten(params).items():
        if seen.setdefault(id(leaf), path) != path:
            raise ValueError(f"{seen[id(leaf)]} and {path} are one tensor: keep it at one path, and use it twice.")
    with without_gradients():
        owned = map_local(lambda p: _owned(p, copy), params)
        opt_state = like_params(optimizer.init(local_tree(owned)), owned)
    device = next(iter(tree.leaves(owned))).device
    return State(torch.zeros((), dtype=torch.int64, device=device), owned, opt_state)


def without_gradients() -> AbstractContextManager[Any]:
    """torch.no_grad(), but in a transform of torch.func, which may take the derivative of what is computed here."""
    return nullcontext() if transformed() else torch.no_grad()


def _owned(param: Tensor, copy: bool) -> Tensor:
    held = param if transformed() else param.detach()
    return held.clone(memory_format=torch.contiguous_format) if copy else held


def consume(state: State) -> None:
    """Empties a State whose tensors go to its successor."""
    for name in _FIELDS:
        object.__delattr__(state, name)


def is_consumed(state: State) -> bool:
    """Whether a step has taken the State over."""
    return not vars(state)


def hand_back(state: State, later: State) -> None:
    """Gives a consumed State the tensors of a later one, which is consumed in its place."""
    values = dict(vars(later))
    consume(later)
    for name, value in values.items():
        object.__setattr__(state, name, value)


_FIELDS = tuple(field.name for field in fields(State))
