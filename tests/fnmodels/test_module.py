"""The nn.Module around params: names, shared memory, gradients by torch.func and autograd, export."""

import dataclasses

import pytest
import torch
from torch.func import functional_call, grad

import fnmodels
from fnmodels import tree
from tests.support.cases import Case, cases, generic_params, structures, tokens_of


@pytest.mark.parametrize("case", structures(), ids=str)
def test_its_parameters_are_the_leaves_by_path(case: Case) -> None:
    params = generic_params(case.config)
    named = dict(fnmodels.as_module(case.config, params).named_parameters())
    flat = tree.flatten(params)
    assert named.keys() == flat.keys()
    assert all(named[path].data_ptr() == leaf.data_ptr() for path, leaf in flat.items())


def test_logits_and_gradients_are_those_of_forward() -> None:
    config = dataclasses.replace(
        next(case.config for case in cases() if case.family == "llama"), tie_word_embeddings=True
    )
    params = generic_params(config, torch.float64)
    tokens = tokens_of(config, 2, 7)
    segment_ids = torch.tensor([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1]])
    module = fnmodels.as_module(config, params, kernel="math")
    positions = fnmodels.positions_from_segments(segment_ids)
    args = tokens, positions, segment_ids
    prepared = fnmodels.prepare(config, tokens, positions=positions, segment_ids=segment_ids)
    wanted = fnmodels.forward(params, *prepared, config=config, kernel="math")
    assert torch.equal(module(*args), wanted)

    module(*args).square().sum().backward()
    named = {name: parameter.detach() for name, parameter in module.named_parameters()}
    assert "lm_head" not in named
    found = grad(lambda p: functional_call(module, p, args).square().sum())(named)
    direct = grad(lambda p: fnmodels.forward(p, *prepared, config=config, kernel="math").square().sum())(params)
    for name, gradient in tree.flatten(direct).items():
        torch.testing.assert_close(found[name], gradient)
        torch.testing.assert_close(module.get_parameter(name).grad, gradient)


def test_a_leaf_at_two_paths_is_one_parameter() -> None:
    config = next(case.config for case in cases() if case.family == "llama")
    params = dict(generic_params(config))
    params["layers"] = [params["layers"][0]] * len(params["layers"])
    module = fnmodels.as_module(config, params)
    assert len(list(module.layers.parameters())) == len(tree.leaves(params["layers"][0]))
    tokens = tokens_of(config, 1, 5)
    wanted = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config)
    torch.testing.assert_close(module(tokens), wanted)
    program = torch.export.export(module, (tokens,))
    torch.testing.assert_close(program.module()(tokens), wanted)
