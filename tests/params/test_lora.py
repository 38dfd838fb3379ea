"""LoRA: only adapters are trained, merged weights equal the model, and files are compatible with PEFT."""

import dataclasses
import json
import re
from typing import Any

import peft
import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.ops.dtypes import upcast
from params import lora
from params.checkpoint.manifest import ADAPTER_MANIFEST
from params.lora import adapter_config
from tests.support import adapters as every_target
from tests.support.cases import batch_of, cases, generic, generic_params, off, richest, segments
from train import adamw, init_state, make_step, next_token_loss

CASE = next(case for case in cases() if case.name == "llama_biases" or case.name == "llama")
CONFIG = CASE.config
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _adapted(
    config: Any = CONFIG, targets: tuple[str, ...] = ALL, rank: int = 3, dtype: torch.dtype = torch.float32
) -> Any:
    """Adapters with random a and b, since b starts at zero."""
    params = lora.add(config, generic_params(config, dtype), rank=rank, alpha=2 * rank, targets=targets)
    flat = tree.flatten(params)
    noise = {path: generic(path, t).to(dtype) if path.endswith((".a", ".b")) else t for path, t in flat.items()}
    values = iter(noise.values())
    return tree.map(lambda _: next(values), params)


def _logits(params: Any, config: Any = CONFIG, kernel: str = "auto") -> torch.Tensor:
    return batch_of(config, segments((7, 5), (12,))).forward(params, kernel=kernel)


def test_fresh_adapters_change_no_bit_and_copy_no_weight() -> None:
    params = generic_params(CONFIG)
    adapted = lora.add(CONFIG, params, rank=4)
    assert torch.equal(_logits(adapted), _logits(params))
    assert adapted["layers"][0]["attention"]["q_proj"].weight is params["layers"][0]["attention"]["q_proj"]
    again = lora.add(CONFIG, params, rank=4)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(adapted), tree.leaves(again), strict=True))


def test_merged_weights_are_the_adapted_model_in_every_family() -> None:
    for name, config in {case.family: case.config for case in cases()}.items():
        leaves = tree.flatten(fnmodels.family_of(config).spec(config)).items()
        linear = {path.rpartition(".")[2] for path, leaf in leaves if lora.is_linear(path, leaf)}
        adapted = _adapted(config, tuple(sorted(linear)), dtype=torch.float64)
        plain = _logits(generic_params(config, torch.float64), config, "math")
        ours, merged = _logits(adapted, config, "math"), _logits(lora.merge(adapted), config, "math")
        assert off(ours, merged) < 1e-9, name
        assert off(ours, plain) > 1e-2, name


def test_adapters_come_off_their_weights_and_on_again() -> None:
    adapted, plain = _adapted(targets=("q_proj", "down_proj")), generic_params(CONFIG)
    alone = lora.adapters(adapted)
    assert {path.rpartition(".")[2] for path in tree.flatten(alone)} == {"a", "b"}
    for params in (
        plain,
        lora.add(CONFIG, plain, rank=2, targets=("q_proj", "k_proj")),
    ):  # existing adapters are replaced
        assert torch.equal(_logits(lora.attach(params, alone)), _logits(adapted))
    assert tree.leaves(lora.adapters(plain)) == []


def test_merged_to_a_millionth() -> None:
    adapted = tree.map(lambda t: t * 0.3, _adapted())
    assert float((_logits(adapted) - _logits(lora.merge(adapted))).abs().max()) <= 1e-6


def test_only_adapters_get_gradients_and_state() -> None:
    params = _adapted(targets=("q_proj", "layers.1.mlp.*"))
    optimizer = adamw(0.01, spec=lora.spec(CONFIG, params))
    made = batch_of(CONFIG, segments((7, 5), (12,)))
    batch = made.batch()
    step = make_step(lambda p, b: next_token_loss(p, b, config=CONFIG), optimizer)
    state = init_state(params, optimizer)
    adapters = {path for path in tree.flatten(params) if path.endswith((".a", ".b"))}
    assert {path.removeprefix("exp_avg.") for path in tree.flatten(state.opt_state) if "exp_avg." in path} == adapters
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    for path, value in tree.flatten(state.params).items():
        assert torch.equal(value, tree.flatten(params)[path]) == (path not in adapters), path


def test_transforms_and_compilation_go_through() -> None:
    params, batch = _adapted(), batch_of(CONFIG, segments((7, 5)))

    def loss(params: Any) -> torch.Tensor:
        return batch.forward(params).square().mean()

    grads = torch.func.grad(loss)(params)
    _, tangent = torch.func.jvp(loss, (params,), (params,))
    products = [(g * p).sum() for g, p in zip(tree.leaves(grads), tree.leaves(params), strict=True)]
    torch.testing.assert_close(tangent, torch.stack(products).sum(), rtol=1e-4, atol=1e-4)
    compiled = torch.compile(loss, fullgraph=True, backend="eager")(params)
    torch.testing.assert_close(compiled, loss(params), rtol=1e-5, atol=1e-5)


