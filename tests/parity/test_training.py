"""Ten training steps from the same weights on the same batches as transformers with torch.optim.AdamW."""

import contextlib
import functools
from typing import Any

import pytest
import torch

import fnmodels
import train
from fnmodels import tree
from fnmodels.models.common import storage
from fnmodels.models.common.family import field_of, traits_of
from tests.support.cases import Batch, Case, batch_of, collected, richest, segments
from tests.support.doubles import KeepsDoubles, doubled, with_exact_frequencies
from tests.support.oracle import model_of, on_disk, params_of, position_ids

STEPS = 10
RATE, DECAY, CLIP = 2e-3, 0.1, 1.0
SAMPLED = ("phimoe",)  # its router draws experts in training there
# One model type of each family whose richest variant transformers has.
WITH_REFERENCE = {
    case.family: case for case in richest(lambda case: case.config.model_type) if case.values is not None
}.values()


def _model(case: Case) -> Any:
    model = model_of(case.values)
    return with_exact_frequencies(doubled(model), case.config) if _is_exact(case) else model


def _is_exact(case: Case) -> bool:
    """Whether training is compared in float64: of models with several residual streams, see test_moe_gradients, of
    those that run layers several times, and of those where a rounding changes the choice of blocks of keys or experts.
    """
    several = field_of(case.config, "residual_streams") or field_of(case.config, "passes")
    return bool(several) or case.family in ("minimax_m3", "muse_spark")


def _reference(case: Case, model: Any, batches: list[Batch]) -> list[float]:
    """transformers' loss, torch's optimizer and clipping; weight decay as in the spec: matrices only."""
    model.train(case.config.model_type not in SAMPLED)
    # With a padding_idx, torch gives that row no gradient, but in these batches it is an ordinary token.
    for table in (module for module in model.modules() if isinstance(module, torch.nn.Embedding)):
        table.padding_idx = None
    decays, decodes = _decays(case), traits_of(fnmodels.family_of(case.config)).causal
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if decays.get(name) is on],
            "weight_decay": DECAY if on else 0.0,
        }
        for on in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    losses = []
    for batch in batches:
        # transformers shifts the labels of decoders
        labels = torch.where(batch.valid, batch.tokens, -100) if decodes else batch.labels
        loss = model(
            input_ids=batch.tokens.where(batch.valid, 0),  # ESM counts mask tokens in padding as well
            attention_mask=batch.valid.long(),
            position_ids=position_ids(case.values, batch.positions),
            labels=labels,
            use_cache=False,
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _decays(case: Case) -> dict[str, bool]:
    """{parameter of the reference: whether it has weight decay by our spec}.

    Its parameters may fuse those of our tree, so each is filled with a distinct number and found in its checkpoint.
    """
    family = fnmodels.family_of(case.config)
    model, names = model_of(case.values), family.hf_names(case.config)
    numbered = dict(enumerate(dict(model.named_parameters()).items()))
    with torch.no_grad():
        for number, (_, parameter) in numbered.items():
            parameter.fill_(number)
    saved, decays = on_disk(model), {}
    for path, leaf in tree.flatten(family.spec(case.config)).items():
        if leaf.trainable:
            for number in storage.extract_parameter(names[path], saved).unique():
                owner, _ = numbered[int(number)]
                assert decays.setdefault(owner, leaf.decay) == leaf.decay
    left_out = collected("LEFT_OUT").get(case.config.model_type, ())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    learned = {name for name in trained if not name.endswith(left_out)}
    unread = (".indexer.", "_global.")  # which have no gradient there
    assert decays.keys() == {name for name in learned if not any(part in name for part in unread)}
    return decays


def _ours(case: Case, weights: Any, batches: list[Batch]) -> list[float]:
    spec = fnmodels.family_of(case.config).spec(case.config)
    optimizer = train.adamw(RATE, weight_decay=DECAY, spec=spec)
    step = train.make_step(functools.partial(train.next_token_loss, config=case.config), optimizer, clip=CLIP)
    state, losses = train.init_state(weights, optimizer), []
    for batch in batches:
        given = {"tokens": batch.tokens, "positions": batch.positions, "segment_ids": batch.segment_ids}
        state, metrics = step(state, {**given, "labels": batch.labels})
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize("case", WITH_REFERENCE, ids=str)
def test_ten_steps(case: Case) -> None:
    rows = segments((16,), (11, -5), (14, -2))
    batches = [batch_of(case.config, rows, seed=seed) for seed in range(STEPS)]
    with KeepsDoubles() if _is_exact(case) else contextlib.nullcontext():
        model = _model(case)
        weights = params_of(model, case.config)  # copies, before the model is trained
        theirs, ours = _reference(case, model, batches), _ours(case, weights, batches)
    bound = collected("TRAINING_TOLERANCE").get(case.name, 1e-12 if _is_exact(case) else 1e-5)
    assert max(abs(x - y) for x, y in zip(ours, theirs, strict=True)) <= bound
