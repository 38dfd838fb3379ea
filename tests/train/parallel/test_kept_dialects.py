"""Every form of quantized checkpoints over a mesh: each process reads its shard, to the bit; the table of docs."""

import dataclasses
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import params as P
from fnmodels import family_of, qwen_moe, tree
from params.quantized.kept import KeptWeight
from params.sharding import sharding_of
from tests.params.quantized.dialects import DIALECTS, Dialect, draw
from tests.params.quantized.test_dialects import READ, REFUSED, is_kept
from tests.params.quantized.test_kept import mxfp4_checkpoint
from tests.params.quantized.test_published import CONFIG, UP
from tests.support.cases import generic_params
from tests.support.ranks_pool import Ranks, devices
from train.comm.dtensor import local_tree
from train.parallel import Mesh
from train.parallel.fsdp import ParamShard, gather

KEPT = {dialect.name: dialect for dialect in READ if is_kept(dialect)}
PAGE = Path(__file__).parents[3] / "docs" / "quantized.md"
BEGIN, END = "<!-- quantizations: written by FNMODELS_UPDATE_DOCS=1 -->\n", "<!-- /quantizations -->\n"
# {what is sharded: (mesh, rules)}; three shards of 96 columns are whole groups of 32
OVER: dict[str, tuple[str, P.Rules]] = {
    "fsdp": ("fsdp=2", P.Rules(spread="fsdp")),
    "rows": ("tp=2", P.Rules({"mlp": "tp"})),
    "columns": ("tp=3", P.Rules({"embed": "tp"})),
    "ep": ("ep=2", P.Rules({"expert": "ep"})),
}
OVER_EXPERTS = {"fsdp": OVER["fsdp"], "tp": ("tp=3", P.Rules({"expert_mlp": "tp"})), "ep": OVER["ep"]}
WHOLE, ORDERED = "tp where shards are whole blocks", "tp of rows; of columns without desc_act"
Parts = dict[str, Tensor]


def long_rows(parts: Parts) -> Parts:
    """The same elements as [48, 128], whose rows are whole blocks of 64."""
    for ending, tensor in parts.items():
        if "quant_state" in ending:
            state = json.loads(bytes(tensor.tolist())) | {"shape": [48, 128]}
            parts[ending] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return parts


def blocks(parts: Parts) -> Parts:
    """Codes and scales of a weight [96, 128] in whole blocks of 48 x 64."""
    codes = (draw(96, 128) * 30).to(torch.float8_e4m3fn)
    return parts | {"weight": codes, "weight_scale": draw(2, 2).abs() * 0.01 + 0.001}


def more_groups(parts: Parts) -> Parts:
    """A weight [64, 512], whose 16 groups have their zeros in two words."""
    words = torch.randint(-(2**31), 2**31 - 1, (64, 66), generator=torch.Generator().manual_seed(5)).to(torch.int32)
    scales = (draw(64, 16).abs() * 0.01 + 0.001).to(torch.float16)
    return parts | {"qweight": words[:, :64], "qzeros": words[:, 64:], "scales": scales}


def in_order(parts: Parts) -> Parts:
    """As a file without desc_act: the groups of columns one after another."""
    return parts | {"g_idx": torch.arange(96, dtype=torch.int32) // 32}


# {form: (makes a weight whose shards are whole blocks, [out, in], what this shows)}
FITTING: dict[str, tuple[Any, tuple[int, int], str]] = {
    **{name: (long_rows, (48, 128), WHOLE) for name in KEPT if name.startswith("bitsandbytes") and "int8" not in name},
    **{name: (in_order, (64, 96), ORDERED) for name in KEPT if name.startswith("gptq") and name != "gptq v2"},
    "compressed-tensors FP8 in blocks": (blocks, (96, 128), WHOLE),
    "awq gemv": (more_groups, (64, 512), WHOLE),
}
UNCUT = ("hqq 4 bits", "hqq 3 bits, groups of rows", "bitnet")  # whose words hold elements of far rows


def written(folder: Path, dialect: Dialect, parts: Parts, shape: tuple[int, int], experts: int = 0) -> Any:
    """A checkpoint whose up projection, or that of each expert, has these tensors; its Config."""
    config: Any = dataclasses.replace(CONFIG, intermediate_size=shape[0], hidden_size=shape[1])
    modules = [UP]
    if experts:
        sizes = {f: getattr(config, f) for f in ("vocab_size", "num_attention_heads", "num_key_value_heads")}
        sizes |= {"moe_intermediate_size": shape[0], "intermediate_size": shape[0], "hidden_size": shape[1]}
        sizes |= {"num_experts": experts, "num_experts_per_tok": 1, "num_hidden_layers": 1, "head_dim": 8}
        config = qwen_moe.Config(**sizes, qk_norm=True)
        modules = [UP.replace("up_proj", f"experts.{expert}.up_proj") for expert in range(experts)]
    P.save_pretrained(folder, config, generic_params(config, torch.bfloat16))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(modules))}
    tensors |= {f"{module}.{ending}": t.clone() for module in modules for ending, t in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "fnmodels_manifest.json").unlink()
    said = dict(dialect.said)
    if UP in said:  # mlx' settings of one module
        said |= dict.fromkeys(modules, said.pop(UP))
    file, field = folder / (dialect.file or "config.json"), {"quantization_config": said}
    file.write_text(json.dumps(said if dialect.file else json.loads(file.read_text()) | field))
    return config


