"""Adapters over a mesh: divided as their weights are, and trained as one process trains them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import params as P
from fnmodels import llama, tree
from params import lora
from tests.support import adapters, copies
from tests.support.cases import generic, generic_params
from tests.support.one_process import batch, config_of, error, loss_of, spec_of, worst
from tests.support.ranks_pool import Ranks, devices
from train import adamw, init_state, make_step
from train.comm.dtensor import local_tree
from train.optim.base import with_paths
from train.parallel import Mesh, Strategy
from train.parallel.pipeline.schedule import pipeline
from train.parallel.pipeline.tree_split import share
from train.parallel.placement import rules_of, shardings
from train.parallel.tensor import leaf_roles

HOW: dict[str, Any] = {"rank": 3, "alpha": 6.0, "seed": 4}


def noisy(path: str, leaf: Tensor) -> Tensor:
    """Adapters that are neither at their zero beginning."""
    return 0.3 * generic(path, leaf) if path.endswith((".a", ".b")) else leaf


def targets_of(name: str) -> tuple[str, ...]:
    """Every linear map of a layer."""
    leaves = tree.flatten(spec_of(name)).items()
    return tuple({path.rpartition(".")[2] for path, leaf in leaves if lora.is_linear(path, leaf)} - {"lm_head"})


def errors_of(name: str, mesh_text: str, strategy: dict[str, Any], folder: str) -> dict[str, float]:
    """{what: how far it is from one process}: after two steps, and of what is made of the adapters."""
    config, mesh = config_of(name), Mesh.parse(mesh_text)
    bare = generic_params(config)
    placements = P.plan(spec_of(name), rules_of(mesh, config), devices(mesh))
    parts = tree.map(lambda how, leaf: how.distribute(leaf[how.local_box()].clone()), placements, bare)
    fresh, placed = (lora.add(config, params, targets=targets_of(name), **HOW) for params in (bare, parts))
    shards = tree.flatten(shardings(placed))
    found: dict[str, float] = {}

    def compare(what: str, ours: Any, theirs: Any) -> None:
        whole = tree.flatten(theirs)
        for path, leaf in tree.flatten(local_tree(ours)).items():
            found[f"{what} {path}"] = error(leaf, whole[path][shards[path].local_box()])

    compare("drawn", placed, fresh)
    one = with_paths(noisy, fresh)
    if folder:
        many = lora.load_adapters(folder, config, parts)
    else:
        whole = tree.flatten(one)
        many = with_paths(
            lambda path, leaf: shards[path].distribute(whole[path][shards[path].local_box()].clone()), placed
        )
    compare("given", many, one)
    merged = tree.flatten(lora.merge(one))
    for path, leaf in tree.flatten(local_tree(lora.merge(many))).items():
        found[f"merged {path}"] = error(leaf, merged[path][tree.flatten(placements)[path].local_box()])
    optimizer = adamw(1e-2, eps=1e-3, spec=lora.spec(config, one))
    alone, together = init_state(one, optimizer), init_state(many, optimizer)
    step = make_step(loss_of(name), optimizer, clip=0.5)
    shared = make_step(loss_of(name), optimizer, clip=0.5, mesh=mesh, strategy=Strategy(**strategy))
    for _ in range(2):
        alone, alone_metrics = step(alone, batch())
        together, metrics = shared(together, batch())
        for metric in ("loss", "grad_norm"):
            found[metric] = error(metrics[metric], alone_metrics[metric])
    compare("stepped", together.params, alone.params)
    moved = [
        path for path, leaf in tree.flatten(alone.params).items() if not torch.equal(leaf, tree.flatten(one)[path])
    ]
    assert moved and all(path.endswith((".a", ".b")) for path in moved)
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("llama", "fsdp=2,tp=2", {"sequence": True}),
        ("gpt_oss", "dp=2,tp=2", {}),
        ("llama", "tp=4", {}),
        ("deepseek", "fsdp=2,tp=2", {}),
    ],
)
def test_adapters_are_those_of_one_process(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], tmp_path: Any
) -> None:
    folder = ""
    if name == "llama":
        config, folder = config_of(name), str(tmp_path)
        adapted = lora.add(config, generic_params(config), targets=targets_of(name), **HOW)
        lora.save_adapters(folder, config, with_paths(noisy, adapted))
    found = ranks(4)(errors_of, name, mesh, strategy, folder)
    assert worst(found, "drawn")[0] == worst(found, "given")[0] == 0
    assert worst(found)[0] < 1e-5, worst(found)
    assert len(found[0]) > 50


LIMIT = 1e-5
ROUTED = ["mtp", "deepseek_v3", "gpt_oss", "kimi_linear", "lfm2_moe", "mixtral", "nemotron_h_latent_bias", "qwen3_moe"]
RECURRENT = ["bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "qwen3_next_dense_tied"]
# {mesh: (models, strategy, the step's options)}; None: those that cover all structures of adapters. How an adapter is
# shared follows from its one weight, which they show: other meshes have a model of each kind of layers they divide.
MESHES: dict[str, tuple[list[str] | None, dict[str, Any], dict[str, Any]]] = {
    "tp=2": (None, {}, {}),
    "tp=2, sequence": ([*ROUTED[::4], *RECURRENT[::3], "eurobert"], {"sequence": True}, {"remat": "full"}),
    "tp=4": (["gpt_oss", "qwen3_next_dense_tied"], {}, {}),
    "fsdp=2,tp=2": (["kimi_linear", "mixtral", "flow"], {}, {"remat": "full"}),
    "ep=2,tp=2": (["deepseek_v3", "gpt_oss"], {}, {}),
    "ep=2,tp=2, sequence": (["mixtral"], {"sequence": True}, {}),
    "fsdp=2": (["siglip", "lfm2_moe"], {}, {}),
    "ep=2": (["nemotron_h_latent_bias"], {}, {}),
    "cp=2": (["lfm2_moe", "kimi_linear", "deepseek_v32"], {}, {}),
    "pp=2": (["mtp", "lfm2_moe", "pairs", "flow"], {"schedule": "1F1B"}, {"accumulate": 2}),
    "pp=2,tp=2": (["mixtral", "flow"], {"schedule": "GPipe"}, {"accumulate": 1}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_adapters_at_every_target_have_the_gradients_of_one_process(ranks: Ranks, mesh: str) -> None:
    """Every gradient, and every adapter after a step, on every kind of mesh."""
    names, strategy, options = MESHES[mesh]
    over = mesh.partition(", ")[0]
    for name in names or adapters.covering():
        found = ranks(Mesh.parse(over).world)(adapters.errors_of, name, over, strategy, options)
        assert worst(found)[0] < LIMIT, (name, worst(found))
        targets = adapters.setting_of(name).targets(vocab="tp" not in over)
        every = {f"gradient of {path}.{part}" for path in targets for part in "ab"}
        assert {what for errors in found for what in errors} >= every, name


def unsummed_attention(patch: pytest.MonkeyPatch) -> None:
    """Adapters whose gradients stay those of one process' heads."""
    plain = leaf_roles.Use("plain", False)
    patch.setattr(leaf_roles, "_adapted", lambda *_: dict.fromkeys(("weight", "a", "b"), plain))


