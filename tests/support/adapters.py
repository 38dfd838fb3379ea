"""A step of every model with an adapter at each of its targets: that of one process, and how far a mesh is off."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fnmodels
import params as P
import train
from fnmodels import tree
from params import lora
from params.sharding import sharding_of
from tests.support import encoder_losses
from tests.support.cases import generic, richest
from tests.support.naming import fewest
from tests.support.one_process import (
    Errors,
    One,
    batch,
    batch_for,
    by_one_rank,
    config_of,
    error,
    even,
    even_experts,
    gradient_errors,
    loss_of,
    watched,
    weights_of,
)
from tests.support.ranks_pool import devices
from train.comm.dtensor import local_tree
from train.gradients import gradient_sums
from train.optim.base import with_paths
from train.parallel import Mesh, Strategy
from train.parallel.pipeline.stages import stage_plan
from train.parallel.placement import rules_of, shardings
from train.parallel.tensor.leaf_roles import path_in_layer
from train.update import update

CLIP = 0.05  # below the norms


@dataclass(frozen=True)
class Setting:
    """A model with its loss and batch. targets: every weight that takes an adapter and is read by the loss."""

    config: Any
    loss: Callable[..., Any]
    batch: dict[str, Any]
    weights: Callable[[], Any]
    unread: str | tuple[str, ...] = "-"

    def targets(self, *, vocab: bool) -> tuple[str, ...]:
        """vocab: with the head over the vocabulary, whose rows `tp` shards."""
        paths = lora.targets(self.config)
        return tuple(p for p in paths if not p.startswith(self.unread) and (vocab or not p.endswith("lm_head")))


@functools.cache
def setting_of(name: str) -> Setting:
    """One of `encoder_losses.SETTINGS`, a decoder by the name of its tiny config, or one with heads for more tokens."""
    if name in encoder_losses.SETTINGS:
        config, loss, halves = encoder_losses.SETTINGS[name]()
        rows = {entry: torch.cat([half[entry] for half in halves]) for entry in halves[0]}
        weights = functools.partial(encoder_losses.weights_of, config)
        return Setting(config, loss, rows, weights, encoder_losses.UNREAD.get(name, "-"))

    if name == "mtp":
        config = config_of(name)
        return Setting(config, loss_of(name), batch_for(name), functools.partial(weights_of, config))
    config = dataclasses.replace(even(name), **even_experts(even(name)))
    loss = functools.partial(train.next_token_loss, config=config, kernel="math", length=24)
    return Setting(config, loss, batch(), functools.partial(weights_of, config))


def structure(name: str) -> frozenset[str]:
    """What the roles of a model's adapters follow from: the paths of its targets in a layer, with their axes."""
    leaves = tree.flatten(fnmodels.family_of(setting_of(name).config).spec(setting_of(name).config))
    paths = setting_of(name).targets(vocab=True)
    return frozenset(f"{path_in_layer(path) or path} {leaves[path].axes}" for path in paths)


@functools.cache
def structures() -> tuple[str, ...]:
    """A model of each structure, of all model types, encoders, towers, pairs of stacks, readers of images and flows."""
    found: dict[frozenset[str], str] = {}
    decoders = [case.name for case in richest(lambda case: case.config.model_type)]
    for name in (*decoders, *encoder_losses.SETTINGS):
        found.setdefault(structure(name), name)
    return tuple(found.values())


def covering() -> list[str]:
    """Few and small models that have the weights of all structures between them: a role follows from one weight."""
    return fewest({name: structure(name) for name in structures()}, cost=leaves_of)


def leaves_of(name: str) -> int:
    """What a test on a model takes, in units of a parameter; to begin costs as much as some of them."""
    config = setting_of(name).config
    return 20 + len(tree.flatten(fnmodels.family_of(config).spec(config)))


def adapted(setting: Setting, weights: Any, **how: Any) -> Any:
    return lora.add(setting.config, weights, rank=3, alpha=6.0, seed=4, **how)


def noisy(path: str, leaf: Any) -> Any:
    """Adapters that are not at their beginning, where half of the gradients are 0."""
    return 0.3 * generic(path, leaf) if path.endswith((".a", ".b")) else leaf


@functools.cache
def one_process(name: str, vocab: bool) -> tuple[One, Any]:
    """(the reference, the leaves of the params with adapters with which it begins)."""
    return by_one_rank(f"adapters-{name}-{vocab}", lambda: computed(name, vocab))


def begun(name: str, vocab: bool) -> Any:
    """The params with adapters."""
    setting = setting_of(name)
    return with_paths(noisy, adapted(setting, setting.weights(), targets=setting.targets(vocab=vocab)))


def computed(name: str, vocab: bool) -> tuple[One, dict[str, Any]]:
    setting, params = setting_of(name), begun(name, vocab)
    optimizer = optimizer_of(setting, params)
    sums = gradient_sums(setting.loss, optimizer)(params, [setting.batch], divide=False)
    learning = [path for path, leaf in tree.flatten(lora.spec(setting.config, params)).items() if leaf.trainable]
    grads = {path: grad.clone() for path, grad in zip(learning, sums.grads, strict=True)}
    state, metrics = update(optimizer, train.init_state(params, optimizer), sums, clip=CLIP)
    return One(grads, tree.flatten(state.params), metrics), tree.flatten(params)


def optimizer_of(setting: Setting, params: Any) -> train.Optimizer:
    return train.adamw(1e-2, eps=1e-3, weight_decay=0.1, spec=lora.spec(setting.config, params))


def errors_of(
    name: str, over: str, strategy: dict[str, Any] | None = None, options: dict[str, Any] | None = None
) -> Errors:
    """{what: error against one process} of a step: this rank's gradients and adapters, loss, count, gradient norm."""
    setting, mesh, how = setting_of(name), Mesh.parse(over), Strategy(**strategy or {})
    config, vocab = setting.config, mesh.tp == 1
    one, start = one_process(name, vocab)
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
    plan = stage_plan(plan, config, devices(mesh), how) if mesh.pp > 1 else plan
    whole = tree.flatten(setting.weights())
    bare = with_paths(lambda path, how: how.distribute(whole[path][how.local_box()].clone()), plan)
    held = adapted(setting, bare, targets=setting.targets(vocab=vocab))
    held = with_paths(lambda path, leaf: _like(leaf, start[path]), held)
    optimizer, grads = optimizer_of(setting, held), list[Any]()
    step = train.make_step(setting.loss, optimizer, clip=CLIP, mesh=mesh, strategy=how, **options or {})
    with watched(grads):
        state, metrics = step(train.init_state(held, optimizer), setting.batch)
    shards, local = tree.flatten(shardings(state.params)), tree.flatten(local_tree(state.params))
    mine = dict(zip([path for path in local if path in one.grads], grads, strict=True))
    found = gradient_errors(mine, one, {path: how.local_box() for path, how in shards.items()})
    found |= {f"{path} after a step": error(x, one.after[path][shards[path].local_box()]) for path, x in local.items()}
    return found | {n: error(metrics[n].double(), one.metrics[n].double()) for n in ("loss", "count", "grad_norm")}


def _like(leaf: Any, whole: Any) -> Any:
    """The shard of `whole` that `leaf` is."""
    how = sharding_of(leaf)
    assert how is not None
    return how.distribute(whole[how.local_box()].clone())
