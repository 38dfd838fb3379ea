"""Adapters in PEFT's format equal PEFT's, both ways, over every model that transformers has."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.common import registry, storage
from fnmodels.models.common.registry import hf_names
from params import lora
from params.checkpoint.module_names import module_names
from params.lora.leaves import params_by_path
from params.lora.peft_modules import layout_of
from tests.support.cases import Case, batch_of, cases, generic, segments
from tests.support.doubles import KeepsDoubles, doubled, with_exact_frequencies, with_rounded_tables
from tests.support.naming import fewest, pairs_of
from tests.support.oracle import model_of, on_disk
from tests.support.peft_cases import (
    PeftCase,
    compared_names,
    decoder_case,
    families_in,
    in_memory,
    linear_modules,
    merged_by_path,
    peft_cases,
    weights_by_path,
    worst,
)

# which transformers computes in each call, in fp32; decays of MiniMax
FP32_TABLES = {"phimoe": 2e-6, "minimax": 2e-6}
MAMBA_TYPES = ("falcon_h1", "mamba2", "nemotron_h", "mamba", "falcon_mamba", "jamba")
# transformers' routers refuse another dtype than that of their weights, and PEFT's comparison is in fp64
ROUTERS = ("inkling2", "inkling2_short", "inkling2_loop", "inkling2_loop_deep")
ALL = pytest.mark.parametrize("case", peft_cases(), ids=str)
DECODERS = [case for case in peft_cases() if case.values is not None]
NAMINGS = fewest({case: pairs_of(module_names(case.config)) | families_in(case.config) for case in peft_cases()})
# Llama 4's router, whose two results PEFT cannot add to; Whisper's head, its embedding whatever a config says
OTHERS = (".router", "proj_out")
# PEFT has adapters of its own for each use of a shared block, whose weights are one parameter here.
_OF_BLOCK = ("feed_forward.gate_up_proj", "feed_forward.down_proj", *(f"self_attn.{name}_proj" for name in "qkvo"))
_LISTS = (*(f"self_attn.linear_{name}_adapter_list" for name in "qkv"), "feed_forward.gate_up_proj_adapter_list")
_OF_BLOCK += tuple(f"{name}.{use}.{half}" for name in _LISTS for use in range(2) for half in range(2))
# PEFT renames these on loading by a pattern of transformers that their new names match too: they are renamed twice.
UNREAD = {
    "esm": ("contact_head.regression",),
    # matrices that no linear map applies, and one that PEFT renames as in files
    **dict.fromkeys(
        ("inkling2_text", "inkling2_loop_text"),
        ("relative_position_bias.proj", "norm.scale", "_input.query", "sconv.weight_proj"),
    ),
    "gemma3n_text": tuple(f"projections.{row}" for row in range(2)),  # one parameter here
    "deepseek_v4": (".o_a_proj",),  # a product for each group of heads
    "zamba2": tuple(f"shared_transformer.{name}" for name in _OF_BLOCK),
    "mistral_large4_text": ("mlp.gate", *(f"experts.{name}_proj" for name in ("gate", "up", "gate_up", "down"))),
    "laguna": tuple(f".shared_experts.{name}_proj" for name in ("gate", "up", "down")),
}


@pytest.fixture(autouse=True)
def _without_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT writes a README beside each adapter, which takes a third of a save."""
    monkeypatch.setattr(peft.PeftModel, "create_or_update_model_card", lambda self, folder: None)


@ALL
def test_names_in_memory_are_those_of_transformers(case: PeftCase) -> None:
    """Every parameter lies where `module_names` says."""
    held, flat = in_memory(case.model()), tree.flatten(case.params())
    assert module_names(case.config).keys() == flat.keys()
    for path, stored in compared_names(case.config).items():
        assert torch.equal(storage.extract_parameter(stored, held), flat[path]), path


