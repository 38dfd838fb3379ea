"""Tinker's image chunks in this process: log-probabilities, gradients and answers are those of the model itself."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.errors import UserError
from tests.train.commands.test_sample_images import CASE, folder, reader, tokenizer_of, wanted  # noqa: F401
from tests.train.data.test_image_rows import direct
from train.integrations import tinker
from train.integrations.tinker import types

IMAGE_TOKENS = 6  # of either picture
LORA = {"rank": 4, "seed": 0}


def _chunk(path: Path, **more: Any) -> types.ImageChunk:
    return types.ImageChunk(path.read_bytes(), "png", **more)


def _ids(text: str) -> list[int]:
    return list(tokenizer_of(CASE).encode(text).ids)


def _input(*parts: Any) -> types.ModelInput:
    return types.ModelInput([types.EncodedTextChunk(_ids(one)) if isinstance(one, str) else one for one in parts])


def sequences(folder: Path) -> list[tuple[types.ModelInput, list[int], list[Any]]]:  # noqa: F811
    """(input, its ids, its images): with a picture, with two, and of text alone."""
    one, two = folder / "one.png", folder / "two.png"
    read = [reader(folder).read(path)[0] for path in (one, two)]
    image = "<img> " * IMAGE_TOKENS
    pointer = types.ImageAssetPointerChunk(str(two), "png", IMAGE_TOKENS)
    return [
        (_input("w1 [58]", _chunk(one), "[57] w2 w3"), _ids(f"w1 [58] {image} [57] w2 w3"), read[0]),
        (_input(_chunk(one), "w4", pointer, "w5 w6"), _ids(f"{image} w4 {image} w5 w6"), [*read[0], *read[1]]),
        (_input("w7 w8 w9"), _ids("w7 w8 w9"), []),
    ]


def _datum(given: types.ModelInput, ids: list[int], **entries: Any) -> types.Datum:
    """Of all tokens, of which the last one predicts nothing that counts."""
    targets = [*ids[1:], 0]
    return types.Datum(given, {"target_tokens": targets, **entries})


@pytest.fixture
def training(folder: Path) -> tinker.TrainingClient:  # noqa: F811
    service = tinker.ServiceClient(folder=folder / "saves")
    made = service.create_lora_training_client(folder / "model", **LORA)
    for path, leaf in tree.flatten(P.lora.adapters(made.engine.params)).items():  # those of B are 0 at first
        leaf.copy_(torch.randn(leaf.shape, generator=torch.Generator().manual_seed(len(path))) * 0.05)
    return made


def _adapted(leaves: Any) -> Any:
    return {**CASE.params(), "text": leaves}


def _wanted(folder: Path, leaves: Any) -> list[Tensor]:  # noqa: F811
    return [direct(CASE, _adapted(leaves), torch.tensor(ids), list(images)) for _, ids, images in sequences(folder)]


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "custom", "traced"])
def test_a_pass_is_that_of_the_model_with_the_images(
    training: tinker.TrainingClient,
    folder: Path,  # noqa: F811
    loss: str,
) -> None:
    leaves = P.lora.attach(
        training.engine.params,
        tree.map(lambda leaf: leaf.clone().requires_grad_(), P.lora.adapters(training.engine.params)),
    )
    logps = _wanted(folder, leaves)
    data, total = [], torch.zeros(())
    for number, ((given, ids, _), logp) in enumerate(zip(sequences(folder), logps, strict=True)):
        weights = [1.0 + number + 0.1 * i for i in range(len(logp))]
        weight, old = torch.tensor(weights), logp.detach() + 0.3 * torch.randn(len(logp))
        if loss in ("cross_entropy", "custom", "traced"):
            entries: dict[str, Any] = {"weights": [*weights, 0.0]}
            total = total - (logp * weight).sum()
        else:
            entries = {"logprobs": [*old.tolist(), 0.0], "advantages": [*weights, 0.0]}
            ratio = (logp - old).exp()
            kept = ratio if loss == "importance_sampling" else torch.minimum(ratio, ratio.clamp(0.8, 1.2))
            total = total - (kept * weight).sum()
        data.append(_datum(given, ids, **entries))
    total.backward()
    if loss == "custom":

        def own(data: Any, logps: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
            each = zip(data, logps, strict=True)
            return -sum((logp * one.loss_fn_inputs["weights"].to_torch()).sum() for one, logp in each), {}

        found = training.forward_backward_custom(data, own).result()
    elif loss == "traced":
        traced = tinker.Client().create_custom_loss(
            lambda logprobs, weights: (-(logprobs * weights).sum(), {}), {"logprobs": 1, "weights": 1}
        )
        found = training.forward_backward_custom(data, traced.result()).result()
    else:
        found = training.forward_backward(data, loss).result()
        again = training.forward(data, loss).result()
        assert [one["logprobs"] for one in again.loss_fn_outputs] == [one["logprobs"] for one in found.loss_fn_outputs]
    for one, logp in zip(found.loss_fn_outputs, logps, strict=True):
        torch.testing.assert_close(one["logprobs"].to_torch()[:-1], logp.detach(), rtol=1e-5, atol=1e-5)
    assert found.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5)
    every, grads = tree.flatten(leaves), tree.flatten(training.engine.gradients())
    assert len(grads) == len(tree.flatten(P.lora.adapters(leaves))) and any(bool(grad.any()) for grad in grads.values())
    for path, grad in grads.items():
        expected = every[path].grad
        assert expected is not None
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_log_probabilities_and_answers_see_the_images(training: tinker.TrainingClient, folder: Path) -> None:  # noqa: F811
    plain = tinker.ServiceClient(folder=folder / "saves").create_sampling_client(base_model=folder / "model")
    params = types.SamplingParams(max_tokens=4, temperature=0, stop=[2])
    given = _input("w1 [58]", _chunk(folder / "one.png"), "[57] w2")
    found = plain.sample(given, 2, params, include_prompt_logprobs=True).result()
    prompt = f"w1 [58] {'<img> ' * IMAGE_TOKENS} [57] w2"
    assert [one.tokens for one in found.sequences] == [wanted(folder, prompt, "one.png")] * 2
    nats = direct(CASE, CASE.params(), torch.tensor(_ids(prompt)), reader(folder).read(folder / "one.png")[0])
    assert found.prompt_logprobs is not None and found.prompt_logprobs[0] is None
    torch.testing.assert_close(torch.tensor(found.prompt_logprobs[1:]), nats, rtol=1e-5, atol=1e-5)
    adapted = training.save_weights_and_get_sampling_client()
    (sequence,) = adapted.sample(given, 1, types.SamplingParams(max_tokens=3, seed=1, stop=[2])).result().sequences
    whole = torch.tensor([*_ids(prompt), *sequence.tokens])
    nats = direct(CASE, _adapted(training.engine.params), whole, reader(folder).read(folder / "one.png")[0])
    torch.testing.assert_close(torch.tensor(sequence.logprobs), nats[-len(sequence.tokens) :], rtol=1e-5, atol=1e-5)


def test_pictures_change_what_is_trained_by_the_same_update(training: tinker.TrainingClient, folder: Path) -> None:  # noqa: F811
    """The whole loop: a pass with images, an update, and lower loss on the same data."""
    data = [_datum(given, ids, weights=[1.0] * (len(ids) - 1) + [0.0]) for given, ids, _ in sequences(folder)]
    losses = []
    for _ in range(3):
        losses.append(training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert losses[2] < losses[1] < losses[0]


def test_wrong_pictures_are_refused_with_the_numbers(training: tinker.TrainingClient, folder: Path) -> None:  # noqa: F811
    def refused(given: types.ModelInput, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            training.forward([types.Datum(given, {"target_tokens": [0] * 9, "weights": [0.0] * 9})], "cross_entropy")

    one = folder / "one.png"
    data, there = one.read_bytes(), str(folder / "none.png")
    for parts, words in (
        ([_chunk(one, expected_tokens=7)], "Chunk 0 of datum 0 has an image of 6 tokens; its expected_tokens are 7"),
        (["w1", types.ImageChunk(b"none", "png")], "Chunk 1 of datum 0: the picture is no picture that can be read"),
        ([types.ImageChunk(data, "gif")], "has the format 'gif'; it must be one of png, jpeg"),
        ([types.ImageAssetPointerChunk("https://a/b", "png")], "a file of this machine is read, and no address"),
        (
            [types.ImageAssetPointerChunk("a\0b", "png")],
            r"Chunk 0 of datum 0 has the location 'a.x00b', which names no",
        ),
        ([types.ImageAssetPointerChunk(str(folder), "png")], "Chunk 0 of datum 0: .*A folder stands where a file"),
        ([types.ImageAssetPointerChunk(os.devnull, "png")], "Chunk 0 of datum 0: .* is not a regular file"),
        ([types.ImageAssetPointerChunk(there, "png")], r"Chunk 0 of datum 0: .*none\.png"),
    ):
        refused(_input(*parts), words)
    with pytest.raises(ValueError, match="is of the type 'dmel'"):
        training.forward([types.Datum(types.ModelInput([_Dmel()]), {})], "cross_entropy")  # type: ignore[list-item]
    assert types.ModelInput([_chunk(one, expected_tokens=6)]).length == 6
    with pytest.raises(ValueError, match="without expected_tokens has no length"):
        _ = types.ModelInput([_chunk(one)]).length
    with pytest.raises(ValueError, match="to_ints is for text alone"):
        types.ModelInput([_chunk(one)]).to_ints()


def test_text_may_have_the_id_of_image_tokens(training: tinker.TrainingClient, folder: Path) -> None:  # noqa: F811
    """As an answer does that drew one: its embedding is that of the id."""
    data = []
    for given in (_input("<img> w1"), _input("w2", _chunk(folder / "one.png"), "<img> w3")):
        size = 2 if len(given.chunks) == 1 else 1 + IMAGE_TOKENS + 2
        data.append(types.Datum(given, {"target_tokens": [1] * size, "weights": [1.0] * size}))
    found = training.forward_backward(data, "cross_entropy").result()
    tokens = torch.tensor([_ids("<img> w1")])
    prepared = fnmodels.prepare(CASE.config.text, tokens)
    logits = fnmodels.forward(training.engine.params, *prepared, config=CASE.config.text)
    wanted = logits[0].log_softmax(-1)[:, 1].detach()
    torch.testing.assert_close(found.loss_fn_outputs[0]["logprobs"].to_torch(), wanted, rtol=1e-5, atol=1e-5)


class _Dmel:
    type = "dmel"


def test_a_model_of_text_reads_no_images(tmp_path: Path) -> None:
    config = CASE.config.text
    P.save_pretrained(tmp_path / "text", config, CASE.params()["text"])
    tokenizer_of(CASE).save(str(tmp_path / "text" / "tokenizer.json"))
    training = tinker.ServiceClient(folder=tmp_path).create_lora_training_client(tmp_path / "text", **LORA)
    datum = types.Datum(types.ModelInput([types.ImageChunk(b"", "png")]), {"target_tokens": [], "weights": []})
    with pytest.raises(
        ValueError, match="Chunk 0 of datum 0 is an image, and the model of 'text' reads no images here"
    ):
        training.forward([datum], "cross_entropy")
    assert train.generate(training.engine.params, config, [[1]], max_new=1).tokens


def test_settings_of_pictures_may_be_absent_and_not_broken(folder: Path) -> None:  # noqa: F811
    model, service = folder / "model", tinker.ServiceClient(folder=folder / "saves")
    file = model / "preprocessor_config.json"
    file.write_text('{"do_resize": false}')
    with pytest.raises(UserError, match=r"preprocessor_config.json: 'do_resize' must be true"):
        service.base(model)
    file.unlink()
    assert service.base(model).whole is None
