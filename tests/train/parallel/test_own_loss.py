"""A loss of a user's own, which the package has never seen: one process, fsdp x tp and pp give the same step.

So does a lambda around one of `train.losses`. Neither names a keyword for what a mesh does.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import fnmodels
import train
from fnmodels import tree
from tests.support.cases import generic_params
from tests.support.one_process import CLIP, LENGTH, batch, config_of, error, optimizer_of, placed, worst
from tests.support.ranks_pool import Ranks
from train.dist.dtensor import local_tree
from train.parallel import Mesh, Strategy
from train.parallel.placement import shardings


def focal_loss(config: Any, gamma: float = 2.0, smoothing: float = 0.1) -> Any:
    """Focal (arXiv 1708.02002) and label-smoothed, with a head of its own over the hidden states."""

    def loss(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, masks, freqs_cis = fnmodels.prepare(
            config, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"]
        )
        x = fnmodels.hidden(params, inputs, masks, freqs_cis, config=config)
        logp = fnmodels.family_of(config).unembed(params, x, config=config).log_softmax(-1)
        valid = batch["labels"] != -100
        label = logp.gather(-1, batch["labels"].where(valid, 0)[..., None])[..., 0]
        smooth = (1 - smoothing) * label + smoothing * logp.mean(-1)
        losses = -((1 - label.exp()) ** gamma) * smooth
        return losses.where(valid, 0.0).sum(), valid.sum()

    return loss


def losses_of(name: str, layers: int | None) -> dict[str, Any]:
    config = config_of(name, layers)
    balance = train.Balance(sequence=0.3, z=0.1) if name == "deepseek" else None
    return {
        "own": focal_loss(config),
        "lambda": lambda params, batch: train.next_token_loss(
            params, batch, config=config, length=LENGTH, balance=balance, aux=balance is not None
        ),
    }


def stepped(form: str, name: str, text: str, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    """{what: how far a step over the mesh is from that of one process}, and what an evaluation finds."""
    mesh, how, layers = Mesh.parse(text), Strategy(**strategy), 3 if "pp" in text else None
    loss, optimizer = losses_of(name, layers)[form], optimizer_of(name, layers)
    one, expected = train.make_step(loss, optimizer, clip=CLIP)(
        train.init_state(generic_params(config_of(name, layers)), optimizer), batch()
    )
    params = placed(name, mesh, strategy=how, layers=layers)
    evaluated = train.make_eval_step(loss, mesh=mesh, strategy=how)(params, batch())
    step = train.make_step(loss, optimizer, clip=CLIP, mesh=mesh, strategy=how, **options)
    state, metrics = step(train.init_state(params, optimizer), batch())
    after, shards = tree.flatten(one.params), tree.flatten(shardings(state.params))
    held = tree.flatten(local_tree(state.params))
    found = {path: error(leaf, after[path][shards[path].local_box()]) for path, leaf in held.items()}
    found |= {key: error(metrics[key].double(), expected[key].double()) for key in ("loss", "count", "grad_norm")}
    found["evaluated"] = error(evaluated["loss"], expected["loss"])
    for key, value in expected.get("aux", {}).items():
        found[key] = error(metrics["aux"][key].double(), value.double())
    return found


@pytest.mark.parametrize("form", ["own", "lambda"])
@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "options"),
    [
        ("llama", "fsdp=2,tp=2", {"sequence": True}, {"remat": "full"}),
        ("llama", "pp=2", {}, {"accumulate": 4}),
        ("deepseek", "pp=2,fsdp=2", {"schedule": "InterleavedZeroBubble", "virtual": 1}, {"accumulate": 4}),
        ("length", "cp=2", {}, {}),
        ("gpt_oss", "ep=2,cp=2", {}, {}),
    ],
)
def test_a_loss_of_ones_own_is_that_of_one_process(
    ranks: Ranks, form: str, name: str, mesh: str, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    found = ranks(Mesh.parse(mesh).world)(stepped, form, name, mesh, strategy, options)
    assert worst(found)[0] < 1e-5, worst(found)
    assert {path for errors in found for path in errors} > set(
        tree.flatten(generic_params(config_of(name, 3 if "pp" in mesh else None)))
    )
