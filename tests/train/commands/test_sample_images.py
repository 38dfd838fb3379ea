"""`python -m train.sample --image FILE`: prompts with pictures, of a whole vision-language model's folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
import train
from fnmodels import tree
from fnmodels.models.vision_language import qwen2_5_vl
from tests.fnmodels.models.test_qwen2_5_vl import VALUES
from tests.support.image_texts import ImageCase, image_cases
from tests.train.data.test_image_prompts import SETTINGS, picture, tokenizer_of
from train.commands.sample import main
from train.data.image_prompts import ImagePrompts

CASE: ImageCase = next(case for case in image_cases() if case.name == "qwen2_5_vl")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}[58] <img> [57] {% else %}{{ p.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}w9"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of the whole model, with its tokenizer, template and settings of pictures, and two pictures."""
    config = qwen2_5_vl.Config.from_hf(VALUES)
    P.save_pretrained(tmp_path / "model", config, CASE.params())
    tokenizer_of(CASE).save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(SETTINGS["qwen2_5_vl"][0]))
    (tmp_path / "model" / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    for name, size in (("one.png", (16, 24)), ("two.png", (24, 16))):
        picture(tmp_path, size, name)
    return tmp_path


def wanted(folder: Path, prompt: str, *names: str, new: int = 4) -> list[int]:
    """Greedy tokens after a prompt whose tokens of images are written out."""
    tokenizer = tokenizer_of(CASE)
    images = [image for name in names for image in reader(folder).read(folder / name)[0]]
    ids = tokenizer.encode(prompt).ids
    known: dict[str, Any] = {"max_new": new, "sampling": train.Sampling(temperature=0), "images": [images]}
    found: list[int] = train.generate(CASE.params(), CASE.config, [ids], stop_ids=[2], **known).tokens[0]
    return found


def reader(folder: Path) -> ImagePrompts:
    return ImagePrompts.of(folder / "model", CASE.config, tokenizer_of(CASE))


def answers(folder: Path, *flags: str) -> list[list[int]]:
    out = folder / "out.jsonl"
    assert main([str(folder / "model"), "--temperature", "0", "--tokens", "4", "--out", str(out), *flags]) == 0
    return [json.loads(line)["tokens"] for line in out.read_text().splitlines()]


def test_a_prompt_begins_with_its_images_or_says_where_they_are(folder: Path) -> None:
    one, two = str(folder / "one.png"), str(folder / "two.png")
    image = "[58] " + "<img> " * 6 + "[57] "
    vision = image.replace("[58]", "<|vision_start|>").replace("[57]", "<|vision_end|>")
    assert answers(folder, "--prompt", "w1 [58] <img> [57] w2", "--image", one) == [
        wanted(folder, f"w1 {image} w2", "one.png")
    ]
    both = answers(folder, "--prompt", "<img> w3 <img> w4", "--image", one, "--image", two, "--samples", "2")
    assert both == [wanted(folder, "<img> " * 6 + "w3 " + "<img> " * 6 + "w4", "one.png", "two.png")] * 2
    assert answers(folder, "--prompt", " w1", "--image", one) == [wanted(folder, f"{vision} w1", "one.png")]
    assert answers(folder, "--prompt", "<img> w1", "--image", one) != answers(
        folder, "--prompt", "<img> w1", "--image", two
    )


def test_chats_and_lines_have_images(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    image = "[58] " + "<img> " * 6 + "[57]"
    one = str(folder / "one.png")
    chat = [wanted(folder, f"user {image} w5 w9", "one.png")]
    assert answers(folder, "--chat", "--prompt", "w5", "--image", one) == chat
    lines = [
        {"messages": [{"role": "user", "content": "w5"}], "images": ["one.png"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "w5"}, {"type": "image"}]}]}
        | {"images": ["two.png"]},
        {"prompt": "w1 w2"},
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert answers(folder, "--prompts", str(folder / "prompts.jsonl")) == [
        *chat,
        wanted(folder, f"user w5 {image} w9", "two.png"),
        wanted(folder, "w1 w2"),
    ]
    monkeypatch.setattr("sys.stdin", iter_lines(["w5\n", "w6\n", ""]))
    assert main([str(folder / "model"), "--chat", "--image", one, "--temperature", "0", "--tokens", "4"]) == 0
    first = tokenizer_of(CASE).decode(chat[0])
    shown = capsys.readouterr().out.split("\n")
    assert shown[0].removeprefix("> ").strip() == first
    second = wanted(folder, f"user {image} w5 assistant {first} user w6 w9", "one.png")
    assert shown[1].removeprefix("> ").strip() == tokenizer_of(CASE).decode(second)