def _adapted(case: PeftCase, **options: Any) -> Any:
    """PEFT's model with random adapters on every linear map and every stack of experts."""
    model, layout = case.fresh(), layout_of(case.config).memory
    mamba = getattr(model.config, "model_type", "") in MAMBA_TYPES
    others = (*OTHERS, ".out_proj", ".dt_proj") if mamba else OTHERS  # PEFT refuses those, or models pass them by
    others += ("lm_head",) if case.name in ("bart", "m2m_100") else ()  # always their embedding
    others += UNREAD.get(getattr(model.config, "model_type", ""), ())
    modules = [name for name in linear_modules(model) if not name.endswith(others)]
    unknown = [name for name in modules if name not in layout.linear]
    assert not unknown, f"no adapter of {unknown}"
    stacked = [f"{container}.{name}" for container, names in layout.stacked.items() for name in names]
    routers = [name for name, places in layout.linear.items() if places[0].path.endswith(".router")]
    stacked += [f"{name}.weight" for name in routers if name not in modules and not name.endswith(OTHERS)]
    unread = UNREAD.get(getattr(model.config, "model_type", ""), ())
    stacked = [name for name in stacked if not name.removesuffix(".weight").endswith(unread)] if unread else stacked
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
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return peft.get_peft_model(model, settings)


def _off(case: PeftCase, ours: Any, model: Any) -> float:
    """How far our logits are from PEFT's, relative to their deviation, in fp64; of a reader of images for text alone.

    transformers norms, rotates and scans in fp32 "for accuracy", which is too coarse here.
    """
    ours = tree.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, ours)
    batch = dataclasses.replace(batch_of(case.config, segments((12,), (12,))), length=12) if case.values else None
    tokens = torch.arange(3, 15).view(1, 12) if batch is None else batch.tokens
    config = case.config if batch is not None else case.config.text
    with torch.no_grad():
        with KeepsDoubles():
            theirs = with_rounded_tables(with_exact_frequencies(doubled(model.eval()), config))(input_ids=tokens)
        if batch is not None:
            found = batch.forward(ours, kernel="math")
        else:
            found = fnmodels.forward(ours["text"], *fnmodels.prepare(config, tokens), config=config, kernel="math")
    wanted = theirs.logits if hasattr(theirs, "logits") else theirs[0]
    return float((found - wanted).abs().max() / wanted.std())