def test_our_own_files_come_back_bit_for_bit(tmp_path: Any) -> None:
    adapted = _adapted(targets=("q_proj", "layers.1.mlp.*"))
    lora.save_adapters(tmp_path / "a", CONFIG, adapted)
    again = lora.load_adapters(tmp_path / "a", CONFIG, generic_params(CONFIG))
    assert tree.flatten(again).keys() == tree.flatten(adapted).keys()
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(adapted), strict=True))
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [lora.CONFIG, lora.WEIGHTS, ADAPTER_MANIFEST]
    P.verify(tmp_path / "a")


def test_peft_reads_what_we_write_and_we_what_it_writes(tmp_path: Any) -> None:
    adapted = _adapted()
    P.save_pretrained(tmp_path / "base", CONFIG, generic_params(CONFIG))
    lora.save_adapters(tmp_path / "ours", CONFIG, adapted, base=str(tmp_path / "base"))
    batch = batch_of(CONFIG, segments((12,), (12,)))

    def theirs(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=batch.tokens, use_cache=False).logits

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    torch.testing.assert_close(theirs(model), batch.forward(adapted), rtol=0, atol=1e-4)

    model.save_pretrained(tmp_path / "theirs")
    back = lora.load_adapters(tmp_path / "theirs", CONFIG, generic_params(CONFIG))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(back), tree.leaves(adapted), strict=True))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("q_prj",), "'q_prj' names no parameter; linear weights end in .*q_proj"),
        (("norm",), "no weight of a linear map"),
        (("input_layernorm",), "no weight of a linear map"),
    ],
)
def test_targets_that_do_not_fit_are_named(targets: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lora.add(CONFIG, generic_params(CONFIG), rank=2, targets=targets)


def test_other_mistakes_are_named(tmp_path: Any) -> None:
    params = generic_params(CONFIG)
    with pytest.raises(ValueError, match="rank is 0"):
        lora.add(CONFIG, params, rank=0)
    with pytest.raises(ValueError, match="merge them first"):
        lora.add(CONFIG, _adapted(), rank=2)
    with pytest.raises(ValueError, match="no adapters"):
        lora.save_adapters(tmp_path, CONFIG, params)
    phi = next(case.config for case in cases() if case.name == "phi3")
    dora = lora.add(phi, generic_params(phi), rank=2, targets=("q_proj",), dora=True)
    with pytest.raises(P.UnsupportedError, match="q_proj has an adapter that PEFT's format has no place for"):
        lora.save_adapters(tmp_path, phi, dora)  # a magnitude of all rows of qkv_proj
    with pytest.raises(TypeError, match="matmul"):
        torch.matmul(torch.zeros(2, 3), lora.Lora(torch.zeros(4, 3), torch.zeros(1, 3), torch.zeros(4, 1)))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"peft_type": "IA3"}, P.UnsupportedError, "peft_type"),
        ({"use_dora": True}, P.MismatchError, "lora_magnitude_vector.weight: missing"),
        ({"use_dora": "yes"}, P.ConfigError, "use_dora 'yes'"),
        ({"rank_pattern": {"q_proj": 5}}, P.MismatchError, r"expected \[5, 32\], found \[3, 32\]"),
        ({"rank_pattern": {"q_proj": 0}}, P.ConfigError, "q_proj is 0"),
        ({"alpha_pattern": {"(a+)+": 2}}, P.UnsupportedError, "repeats a group or in more than 2 places"),
        ({"alpha_pattern": {"a*b*c*d": 2}}, P.UnsupportedError, "write the modules' names"),
        ({"rank_pattern": {f"x[{i}]": 2 for i in range(65)}}, P.UnsupportedError, "one of more than 64"),
        ({"alpha_pattern": {"(": 2}}, P.ConfigError, "no regular expression"),
        ({"rank_pattern": [3]}, P.ConfigError, "rank_pattern is"),
        ({"target_parameters": "experts"}, P.ConfigError, "target_parameters is"),
        ({"trainable_token_indices": {"embed_tokens": [-1]}}, P.ConfigError, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1, 2]}, P.UnsupportedError, "acts only behind these tokens"),
        ({"init_lora_weights": "pissa_niter_16"}, P.UnsupportedError, "a random projection"),
        (
            {"init_lora_weights": "corda"},
            P.UnsupportedError,
            "changed by its data; convert them by PEFT's path_initial",
        ),
        ({"init_lora_weights": "loftq"}, P.UnsupportedError, "its quantized form; merge them into the model in PEFT"),
        ({"init_lora_weights": "new"}, P.UnsupportedError, '"new" is unknown'),
        ({"use_future": True}, P.ConfigError, r"'use_future' is unknown.*ignore_fields=\('use_future',\)"),
        ({"bias": "some"}, P.ConfigError, "bias is"),
        ({"r": 0}, P.ConfigError, "r is 0"),
        ({"r": 5}, P.MismatchError, r"expected \[5, 32\], found \[3, 32\]"),
        ({"r": True}, P.ConfigError, "r is true"),
        ({"r": 10**400}, P.ConfigError, "r is 1000"),
        ({"lora_alpha": 10**400}, P.ConfigError, "lora_alpha 1000"),
        ({"lora_alpha": float("nan")}, P.ConfigError, "lora_alpha NaN"),
        ({"lora_alpha": False}, P.ConfigError, "lora_alpha false"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(tmp_path: Any, change: Any, kind: Any, words: str) -> None:
    lora.save_adapters(tmp_path, CONFIG, _adapted())
    values = json.loads((tmp_path / lora.CONFIG).read_text())
    (tmp_path / lora.CONFIG).write_text(json.dumps(values | change))
    with pytest.raises(kind, match=words):
        lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG))


