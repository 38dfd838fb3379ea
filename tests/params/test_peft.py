"""Adapters in PEFT's format equal PEFT's, both ways, over every model that transformers has."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import fnmodels
from fnmodels import tree
from fnmodels.models.common import storage
from params import lora
from params.checkpoint.module_names import module_names
from params.lora.leaves import params_by_path
from params.lora.peft_modules import layout_of
from tests.support.cases import Case, batch_of, cases, generic, segments
from tests.support.peft_cases import (
    CONCATENATED,
    PeftCase,
    decoder_case,
    in_memory,
    linear_modules,
    merged_by_path,
    peft_cases,
    weights_by_path,
    worst,
)

MAMBA_TYPES = ("falcon_h1", "mamba2", "nemotron_h")
FP32 = ("gpt2_numbered",)  # transformers' attention refuses fp64
ALL = pytest.mark.parametrize("case", peft_cases(), ids=str)
# Routers, which multiply in another dtype here; Whisper's head, which is its embedding whatever a config says
OTHERS = (".router", ".router.proj", ".mlp.gate", ".mixer.gate", ".feed_forward.gate", "proj_out")


@ALL
def test_names_in_memory_are_those_of_transformers(case: PeftCase) -> None:
    """Every parameter lies where `module_names` says."""
    held, flat = in_memory(case.model()), tree.flatten(case.params())
    names = module_names(case.config)
    assert names.keys() == flat.keys()
    for path, stored in names.items():
        if not path.endswith(CONCATENATED):
            assert torch.equal(storage.extract_parameter(stored, held), flat[path]), path


def _adapted(case: PeftCase, **options: Any) -> Any:
    """PEFT's model with random adapters on every linear map and every stack of experts."""
    model, layout = case.fresh(), layout_of(case.config).memory
    mamba = getattr(model.config, "model_type", "") in MAMBA_TYPES
    others = (*OTHERS, ".out_proj") if mamba else OTHERS  # PEFT refuses those
    modules = [name for name in linear_modules(model) if not name.endswith(others)]
    unknown = [name for name in modules if name not in layout.linear]
    assert not unknown, f"no adapter of {unknown}"
    stacked = [f"{container}.{name}" for container, names in layout.stacked.items() for name in names]
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=modules,
        target_parameters=stacked or None,
        rank_pattern={modules[0]: 2},
        alpha_pattern={modules[-1]: 7},
        init_lora_weights=False,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, settings)


def _off(case: PeftCase, ours: Any, model: Any) -> float:
    """How far our logits are from those of PEFT's model, relative to their deviation."""
    batch = dataclasses.replace(batch_of(case.config, segments((12,), (12,))), length=12)
    with torch.no_grad():
        theirs = model.eval()(input_ids=batch.tokens)
        found = batch.forward(ours, kernel="math")
    wanted = theirs.logits if hasattr(theirs, "logits") else theirs[0]
    return float((found - wanted).abs().max() / wanted.std())


def _merged(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.merge_and_unload()


@ALL
def test_adapters_of_every_model_equal_pefts_both_ways(case: PeftCase, tmp_path: Path) -> None:
    model = _adapted(case)
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours = lora.load_adapters(tmp_path / "theirs", case.config, case.base())
    if case.values is not None and case.name not in FP32:
        assert _off(case, ours, model) <= 2e-5  # transformers norms and rotates in fp32
    want = weights_by_path(case.config, _merged(model))
    off, path = worst(merged_by_path(ours), want)
    assert off <= 1e-6, f"{path} is off by {off:.1e}"
    moved, path = worst(tree.flatten(case.base()), want)
    assert moved > 1e-2, "nothing is adapted"

    lora.save_adapters(tmp_path / "ours", case.config, ours)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = peft.PeftModel.from_pretrained(case.fresh(), tmp_path / "ours")
    assert not [w for w in caught if "missing" in str(w.message) or "unexpected" in str(w.message)]
    off, path = worst(weights_by_path(case.config, _merged(again)), want)
    assert off <= 1e-6, f"{path} is off by {off:.1e} in PEFT"
    back = lora.load_adapters(tmp_path / "ours", case.config, case.base())
    off, path = worst(merged_by_path(back), want)
    assert off <= 1e-6, f"{path} is off by {off:.1e} after a round trip"
    assert {p for p, x in params_by_path(back).items() if isinstance(x, lora.Lora)} == {
        p for p, x in params_by_path(ours).items() if isinstance(x, lora.Lora)
    }


def _case(name: str) -> PeftCase:
    return next(case for case in peft_cases() if case.name == name)


# {model: (module of the embedding, of the head)}
EMBEDDINGS = {
    "llama": ("model.embed_tokens", "lm_head"),
    "llama_tied": ("model.embed_tokens", "lm_head"),
    "gpt2": ("transformer.wte", "lm_head"),
    "gemma2": ("model.embed_tokens", "lm_head"),
    "nemotron_h": ("model.embeddings", "lm_head"),
    "image_gemma3": ("model.language_model.embed_tokens", "lm_head"),
}
# What is trained beside an adapter of one linear map; {} stands for the embedding, [] for the head.
TRAINED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["{}"]},
    "head": {"target_modules": ["[]"]},
    "both": {"target_modules": ["{}", "[]"]},
    "both_tied": {"target_modules": ["{}", "[]"], "ensure_weight_tying": True},
    "full_embedding": {"modules_to_save": ["{}"]},
    "full_head": {"modules_to_save": ["[]"]},
    "full_both": {"modules_to_save": ["{}", "[]"]},
    "full_both_tied": {"modules_to_save": ["{}", "[]"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [3, 11]},
    "tokens_by_module": {"trainable_token_indices": {"{}": [3, 11]}},
}


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_and_heads_equal_pefts_both_ways(name: str, trained: str, tmp_path: Path) -> None:
    case, (embedding, head) = _case(name), EMBEDDINGS[name]
    named = {"{}": embedding, "[]": head}

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {named[key]: ids for key, ids in value.items()}
        return [named.get(one, one) for one in value] if isinstance(value, list) else value

    options = {key: filled(value) for key, value in TRAINED[trained].items()}
    inner = linear_modules(case.model())[-2]
    options["target_modules"] = [inner, *options.get("target_modules", [])]
    _both_ways(case, options, tmp_path)