def _merged(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.merge_and_unload()


# {family without a case: why PEFT has no adapters of its models}
UNKNOWN = "transformers does not have its model types"
WITHOUT_PEFT = dict.fromkeys(
    (
        "decoder.bailing_moe",
        "decoder.deepseek_v41",
        "decoder.kimi_k3",
        "decoder.nemotron_nas",
        "decoder.ouro",
        "decoder.rwkv7",
        "diffusion.flux",
        "encoder.llada",
    ),
    UNKNOWN,
)
WITHOUT_PEFT["decoder.longcat_flash"] = "transformers' stacks of experts have more of them than files do"


def test_every_family_that_peft_can_hold_is_run() -> None:
    run = {name.partition(".models.")[2] for case in NAMINGS for name in families_in(case.config)}
    types: dict[str, list[str]] = {}
    for model_type, module in registry.every_model().items():
        types.setdefault(module.partition(".models.")[2], []).append(model_type)
    assert types.keys() - run == WITHOUT_PEFT.keys()
    for family, reason in WITHOUT_PEFT.items():
        known = [model_type for model_type in types[family] if model_type in CONFIG_MAPPING]
        assert (reason == UNKNOWN) == (not known), (family, known)
    values = next(case.values for case in cases() if case.name == "longcat_flash")
    stack = model_of(values).model.layers[0].mlp.experts.gate_up_proj
    assert len(stack) > values["n_routed_experts"]


@pytest.mark.parametrize("case", NAMINGS, ids=str)
def test_adapters_of_every_naming_equal_pefts_both_ways(case: PeftCase, tmp_path: Path) -> None:
    model = _adapted(case)
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours = lora.load_adapters(tmp_path / "theirs", case.config, case.base())
    if case.values is not None:
        assert _off(case, ours, model) <= FP32_TABLES.get(case.name, 1e-6)
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


@pytest.mark.parametrize("initial", ["pissa", "olora"])
def test_a_rank_above_a_side_of_the_weight_is_that_side(initial: str, tmp_path: Path) -> None:
    """Where PEFT begins with factors of the weight; the scale is that of the rank in the file."""
    case = _case("llama_attention_bias")
    modules = [name for name in linear_modules(case.model()) if "layer" in name]
    _both_ways(case, {"r": 1000, "init_lora_weights": initial, "target_modules": modules}, tmp_path)


def _both_ways(case: PeftCase, options: dict[str, Any], tmp_path: Path) -> None:
    """A model of PEFT, everything that it trains generic, has our logits; and so has PEFT's of what we save."""
    initial = options.setdefault("init_lora_weights", False)
    narrow = initial in ("pissa", "olora", "mica")  # PEFT decomposes no fp64, and subtracts from the base in fp32
    # sums of fp32 in other orders: 4e-6 on one processor, 6.1e-6 on another
    dtype, bound = (torch.float32, 1e-5) if narrow else (torch.float64, 1e-6)
    settings = peft.LoraConfig(**{"r": 2, "lora_alpha": 3} | options)
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
    assert _off(case, ours, model) <= bound
    assert _off(case, case.base(dtype), model) > 1e-2, "nothing is trained"
    lora.save_adapters(tmp_path / "ours", case.config, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(case.fresh(dtype), tmp_path / "ours")
    assert _off(case, ours, again) <= bound
    back = lora.load_adapters(tmp_path / "ours", case.config, case.base(dtype))
    flat = tree.flatten(ours)
    assert all(torch.equal(leaf, flat[path]) for path, leaf in tree.flatten(back).items())


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
    values = values | {"architectures": [architecture], "id2label": {"0": "a", "1": "b", "2": "c"}}
    config = fnmodels.family_for(model_type).Config.from_hf(values)
    case = decoder_case(Case(model_type, architecture, values, config))
    settings = {"modules_to_save": list(HEADS[architecture]), "init_lora_weights": False}
    settings["task_type"] = "SEQ_CLS" if "Sequence" in architecture else "TOKEN_CLS"
    settings["bias"] = "all" if architecture.startswith("Roberta") else "none"  # also of what is replaced
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
    others = [path for path in full if not path.startswith(("score", "head"))]
    assert len(full) > len(others) and bool(others) == (settings["bias"] == "all")
    lora.save_adapters(tmp_path / "ours", config, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(case.fresh(), tmp_path / "ours")
    assert again.peft_config["default"].task_type == settings["task_type"]
    assert worst(weights_by_path(config, _merged(again)), want)[0] <= 1e-6


EXPERTS = ("mixtral", "deepseek_v3", "qwen2_moe", "nemotron_h_moe", "lfm2_moe")


@pytest.mark.parametrize("name", [*EXPERTS, "phi3", "image_llava_llama", "image_gemma3"])
def test_names_of_files_are_read_too(name: str, tmp_path: Path) -> None:
    """As PEFT with transformers 4 and others name modules: one for each expert, and prefixes as in checkpoints."""
    case, names = _case(name), hf_names(_case(name).config)
    state = {key: leaf.double() for key, leaf in on_disk(case.model()).items()}
    modules = layout_of(case.config).files.linear
    assert any(".experts." in module for module in modules) == (name in EXPERTS)
    tensors, want = {}, dict(state)
    for module, places in modules.items():
        if places[0].path.endswith("embed_tokens") or module not in {key.removesuffix(".weight") for key in state}:
            continue
        out_size, in_size = places[0].module_shape
        a, b = generic(f"{module}.A", torch.empty(2, in_size)), generic(f"{module}.B", torch.empty(out_size, 2))
        tensors |= {f"base_model.model.{module}.lora_{part}.weight": x for part, x in (("A", a), ("B", b))}
        delta = 1.5 * b.double() @ a.double()
        stored = state[f"{module}.weight"]
        want[f"{module}.weight"] = stored + (delta if delta.shape == stored.shape else delta.T)
    save_file(tensors, tmp_path / lora.WEIGHTS)
    (tmp_path / lora.CONFIG).write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 3}')
    merged = merged_by_path(lora.load_adapters(tmp_path, case.config, case.base()))
    assert len(tensors) > 10
    for path, stored in names.items():
        if all(each in want for each in storage.disk_names(stored)):  # towers are saved otherwise
            torch.testing.assert_close(merged[path], storage.extract_parameter(stored, want), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("architecture", ["LlamaModel", "BertModel", "Qwen3Model", "NomicBertModel", "GPT2Model"])
def test_models_without_a_head_have_no_prefix(architecture: str, tmp_path: Path) -> None:
    model_type = {"NomicBertModel": "nomic_bert"}.get(architecture, architecture.removesuffix("Model").lower())
    values = next(case.values for case in cases() if case.values and case.config.model_type == model_type)
    values = values | {"architectures": [architecture]}
    config = dataclasses.replace(fnmodels.family_for(model_type).Config.from_hf(values), head="none")
    case = decoder_case(Case(model_type, architecture, values, config))
    modules = [name for name in linear_modules(case.model()) if "layer" in name or name.startswith("h.")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = peft.LoraConfig(r=2, target_modules=modules, init_lora_weights=False, task_type="FEATURE_EXTRACTION")
        model = peft.get_peft_model(case.fresh(), settings)
        model.save_pretrained(tmp_path / "theirs")
        params = P.from_tensors(config, on_disk(case.fresh()).items())
        ours = lora.load_adapters(tmp_path / "theirs", config, params)
        lora.save_adapters(tmp_path / "ours", config, ours)
        again = _merged(peft.PeftModel.from_pretrained(case.fresh(), tmp_path / "ours"))
    want, found = in_memory(_merged(model)), in_memory(again)
    assert modules and all(torch.allclose(found[name], leaf, atol=1e-9) for name, leaf in want.items())
    assert len([leaf for leaf in params_by_path(ours).values() if isinstance(leaf, lora.Lora)]) >= len(modules)


@pytest.mark.parametrize("name", ["image_gemma3", "image_qwen3_vl", "image_llava_llama"])
def test_adapters_of_a_wrappers_text_fit_the_text_alone(name: str, tmp_path: Path) -> None:
    case = _case(name)
    modules = [module for module in linear_modules(case.model()) if ".language_model.layers." in module]
    model = peft.get_peft_model(case.fresh(), peft.LoraConfig(r=2, target_modules=modules, init_lora_weights=False))
    model.save_pretrained(tmp_path)
    both = lora.load_adapters(tmp_path, case.config, case.base())
    text = lora.load_adapters(tmp_path, case.config.text, case.base()["text"])
    wanted, found = tree.flatten(both["text"]), tree.flatten(text)
    assert found.keys() == wanted.keys() and any(path.endswith(".a") for path in found)
    assert all(torch.equal(leaf, wanted[path]) for path, leaf in found.items())


OURS = {
    "llama_tied": (("embed_tokens", "q_proj"), ("norm", "layers.*.input_layernorm")),
    "llama": (("embed_tokens", "lm_head", "layers.1.mlp.*_proj"), ("norm",)),
    "phi3": (("q_proj", "v_proj", "up_proj"), ("lm_head",)),
    "mixtral": (("layers.*.experts.up_proj", "o_proj"), ()),
    "gpt_oss": (("layers.*.experts.gate_proj", "layers.*.experts.down_proj"), ()),
    "gpt2": (
        ("k_proj", "down_proj"),
        ("layers.0.attention.q_bias", "layers.0.attention.k_bias", "layers.0.attention.v_bias"),
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_what_is_trained_here_is_read_by_peft_and_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Parts of fused weights, stacks of experts, a tied embedding, norms and biases."""
    case, (targets, full) = _case(name), OURS[name]
    made = lora.unfreeze(lora.add(case.config, case.base(), rank=2, alpha=3, targets=targets), full)
    trained = tree.map_with_path(lambda path, leaf: generic(path, leaf).to(leaf), lora.adapters(made))
    ours = lora.attach(case.base(), trained)
    lora.save_adapters(tmp_path, case.config, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(case.fresh(), tmp_path)
    assert _off(case, ours, model) <= FP32_TABLES.get(case.name, 1e-6)
    assert _off(case, case.base(), model) > 1e-2
    back = tree.flatten(lora.adapters(lora.load_adapters(tmp_path, case.config, case.base())))
    assert back.keys() == tree.flatten(trained).keys()
    assert all(torch.equal(leaf, back[path]) for path, leaf in tree.flatten(trained).items())
    spec = tree.flatten(lora.spec(case.config, ours))
    assert {path for path, leaf in spec.items() if leaf.trainable} == back.keys()


def test_parameters_that_peft_saves_together_are_named() -> None:
    case = _case("gpt2")
    made = lora.unfreeze(case.base(), ("layers.0.attention.q_bias",))
    with pytest.raises(P.UnsupportedError, match=r"PEFT saves layers\.0\.attention\.k_bias with it: unfreeze both"):
        list(lora.export_adapters(case.config, lora.adapters(made)))
    with pytest.raises(ValueError, match="'skore' names no parameter"):
        lora.unfreeze(case.base(), ("skore",))
    with pytest.raises(ValueError, match=r"q_bias has an adapter already, or is trained in full"):
        lora.unfreeze(made, ("layers.0.attention.q_bias",))
    tied = _case("llama_tied")
    embedding = lora.adapters(lora.add(tied.config, tied.base(), rank=2, targets=("embed_tokens",)))["embed_tokens"]
    split = {"embed_tokens": lora.TwoUses(None, head=embedding)}
    with pytest.raises(P.UnsupportedError, match="tie_word_embeddings=False"):
        lora.merge(lora.attach(tied.base(), split))


ROUTED = [case for case in NAMINGS if case.values is not None and any(layout_of(case.config).memory.stacked)]


@pytest.mark.parametrize("case", ROUTED, ids=str)
def test_peft_reads_adapters_of_every_linear_map_beside_experts(case: PeftCase, tmp_path: Path) -> None:
    """PEFT takes names such as gate_proj for those of experts in files of older models, wherever they are."""
    names = {path: storage.disk_names(stored)[0] for path, stored in module_names(case.config).items()}
    # PEFT refuses the second in models with Mamba layers, which read the third without its module
    left: tuple[str, ...] = ("lm_head.weight", ".out_proj.weight", ".dt_proj.weight")
    left += tuple(f"{name}{end}" for name in UNREAD.get(case.config.model_type, ()) for end in (".weight", ""))
    targets = [path for path in lora.targets(case.config) if not names[path].endswith(left)]
    made = lora.add(case.config, case.base(), rank=2, targets=targets)
    trained = tree.map_with_path(lambda path, leaf: generic(path, leaf).to(leaf), lora.adapters(made))
    ours = lora.attach(case.base(), trained)
    lora.save_adapters(tmp_path, case.config, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(case.fresh(), tmp_path)
    if case.name not in ROUTERS:
        assert _off(case, ours, model) <= FP32_TABLES.get(case.name, 1e-6)
    off, path = worst(merged_by_path(ours), weights_by_path(case.config, _merged(model)))
    assert off <= 1e-6, f"{path} is off by {off:.1e}"