# {what adapter_config.json says: the error}, beside adapters of q_proj in two layers
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, r"layers\.0\..*q_proj: .*exclude"),
    "a layer": (
        {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
        r"layers\.1\..*q_proj: .*exclude",
    ),
    "other modules": ({"target_modules": ["k_proj"]}, r"q_proj: .*exclude(.|\n)*k_proj: missing, target_modules"),
    "more modules": (
        {"target_modules": ["q_proj", "k_proj"]},
        r"layers\.1\..*k_proj: missing, target_modules names it",
    ),
    "no modules": (
        {"target_modules": None, "target_parameters": ["k_proj.weight"]},
        r"k_proj\.weight: missing, target_par",
    ),
    "an expression": ({"target_modules": ".*k_proj"}, "q_proj: .*exclude"),
    "excluded": ({"exclude_modules": ["layers.0.self_attn.q_proj"]}, r"layers\.0\..*q_proj: .*exclude"),
    "excluded by an expression": ({"exclude_modules": r".*1\.self_attn\.q_proj"}, r"layers\.1\..*q_proj: .*exclude"),
    "saved and adapted": ({"modules_to_save": ["self_attn"]}, "q_proj: .*exclude"),
    "saved": ({"modules_to_save": ["lm_head", "absent"]}, r"lm_head\.weight: missing, modules_to_save names it"),
    "saved norms": ({"modules_to_save": ["norm"]}, r"layers\.1\.input_layernorm\.weight: missing, modules_to_save"),
    "rows": ({"trainable_token_indices": [3]}, "embed_tokens: rows are missing, trainable_token_indices"),
    "parameters of another model": (
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]},
        r"target_parameters has 'experts\.gate_up_proj', which names no parameter",
    ),
    "no weight": ({"target_modules": ["q_proj"], "target_parameters": ["norm.weight"]}, "has 'norm.weight', which"),
    "a layer too many": (
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 1, 2]},
        r"layers_to_transform has 2, which the model has not: its layers are 0 to 1",
    ),
    "layers of other names": (
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "blocks"},
        r"layers_to_transform has 0, which the model has not: no module lies in a numbered layer",
    ),
    "rows by module": ({"trainable_token_indices": {"lm_head": [3]}}, "lm_head: rows are missing"),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_fields_that_contradict_the_tensors_are_refused(what: str, tmp_path: Any) -> None:
    """A save that was cut, or a field that was changed: PEFT would skip tensors, or lack some."""
    change, words = CONTRADICTIONS[what]
    lora.save_adapters(tmp_path, CONFIG, _adapted(targets=("q_proj",)))
    values = json.loads((tmp_path / lora.CONFIG).read_text())
    (tmp_path / lora.CONFIG).write_text(json.dumps(values | change))
    with pytest.raises(P.MismatchError, match=words):
        lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG))


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_the_file_lacks_are_named(bias: str, tmp_path: Any) -> None:
    config = next(case.config for case in cases() if case.name == "llama_attention_bias")
    adapted = lora.add(config, generic_params(config), rank=3, targets=("q_proj",))
    lora.save_adapters(tmp_path, config, adapted)
    values = json.loads((tmp_path / lora.CONFIG).read_text())
    (tmp_path / lora.CONFIG).write_text(json.dumps(values | {"bias": bias}))
    with pytest.raises(P.MismatchError, match=r"q_proj\.bias: missing, bias names it") as caught:
        lora.load_adapters(tmp_path, config, generic_params(config))
    assert ("k_proj.bias" in str(caught.value)) == (bias == "all")


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": ["q_proj", "absent"], "modules_to_save": ["score", "classifier"]},
        {"target_modules": r".*\.self_attn\.q_proj"},
        {
            "target_modules": r"^(?:.*?(?:text).*?(?:attn).*?(?:v_proj).*?)|(?:.*?self_attn.*?q_proj)$"
        },  # too slow to try
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]},
        {"exclude_modules": ["lm_head"], "future_switch": False, "future_config": {}},
    ],
    ids=range(6),
)
def test_fields_that_the_tensors_agree_with_are_read(change: dict[str, Any], tmp_path: Any) -> None:
    lora.save_adapters(tmp_path, CONFIG, adapted := _adapted(targets=("q_proj",)))
    values = json.loads((tmp_path / lora.CONFIG).read_text())
    (tmp_path / lora.CONFIG).write_text(json.dumps(values | change))
    again = lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(adapted), strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank_pattern": {"k_proj": 9, "q_proj": 3}}, "no adapter has a name that fits rank_pattern 'k_proj'."),
        ({"alpha_pattern": {"x[0-9]+.q_proj": 9}}, "fits alpha_pattern 'x[0-9]+.q_proj'."),
        ({"rank_pattern": {"v.proj": 9}, "alpha_pattern": {"x": 1}}, "rank_pattern 'v.proj', alpha_pattern 'x'."),
        ({"exclude_modules": ["absent"]}, "exclude_modules names no module of the model: 'absent'"),
        ({"exclude_modules": ".*absent"}, "exclude_modules names no module of the model: '.*absent'"),
    ],
)
def test_entries_that_change_nothing_are_warned_of_as_in_peft(change: Any, words: str, tmp_path: Any) -> None:
    lora.save_adapters(tmp_path, CONFIG, adapted := _adapted(targets=("q_proj",)))
    values = json.loads((tmp_path / lora.CONFIG).read_text())
    (tmp_path / lora.CONFIG).write_text(json.dumps(values | change))
    with pytest.warns(UserWarning, match=re.escape(words)) as caught:
        again = lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG))
    assert len(caught) == 1
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(adapted), strict=True))


