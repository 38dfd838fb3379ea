"""The public property checks: they pass on a right toy model, and each of five planted bugs makes one of them fail."""

import pytest
import torch
import torch.nn.functional as F

import fnmodels
from fnmodels import testing
from fnmodels.ops.attention import attention
from fnmodels.ops.rotary import apply_rotary

V, D = 16, 8


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


PARAMS = {"embed": draw(V, D, seed=0), "q": draw(D, D, seed=1), "k": draw(D, D, seed=2), "v": draw(D, D, seed=3)}


def prepare(tokens, positions, segment_ids):
    angles = positions[..., None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    table = torch.stack((angles.cos(), angles.sin()), dim=-1)
    return {
        "tokens": tokens,
        "table": table,
        "mask": fnmodels.build_mask(fnmodels.Causal(), positions, segment_ids).dense(),
    }


def forward(params, batch):
    x = F.embedding(batch["tokens"], params["embed"])[:, :, None]  # one head
    q, k, v = (F.linear(x, params[name]) for name in "qkv")
    q, k = (apply_rotary(t, batch["table"]) for t in (q, k))
    mixed = attention(q, k, v, batch["mask"], kernel="math", scale=D**-0.5)
    return F.linear((x + mixed)[:, :, 0], params["embed"])


def subject(prepare=prepare, forward=forward):
    return testing.Subject(PARAMS, prepare, forward, vocab_size=V)


def table_cached_on_a_global():
    cache = {}

    def forward_(params, batch):
        size = batch["table"].shape[1]
        if size > cache.get("size", 0):  # grows, and stays grown
            cache.update(size=size, scale=size**-0.5)
        return forward(params, batch | {"table": batch["table"] * cache["scale"]})

    return subject(forward=forward_)


def documents_found_by_end_token():
    def prepare_(tokens, positions, segment_ids):
        ends = fnmodels.segments_from_eos(tokens, [0], valid=segment_ids > 0)
        return prepare(tokens, positions, ends)

    return subject(prepare_)


def mask_by_index():
    def prepare_(tokens, positions, segment_ids):
        columns = torch.arange(tokens.shape[1]).expand(tokens.shape)
        mask = fnmodels.build_mask(fnmodels.Causal(), columns, segment_ids).dense()
        return prepare(tokens, positions, segment_ids) | {"mask": mask}

    return subject(prepare_)


def input_mutated():
    def forward_(params, batch):
        batch["table"].mul_(1.0)
        return forward(params, batch)

    return subject(forward=forward_)


def positions_default_to_arange():
    def prepare_(tokens, positions, segment_ids):
        columns = torch.arange(tokens.shape[1]).expand(tokens.shape)
        return prepare(tokens, columns, segment_ids) | {"mask": prepare(tokens, positions, segment_ids)["mask"]}

    return subject(prepare_)


BUGS = {
    table_cached_on_a_global: testing.check_history_independence,
    documents_found_by_end_token: testing.check_packing,
    mask_by_index: testing.check_permutation,
    input_mutated: testing.check_inputs_unchanged,
    positions_default_to_arange: testing.check_permutation,  # rotary angles are relative: a mere shift shows nothing
}


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_a_right_model_passes(check):
    check(subject())


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug):
    with pytest.raises(AssertionError):
        BUGS[bug](bug())
    with pytest.raises(AssertionError):
        testing.check_all(bug())
