"""What one process computes, against which every way of sharing the work is measured; for the jobs of ranks.

8 rows of 16 tokens: packed documents, padding on both sides, a row of padding alone, and rows with different numbers of
valid tokens, so that a mean of means, a count of one rank or a padded row that teaches would show.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

import fnmodels
from fnmodels import tree
from params import Rules, plan
from tests.parallel.pool import devices
from tests.parallel.test_tensor import variant
from tests.support import batch_of, cases, generic_params, segments
from train import adamw, init_state, make_step, next_token_loss
from train.parallel import Mesh, Strategy
from train.parallel import step as steps
from train.parallel.dtensors import local_tree
from train.parallel.gather import shardings
from train.parallel.step import rules_of
from train.step import gradient_sums

CASES = ("llama_tied", "deepseek_v3", "gpt_oss")
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 8},
}
LENGTH = 24  # what some rope scalings need: of the whole run, not of a rank's part
Errors = dict[str, float]


def config_of(name: str) -> Any:
    """A variant of `tests.support`; "even ...": vocabulary and heads divide by 4, "experts ...": experts too."""
    kind, _, of = name.rpartition(" ")
    config = variant(of) if kind else next(case.config for case in cases() if case.name == name)
    return dataclasses.replace(config, **EXPERTS[of]) if kind == "experts" else config


def batch() -> dict[str, Tensor]:
    """[8, 16] of everything."""
    rows = ((10, 6), (-3, 1, 12), (16,), (-16,), (5, -11), (2, 2, 2, 10), (15, -1), (-8, 4, 4))
    made = batch_of(config_of("llama"), segments(*rows))
    tokens = made.tokens % 51  # the smallest vocabulary
    labels = made.labels % 51
    return {
        "tokens": tokens,
        "positions": made.positions,
        "segment_ids": made.segment_ids,
        "labels": labels.where(made.labels >= 0, -100),
    }


def loss_of(name: str, **options: Any) -> Callable[..., Any]:
    options = {"kernel": "math", **options}
    return functools.partial(next_token_loss, config=config_of(name), length=LENGTH, **options)


def spec_of(name: str) -> Any:
    config = config_of(name)
    return fnmodels.family_of(config).spec(config)


def optimizer_of(name: str) -> Any:
    # An eps at which small gradients do not count as large ones: there, the sign is noise.
    return adamw(1e-2, eps=1e-3, weight_decay=0.1, spec=spec_of(name))


@functools.cache
def one_process(name: str, clip: float | None = 0.5) -> tuple[dict[str, Tensor], dict[str, Tensor], Mapping[str, Any]]:
    """({path: gradient of the sum}, {path: parameter after a step}, metrics of the step)."""
    params, optimizer = generic_params(config_of(name)), optimizer_of(name)
    sums = gradient_sums(loss_of(name), optimizer)(params, [batch()], divide=False)
    learning = [path for path, leaf in tree.flatten(spec_of(name)).items() if leaf.trainable]
    grads = dict(zip(learning, sums.grads, strict=True))
    state, metrics = make_step(loss_of(name), optimizer, clip=clip)(init_state(params, optimizer), batch())
    return grads, tree.flatten(state.params), metrics


def placed(name: str, mesh: Mesh, rules: Rules | None = None) -> Any:
    """The same parameters as DTensors on the mesh."""
    placements = plan(spec_of(name), rules or rules_of(mesh, config_of(name)), devices(mesh))
    return tree.map(lambda how, p: how.distribute(p[how.here()].clone()), placements, generic_params(config_of(name)))


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest number."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) if found.numel() else 0.0


def errors_of(
    name: str, mesh_text: str, options: dict[str, Any] | None = None, strategy: dict[str, Any] | None = None
) -> Errors:
    """{what: how far it is from one process}: each gradient, loss, count and norm, and each parameter after a step.

    A gradient's part is compared with that part of the whole, relative to the whole's largest number; what is nothing
    but rounding (of keys' biases where nothing rotates) to the largest of all.
    """
    mesh, how = Mesh.parse(mesh_text), Strategy(**strategy or {})
    grads, stepped, metrics = one_process(name)
    optimizer, params, config = optimizer_of(name), placed(name, mesh), config_of(name)
    shards = shardings(params)
    mine = {path: where.here() for path, where in tree.flatten(shards).items()}
    loss = steps.placed_loss(loss_of(name), shards, devices(mesh), how, config=config)
    part = steps.own_part(batch(), devices(mesh), order=how.order, config=config)
    sums = gradient_sums(loss, optimizer)(local_tree(params), [part], divide=False)
    step = make_step(loss_of(name), optimizer, clip=0.5, mesh=mesh, strategy=how, **options or {})
    state, measured = step(init_state(params, optimizer), batch())
    found: Errors = {}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for (path, grad), ours in zip(grads.items(), sums.grads, strict=True):
        size = float(grad.abs().max())
        size = size if size > 1e-5 * largest else largest
        found[f"gradient of {path}"] = float((ours - grad[mine[path]]).abs().max()) / size if ours.numel() else 0.0
    for metric in ("loss", "count", "grad_norm"):
        found[metric] = error(measured[metric].double(), metrics[metric].double())
    for path, leaf in tree.flatten(local_tree(state.params)).items():
        found[f"{path} after a step"] = error(leaf, stepped[path][mine[path]])
    return found


def worst(found: list[Errors], start: str = "") -> tuple[float, str]:
    """Of all ranks; NaN is the worst."""
    every = [(value, what) for errors in found for what, value in errors.items() if what.startswith(start)]
    return max(every, key=lambda pair: (pair[0] != pair[0], pair[0]))
