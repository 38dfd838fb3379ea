"""FSDP2 around the same functions: equal gradients, and tables that stay fp32."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from tests.support.cases import cases, generic_params
from tests.support.one_process import batch, config_of, full, loss_of, spec_of
from tests.support.ranks_pool import Ranks, devices
from train.parallel import Mesh
from train.parallel.batch_shards import own_rows
from train.parallel.fsdp2 import Model, shard


def model_of(name: str) -> Model:
    return Model(tree.map(torch.clone, generic_params(config_of(name))), spec_of(name))


def dtypes_of(mesh_text: str) -> dict[str, str]:
    """What a block is given under the policy for bf16, and what reaches the parameters."""
    mesh = Mesh.parse(mesh_text)
    model = model_of("deepseek")
    shard(model, devices(mesh), dtype=torch.bfloat16)
    seen: dict[str, Any] = {}

    def watch(block: Any) -> Any:
        def run(layer: Any, x: Tensor, mask: Any, freqs: Tensor, **more: Any) -> Any:
            mlp = layer["mlp"]
            seen.update(weight=layer["attention"]["o_proj"].dtype, x=x.dtype, freqs=freqs.dtype)
            if "selection_bias" in mlp:
                seen.update(router=mlp["router"].dtype, bias=mlp["selection_bias"].dtype)
            return block(layer, x, mask, freqs, **more)

        return run

    total, _ = model(loss_of("deepseek"), own_rows(batch(), devices(mesh)), layer_fn=watch)
    total.backward()
    seen["gradient"] = {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}
    return {name: str(value) for name, value in seen.items()}


def test_a_module_is_the_tree_and_back() -> None:
    params = generic_params(config_of("deepseek"))
    model = Model(params, spec_of("deepseek"))
    assert tree.flatten(model.tree()).keys() == tree.flatten(params).keys() == dict(model.named_parameters()).keys()
    frozen = [path for path, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen and all(path.endswith("selection_bias") for path in frozen)
    loss = loss_of("deepseek")
    pairs = zip(model(loss, batch()), loss(params, batch()), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def worst_gradient_in_fp64() -> float:
    """The largest error of the gradients of an fp64 model, relative to each leaf's largest gradient."""
    wide = {path: leaf.double() for path, leaf in tree.flatten(generic_params(config_of("llama"))).items()}
    model = Model(tree.unflatten(wide), spec_of("llama"))
    shard(model, devices(Mesh(fsdp=2)))
    model(loss_of("llama"), own_rows(batch(), devices(Mesh(fsdp=2))))[0].backward()
    leaves = [leaf.clone().requires_grad_() for leaf in wide.values()]
    total, _ = loss_of("llama")(tree.unflatten(dict(zip(wide, leaves, strict=True))), batch())
    wanted = dict(zip(wide, torch.autograd.grad(total, leaves), strict=True))
    found = {path: full(parameter.grad) for path, parameter in model.named_parameters()}
    return max(float((found[path] - wanted[path]).abs().max() / wanted[path].abs().max()) for path in wide)


def test_gradients_of_an_fp64_model_are_added_up_in_fp64(ranks: Ranks) -> None:
    assert max(ranks(2)(worst_gradient_in_fp64)) < 1e-12


def refusal() -> str:
    with pytest.raises(ValueError, match="ep is 2, but fully_shard is over dp and fsdp alone") as refused:
        shard(model_of("deepseek"), devices(Mesh(ep=2)))
    return str(refused.value)


def test_a_mesh_whose_gradients_nothing_would_sum_is_refused(ranks: Ranks) -> None:
    """Rows are taken over ep too, and each process would have the gradients of its own."""
    assert all("a mesh of dp and fsdp" in said for said in ranks(2)(refusal))


def wide_router_refusal() -> None:
    config = next(case.config for case in cases() if case.name == "ernie4_5_moe")
    model = Model(tree.map(torch.clone, generic_params(config)), fnmodels.family_of(config).spec(config))
    with pytest.raises(ValueError, match=r"layers\.\d\.mlp\.router stays in fp32 in any model"):
        shard(model, devices(Mesh(fsdp=2)), dtype=torch.bfloat16)


def test_a_trained_parameter_that_stays_in_fp32_is_refused_under_a_policy_for_bf16(ranks: Ranks) -> None:
    ranks(2)(wide_router_refusal)


def test_weights_are_bf16_and_tables_biases_of_choice_and_gradients_fp32(ranks: Ranks) -> None:
    for found in ranks(2)(dtypes_of, "fsdp=2"):
        assert found == {
            "weight": "torch.bfloat16",
            "x": "torch.bfloat16",
            "freqs": "torch.float32",
            "router": "torch.bfloat16",
            "bias": "torch.float32",
            "gradient": "{torch.float32}",
        }
