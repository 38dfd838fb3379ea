"""Every way to share the work, alone and with others, is one process: each gradient, norm and parameter after a step.

`WAYS` is the table of what is proved, `MISTAKES` that of what would not pass.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.nn.attention.flex_attention import flex_attention

from fnmodels import llama, tree
from fnmodels.ops.attention import flex
from tests.support import one_process as reference
from tests.support.copies import may_differ
from tests.support.one_process import (
    HYBRIDS,
    MODELS,
    batch,
    errors_of,
    errors_of_modules,
    loss_of,
    one_process,
    pieces,
    placed,
    spec_of,
    worst,
)
from tests.support.ranks_pool import Ranks
from train import make_eval_step
from train.comm import collectives
from train.comm.region import Region
from train.parallel import NAMES, Mesh, compose, fsdp, update
from train.parallel import batch_shards as parts
from train.parallel.agreement import check_same
from train.parallel.context import api as context
from train.parallel.context import ring
from train.parallel.mesh import whole_groups
from train.parallel.pipeline import gradients, runner, stages
from train.parallel.pipeline.microbatch import Microbatch
from train.parallel.pipeline.schedule import SCHEDULES, SINGLE
from train.parallel.tensor import leaf_roles, leaf_wrappers

LIMIT = 1e-5


@dataclass(frozen=True)
class Way:
    """mesh: the ranks. strategy: how they share, where there is a choice. options: of the step; they change nothing.

    layers: None: 2 or 3. models: of `MODELS` or `HYBRIDS`; all, unless other ways show how their leaves are shared.
    """

    mesh: str
    strategy: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    layers: int | None = None
    models: tuple[str, ...] = tuple(MODELS)


ROUTED = ("deepseek", "gpt_oss")
FOUR, TWO = {"accumulate": 4}, {"accumulate": 2}  # microbatches
SP = {"sequence": True}


RECURRENT = tuple(HYBRIDS)


def staged(schedule: str, mesh: str = "pp=2", models: tuple[str, ...] = tuple(MODELS)) -> Way:
    """Layers that the stages do not divide, of which each has one at least."""
    return Way(mesh, {"schedule": schedule}, FOUR, 3 if schedule in SINGLE else 5, models)


def schedules() -> dict[str, Way]:
    """All models with the plainest schedule; in turn with the other orders of the passes, and with one for weights."""
    every, turns = tuple(MODELS), itertools.cycle(MODELS)
    return {f"pp {name}": staged(name, models=every if name == "1F1B" else (next(turns),)) for name in SCHEDULES}


WAYS: dict[str, Way] = {
    # one way alone
    "dp": Way("dp=2", options=TWO, models=("deepseek",)),
    "fsdp": Way("fsdp=2", options={"remat": "full"}, models=("llama", "deepseek")),
    "fsdp over 4": Way("fsdp=4", models=("gpt_oss",)),
    "tp": Way("tp=2", options={"remat": "selective", "inplace": False}),
    "tp, sp": Way("tp=2", SP, {"remat": "full", "lengths": [17]}),  # which tp does not divide
    "tp over 4, KV heads less": Way("tp=4", models=("llama",)),
    "tp over 4, KV heads less, sp": Way("tp=4", SP, {"lengths": [18]}, models=("gpt_oss",)),
    # test_context has the gradients of all models by each method
    "cp gather": Way("cp=2", {"context": "gather"}, models=("deepseek",)),
    "cp ulysses": Way("cp=2", {"context": "ulysses", "order": None}, {"remat": "full"}, models=("gpt_oss",)),
    "cp ring": Way("cp=2", {"context": "ring", "order": "head_tail"}, {"remat": "full"}, models=("llama",)),
    "ep": Way("ep=2", models=ROUTED),
    "ep over 4": Way("ep=4", options={"remat": "full"}, models=("gpt_oss",)),
    **schedules(),
    "pp over 4": Way("pp=4", {}, FOUR, 5, ("deepseek",)),
    "pp over 4, a V": Way("pp=4", {"schedule": "ZBVZeroBubble"}, {"accumulate": 8}, 9, ("llama",)),
    # pairs
    "dp x fsdp": Way("dp=2,fsdp=2", options={"remat": "every:2", "lengths": [16, 19]}, models=("llama",)),
    "dp x tp, sp": Way("dp=2,tp=2", SP, TWO, models=("gpt_oss",)),
    "dp x pp": staged("GPipe", "pp=2,dp=2", ("deepseek",)),
    "fsdp x tp": Way("fsdp=2,tp=2", options={"remat": "full"}, models=("deepseek",)),
    "fsdp x cp": Way("fsdp=2,cp=2", {"context": "ring", "order": "head_tail"}, TWO, models=("deepseek",)),
    "fsdp x ep": Way("fsdp=2,ep=2", options=TWO, models=("gpt_oss",)),
    "fsdp x pp": staged("InterleavedZeroBubble", "pp=2,fsdp=2", ("llama",)),
    "tp x cp, sp": Way("cp=2,tp=2", SP, {"lengths": [18]}, models=("deepseek",)),
    "tp x ep": Way("ep=2,tp=2", models=("gpt_oss",)),
    "tp x ep, sp": Way("ep=2,tp=2", SP, {"lengths": [17]}, models=("deepseek",)),
    "tp x pp": staged("1F1B", "pp=2,tp=2", ("deepseek",)),
    "tp x pp, sp": Way("pp=2,tp=2", {"schedule": "ZBVZeroBubble", **SP}, FOUR, 4, ("llama",)),
    "cp x ep": Way("ep=2,cp=2", models=("deepseek",)),
    "cp x pp": staged("GPipe", "pp=2,cp=2", ("gpt_oss",)),
    "ep x pp": Way("pp=2,ep=2", {"split": (1, 2)}, FOUR, 3, ("gpt_oss",)),
    # of three
    "fsdp x tp x pp": Way(
        "pp=2,fsdp=2,tp=2", {"schedule": "1F1B", **SP}, {"lengths": [17, 16], "remat": "full"}, 3, ("llama",)
    ),
    "fsdp x cp x tp": Way("fsdp=2,cp=2,tp=2", SP, models=("deepseek",)),
    "fsdp x ep x pp": Way("pp=2,fsdp=2,ep=2", {}, TWO, 3, ("gpt_oss",)),
    # of layers whose state goes along the sequence
    "recurrent, fsdp": Way("fsdp=2", {}, {"remat": "full"}, models=("lfm2",)),
    "recurrent, pp": Way("pp=2", {"schedule": "1F1B"}, FOUR, 3, ("qwen3_next",)),
    "recurrent, tp": Way("tp=2", {}, {"remat": "selective"}, models=RECURRENT),
    "recurrent, tp over 4, key heads less, sp": Way("tp=4", SP, {"lengths": [18]}, models=("qwen3_next",)),
    "recurrent, cp": Way("cp=2", {"context": "ulysses"}, {"remat": "full"}, models=("qwen3_next",)),
    "recurrent, fsdp x ep": Way("fsdp=2,ep=2", {}, TWO, models=("qwen3_next",)),
    "recurrent, cp x pp": Way("pp=2,cp=2", {"schedule": "1F1B"}, FOUR, 3, ("lfm2",)),
    "recurrent, cp x tp": Way("cp=2,tp=2", SP, {"remat": "full"}, models=("qwen3_next",)),
}

# Leaves whose gradient is easily wrong: of which all ranks have copies, or each something else, or two a part.
SPECIAL = {
    "llama": """embed_tokens norm layers.0.input_layernorm layers.0.attention.q_norm layers.0.attention.k_proj
        layers.0.attention.k_bias layers.1.attention.o_bias layers.1.mlp.down_proj""",
    "deepseek": """embed_tokens lm_head layers.1.mlp.router layers.1.mlp.shared_expert.up_proj
        layers.1.mlp.experts.down_proj layers.0.attention.kv_a_layernorm layers.0.attention.kv_a_proj
        layers.1.attention.q_b_proj layers.0.mlp.gate_proj""",
    "gpt_oss": """embed_tokens lm_head layers.0.attention.sinks layers.1.attention.sinks layers.0.attention.o_bias
        layers.1.mlp.router layers.1.mlp.router_bias layers.1.mlp.experts.down_bias layers.0.mlp.experts.gate_proj""",
    "qwen3_next": """embed_tokens layers.0.attention.A_log layers.0.attention.dt_bias layers.0.attention.norm
        layers.0.attention.k_proj layers.0.attention.k_conv layers.0.attention.v_conv layers.0.attention.b_proj
        layers.0.attention.o_proj layers.1.attention.gate_proj layers.1.attention.q_norm layers.0.mlp.router
        layers.0.mlp.shared_expert_gate""",
    "lfm2": """embed_tokens lm_head layers.1.attention.b_proj layers.1.attention.c_bias layers.1.attention.conv
        layers.2.attention.conv_bias layers.2.attention.o_bias layers.0.attention.k_norm""",
}


@pytest.mark.parametrize("name", [*MODELS, *HYBRIDS])
def test_the_leaves_that_are_easily_wrong_are_there_and_learn(name: str) -> None:
    one = one_process(name)
    for path in SPECIAL[name].split():
        assert one.grads[path].abs().max() > 1e-3, path
    assert ("lm_head" in one.after) == (name != "llama")  # whose embedding is tied
    assert name != "deepseek" or one.after["layers.1.mlp.selection_bias"].isfinite().all()


def assert_equal(name: str, found: list[dict[str, float]], layers: int | None = None, pp: int = 1) -> None:
    """Every leaf is compared, on each rank or in one stage at least, and the special ones by their names."""
    spec = tree.flatten(spec_of(name, layers))
    every = {f"gradient of {path}" for path, leaf in spec.items() if leaf.trainable}
    every |= {f"{path} after a step" for path in spec}
    assert all(f"gradient of {path}" in every for path in SPECIAL[name].split())
    seen = [{what for what in errors if "gradient of" in what or "after a step" in what} for errors in found]
    assert set.union(*seen) == every and (pp > 1 or all(one == every for one in seen))
    assert worst(found)[0] < LIMIT, (name, worst(found))


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_one_process(ranks: Ranks, way: str) -> None:
    how, mesh = WAYS[way], Mesh.parse(WAYS[way].mesh)
    for name in how.models:
        found = ranks(mesh.world)(errors_of, name, how.mesh, how.strategy, how.options, how.layers)
        assert_equal(name, found, how.layers, mesh.pp)


@pytest.mark.parametrize(
    ("name", "mesh", "remat"),
    [("llama", "fsdp=2", "none"), ("gpt_oss", "fsdp=2", "none"), ("deepseek", "dp=2,fsdp=2", "full")],
)
def test_a_step_of_fsdp2_is_that_of_one_process(ranks: Ranks, name: str, mesh: str, remat: str) -> None:
    assert_equal(name, ranks(Mesh.parse(mesh).world)(errors_of_modules, name, mesh, remat))


def beside_others() -> dict[str, float]:
    """Two trainers share the processes; each has a mesh of half of them, another model and other gradients."""
    everyone = init_device_mesh("cpu", (2, 1, 1, 2, 1, 1, 2), mesh_dim_names=("trainer", *NAMES))
    number, mesh = everyone.get_local_rank("trainer"), everyone[NAMES]
    odd = {name: tensor + everyone.get_local_rank("tp") for name, tensor in batch().items()}  # alike over fsdp
    with pytest.raises(ValueError, match=f"Processes {4 * number} and {4 * number + 1} were given different batches"):
        check_same(odd, mesh, whole_groups(mesh))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "devices", lambda _: mesh)
        return errors_of(("llama", "gpt_oss")[number], "fsdp=2,tp=2", SP)


def test_a_mesh_of_some_processes_sums_over_these(ranks: Ranks) -> None:
    assert worst(ranks(8)(beside_others))[0] < LIMIT


@pytest.mark.parametrize(("name", "mesh"), [("batch", "pp=2,ep=2"), ("batch", "fsdp=2,cp=2"), ("length", "pp=2,dp=2")])
def test_what_depends_on_the_whole_batch(ranks: Ranks, name: str, mesh: str) -> None:
    """A balance of all its rows, and tables that its longest position decides: each rank has a part alone."""
    assert worst(ranks(4)(errors_of, name, mesh, {"schedule": "GPipe"}))[0] < LIMIT


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,fsdp=2"])
def test_heads_for_further_tokens_behind_the_last_stage(ranks: Ranks, mesh: str) -> None:
    """They read the embedding once more, and run layers of their own, whose experts are balanced with the others."""
    world = Mesh.parse(mesh).world
    found = ranks(world)(errors_of, "mtp", mesh, {"schedule": "InterleavedZeroBubble"}, FOUR, 5)
    every = {f"{path} after a step" for path in tree.flatten(spec_of("mtp", 5))} | {"counts"}
    assert {what for errors in found for what in errors} > every
    assert worst(found)[0] < LIMIT, worst(found)


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("forward", "fsdp=2,tp=2", {}),
        ("reverse", "ep=2,tp=2", SP),
        ("forward", "cp=2", {}),
        ("forward", "pp=2,cp=2", {"schedule": "GPipe"}),
    ],
)
def test_a_student_learns_from_parts_of_both_models_logits(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any]
) -> None:
    """Of distributions over all the vocabulary; the teacher, of another family, is whole everywhere."""
    assert name == "forward" or one_process(name).metrics["aux"]["agree"] > 0
    assert worst(ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy))[0] < LIMIT


def test_the_last_stage_runs_the_teacher(ranks: Ranks) -> None:
    found = ranks(4)(errors_of, "reverse", "pp=2,tp=2", {"schedule": "InterleavedZeroBubble"}, FOUR, 5)
    assert {"agree", "counts", "sequence_balance"} < {what for errors in found for what in errors}
    assert worst(found)[0] < LIMIT, worst(found)


def test_a_loss_of_ones_own_balances_the_experts_too(ranks: Ranks) -> None:
    found = ranks(4)(errors_of, "policy", "cp=2,tp=2")
    assert {"ratio", "counts", "sequence_balance", "router_z"} < found[0].keys()
    assert worst(found)[0] < LIMIT, worst(found)


def test_the_longest_position_of_all_columns_decides(ranks: Ranks) -> None:
    assert worst(ranks(2)(errors_of, "length", "cp=2"))[0] < LIMIT


def with_block_masks() -> list[float]:
    """The loss through stages whose attention has a BlockMask for each microbatch, and that of one process."""
    mesh, loss = Mesh(pp=2), loss_of("llama", 3, kernel="flex")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_compiled", lambda: {False: flex_attention})  # that code is tested elsewhere
        found = make_eval_step(loss, mesh=mesh)(placed("llama", mesh, layers=3), pieces([16, 18]))
    return [float(found["loss"]), float(one_process("llama", 3).metrics["loss"])]


def test_stages_with_block_masks(ranks: Ranks) -> None:
    for found, expected in ranks(2)(with_block_masks):
        assert found == pytest.approx(expected, rel=LIMIT)


COMPILED: dict[str, Way] = {
    "fsdp": Way("fsdp=2", options={"remat": "full"}),
    "tp, sp": Way("tp=2", SP),
    "cp": Way("cp=2", {"context": "ulysses", "order": None}, layers=1),  # masks are parts of the graph: one kind
    "pp": Way("pp=2", options=FOUR, layers=3),
}


def compiled(way: str) -> dict[str, float]:
    """Errors of a step whose blocks are compiled, and the number of graphs."""
    graphs: list[Any] = []
    run = torch._dynamo.lookup_backend("eager" if way == "pp" else "aot_eager")  # the others' graphs have collectives

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return run(graph, inputs)

    how = COMPILED[way]
    torch._dynamo.reset()  # what it has seen of other models
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=note))
        found = errors_of("llama", how.mesh, how.strategy, {"compile": "block", **how.options}, how.layers)
    return found | {"graphs": len(graphs)}


@pytest.mark.slow
@pytest.mark.parametrize("way", COMPILED)
def test_a_step_of_compiled_blocks_is_that_of_one_process(ranks: Ranks, way: str) -> None:
    for found in ranks(2)(compiled, way):
        assert found.pop("graphs") == 1  # of both kinds of layers: what they differ in is data
        assert worst([found])[0] < LIMIT, worst([found])


# ------------------------------------------------------------------------------------------------ what would not pass


def unsummed_parts(patch: pytest.MonkeyPatch) -> None:
    """The gradient's own slice in place of the sum's."""

    def run(self: Any, x: Tensor) -> Tensor:
        return x.chunk(self.group.size(), self.dim)[self.group.rank()].to(self.target)

    patch.setattr(collectives._ReduceScatter, "run", run)


def means(patch: pytest.MonkeyPatch) -> None:
    add_up = collectives._ReduceScatter.run
    patch.setattr(collectives._ReduceScatter, "run", lambda self, x: add_up(self, x) / self.group.size())


def unsummed_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fsdp, "enter", lambda x, group: x)
    patch.setattr(fsdp, "enter_all", lambda xs, group: xs)


def first_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parts, "own_rows", lambda batch, _: tree.map(lambda t: t[: len(t) // dist.get_world_size()], batch))


def unsummed_keys(patch: pytest.MonkeyPatch) -> None:
    """Gathered keys and values have the gradient of one rank."""
    gathered = collectives.all_gather

    def run(x: Tensor, dim: int, group: Any, **how: Any) -> Tensor:
        parts = list(gathered(x.detach(), dim, group, **how).chunk(group.size(), dim))
        parts[group.rank()] = x
        return torch.cat(parts, dim)

    patch.setattr(context.collectives, "all_gather", run)


def unpermuted_table(patch: pytest.MonkeyPatch) -> None:
    """Of the columns that the rank would have if nothing had been permuted."""
    tables = llama.freqs_cis
    positions = batch()["positions"].chunk(2, 1)[dist.get_rank()]
    patch.setattr(llama, "freqs_cis", lambda config, _, length: tables(config, positions, length=length))


def balance_of_columns(patch: pytest.MonkeyPatch) -> None:
    """Each rank takes its columns for whole rows."""
    patch.setattr(compose, "whole_balance", lambda balance, _: balance)


def heads_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """What comes back of an exchange is joined in the order of other ranks."""
    exchanged = collectives.all_to_all

    def run(x: Tensor, group: Any, *, split: int, join: int) -> Tensor:
        found = exchanged(x, group, split=split, join=join)
        return torch.cat(found.chunk(group.size(), join)[::-1], join) if join == 2 else found

    patch.setattr(collectives, "all_to_all", run)


def mean_of_experts(patch: pytest.MonkeyPatch) -> None:
    """The gradient of experts, which is whole where they lie, is divided by the ranks whose tokens it is of."""
    gathered = fsdp._gather_alike

    def run(parts: list[fsdp.ParamShard], *how: Any) -> list[Tensor]:
        where = [dict(zip((n for n, _ in p.sharding.sizes), p.sharding.dims, strict=True)) for p in parts]
        pairs = zip(gathered(parts, *how), where, strict=True)
        return [(x + x.detach()) / 2 if dims["ep"] is not None else x for x, dims in pairs]

    patch.setattr(fsdp, "_gather_alike", run)


def weights_once(patch: pytest.MonkeyPatch) -> None:
    """The pass for weights is left out for all microbatches but the first."""
    passed = PipelineStage.backward_weight_one_chunk

    def run(self: Any, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id:
            self.backward_state.pop(bwd_chunk_id)
        else:
            passed(self, bwd_chunk_id, last_backward)

    patch.setattr(PipelineStage, "backward_weight_one_chunk", run)


def unanswered(patch: pytest.MonkeyPatch) -> None:
    """The gradient of tokens that experts got is not sent back."""
    exchange = collectives.exchange
    patch.setattr(collectives, "exchange", lambda x, *more: exchange(x.detach(), *more) + 0 * x.sum())


def summed_again(patch: pytest.MonkeyPatch) -> None:
    leave = collectives.leave
    patch.setattr(collectives, "leave", lambda x, group, **how: collectives.enter(leave(x, group, **how), group))


def bias_of_each(patch: pytest.MonkeyPatch) -> None:
    """A bias behind a sum is added by each rank."""

    def write(own: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return own.entry.region.leave(F.linear(x, own.weight, bias))

    patch.setitem(leaf_wrappers.NODES, "write", functools.partial(leaf_wrappers._Map, write))


def counted_padding(patch: pytest.MonkeyPatch) -> None:
    """What rows are padded with for sequence parallelism is a document of its own."""
    longer = parts.padded

    def run(batch: Any, length: int) -> Any:
        missing = length - batch["tokens"].shape[1]
        return {**longer(batch, length), "segment_ids": F.pad(batch["segment_ids"], (0, missing), value=9)}

    patch.setattr(parts, "padded", run)


def another_head(patch: pytest.MonkeyPatch) -> None:
    """The KV head of another rank."""
    use = leaf_roles._use

    def shifted(leaf: Any, is_part: bool, divided: Any, region: Region) -> Any:
        return use(leaf, is_part, divided, dataclasses.replace(region, rank=(region.rank + 2) % region.size))

    patch.setattr(leaf_roles, "_use", shifted)


def first_mask(patch: pytest.MonkeyPatch) -> None:
    prepared = runner.microbatches

    def run(*args: Any) -> list[Microbatch]:
        parts = prepared(*args)
        return [dataclasses.replace(part, masks=parts[0].masks, layout=parts[0].layout) for part in parts]

    patch.setattr(runner, "microbatches", run)


def first_table(patch: pytest.MonkeyPatch) -> None:
    prepared = runner.microbatches

    def run(*args: Any) -> list[Microbatch]:
        parts = prepared(*args)
        return [dataclasses.replace(part, freqs_cis=parts[0].freqs_cis) for part in parts]

    patch.setattr(runner, "microbatches", run)


def divided_by_microbatches(patch: pytest.MonkeyPatch) -> None:
    """torch divides gradients by the number of microbatches unless losses are set to be sums."""
    made = runner._schedule

    def careless(*args: Any) -> Any:
        schedule = made(*args)
        schedule.scale_grads = True
        return schedule

    patch.setattr(runner, "_schedule", careless)


def averaged_modules(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.distributed.fsdp.FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


# what is wrong: (the patch, a way, a model, and what shows it on some rank)
GRADIENT = "gradient of layers.0.mlp.down_proj"
MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str, str]] = {
    "copies are not summed": (unsummed_copies, "dp", "llama", "gradient of embed_tokens"),
    "copies of parts are not summed": (unsummed_copies, "dp x fsdp", "llama", GRADIENT),
    "copies of what is no expert are not summed": (unsummed_copies, "ep", "gpt_oss", "gradient of layers.0.mlp.router"),
    "parts are not summed": (unsummed_parts, "fsdp", "llama", GRADIENT),
    "means in place of sums": (means, "fsdp", "llama", GRADIENT),
    "means of modules": (averaged_modules, "fsdp2", "llama", GRADIENT),
    "a count of one rank": (lambda p: p.setattr(update, "_global", lambda sums, _: sums), "fsdp", "llama", "loss"),
    "every copy counts": (lambda p: p.setattr(update, "_is_first_copy", lambda _: True), "dp", "llama", "grad_norm"),
    "rows of the first rank": (first_rows, "fsdp", "llama", GRADIENT),
    "keys have one rank's gradient": (unsummed_keys, "cp gather", "llama", "gradient of layers.0.attention.k_proj"),
    "an unpermuted table": (unpermuted_table, "cp gather", "llama", "gradient of layers.0.attention.q_proj"),
    "a balance of own columns": (balance_of_columns, "cp gather", "deepseek", "gradient of layers.1.mlp.router"),
    "what a ring has merged does not shrink": (
        lambda p: p.setattr(ring, "_shrink", lambda before, _: torch.ones_like(before)),
        "cp ring",
        "llama",
        "gradient of layers.0.attention.q_proj",
    ),
    "another rank's heads": (heads_in_another_order, "cp ulysses", "llama", "gradient of layers.0.attention.o_proj"),
    "means of experts": (mean_of_experts, "fsdp x ep", "gpt_oss", "gradient of layers.1.mlp.experts.down_bias"),
    "the weights of one microbatch": (weights_once, "pp ZBVZeroBubble", "llama", GRADIENT),
    "experts send nothing back": (unanswered, "ep", "deepseek", "gradient of layers.0.mlp.down_proj"),
    "shared leaves are not summed": (
        lambda p: p.setattr(Region, "all_shared", lambda self, values: values),
        "tp",
        "deepseek",
        "gradient of layers.1.attention.kv_a_proj",
    ),
    "shared leaves of recurrent layers are not summed": (
        lambda p: p.setattr(Region, "all_shared", lambda self, values: values),
        "recurrent, tp",
        "qwen3_next",
        "gradient of layers.0.attention.norm",
    ),
    "what enters is not summed": (
        lambda p: p.setattr(collectives, "enter", lambda x, group, **how: x),
        "tp",
        "gpt_oss",
        "gradient of layers.1.mlp.router_bias",
    ),
    "what leaves is summed again": (summed_again, "tp", "llama", "gradient of layers.1.mlp.up_proj"),
    "gathered columns have one rank's gradient": (
        lambda p: p.setattr(collectives, "all_gather", lambda x, dim, group: collectives.join(x, dim, group)),
        "tp, sp",
        "deepseek",
        "gradient of layers.1.mlp.router",
    ),
    "padding has experts": (counted_padding, "tp, sp", "deepseek", "counts"),
    "a bias is added by each": (bias_of_each, "tp", "gpt_oss", "loss"),
    "another rank's KV head": (another_head, "tp over 4, KV heads less", "llama", "loss"),
    "the ends of a tied embedding are not summed": (
        lambda p: p.setattr(gradients, "_sum_copies", lambda *_: None),
        "pp 1F1B",
        "llama",
        "gradient of embed_tokens",
    ),
    "both ends of a tied embedding count": (
        lambda p: p.setattr(stages, "copies", lambda *_: frozenset()),
        "pp 1F1B",
        "llama",
        "grad_norm",
    ),
    "the first microbatch's mask": (first_mask, "pp 1F1B", "llama", "gradient of layers.0.attention.q_proj"),
    "the first microbatch's table": (first_table, "pp 1F1B", "gpt_oss", "gradient of layers.2.attention.q_proj"),
    "gradients are divided by microbatches": (divided_by_microbatches, "pp 1F1B", "llama", "gradient of norm"),
}


def errors_with(what: str) -> dict[str, float]:
    spoil, way, name, _ = MISTAKES[what]
    one_process(name, None if way == "fsdp2" else WAYS[way].layers)  # before it is spoiled
    with pytest.MonkeyPatch.context() as patch, may_differ():
        spoil(patch)
        if way == "fsdp2":
            return errors_of_modules(name, "fsdp=2")
        how = WAYS[way]
        return errors_of(name, how.mesh, how.strategy, how.options, how.layers)


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_seen(ranks: Ranks, what: str) -> None:
    _, way, _, shows = MISTAKES[what]
    mesh = "fsdp=2" if way == "fsdp2" else WAYS[way].mesh
    assert worst(ranks(Mesh.parse(mesh).world)(errors_with, what), shows)[0] > 100 * LIMIT
