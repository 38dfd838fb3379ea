"""GRPO with a picture in the prompt: the update is the one of the model's own forward, and what is seen is learned."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.image_text import image_features, with_features
from fnmodels.inputs.image_places import image_places
from tests.support.pictured import IMAGE, picture, write_reader
from train.data.chat import read_template
from train.engine import Engine
from train.losses.policy import group_advantages, policy_loss
from train.optim.adamw import adamw
from train.rl import command, loop
from train.rl.pictures import Pictures
from train.rl.prompts import CHECKERS, read_prompts

pytest.importorskip("jinja2")

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<begin> <img> <end> {% else %}{{ p.text }} {% endif %}{% endfor %}{% endif %}"
    "{% endfor %}w9"
)
SHAPES = {"tall": (4, 1), "wide": (1, 2)}
ANSWERS = {"tall": "w11", "wide": "w12"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = write_reader(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    for name, shape in SHAPES.items():
        (tmp_path / f"{name}.png").write_bytes(picture(*shape))
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"w{i}"}], "images": [f"{name}.png"], "answer": ANSWERS[name]}
        for i in (1, 2, 3, 4, 5)
        for name in SHAPES
    ]
    records.append({"messages": [{"role": "user", "content": "w6"}], "answer": "w13"})  # of text alone
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def _setup(folder: Path, pictures: Pictures) -> loop.Setup:
    template = read_template(folder / "model", images=True)
    shape = {"prompts": 6, "answers": 3, "tokens": 3, "seed": 3}
    text = pictures.config.text
    return loop.Setup(text, pictures.reader.tokenizer, template, (), CHECKERS["contains"], pictures=pictures, **shape)


def _direct(pictures: Pictures, text: Any, prompt: Any, answer: list[int]) -> Tensor:
    """The log-probabilities of one answer, by `forward` of the prompt and it with the images."""
    tokens, options, config = torch.tensor([[*prompt.ids, *answer]]), dict[str, Any](), pictures.config
    images = prompt.images
    prepared = fnmodels.prepare(config, tokens)
    if images:
        found = image_features(pictures.params, list(images), config=config)
        shown = torch.tensor([[*prompt.ids, *[0] * len(answer)]])  # an image token of an answer is text
        places = image_places(shown, IMAGE, torch.ones(found.values[0].shape[:2], dtype=torch.bool))
        prepared = fnmodels.prepare(config, tokens, places=places, grids=found.grids)
        prepared, options = with_features(pictures.whole(text), found, places, prepared, config=config)
    logits = fnmodels.forward(text, *prepared, config=config.text, **options)
    return logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[-len(answer) :, 0]


def test_an_update_is_that_of_the_models_own_forward(folder: Path) -> None:
    pictures = Pictures.load(folder / "model")
    setup, records = _setup(folder, pictures), read_prompts(folder / "prompts.jsonl", "contains")
    assert records.pictured
    engine = Engine(setup.config, pictures.params["text"], adamw(0.02, weight_decay=0.0), clip=1.0)
    other = Engine(setup.config, pictures.params["text"], adamw(0.02, weight_decay=0.0), clip=1.0)
    row = loop.update(setup, engine, records.train, 0)
    places = loop.sample_rows([len(records.train)], [1], setup.seed, 0, setup.prompts)
    chosen = [records.train[at] for _, at, _ in places for _ in range(setup.answers)]
    prompts = loop.seen(setup, chosen)
    assert {len(prompt.images) for prompt in prompts} == {0, 1}  # mixed
    for number, (one, prompt) in enumerate(zip(chosen, prompts, strict=True)):  # a picture is one object in a call
        first = prompts[next(i for i in range(number + 1) if chosen[i].get("images") == one.get("images"))]
        assert all(a is b for a, b in zip(prompt.images, first.images, strict=True))
    assert not pictures.reader.known  # and none is kept for the whole run
    found = loop.draw(setup, other.params, prompts, seed=setup.seed * 1_000_003)
    rewards = torch.tensor(loop.rewards_of(setup, chosen, found))
    assert row["reward"] == float(rewards.mean())
    gains = rewards.reshape(setup.prompts, setup.answers)
    gains = group_advantages(
        gains + 0.1 * torch.randn(gains.shape, generator=torch.Generator().manual_seed(0))
    ).flatten()
    batches = loop.microbatches(prompts, found.tokens, gains, (), pictures)
    old = [batch | {"old_logp": torch.zeros(batch["labels"].shape)} for batch in batches]
    other.forward_backward(old, functools.partial(loop.loss, config=setup.of_losses))
    leaves = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), other.params)
    total = torch.zeros(())
    for prompt, answer, gain in zip(prompts, found.tokens, gains, strict=True):
        logp = _direct(pictures, leaves, prompt, answer)
        ones = torch.ones_like(logp)
        total = total + policy_loss(logp, 0 * ones, gain * ones, ones > 0, clip=(0.2, 0.28), entropy=0 * ones)[0]
    total.backward()
    flat = tree.flatten(leaves)
    for path, grad in tree.flatten(other.gradients()).items():
        expected = flat[path].grad
        torch.testing.assert_close(grad, torch.zeros_like(grad) if expected is None else expected, rtol=1e-4, atol=1e-5)


def test_what_a_picture_shows_is_learned_and_saved(folder: Path) -> None:
    sizes = ["--prompts", "6", "--answers", "16", "--tokens", "1", "--learning-rate", "0.01", "--updates", "20"]
    given = ["--init", str(folder / "model"), "--data", str(folder / "prompts.jsonl"), "--checker", "equal", *sizes]
    assert command.main(["--run", str(folder / "run"), *given]) == 0
    rewards = [json.loads(line)["reward"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[-3:]) / 3 > 0.75 and sum(rewards[:3]) / 3 < 0.2  # a guess has half of the pictures
    learned, before = Pictures.load(folder / "run"), Pictures.load(folder / "model")
    for path, leaf in tree.flatten({**before.params, "text": {}}).items():
        assert torch.equal(tree.flatten(learned.params)[path], leaf)  # the tower is as it was
    records = read_prompts(folder / "prompts.jsonl", "equal").train
    setup = _setup(folder, learned)
    found = loop.draw(setup, learned.params["text"], loop.seen(setup, records), seed=0, greedy=True)
    right = [text.split()[:1] == [record["answer"]] for text, record in zip(found.texts, records, strict=True)]
    assert sum(right) >= 0.75 * len(right)
    assert command.main(["--run", str(folder / "run"), "--resume", *given]) == 0
    (folder / "wide.png").write_bytes(picture(1, 5))
    assert command.main(["--run", str(folder / "run"), "--resume", *given]) == 2  # another picture is other data


def test_pictures_that_cannot_be_read_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(words: str, *flags: str, data: str = "prompts.jsonl") -> None:
        base = ["--run", str(folder / "other"), "--data", str(folder / data), "--checker", "equal", *flags]
        assert command.main(base) == 2
        assert words in capsys.readouterr().err

    lines = [{"messages": [{"role": "user", "content": "w1"}], "answer": "w2"} for _ in range(2)]
    for name, images, words in (("a", ["none.png"], "the picture"), ("b", "none.png", "must be a list of names")):
        (folder / name).write_text("\n".join(json.dumps(line | {"images": images}) for line in lines))
        refused(words, "--init", str(folder / "model"), data=name)
    (folder / "c").write_text("\n".join(json.dumps(line | {"images": ["a\0b"]}) for line in lines))
    refused("cannot be read (embedded null byte)", "--init", str(folder / "model"), data="c")
    family = ["--family", "fnmodels.models.decoder.llama"]
    refused("is read as a model of text, and --data has prompts", "--init", str(folder / "model"), *family)
    config, params = P.load_pretrained(folder / "model", part="text", copy=True)
    P.save_pretrained(folder / "text", config, params)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / "text" / name).write_bytes((folder / "model" / name).read_bytes())
    refused("reads no pictures here", "--init", str(folder / "text"))
