"""Folders of sentence-transformers: embeddings equal a written-out loop, and that package's own."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from tests.support.cases import variants_of
from tests.support.oracle import assert_close, model_of, save

DOCUMENTS = [list(range(3, 9)), [40, 2, 7], [11, 12, 13, 14, 15], [5], list(range(20, 31)), [9, 9, 8]]
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def folder_of(folder: Path, values: dict[str, Any], pooling: Any, *, dense: bool = True) -> Path:
    """A folder as sentence-transformers writes it. dense: a Dense layer 32 -> 6 for each pooling, and Normalize."""
    save(model_of(values), folder)
    modules = ["models.Transformer", "sentence_transformer.modules.pooling.Pooling"]
    modules += ["base.modules.dense.Dense", "models.Normalize"] if dense else []
    places = ["", "1_Pooling", "2_Dense", "3_Normalize"]
    for place in places[1:3]:
        (folder / place).mkdir()
    rows = [{"idx": i, "path": places[i], "type": f"sentence_transformers.{m}"} for i, m in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "1_Pooling/config.json").write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": pooling}))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 24, "do_lower_case": true}')
    width = 32 * (1 if isinstance(pooling, str) else len(pooling))
    sizes = {"in_features": width, "out_features": 6, "bias": True}
    name = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense/config.json").write_text(json.dumps(sizes | name))
    generator = torch.Generator().manual_seed(3)
    weights = {"linear.weight": torch.randn(6, width, generator=generator), "linear.bias": torch.ones(6)}
    save_file(weights, folder / "2_Dense/model.safetensors")
    return folder


def pooled(x: Tensor, how: str) -> Tensor:
    """One document's states [S, D], pooled."""
    steps = torch.arange(1, len(x) + 1)[:, None].float()
    return {
        "cls": x[0],
        "lasttoken": x[-1],
        "max": x.max(0).values,
        "mean": x.mean(0),
        "mean_sqrt_len_tokens": x.sum(0) / len(x) ** 0.5,
        "weightedmean": (x * steps).sum(0) / steps.sum(),
    }[how]


def loop(values: dict[str, Any], folder: Path, poolings: tuple[str, ...]) -> Tensor:
    """The embeddings of each document alone, by transformers."""
    from safetensors.torch import load_file

    weights, model = load_file(folder / "2_Dense/model.safetensors"), model_of(values)
    base, found = getattr(model, "base_model", model), []
    for document in DOCUMENTS:
        with torch.no_grad():
            x = base(input_ids=torch.tensor([document])).last_hidden_state[0]
        vector = torch.cat([pooled(x, how) for how in poolings])
        vector = torch.tanh(weights["linear.weight"] @ vector + weights["linear.bias"])
        found.append(F.normalize(vector, dim=0))
    return torch.stack(found)


BERT = variants_of("bert").TINY | {"architectures": ["BertModel"]}
LLAMA = variants_of("llama").variants()["llama"] | {"architectures": ["LlamaForCausalLM"]}
CASES = [
    *((BERT, one) for one in POOLINGS),
    (BERT, ["mean", "cls"]),
    (LLAMA, "lasttoken"),
    (variants_of("bert").TINY | {"architectures": ["BertForMaskedLM"]}, "mean"),
]


