"""FSDP, HSDP and data parallelism by gathered layers: every gradient, norm and update is that of one process."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fnmodels import tree
from fnmodels.ops.torch_internals import dtensor_like
from params import Rules, plan
from tests.support.cases import generic_params
from tests.support.copies import may_differ
from tests.support.one_process import (
    batch,
    by_one_rank,
    config_of,
    loss_of,
    one_process,
    optimizer_of,
    placed,
    spec_of,
    worst,
)
from tests.support.ranks_pool import Ranks, devices
from train import Optimizer, adafactor, checkpoint, init_state, lion, make_step, muon, partition, sgd, sharded, with_ema
from train.comm import collectives
from train.comm.dtensor import local_tree, placed_like
from train.parallel import NAMES, Mesh, Strategy, fsdp, placement, update
from train.parallel.batch_shards import own_rows

# ------------------------------------------------------------------------------------------------ what is sent when


def counted(run: Any, kind: str, counts: dict[str, int]) -> Any:
    def watched(self: Any, x: Tensor) -> Tensor:
        counts[kind] += 1
        return run(self, x)

    return watched


def messages(mesh_text: str, remat: str) -> dict[str, int]:
    """How many there are of each kind in a step."""
    mesh = Mesh.parse(mesh_text)
    params, optimizer = placed("llama", mesh), optimizer_of("llama")
    counts = {"gathers": 0, "scatters": 0, "reductions": 0}
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in (("gathers", "_AllGather"), ("scatters", "_ReduceScatter"), ("reductions", "_Sum")):
            patch.setattr(getattr(collectives, name), "run", counted(getattr(collectives, name).run, kind, counts))
        step = make_step(loss_of("llama"), optimizer, remat=remat, mesh=mesh)
        step(init_state(params, optimizer), batch())
    return counts


def test_a_layer_is_one_message_each_way_and_what_is_recomputed_is_gathered_again(ranks: Ranks) -> None:
    parts = 1 + 2  # what is outside of layers, and two layers
    expected = {"gathers": parts, "scatters": parts, "reductions": 0}
    assert ranks(2)(messages, "fsdp=2", "none") == [expected] * 2
    assert ranks(2)(messages, "fsdp=2", "full") == [expected | {"gathers": parts + 2}] * 2
    assert ranks(2)(messages, "dp=2", "full") == [{"gathers": 0, "scatters": 0, "reductions": parts}] * 2
    assert ranks(4)(messages, "dp=2,fsdp=2", "none") == [expected | {"reductions": parts}] * 4


def narrow(strategy: dict[str, Any]) -> dict[str, Any]:
    """What the model sees with gather_dtype, and how far the gradients are from those of fp32."""
    seen: dict[str, set[str]] = {"layer": set(), "bias": set(), "outside": set()}
    inner = loss_of("deepseek")

    def loss(params: Any, rows: Any) -> Any:
        def watch(block: Any) -> Any:
            def run(layer: Any, *args: Any, **more: Any) -> Any:
                for path, leaf in tree.flatten(layer).items():
                    seen["bias" if path.endswith("selection_bias") else "layer"].add(str(leaf.dtype))
                return block(layer, *args, **more)

            return run

        found = inner(params, rows, layer_fn=watch)  # before it the step may stop here, to see which model this is
        seen["outside"] |= {str(leaf.dtype) for name, leaf in params.items() if name != "layers"}
        return found

    mesh = Mesh(fsdp=2)
    params, optimizer = placed("deepseek", mesh), optimizer_of("deepseek")
    step = make_step(loss, optimizer, mesh=mesh, dtype=torch.bfloat16)
    state, metrics = step(init_state(params, optimizer), batch())
    expected = one_process("deepseek").metrics["loss"]
    kept = {str(leaf.dtype) for leaf in tree.leaves(state.params)}
    off = float((metrics["loss"] - expected).abs() / expected)
    return {name: sorted(values) for name, values in seen.items()} | {"off": off, "kept": sorted(kept)}


def test_leaves_are_sent_in_bf16_and_stay_fp32(ranks: Ranks) -> None:
    for found in ranks(2)(narrow, {}):
        assert found["layer"] == found["outside"] == ["torch.bfloat16"]
        assert found["bias"] == found["kept"] == ["torch.float32"]
        assert 1e-6 < found["off"] < 3e-2


# ------------------------------------------------------------------------------------------------ transforms


def transformed(name: str, mesh_text: str) -> dict[str, float]:
    """Directional derivative and Hessian times vector, of parts, against one process."""
    mesh = Mesh.parse(mesh_text)
    config, params = config_of(name), placed(name, mesh)
    where = placement.shardings(params)
    whole = generic_params(config)
    draw = torch.Generator().manual_seed(5)
    direction = tree.map(lambda p: torch.randn(p.shape, generator=draw), whole)
    here = lambda values: tree.map(lambda v, how: v[how.local_box()].contiguous(), values, where)  # noqa: E731
    plain = functools.partial(loss_of(name), chunk=None)
    shared = fsdp.gathering(functools.partial(loss_of(name), chunk=None), where)
    rows = own_rows(batch(), devices(mesh))

    def one(params: Any) -> Tensor:
        total: Tensor = plain(params, batch())[0]
        return total

    def mine(held: Any) -> Tensor:
        total: Tensor = shared(held, rows)[0]
        return total

    held = here(whole)
    gradient, curve = torch.func.jvp(torch.func.grad(one), (whole,), (direction,))
    ours, bend = torch.func.jvp(torch.func.grad(mine), (held,), (here(direction),))
    _, along = torch.func.jvp(one, (whole,), (direction,))
    _, part = torch.func.jvp(mine, (held,), (here(direction),))
    world = dist.group.WORLD
    assert world is not None
    found = {"derivative": float((collectives.summed(part, world) - along).abs() / along.abs())}
    for what, a, b in (("gradient", ours, gradient), ("product", bend, curve)):
        flat = tree.flatten(b)
        largest = max(float(v.abs().max()) for v in flat.values())
        for path, value in tree.flatten(a).items():
            off = float((value - flat[path][tree.flatten(where)[path].local_box()]).abs().max())
            found[f"{what} {path}"] = off / max(float(flat[path].abs().max()), 1e-4 * largest)
    return found


@pytest.mark.parametrize(("name", "mesh"), [("deepseek", "fsdp=2"), ("llama", "dp=2,fsdp=2")])
def test_jvp_and_hvp_of_divided_parameters_are_those_of_one_process(ranks: Ranks, name: str, mesh: str) -> None:
    found = ranks(Mesh.parse(mesh).world)(transformed, name, mesh)
    assert worst(found)[0] < 1e-5, worst(found)
    assert len(found[0]) > 30


# ------------------------------------------------------------------------------------------------ optimizers and files


def optimizers(mesh_text: str) -> dict[str, float]:
    """Pure and in-place updates, groups of leaves, whole matrices, and whole leaves where nothing is divided."""
    mesh, name = Mesh.parse(mesh_text), "llama"
    spec = spec_of(name)
    made = {
        "sgd": sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01, spec=spec),
        "lion": lion(1e-3, weight_decay=0.1, spec=spec),
        "partition": partition({"*norm*": None, "layers.0.*": sgd(0.1), "*": optimizer_of(name)}),
    }
    if mesh == Mesh(dp=2):
        made["adafactor"] = adafactor(spec=spec)
    found = {}
    for what, optimizer in made.items():
        one = init_state(generic_params(config_of(name)), optimizer)
        many = init_state(placed(name, mesh), optimizer)
        alone, together = (
            make_step(loss_of(name), optimizer),
            make_step(loss_of(name), optimizer, mesh=mesh, inplace=False),
        )
        for _ in range(2):
            before = many
            one, _ = alone(one, batch())
            many, _ = together(many, batch())
            assert before.params is not many.params
        where = tree.flatten(placement.shardings(many.params))
        whole = tree.flatten(one.params)
        for path, leaf in tree.flatten(local_tree(many.params)).items():
            # the sign of a gradient that is nothing but rounding is a coin toss, which few leaves' few numbers show
            off = (leaf - whole[path][where[path].local_box()]).abs().flatten()
            found[f"{what} {path}"] = float(off.sort().values[: max(1, int(0.99 * len(off)))].max())
    return found


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_updates_of_parts_are_those_of_the_whole(ranks: Ranks, mesh: str) -> None:
    found = ranks(2)(optimizers, mesh)
    assert worst(found)[0] < 2e-5, worst(found)


def muon_of(name: str) -> Optimizer:
    matrices = with_ema(muon(0.004), 0.9) if name == "deepseek" else muon(0.02, match_adamw=True)
    return partition({"layers.*proj": matrices, "*": sgd(0.0, spec=spec_of(name))})


def muon_alone(name: str) -> dict[str, Tensor]:
    """The parameters of one process after two steps."""
    optimizer = muon_of(name)
    state, step = init_state(generic_params(config_of(name)), optimizer), make_step(loss_of(name), optimizer)
    for _ in range(2):
        state, _ = step(state, batch())
    return tree.flatten(state.params)


def muons(name: str, mesh_text: str, damage: bool = False) -> dict[str, float]:
    """{leaf: how far it is from one process after two steps}, in norm, to how far it went."""
    mesh, optimizer = Mesh.parse(mesh_text), muon_of(name)
    whole, many = by_one_rank(f"muon-{name}", lambda: muon_alone(name)), init_state(placed(name, mesh), optimizer)
    before = tree.flatten(generic_params(config_of(name)))
    with pytest.MonkeyPatch.context() as patch, may_differ():
        if damage:
            patch.setattr(update, "_on_matrices", lambda _: lambda path, function, x: function(x))
        together = make_step(loss_of(name), optimizer, mesh=mesh, accumulate=mesh.pp)
        for _ in range(2):
            many, _ = together(many, batch())
    where, found = tree.flatten(placement.shardings(many.params)), {}
    for path, leaf in tree.flatten(local_tree(many.params)).items():
        if path.endswith("proj"):
            here = where[path].local_box()
            moved = float((whole[path] - before[path])[here].norm())
            assert moved > 1e-3, path
            found[path] = float((leaf - whole[path][here]).norm()) / moved
    return found


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama", "fsdp=2,tp=2"), ("deepseek", "fsdp=2,ep=2"), ("gpt_oss", "pp=2,fsdp=2")]
)
def test_muon_sees_whole_matrices(ranks: Ranks, name: str, mesh: str) -> None:
    found = ranks(4)(muons, name, mesh)
    # Products are bf16: copies differ by 0.01, and one process that takes the batch in two parts from itself by 0.05.
    # The rate of experts is low, since such a difference, made by the first step, must not change their choice.
    assert worst(found)[0] < (0.1 if "pp" in mesh else 0.05), worst(found)
    assert len({path for one in found for path in one}) > 10


def test_muon_of_parts_of_matrices_is_seen(ranks: Ranks) -> None:
    assert worst(ranks(2)(muons, "llama", "fsdp=2", True))[0] > 0.5


def skipped() -> dict[str, bool]:
    """Rows of the second rank alone make the loss infinite; nobody may step."""
    mesh, name = Mesh(fsdp=2), "llama"
    optimizer, params = optimizer_of(name), placed(name, mesh)
    inner = loss_of(name)

    def loss(params: Any, rows: Any) -> Any:
        total, count = inner(params, rows)
        return total * (float("inf") if dist.get_rank() == 1 else 1.0), count

    state, metrics = make_step(loss, optimizer, clip=1.0, mesh=mesh)(init_state(params, optimizer), batch())
    same = all(map(torch.equal, tree.leaves(local_tree(state.params)), tree.leaves(local_tree(params))))
    return {"finite": bool(metrics["finite"]), "same": same}


def test_a_step_that_one_rank_cannot_make_no_rank_makes(ranks: Ranks) -> None:
    assert ranks(2)(skipped) == [{"finite": False, "same": True}] * 2


def save(folder: str) -> float:
    """One step on this mesh, saved; what the second step's loss is here."""
    mesh, name = Mesh(dp=2, fsdp=2), "llama"
    optimizer = optimizer_of(name)
    step = make_step(loss_of(name), optimizer, mesh=mesh)
    state, _ = step(init_state(placed(name, mesh), optimizer), batch())
    sharded.save(Path(folder), 1, state)
    return float(step(state, batch())[1]["loss"])


