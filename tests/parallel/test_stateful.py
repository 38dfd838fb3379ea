"""FSDP2 around the same functions: equal gradients, and tables that stay fp32."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels import llama, tree
from tests.parallel.pool import Ranks, devices
from tests.parallel.reference import CASES, batch, config_of, error, loss_of, one_process, spec_of
from tests.support import generic_params
from train.layers import layer_fn
from train.parallel import Mesh
from train.parallel.collectives import summed
from train.parallel.stateful import Model, shard
from train.parallel.step import own_rows


def model_of(name: str) -> Model:
    return Model(tree.map(torch.clone, generic_params(config_of(name))), spec_of(name))


@contextlib.contextmanager
def damaged(what: str | None) -> Iterator[None]:
    from torch.distributed.fsdp import FSDPModule

    with pytest.MonkeyPatch.context() as patch:
        if what == "means in place of sums":
            patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)
        yield


def errors_of(name: str, mesh_text: str, remat: str, damage: str | None = None) -> dict[str, float]:
    """{path: how far a gradient is from one process}, and the loss."""
    mesh = Mesh.parse(mesh_text)
    model = model_of(name)
    with damaged(damage):
        shard(model, devices(mesh))
    wrap = layer_fn(remat, "none")
    total, count = model(loss_of(name), own_rows(batch(), devices(mesh)), layer_fn=wrap)
    groups = [devices(mesh).get_group(axis) for axis in ("dp", "fsdp")]
    total.backward()
    grads, _, metrics = one_process(name)
    found = {"loss": error(summed(total, *groups) / summed(count, *groups), metrics["loss"])}
    for path, parameter in model.named_parameters():
        if path in grads:
            whole = parameter.grad.full_tensor()  # type: ignore[union-attr]
            found[path] = error(whole, grads[path])
        else:
            assert parameter.grad is None
    assert found.keys() - {"loss"} == grads.keys()
    return found


def dtypes_of(mesh_text: str) -> dict[str, str]:
    """What a block is given under the policy for bf16, and what reaches the parameters."""
    mesh = Mesh.parse(mesh_text)
    config = config_of("llama_tied")
    model = model_of("llama_tied")
    shard(model, devices(mesh), dtype=torch.bfloat16)
    seen: dict[str, Any] = {}

    def watch(block: Any) -> Any:
        def run(layer: Any, x: Tensor, mask: Any, freqs: Tensor, **more: Any) -> Any:
            seen.update(weight=layer["mlp"]["up_proj"].dtype, x=x.dtype, freqs=freqs.dtype)
            return block(layer, x, mask, freqs, **more)

        return run

    total, _ = model(loss_of("llama_tied"), own_rows(batch(), devices(mesh)), layer_fn=watch)
    total.backward()
    assert llama.kinds(config)
    seen["gradient"] = {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}
    return {name: str(value) for name, value in seen.items()}


def test_a_module_is_the_tree_and_back() -> None:
    params = generic_params(config_of("deepseek_v3"))
    model = Model(params, spec_of("deepseek_v3"))
    assert tree.flatten(model.tree()).keys() == tree.flatten(params).keys() == dict(model.named_parameters()).keys()
    frozen = [path for path, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen and all(path.endswith("selection_bias") for path in frozen)
    loss = loss_of("deepseek_v3")
    pairs = zip(model(loss, batch()), loss(params, batch()), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("mesh", "remat"), [("fsdp=2", "none"), ("dp=2,fsdp=2", "full")])
def test_gradients_are_those_of_one_process(ranks: Ranks, name: str, mesh: str, remat: str) -> None:
    for found in ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, remat):
        assert max(found.values()) < 1e-5, found


def test_a_mean_is_seen(ranks: Ranks) -> None:
    for found in ranks(2)(errors_of, "llama_tied", "fsdp=2", "none", "means in place of sums"):
        assert found["layers.0.mlp.up_proj"] > 0.1


def test_weights_are_bf16_and_tables_and_gradients_fp32(ranks: Ranks) -> None:
    for found in ranks(2)(dtypes_of, "fsdp=2"):
        assert found == {
            "weight": "torch.bfloat16",
            "x": "torch.bfloat16",
            "freqs": "torch.float32",
            "gradient": "{torch.float32}",
        }
