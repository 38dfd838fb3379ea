"""The comparison can fail: weights moved wrongly, maths changed by a little."""

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from tests.parity.oracle import assert_close, logits_of, model_of, params_of
from tests.support import Case, cases, structures, tokens_of

WITH_REFERENCE = [case for case in structures() if case.values is not None]


def _interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Rows in the order of the original Llama files (pairs side by side) where the half layout is expected."""
    heads = weight.unflatten(0, (-1, 2, head_dim // 2))
    return heads.transpose(1, 2).reshape(weight.shape)


def _fails(case: Case, params: object, theirs: Tensor, tokens: Tensor) -> bool:
    ours = fnmodels.forward(params, *fnmodels.prepare(case.config, tokens), config=case.config, kernel="math")
    try:
        assert_close(ours, theirs)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("case", WITH_REFERENCE, ids=str)
def test_every_tensor_counts(case: Case) -> None:
    """A 2% change of any one tensor is seen; so no tensor is at a value where its use cannot be told."""
    tokens = tokens_of(case.config, 1, 24)
    theirs = logits_of(case.values, tokens)
    params = params_of(model_of(case.values), case.config)
    assert not _fails(case, params, theirs, tokens)
    kinds, (_, _, tables) = fnmodels.family_of(case.config).kinds(case.config), fnmodels.prepare(case.config, tokens)
    for path, tensor in tree.flatten(params).items():
        layer = path.split(".")[1] if path.startswith("layers.") else None
        if path.endswith("k_bias") and layer and tables[kinds[int(layer)]].shape[-2] == 0:
            continue  # without position a key's bias adds one number to all scores of a query: softmax does not see it
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        moved = tree.flatten(params) | {path: tensor + 0.02 * tensor.std().clamp(min=0.1) * noise}
        assert _fails(case, tree.unflatten(moved), theirs, tokens), path


@pytest.mark.parametrize("leaf", ["q_proj", "k_proj"])
def test_a_wrong_permutation_is_seen(leaf: str) -> None:
    for case in cases():
        if case.values is None or case.values["model_type"] not in ("llama", "qwen3"):
            continue
        tokens = tokens_of(case.config, 1, 24)
        params = params_of(model_of(case.values), case.config)
        for layer in params["layers"]:
            layer["attention"][leaf] = _interleaved(layer["attention"][leaf], case.config.head_dim)
        assert _fails(case, params, logits_of(case.values, tokens), tokens), case