def gathered(part: Any) -> Tensor:
    """All of a part of a weight, as a step over fsdp gathers it."""
    how = sharding_of(part)
    assert how is not None
    return gather([ParamShard(part.to_local(), how, part.dtype)])[0]


@functools.cache
def _weight(name: str) -> Parts:
    """The tensors of a kept form's weight: drawn once in each process, for all meshes."""
    weight = KEPT[name].weight
    assert weight is not None
    return weight()[0]


def shard(folder: Path, dialect: Dialect, how: str, *, fits: bool) -> str:
    """ "yes" where this process' shard of the weight is that of the file to the bit, else why it is refused.

    fits: of the weight in FITTING, if the form is there.
    """
    parts, shape = dict(_weight(dialect.name)), (64, 96)
    if fits:
        make, shape, _ = FITTING[dialect.name]
        parts = make(parts)
    config = written(folder, dialect, parts, shape, experts=2 * (how == "ep"))
    whole = P.load_pretrained(folder, dtype=torch.float32)[1]["layers"][0]["mlp"]
    mesh, rules = OVER[how]
    mesh = "tp=2" if fits and shape != (64, 96) else mesh
    plan = P.plan(family_of(config).spec(config), rules, devices(Mesh.parse(mesh)))
    try:
        kept = P.load_pretrained(folder, dtype=torch.float32, keep_quantized=True, plan=plan)[1]["layers"][0]["mlp"]
    except ValueError as error:
        return str(error)
    wanted, weight = ((tree["experts"] if how == "ep" else tree)["up_proj"] for tree in (whole, kept))
    assert isinstance(weight, KeptWeight), dialect.name
    if how == "fsdp":  # gathered as it is stored, before it is used
        assert weight.parts[0].to_local().numel() * 2 == weight.parts[0].numel(), dialect.name
        assert torch.equal(tree.map(gathered, {"w": weight})["w"].dequantized(), wanted), dialect.name
        return "yes"
    assert weight.sharding is not None
    local, mine = local_tree({"w": weight})["w"], wanted[weight.sharding.local_box()]
    assert local.shape == tuple(mine.shape) and mine.numel() * Mesh.parse(mesh).world == wanted.numel(), dialect.name
    assert torch.equal(local.dequantized(), mine), dialect.name
    return "yes"


def shards_of_experts(how: str) -> list[str]:
    """For ranks: the kept experts of a gpt-oss in mxfp4, whose shards are those of the file to the bit."""
    with tempfile.TemporaryDirectory() as place:
        mxfp4_checkpoint(Path(place))
        config, whole = P.load_pretrained(place, dtype=torch.float32)
        mesh, rules = OVER_EXPERTS[how]
        plan = P.plan(family_of(config).spec(config), rules, devices(Mesh.parse(mesh)))
        kept = P.load_pretrained(place, dtype=torch.float32, keep_quantized=True, plan=plan)[1]
    found = set[str]()
    for index, layer in enumerate(kept["layers"]):
        for name, weight in layer["mlp"]["experts"].items():
            if not isinstance(weight, KeptWeight):
                continue
            wanted = whole["layers"][index]["mlp"]["experts"][name]
            if how == "fsdp":
                assert torch.equal(tree.map(gathered, {"w": weight})["w"].dequantized(), wanted)
            else:
                assert weight.sharding is not None
                mine = wanted[weight.sharding.local_box()]
                assert mine.numel() * Mesh.parse(mesh).world == wanted.numel()
                assert torch.equal(local_tree({"w": weight})["w"].dequantized(), mine)
            found.add(name)
    return sorted(found)


