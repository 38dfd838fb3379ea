"""Loading straight into parts: the bits of the whole's parts, however it lies on disk, and little beside them read."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fnmodels
import params as P
from fnmodels import gpt_oss, llama, tree
from fnmodels.models.common.spec import Leaf
from fnmodels.models.common.storage import Stack, TensorSlice
from params.sharding import Sharding
from tests.params import test_compressed_ids as compressed_ids
from tests.params.quantized import test_block_scales as quantized
from tests.support.cases import generic_params, richest
from tests.support.encoder_losses import SETTINGS
from tests.support.ranks_pool import Ranks, devices
from train.parallel import Mesh, Strategy
from train.parallel.pipeline.stages import stage_plan
from train.parallel.placement import rules_of

FILE = "model.safetensors"
LARGE = llama.Config(2048, 256, 512, 4, 4, 2)


def spec_of(config: Any) -> Any:
    return fnmodels.family_of(config).spec(config)


def layouts() -> list[Any]:
    """Configs that lie on disk in all the ways that families know, with no more of them than that takes."""
    seen: set[Any] = set()
    chosen = []
    for case in richest():
        stored = fnmodels.family_of(case.config).hf_names(case.config).values()
        singles = [(type(one), one.tensors[0] if isinstance(one, Stack) else one) for one in stored]
        ways = {
            (kind, type(one), *((one.groups > 1, one.transposed, one.batched) if isinstance(one, TensorSlice) else ()))
            for kind, one in singles
        }
        if ways - seen:
            chosen.append(case.config)
            seen |= ways
    return chosen


def columns(leaf: Leaf, mesh: Any) -> Sharding:
    """Divided in what is dear to read: the last dimension, and where there is one more, the one before it."""
    sizes = tuple(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    last, *more = [name for name, size in reversed(sizes) if size > 1]
    where = {last: len(leaf.shape) - 1} | dict.fromkeys(more, max(0, len(leaf.shape) - 2))
    return Sharding(tuple(where.get(name) for name, _ in sizes), sizes, leaf.shape, leaf.dtype.itemsize, mesh)


def differences(folders: list[str], mesh_text: str) -> tuple[list[str], int]:
    """(leaves that are not the part of the whole, how many were compared)."""
    mesh = devices(Mesh.parse(mesh_text))
    faults, count = [], 0
    for folder in folders:
        spec = spec_of(P.load_config(folder))
        rows = P.plan(spec, P.Rules(spread=("fsdp", "tp")), mesh)
        apart = tree.map(lambda leaf: columns(leaf, mesh), spec)
        ways: list[tuple[Any, dict[str, Any]]] = [
            (rows, {}),
            (apart, {}),
            (apart, {"copy": True, "dtype": torch.float64}),
        ]
        for placements, how in ways:
            whole = tree.flatten(P.load_pretrained(folder, **how)[1])
            loaded = tree.flatten(P.load_pretrained(folder, plan=placements, check_finite=True, **how)[1])
            assert list(loaded) == list(whole)
            for path, where in tree.flatten(placements).items():
                leaf, part = loaded[path], whole[path][where.local_box()]
                local = leaf.to_local()
                placed = leaf.shape == where.shape and leaf.placements == where.placements
                count += 1
                if not (placed and local.dtype == part.dtype and torch.equal(local, part)):
                    faults.append(f"{folder} {path} {how}: {list(local.shape)} {local.dtype}")
    return faults, count


def mxfp4(folder: Path) -> None:
    """gpt-oss as it is published: experts of four bits."""
    config = gpt_oss.Config(64, 96, 64, 2, 4, 2, head_dim=16, num_local_experts=3, num_experts_per_tok=2)
    P.save_pretrained(folder, config, generic_params(config, torch.bfloat16))
    tensors = load_file(folder / FILE)
    for name in [name for name in tensors if re.search(r"experts\.\w+_proj$", name)]:
        experts, width, out = tensors.pop(name).shape
        draw = torch.Generator().manual_seed(width + out)
        shape = (experts, out, width // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=draw)
        tensors[f"{name}_scales"] = torch.randint(110, 140, shape, dtype=torch.uint8, generator=draw)
    quantized.rewrite(folder, tensors, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})


def fp8(folder: Path, family: str) -> None:
    quantized.write(folder, quantized.CONFIGS[family])


def test_parts_are_those_of_the_whole(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("mxfp4", "phi3", "deepseek", "compressed_ids")]
    mxfp4(folders[0])
    for folder in folders[1:3]:
        fp8(folder, folder.name)
    compressed_ids.publish(folders[3])  # tables that loading makes of tokenizer.json
    found = ranks(2)(differences, list(map(str, folders)), "fsdp=2")
    assert [faults for faults, _ in found] == [[], []] and found[0][1] > 100
    plain = []
    for number, config in enumerate(layouts()):
        plain.append(str(tmp_path / str(number)))
        P.save_pretrained(plain[-1], config, generic_params(config), max_shard_size=20_000)
    assert len(plain) > 4
    found = ranks(4)(differences, [*plain, str(folders[0])], "fsdp=2,tp=2")
    assert [faults for faults, _ in found] == [[]] * 4 and found[0][1] > 300


# ------------------------------------------------------------------------------------------------ what is read


def read_by_process() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar: ")[1].split()[0])


def reads(folder: str, axis: str) -> dict[str, int]:
    """Bytes that a load reads and maps, and that the system says were read."""
    mesh = devices(Mesh(tp=4))
    spec = spec_of(P.load_config(folder))
    rules = P.Rules(spread="tp") if axis == "rows" else P.Rules({axis: "tp"})
    reports: list[P.LoadReport] = []
    before = 0
    for copy in (False, True):  # the first imports what it needs
        before = read_by_process()
        P.load_pretrained(folder, plan=P.plan(spec, rules, mesh), copy=copy, report=reports.append)
    mapped, read = reports
    assert mapped.mapped and mapped.mapped + mapped.read == read.read
    return {"read": read.read, "mapped": read.mapped, "files": read.files, "truly": read_by_process() - before}


def test_rows_are_read_once_by_all_together(ranks: Ranks, tmp_path: Path) -> None:
    P.save_pretrained(tmp_path, LARGE, generic_params(LARGE), max_shard_size=2_000_000)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    found = ranks(4)(reads, str(tmp_path), "rows")
    assert all(one["files"] == size and not one["mapped"] for one in found)
    assert size < sum(one["read"] for one in found) < 1.1 * size
    for one in found:  # but for config.json and the index
        assert one["read"] <= one["truly"] < one["read"] + 20_000
    leaves = tree.leaves(llama.spec(LARGE))
    numbers = sum(math.prod(leaf.shape) for leaf in leaves)
    # of 256 columns 64: less lies between them than is worth a call, and whole rows are read
    wide = sum(math.prod(leaf.shape) // (1 if leaf.axes[1:] == ("embed",) else 4) for leaf in leaves)
    for one in ranks(4)(reads, str(tmp_path), "embed"):
        assert one["read"] == size - 4 * numbers + 4 * wide
        assert one["read"] <= one["truly"] < one["read"] + 20_000


# ------------------------------------------------------------------------------------------------ stages and faults


def refused(folder: str) -> list[str]:
    """What a load says: by a plan of another model, and of a head whose last number is not the embedding's."""
    mesh = devices(Mesh(fsdp=2))
    config = P.load_config(folder)
    placements = P.plan(llama.spec(config), P.Rules(spread="fsdp"), mesh)
    other = llama.Config(2048, 256, 256, 4, 4, 2, tie_word_embeddings=True)
    faults = []
    for given in (P.plan(llama.spec(other), P.Rules(), mesh), {**placements, "lm_head": placements["embed_tokens"]}):
        with pytest.raises(ValueError) as error:
            P.load_pretrained(folder, plan=given)
        faults.append(str(error.value))
    try:
        P.load_pretrained(folder, plan=placements)
    except P.MismatchError as error:
        faults.append(str(error))
    return faults


