"""Taps and edits of heads and neurons over tensor parallelism: values and gradients are those of one process."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnmodels
from fnmodels import tree
from tests.support.cases import generic, tap_names
from tests.support.one_process import weights_of
from tests.support.ranks_pool import Ranks
from tests.train.parallel.test_tensor import DEEPSEEK, GPT_OSS, LLAMA, MODES, batch_of, distributed, even
from train.comm import collectives
from train.comm.region import Region
from train.parallel.tensor import taps
from train.parallel.tensor.leaf_roles import Use
from train.remat import layer_fn

INSIDE = ("attention.", "mlp.")
EDITED = ("q", "k", "v", "scores", "pattern", "z")


def mixed(value: Tensor, name: str, *, by: Tensor) -> Tensor:
    """Each head and neuron takes some of the one before it, which may be another rank's."""
    dim = 1 if name.endswith(("scores", "pattern")) else -1 if value.ndim == 3 else 2
    return value + by * value.roll(1, dim)


def results(config: Any, run: Any, params: Any, sequence: bool) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """(logits and taps, gradient by the edits' tensor, gradients by parameters) of a loss of both."""
    batch = batch_of(config)
    rows = {key: batch[key] for key in ("positions", "segment_ids")}
    given = fnmodels.prepare(config, batch["tokens"], **rows, length=24)
    by = torch.tensor(0.3, requires_grad=True)
    inner = [n for n in tap_names(config) if n.startswith("layers.") and n.split(".", 2)[2].startswith(INSIDE)]
    edited = [n for n in inner if n.split(".", 2)[2].removeprefix("attention.") in EDITED or ".mlp." in n]
    edits = {name: functools.partial(mixed, by=by) for name in edited}
    logits, tapped = run(params, *given, config=config, kernel="math", taps=tuple(inner), edits=edits)
    loss = logits.square().mean() + sum(
        (value.masked_fill(value.abs() > 1e6, 0) * generic(name, value)).mean() for name, value in tapped.items()
    )
    flat = {path: leaf for path, leaf in tree.flatten(params).items() if leaf.requires_grad}
    first, *others = torch.autograd.grad(loss, [by, *flat.values()], allow_unused=True)
    grads = {path: grad for path, grad in zip(flat, others, strict=True) if grad is not None}
    return [logits.detach(), *(tapped[name].detach() for name in inner)], first, grads


def differences(name: str, sequence: bool, remat: str = "none") -> dict[str, float]:
    config = even(name)
    tensor, placements, params = distributed(config, sequence=sequence)

    def run(params: Any, *given: Any, **how: Any) -> Any:
        outer = layer_fn(remat, "none")
        own = tensor.layer_fn if outer is None else functools.partial(tensor.layer_fn, around=outer)
        return fnmodels.forward(tensor.outside(params), *given, layer_fn=own, **how)

    values, by, grads = results(config, run, params, sequence)
    plain = tree.map(lambda leaf: leaf.clone().requires_grad_(leaf.is_floating_point()), weights_of(config))
    wanted, by_wanted, whole = results(config, fnmodels.forward, plain, sequence)
    found = {"by": float((by - by_wanted).abs() / by_wanted.abs())}
    for index, (got, want) in enumerate(zip(values, wanted, strict=True)):
        assert got.shape == want.shape, (index, got.shape, want.shape)
        found[f"value {index}"] = float((got - want).abs().max() / want.abs().clamp(max=1e6).max())
    spec, largest = tree.flatten(placements), max(float(grad.abs().max()) for grad in whole.values())
    for path, grad in grads.items():
        difference = grad.to_local() - whole[path][spec[path].local_box()]
        found[path] = float(difference.abs().max()) / max(float(whole[path].abs().max()), 1e-3 * largest)
    return found


@MODES
@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK, GPT_OSS, "qwen3_next"])
def test_all_ranks_see_and_edit_all_heads(ranks: Ranks, name: str, sequence: bool) -> None:
    for found in ranks(2)(differences, name, sequence):
        assert max(found.values()) < 1e-4, max(found.items(), key=lambda item: item[1])


def test_with_recomputation(ranks: Ranks) -> None:
    for found in ranks(2)(differences, LLAMA, True, "full"):
        assert max(found.values()) < 1e-4, max(found.items(), key=lambda item: item[1])


def planted(bug: str, name: str) -> dict[str, float]:
    """`differences` with a wrong reduction."""
    with pytest.MonkeyPatch.context() as patch:
        if bug == "partial":  # the edit's gradients are not summed
            patch.setattr(taps.collectives, "all_gather", collectives.join)
        elif bug == "tensors":
            patch.setattr(Region, "shared", lambda region, value: value)
        elif bug == "counted twice":
            patch.setattr(taps.collectives, "join", collectives.all_gather)
        else:  # of what all ranks have
            patch.setattr(taps.collectives, "leave", lambda value, group, **how: value * dist.get_world_size(group))
        return differences(name, sequence=False)


@pytest.mark.parametrize(
    ("bug", "name"),
    [("partial", LLAMA), ("tensors", LLAMA), ("counted twice", LLAMA), ("shown", DEEPSEEK)],
)
def test_wrong_reductions_are_found(ranks: Ranks, bug: str, name: str) -> None:
    for found in ranks(2)(planted, bug, name):
        assert max(found.values()) > 1e-3


def test_fewer_key_heads_than_ranks(ranks: Ranks) -> None:
    """Two ranks have each key head, which the edit gets once."""
    for found in ranks(4)(differences, "gemma2", False):
        assert max(found.values()) < 1e-4, max(found.items(), key=lambda item: item[1])


def test_a_norm_over_the_heads_of_all_ranks_is_refused() -> None:
    uses = {"attention.q_proj": Use("read", False), "attention.q_norm": Use("norm", False)}
    with pytest.raises(ValueError, match=r"The norm 'attention\.q_norm' is over the heads of all processes"):
        taps.inside(["attention.q_norm.scale"], uses)
    assert taps.inside(["attention.z", "mlp", "mlp.pre"], uses) == ["attention.z"]