def test_rows_of_tokens_beyond_the_vocabulary_are_refused(tmp_path: Any) -> None:
    lora.save_adapters(tmp_path, CONFIG, _adapted(targets=("q_proj",)))
    values = json.loads((tmp_path / lora.CONFIG).read_text())
    (tmp_path / lora.CONFIG).write_text(json.dumps(values | {"trainable_token_indices": [CONFIG.vocab_size]}))
    file = tmp_path / "adapter_model.safetensors"
    rows = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 32)}
    save_file(load_file(file) | rows, file)
    with pytest.raises(P.MismatchError, match=f"trainable_token_indices has {CONFIG.vocab_size}, and the vocabulary"):
        lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG))


def test_rank_and_alpha_are_pefts_where_a_file_has_none(tmp_path: Any) -> None:
    adapted = lora.add(CONFIG, generic_params(CONFIG), rank=8, alpha=8.0, targets=("q_proj",))
    lora.save_adapters(tmp_path, CONFIG, adapted)
    values = json.loads((tmp_path / lora.CONFIG).read_text())
    assert (values.pop("r"), values.pop("lora_alpha")) == (peft.LoraConfig().r, peft.LoraConfig().lora_alpha)
    (tmp_path / lora.CONFIG).write_text(json.dumps(values))
    again = lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(adapted), strict=True))


@pytest.mark.parametrize(
    "pattern", ["q.proj", "self_attn.q.proj", r"self_attn\.q_proj", r"self_attn\.q.proj", "q\\.proj"]
)
def test_a_dot_in_a_pattern_is_any_character_as_in_peft(pattern: str, tmp_path: Any) -> None:
    module = "model.layers.0.self_attn.q_proj"
    (tmp_path / lora.CONFIG).write_text(json.dumps({"peft_type": "LORA", "rank_pattern": {pattern: 3}}))
    wanted = 3 if get_pattern_key([pattern], module) == pattern else 8
    assert adapter_config.read_config(tmp_path / lora.CONFIG).rank_of(module) == wanted