def iter_lines(lines: list[str]) -> Any:
    class Stdin:
        def readline(self) -> str:
            return lines.pop(0)

    return Stdin()


def test_errors_are_one_sentence(folder: Path, capsys: Any) -> None:
    one = str(folder / "one.png")

    def error(*flags: str) -> str:
        assert main([*flags]) == 2
        return str(capsys.readouterr().err)

    model = str(folder / "model")
    assert "places for images (<img>), and there are 1" in error(model, "--prompt", "<img> <img>", "--image", one)
    assert "there is no such file" in error(model, "--prompt", "w1", "--image", str(folder / "none.png"))
    found = error(model, "--prompt", "w1 " * 60 + "<img>", "--image", one, "--tokens", "30")
    assert "a prompt has 66 tokens with its images, and the model's context of 64 has 34" in found
    (folder / "prompts.jsonl").write_text('{"prompt": "w1", "images": "one.png"}')
    assert 'line 1: "images" must be a list' in error(model, "--prompts", str(folder / "prompts.jsonl"))
    assert "--image is for --prompt" in error(model, "--prompts", str(folder / "prompts.jsonl"), "--image", one)
    text, params = P.load_pretrained(folder / "model", part="text")
    P.save_pretrained(folder / "text", text, params)
    tokenizer_of(CASE).save(str(folder / "text" / "tokenizer.json"))
    assert "reads no images" in error(str(folder / "text"), "--prompt", "w1", "--image", one)
    assert torch.is_tensor(params["norm"])


def test_a_place_without_a_picture_is_refused(folder: Path, capsys: Any) -> None:
    """Also where no prompt has a picture, so that the text model alone is loaded."""
    model, lines = str(folder / "model"), folder / "prompts.jsonl"
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)

    def error(*flags: str) -> str:
        assert main([model, *flags]) == 2
        return str(capsys.readouterr().err)

    none = "the prompt has 1 places for images (<img>), and there are 0"
    assert none in error("--prompt", "w5 <img> w6")
    assert none in error("--chat", "--prompt", "w5 <img> w6")
    parts = [{"type": "image", "image": str(folder / "one.png")}, {"type": "text", "text": "w4"}]
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    assert none in error("--prompts", str(lines))
    lines.write_text('{"prompt": "w5 <img>"}\n' + json.dumps({"prompt": "w5", "images": [str(folder / "one.png")]}))
    assert none in error("--prompts", str(lines))
    for kind in ("video", "input_audio"):
        parts[0] = {"type": kind}
        lines.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
        assert f"line 1: a message has '{kind}'; text and images are read" in error("--prompts", str(lines))
    lines.write_text('{"messages": ["w4"], "images": ["one.png"]}')
    assert 'line 1: each of "messages" must be an object' in error("--prompts", str(lines))
    assert main([model, "--prompt", "w5", "--tokens", "2"]) == 0


def test_adapters_of_the_text_model_answer_to_images(folder: Path) -> None:
    text, params = P.load_pretrained(folder / "model", part="text")
    made = P.lora.add(text, params, rank=2, seed=1)
    adapted = P.lora.attach(made, tree.map(lambda leaf: leaf + 0.5, P.lora.adapters(made)))
    P.lora.save_adapters(folder / "adapters", text, adapted, base=str(folder / "model"))
    tokenizer_of(CASE).save(str(folder / "adapters" / "tokenizer.json"))
    prompt, images = tokenizer_of(CASE).encode("<img> " * 6 + "w1").ids, reader(folder).read(folder / "one.png")[0]
    known: dict[str, Any] = {"max_new": 4, "sampling": train.Sampling(temperature=0), "images": [images]}
    whole = {**CASE.params(), "text": adapted}
    wanted_tokens = train.generate(whole, CASE.config, [prompt], stop_ids=[2], **known).tokens
    out = folder / "out.jsonl"
    flags = ["--temperature", "0", "--tokens", "4", "--out", str(out), "--image", str(folder / "one.png")]
    assert main([str(folder / "adapters"), *flags, "--prompt", "<img> w1"]) == 0
    assert [json.loads(out.read_text())["tokens"]] == wanted_tokens
    assert wanted_tokens != [wanted(folder, "<img> " * 6 + "w1", "one.png")]
