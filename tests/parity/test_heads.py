"""Heads of encoders: results, files and pooled outputs equal transformers', document by document."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.common.heads import CLASSES
from tests.support.cases import collected, positions_of, segments, tokens_of, variants_of
from tests.support.oracle import assert_close, model_of, params_of, save

PREFIXES = {"bert": "Bert", "distilbert": "DistilBert", "eurobert": "EuroBert", "modernbert": "ModernBert"}
PREFIXES |= {"mpnet": "MPNet", "nomic_bert": "NomicBert", "roberta": "Roberta"}
PREFIXES |= {
    "electra": "Electra",
    "albert": "Albert",
    "deberta_v2": "DebertaV2",
    "deberta": "Deberta",
    "gte": "Gte",
    "roformer": "RoFormer",
    "megatron-bert": "MegatronBert",
    "ernie": "Ernie",
    "esm": "Esm",
}
PREFIXES |= {"jina_embeddings_v3": "JinaEmbeddingsV3", "xlm": "XLM"}
PREFIXES |= {"camembert": "Camembert", "roberta-prelayernorm": "RobertaPreLayerNorm", "xlm-roberta-xl": "XLMRobertaXL"}
# {model type: the family that reads it too}
FAMILIES = {"megatron-bert": "bert", "ernie": "bert"}
FAMILIES |= {"jina_embeddings_v3": "gte", "deberta": "deberta_v2"}
FAMILIES |= dict.fromkeys(("camembert", "roberta-prelayernorm", "xlm-roberta-xl"), "roberta")
# Heads with layers of their own, which are not read.
UNREAD = {("xlm", "classification"), ("xlm", "question_answering")}
LABELLED = ("classification", "tokens")
HEADS = ("none", "classification", "tokens", "question_answering")
ROWS = segments((-3, 4, 5, -2), (1, 13))
every_head = pytest.mark.parametrize(
    ("family", "head"),
    [
        (family, head)
        for family in PREFIXES
        for head in HEADS
        if hasattr(transformers, PREFIXES[family] + CLASSES[head]) and (family, head) not in UNREAD
    ]
    + [("electra", "replaced"), ("albert", "masked_lm")],
    ids=str,
)


def values_of(family: str, head: str) -> dict[str, Any]:
    """The family's tiny config.json with another head."""
    names = {} if head not in LABELLED else {"id2label": {"0": "a", "1": "b", "2": "c"}}
    names |= {"model_type": family} if family in FAMILIES else {}
    module = variants_of(FAMILIES.get(family, family))
    tiny: dict[str, Any] = module.FIRST if family == "deberta" else module.TINY
    return tiny | {"architectures": [PREFIXES[family] + CLASSES[head]]} | names


def reference(values: dict[str, Any], tokens: Tensor) -> Any:
    """What transformers returns for one document [S]."""
    with torch.no_grad():
        return model_of(values)(input_ids=tokens[None])


@every_head
def test_a_head(family: str, head: str, tmp_path: Path) -> None:
    values = values_of(family, head)
    save(model_of(values), tmp_path / "theirs")
    config, weights = P.load_pretrained(tmp_path / "theirs")
    assert config.head == head
    tokens = tokens_of(config, *ROWS.shape)
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    got = fnmodels.forward(weights, *prepared, config=config)
    found = fnmodels.documents(ROWS)
    assert len(found) == 4
    for i, (row, segment) in enumerate(zip(found.row, found.segment, strict=True)):
        mine = ROWS[row] == segment
        theirs = reference(values, tokens[row, mine])
        if head == "none":
            assert_close(got[row, mine], theirs.last_hidden_state[0])
            if getattr(theirs, "pooler_output", None) is not None:
                pooled = fnmodels.family_of(config).pooled(weights, got, found)
                assert_close(pooled[i], theirs.pooler_output[0])
        elif head == "replaced":
            assert (got[row, mine, 0] - theirs.logits[0]).abs().max() < 2e-5
        elif head == "question_answering":
            assert_close(got[row, mine], torch.stack((theirs.start_logits[0], theirs.end_logits[0]), -1))
        else:
            assert_close(got[i] if head == "classification" else got[row, mine], theirs.logits[0])
    P.save_pretrained(tmp_path / "ours", config, weights)
    again = getattr(transformers, values["architectures"][0]).from_pretrained(tmp_path / "ours")
    state = again.state_dict()
    left_out = collected("LEFT_OUT").get(family, ())
    read = {name: tensor for name, tensor in model_of(values).state_dict().items() if not name.endswith(left_out)}
    assert all(torch.equal(tensor, state[name]) for name, tensor in read.items())


@pytest.mark.parametrize(("family", "how"), [("modernbert", "mean"), ("eurobert", "bos"), ("eurobert", "mean")])
def test_what_a_classifier_reads(family: str, how: str) -> None:
    values = values_of(family, "classification") | {"classifier_pooling": how}
    config = fnmodels.family_for(values["model_type"]).Config.from_hf(values)
    tokens = tokens_of(config, *ROWS.shape)
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    got = fnmodels.forward(params_of(model_of(values), config), *prepared, config=config)
    found = fnmodels.documents(ROWS)
    theirs = [
        reference(values, tokens[r, ROWS[r] == s]).logits[0] for r, s in zip(found.row, found.segment, strict=True)
    ]
    assert_close(got, torch.stack(theirs))