def test_every_field_of_pefts_config_is_read_neutral_or_refused(tmp_path: Any) -> None:
    """All at their defaults are read; those that change what an adapter computes are refused by name."""
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    kinds = (adapter_config.READ, set(adapter_config.NEUTRAL), set(adapter_config.REFUSED))
    assert fields <= set.union(*map(set, kinds)), "a field of PEFT's LoraConfig is ignored by accident"
    assert sum(map(len, kinds)) == len(set.union(*map(set, kinds))), "a field is of two kinds"
    lora.save_adapters(tmp_path, CONFIG, _adapted())
    file = tmp_path / lora.CONFIG
    values = peft.LoraConfig().to_dict() | json.loads(file.read_text())
    file.write_text(json.dumps(values | {"use_future": None, "_note": 1}))
    lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG))
    for name in adapter_config.REFUSED:
        file.write_text(json.dumps(values | {name: [[0, 2]] if name == "layer_replication" else True}))
        with pytest.raises(P.UnsupportedError, match=name):
            lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG))
    file.write_text(json.dumps(values | {"use_future": 1}))
    lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG), ignore_fields=("use_future",))
    for name in ("lora_alpha", "alora_invocation_tokens", "use_futrue"):
        with pytest.raises(adapter_config.ConfigError, match=f'ignore_fields has "{name}", which is no unknown field'):
            lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG), ignore_fields=("use_future", name))
    with pytest.raises(TypeError, match="ignore_fields is 'use_future'; it is a tuple of names"):
        lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG), ignore_fields="use_future")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_adapters_that_are_no_floats_are_refused_and_not_cast(tmp_path: Any, dtype: torch.dtype) -> None:
    lora.save_adapters(tmp_path, CONFIG, _adapted())
    tensors = {name: value.to(dtype) for name, value in load_file(tmp_path / lora.WEIGHTS).items()}
    save_file(tensors, tmp_path / lora.WEIGHTS)
    with pytest.raises(P.UnsupportedError, match=r"lora_A\.weight' is .*; weights are F64, F32, F16 or BF16"):
        lora.load_adapters(tmp_path, CONFIG, generic_params(CONFIG))


