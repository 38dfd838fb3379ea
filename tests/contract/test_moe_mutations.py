"""Planted bugs in mixtures of experts: each is detected by the test of the property that it breaks."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels.models.decoder.deepseek
import fnmodels.models.decoder.glm4_moe
import fnmodels.models.decoder.mixtral
import fnmodels.models.decoder.qwen_moe
import fnmodels.ops.moe.experts as experts_module
import fnmodels.ops.moe.layer as moe_module
import fnmodels.ops.moe.router as router_module
import train.gradients
import train.losses.moe_balance
import train.losses.next_token
import train.step
from fnmodels.models.common import context
from fnmodels.ops.moe import choice
from fnmodels.ops.moe import dispatch as dispatch_module
from fnmodels.ops.moe.router import RouterDtypes
from tests.contract import test_moe
from tests.fnmodels.ops import test_moe as test_ops
from tests.support.cases import Case, cases
from tests.train.losses import test_moe_balance

Patch = Callable[[pytest.MonkeyPatch], None]
PROPERTIES = {
    "M1": "padding reaches no expert",
    "M2": "dispatch and combine are inverse",
    "M3": "every path is the loop",
    "M4": "declared dtypes, and nothing cast before the choice",
    "M5": "counts and biases are of the batch, once per step",
    "M6": "balance has known values",
    "R4": "replay is bit-equal",
}


@dataclass(frozen=True)
class Bug:
    """A planted bug: the property it breaks, the patch, the variant that shows it, and the test that must fail."""

    breaks: str
    plant: Patch
    variant: str
    found_by: Callable[[Case], object]


PLANTED: dict[str, Bug] = {}


def bug(breaks: str, *found_by: Callable[[Case], object], variant: str = "qwen3_moe") -> Callable[[Patch], Patch]:
    def note(plant: Patch) -> Patch:
        for number, test in enumerate(found_by):
            PLANTED[f"{breaks}-{plant.__name__}-{number}"] = Bug(breaks, plant, variant, test)
        return plant

    return note


def padding(experts: str) -> Callable[[Case], object]:
    def run(case: Case) -> None:
        with pytest.MonkeyPatch.context() as patch:
            test_moe.test_padding_reaches_no_expert(case, experts, patch)

    return run


def products(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_moe.test_products_are_of_real_tokens_only(case, patch)


def naive(experts: str) -> Callable[[Case], object]:
    return lambda case: test_moe.test_every_path_is_the_naive_loop(case, experts)


def replay(case: Case) -> None:
    test_moe.test_replay_is_bit_equal(case, "math")


def parallel(_: Case) -> None:
    test_ops.test_experts_over_ranks(3, 2, 7, "routed")


def there_and_back(_: Case) -> None:
    test_ops.test_there_and_back(7, 3, "random", "some")


# ------------------------------------------------------------------------------------------------ padding


@bug("M1", padding("loop"), padding("dense"))
def padding_that_counts(patch: pytest.MonkeyPatch) -> None:
    right = moe_module.count_tokens
    patch.setattr(moe_module, "count_tokens", lambda indices, valid, n: right(indices, torch.ones_like(valid), n))


@bug("M1", products, there_and_back)
def padding_sent_to_an_expert(patch: pytest.MonkeyPatch) -> None:
    def wrong(right: Any, x: Tensor, indices: Tensor, valid: Tensor, experts: int, **how: Any) -> Any:
        return right(x, indices.clamp(min=0), torch.ones_like(valid), experts, **how)

    for module in (experts_module, test_ops):
        for name in ("dispatch", "dispatch_cpu"):
            patch.setattr(module, name, functools.partial(wrong, getattr(module, name)))


@bug("M1", padding("loop"))
def a_router_that_reads_padding(patch: pytest.MonkeyPatch) -> None:
    """0 times NaN is NaN, in the gradient of the router's weight."""
    real = Tensor.where

    def where(self: Tensor, condition: Tensor, other: Any) -> Tensor:
        clears_x = condition.ndim == 3 and condition.shape[-1] == 1 and self.ndim == 3 and self.is_floating_point()
        return self if clears_x and other == 0 else real(self, condition, other)

    patch.setattr(Tensor, "where", where)


@bug(
    "M3",
    lambda case: test_ops.test_what_an_unchosen_expert_makes_of_a_token_is_not_seen(),
)
def zero_times_infinity(patch: pytest.MonkeyPatch) -> None:
    real = torch.where

    def where(condition: Tensor, x: Any, other: Any) -> Tensor:
        return (
            x.expand(*condition.shape[:2], -1) if isinstance(x, Tensor) and x.ndim == 2 else real(condition, x, other)
        )

    patch.setattr(torch, "where", where)


# ------------------------------------------------------------------------------------------------ order


