"""GGUF files read: values, configuration and errors, against the model that was written and the gguf package."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.errors import UserError
from fnmodels.models.common.registry import config_class, family_for
from params.gguf.architectures import ARCHITECTURES, UNREAD
from params.quantized.kept import KeptWeight
from params.quantized.written import by_path
from tests.support.cases import batch_of, off, segments
from tests.support.gguf_converted import MODELS as CONVERTED
from tests.support.gguf_files import ARCHITECTURE_OF, add_bytes, tensors_of, write_gguf
from tests.support.gguf_models import MODELS

LLAMA = MODELS["llama"]


def write(folder: Path, values: dict[str, Any] = LLAMA, architecture: str = "llama", **options: Any) -> Path:
    return write_gguf(folder / "it.gguf", architecture, values, tensors_of(values), **options)


def config_of(values: dict[str, Any]) -> Any:
    return config_class(family_for(values["model_type"])).from_hf(values)


@pytest.mark.parametrize("architecture", MODELS)
def test_load_gives_the_model_that_was_written(architecture: str, tmp_path: Path) -> None:
    values = MODELS[architecture]
    expected = tensors_of(values)
    config, params = P.load_pretrained(write(tmp_path, values, architecture))
    assert config == config_of(values)
    read = dict(P.export(config, params))
    assert read.keys() == expected.keys()
    for name, tensor in read.items():
        torch.testing.assert_close(
            tensor,
            expected[name],
            rtol=0,
            atol=1e-6 if ARCHITECTURES[ARCHITECTURE_OF.get(architecture, architecture)].norm_offset else 0,
        )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 12},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rope_is_read(rope: dict[str, Any], tmp_path: Path) -> None:
    values = LLAMA | {"rope_parameters": rope}
    assert P.load_pretrained(write(tmp_path, values))[0] == config_of(values)


def factors_of(rope: dict[str, Any]) -> np.ndarray:
    """What llama.cpp divides frequencies by, from transformers' own rule."""
    config = LlamaConfig(**LLAMA | {"rope_parameters": rope, "max_position_embeddings": 131072})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = rope["rope_theta"] ** -(torch.arange(0, 16, 2) / 16)
    return (plain / scaled).float().numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama3_become_its_rope(factor: float, tmp_path: Path) -> None:
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, **bounds}
    factors = factors_of(rope)
    assert len(np.unique(factors)) > 2
    values = LLAMA | {"rope_parameters": rope}
    path = write(tmp_path, values, change=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    assert P.load_pretrained(path)[0] == config_of(values)
    path = write(tmp_path, values, change=lambda writer: writer.add_tensor("rope_freqs.weight", factors * 1.1))
    with pytest.raises(P.UnsupportedError, match="other factors than Llama 3"):
        P.load_pretrained(path)


def kinds() -> list[gguf.GGMLQuantizationType]:
    """The types that the package dequantizes."""
    found = []
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


def test_k_and_i_quants_are_among_the_types() -> None:
    names = {kind.name for kind in kinds()}
    assert names >= {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0"}
    assert names >= {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"}
    assert names >= {"IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow
@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)
def test_blocks_of_each_type_are_dequantized_bit_exactly(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    values = LLAMA | {"hidden_size": 256, "intermediate_size": 512}
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (256, 512 // elements * size), np.uint8)
    tensors = {name: one for name, one in tensors_of(values).items() if "layers.1.mlp.down_proj" not in name}
    name = "blk.1.ffn_down.weight"
    path = write_gguf(
        tmp_path / "it.gguf", "llama", values, tensors, lambda writer: add_bytes(writer, name, data, kind)
    )
    _, params = P.load_pretrained(path)
    expected = torch.from_numpy(np.array(dequantize(data, kind)))
    torch.testing.assert_close(params["layers"][1]["mlp"]["down_proj"], expected, rtol=0, atol=0, equal_nan=True)


def test_dtype_casts_and_check_finite_refuses(tmp_path: Path) -> None:
    path = write(tmp_path)
    plain, cast = P.load_pretrained(path)[1], P.load_pretrained(path, dtype=torch.bfloat16, check_finite=True)[1]
    assert torch.equal(cast["embed_tokens"], plain["embed_tokens"].bfloat16())
    tensors = tensors_of(LLAMA)
    tensors["model.norm.weight"][3] = float("inf")
    write_gguf(path, "llama", LLAMA, tensors)
    with pytest.raises(P.MismatchError, match=r"it\.gguf: check_finite found NaN .*\n  model\.norm\.weight"):
        P.load_pretrained(path, check_finite=True)


def unknown_rope(writer: gguf.GGUFWriter) -> None:
    writer.add_string("llama.rope.scaling.type", "spiral")
    writer.add_float32("llama.rope.scaling.factor", 2.0)


def longrope(writer: gguf.GGUFWriter, *factors: str, scaling: str = "longrope", factor: float = 1.0) -> None:
    """Without a kind of rope, with plain rotary embeddings."""
    if scaling:
        writer.add_string("llama.rope.scaling.type", scaling)
        writer.add_float32("llama.rope.scaling.factor", factor)
    for name in factors:
        writer.add_tensor(f"rope_factors_{name}.weight", _FACTORS[name])


_FACTORS = {name: np.linspace(1, top, 8, dtype=np.float32) for name, top in (("short", 1.5), ("long", 6))}
_BOTH = ("short", "long")


@pytest.mark.parametrize("scale", [None, 1.25])
def test_factors_of_longrope_become_its_rope(scale: float | None, tmp_path: Path) -> None:
    """llama.cpp reads 1 where the file has no number for the tables."""

    def change(writer: gguf.GGUFWriter) -> None:
        longrope(writer, *_BOTH)
        writer.add_uint32("llama.rope.scaling.original_context_length", 16)
        if scale:
            writer.add_float32("llama.rope.scaling.attn_factor", scale)

    lists = {f"{name}_factor": [float(str(one)) for one in _FACTORS[name]] for name in _BOTH}
    rope = {"rope_type": "longrope", "rope_theta": 5e4, "original_max_position_embeddings": 16, **lists}
    wanted = config_of(LLAMA | {"rope_parameters": rope | {"attention_factor": scale or 1.0}})
    assert P.load_pretrained(write(tmp_path, change=change))[0] == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_uint32("llama.expert_count", 8), "'llama.expert_count', which may change the model"),
        (lambda w: w.add_bool("llama.attention.causal", False), "'llama.attention.causal', which may change the model"),
        (lambda w: w.add_bool("llama.future_switch", False), "'llama.future_switch', which may change the model"),
        (lambda w: w.add_bool("llama.expert_count", False), "'llama.expert_count', which may change the model"),
        (lambda w: w.add_uint32("llama.vocab_size", 99), "'llama.vocab_size' is 99, and 'token_embd.weight' has 64"),
        (lambda w: w.add_uint32("llama.rope.dimension_count", 8), "'llama.rope.dimension_count' is 8, where heads"),
        (unknown_rope, "'spiral'; none, linear, yarn and longrope"),
        (
            longrope,
            "'longrope', and the file has no tensors 'rope_factors_long.weight' and 'rope_factors_short.weight'",
        ),
        (lambda w: longrope(w, *_BOTH, factor=2.0), "'llama.rope.scaling.factor' is 2.0; only 1.0 is read"),
        (lambda w: longrope(w, "long"), "'rope_factors_long.weight' is there without 'rope_factors_short.weight'"),
        (lambda w: longrope(w, *_BOTH, scaling=""), "rope_factors_long.weight: unexpected"),
        (lambda w: longrope(w, *_BOTH, scaling="linear"), "rope_factors_short.weight: unexpected"),
        (lambda w: w.add_tensor("blk.0.odd.weight", np.ones(3, np.float32)), "model.layers.0.odd.weight: unexpected"),
        (lambda w: w.add_tensor("odd", np.ones(3, np.float32)), "odd: unexpected"),
        (lambda w: w.add_tensor("odd", np.ones(3, np.int32)), "'odd' is I32, which the installed gguf package"),
    ],
    ids=range(15),
)
def test_what_is_not_read_is_named(change: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, change=change)
    with pytest.raises(P.CheckpointError) as caught:
        P.load_pretrained(path)
    assert message in str(caught.value) and str(caught.value).count(str(path)) == 1


def off_as_without_them(writer: gguf.GGUFWriter) -> None:
    writer.add_uint32("llama.expert_count", 0)
    writer.add_float32("llama.attn_logit_softcapping", 0.0)
    writer.add_bool("llama.attention.causal", True)
    writer.add_bool("llama.expert_weights_norm", False)
    writer.add_uint32("llama.vocab_size", LLAMA["vocab_size"])


def test_keys_that_say_what_a_file_without_them_says_are_read(tmp_path: Path) -> None:
    """And the end of a file's name may be in capitals."""
    path = write(tmp_path, change=off_as_without_them)
    assert P.load_pretrained(path.rename(tmp_path / "IT.GGUF"))[0] == config_of(LLAMA)


def test_a_missing_tensor_and_an_unknown_architecture_are_named(tmp_path: Path) -> None:
    tensors = {name: one for name, one in tensors_of(LLAMA).items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(P.MismatchError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: missing"):
        P.load_pretrained(write_gguf(tmp_path / "it.gguf", "llama", LLAMA, tensors))
    for name, why in (
        ("minicpm3", r"is read as a Hugging Face folder \(model type 'minicpm3'\), but not as GGUF"),
        ("grok", "no family of this library is known to have it"),
    ):
        path = write_gguf(tmp_path / "it.gguf", name, LLAMA, {})
        with pytest.raises(
            P.UnsupportedError, match=rf"is '{name}'; .*{why}. Of GGUF files qwen2, .* llama, .* are read"
        ):
            P.load_pretrained(path)


def test_architectures_that_are_not_read_are_llama_cpps_with_a_family_here() -> None:
    assert not UNREAD.keys() & ARCHITECTURES.keys()
    assert UNREAD.keys() - {"cohere2moe", "deepseek32", "deepseek4", "mellum"} <= set(gguf.MODEL_ARCH_NAMES.values())
    assert all(family_for(model_type) for model_type in UNREAD.values())


def header(*entries: bytes, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(entries)) + b"".join(entries)


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def info(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + sizes + struct.pack("<IQ", kind, offset)


ENDLESS = struct.pack("<IQ", 0, 1 << 60)
DAMAGED = {
    "no magic": (b"GGML" + bytes(40), "not with GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (header(version=1), "version 1 "),
    "endless array": (header(entry(b"a", 9, ENDLESS)) + bytes(99), "cut or damaged"),
    "endless text": (header(entry(b"a", 8, struct.pack("<Q", 1 << 60))), "cut or damaged"),
    "array in array": (header(entry(b"a", 9, struct.pack("<IQ", 9, 1))), "'a' holds values of type 9"),
    "key twice": (header(entry(b"a", 0, b"1"), entry(b"a", 0, b"1")), "'a' is there twice"),
    "no such type": (header(entry(b"a", 99, b"1")), "type 99"),
    "no UTF-8": (header(entry(b"a", 8, struct.pack("<Q", 1) + b"\xff")), "not UTF-8"),
    "odd alignment": (header(entry(b"general.alignment", 4, struct.pack("<I", 3))), "power of two"),
    "tensor twice": (header(tensors=2) + info(b"a", (1,), 0, 0) * 2, "tensor 'a' is there twice"),
    "huge tensor": (header(tensors=1) + info(b"a", (1 << 40, 1 << 40), 0, 0), "impossible shape"),
    "no dimensions": (header(tensors=1) + info(b"a", (), 0, 0), "0 dimensions"),
    "unknown ggml type": (header(tensors=1) + info(b"a", (32,), 9999, 0), "ggml type 9999"),
    "broken rows": (header(tensors=1) + info(b"a", (31,), 2, 0), "no whole blocks"),
    "gap": (header(tensors=1) + info(b"a", (1,), 0, 64) + bytes(200), "is at 64"),
    "cut tensor": (header(tensors=1) + info(b"a", (999,), 0, 0) + bytes(200), "truncated?"),
    "appended": (header(tensors=1) + info(b"a", (1,), 0, 0) + bytes(200), "appended?"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    data, message = DAMAGED[case]
    path = tmp_path / "it.gguf"
    path.write_bytes(data)
    with pytest.raises((P.FormatError, P.UnsupportedError)) as caught:
        P.load_pretrained(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    data = write(tmp_path).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 1200, 7), *range(1200, len(data), len(data) // 20)]:
        path.write_bytes(data[:size])
        with pytest.raises(P.FormatError):
            P.load_pretrained(path)


def split(folder: Path, values: dict[str, Any] = LLAMA, count: int = 3) -> list[Path]:
    """The parts of a model as llama-gguf-split writes them: the metadata in the first, tensors in turn."""
    paths = [folder / f"it-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    tensors = tensors_of(values)
    for i, path in enumerate(paths):
        names = list(tensors)[i::count]

        def number(writer: gguf.GGUFWriter, i: int = i) -> None:
            writer.add_uint16("split.no", i)
            writer.add_uint16("split.count", count)
            writer.add_int32("split.tensors.count", len(tensors))

        write_gguf(path, "llama", values, {name: tensors[name] for name in names}, number)
    return paths


def test_parts_are_one_model_by_the_name_of_any(tmp_path: Path) -> None:
    paths = split(tmp_path)
    expected = P.load_pretrained(write(tmp_path))[1]
    for path in (paths[0], paths[2]):
        config, params = P.load_pretrained(path)
        assert config == config_of(LLAMA)
        assert all(map(torch.equal, tree.leaves(params), tree.leaves(expected)))


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    data = [path.read_bytes() for path in paths]
    paths[1].unlink()
    with pytest.raises(
        FileNotFoundError, match=r"one of 3 files of a model, of which it-00002-of-00003\.gguf are missing"
    ):
        P.load_pretrained(paths[0])
    paths[1].write_bytes(data[2])
    with pytest.raises(P.FormatError, match=r"it-00002-of-00003\.gguf: 'split\.no' is 2, but must be 1"):
        P.load_pretrained(paths[0])
    paths[0].rename(tmp_path / "other.gguf")
    with pytest.raises(P.FormatError, match=r"must be named NAME-00001-of-00003\.gguf, NAME-00002"):
        P.load_pretrained(tmp_path / "other.gguf")
    other = tmp_path / "more"
    other.mkdir()
    parts = split(other, LLAMA | {"tie_word_embeddings": False})
    parts[2].write_bytes(data[2])  # of another model
    with pytest.raises(
        P.FormatError, match=r"is in a file before it too|have \d+ tensors, but 'split\.tensors\.count'"
    ):
        P.load_pretrained(parts[0])


def test_options_of_folders_and_a_missing_package_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    with pytest.raises(ValueError, match=r"read without head and part: fnmodels-convert .*it\.gguf FOLDER"):
        P.load_pretrained(path, head="none", part="text")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'fnmodels\[gguf\]'"):
        P.load_pretrained(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("it.safetensors", "name the folder that holds it"),
        ("it.bin", "nothing is unpickled"),
        ("it.txt", "GGUF files named \\*\\.gguf are read"),
    ],
)
def test_another_file_says_what_to_do(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(NotADirectoryError, match=message):
        P.load_pretrained(tmp_path / name)


def test_every_architecture_that_is_read_is_tested() -> None:
    converted = {architecture for architecture, _ in CONVERTED.values()}
    assert ARCHITECTURES.keys() == {ARCHITECTURE_OF.get(name, name) for name in MODELS} | converted


# Architectures that transformers' own reader of GGUF files has: what it makes of their tensors, with the right config.
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "stablelm", "starcoder2", "phi3")
READ_BY_TRANSFORMERS += ("gemma2", "gemma3", "nemotron", "lfm2", "minimax-m2")


@pytest.mark.parametrize("architecture", READ_BY_TRANSFORMERS)
def test_logits_are_those_of_transformers_reading_the_file(architecture: str, tmp_path: Path) -> None:
    path, wanted = write(tmp_path, MODELS[architecture], architecture), AutoConfig.for_model(**MODELS[architecture])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, config=wanted, dtype=torch.float32)
    config, params = P.load_pretrained(path)
    ids = torch.arange(24).view(2, 12) * 5 % 64
    with torch.no_grad():
        expected = theirs.eval()(ids).logits
        logits = fnmodels.forward(params, *fnmodels.prepare(config, ids), config=config)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "phi3", "qwen2moe", "gemma2", "granitemoe", "deepseek2"])
def test_weights_kept_in_blocks_are_the_dequantized_ones(architecture: str, tmp_path: Path) -> None:
    """Linear weights and experts, fused rows and turned ones; adapters train on them, and saving is refused."""
    values = MODELS[architecture]
    path = write(tmp_path, values, architecture, quantized=gguf.GGMLQuantizationType.Q8_0)
    config, plain = P.load_pretrained(path)
    kept = P.load_pretrained(path, keep_quantized=True, check_finite=True)[1]
    flat, nodes = tree.flatten(plain), {p: one for p, one in by_path(kept).items() if isinstance(one, KeptWeight)}
    assert len(nodes) >= 7 * config.num_hidden_layers
    assert all(torch.equal(one.dequantized(), flat[p]) for p, one in nodes.items())
    assert sum(one.nbytes for one in nodes.values()) < 0.3 * sum(flat[p].nbytes for p in nodes)
    batch, grads = batch_of(config, segments((7, 5), (12,))), []
    for base in (plain, kept):
        tuned = P.lora.add(
            config, base, rank=2, targets=("o_proj",) if architecture == "deepseek2" else ("q_proj", "o_proj"), seed=1
        )
        adapters = tree.map(lambda leaf: (leaf + 0.01).requires_grad_(), P.lora.adapters(tuned))
        loss = batch.forward(P.lora.attach(base, adapters)).square().mean()
        grads.append(torch.autograd.grad(loss, tree.leaves(adapters)))
    assert all(off(other, one) < 1e-5 for one, other in zip(*grads, strict=True))
    with pytest.raises(P.MismatchError, match="dequantize"):
        P.save_pretrained(tmp_path / "out", config, kept)
    with pytest.raises(P.UnsupportedError, match="blocks of the ggml type"):
        P.requantize(plain, kept)