@pytest.mark.parametrize("form", ["rslora", "dora"])
def test_rslora_and_dora_are_those_of_peft(tmp_path: Any, form: str) -> None:
    """PEFT draws an adapter, ours has its outputs; merged, trained a step and saved, PEFT has ours."""
    P.save_pretrained(tmp_path / "base", CONFIG, generic_params(CONFIG))
    flags = {f"use_{form}": True}
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **flags
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    model = peft.get_peft_model(base, settings).eval()
    batch = batch_of(CONFIG, segments((6,), (6,)))

    def theirs(model: Any) -> torch.Tensor:
        return model(input_ids=batch.tokens, use_cache=False).logits

    model.save_pretrained(tmp_path / "theirs")
    adapted = lora.load_adapters(tmp_path / "theirs", CONFIG, generic_params(CONFIG))
    torch.testing.assert_close(_logits_of(batch, adapted), theirs(model).detach(), rtol=0, atol=1e-4)
    torch.testing.assert_close(_logits_of(batch, lora.merge(adapted)), theirs(model).detach(), rtol=0, atol=1e-4)
    trained = tree.map(lambda t: t.detach().requires_grad_(), lora.adapters(adapted))
    grads = torch.autograd.grad(_logits_of(batch, lora.attach(adapted, trained)).square().sum(), tree.leaves(trained))
    theirs(model).square().sum().backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and "lora_" in n}
    for got, want in zip(sorted(map(torch.norm, grads)), sorted(map(torch.norm, wanted.values())), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
    moved = tree.map(lambda t: 1.1 * t, lora.adapters(adapted))
    lora.save_adapters(tmp_path / "ours", CONFIG, lora.attach(adapted, moved))
    again = peft.PeftModel.from_pretrained(model.unload(), tmp_path / "ours").eval()
    torch.testing.assert_close(
        _logits_of(batch, lora.attach(adapted, moved)), theirs(again).detach(), rtol=0, atol=1e-4
    )


def _logits_of(batch: Any, params: Any) -> torch.Tensor:
    return batch.forward(params, kernel="math")


def test_forms_by_their_formulas() -> None:
    params = generic_params(CONFIG, torch.float64)
    weight = params["layers"][0]["attention"]["q_proj"]
    added = lora.add(CONFIG, params, rank=4, alpha=3, rslora=True, dora=True, targets=("q_proj",))
    node = added["layers"][0]["attention"]["q_proj"]
    assert node.scale == 3 / 2
    batch = batch_of(CONFIG, segments((6,)))
    torch.testing.assert_close(_logits_of(batch, added), _logits_of(batch, params))
    b = generic("b", node.b).double()
    total = weight + 1.5 * b @ node.a
    moved = lora.Lora(weight, node.a, b, 1.5, 2 * node.magnitude)
    want = 2 * weight.norm(dim=1, keepdim=True) * total / total.norm(dim=1, keepdim=True)
    torch.testing.assert_close(moved.merged(), want)
    x, bias = torch.ones(2, weight.shape[1], dtype=torch.float64), torch.ones(len(weight), dtype=torch.float64)
    torch.testing.assert_close(torch.nn.functional.linear(x, moved, bias), x @ want.T + 1)
    spec = tree.flatten(lora.spec(CONFIG, added))
    assert [p for p, leaf in spec.items() if leaf.trainable][:3] == [
        f"layers.0.attention.q_proj.{name}" for name in ("a", "b", "magnitude")
    ]


@pytest.mark.parametrize("dora", [False, True])
def test_experts_have_adapters(tmp_path: Any, dora: bool) -> None:
    """Each expert's own low-rank product, trained and merged; on disk one module per expert."""
    config = next(case.config for case in cases() if case.name == "mixtral")
    plain = generic_params(config, torch.float64)
    added = lora.add(config, plain, rank=2, targets=("layers.*.experts.*_proj", "q_proj"), dora=dora)
    fresh = _logits_of(batch_of(config, segments((7, 5))), added)
    torch.testing.assert_close(fresh, _logits_of(batch_of(config, segments((7, 5))), plain))
    noisy = lora.attach(plain, tree.map_with_path(lambda p, t: generic(p, t).double(), lora.adapters(added)))
    batch = batch_of(config, segments((7, 5)))
    node, weight = noisy["layers"][0]["mlp"]["experts"]["up_proj"], plain["layers"][0]["mlp"]["experts"]["up_proj"]
    each = torch.stack([w + b @ a for w, a, b in zip(weight, node.a, node.b, strict=True)])
    each = node.magnitude[..., None] * each / each.norm(dim=-1, keepdim=True) if dora else each
    torch.testing.assert_close(lora.merge(noisy)["layers"][0]["mlp"]["experts"]["up_proj"], each)
    for experts in ("loop", "dense"):
        ours = batch.forward(noisy, kernel="math", experts=experts)
        torch.testing.assert_close(ours, batch.forward(lora.merge(noisy), kernel="math", experts=experts))
    assert off(ours, _logits_of(batch, plain)) > 1e-2
    trained = tree.map(lambda t: t.detach().requires_grad_(), lora.adapters(noisy))
    loss = batch.forward(lora.attach(plain, trained), kernel="math").square().sum()
    assert all(bool(g.any()) for g in torch.autograd.grad(loss, tree.leaves(trained)))
    lora.save_adapters(tmp_path, config, noisy)
    again = lora.load_adapters(tmp_path, config, plain)
    assert tree.flatten(again).keys() == tree.flatten(noisy).keys()
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(noisy), strict=True))
    leaves = tree.flatten(lora.spec(config, noisy))
    assert all(leaves[path].shape == value.shape for path, value in tree.flatten(noisy).items())


def test_routers_have_adapters_from_files_in_the_routers_dtype() -> None:
    """As PEFT's "all-linear" and target_parameters give them: merged, of each row, with gradients."""
    config = next(case.config for case in cases() if case.name == "qwen3_moe")
    plain = generic_params(config, torch.float64)
    batch = batch_of(config, segments((7,), (7,)))

    def adapted(seed: int) -> Any:
        random = torch.Generator().manual_seed(seed)
        factors = [
            torch.randn(size, generator=random).double() for size in ((2, config.hidden_size), (config.num_experts, 2))
        ]
        layer = {**plain["layers"][0], "mlp": {**plain["layers"][0]["mlp"]}}
        layer["mlp"]["router"] = lora.Lora(layer["mlp"]["router"], *factors, scale=0.5)
        return {**plain, "layers": [layer, *plain["layers"][1:]]}

    both = [adapted(seed) for seed in (0, 1)]
    each = [batch.forward(one, kernel="math") for one in both]
    for one, logits in zip(both, each, strict=True):
        torch.testing.assert_close(logits, batch.forward(lora.merge(one), kernel="math"))
    assert off(each[0], each[1]) > 1e-3
    rows = lora.per_row(plain, [lora.adapters(one) for one in both], torch.tensor([1, 0]))
    torch.testing.assert_close(batch.forward(rows, kernel="math"), torch.stack([each[1][0], each[0][1]]))
    trained = tree.map(lambda leaf: leaf.detach().requires_grad_(), lora.adapters(both[0]))
    loss = batch.forward(lora.attach(plain, trained), kernel="math").square().sum()
    assert all(bool(grad.any()) for grad in torch.autograd.grad(loss, tree.leaves(trained)))
    narrow = tree.map(lambda leaf: leaf.bfloat16(), both[0])
    wide = upcast(narrow["layers"][0]["mlp"]["router"])
    assert {leaf.dtype for leaf in tree.leaves(wide)} == {torch.float32}


