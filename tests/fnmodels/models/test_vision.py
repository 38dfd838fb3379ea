"""Vision towers equal transformers', images of different sizes packed in rows equal the same images alone."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.inputs.images import patches_of
from fnmodels.models.common import storage
from params.checkpoint.tensor_map import missing_prefix, stored_leaves
from tests.support.cases import generic
from tests.support.oracle import assert_close, on_disk
from tests.variants.vision import pairs, variants

MODELS = {"clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}
PAIRS = {name: values | {"architectures": [MODELS[values["model_type"]]]} for name, values in pairs().items()}
VARIANTS = variants()
EVERY = VARIANTS | PAIRS
FIRST = {values["model_type"]: name for name, values in reversed(VARIANTS.items())}  # of each model type
SIZES = ((24, 24), (30, 18), (12, 48), (6, 6))  # the table's own square, others, one patch


@functools.cache
def _reference(name: str) -> Any:
    values = EVERY[name]
    config = AutoConfig.for_model(**values)
    config._attn_implementation = "eager"
    model = getattr(transformers, values["architectures"][0])(config).eval()
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            tensor.copy_(generic(path, tensor) if path != "logit_scale" else torch.full_like(tensor, 2.5))
    return model


@functools.cache
def _params(name: str) -> Any:
    return _ours_of(on_disk(_reference(name)), _config(name))


def _ours_of(state: dict[str, Tensor], config: Any) -> Any:
    """Tensors by their names on disk as our tree, moved by name and by nothing else: no tensor may be left over."""
    stored = stored_leaves(config, missing_prefix(stored_leaves(config), state))
    assert {found for one in stored for found in storage.disk_names(one.stored)} == state.keys()
    return tree.unflatten({one.path: storage.extract_parameter(one.stored, state).detach().clone() for one in stored})


@functools.cache
def _config(name: str) -> Any:
    return fnmodels.family_for(EVERY[name]["model_type"]).Config.from_hf(EVERY[name])


def _images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, *size, generator=generator) for size in SIZES]


def _given(name: str, image: Tensor) -> dict[str, Any]:
    """The arguments of the reference for an image of any size."""
    if "siglip2" in name:  # takes patches
        cells = patches_of(image, 6, channels_last=True)
        mask, shapes = torch.ones(1, cells.shape[0] * cells.shape[1]), torch.tensor([cells.shape[:2]])
        return {"pixel_values": cells.flatten(0, 1)[None], "pixel_attention_mask": mask, "spatial_shapes": shapes}
    table = "dino" not in name and "pixtral" not in name
    return {"pixel_values": image[None]} | ({"interpolate_pos_encoding": True} if table else {})


def _theirs(name: str, image: Tensor, model: Any = None) -> tuple[Tensor, Tensor]:
    """(hidden states [S, D], or none for a model with labels; features or logits) of one image."""
    model = model or _reference(name)
    out = model(**_given(name, image))
    if "logits" in out:
        return torch.empty(0), out.logits[0]
    pooled = out.image_embeds if "image_embeds" in out else out.get("pooler_output")
    return out.last_hidden_state[0], torch.empty(0) if pooled is None else pooled[0]


def _ours(name: str, params: Any, length: int | None, kernel: str = "math") -> tuple[Tensor, Tensor, Any]:
    """(hidden states or logits, features or logits, documents) of `_images`, in rows of this length."""
    config = _config(name)
    family: Any = fnmodels.family_of(config)
    patches, positions, segment_ids = fnmodels.inputs.patch_rows(_images(), config, length=length)
    prepared = fnmodels.prepare(config, patches, positions=positions, segment_ids=segment_ids)
    layout = fnmodels.layout(prepared[1]) if kernel == "auto" else None
    found = fnmodels.documents(segment_ids)
    if config.head == "classification":
        x = fnmodels.hidden(params, *prepared, config=config, kernel=kernel, layout=layout)
        logits = family.classify(params, x, found, config=config)
        return logits, logits, found
    out = fnmodels.forward(params, *prepared, config=config, kernel=kernel, layout=layout)
    if not hasattr(family, "features"):
        return out, out[:0, 0], found
    return out, family.features(params, out, found, config=config), found


@pytest.mark.parametrize(("length", "kernel"), [(None, "math"), (33, "math"), (60, "auto")])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_tower_equals_transformers(name: str, length: int | None, kernel: str) -> None:
    config = _config(name)
    with torch.no_grad():
        out, features, found = _ours(name, _params(name), length, kernel)
        for i, image in enumerate(_images()):
            hidden, pooled = _theirs(name, image)
            if config.head == "classification":
                assert_close(out[i], pooled)
                continue
            assert_close(out[found.number == i], hidden)
            if len(pooled):
                assert_close(features[i], pooled)


@pytest.mark.parametrize("name", FIRST.values(), ids=FIRST.keys())
def test_gradients_equal_transformers(name: str) -> None:
    """Of every parameter, over images of different sizes in one row."""
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params(name))
    out, features, found = _ours(name, params, 60)
    weights = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(1))
    _objective(out[found.number < len(found)], features, weights).backward()
    model = copy.deepcopy(_reference(name))
    for image in _images():
        _objective(*_theirs(name, image, model), weights).backward()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.zeros_like(value) if value.grad is None else value.grad)
    theirs = tree.flatten(_ours_of(on_disk(model), _config(name)))
    floor = 1e-2 * max(float(wanted.abs().max()) for wanted in theirs.values())  # a key's bias has a gradient of 0
    for path, leaf in tree.flatten(params).items():
        wanted, found_here = theirs[path], torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        worst = float((found_here - wanted).abs().max())
        assert worst <= 5e-5 * max(float(wanted.abs().max()), floor), f"{path} is off by {worst:.1e}"


def _objective(hidden: Tensor, features: Tensor, weights: Tensor) -> Tensor:
    return (hidden * weights).square().sum() + (features * weights[: features.shape[-1]]).square().sum()


@pytest.mark.parametrize("name", FIRST.values(), ids=FIRST.keys())
def test_rows_may_be_permuted_mapped_and_padded_with_anything(name: str) -> None:
    config, params = _config(name), _params(name)
    patches, positions, segment_ids = fnmodels.inputs.patch_rows(_images(), config, length=33)
    patches[segment_ids == 0] = torch.nan
    prepared = fnmodels.prepare(config, patches, positions=positions, segment_ids=segment_ids)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1))

    def run(batch: Any) -> Tensor:
        out: Tensor = fnmodels.forward(params, *batch, config=config, kernel="math")
        return out

    with torch.no_grad():
        out, valid = run(prepared), segment_ids > 0
        assert torch.isfinite(out[valid]).all()
        assert_close(run(fnmodels.permute(prepared, order))[valid[:, order]], out[:, order][valid[:, order]])
        assert_close(torch.vmap(run)(fnmodels.rows(prepared))[:, 0][valid], out[valid])


@pytest.mark.parametrize("name", EVERY)
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    model = _reference(name)
    model.save_pretrained(tmp_path / "theirs")
    config, params = P.load_pretrained(tmp_path / "theirs")
    every_key = AutoConfig.for_model(**EVERY[name]).to_dict()
    assert config == _config(name) == type(config).from_hf(every_key)
    mine = tree.flatten(_params(name))
    assert all(torch.equal(leaf, mine[path]) for path, leaf in tree.flatten(params).items())
    P.save_pretrained(tmp_path / "ours", config, params)
    again, told = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told.values()), told
    assert all(torch.equal(value, model.state_dict()[path]) for path, value in again.state_dict().items())


@pytest.mark.parametrize("name", PAIRS)
def test_two_towers_equal_transformers(name: str) -> None:
    """Texts of different lengths in one row, and images of different sizes in another."""
    config, params, model = _config(name), _params(name), _reference(name)
    family: Any = fnmodels.family_of(config)
    texts = [torch.tensor(ids) for ids in ([1, 9, 60, 5, 3, 5], [1, 5], [8, 7, 6, 3, 60, 60, 2, 5, 4], [9, 8, 7])]
    tokens, segment_ids = torch.cat(texts)[None], fnmodels.segments_from_lengths([[len(text) for text in texts]])
    positions = fnmodels.positions_from_segments(segment_ids)
    with torch.no_grad():
        batch = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
        hidden = fnmodels.forward(params["text"], *batch, config=config.text)
        found = fnmodels.documents(segment_ids)
        text = fnmodels.family_of(config.text).features(params["text"], hidden, tokens, found, config=config.text)
        patches, positions, segment_ids = fnmodels.inputs.patch_rows(_images(), config.vision, length=60)
        batch = fnmodels.prepare(config.vision, patches, positions=positions, segment_ids=segment_ids)
        hidden, found = (
            fnmodels.forward(params["vision"], *batch, config=config.vision),
            fnmodels.documents(segment_ids),
        )
        image = fnmodels.family_of(config.vision).features(params["vision"], hidden, found, config=config.vision)
        logits = family.similarity(params, text, image)
        theirs = torch.empty_like(logits)
        for i, ids in enumerate(texts):
            for j, pixels in enumerate(_images()):
                out = model(ids[None], **_given(name, pixels))
                theirs[i, j] = out.logits_per_text
        assert_close(logits, theirs)
    with pytest.raises(TypeError, match=r"run each with its own config, one of config\.text, config\.vision"):
        fnmodels.prepare(config, tokens)


def test_a_tower_refuses_what_it_cannot_place() -> None:
    config = _config("vit")
    with pytest.raises(ValueError, match=r"\(row, column, rows, columns\), \[B, S, 4\], not \[2, 3\]"):
        fnmodels.prepare(config, torch.zeros(2, 3, 108))
    with pytest.raises(ValueError, match=r"multiples of 6, not \[3, 24, 25\]"):
        fnmodels.inputs.patch_rows([torch.zeros(3, 24, 25)], config)
    with pytest.raises(ValueError, match="Image 0 has 17 tokens, which is more than the 16 of a row"):
        fnmodels.inputs.patch_rows([torch.zeros(3, 24, 24)], config, length=16)


@pytest.mark.parametrize("name", VARIANTS)
def test_taps_are_listed_with_their_shapes(name: str) -> None:
    """All of them; CLIP's last norm is of pooled features, and an edit of it is refused."""
    config = _config(name)
    names = fnmodels.tap_names(config)
    patches, positions, segment_ids = fnmodels.inputs.patch_rows(_images()[:1], config)
    prepared = fnmodels.prepare(config, patches, positions=positions, segment_ids=segment_ids)
    run = functools.partial(fnmodels.hidden, _params(name), *prepared, config=config, kernel="math")
    ends = ("final.norm", "final.norm.scale")
    _, found = run(taps=tuple(tap for tap in names if tap not in ends))
    for tap, value in found.items():
        sizes = {"B": 1, "S": positions.shape[1]}
        assert list(value.shape) == [int(sizes.get(n, n)) for n in names[tap].strip("[]").split(", ")], tap
    assert (ends[0] in names) == (config.model_type not in ("clip_vision_model", "pixtral"))
    if config.model_type == "clip_vision_model":
        with pytest.raises(ValueError, match=r"no final\.norm and no final\.norm\.scale: its last norm is of pooled"):
            fnmodels.forward(_params(name), *prepared, config=config, edits={"final.norm": torch.zeros(1)})
