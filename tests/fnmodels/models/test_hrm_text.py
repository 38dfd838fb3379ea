"""HRM-Text: its loop written out, an entry of a cache for each pass, gradients of the last passes alone."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import hrm_text, tree
from fnmodels.errors import ConfigError
from fnmodels.models.common.family import stored_layers
from tests.support.cases import batch_of, cases, generic_params, segments, tokens_of
from tests.support.oracle import model_of, params_of
from tests.variants.hrm_text import TINY
from train.parallel.pipeline.schedule import pipeline
from train.parallel.pipeline.tree_split import copies, holders, share

VALUES = TINY | {"num_hidden_layers": 2}
CONFIG = hrm_text.Config.from_hf(VALUES)


def norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).rsqrt()


def written_out(params: Any, tokens: Tensor, gradients: tuple[int, ...]) -> Tensor:
    """Logits [B, S, V] by the loop as the paper has it, over layers that are Llama's with a gate."""
    inputs, masks, freqs = fnmodels.prepare(CONFIG, tokens)
    kind, n = hrm_text.kinds(CONFIG)[0], CONFIG.layers_per_stack

    def stack(layers: list[Any], z: Tensor) -> Tensor:
        for layer in layers:
            z = hrm_text._through(layer, z, masks[kind], freqs[kind], CONFIG, context(), [])
        return norm(z)

    high = CONFIG.embedding_multiplier * params["embed_tokens"][inputs["tokens"]]
    low = params["layers"][0]["low_state"].expand_as(high)
    for trained in gradients:
        for cycle in range(CONFIG.low_cycles):
            low = stack(params["layers"][:n], low + high)
            low = low if cycle >= CONFIG.low_cycles - trained else low.detach()
        high = stack(params["layers"][n:], high + low)
    return high @ params["lm_head"].mT


def context() -> Any:
    from fnmodels.models.common.context import Context
    from fnmodels.options import ForwardOptions

    return Context(ForwardOptions("math"), (), {})


@pytest.mark.parametrize("given", [(2, 2), (1, 1), (1, 2), (0, 1), (2,)])
def test_the_loop_written_out(given: tuple[int, ...]) -> None:
    """Logits, and gradients of all parameters, which flow through the last low passes of a high cycle."""
    config = dataclasses.replace(CONFIG, low_gradients=given)
    params = tree.map(lambda leaf: leaf.double().requires_grad_(), generic_params(config))
    tokens = tokens_of(config, 2, 7)
    ours = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    wanted = written_out(params, tokens, given if len(given) == 2 else (1, *given))
    assert (ours - wanted).abs().max() < 1e-10
    leaves = tree.leaves(params)
    both = [torch.autograd.grad(x.square().sum(), leaves, allow_unused=True) for x in (ours, wanted)]
    for mine, other in zip(*both, strict=True):
        mine, other = (torch.zeros(()) if gradient is None else gradient for gradient in (mine, other))
        assert (mine - other).abs().max() < 1e-8 * (1 + other.abs().max())


def test_gradients_of_the_reference_are_cut_at_the_same_passes() -> None:
    values = VALUES | {"L_bp_cycles": [1]}
    config, model = hrm_text.Config.from_hf(values), model_of(values).double()
    params = tree.map(lambda leaf: leaf.requires_grad_(), params_of(model, config))
    tokens = tokens_of(config, 1, 9)
    fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math").square().sum().backward()
    model(input_ids=tokens, use_cache=False).logits.square().sum().backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for stack in (0, 1):
        mine = params["layers"][2 * stack]["mlp"]["down_proj"].grad
        other = theirs[f"model.{'LH'[stack]}_module.layers.0.mlp.down_proj.weight"]
        assert (mine - other).abs().max() < 1e-4 * other.abs().max()  # their rotary tables are fp32


def test_each_pass_has_an_entry_of_a_cache() -> None:
    """A planted bug: entries that the passes of a layer share give other logits."""
    params, tokens = generic_params(CONFIG), tokens_of(CONFIG, 2, 9)
    whole = fnmodels.forward(params, *fnmodels.prepare(CONFIG, tokens), config=CONFIG, kernel="math")
    cache = fnmodels.init_cache(CONFIG, 2, 16)
    assert len(cache.layers) == len(hrm_text.kinds(CONFIG)) == 12 and len(params["layers"]) == 4
    how: dict[str, Any] = {"config": CONFIG, "kernel": "math"}
    _, cache = fnmodels.prefill(params, *fnmodels.prepare_step(CONFIG, tokens[:, :8], cache), cache, **how)
    step = fnmodels.prepare_step(CONFIG, tokens[:, 8:], cache)
    logits, _ = fnmodels.prefill(params, *step, cache, **how)
    assert (logits - whole[:, -1]).abs().max() < 2e-5
    stored = stored_layers(CONFIG, cache.kinds)
    last = [max(i for i, layer in enumerate(stored) if layer == own) for own in stored]
    shared = dataclasses.replace(cache, layers=tuple(cache.layers[i] for i in last))
    wrong, _ = fnmodels.prefill(params, *step, shared, **how)
    assert (wrong - whole[:, -1]).abs().max() > 1e-2


def test_taps_and_edits_are_of_a_pass() -> None:
    """layers.N is pass N: an edit of one pass of a layer leaves its other passes as they were."""
    params, batch = generic_params(CONFIG), batch_of(CONFIG, segments((9,)))
    taps = tuple(f"layers.{i}.mlp" for i in range(12))
    _, plain = batch.forward(params, taps=taps)
    _, edited = batch.forward(params, taps=taps, edits={"layers.6.mlp": lambda value, name: 2 * value})
    same = [i for i in range(12) if torch.equal(plain[f"layers.{i}.mlp"], edited[f"layers.{i}.mlp"])]
    assert CONFIG.passes[0] == CONFIG.passes[6] == 0 and same == list(range(6))


def test_stages_of_a_pipeline_hold_the_layers_of_their_passes() -> None:
    """Both ranks hold a layer that passes of both run, and one of them counts it."""
    pipe = pipeline(CONFIG, 2, split=[3, 9])  # the first three passes are of both low layers
    shares = [share(hrm_text.spec(CONFIG), CONFIG, pipe, rank)["layers"] for rank in (0, 1)]
    assert [sorted(layers) for layers in shares] == [["0", "1"], ["0", "1", "2", "3"]]
    assert {entry for entry in holders(CONFIG, pipe) if "layers" in entry} == {"layers.0", "layers.1"}
    assert copies(CONFIG, pipe, 0) == frozenset() and copies(CONFIG, pipe, 1) >= {"layers.0", "layers.1"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_layers_per_stack": 1, "num_hidden_layers": 3}, "'num_hidden_layers' is 3; only 6"),
        ({"L_bp_cycles": [1.5]}, "'L_bp_cycles' is .1.5., but must be a list of integers"),
        ({"L_cycles": 999}, "4000 times|1,?000 is most|run 4000"),
    ],
)
def test_wrong_loops_are_errors(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, fnmodels.errors.UnsupportedError), match=sentence):
        hrm_text.Config.from_hf(VALUES | changes)


def test_the_current_dialect_counts_passes() -> None:
    case = next(case for case in cases() if case.name == "hrm_text")
    values = case.config.to_hf()
    assert (values["num_layers_per_stack"], values["num_hidden_layers"]) == (1, 6)
    assert hrm_text.Config.from_hf(values) == case.config