def test_gradients_and_adapters_of_each_row_of_experts() -> None:
    """By vmap; weights of experts have no RowLora, and the error names vmap."""
    config = next(case.config for case in cases() if case.name == "mixtral")
    plain = generic_params(config, torch.float64)
    added = lora.add(config, plain, rank=2, targets=("layers.*.experts.*_proj", "q_proj"), dora=True)
    both = [tree.map_with_path(lambda p, t, n=n: t + n * generic(p, t).double(), lora.adapters(added)) for n in (1, 2)]
    batch = batch_of(config, segments((6,), (6,)))
    inputs = batch.prepared()

    def run(adapters: Any, inputs: Any) -> torch.Tensor:
        return fnmodels.forward(lora.attach(plain, adapters), *inputs, config=config, kernel="math")

    found = torch.func.vmap(run)(tree.stack(both), fnmodels.rows(inputs))[:, 0]
    for i, adapters in enumerate(both):
        torch.testing.assert_close(found[i], run(adapters, inputs)[i], rtol=1e-9, atol=1e-9)
    with pytest.raises(P.UnsupportedError, match=r"weight of experts.*torch\.func\.vmap over fnmodels\.rows"):
        lora.per_row(plain, both, torch.tensor([0, 1]))

    def loss(adapters: Any, inputs: Any) -> torch.Tensor:
        return run(adapters, inputs).square().sum()

    with pytest.raises(NotImplementedError, match=r"experts\..*torch\.func\.vmap"):
        fnmodels.per_sample_gradients(loss, both[0], inputs)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(both[0], fnmodels.rows(inputs))
    whole = torch.func.grad(loss)(both[0], inputs)
    for rows, total in zip(tree.leaves(each), tree.leaves(whole), strict=True):
        assert rows.shape == (2, *total.shape) and off(rows[0], rows[1]) > 1e-6
        torch.testing.assert_close(rows.sum(0), total, rtol=1e-8, atol=1e-8)


def test_each_row_has_its_own_adapters() -> None:
    """Of several ranks, targets and forms; the last are the model itself."""
    plain = generic_params(CONFIG, torch.float64)

    def noisy(**options: Any) -> Any:
        added = lora.adapters(lora.add(CONFIG, plain, **options))
        return tree.map_with_path(lambda p, t: t + 0.3 * generic(p, t).double(), added)

    adapters = [noisy(rank=2, targets=("q_proj", "v_proj")), noisy(rank=3, targets=("q_proj", "up_proj"), dora=True)]
    adapters.append(lora.adapters(plain))
    rows = torch.tensor([1, 0, 2, 1])
    batch = batch_of(CONFIG, segments((6,), (6,), (6,), (6,)))
    found = _logits_of(batch, lora.per_row(plain, adapters, rows))
    for i, number in enumerate(rows):
        want = _logits_of(batch, lora.attach(plain, adapters[number]))
        torch.testing.assert_close(found[i], want[i], rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"from 0 to 2; it is \[3\]"):
        lora.per_row(plain, adapters, torch.tensor([3]))
    with pytest.raises(ValueError, match="for 1 rows"):
        _logits_of(batch, lora.per_row(plain, adapters, torch.tensor([1])))


