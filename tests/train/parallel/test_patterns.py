"""Patterns over paths, judged on the whole model: over pipeline stages, each with its own leaves, as in one process."""

from typing import Any

import pytest
import torch

import params as P
from fnmodels import tree
from params import lora
from tests.support.cases import generic, generic_params
from tests.support.one_process import batch, config_of, error, loss_of, placed, spec_of, worst
from tests.support.ranks_pool import Ranks, devices
from train import Optimizer, adamw, chain, init_state, lion, make_step, muon, partition, sgd, with_ema
from train.comm.dtensor import local_tree, placed_like
from train.engine import Engine
from train.optim import masked, with_master, with_small_state, with_stochastic_rounding
from train.optim.base import OptimizerTraits, with_paths
from train.parallel import Mesh, Strategy
from train.parallel.pipeline.stages import stage_plan
from train.parallel.placement import rules_of, shardings

NAME = "gpt_oss"  # two layers, of which each stage has one
FIRST, LAST = "layers.0.*", "layers.1.*"


def halved() -> Optimizer:
    """A transform of each element."""
    update = lambda grads, state, params: (tree.map(lambda grad: grad / 2, grads), state)  # noqa: E731
    return Optimizer(lambda params: None, update, traits=OptimizerTraits(elementwise=True))


def decayed(rate: float) -> Optimizer:
    return adamw(rate, eps=1e-3, weight_decay=0.1, spec=spec_of(NAME))


def optimizers() -> dict[str, Optimizer]:
    """By what is on one stage alone."""
    rest = decayed(1e-2)
    return {
        "a rate": partition({FIRST: sgd(0.1, momentum=0.9), "*": rest}),
        "another rate": partition({"lm_head": lion(1e-3), LAST: decayed(1e-3), "*": rest}),
        "what is frozen": partition({"embed_tokens": None, "layers.0.mlp.*": None, "*": rest}),
        "what is trainable": partition({"layers.0.attention.*": rest, "*": None}),
        "what is trainable, last": partition({"layers.1.attention.*": rest, "*": None}),
        "matrices": partition({"layers.1.attention.*_proj": muon(0.02), "*": rest}),
        "a transform": chain(masked(halved(), LAST, "norm"), rest),
        "a transform of a group": partition({FIRST: chain(masked(halved(), "*.mlp.*"), rest), "*": sgd(0.1)}),
        "an average": with_ema(partition({FIRST: None, "*": rest}), 0.9),
        "rounded": with_stochastic_rounding(partition({LAST: sgd(0.1), "*": rest})),
        "small": partition({FIRST: with_small_state(rest), "*": sgd(0.1)}),
        "masters": with_master(partition({LAST: sgd(0.1), "*": rest})),
    }


def differences(what: str, mesh_text: str) -> dict[str, float]:
    """{leaf of params and averages: how far two steps over stages are from those of one process}."""
    mesh, optimizer = Mesh.parse(mesh_text), optimizers()[what]
    alone, together = init_state(generic_params(config_of(NAME)), optimizer), init_state(placed(NAME, mesh), optimizer)
    one = make_step(loss_of(NAME), optimizer, clip=0.5)
    many = make_step(loss_of(NAME), optimizer, clip=0.5, mesh=mesh, accumulate=2)
    for _ in range(2):
        alone, expected = one(alone, batch())
        together, metrics = many(together, batch())
    shards = tree.flatten(shardings(together.params))
    found = {name: error(metrics[name], expected[name]) for name in ("loss", "grad_norm", "lr")}
    assert metrics.get("lr_of", {}).keys() == expected.get("lr_of", {}).keys()
    trees = [("params", together.params, alone.params)]
    if what == "an average":
        trees.append(("ema", together.opt_state["ema"], alone.opt_state["ema"]))
    for name, held, whole in trees:
        full = tree.flatten(whole)
        for path, leaf in tree.flatten(local_tree(held)).items():
            found[f"{name} {path}"] = error(leaf, full[path][shards[path].local_box()])
    return found


@pytest.mark.parametrize("what", optimizers())
def test_patterns_of_leaves_on_one_stage_are_those_of_one_process(ranks: Ranks, what: str) -> None:
    # Muon computes in bf16.
    assert worst(ranks(2)(differences, what, "pp=2"))[0] < (2e-2 if what == "matrices" else 1e-5)


def test_patterns_over_stages_and_shards(ranks: Ranks) -> None:
    assert worst(ranks(4)(differences, "a rate", "pp=2,fsdp=2"))[0] < 1e-5