def test_wrong_plans_and_tied_heads_that_differ_raise(ranks: Ranks, tmp_path: Path) -> None:
    config = llama.Config(2048, 256, 512, 4, 4, 2, tie_word_embeddings=True)
    P.save_pretrained(tmp_path, config, generic_params(config))
    tensors = load_file(tmp_path / FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    first, second = ranks(2)(refused, str(tmp_path))
    assert first == second[:2]  # each compares its half of the bytes
    assert first[0] == ("The plan is of another model: layers.0.mlp.gate_proj is [512, 256], and there [256, 256].")
    assert first[1] == "The plan is of another model: lm_head is in only one of them."
    assert "lm_head.weight differs from model.embed_tokens.weight" in second[2]


def staged(folder: str) -> list[str]:
    """The leaves of this process' stage, each its part of the whole."""
    mesh = Mesh(pp=2, fsdp=2)
    config, whole = P.load_pretrained(folder)
    rules = rules_of(mesh, config)
    placements = stage_plan(P.plan(spec_of(config), rules, devices(mesh)), config, devices(mesh), Strategy())
    _, params = P.load_pretrained(folder, plan=placements)
    where, flat = tree.flatten(placements), tree.flatten(whole)
    for path, leaf in tree.flatten(params).items():
        assert torch.equal(leaf.to_local(), flat[path][where[path].local_box()]), path
    return list(tree.flatten(params))


def test_a_stage_loads_its_own_layers(ranks: Ranks, tmp_path: Path) -> None:
    P.save_pretrained(tmp_path, LARGE, generic_params(LARGE))
    first, _, last, _ = ranks(4)(staged, str(tmp_path))
    assert first[0] == "embed_tokens" and {"norm", "lm_head"} <= set(last)
    assert {path.split(".")[1] for path in last if path.startswith("layers.")} == {"2", "3"}


def staged_stacks(folder: str, split: list[int]) -> list[str]:
    """The leaves of this stage of an encoder and a decoder, or of a flow, loaded and drawn as in one process."""
    mesh = Mesh(pp=2)
    config, whole = P.load_pretrained(folder)
    how = Strategy(split=tuple(split) or None)
    spec = fnmodels.family_of(config).spec(config)
    plan = stage_plan(P.plan(spec, rules_of(mesh, config), devices(mesh)), config, devices(mesh), how)
    for made, full in (
        (P.load_pretrained(folder, plan=plan)[1], whole),
        (P.init(config, 2, plan=plan), P.init(config, 2)),
    ):
        flat = tree.flatten(full)
        for path, leaf in tree.flatten(made).items():
            assert torch.equal(leaf.to_local(), flat[path]), path
    return list(tree.flatten(plan))


@pytest.mark.parametrize(
    ("name", "split"), [("pairs", []), ("pairs", [1, 3]), ("pairs", [3, 1]), ("sound", []), ("flow", []), ("mpnet", [])]
)
def test_a_stage_of_an_encoder_a_decoder_or_a_flow_is_loaded_and_drawn(
    ranks: Ranks, tmp_path: Path, name: str, split: list[int]
) -> None:
    config = SETTINGS[name]()[0]
    P.save_pretrained(tmp_path, config, generic_params(config))
    first, last = ranks(2)(staged_stacks, str(tmp_path), split)
    every = tree.flatten(fnmodels.family_of(config).spec(config)).keys()
    assert {*first, *last} == every
    assert first != last and all(any(".layers." in f".{path}" for path in of_rank) for of_rank in (first, last))


def wrong_stage(folder: str) -> str:
    """What is said of the plan of a wider model."""
    config = dataclasses.replace(SETTINGS["pairs"]()[0], intermediate_size=64)
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(Mesh(pp=2), config), devices(Mesh(pp=2)))
    with pytest.raises(ValueError) as error:
        P.load_pretrained(folder, plan=stage_plan(plan, config, devices(Mesh(pp=2)), Strategy()))
    return str(error.value)


def test_a_stage_of_another_model_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    config = SETTINGS["pairs"]()[0]
    P.save_pretrained(tmp_path, config, generic_params(config))
    for words in ranks(2)(wrong_stage, str(tmp_path)):
        assert words.startswith("The plan is of another model: ") and "64" in words