def unsummed_experts(patch: pytest.MonkeyPatch) -> None:
    """Adapters of experts whose replicated half has the gradient of one process' widths."""
    right, plain = leaf_roles._adapted, leaf_roles.Use("plain", False)

    def adapted(leaf: Any, *how: Any) -> Any:
        return dict.fromkeys(("weight", "a", "b"), plain) if "expert" in leaf.axes else right(leaf, *how)

    patch.setattr(leaf_roles, "_adapted", adapted)


def summed_shards(patch: pytest.MonkeyPatch) -> None:
    """Halves that are sharded have the sum of different shards' gradients."""
    shared = leaf_roles.Use("plain", True)
    patch.setattr(leaf_roles, "_adapted", lambda *_: dict.fromkeys(("weight", "a", "b"), shared))


# {what is wrong: (the patch, the leaves that show it, those of which copies differ)}
MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[str], list[str]]] = {
    "unsummed": (unsummed_attention, *[["attention.q_proj.a", "attention.o_proj.b"]] * 2),
    "unsummed experts": (
        unsummed_experts,
        *[["mlp.experts.gate_proj.a", "mlp.experts.up_proj.a", "mlp.experts.down_proj.b"]] * 2,
    ),
    "summed shards": (summed_shards, ["attention.q_proj.b", "mlp.experts.down_proj.a"], []),
}


