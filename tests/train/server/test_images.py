"""Pictures in the messages of a chat: data URLs, which a vision-language model answers."""

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import serving
from tests.train.commands.test_sample_images import CASE, folder, tokenizer_of, wanted  # noqa: F401

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def _part(file: Path) -> dict[str, Any]:
    data = base64.b64encode(file.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_answers_about_pictures_are_those_of_generate(folder: Path) -> None:  # noqa: F811
    image = "[58] " + "<img> " * 6 + "[57] "
    with serving(folder / "model") as server:

        def ask(*parts: dict[str, Any]) -> Any:
            body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, "temperature": 0}
            return server.send("/v1/chat/completions", body | {"logprobs": True})

        text = {"type": "text", "text": "w1"}
        for names in (["one.png"], ["two.png"], ["two.png", "one.png"]):
            status, answer, _ = ask(*[_part(folder / name) for name in names], text)
            prompt = "user " + image * len(names) + "w1 w9"
            ids = wanted(folder, prompt, *names)
            assert status == 200, answer
            nats = answer["choices"][0]["logprobs"]["content"]
            assert [one["token"].strip() for one in nats] == [
                tokenizer_of(CASE).decode([i], skip_special_tokens=False) for i in ids
            ]
        wrong = (("https://example.com/a.png", "must be a data URL"), ("data:image/png;base64,*", "not base64"))
        wrong = (*wrong, ("data:image/png;base64,\u00e9AAA", "The data of an image_url are not base64"))
        for url, words in (*wrong, ("data:image/png;base64,AAAA", "picture")):
            status, answer, _ = ask({"type": "image_url", "image_url": {"url": url}}, text)
            assert status == 400 and words in answer["error"]["message"], answer