@pytest.mark.parametrize(("values", "pooling"), CASES, ids=lambda value: str(value)[:20] if value else "")
def test_embeddings_and_files(values: dict[str, Any], pooling: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs", values, pooling)
    config, params, embedder = P.load_embedder(folder)
    assert (embedder.max_length, embedder.lower_case, config.head) == (24, True, "none")
    assert tree.flatten(params).keys() == tree.flatten(embedder.spec(config)).keys()
    wanted = loop(values, folder, (pooling,) if isinstance(pooling, str) else tuple(pooling))
    for row, batch in ((12, 12), (12, 4096), (64, 4096), (None, 12), (None, None)):
        got = fnmodels.embed_documents(params, DOCUMENTS, config=config, embedder=embedder, row=row, batch=batch)
        assert_close(got, wanted)
    P.save_embedder(tmp_path / "ours", config, params, embedder)
    _, again, same = P.load_embedder(tmp_path / "ours")
    assert same == embedder
    pairs = zip(tree.leaves(params), tree.leaves(again), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def _modules_at(pooling: str) -> str:
    types = {"": "sentence_transformers.models.Transformer", pooling: "sentence_transformers.models.Pooling"}
    return json.dumps([{"path": path, "type": kind} for path, kind in types.items()])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_dense_layer_that_is_no_float_is_refused_and_not_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "it", BERT, "mean")
    file = folder / "2_Dense" / "model.safetensors"
    save_file({name: value.to(dtype) for name, value in load_file(file).items()}, file)
    with pytest.raises(P.UnsupportedError, match="weights are F64, F32, F16 or BF16"):
        P.load_embedder(folder)


def test_other_folders(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "plain", BERT, "mean", dense=False)
    (folder / "1_Pooling/config.json").write_text(
        '{"word_embedding_dimension": 32, "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}'
    )
    (folder / "sentence_bert_config.json").unlink()
    config, params, embedder = P.load_embedder(folder)
    assert embedder == fnmodels.Embedder(("first", "mean"), (), False, config.max_position_embeddings)
    assert fnmodels.embed_documents(params, DOCUMENTS, config=config, embedder=embedder).shape == (6, 64)
    lengths: list[int] = []

    def recorded(config: Any, tokens: torch.Tensor, **given: Any) -> Any:
        lengths.append(tokens.numel())
        return fnmodels.prepare(config, tokens, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fnmodels.embedding.prepare", recorded)
        fnmodels.embed_documents(params, [[3], [4, 5]], config=config, embedder=embedder)
        assert lengths == [3]  # a query is not padded to the tokens of a forward pass
    with pytest.raises(ValueError, match="Document 1 has 0 tokens"):
        fnmodels.embed_documents(params, [[3], []], config=config, embedder=embedder)
    with pytest.raises(ValueError, match="There are no documents"):
        fnmodels.embed_documents(params, [], config=config, embedder=embedder)
    wrong = {
        ("1_Pooling/config.json", '{"pooling_mode": "median"}'): "the pooling 'median' is unknown; known are cls",
        ("1_Pooling/config.json", '{"pooling_mode": "mean", "include_prompt": 0}'): "'include_prompt' is 0",
        ("config_sentence_transformers.json", '{"prompts": {}, "default_prompt_name": "query"}'): "one of its names or",
        ("tokenizer.json", '{"version": "1.0"}'): "is not a tokenizer that the tokenizers library can read",
        (
            "modules.json",
            '[{"path": "", "type": "sentence_transformers.models.StaticEmbedding"}]',
        ): "begins with StaticEmbedding",
        ("modules.json", '[{"path": ".."}]'): "must be a list of objects with 'type' and 'path'",
        ("modules.json", _modules_at("../1_Pooling")): "'..' is not the bare name",
        ("modules.json", _modules_at("/1_Pooling")): "'/' is not the bare name",
    }
    for (name, text), message in wrong.items():
        copy = shutil.copytree(folder, tmp_path / f"wrong{len(list(tmp_path.iterdir()))}")
        (copy / name).write_text(text)
        with pytest.raises(fnmodels.errors.CheckpointError, match=message):
            P.load_embedder(copy)


# {(file, what it says): the error}, of what changes the vectors of sentence-transformers and is not read
CHANGED = {
    (
        "sentence_bert_config.json",
        '{"config_args": {"hidden_act": "relu"}}',
    ): "'hidden_act' of 'config_args' may change",
    (
        "sentence_bert_config.json",
        '{"tokenizer_args": {"model_max_length": 8}, "max_seq_length": 9}',
    ): "model_max_length",
    ("sentence_bert_config.json", '{"module_output_name": "other"}'): "'module_output_name' is \"other\"",
    ("sentence_bert_config.json", '{"modality_config": {"text": {"method": "encode"}}}'): "of texts only",
    ("sentence_bert_config.json", '{"processing_kwargs": {"text": {"truncation": false}}}'): "'truncation' of 'text'",
    ("sentence_bert_config.json", '{"foo_scale": 3}'): "has 'foo_scale': 3, which is not known and may change",
    ("config_sentence_transformers.json", '{"truncate_dim": 8}'): "'truncate_dim' is 8; only null is supported",
    ("config_sentence_transformers.json", '{"foo": true}'): "has 'foo': true, which is not known",
    ("1_Pooling/config.json", '{"pooling_mode": "lasttoken", "pooling_mode_mean_tokens": true}'): "which disagrees",
    ("1_Pooling/config.json", '{"init_scale": 2}'): "has 'init_scale': 2",
    ("2_Dense/config.json", '{"in_features": 32, "out_features": 6, "train_scale": 2}'): "has 'train_scale': 2",
    ("modules.json", '[{"path": "", "type": "custom_st.Transformer"}]'): "'custom_st.Transformer' is none of",
}


@pytest.mark.parametrize(("where", "message"), CHANGED.items(), ids=range(len(CHANGED)))
def test_settings_that_change_vectors_are_refused(where: tuple[str, str], message: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "it", BERT, "mean")
    (folder / where[0]).write_text(where[1])
    with pytest.raises(fnmodels.errors.CheckpointError, match=message):
        P.load_embedder(folder)


def test_settings_that_change_no_vector_are_read(tmp_path: Path) -> None:
    """As releases write them, under the name of the model; a module that drops out stands behind the pooling."""
    folder = folder_of(tmp_path / "it", BERT, "mean", dense=False)
    (folder / "sentence_bert_config.json").unlink()
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings = {
        "max_seq_length": 7,
        "do_lower_case": True,
        "transformer_task": "feature-extraction",
        "modality_config": {"text": forward},
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        "unpad_inputs": None,
        "model_args": {"trust_remote_code": True},
        "tokenizer_args": {"model_max_length": 7},
        "config_args": {},
    }
    (folder / "sentence_xlm-roberta_config.json").write_text(json.dumps(settings))
    general = {"__version__": {"pytorch": "2"}, "similarity_fn_name": "dot", "model_type": "SentenceTransformer"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(general | {"prompts": {}}))
    rows = json.loads((folder / "modules.json").read_text())
    rows.append({"path": "2_Dropout", "type": "sentence_transformers.models.Dropout"})
    (folder / "modules.json").write_text(json.dumps(rows))
    embedder = P.load_embedder(folder).embedder
    assert embedder == fnmodels.Embedder(("mean",), (), False, 7, True)


def test_a_model_alone_is_pooled_by_the_mean(tmp_path: Path) -> None:
    """As by sentence-transformers; but modules.json is not lost in silence from a folder that the package wrote."""
    save(model_of(BERT), tmp_path)
    config, params, embedder = P.load_embedder(tmp_path)
    assert embedder == fnmodels.Embedder(("mean",), (), False, config.max_position_embeddings)
    with torch.no_grad():
        wanted = model_of(BERT)(input_ids=torch.tensor([DOCUMENTS[0]])).last_hidden_state[0].mean(0)
    got = fnmodels.embed_documents(params, DOCUMENTS[:1], config=config, embedder=embedder)
    assert_close(got[0], wanted)
    (tmp_path / "sentence_bert_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"modules\.json"):
        P.load_embedder(tmp_path)


def test_as_sentence_transformers(tmp_path: Path) -> None:
    """Folders that it wrote, and folders that it reads."""
    package = pytest.importorskip("sentence_transformers")
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(56))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    save(model_of(BERT), tmp_path / "bert")
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    texts = [" ".join(words[5 + i * 7 % 56 :][:i]) for i in range(1, 25)]
    for number, pooling in enumerate([*POOLINGS, ("mean", "cls", "max")]):
        dense = Dense(32 * (1 if isinstance(pooling, str) else 3), 9)
        modules = [Transformer(str(tmp_path / "bert")), Pooling(32, pooling_mode=pooling), dense, Normalize()]
        model = package.SentenceTransformer(modules=modules, device="cpu")
        model.save(str(tmp_path / f"theirs{number}"))
        config, params, embedder = P.load_embedder(tmp_path / f"theirs{number}")
        wanted = model.encode(texts, convert_to_tensor=True)
        ids = model.tokenizer(texts, truncation=True)["input_ids"]
        assert_close(fnmodels.embed_documents(params, ids, config=config, embedder=embedder), wanted)
        ours = tmp_path / f"ours{number}"
        P.save_embedder(ours, config, params, embedder)
        for file in itertools.chain((tmp_path / "bert").glob("tokenizer*"), (tmp_path / "bert").glob("vocab*")):
            shutil.copy(file, ours)
        assert torch.equal(
            package.SentenceTransformer(str(ours), device="cpu").encode(texts, convert_to_tensor=True), wanted
        )


def test_as_cross_encoders(tmp_path: Path) -> None:
    """Rerankers: packed pairs have the scores of sentence-transformers, which reads our folder to the bit."""
    package = pytest.importorskip("sentence_transformers")
    from transformers import BertTokenizerFast

    values = variants_of("bert").TINY | {"architectures": ["BertForSequenceClassification"]}
    values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(values["vocab_size"] - 5))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=24)
    save(model_of(values), tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    pairs = [(" ".join(words[5 + i : 8 + i]), " ".join(words[9 + i : 10 + 3 * i])) for i in range(1, 6)]
    model = package.CrossEncoder(str(tmp_path / "theirs"), device="cpu")
    as_is = torch.nn.Identity()
    wanted = model.predict(pairs, convert_to_tensor=True, activation_fn=as_is)

    config, params = P.load_pretrained(tmp_path / "theirs")
    ids = tokenizer([a for a, _ in pairs], [b for _, b in pairs])
    packed = fnmodels.pack(ids["input_ids"], 40, method="concat", split=False)
    where = {"positions": packed.positions, "segment_ids": packed.segment_ids}
    where["token_types"] = fnmodels.pack(ids["token_type_ids"], 40, method="concat", split=False).tokens
    scores = fnmodels.forward(params, *fnmodels.prepare(config, packed.tokens, **where), config=config)
    torch.testing.assert_close(scores[:, 0], wanted, rtol=0, atol=2e-6)
    assert wanted.std() > 0.02  # the scores of a random model are near each other
    P.save_pretrained(tmp_path / "ours", config, params)
    tokenizer.save_pretrained(tmp_path / "ours")
    again = package.CrossEncoder(str(tmp_path / "ours"), device="cpu")
    assert torch.equal(again.predict(pairs, convert_to_tensor=True, activation_fn=as_is), wanted)


@pytest.mark.parametrize(("activation", "pooling"), [("relu", "max"), ("log1p_relu", "sum")])
@pytest.mark.parametrize("older", [False, True])
def test_sparse_encoders(activation: str, pooling: str, older: bool, tmp_path: Path) -> None:
    """SPLADE: pooled logits of a masked-LM head, as a loop; both forms of the folder, and what is written again."""
    values = variants_of("bert").TINY
    save(model_of(values), tmp_path / "theirs")
    (tmp_path / "theirs/1_SpladePooling").mkdir()
    kind = "models.MLMTransformer" if older else "base.modules.transformer.Transformer"
    types = [f"sentence_transformers.{kind}", "sentence_transformers.sparse_encoder.models.SpladePooling"]
    rows = [{"idx": i, "path": ("", "1_SpladePooling")[i], "type": one} for i, one in enumerate(types)]
    (tmp_path / "theirs/modules.json").write_text(json.dumps(rows))
    size = "word_embedding_dimension" if older else "embedding_dimension"
    said = {"pooling_strategy": pooling, "activation_function": activation, size: 61}
    (tmp_path / "theirs/1_SpladePooling/config.json").write_text(json.dumps(said))
    limits: dict[str, Any] = {"max_seq_length": 24, "do_lower_case": False}
    limits |= {} if older else {"transformer_task": "fill-mask"}
    (tmp_path / "theirs/sentence_bert_config.json").write_text(json.dumps(limits))
    loaded = P.load_embedder(tmp_path / "theirs")
    config, params, embedder = loaded
    assert (embedder.sparse, embedder.pooling, embedder.normalize) == (activation, (pooling,), False)
    got = fnmodels.embed_documents(params, DOCUMENTS, config=config, embedder=embedder)
    for row, document in zip(got, DOCUMENTS, strict=True):
        with torch.no_grad():
            x = model_of(values)(input_ids=torch.tensor([document])).logits[0]
        for _ in range(1 + (activation == "log1p_relu")):
            x = torch.log1p(x.relu())
        assert_close(row, x.max(0).values if pooling == "max" else x.sum(0))
    P.save_embedder(tmp_path / "ours", config, params, embedder)
    again = P.load_embedder(tmp_path / "ours")
    assert again.config == config and again.embedder == embedder
    assert torch.equal(fnmodels.embed_documents(again.params, DOCUMENTS, config=config, embedder=embedder), got)


def test_bad_sparse_encoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pools by max or by sum"):
        fnmodels.Embedder(("mean",), normalize=False, sparse="relu")
    with pytest.raises(ValueError, match="sparse is 'gelu'"):
        fnmodels.Embedder(sparse="gelu")
    folder = folder_of(tmp_path, variants_of("bert").TINY | {"architectures": ["BertModel"]}, "mean", dense=False)
    config, params, _ = P.load_embedder(folder)
    sparse = fnmodels.Embedder(("max",), normalize=False, sparse="relu")
    with pytest.raises(ValueError, match="reads masked_lm"):
        fnmodels.embed_documents(params, DOCUMENTS, config=config, embedder=sparse)
    with pytest.raises(fnmodels.errors.ConfigError, match="no pooling by sum"):
        P.save_embedder(tmp_path / "sum", config, params, fnmodels.Embedder(("sum",)))
