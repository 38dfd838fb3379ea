"""Adapters on weights kept as a file stores them, over a mesh: what one process computes; or a sentence why not."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import params as P
import train
from fnmodels import family_of, llama, mixtral, tree
from params import lora
from params.quantized.kept import KeptWeight
from tests.params.quantized import test_block_scales as blocks
from tests.params.quantized import test_integers as integers
from tests.support.one_process import batch, by_one_rank, error, worst
from tests.support.ranks_pool import Ranks, devices
from train.comm.dtensor import local_tree
from train.optim.base import with_paths
from train.parallel import Mesh, Strategy
from train.parallel.placement import rules_of, shardings

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128}
LLAMA = llama.Config(**SIZES)
MIXTRAL = mixtral.Config(**SIZES, num_local_experts=4, num_experts_per_tok=2)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EVEN_GPTQ = integers.GPTQ | {"desc_act": False}


def is_linear(name: str) -> bool:
    """Whether a tensor is a projection's or an expert's."""
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


def fp8(folder: Path, config: Any) -> None:
    """Blocks of 32 x 32."""
    P.save_pretrained(folder, config, plain(config))
    tensors: dict[str, Tensor] = {}
    for name, tensor in blocks.load_file(folder / blocks.FILE).items():
        tensors[name] = tensor
        if is_linear(name):
            scales = torch.rand(*(n // 32 for n in tensor.shape), generator=torch.Generator().manual_seed(1)) + 0.5
            tensors[name] = (tensor * 30).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales / 60
    blocks.rewrite(folder, tensors, quantization_config=FP8)


def nf4(folder: Path, config: Any, nested: bool = False) -> None:
    """bitsandbytes' blocks of 32 elements, by its definition."""
    P.save_pretrained(folder, config, plain(config))
    tensors: dict[str, Tensor] = {}
    for name, tensor in blocks.load_file(folder / blocks.FILE).items():
        if not is_linear(name):
            tensors[name] = tensor
            continue
        draw = torch.Generator().manual_seed(len(name))
        count = tensor.numel() // 32
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 32, "dtype": "float32", "shape": list(tensor.shape)}
        tensors[name] = torch.randint(0, 256, (tensor.numel() // 2, 1), generator=draw).to(torch.uint8)
        tensors[f"{name}.quant_map"] = torch.linspace(-1, 1, 16)
        tensors[f"{name}.absmax"] = torch.rand(count, generator=draw) * 0.3
        if nested:
            tensors[f"{name}.absmax"] = torch.randint(0, 256, (count,), generator=draw).to(torch.uint8)
            tensors[f"{name}.nested_quant_map"] = torch.linspace(-1, 1, 256)
            tensors[f"{name}.nested_absmax"] = torch.rand(-(-count // 256), generator=draw) * 0.1
            state |= {"nested_blocksize": 256, "nested_offset": 0.2, "nested_dtype": "float32"}
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = text
    blocks.rewrite(folder, tensors, quantization_config=NF4)


def plain(config: Any) -> Any:
    return tree.map(lambda leaf: leaf.to(torch.bfloat16), P.init(config, 3))


FILES: dict[str, Any] = {
    "fp8": (LLAMA, fp8),
    "fp8 experts": (MIXTRAL, fp8),
    "gptq": (LLAMA, lambda folder, config: integers.write(folder, config, EVEN_GPTQ)),
    "awq experts": (MIXTRAL, lambda folder, config: integers.write(folder, config, integers.AWQ)),
    "packed": (LLAMA, lambda folder, config: integers.write(folder, config, integers.FORMS["packed"])),
    "int8": (LLAMA, lambda folder, config: integers.write(folder, config, integers.FORMS["int8"])),
    "nf4": (LLAMA, nf4),
    "nf4 nested": (LLAMA, functools.partial(nf4, nested=True)),
    "gptq by order": (LLAMA, lambda folder, config: integers.write(folder, config, integers.GPTQ)),
}


def noisy(path: str, leaf: Tensor) -> Tensor:
    """Adapters that are not at their beginning, the same on each mesh."""
    if not path.endswith((".a", ".b")):
        return leaf
    draw = torch.Generator().manual_seed(len(path) + sum(map(ord, path)))
    return 0.3 * torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)


def adapted(config: Any, params: Any) -> Any:
    """With an adapter at every projection, those of experts too."""
    targets = [path for path in tree.flatten(family_of(config).spec(config)) if path.endswith("_proj")]
    return lora.add(config, params, rank=3, alpha=6.0, targets=targets, seed=4)


def alone(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Any]]]:
    """Of one process on dense weights: the leaves with adapters, those after two steps, and the metrics of each."""
    config, write = FILES[name]
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), config)
        params = with_paths(noisy, adapted(config, P.load_pretrained(place, dtype=torch.float64)[1]))
    optimizer = train.adamw(1e-2, eps=1e-3, spec=lora.spec(config, params))
    step = train.make_step(functools.partial(train.next_token_loss, config=config), optimizer, clip=0.5)
    state, metrics = train.init_state(params, optimizer), []
    for _ in range(2):
        state, of_step = step(state, batch())
        metrics.append(of_step)
    return tree.flatten(params), tree.flatten(state.params), metrics


