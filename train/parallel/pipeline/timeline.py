"""The order of actions under a pipeline schedule, the idle time of each rank, and its peak of activations."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from .schedule import SINGLE, Pipeline

Action = tuple[str, int, int]  # F forward, B backward, or its halves I (inputs) and W (weights); stage; microbatch


def order(pipe: Pipeline, rank: int, count: int) -> list[Action]:
    """The actions of a rank with `count` microbatches, in order, from torch's schedules.

    ValueError for a schedule with one stage per rank whose order is not written out here.
    """
    if pipe.schedule in SINGLE:
        # Written out: the pipeline_order of "1F1B" in torch 2.13 differs from what it runs.
        before_first_backward = {"GPipe": count, "1F1B": min(count, pipe.size - rank)}
        if pipe.schedule not in before_first_backward:
            raise ValueError(
                f"The order of {pipe.schedule} is not known; of the schedules with one stage per rank those of "
                f"{' and '.join(before_first_backward)} are: write it out in train/parallel/pipeline/timeline.py."
            )
        ahead = before_first_backward[pipe.schedule]
        forward, back = ([(kind, rank, part) for part in range(count)] for kind in "FB")
        steady = [action for pair in zip(back[: count - ahead], forward[ahead:], strict=True) for action in pair]
        return [*forward[:ahead], *steady, *back[count - ahead :]]
    from torch.distributed.pipelining.schedules import get_schedule_class

    sizes: dict[str, Any] = {"num_stages": len(pipe.layers), "group_size": pipe.size, "group_rank": rank}
    stages = [SimpleNamespace(stage_index=stage, submod=nn.Module(), **sizes) for stage in pipe.stages(rank)]
    schedule: Any = get_schedule_class(pipe.schedule)(stages, n_microbatches=count, loss_fn=lambda *_: None)
    scheduled = [action for action in schedule.pipeline_order[rank] if action is not None]
    acts = [act for action in scheduled for act in (action.sub_actions or (action,))]
    return [(act.computation_type.value, act.stage_index, act.microbatch_index) for act in acts]


def idle(pipe: Pipeline, orders: Sequence[Sequence[Action]], again: Sequence[int] = ()) -> list[float]:
    """The fraction of a step in which each rank is idle, if a layer's forward takes 1 and its backward 2.

    again: per stage, the number of layers that are recomputed in backward, and in each of its halves. Communication
    takes no time. ValueError for orders that deadlock.
    """
    again = again or [0] * len(pipe.layers)
    busy, end = run(pipe, orders, lambda action: _cost(action, pipe, again))
    return [1 - work / end for work in busy]


def run(
    pipe: Pipeline, orders: Sequence[Sequence[Action]], cost: Callable[[Action], float], send: float = 0.0
) -> tuple[list[float], float]:
    """The time in which each rank is busy, and the time at which the last one is done.

    cost: the time of an action. send: what a message between ranks takes. ValueError for orders that deadlock.
    """
    done: dict[Action, float] = {}
    clock, busy, position = [0.0] * len(orders), [0.0] * len(orders), [0] * len(orders)
    while any(position[rank] < len(actions) for rank, actions in enumerate(orders)):
        before = list(position)
        for rank, actions in enumerate(orders):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                start = _ready(action, pipe, done, send)
                if start is None:
                    break
                took = cost(action)
                clock[rank] = done[action] = max(clock[rank], start) + took
                busy[rank] += took
                position[rank] += 1
        if position == before:
            raise ValueError(f"The order of {pipe.schedule} waits for itself.")
    return busy, max(clock)


def _cost(action: Action, pipe: Pipeline, again: Sequence[int]) -> int:
    kind, stage, _ = action
    lo, hi = pipe.layers[stage]
    if stage == 0:  # has no input gradients: its W is the complete backward pass
        parts = {"F": 1, "B": 2, "I": 0, "W": 2}[kind]
    else:
        parts = {"F": 1, "B": 2, "I": 1, "W": 1}[kind]
    return parts * (hi - lo) + again[stage] * repeats([action], stage)


def repeats(actions: Sequence[Action], stage: int) -> int:
    """The number of recomputations of a rematerialised layer of this stage: one in each half of a backward pass."""
    return sum(of == stage and kind in ("BW" if stage == 0 else "BIW") for kind, of, _ in actions)


def _ready(action: Action, pipe: Pipeline, done: Mapping[Action, float], send: float) -> float | None:
    """When the inputs of an action are available; None: one has not run yet."""
    kind, stage, part = action
    needs: list[tuple[Action, ...]] = []  # any one action of each tuple
    if kind == "F":
        needs = [(("F", stage - 1, part),)] if stage else []
    elif kind == "W":
        needs = [(("I", stage, part),)]
    else:
        needs = [(("F", stage, part),)]
        needs += [(("B", stage + 1, part), ("I", stage + 1, part))] if stage < len(pipe.layers) - 1 else []
    here = pipe.ranks[stage]
    times = [[done[one] + send * (pipe.ranks[one[1]] != here) for one in any_of if one in done] for any_of in needs]
    return max((time[0] for time in times), default=0.0) if all(times) else None


def peak(
    actions: Sequence[Action],
    size: Mapping[int, int],
    forward: Mapping[int, int] | None = None,
    backward: Mapping[tuple[str, int], int] | None = None,
    for_inputs: Mapping[int, int] | None = None,
) -> int:
    """The peak of held memory, if each stage's forward adds `size` and the end of its backward frees it.

    forward: per stage, the peak during its forward. backward: per (kind, stage), the peak added during its backward
    pass or a half of it. for_inputs: per stage, what the half for inputs frees already.
    """
    now = most = 0
    for kind, stage, _ in actions:
        during = (forward or size)[stage] if kind == "F" else (backward or {}).get((kind, stage), 0)
        most = max(most, now + during)
        early = (for_inputs or {}).get(stage, 0)
        now += {"F": size[stage], "I": -early, "W": early - size[stage]}.get(kind, -size[stage])
    return most
