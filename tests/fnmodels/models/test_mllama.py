"""Llama 3.2 Vision equals transformers with every parameter perturbed; packed documents equal each alone."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.models.vision import mllama_vision
from fnmodels.models.vision_language import mllama
from tests.support import wrappers
from tests.support.forks import Forks
from tests.support.oracle import assert_close, on_disk
from train.data.image_prompts import ImagePrompts
from train.generation.requests import Request
from train.losses.batch_checks import check_batch

IMAGE = 61  # the id of image tokens, one of those without logits
_VISION: dict[str, Any] = {"model_type": "mllama_vision_model", "hidden_size": 16, "intermediate_size": 20}
_VISION |= {"num_hidden_layers": 2, "num_global_layers": 2, "attention_heads": 2, "image_size": 8, "patch_size": 4}
_VISION |= {"max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "norm_eps": 1e-2}
_VISION |= {"intermediate_layers_indices": [1, 0], "vision_output_dim": 48}
_TEXT: dict[str, Any] = {"model_type": "mllama_text_model", "hidden_size": 24, "intermediate_size": 40}
_TEXT |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 57}
_TEXT |= {"cross_attention_layers": [1], "rms_norm_eps": 7e-3, "pad_token_id": 0}
VALUES: dict[str, Any] = {"model_type": "mllama", "image_token_index": IMAGE, "vision_config": _VISION}
VALUES |= {"text_config": _TEXT, "architectures": ["MllamaForConditionalGeneration"]}
CONFIG = mllama.Config.from_hf(VALUES)
# Per document: numbers of text tokens, and between them images of (rows, columns) tiles.
DOCUMENTS: tuple[tuple[Any, ...], ...] = (((1, 2), 3), (2, (1, 1), 2, (2, 1), (1, 2), 4), (3,), (1, (1, 1), 2))


def _zero_what_sees_nothing(layer: Any) -> None:
    """A token that sees no image gets nothing of any, as in Meta's code.

    transformers lets it see all images of its row, and the empty tiles: 5.24 clears the mask of such a row and not,
    as Meta does, what attention returns. Packed documents would see each other's images.
    """
    sees: list[Tensor] = []

    def before(module: Any, arguments: Any, keywords: Any) -> None:
        sees[:] = [keywords["full_text_row_masked_out_mask"][:, 0]]

    def after(module: Any, arguments: Any, result: Any) -> Any:
        return (result[0] * sees[0], *result[1:])

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.cross_attn.register_forward_hook(after)


def _what_layers_read(stack: Any, arguments: Any, keywords: Any, result: Any) -> Any:
    """Features of inner layers are their inputs, as in Meta's code and in the first versions with this model.

    transformers 5.24 appends a hidden state after each layer and not before, with the same indices.
    """
    result.hidden_states = (keywords.get("hidden_states", *arguments), *result.hidden_states[:-1])
    return result


@functools.cache
def _reference() -> Any:
    config = AutoConfig.for_model(**VALUES)
    config._attn_implementation = "eager"
    model = wrappers.perturbed(transformers.MllamaForConditionalGeneration(config))
    for index in config.text_config.cross_attention_layers:
        _zero_what_sees_nothing(model.model.language_model.layers[index])
    model.model.vision_model.transformer.register_forward_hook(_what_layers_read, with_kwargs=True)
    return model


@functools.cache
def _params() -> Any:
    return wrappers.ours_of(on_disk(_reference()), CONFIG)


@functools.cache
def _documents() -> tuple[list[Tensor], list[list[Tensor]]]:
    """(tokens of each document, its images [3, H, W])."""
    generator, texts, images = torch.Generator().manual_seed(0), [], []
    for parts in DOCUMENTS:
        runs = [
            torch.randint(1, 57, (one,), generator=generator) if isinstance(one, int) else torch.tensor([IMAGE])
            for one in parts
        ]
        texts.append(torch.cat(runs))
        grids = [one for one in parts if not isinstance(one, int)]
        images.append([torch.randn(3, 8 * h, 8 * w, generator=generator) for h, w in grids])
    return texts, images


def _features(params: Any, images: list[Tensor]) -> tuple[Tensor, Tensor]:
    patches, at = mllama_vision.tile_rows(images, CONFIG.vision)
    batch = fnmodels.prepare(CONFIG.vision, patches, positions=at)
    x, tapped = fnmodels.hidden(params["vision"], *batch, config=CONFIG.vision, taps=mllama.taps(CONFIG), kernel="math")
    return mllama.project(params, x, tapped, config=CONFIG), at


def _prepared(params: Any, *, reverse: bool = False) -> tuple[Any, Tensor]:
    """((inputs, masks, tables) of two rows of documents, segment ids); reverse: a planted bug, images exchanged."""
    texts, images = _documents()
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 18)
    flat = [image for own in images for image in own]
    features, at = _features(params, flat[::-1] if reverse else flat)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, tables = fnmodels.prepare(CONFIG.text, tokens, positions=own, segment_ids=segment_ids)
    memory = mllama.image_memory(tokens, segment_ids, features, at, config=CONFIG)
    return (inputs | memory, masks, tables), segment_ids


def _ours(params: Any, *, reverse: bool = False) -> Tensor:
    """[tokens, V] of the packed documents."""
    prepared, segment_ids = _prepared(params, reverse=reverse)
    logits = fnmodels.forward(params["text"], *prepared, config=CONFIG.text, kernel="math")
    return logits[segment_ids > 0]


def _pixels(text: Tensor, images: list[Tensor]) -> dict[str, Tensor]:
    """What transformers takes: empty tiles, numbers of aspects, and the tiles that each token sees."""
    if not images:
        return {}
    aspects = [(image.shape[1] // 8, image.shape[2] // 8) for image in images]
    tiles, tile_mask = torch.zeros(1, len(images), 2, 3, 8, 8), torch.zeros(1, len(images), 2, dtype=torch.long)
    for i, (image, (rows, columns)) in enumerate(zip(images, aspects, strict=True)):
        cut = image.reshape(3, rows, 8, columns, 8).permute(1, 3, 0, 2, 4).flatten(0, 1)
        tiles[0, i, : len(cut)], tile_mask[0, i, : len(cut)] = cut, 1
    ids = torch.tensor([[1 + CONFIG.vision.aspects.index(aspect) for aspect in aspects]])
    mask, at = torch.zeros(1, len(text), len(images), 2), (text == IMAGE).nonzero()[:, 0].tolist()
    for i, begin in enumerate(at):
        end = next((n for before, n in zip(at[i:], at[i + 1 :], strict=False) if n != before + 1), len(text))
        mask[0, begin:end, i] = tile_mask[0, i].float()
    return {"pixel_values": tiles, "aspect_ratio_ids": ids, "aspect_ratio_mask": tile_mask} | {
        "cross_attention_mask": mask
    }


def _theirs() -> Tensor:
    """[tokens, V]: every document alone, one after the other."""
    out = [
        _reference()(input_ids=text[None], use_cache=False, **_pixels(text, images)).logits[0]
        for text, images in zip(*_documents(), strict=True)
    ]
    return torch.cat(out)


def test_packed_documents_with_images_equal_transformers_alone() -> None:
    with torch.no_grad():
        wanted = _theirs()
        assert_close(_ours(_params()), wanted)
        assert (_ours(_params(), reverse=True) - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params())
    _ours(params).square().sum().backward()
    model = _reference()
    model.zero_grad()
    _theirs().square().sum().backward()
    wrappers.assert_gradients(model, CONFIG, params)


def test_files_are_read_and_written(tmp_path: Path) -> None:
    wrappers.assert_files(_reference(), CONFIG, tmp_path)
    wrappers.assert_text_alone(CONFIG, tmp_path)
    assert mllama.Config.from_hf(CONFIG.to_hf()) == CONFIG


def test_the_text_is_a_cache_and_a_batch_like_any_other() -> None:
    """Token by token as in one call; images in any order of rows of a vmap; compiled names of taps."""
    (inputs, masks, tables), segment_ids = _prepared(_params())
    memory = {name: inputs.pop(name) for name in ("memory", "memory_mask")}
    texts, _ = _documents()
    text = _params()["text"]
    with torch.no_grad():
        wanted = fnmodels.forward(text, inputs | memory, masks, tables, config=CONFIG.text)[0, : len(texts[0])]
        cache, found = fnmodels.init_cache(CONFIG.text, batch=1, capacity=8), []
        held = memory["memory"][:1], memory["memory_mask"]
        for i, token in enumerate(texts[0]):
            seen = held[1].select(slice(i, i + 1), slice(None), slice(0, 1))
            step = fnmodels.prepare_step(CONFIG.text, token[None, None], cache)
            given = step[0] | {"memory": held[0], "memory_mask": seen}
            logits, cache = fnmodels.decode(text, given, *step[1:], cache, config=CONFIG.text)
            found.append(logits[0])
        assert_close(torch.cat(found), wanted)
        rows = fnmodels.rows((inputs | memory, masks, tables))
        mapped = torch.vmap(lambda batch: fnmodels.forward(text, *batch, config=CONFIG.text, kernel="math"))(rows)
        assert_close(mapped[:, 0][segment_ids > 0], _ours(_params()))
    assert fnmodels.tap_names(CONFIG.text)["layers.1.cross_attention"] == "[B, S, 24]"
    assert "layers.2.attention" in fnmodels.tap_names(CONFIG.vision)


@pytest.mark.parametrize("slots", [2, 5])
def test_generation_is_that_of_each_document_alone_and_of_transformers(slots: int) -> None:
    """Prompts with and without images, one twice; ends with an image token, and another image goes first."""
    texts, images = _documents()
    prompts, own = [text.tolist() for text in texts], [*images]
    prompts, own = [*prompts, prompts[1], prompts[0][:2]], [*own, own[1], own[0]]
    found = train.generate(
        _params(), CONFIG, prompts, max_new=6, images=own, sampling=train.Sampling(0.0), slots=slots, kernel="math"
    )
    for row, (prompt, seen) in enumerate(zip(prompts, own, strict=True)):
        answer, nats = _greedy(torch.tensor(prompt), seen, 6)
        assert found.tokens[row] == answer
        assert_close(found.logp[row], torch.stack(nats))
        theirs = torch.tensor(prompt)
        for token in answer:
            logits = _reference()(input_ids=theirs[None], use_cache=False, **_pixels(theirs, seen)).logits[0, -1]
            assert int(logits.argmax()) == token
            theirs = torch.cat((theirs, torch.tensor([token])))
    bare = train.generate(_params(), CONFIG, prompts[2:3], max_new=6, sampling=train.Sampling(0.0), kernel="math")
    assert bare.tokens[0] == found.tokens[2]
    exchanged = train.generate(
        _params(), CONFIG, prompts[:1], max_new=6, images=[own[1][:1]], sampling=train.Sampling(0.0), kernel="math"
    )
    assert (exchanged.logp[0] - found.logp[0]).abs().max() > 1e-4  # a planted bug: the images of another prompt


def test_pictures_are_read_as_by_transformers_and_answered_by_a_command(forks: Forks, tmp_path: Path) -> None:
    """By Pillow, whose filter rounds to whole numbers between its two passes."""
    from PIL import Image
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    wrappers.save(_reference(), tmp_path)
    settings = {
        "size": {"height": 8, "width": 8},
        "max_image_tiles": 2,
        "image_mean": [0.4] * 3,
        "image_std": [0.3] * 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    words = {f"w{number}": number for number in range(65) if number != IMAGE} | {"<|image|>": IMAGE}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<|image|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    process = MllamaImageProcessorPil(**settings)
    for number, size in enumerate([(5, 6), (9, 20), (40, 12), (16, 16)]):
        down, right, color = torch.meshgrid(*(torch.arange(n) for n in (*size, 3)), indexing="ij")
        pixels = (127 + 90 * torch.sin(down / 4 + right / 5 + color)).byte().numpy()
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        (image,), text = ImagePrompts.of(tmp_path, CONFIG, tokenizer).read(tmp_path / f"{number}.png")
        assert text == "<|image|>"
        theirs = torch.as_tensor(process([Image.fromarray(pixels)], return_tensors="np")["pixel_values"])[0, 0]
        ours = _tiles_of(image)
        assert float((ours - theirs[: len(ours)]).abs().max()) <= 2.5 / 255 / 0.3
    argv = [str(tmp_path), "--prompt", "w1 <|image|> w2", "--image", str(tmp_path / "1.png"), "--tokens", "3"]
    for arguments in (argv, [str(tmp_path), "--prompt", "w1 w2", "--tokens", "3"]):
        done = forks.run(["-m", "train.sample", *arguments])
        assert done.returncode == 0, done.stderr


def _tiles_of(image: Tensor) -> Tensor:
    """The tiles [n, C, 8, 8] of an image [C, rows * 8, columns * 8]."""
    return image.unflatten(1, (-1, 8)).unflatten(3, (-1, 8)).permute(1, 3, 0, 2, 4).flatten(0, 1)


def _greedy(tokens: Tensor, images: list[Tensor], count: int) -> tuple[list[int], list[Tensor]]:
    """(the answer, nats of its tokens) by whole forward passes."""
    answer, nats = [], []
    for _ in range(count):
        ids = torch.ones_like(tokens)[None]
        inputs, masks, tables = fnmodels.prepare(CONFIG.text, tokens[None])
        if images:
            inputs |= mllama.image_memory(tokens[None], ids, *_features(_params(), images), config=CONFIG)
        logits = fnmodels.forward(_params()["text"], inputs, masks, tables, config=CONFIG.text, kernel="math")[0, -1]
        answer.append(int(logits.argmax()))
        nats.append(logits.log_softmax(-1).max())
        tokens = torch.cat((tokens, torch.tensor(answer[-1:])))
    return answer, nats


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"one of \(1, 1\), \(1, 2\), \(2, 1\), not \[3, 16, 16\]"):
        mllama_vision.tile_rows([torch.zeros(3, 16, 16)], CONFIG.vision)
    tokens = torch.tensor([[1, IMAGE, IMAGE]])
    features, at = _features(_params(), [torch.zeros(3, 8, 8)])
    with pytest.raises(ValueError, match=r"The text has 2 image tokens .* but there are 1 images"):
        mllama.image_memory(tokens, torch.ones_like(tokens), features, at, config=CONFIG)
    one = torch.zeros(3, 8, 8)
    with pytest.raises(ValueError, match=r"request 1 has 1 image tokens \(id 61\), but 2 images; each image needs one"):
        train.generate(_params(), CONFIG, [[1, IMAGE]] * 2, max_new=1, images=[[one], [one, one]])
    with pytest.raises(ValueError, match=r"Request 0: An image is floats \[3, H, W\] of whole tiles"):
        train.generate(_params(), CONFIG, [[1, IMAGE]], max_new=1, images=[[torch.zeros(3, 9, 8)]])
    with pytest.raises(ValueError, match=r"whose text attends to images runs without kv_dtype and compile"):
        train.generate(_params(), CONFIG, [[1, IMAGE]], max_new=1, images=[[one]], compile="step")
    with pytest.raises(ValueError, match=r"request 0 has 1 image tokens \(id 61\), but 0 images"):
        train.generate(_params(), CONFIG, [[1, IMAGE, 5]], max_new=1)
    kept = [Request([1, IMAGE], 1, images=[one]), Request([1], 1, keep=True)]
    with pytest.raises(ValueError, match=r"Request 1 keeps its cache .* runs of prompts of text alone"):
        list(train.serve(_params(), CONFIG, kept, slots=2, capacity=8))
    with pytest.raises(TypeError, match=r"mllama.image_memory gives its text images .*train.generate and stream"):
        list(train.serve(_params(), CONFIG, iter([Request([1, IMAGE], 1, images=[one])]), slots=1, capacity=8))
    check_batch({"tokens": tokens, "labels": tokens.clamp(max=56)}, CONFIG)
    for entry, value in (("tokens", 65), ("labels", 57)):  # rows of the embedding, and logits
        with pytest.raises(ValueError, match=f"{entry}.* {value}"):
            check_batch({entry: torch.tensor([[value]])}, CONFIG)
    with pytest.raises(ValueError, match="'vision_output_dim' is 32"):
        mllama.Config.from_hf(VALUES | {"vision_config": _VISION | {"vision_output_dim": 32}})
    with pytest.raises(ValueError, match=r"'cross_attention_layers' is \[3\]; it must list some of 3 layers"):
        mllama.Config.from_hf(VALUES | {"text_config": _TEXT | {"cross_attention_layers": [3]}})
    assert P.count(CONFIG) == sum(leaf.numel() for leaf in tree.leaves(_params()))