def errors_of(name: str, over: str, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    """{what: how far it is from one process}: adapters, loss and gradient norm of two steps."""
    (config, write), mesh = FILES[name], Mesh.parse(over)
    filled, whole_after, expected = by_one_rank(f"kept-{name}", lambda: alone(name))
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), config)
        plan = P.plan(family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
        _, kept = P.load_pretrained(place, dtype=torch.float64, keep_quantized=True, plan=plan)
    nodes = [leaf for leaf in lora_leaves(kept) if isinstance(leaf, KeptWeight)]
    assert len(nodes) == 7 * config.num_hidden_layers
    many = adapted(config, kept)
    shards = tree.flatten(shardings(many))
    many = with_paths(
        lambda path, leaf: (
            shards[path].distribute(filled[path][shards[path].local_box()].clone())
            if path.endswith((".a", ".b"))
            else leaf
        ),
        many,
    )
    stored = [leaf.clone() for leaf in tree.leaves(local_tree(kept))]
    loss = functools.partial(train.next_token_loss, config=config)
    optimizer = train.adamw(1e-2, eps=1e-3, spec=lora.spec(config, many))
    step = train.make_step(loss, optimizer, clip=0.5, mesh=mesh, strategy=Strategy(**strategy), **options)
    state = train.init_state(many, optimizer)
    for wanted in expected:
        state, metrics = step(state, batch())
        found |= {metric: error(metrics[metric], wanted[metric]) for metric in ("loss", "grad_norm")}
    for path, leaf in tree.flatten(local_tree(state.params)).items():
        if path.endswith((".a", ".b")):
            found[path] = error(leaf, whole_after[path][shards[path].local_box()])
    untouched = tree.leaves(local_tree(lora.weights(state.params)))
    assert all(torch.equal(x, y) for x, y in zip(untouched, stored, strict=True))
    full = sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(kept))
    share = sum(leaf.nbytes for leaf in stored) / full
    assert share < 1 / mesh.fsdp / mesh.tp + 0.15 or mesh.ep > 1  # over tp=4 both KV heads are replicated
    return found


def lora_leaves(params: Any) -> list[Any]:
    found: list[Any] = []
    lora.map_leaves(lambda _, leaf: found.append(leaf), params)
    return found


MESHES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "fsdp=2": (["fp8 experts", "gptq by order", "packed", "nf4 nested"], {}, {}),  # what is gathered knows no form
    "tp=2": ([name for name in FILES if name != "gptq by order"], {}, {}),
    "fsdp=2,tp=2": (["fp8", "awq experts", "nf4 nested"], {"sequence": True}, {"remat": "full"}),
    "ep=2": (["fp8 experts", "awq experts"], {}, {}),
    "tp=4": (["fp8", "int8"], {}, {}),
}


@pytest.mark.parametrize("over", MESHES)
def test_adapters_on_kept_weights_are_those_of_one_process(ranks: Ranks, over: str) -> None:
    """Their values after two steps; the stored tensors stay what they are, and each rank holds its share of them."""
    names, strategy, options = MESHES[over]
    for name in names:
        found = ranks(Mesh.parse(over).world)(errors_of, name, over, strategy, options)
        assert worst(found)[0] < 1e-9, (name, worst(found))
        assert len(found[0]) == 2 * 7 + 2


def refusals(over: str) -> list[str]:
    """The errors of loading weights whose blocks a shard would cut, or whose groups are sorted."""
    mesh, found = Mesh.parse(over), []
    narrow = dataclasses.replace(LLAMA, intermediate_size=96)
    for config, write in ((narrow, fp8), FILES["gptq by order"]):
        with tempfile.TemporaryDirectory() as place:
            write(Path(place), config)
            plan = P.plan(family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
            with pytest.raises(ValueError) as caught:
                P.load_pretrained(place, keep_quantized=True, plan=plan)
            found.append(str(caught.value))
    return found


def test_shards_that_cut_blocks_are_refused(ranks: Ranks) -> None:
    for blocks_cut, sorted_groups in ranks(2)(refusals, "tp=2"):
        assert "layers.0.mlp.gate_proj: 'tp' shards dimension 0 of [96, 64] into parts of 48, which cuts" in blocks_cut
        assert "in groups by activation order (g_idx)" in sorted_groups
