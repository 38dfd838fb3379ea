"""A server of a tiny checkpoint in a thread of this process, and requests to it by the standard library alone."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import params as P
from fnmodels import llama
from tests.support.cases import generic_params

CONFIG = llama.Config(260, 32, 48, 2, 4, 2, max_position_embeddings=512, tie_word_embeddings=True)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and three special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>", "<end>"])
    return made


def write_checkpoint(path: Path, config: Any = CONFIG) -> Path:
    """A folder with weights, a tokenizer and a chat template; its end-of-text token is 257."""
    P.save_pretrained(path, config, generic_params(config))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"bos_token_id": 256, "eos_token_id": 257}))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "eos_token": "<eos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(kind | {"chat_template": TEMPLATE}))
    return path


class Served:
    """Requests to a running server."""

    def __init__(self, service: Any, host: str, port: int) -> None:
        self.service, self.host, self.port = service, host, port
        self.url = f"http://{host}:{port}"

    def send(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, content, headers); a body that is no bytes is sent as JSON, and JSON is read."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
            answer = connection.getresponse()
            content: Any = answer.read().decode(errors="surrogateescape")  # protobuf is bytes
            if answer.headers.get_content_type() == "application/json":
                content = json.loads(content)
            return answer.status, content, dict(answer.headers)
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The objects of a stream, which ends with [DONE]."""
        status, content, _ = self.send(path, body | {"stream": True})
        lines = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
        assert status == 200 and lines.pop() == "[DONE]", content
        return [json.loads(line) for line in lines]


@contextmanager
def serving(
    folder: Path,
    *,
    token: str | None = None,
    saves: Path | None = None,
    kernel: Any = "auto",
    bounds: Any = None,
    **limits: Any,
) -> Iterator[Served]:
    """A server of the folder's model on a free port of this machine; with `saves` it trains too.

    bounds: of Tinker's protocol. limits: fields of `Limits`.
    """
    from train.server.app import Limits
    from train.server.background import background

    how: Any = {"limits": Limits(**{"slots": 8, "context": 256} | limits), "saves": saves, "bounds": bounds}
    with background(folder, "tiny", token=token, kernel=kernel, **how) as running:
        port = running.url.removesuffix("/v1").rpartition(":")[2]
        yield Served(running.service, "127.0.0.1", int(port))