def _both_ways(case: PeftCase, options: dict[str, Any], tmp_path: Path) -> None:
    """A model of PEFT, everything that it trains generic, has our logits; and so has PEFT's of what we save."""
    initial = options.setdefault("init_lora_weights", False)
    narrow = initial in ("pissa", "olora", "mica")  # PEFT decomposes no fp64
    dtype, bound = (torch.float32, 2e-4) if narrow else (torch.float64, 2e-5)
    settings = peft.LoraConfig(r=2, lora_alpha=3, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(case.fresh(dtype), settings)
    with torch.no_grad():
        for path, leaf in model.named_parameters():
            if leaf.requires_grad:
                leaf.copy_(generic(path, leaf))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "theirs")
    ours = lora.load_adapters(tmp_path / "theirs", case.config, case.base(dtype))
    assert _compared(case, ours, model) <= bound
    assert _compared(case, case.base(dtype), model) > 1e-2, "nothing is trained"
    lora.save_adapters(tmp_path / "ours", case.config, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(case.fresh(dtype), tmp_path / "ours")
    assert _compared(case, ours, again) <= bound
    back = lora.load_adapters(tmp_path / "ours", case.config, case.base(dtype))
    flat = tree.flatten(ours)
    assert all(torch.equal(leaf, flat[path]) for path, leaf in tree.flatten(back).items())


def _compared(case: PeftCase, ours: Any, model: Any) -> float:
    """`_off`; of a reader of images for text alone."""
    if case.values is not None:
        return _off(case, ours, model)
    tokens = torch.arange(3, 15).view(1, 12)
    text = ours["text"]
    found = fnmodels.forward(text, *fnmodels.prepare(case.config.text, tokens), config=case.config.text)
    with torch.no_grad():
        wanted = model.eval()(input_ids=tokens).logits
    return float((found - wanted).abs().max() / wanted.std())


FORMS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "pissa_rslora": {"init_lora_weights": "pissa", "use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "biases": {"bias": "all"},
    "own_biases": {"bias": "lora_only"},
    "patterns": {"rank_pattern": {r".*\.0\..*": 4, "absent": 9}, "alpha_pattern": {"absent": 9, r"^.*\.1\..*": 7}},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama_attention_bias", "gpt2", "phi3", "bert"])
def test_forms_of_adapters_equal_pefts_both_ways(name: str, form: str, tmp_path: Path) -> None:
    """Of separate, transposed and fused weights, and of an encoder."""
    if (name, form) == ("gpt2", "olora"):
        pytest.skip("PEFT takes OLoRA of a transposed weight for that of another shape")
    case = _case(name)
    modules = [name for name in linear_modules(case.model()) if "layer" in name or ".h." in name]
    _both_ways(case, dict(FORMS[form]) | {"target_modules": modules}, tmp_path)


# {architecture: the modules of its head}, which PEFT saves in full for SEQ_CLS and TOKEN_CLS
HEADS = {
    "LlamaForSequenceClassification": ("score",),
    "Qwen3ForTokenClassification": ("score",),
    "BertForSequenceClassification": ("classifier",),
    "BertForTokenClassification": ("classifier",),
    "RobertaForSequenceClassification": ("classifier",),
    "DistilBertForSequenceClassification": ("pre_classifier", "classifier"),
    "ModernBertForSequenceClassification": ("head", "classifier"),
}


@pytest.mark.parametrize("architecture", HEADS)
def test_heads_with_labels_are_saved_in_full(architecture: str, tmp_path: Path) -> None:
    model_type = architecture.partition("For")[0].lower()
    values = next(case.values for case in cases() if case.values and case.config.model_type == model_type)
    values |= {"architectures": [architecture], "num_labels": 3, "id2label": {"0": "a", "1": "b", "2": "c"}}
    values = {name: value for name, value in values.items() if name != "num_labels"}
    config = fnmodels.family_for(model_type).Config.from_hf(values)
    case = decoder_case(Case(model_type, architecture, values, config))
    settings = {"modules_to_save": list(HEADS[architecture]), "init_lora_weights": False}
    settings["task_type"] = "SEQ_CLS" if "Sequence" in architecture else "TOKEN_CLS"
    inner = [name for name in linear_modules(case.model()) if "layer" in name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(case.fresh(), peft.LoraConfig(r=2, target_modules=inner, **settings))
        with torch.no_grad():
            for path, leaf in model.named_parameters():
                if leaf.requires_grad:
                    leaf.copy_(generic(path, leaf))
        model.save_pretrained(tmp_path / "theirs")
    ours = lora.load_adapters(tmp_path / "theirs", config, case.base())
    want = weights_by_path(config, _merged(model))
    assert worst(merged_by_path(ours), want)[0] <= 1e-6
    full = {path for path, leaf in params_by_path(ours).items() if isinstance(leaf, lora.Replaced)}
    assert full and all(path.startswith(("score", "head")) for path in full)
    lora.save_adapters(tmp_path / "ours", config, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(case.fresh(), tmp_path / "ours")
    assert again.peft_config["default"].task_type == settings["task_type"]
    assert worst(weights_by_path(config, _merged(again)), want)[0] <= 1e-6