def save_beside(folder: str) -> bool:
    """Two trainers share the processes; each saves its own state, and reads it."""
    everyone = init_device_mesh("cpu", (2, 1, 1, 2, 1, 1, 1), mesh_dim_names=("trainer", *NAMES))
    number, group = everyone.get_local_rank("trainer"), everyone.get_group("fsdp")
    whole, placements = (
        generic_params(config_of("llama")),
        plan(spec_of("llama"), Rules(spread="fsdp"), everyone[NAMES]),
    )
    made = tree.map(lambda leaf, how: how.distribute(leaf[how.local_box()] + number), whole, placements)
    path = Path(folder) / str(number)
    with pytest.raises(ValueError, match=r"placed on the processes \[[02], [13]\], and the group is of \[0, 1, 2, 3\]"):
        sharded.save(path, 1, made)
    sharded.save(path, 1, made, group=group)
    found = sharded.latest(path, group=group)
    assert found is not None
    back = sharded.load(found, made, group=group)
    return all(map(torch.equal, tree.leaves(local_tree(back)), tree.leaves(local_tree(made))))


def resume(folder: str, mesh_text: str) -> float:
    mesh, name = Mesh.parse(mesh_text), "llama"
    optimizer = optimizer_of(name)
    found = sharded.latest(Path(folder))
    assert found is not None
    like = init_state(placed(name, mesh), optimizer)
    (other,) = (Path(folder).parent / "other").iterdir()
    for elsewhere, said in ((f"{folder}/none", "Process 1 .* cannot read it"), (str(other), "other files")):
        with pytest.raises(OSError, match=said):  # by both, where one sees another disk
            sharded.load(dataclasses.replace(found, path=Path(elsewhere)) if dist.get_rank() else found, like)
    state = sharded.load(found, like)
    assert int(state.step) == 1
    return float(make_step(loss_of(name), optimizer, mesh=mesh)(state, batch())[1]["loss"])


