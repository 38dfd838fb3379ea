"""A caller's own mask constructor (`create=`): torch's `create_block_mask`, as it is and compiled, for every family."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import fnmodels
from fnmodels.inputs.mask import attention_part
from tests.support.cases import (
    KERNELS,
    Case,
    attending,
    batch_of,
    generic_params,
    off,
    representatives,
    richest,
    segments,
    with_kernels,
)

MIXED = segments((-3, 5, 4), (12,), (7, 1, -4))


def check(case: Case, create: Any, *kernels: str) -> None:
    """BlockMasks instead of `Mask`s give the logits of kernel="math", with these kernels."""
    batch, weights = batch_of(case.config, MIXED), generic_params(case.config)
    inputs, masks, freqs_cis = batch.prepared()
    family = fnmodels.family_of(case.config)
    made = family.attention_masks(case.config, batch.positions, batch.segment_ids, create=create)
    assert made.keys() == masks.keys()
    ordered = [kind for kind, mask in masks.items() if isinstance(mask, fnmodels.inputs.Segments)]
    parts = {kind: attention_part(mask) for kind, mask in made.items()}
    assert all(isinstance(mask, BlockMask) for kind, mask in parts.items() if kind not in ordered)
    one, other = (len({id(attention_part(mask)) for mask in either.values()}) for either in (made, masks))
    assert one == other, "kinds with one rule share one mask"
    wanted = batch.forward(weights)[batch.valid]
    for kernel in kernels:
        got = fnmodels.forward(weights, inputs, made, freqs_cis, config=case.config, kernel=kernel)
        assert off(got[batch.valid], wanted) < 1e-5, kernel


@with_kernels(attending(representatives()), in_turn=True)
def test_create_block_mask(case: Case, kernel: str) -> None:
    check(case, create_block_mask, kernel)


@pytest.mark.slow
def test_create_block_mask_compiled() -> None:
    """With a window and without: what is compiled is the rules' predicates."""
    case = next(case for case in richest() if case.family == "gpt_oss")
    torch.compiler.reset()
    check(case, torch.compile(create_block_mask, backend="aot_eager"), *KERNELS)


@pytest.mark.parametrize("case", attending(richest()), ids=str)
def test_what_a_constructor_is_given(case: Case) -> None:
    """A predicate over indices, B, no heads, Q, K, and the device; its result is used as the mask, of any type."""
    batch, seen = batch_of(case.config, MIXED), []

    def create(mask_mod: Any, *sizes: Any, device: Any) -> Any:
        seen.append((sizes, torch.device(device)))
        return create_block_mask(mask_mod, *sizes, device=device)

    family = fnmodels.family_of(case.config)
    family.attention_masks(case.config, batch.positions, batch.segment_ids, create=create)
    assert seen and set(seen) == {((3, None, 12, 12), torch.device("cpu"))}