def test_gradients_of_each_row() -> None:
    """DP-LoRA: of adapters alone, of all forms, as by vmap of grad."""
    plain = generic_params(CONFIG, torch.float64)
    added = lora.attach(
        lora.add(CONFIG, plain, rank=2, targets=("q_proj",)),
        lora.adapters(lora.add(CONFIG, plain, rank=2, targets=("down_proj", "lm_head"), dora=True)),
    )
    trained = tree.map_with_path(lambda p, t: t + 0.1 * generic(p, t).double(), lora.adapters(added))
    inputs = fnmodels.prepare(CONFIG, torch.arange(12).view(3, 4))

    def loss(adapters: Any, batch: Any) -> torch.Tensor:
        params = lora.attach(plain, adapters)
        return fnmodels.forward(params, *batch, config=CONFIG, kernel="math").square().sum()

    grads, _ = fnmodels.per_sample_gradients(loss, trained, inputs)

    def of_leaves(leaves: list[Any], batch: Any) -> torch.Tensor:
        given = iter(leaves)
        return loss(tree.map(lambda _: next(given), trained), batch)

    wanted = torch.func.vmap(torch.func.grad(of_leaves), in_dims=(None, 0))(tree.leaves(trained), fnmodels.rows(inputs))
    assert {path.rpartition(".")[2] for path in tree.flatten(grads)} == {"a", "b", "magnitude"}
    for got, want in zip(tree.leaves(grads), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dora", [False, True])
def test_transforms_of_adapters_alone(dora: bool) -> None:
    """grad, jvp and vmap take a tree of adapters, which has no entry for what has none."""
    plain = generic_params(CONFIG, torch.float64)
    added = lora.adapters(lora.add(CONFIG, plain, rank=2, targets=("q_proj", "down_proj"), dora=dora))
    trained = tree.map_with_path(lambda p, t: t + 0.1 * generic(p, t).double(), added)
    batch = batch_of(CONFIG, segments((4,), (3, -1)))

    def loss(adapters: Any) -> torch.Tensor:
        total: torch.Tensor = batch.forward(lora.attach(plain, adapters), kernel="math").square().sum()
        return total

    leaves = tree.map(lambda t: t.detach().requires_grad_(), trained)
    wanted = torch.autograd.grad(loss(leaves), tree.leaves(leaves))
    found = torch.func.grad(loss)(trained)
    for got, want in zip(tree.leaves(found), wanted, strict=True):
        torch.testing.assert_close(got, want)
    direction = tree.map(torch.ones_like, trained)
    torch.testing.assert_close(torch.func.jvp(loss, (trained,), (direction,))[1], tree.vdot(found, direction))
    both = torch.func.vmap(torch.func.grad(loss))(tree.stack([trained, direction]))
    for got, want in zip(tree.leaves(both), tree.leaves(found), strict=True):
        torch.testing.assert_close(got[0], want)


def test_adapters_at_every_target_of_every_model_have_gradients_and_add_to_their_weights() -> None:
    """The loss is that of the merged weights, also where a model reads a weight outside of its layers."""
    for name in every_target.structures():
        setting = every_target.setting_of(name)
        one, params = every_target.one_process(name, True)[0], every_target.begun(name, True)
        total, *_ = setting.loss(params, setting.batch)
        merged, *_ = setting.loss(lora.merge(params), setting.batch)
        bare, *_ = setting.loss(lora.weights(params), setting.batch)
        assert abs(total - merged) < 1e-4 * abs(total - bare), name
        assert {f"{path}.{part}" for path in setting.targets(vocab=True) for part in "ab"} == one.grads.keys(), name
        assert all(grad.abs().max() > 0 for grad in one.grads.values()), name


def test_a_name_of_a_weight_that_gradients_do_not_reach_names_the_others() -> None:
    """The indexer of DeepSeek-V3.2 has a q_b_proj as attention has one."""
    config = next(case.config for case in cases() if case.name == "deepseek_v32")
    adapted = lora.add(config, generic_params(config), rank=2, targets=("q_b_proj",))
    found = {path for path in tree.flatten(adapted) if path.endswith(".a")}
    assert found and not any(".indexer." in path for path in found)
    assert not any(".indexer." in path for path in lora.targets(config))


@pytest.mark.parametrize("case", richest(lambda case: case.family), ids=str)
def test_every_parameter_may_be_trained_in_full_beside_adapters(case: Any) -> None:
    """All at once, over a base model of NaN: outputs and gradients are those of the plain values."""
    params = generic_params(case.config)
    batch = batch_of(case.config, segments((7, 5), (12,)))

    def outputs(leaves: Any, wrapped: bool) -> tuple[torch.Tensor, tuple[Any, ...]]:
        made = tree.map(lambda t: lora.Replaced(torch.full_like(t, torch.nan), t) if wrapped else t, leaves)
        found = batch.forward(made, kernel="math")
        floats = [leaf for leaf in tree.leaves(leaves) if leaf.requires_grad]
        return found, torch.autograd.grad(found.square().sum(), floats, allow_unused=True)

    leaves = tree.map(lambda t: t.clone().requires_grad_() if t.is_floating_point() else t, params)
    (plain, wanted), (found, grads) = outputs(leaves, False), outputs(leaves, True)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    for got, want in zip(grads, wanted, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_a_tree_with_adapters_is_saved_after_a_merge(tmp_path: Any) -> None:
    adapted = lora.unfreeze(_adapted(targets=("q_proj",)), ("norm",))
    with pytest.raises(P.MismatchError, match="differences") as caught:
        P.save_pretrained(tmp_path, CONFIG, adapted)
    lines = str(caught.value).splitlines()[1:]
    assert all("has an adapter or is replaced; params.lora.merge makes it plain" in line for line in lines)
    assert len(lines) == 3
    P.save_pretrained(tmp_path, CONFIG, lora.merge(adapted))