def test_older_names_and_missing_parts(tmp_path: Path) -> None:
    """gamma and beta, the prefix of a model with a head, a model without pooler, leftovers of pre-training."""
    from safetensors.torch import load_file, save_file

    values = values_of("bert", "none")
    save(model_of(values), tmp_path)
    wanted = tree.flatten(P.load_pretrained(tmp_path)[1])
    wanted = {path: leaf.clone() for path, leaf in wanted.items()}
    file = tmp_path / "model.safetensors"
    tensors = {f"bert.{name}": tensor.clone() for name, tensor in load_file(file).items() if "pooler" not in name}
    tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(tensors, file, metadata={"format": "pt"})
    config, weights = P.load_pretrained(tmp_path)
    got = tree.flatten(weights)
    assert config.pooler == 0 and got.keys() == {path for path in wanted if "pooler" not in path}
    assert all(torch.equal(leaf, wanted[path]) for path, leaf in got.items())

    save(model_of(variants_of("bert").TINY), tmp_path)
    wanted = {path: leaf.clone() for path, leaf in tree.flatten(P.load_pretrained(tmp_path)[1]).items()}
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor.clone()
        for name, tensor in load_file(file).items()
    }
    old |= {"cls.seq_relationship.weight": torch.ones(2, 32), "cls.seq_relationship.bias": torch.ones(2)}
    old |= {"bert.pooler.dense.weight": torch.ones(32, 32), "bert.pooler.dense.bias": torch.ones(32)}
    save_file(old, file, metadata={"format": "pt"})
    got = tree.flatten(P.load_pretrained(tmp_path)[1])
    assert all(torch.equal(leaf, wanted[path]) for path, leaf in got.items()) and got.keys() == wanted.keys()
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("BertForMaskedLM", "BertForPreTraining"))
    config, weights = P.load_pretrained(tmp_path)
    assert config.head == "masked_lm" and all(torch.equal(x, wanted[name]) for name, x in tree.flatten(weights).items())
    tied = {"cls.predictions.decoder.weight": wanted["embed_tokens"], "cls.predictions.decoder.bias": torch.ones(61)}
    save_file(old | tied, file, metadata={"format": "pt"})
    P.load_pretrained(tmp_path)
    save_file(old | tied | {"cls.predictions.decoder.weight": torch.ones(61, 32)}, file, metadata={"format": "pt"})
    with pytest.raises(fnmodels.errors.MismatchError, match=r"decoder\.weight differs from bert\.embeddings"):
        P.load_pretrained(tmp_path)
    save_file(old | {"classifier.weight": torch.ones(2, 32)}, file, metadata={"format": "pt"})
    with pytest.raises(fnmodels.errors.MismatchError, match=r"'classifier.weight'.*unexpected"):
        P.load_pretrained(tmp_path)


def test_deberta_v3_as_published(tmp_path: Path) -> None:
    """Its files name the masked-LM head otherwise, and have another one of pre-training."""
    from safetensors.torch import load_file, save_file

    save(model_of(variants_of("deberta_v2").TINY), tmp_path)
    wanted = {path: leaf.clone() for path, leaf in tree.flatten(P.load_pretrained(tmp_path)[1]).items()}
    file = tmp_path / "model.safetensors"
    names = {"cls.predictions.transform.": "lm_predictions.lm_head.", "cls.predictions.": "lm_predictions.lm_head."}
    tensors = {}
    for name, tensor in load_file(file).items():
        old = next((one for one in names if name.startswith(one)), None)
        tensors[names[old] + name.removeprefix(old) if old else name] = tensor.clone()
    assert "lm_predictions.lm_head.bias" in tensors and "lm_predictions.lm_head.dense.weight" in tensors
    save_file(tensors | {"mask_predictions.classifier.bias": torch.ones(1)}, file, metadata={"format": "pt"})
    got = tree.flatten(P.load_pretrained(tmp_path)[1])
    assert got.keys() == wanted.keys() and all(torch.equal(leaf, wanted[path]) for path, leaf in got.items())


def test_token_types() -> None:
    values = values_of("bert", "none")
    model = model_of(values)
    config = fnmodels.family_for("bert").Config.from_hf(values)
    weights = params_of(model, config)
    tokens, types = tokens_of(config, 2, 9), torch.tensor([[0] * 4 + [1] * 5, [0] * 8 + [1]])
    prepared = fnmodels.prepare(config, tokens, token_types=types)
    with torch.no_grad():
        theirs = model(input_ids=tokens, token_type_ids=types).last_hidden_state
    assert_close(fnmodels.forward(weights, *prepared, config=config).detach(), theirs)


@pytest.mark.parametrize("architecture", ["BertForNextSentencePrediction", "BertLMHeadModel"])
def test_other_classes_are_refused(architecture: str) -> None:
    with pytest.raises(fnmodels.errors.UnsupportedError, match=f"{architecture}.*BertForSequenceClassification"):
        fnmodels.family_for("bert").Config.from_hf(variants_of("bert").TINY | {"architectures": [architecture]})


def test_a_head_per_document_needs_documents() -> None:
    config = fnmodels.family_for("bert").Config.from_hf(values_of("bert", "classification"))
    inputs, masks, tables = fnmodels.prepare(config, tokens_of(config, 1, 4))
    weights = P.init(config, 0)
    with pytest.raises(ValueError, match="one row per document"):
        fnmodels.forward(weights, {k: v for k, v in inputs.items() if k != "documents"}, masks, tables, config=config)
    with pytest.raises(ValueError, match="Cannot permute Documents"):
        fnmodels.permute(inputs, torch.arange(4))