def test_a_state_saved_by_four_goes_on_with_two_and_with_one(ranks: Ranks, tmp_path: Path) -> None:
    losses = ranks(4)(save, str(tmp_path / "steps"))
    checkpoint.save(tmp_path / "other", 1, {"w": torch.ones(2)})
    losses += ranks(2)(resume, str(tmp_path / "steps"), "fsdp=2")
    optimizer = optimizer_of("llama")
    found = sharded.latest(tmp_path / "steps")
    assert found is not None
    state = sharded.load(found, init_state(generic_params(config_of("llama")), optimizer))
    losses.append(float(make_step(loss_of("llama"), optimizer)(state, batch())[1]["loss"]))
    assert max(losses) - min(losses) < 1e-6 * max(losses)
    assert all(ranks(4)(save_beside, str(tmp_path)))


# ------------------------------------------------------------------------------------------------ refusals


def refusals() -> None:
    """All before anything is sent, on all ranks alike."""
    mesh, name = Mesh(fsdp=2), "llama"
    optimizer, params = optimizer_of(name), placed(name, mesh)

    def refuse(said: str, state: Any, given: Any, optimizer: Any = optimizer, loss: Any = None, **options: Any) -> None:
        with pytest.raises(ValueError, match=said):
            make_step(loss or loss_of(name), optimizer, **{"mesh": mesh, **options})(state, given)

    state = init_state(params, optimizer)
    odd = tree.map(lambda t: t[:7], batch())
    refuse(r"'tokens' has 7 rows, and the mesh fsdp=2 takes them in 2 equal parts", state, odd)
    refuse("'tokens' has 7 rows", state, [batch(), odd])
    for key, value, words in (  # in rows that one process alone takes
        ("tokens", -1, "Process 1: The tokens go from -1 .* the model knows 0 to 63"),
        ("labels", 64, "Process 1: labels.* is 64, but the vocabulary has 64 entries"),
    ):
        refuse(words, state, batch() | {key: batch()[key].index_fill(0, torch.tensor([7]), value)})
    mine = batch() | {"labels": batch()["labels"].index_fill(0, torch.tensor([7 * dist.get_rank()]), -100)}
    refuse("Processes 0 and 1 were given different batches: their labels differ", state, mine)
    refuse("their labels and positions and segment_ids and tokens differ", state, odd if dist.get_rank() else batch())
    listed = batch() | {"labels": batch()["labels"].tolist()}  # in one process, and in all
    refuse("Process 1: The batch's 'labels.0.0' is of type int", state, listed if dist.get_rank() else batch())
    refuse("The batch's 'labels.0.0' is of type int", state, listed)
    plain = init_state(generic_params(config_of(name)), optimizer)
    refuse("embed_tokens is a Tensor; over a mesh parameters are DTensors", plain, batch())
    refuse("made for the mesh dp=2, and the State's parameters lie on fsdp=2", state, batch(), mesh=Mesh(dp=2))
    refuse(
        "compile is 'whole'; over a mesh it must be .* what gathers layers goes into no graph",
        state,
        batch(),
        compile="whole",
    )
    refuse('hide them: take "full" or', state, batch(), compile="block", remat="selective")
    for other, how, said in (
        (Mesh(ep=2), Strategy(), "over ep it is the host that reads"),
        (Mesh(cp=2), Strategy(context="ring"), 'context="ring" asks the host'),
        (Mesh(pp=2), Strategy(schedule="DualPipeV"), "schedule='DualPipeV' takes each layer's backward pass in two"),
    ):
        refuse(said, state, batch(), compile="block", mesh=other, strategy=how)
    refuse("so the loss must run the model", state, batch(), loss=lambda params, batch: None)
    whole = adafactor(spec=spec_of(name))
    refuse("needs full leaves, and embed_tokens is sharded over fsdp", init_state(params, whole), batch(), whole)
    other = init_state(placed(name, mesh, Rules(spread="fsdp")), sgd(0.1))
    refuse("opt_state is not of this step's optimizer", other, batch())
    with pytest.raises(ValueError, match="needs a mesh"):
        make_step(loss_of(name), optimizer, strategy=Strategy())
    with pytest.raises(ValueError, match="mesh dimension 'fdsp'; the mesh has pp, dp, fsdp"):
        plan(spec_of(name), Rules(spread="fdsp"), devices(mesh))
    state, _ = make_step(loss_of(name), optimizer, mesh=mesh)(state, batch())  # nobody waits for anybody


