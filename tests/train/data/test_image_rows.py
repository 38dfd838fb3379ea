"""Images in packed rows: log-probabilities and gradients are those of the model called with the images of each text."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import train
from fnmodels import tree
from fnmodels.image_text import image_features, with_features
from fnmodels.inputs.image_places import image_places
from tests.train.generation.test_images import CASES, ImageCase, every_form, prompts_of
from train.data.token_budget import token_budget, unpacked
from train.data.turns.image_rows import image_batch, image_entries
from train.engine import Engine
from train.losses.logprobs import token_logprobs
from train.losses.output_loss import logprob_loss


@functools.cache
def _params(case: ImageCase) -> Any:
    return tree.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, case.params())


def _types(case: ImageCase, ids: Tensor) -> dict[str, Tensor]:
    """All of a sequence is prompt, where prompts see all of themselves: its answers are made elsewhere."""
    return {"token_types": torch.zeros_like(ids)} if hasattr(case.family, "prompt_masks") else {}


def direct(case: ImageCase, params: Any, ids: Tensor, images: list[Any]) -> Tensor:
    """The log-probability of each next token, by `forward` of one sequence with its images."""
    tokens, known = ids[None], _types(case, ids[None])
    options: dict[str, Any] = {}
    if images:
        found = image_features(params, images, config=case.config)
        places = image_places(tokens, case.config.image_token, torch.ones(found.values[0].shape[:2], dtype=torch.bool))
        prepared = fnmodels.prepare(case.config, tokens, places=places, grids=found.grids, **known)
        prepared, options = with_features(params, found, places, prepared, config=case.config)
    else:
        prepared = fnmodels.prepare(case.config, tokens, **known)
    logits = fnmodels.forward(params["text"], *prepared, config=case.config.text, **options)
    return logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def _rows(case: ImageCase, params: Any, budget: int) -> tuple[Any, list[dict[str, Tensor]], list[Tensor], Any]:
    prompts, images = prompts_of(case)
    ids = [torch.tensor(prompt) for prompt in prompts]
    entries = {"tokens": ids, **image_entries(params, ids, images, config=case.config)}
    entries |= {"token_types": [torch.zeros_like(one) for one in ids]} if _types(case, ids[0]) else {}
    rows = token_budget(entries, budget)[0]
    return rows, [image_batch(row, images, config=case.config) for row in rows], ids, images


@every_form
@pytest.mark.parametrize("budget", [60, 1000])
def test_log_probabilities_and_gradients_are_those_of_the_model(case: ImageCase, budget: int) -> None:
    """With and without images, each alone and several in a row."""
    params = _params(case)
    rows, batches, ids, images = _rows(case, params, budget)
    loss = logprob_loss(lambda logp, entropy, batch: (-logp.sum(), logp.new_ones(())), config=case.config)
    text = case.config.text
    engine = Engine(text, params["text"], train.adamw(1e-3, spec=fnmodels.family_of(text).spec(text)))
    found = engine.forward_backward(batches, loss)
    logps = unpacked(rows, [one["logp"] for one in found["outputs"]])
    leaves = tree.map(lambda leaf: leaf.clone().requires_grad_(leaf.is_floating_point()), params["text"])
    wanted = [direct(case, {**params, "text": leaves}, one, list(own)) for one, own in zip(ids, images, strict=True)]
    for number, one in enumerate(wanted):
        torch.testing.assert_close(logps[number][:-1], one.detach(), rtol=1e-9, atol=1e-9)
    (-torch.cat(wanted).sum()).backward()
    flat = tree.flatten(leaves)
    for path, grad in tree.flatten(engine.gradients()).items():
        expected = flat[path].grad
        torch.testing.assert_close(grad, torch.zeros_like(grad) if expected is None else expected, rtol=1e-7, atol=1e-9)


@every_form
def test_a_wrong_number_of_image_tokens_is_refused(case: ImageCase) -> None:
    params, (prompts, images) = _params(case), prompts_of(case)
    ids = [torch.tensor(prompt) for prompt in prompts]
    token = case.config.image_token
    count = int((ids[0] == token).sum())
    more = torch.cat((ids[0], torch.tensor([token])))
    words = rf"Sequence 0: The sequence has {count + 1} image tokens .id {token}.* have {count} features"
    with pytest.raises(ValueError, match=words):
        image_entries(params, [more], images[:1], config=case.config)
    with pytest.raises(ValueError, match=r"datum 1: The sequence has 1 image tokens .*its 0 images have 0 features"):
        image_entries(
            params, [ids[0], torch.tensor([token])], [images[0], []], config=case.config, names=["a", "datum 1"]
        )
    with pytest.raises(ValueError, match=r"Sequence 0: The sequence has 1 image tokens .*and no images"):
        image_entries(params, [torch.tensor([token])], [[]], config=case.config)


def test_features_need_the_config_of_the_whole_model() -> None:
    case = next(one for one in CASES if one.name.startswith("qwen3_vl"))
    params = _params(case)
    _, batches, _, _ = _rows(case, params, 1000)
    with pytest.raises(ValueError, match="pass the config of the full model"):
        token_logprobs(params["text"], batches[0], config=case.config.text)