def _reordered(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    combine, combine_cpu = dispatch_module.combine, experts_module.combine_cpu

    def wrong(rows: Tensor, sent: Any, weights: Tensor) -> Tensor:
        return combine(rows, dataclasses.replace(sent, order=change(sent.order)), weights)

    def wrongly_combined(rows: Tensor, packed: Any, weights: Tensor) -> Tensor:
        place = change(packed.place.flatten()).view_as(packed.place)
        return combine_cpu(rows, dataclasses.replace(packed, place=place), weights)

    for module in (experts_module, test_moe, test_ops):
        patch.setattr(module, "combine", wrong)
    patch.setattr(experts_module, "combine_cpu", wrongly_combined)


@bug("M2", test_moe.test_dispatch_in_ranks_that_do_not_divide_the_tokens, there_and_back, naive("loop"), parallel)
def rows_brought_back_in_another_order(patch: pytest.MonkeyPatch) -> None:
    _reordered(patch, lambda order: order.argsort())


@bug(
    "M2",
    test_moe.test_dispatch_in_ranks_that_do_not_divide_the_tokens,
    lambda case: test_ops.test_tokens_over_ranks_that_do_not_divide_them(7, 4),
    parallel,
)
def tokens_that_no_rank_owns(patch: pytest.MonkeyPatch) -> None:
    def floor(tokens: int, ranks: int) -> Any:
        slots = tokens // ranks
        return -tokens % ranks, tuple((r * slots, (r + 1) * slots) for r in range(ranks))

    for module in (test_moe, test_ops):
        patch.setattr(module, "virtual_padding", floor)


@bug("M3", naive("loop"), naive("dense"), naive("grouped"))
def weights_left_out(patch: pytest.MonkeyPatch) -> None:
    right = context.choose_experts

    def choose(experts: Any, *tensors: Tensor) -> Any:
        run = right(experts, *tensors)
        if experts is test_moe.naive_experts:
            return run
        return lambda e, x, weights, *rest, **how: run(e, x, torch.ones_like(weights), *rest, **how)

    patch.setattr(context, "choose_experts", choose)


@bug("M3", naive("grouped"))
def offsets_that_begin_at_zero(patch: pytest.MonkeyPatch) -> None:
    grouped = torch.nn.functional.grouped_mm

    def shifted(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
        return grouped(rows, weights, offs=torch.cat((offs[:1] * 0, offs[:-1])))

    patch.setattr(torch.nn.functional, "grouped_mm", shifted)


@bug("M3", naive("dense"))
def a_router_without_a_gradient(patch: pytest.MonkeyPatch) -> None:
    right = experts_module.dense_experts
    patch.setitem(
        choice._PATHS, "dense", lambda e, x, weights, *rest, **how: right(e, x, weights.detach(), *rest, **how)
    )


# ------------------------------------------------------------------------------------------------ router


@bug(
    "M4",
    test_moe.test_nothing_is_cast_before_the_choice,
    lambda case: test_ops.test_nothing_is_cast_before_the_choice("softmax"),
)
def scores_rounded_before_the_choice(patch: pytest.MonkeyPatch) -> None:
    right = router_module.choose
    patch.setattr(router_module, "choose", lambda scores, *rest, **how: right(scores.bfloat16(), *rest, **how))


def _with_dtypes(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    right = context.moe

    def moe(*args: Any, dtypes: RouterDtypes, **how: Any) -> Any:
        return right(*args, dtypes=dataclasses.replace(dtypes, **changes), **how)

    patch.setattr(context, "moe", moe)


@bug("M4", test_moe.test_routers_keep_to_the_declared_dtypes, variant="deepseek_v3")
def a_narrow_router(patch: pytest.MonkeyPatch) -> None:
    _with_dtypes(patch, projection="model")


@bug("M4", test_moe.test_routers_keep_to_the_declared_dtypes, variant="glm4_moe")
def another_narrow_router(patch: pytest.MonkeyPatch) -> None:
    _with_dtypes(patch, projection="model")


@bug("M4", test_moe.test_routers_keep_to_the_declared_dtypes, variant="mixtral")
def weights_in_the_dtype_of_the_model(patch: pytest.MonkeyPatch) -> None:
    _with_dtypes(patch, output="model")


@bug("M4", test_moe.test_routers_keep_to_the_declared_dtypes, variant="mixtral")
def another_declaration(patch: pytest.MonkeyPatch) -> None:
    family = fnmodels.models.decoder.mixtral
    patch.setattr(family, "ROUTER", dataclasses.replace(family.ROUTER, output="model"))


@bug("R4", replay)
def a_replay_that_chooses_again(patch: pytest.MonkeyPatch) -> None:
    right = context.moe
    patch.setattr(context, "moe", lambda *args, routing=None, **how: right(*args, **how))


@bug("R4", replay)
def weights_replayed_without_a_gradient(patch: pytest.MonkeyPatch) -> None:
    right = fnmodels.models.decoder.qwen_moe.softmax_top_k

    def route(logits: Tensor, indices: Tensor | None = None, **how: Any) -> Any:
        weights, indices_of = right(logits, indices, **how)
        return (weights if indices is None else weights.detach()), indices_of

    patch.setattr(fnmodels.models.decoder.qwen_moe, "softmax_top_k", route)


# ------------------------------------------------------------------------------------------------ balance


def _step(**options: Any) -> Callable[[Case], object]:
    return lambda case: test_moe_balance.test_the_bias_moves_once_per_step("adamw", True, options)


@bug("M5", _step(accumulate=3))
def a_bias_moved_in_every_part(patch: pytest.MonkeyPatch) -> None:
    right, update = test_moe_balance.toy_loss, train.losses.moe_balance.update_bias

    def moving(params: Any, batch: Any, *, layer_fn: Any = None, aux: bool = False) -> Any:
        result = right(params, batch, layer_fn=layer_fn, aux=aux)
        if aux and torch.is_grad_enabled():
            for layer, counts in zip(params["layers"], result[2]["counts"], strict=True):
                bias = layer["mlp"]["selection_bias"]
                bias.data.copy_(update(bias, counts, 0.01))
        return result

    patch.setattr(test_moe_balance, "toy_loss", moving)
    patch.setattr(train.losses.moe_balance, "update_bias", lambda bias, counts, rate: bias)


@bug("M5", _step(accumulate=2))
def counts_of_the_last_part_only(patch: pytest.MonkeyPatch) -> None:
    right = train.gradients._gradients

    def halved(*args: Any, **how: Any) -> Any:
        total, count, aux, *rest = right(*args, **how)
        return total, count, {"counts": aux["counts"] // 2} if aux else aux, *rest

    patch.setattr(train.gradients, "_gradients", halved)


@bug("M5", _step())
def a_bias_that_decays(patch: pytest.MonkeyPatch) -> None:
    right = train.losses.moe_balance.update_bias
    patch.setattr(train.losses.moe_balance, "update_bias", lambda bias, counts, rate: right(0.995 * bias, counts, rate))


@bug("M5", _step())
def a_bias_that_feeds_the_greedy(patch: pytest.MonkeyPatch) -> None:
    right = train.losses.moe_balance.update_bias
    patch.setattr(train.losses.moe_balance, "update_bias", lambda bias, counts, rate: right(bias, counts, -rate))


@bug(
    "M6",
    lambda case: test_moe_balance.test_uniform_and_collapsed_routing_have_known_values("softmax"),
    lambda case: test_moe_balance.test_losses_are_the_sums_of_their_definition("softmax"),
)
def balance_on_probabilities(patch: pytest.MonkeyPatch) -> None:
    """A softmax of probabilities is nearly uniform, which hides collapsed routing."""
    right = train.losses.balance_loss
    patch.setattr(train.losses, "balance_loss", lambda logits, *rest, **how: right(logits.softmax(-1), *rest, **how))


@bug("M6", test_moe.test_uniform_scores_balance_to_one)
def layers_added_up(patch: pytest.MonkeyPatch) -> None:
    right = train.losses.next_token.balance_terms

    def summed(tapped: Any, *rest: Any) -> Any:
        total, aux = right(tapped, *rest)
        return 2 * total, aux | {name: 2 * value for name, value in aux.items() if name != "counts"}

    patch.setattr(train.losses.next_token, "balance_terms", summed)


@bug("M6", lambda case: test_moe_balance.test_rows_in_parts_have_the_sums_of_the_whole())
def a_mean_where_a_sum_belongs(patch: pytest.MonkeyPatch) -> None:
    right = train.losses.next_token.balance_terms
    patch.setattr(
        train.losses.next_token,
        "balance_terms",
        lambda tapped, valid, labelled, b: right(tapped, valid, labelled / labelled.sum(), b),
    )


@bug("M6", lambda case: test_moe_balance.test_losses_are_the_sums_of_their_definition("softmax"))
def padding_in_the_mean(patch: pytest.MonkeyPatch) -> None:
    right = train.losses.balance_loss
    patch.setattr(
        train.losses,
        "balance_loss",
        lambda x, i, valid, **how: right(x.nan_to_num(), i.clamp(min=0), torch.ones_like(valid), **how),
    )


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    case = next(case for case in cases() if case.name == planted.variant)
    planted.plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError)) as found:
        planted.found_by(case)
    assert found.traceback[-1].path != Path(__file__), "the bug failed, not what it was planted in"


def test_each_property_has_a_bug() -> None:
    assert {planted.breaks for planted in PLANTED.values()} == PROPERTIES.keys()