def test_what_cannot_work_is_refused_in_a_sentence_and_nobody_waits(ranks: Ranks) -> None:
    ranks(2)(refusals)


def leaves_refused() -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard

    flat = devices(Mesh(fsdp=2))["fsdp"]
    with pytest.raises(ValueError, match=r"w is placed by Partial"):
        placement.shardings({"w": DTensor.from_local(torch.ones(2), flat, [Partial()], run_check=False)})
    uneven = DTensor.from_local(
        torch.ones(2 - dist.get_rank()), flat, [Shard(0)], run_check=False, shape=(3,), stride=(1,)
    )
    with pytest.raises(ValueError, match=r"w: dimension 0 of \[3\] is not a multiple of the 2 parts"):
        placement.shardings({"w": uneven})


def test_leaves_that_cannot_be_gathered_are_named(ranks: Ranks) -> None:
    ranks(2)(leaves_refused)


def placed_as_a_leaf() -> list[bool]:
    """Whether a tensor without a gradient becomes the DTensor that torch makes; one with a gradient keeps it."""
    leaf: Any = tree.flatten(placed("llama", Mesh(fsdp=2)))["embed_tokens"]
    right = [dtensor_like(leaf.to_local().clone(), leaf) is None]  # a gradient would be recorded
    for local in (leaf.to_local().clone(), leaf.to_local().double()):
        with torch.no_grad():
            found: Any = placed_like(local, leaf)
            right.append((dtensor_like(local, leaf) is None) == (local.dtype != leaf.dtype))
        wanted: Any = DTensor.from_local(
            local, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
        )
        for read in ("dtype", "shape", "placements", "device_mesh", "device", "requires_grad"):
            right.append(getattr(found, read) == getattr(wanted, read))
        right.append(found.stride() == wanted.stride() and found.to_local().data_ptr() == local.data_ptr())
    learning = leaf.to_local().clone().requires_grad_()
    (grad,) = torch.autograd.grad(placed_like(2 * learning, leaf).to_local().sum(), learning)
    return [*right, bool((grad == 2).all())]


def test_a_tensor_is_placed_as_a_leaf(ranks: Ranks) -> None:
    assert all(map(all, ranks(2)(placed_as_a_leaf)))
