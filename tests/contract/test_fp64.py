"""fp64 stays fp64: no operation of a model, a loss, a cache or an optimizer makes fp32 of it.

Tables that `prepare` makes are fp32 by design and not looked at.
"""

import functools
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import research, tree
from fnmodels.models import diffusion, encoder_decoder, vision, vision_language
from tests.support.cases import Case, batch_of, block_structures, generic_params, representatives, richest, segments
from tests.support.encoder_losses import SETTINGS, optimizer_of, weights_of
from tests.support.narrowing import forbid_narrowing
from tests.support.sense_losses import SENSES
from train.gradients import gradient_sums
from train.optim.adafactor import adafactor
from train.optim.adamw import sgd
from train.optim.lion import lion

WIDE = torch.float64
EVERY = SETTINGS | SENSES  # {name: makes (config, loss, halves of a batch)}
every_block = pytest.mark.parametrize("case", block_structures(), ids=str)


def widened(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def assert_wide(params: Any) -> None:
    narrow = [path for path, leaf in tree.flatten(params).items() if leaf.is_floating_point() and leaf.dtype != WIDE]
    assert not narrow


@pytest.mark.parametrize("case", representatives(), ids=str)
def test_family_in_fp64_is_made_and_loaded_in_fp64(case: Case, tmp_path: Path) -> None:
    assert_wide(P.init(case.config, 0, dtype=WIDE))
    assert_wide(P.abstract(case.config, dtype=WIDE))
    P.save_pretrained(tmp_path, case.config, generic_params(case.config, WIDE))
    assert_wide(P.load_pretrained(tmp_path, dtype=WIDE)[1])


@every_block
def test_family_in_fp64_is_differentiated_in_fp64(case: Case) -> None:
    """test_cache.py compares steps on caches in fp64 to the last bits but four."""
    params, spec = generic_params(case.config, WIDE), fnmodels.family_of(case.config).spec(case.config)
    batch = batch_of(case.config, segments((5, 4), (7, 2)))
    given = batch.batch()
    loss = functools.partial(train.next_token_loss, config=case.config, length=batch.length)
    with forbid_narrowing():
        sums = gradient_sums(loss, train.adamw(1e-3, spec=spec))(params, [given])
    assert sums.total.dtype == WIDE and all(grad.dtype == WIDE for grad in sums.grads)


@pytest.mark.parametrize("name", EVERY)
def test_losses_of_encoders_towers_pairs_and_flows_stay_fp64(name: str) -> None:
    config, loss, halves = EVERY[name]()
    batch = widened({entry: torch.cat([half[entry] for half in halves]) for entry in halves[0]})
    optimizer = optimizer_of(name)
    state = train.init_state(weights_of(config), optimizer)
    with forbid_narrowing():
        state, metrics = train.make_step(loss, optimizer)(state, batch)
    assert metrics["loss"].dtype == WIDE and metrics["finite"]
    assert_wide(state.params)


def test_every_module_of_towers_pairs_and_flows_has_a_setting() -> None:
    configs = [make()[0] for make in EVERY.values()]
    parts = [getattr(config, part, None) for config in configs for part in ("text", "vision", "encoder", "decoder")]
    used = {type(config).__module__ for config in (*configs, *parts)}
    packages = (diffusion, encoder_decoder, vision, vision_language)
    modules = (module for p in packages for module in pkgutil.iter_modules(p.__path__, f"{p.__name__}."))
    names = {module.name for module in modules if not module.ispkg}
    shared = {
        f"fnmodels.models.encoder_decoder.{name}" for name in ("classes", "cross_attention", "stacks", "transformer")
    }
    assert names - used == shared


OPTIMIZERS: dict[str, train.Optimizer] = {
    "adamw": train.adamw(1e-3, weight_decay=0.1),
    "sgd": sgd(1e-3, momentum=0.9, weight_decay=0.1),
    "lion": lion(1e-3, weight_decay=0.1),
    "adafactor": adafactor(1e-3, weight_decay=0.1),
    "with_ema": train.with_ema(train.adamw(1e-3), 0.9),
    "chain": train.chain(train.optim.clip_norm(1e-3), train.adamw(1e-3)),
    "partition": train.partition({"layers.*": lion(1e-3), "*": sgd(1e-3)}),
}


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_updates_fp64_in_fp64(name: str, inplace: bool) -> None:
    """Muon, whose direction is bf16 by definition, is not among them."""
    config, loss, halves = SETTINGS["classification"]()
    state = train.init_state(weights_of(config), OPTIMIZERS[name])
    step = train.make_step(loss, OPTIMIZERS[name], clip=1e-3, inplace=inplace)
    with forbid_narrowing():
        for half in halves:
            state, _ = step(state, half)
    assert_wide(state.params)


def test_lenses_of_an_fp64_model_are_trained_in_fp64() -> None:
    case = next(case for case in richest() if case.family == "llama")
    params, batch = generic_params(case.config, WIDE), batch_of(case.config, segments((5,)))
    lens = research.init_tuned_lens(case.config, dtype=WIDE)
    prepared = batch.prepared()
    with forbid_narrowing():
        trained, _ = research.train_tuned_lens(lens, params, [prepared], config=case.config)
    assert_wide(trained)


def test_beams_of_an_fp64_model_have_its_log_probabilities() -> None:
    case = next(case for case in richest() if case.family == "llama")
    params = generic_params(case.config, WIDE)
    with forbid_narrowing():
        best = train.generation.beam_search(params, case.config, [1, 2, 3], beams=2, max_new=3)[0]
    tokens = torch.tensor([[1, 2, 3, *best.tokens]])
    logits = fnmodels.forward(params, *fnmodels.prepare(case.config, tokens), config=case.config)[0]
    logp = logits.log_softmax(-1)[2:-1].gather(1, tokens[0, 3:, None]).sum()
    assert best.logp == pytest.approx(float(logp), rel=1e-12)


def test_targets_in_fp64_stay_fp64() -> None:
    batch = train.document_batch([[1, 2], [3]], 4, targets=torch.tensor([0.1, 0.2], dtype=WIDE))
    assert batch["targets"].dtype == WIDE and batch["targets"][0, 0] == torch.tensor([0.1], dtype=WIDE)
    assert train.document_batch([[1, 2], [3]], 4, targets=[1, 0])["targets"].dtype == torch.float32
