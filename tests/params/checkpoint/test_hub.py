"""Models of the Hub by name, from a small HTTP server that speaks the paths which huggingface_hub asks for."""

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from fnmodels import llama, tree
from params.checkpoint import hub
from params.inspect import main as inspect
from train.job.model_card import name_of
from train.job.settings import absolute_paths

constants = pytest.importorskip("huggingface_hub.constants")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIG = llama.Config(vocab_size=32, num_hidden_layers=1, **SIZES)
COMMITS = {"main": "a" * 40, "second": "b" * 40}


@dataclass
class Hub:
    """One model, org/tiny: {commit: {path: content}}; what was asked for; where an answer is cut, once."""

    files: dict[str, dict[str, bytes]]
    asked: list[str] = field(default_factory=list)
    cut: str | None = None
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        if path.startswith("/api/models/"):
            return self._describe(request, path.removeprefix("/api/models/"))
        name, _, rest = path.lstrip("/").partition("/resolve/")
        commit, _, file = rest.partition("/")
        content = self.files.get(COMMITS.get(commit, commit), {}).get(file)
        if name != "org/tiny" or content is None:
            return self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMITS.get(commit, commit)}
        if request.command == "GET":
            self.asked.append(file)
        first = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        return self._send(request, 206 if first else 200, content[first:], headers, cut=file == self.cut)

    def _describe(self, request: BaseHTTPRequestHandler, rest: str) -> None:
        owner, name, kind, revision = [*rest.split("/"), "", "main"][:4]
        if f"{owner}/{name}" != "org/tiny":
            code = "GatedRepo" if name == "gated" else "RepoNotFound"
            return self._send(request, 403 if name == "gated" else 404, b"", {"X-Error-Code": code})
        commit = COMMITS.get(revision or "main", revision)
        if commit not in self.files:
            return self._send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        described: Any = {"id": "org/tiny", "modelId": "org/tiny", "sha": commit, "siblings": [], "tags": []}
        if kind == "tree":
            described = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in self.files[commit].items()
            ]
        return self._send(request, 200, json.dumps(described).encode(), {"Content-Type": "application/json"})

    def _send(
        self, request: BaseHTTPRequestHandler, code: int, body: bytes, headers: dict[str, str], cut: bool = False
    ) -> None:
        request.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body[: len(body) // 2] if cut else body)
        request.close_connection = cut


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub whose second commit has other weights, and files that nothing here reads; an empty cache and folder."""
    files: dict[str, dict[str, bytes]] = {}
    for seed, commit in enumerate(COMMITS.values()):
        P.save_pretrained(tmp_path / commit, CONFIG, P.init(CONFIG, seed))
        files[commit] = {path.name: path.read_bytes() for path in (tmp_path / commit).iterdir()}
        files[commit] |= {"pytorch_model.bin": b"x", "onnx/model.json": b"x", "consolidated.safetensors": b"x"}
        files[commit] |= {"1_Pooling/config.json": b"{}", "README.md": b"x"}
    made = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            made.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        made.url = f"http://127.0.0.1:{listening.server_port}"
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        point_to(made.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path / "empty")
        yield made
        listening.shutdown()


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT does, which is read when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def is_model(loaded: tuple[Any, Any], seed: int) -> bool:
    config, params = loaded
    left, right = tree.leaves(params), tree.leaves(P.init(CONFIG, seed))
    return config == CONFIG and all(map(torch.equal, left, right))


def test_a_name_is_downloaded_once_and_only_what_is_needed(server: Hub) -> None:
    assert is_model(P.load_pretrained("org/tiny"), 0)
    asked = sorted(server.asked)
    assert "model.safetensors" in asked and "config.json" in asked and "1_Pooling/config.json" in asked
    assert not {"pytorch_model.bin", "onnx/model.json", "consolidated.safetensors", "README.md"} & set(asked)
    assert is_model(P.load_pretrained("org/tiny"), 0) and P.load_config("org/tiny") == CONFIG
    assert sorted(server.asked) == asked


def test_a_revision_is_that_of_the_argument_or_of_the_name(server: Hub) -> None:
    assert is_model(P.load_pretrained("org/tiny", revision="second"), 1)
    assert is_model(P.load_pretrained("org/tiny@second"), 1)
    assert is_model(P.load_pretrained("org/tiny", revision="a" * 40), 0)
    with pytest.raises(ValueError, match="names the revision 'second', and revision='main' is another"):
        P.load_pretrained("org/tiny@second", revision="main")
    with pytest.raises(ValueError, match=r"is for a model of the Hub, and .* is a path"):
        P.load_pretrained(Path.cwd().parent / ("a" * 40), revision="main")


def test_what_exists_on_the_disk_is_never_asked_for(server: Hub) -> None:
    Path("org").mkdir()  # a folder of one's own, in which `tiny` is misspelt
    with pytest.raises(FileNotFoundError, match="There is no such checkpoint folder: 'org/tiny'"):
        P.load_pretrained("org/tiny")
    P.save_pretrained("org/tiny", CONFIG, P.init(CONFIG, 2))
    assert is_model(P.load_pretrained("org/tiny"), 2) and server.asked == []


def test_an_interrupted_download_is_an_error_and_is_completed_later(server: Hub) -> None:
    server.cut = "model.safetensors"
    with pytest.raises(OSError, match="There is no such checkpoint folder, and the Hub cannot be reached"):
        P.load_pretrained("org/tiny")
    server.cut = None
    assert is_model(P.load_pretrained("org/tiny"), 0)


def test_without_a_network_the_cache_serves_and_nothing_else(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    P.load_pretrained("org/tiny")
    point_to("http://127.0.0.1:9", monkeypatch)  # where nothing listens
    assert is_model(P.load_pretrained("org/tiny"), 0)
    with pytest.raises(OSError, match=r"no such checkpoint folder.* cannot be reached .*no complete copy.*org/other"):
        P.load_pretrained("org/other")


@pytest.mark.parametrize(
    ("name", "said"),
    [("org/nosuch", "has no such model"), ("org/tiny@nosuch", "or revision"), ("org/gated", "accepted its terms")],
)
def test_what_the_hub_refuses_is_one_sentence(server: Hub, name: str, said: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"{said}.*{name}"):
        P.load_pretrained(name)


def test_without_the_extra_a_sentence_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "find_spec", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"install the extra: fnmodels\[hub\].*Qwen/Qwen3-0.6B"):
        P.load_pretrained("Qwen/Qwen3-0.6B")
    (tmp_path / "runs").mkdir()
    for path in ("run", "./runs/first", "/runs/first", "runs/a/b"):
        with pytest.raises(FileNotFoundError) as caught:
            P.load_pretrained(path)
        assert "hub" not in str(caught.value)


def test_commands_take_the_name_and_a_run_keeps_the_commit(server: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(["org/tiny"]) == 0 and "model type llama" in capsys.readouterr().out
    folder = absolute_paths("init", "org/tiny", Path.cwd())
    assert folder.endswith("a" * 40) and is_model(P.load_pretrained(folder), 0)
    assert name_of(folder) == "org/tiny"
    assert absolute_paths("init", "org", Path.cwd()) == str(Path.cwd() / "org")