def adapters_of_one_stage() -> dict[str, float]:
    """A step of adapters that the first stage alone has."""
    config, mesh, how = config_of(NAME), Mesh(pp=2), {"rank": 2, "targets": ("layers.0.attention.*_proj",), "seed": 1}
    plan = stage_plan(P.plan(spec_of(NAME), rules_of(mesh, config), devices(mesh)), config, devices(mesh), Strategy())
    whole = tree.flatten(generic_params(config))
    bare = with_paths(lambda path, sharding: sharding.distribute(whole[path].clone()), plan)

    def noisy(path: str, leaf: Any) -> Any:
        return 0.3 * generic(path, leaf) if path.endswith(".b") else leaf

    found = {}
    one = with_paths(noisy, lora.add(config, generic_params(config), **how))
    full = tree.flatten(one)
    many = lora.add(config, bare, **how)
    many = with_paths(lambda path, leaf: placed_like(full[path].clone(), leaf), many)
    alone, together = (init_state(p, adamw(1e-2, spec=lora.spec(config, p))) for p in (one, many))
    alone, _ = make_step(loss_of(NAME), adamw(1e-2, spec=lora.spec(config, one)))(alone, batch())
    step = make_step(loss_of(NAME), adamw(1e-2, spec=lora.spec(config, many)), mesh=mesh, accumulate=2)
    together, _ = step(together, batch())
    after = tree.flatten(alone.params)
    for path, leaf in tree.flatten(local_tree(together.params)).items():
        found[path] = error(leaf, after[path])
    return found


def test_adapters_of_one_stage_alone(ranks: Ranks) -> None:
    found = ranks(2)(adapters_of_one_stage)
    assert worst(found)[0] < 1e-5
    assert [any(path.endswith(".a") for path in of_rank) for of_rank in found] == [True, False]


# {what is wrong: (an optimizer, words of the sentence)}
WRONG: dict[str, tuple[Any, str]] = {
    "no leaf": (lambda: partition({"layer.0.*": sgd(0.1), "*": sgd(0.1)}), "The pattern 'layer.0.*' gets no leaf"),
    "shadowed": (lambda: partition({"*": sgd(0.1), LAST: None}), "The pattern 'layers.1.*' gets no leaf"),
    "lost": (lambda: partition({"layers.*": sgd(0.1), "norm": None, "lm_head": None}), "matches embed_tokens"),
    "masked": (lambda: chain(masked(halved(), FIRST, "layers.2.*"), sgd(0.1)), "The pattern 'layers.2.*' gets no leaf"),
    "inside": (
        lambda: partition({FIRST: chain(masked(halved(), LAST), sgd(0.1)), "*": sgd(0.1)}),
        "The pattern 'layers.1.*' gets no leaf",
    ),
    "wrapped": (lambda: with_ema(with_master(partition({"x": None, "*": sgd(0.1)})), 0.9), "The pattern 'x' gets no"),
    "small": (
        lambda: partition({"x": None, "*": with_small_state(adamw(0.1))}),
        "The pattern 'x' gets no leaf",
    ),
    "rounded": (lambda: with_stochastic_rounding(partition({"x": None, "*": sgd(0.1)})), "The pattern 'x' gets no"),
    "a vector": (lambda: partition({"norm": muon(0.1), "*": sgd(0.1)}), "Muon updates matrices"),
}


def refusals() -> dict[str, list[str]]:
    """{what is wrong: the sentences of init_state, and of an engine that is given this optimizer later}."""
    found = {}
    for what, (make, _) in WRONG.items():
        sentences = []
        with pytest.raises(ValueError) as refused:
            init_state(placed(NAME, Mesh(pp=2)), make())
        sentences.append(str(refused.value))
        if what not in ("rounded", "wrapped"):  # their state has another structure
            engine = Engine(config_of(NAME), placed(NAME, Mesh(pp=2)), sgd(0.1), mesh=Mesh(pp=2))
            with pytest.raises(ValueError) as refused:
                engine.optimizer = make()
            sentences.append(str(refused.value))
        found[what] = sentences
    return found


def test_patterns_that_do_not_fit_the_model_are_refused_by_all_stages_alike(ranks: Ranks) -> None:
    first, second = ranks(2)(refusals)
    assert first == second
    for what, (make, words) in WRONG.items():
        assert words in first[what][0], what
        with pytest.raises(ValueError) as alone:
            init_state(generic_params(config_of(NAME)), make())
        assert words in str(alone.value)


def test_patterns_of_a_model_are_checked_by_init_too() -> None:
    params = {"layers": [{"w": torch.ones(2, 2)}], "norm": torch.ones(2)}
    with pytest.raises(ValueError, match=r"The pattern 'x' gets no leaf; the paths are like layers\.0\.w"):
        partition({"x": None, "*": sgd(0.1)}).init(params)