def errors_with(what: str) -> tuple[dict[str, float], list[str]]:
    adapters.one_process("mixtral", False)  # before it is spoiled
    with pytest.MonkeyPatch.context() as patch, copies.may_differ() as differing:
        MISTAKES[what][0](patch)
        return adapters.errors_of("mixtral", "tp=2"), sorted(differing)


@pytest.mark.parametrize("what", MISTAKES)
def test_gradients_of_adapters_with_a_planted_fault_are_seen(ranks: Ranks, what: str) -> None:
    _, shown, copied = MISTAKES[what]
    errors, differing = zip(*ranks(2)(errors_with, what), strict=True)
    for leaf in shown:
        assert worst(list(errors), f"gradient of layers.0.{leaf}")[0] > 1e-2, leaf
    assert {f"params.layers.0.{leaf}" for leaf in copied} <= set(differing[0])
    assert bool(copied) == bool(differing[0]) and differing[0] == differing[1]


def refused() -> list[str]:
    mesh, config = Mesh(tp=2), config_of("gpt_oss")
    placements = P.plan(spec_of("gpt_oss"), rules_of(mesh, config), devices(mesh))
    params = lora.add(config, P.init(config, 0, plan=placements), targets=("lm_head",), **HOW)
    optimizer = adamw(1e-2, spec=lora.spec(config, params))
    with pytest.raises(ValueError) as error:
        make_step(loss_of("gpt_oss"), optimizer, mesh=mesh)(init_state(params, optimizer), batch())
    with pytest.raises(ValueError) as second:
        lora.save_adapters("nowhere", config, params)
    return [str(error.value), str(second.value)]


def test_what_cannot_be_divided_is_said(ranks: Ranks) -> None:
    for first, second in ranks(2)(refused):
        assert "lm_head has an adapter, and over 'tp' the vocabulary is sharded" in first
        assert "lm_head is a DTensor; only plain tensors can be saved" in second


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_the_adapters_of_its_share(tmp_path: Path, tied: bool) -> None:
    """LoRA of layers and of the embedding, and norms trained in full: each share gets what the whole model gets."""
    config = llama.Config(32, 16, 24, 4, 4, 2, tie_word_embeddings=tied)
    params = P.init(config, 1)
    adapted = lora.add(config, params, rank=2, targets=["*_proj", "embed_tokens"])
    adapted = lora.unfreeze(adapted, ["norm", "layers.*_layernorm"])
    lora.save_adapters(tmp_path, config, tree.map(lambda x: x + 0.5, adapted))
    whole, pipe = lora.load_adapters(tmp_path, config, params), pipeline(config, 2, "1F1B")
    for rank in range(2):
        part = lora.load_adapters(tmp_path, config, share(params, config, pipe, rank))
        wanted, read = tree.flatten(share(whole, config, pipe, rank)), tree.flatten(part)
        assert read.keys() == wanted.keys()
        assert all(torch.equal(leaf, wanted[path]) for path, leaf in read.items())
        assert len(read) > len(tree.leaves(share(params, config, pipe, rank)))