@pytest.mark.parametrize("how", OVER_EXPERTS)
def test_mxfp4_experts_over_a_mesh_have_the_values_of_the_file(how: str, ranks: Ranks) -> None:
    found = ranks(Mesh.parse(OVER_EXPERTS[how][0]).world)(shards_of_experts, how)
    assert found == [["down_proj", "gate_proj", "up_proj"]] * len(found)


def shards(how: str, names: list[str], fits: bool) -> dict[str, str]:
    """For ranks: `shard` of each of these forms."""
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            found[name] = shard(Path(place), KEPT[name], how, fits=fits)
    return found


def ran(ranks: Ranks, how: str, names: list[str], *, fits: bool = False) -> dict[str, str]:
    """What all processes of the mesh have found, which is the same."""
    world = 2 if fits and how == "columns" and names[0] not in _ordered() else Mesh.parse(OVER[how][0]).world
    found = ranks(world)(shards, how, names, fits)
    assert all(one == found[0] for one in found)
    return found[0]


def _ordered() -> list[str]:
    return [name for name, (*_, shown) in FITTING.items() if shown == ORDERED]


def test_table_of_docs_is_what_every_form_does_over_a_mesh(ranks: Ranks) -> None:
    """FNMODELS_UPDATE_DOCS=1 writes it. Its other columns are what `test_dialects` shows of each form."""
    assert len(READ) >= 30 and len({dialect.name for dialect in DIALECTS}) == len(DIALECTS)
    found = {how: ran(ranks, how, [*KEPT]) for how in OVER}
    others = [name for name in FITTING if name not in _ordered()]
    fitting = {how: ran(ranks, how, others, fits=True) for how in ("rows", "columns")}
    fitting["columns"] |= ran(ranks, "columns", _ordered(), fits=True)
    rows = ["| form | read | kept | trained on (LoRA) | sharded | written |", "|---|---|---|---|---|---|"]
    for dialect in READ:
        kept = dialect.name in KEPT
        over = sharded(dialect.name, found, fitting) if kept else "-"
        yes = "yes" if kept else "-"
        rows.append(f"| {dialect.name} | yes | {yes} | {yes} | {over} | {'this form, dense' if kept else 'dense'} |")
    rows += [f"| {dialect.name} | refused | | | | |" for dialect in REFUSED]
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    table = "\n".join(rows) + "\n"
    if os.environ.get("FNMODELS_UPDATE_DOCS"):
        PAGE.write_text(text[:begin] + table + text[end:])
        return
    assert text[begin:end] == table, "FNMODELS_UPDATE_DOCS=1 writes the table"


def sharded(name: str, found: dict[str, dict[str, str]], fitting: dict[str, dict[str, str]]) -> str:
    """The mesh dimensions over which the form was read; every refusal is a sentence about its blocks or groups."""
    for how in ("rows", "columns"):
        if found[how][name] != "yes":
            assert "layers.0.mlp.up_proj" in found[how][name] and (
                "cuts blocks or words" in found[how][name]
                or "lie across its rows" in found[how][name]
                or "groups by activation order" in found[how][name]
            ), found[how][name]
    assert found["fsdp"][name] == found["ep"][name] == "yes"
    refused = [how for how in ("rows", "columns") if found[how][name] != "yes"]
    if name not in FITTING:
        assert bool(refused) == (name in UNCUT), (name, refused)
        return "fsdp, ep" if refused else "fsdp, tp, ep"
    shown = FITTING[name][2]
    assert refused, f"{name} needs no other weight"
    assert all(fitting[how].get(name, "yes") == "yes" for how in refused), {how: fitting[how][name] for how in refused}
    assert shown == WHOLE or refused == ["columns"]
    return f"fsdp, ep; {shown}"
