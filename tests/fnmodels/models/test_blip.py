"""BLIP equals transformers with every parameter perturbed; packed captions equal each alone."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoConfig

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.errors import UserError
from fnmodels.models.vision_language import blip
from tests.support import wrappers
from tests.support.forks import Forks
from tests.support.oracle import assert_close, on_disk
from train.data.image_prompts import ImagePrompts

IMAGE, END = 60, 24  # the ids of the first token of a caption and of its end
_VISION: dict[str, Any] = {"model_type": "blip_vision_model", "hidden_size": 16, "intermediate_size": 20}
_VISION |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 12, "patch_size": 4}
_VISION |= {"layer_norm_eps": 1e-2}
_TEXT: dict[str, Any] = {"model_type": "blip_text_model", "hidden_size": 24, "intermediate_size": 40}
_TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 63, "max_position_embeddings": 32}
_TEXT |= {"layer_norm_eps": 7e-3, "encoder_hidden_size": 16, "bos_token_id": IMAGE, "sep_token_id": END}
VALUES: dict[str, Any] = {"model_type": "blip", "architectures": ["BlipForConditionalGeneration"]}
VALUES |= {"vision_config": _VISION, "text_config": _TEXT}
CONFIG = blip.Config.from_hf(VALUES)
# Per document: its tokens, and whether it has an image, whose token may be drawn again later.
DOCUMENTS = (([IMAGE, 5, 9, 3], True), ([IMAGE, 7, IMAGE, 11, 2, END], True), ([4, IMAGE, 8], False), ([IMAGE], True))


@functools.cache
def _reference() -> Any:
    config = AutoConfig.for_model(**VALUES)
    config._attn_implementation = "eager"
    model = wrappers.perturbed(transformers.BlipForConditionalGeneration(config))
    with torch.no_grad():  # so that tokens and images show in what is drawn: norms after sublayers would hide them
        for name, tensor in model.text_decoder.named_parameters():
            if name.endswith("LayerNorm.bias"):
                tensor -= 1
            if "output.dense" in name:
                tensor *= 0.3
    return model


@functools.cache
def _params() -> Any:
    return wrappers.ours_of(on_disk(_reference()), CONFIG)


@functools.cache
def _documents() -> tuple[list[Tensor], list[list[Tensor]]]:
    """(tokens of each document, its images [3, 12, 12])."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.tensor(tokens) for tokens, _ in DOCUMENTS]
    return texts, [[torch.randn(3, 12, 12, generator=generator)] * seen for _, seen in DOCUMENTS]


def _features(params: Any, images: list[Tensor]) -> tuple[Tensor, Tensor]:
    patches, at = blip.tile_rows(images, CONFIG.vision)
    batch = fnmodels.prepare(CONFIG.vision, patches, positions=at)
    return fnmodels.forward(params["vision"], *batch, config=CONFIG.vision, kernel="math"), at


def _prepared(params: Any, *, reverse: bool = False) -> tuple[Any, Tensor]:
    """((inputs, masks, tables) of two rows of documents, segment ids); reverse: a planted bug, images exchanged."""
    texts, images = _documents()
    tokens, segment_ids = wrappers.rows_of((texts[:3], texts[3:]), 15)
    flat = [image for own in images for image in own]
    features, at = _features(params, flat[::-1] if reverse else flat)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, tables = fnmodels.prepare(CONFIG.text, tokens, positions=own, segment_ids=segment_ids)
    return (inputs | blip.image_memory(tokens, segment_ids, features, at, config=CONFIG), masks, tables), segment_ids


def _ours(params: Any, *, reverse: bool = False, kernel: Any = "math") -> Tensor:
    """[tokens, V] of the packed documents."""
    prepared, segment_ids = _prepared(params, reverse=reverse)
    return fnmodels.forward(params["text"], *prepared, config=CONFIG.text, kernel=kernel)[segment_ids > 0]


def _logits(text: Tensor, images: list[Tensor]) -> Tensor:
    """transformers' logits [tokens, V] of a document alone."""
    if not images:
        return _reference().text_decoder(input_ids=text[None], use_cache=False).logits[0]
    return _reference()(pixel_values=images[0][None], input_ids=text[None], use_cache=False).logits[0]


def _theirs() -> Tensor:
    """[tokens, V]: every document alone, one after the other."""
    return torch.cat([_logits(text, images) for text, images in zip(*_documents(), strict=True)])


def test_packed_documents_with_images_equal_transformers_alone() -> None:
    with torch.no_grad():
        wanted = _theirs()
        assert_close(_ours(_params()), wanted)
        assert_close(_ours(_params(), kernel="auto"), wanted)
        assert (_ours(_params(), reverse=True) - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params())
    _ours(params).square().sum().backward()
    model = _reference()
    model.zero_grad()
    _theirs().square().sum().backward()
    wrappers.assert_gradients(model, CONFIG, params)


def test_every_parameter_changes_the_logits() -> None:
    """But biases of keys, which the softmax cancels; so comparisons with transformers see all of them."""
    flat = tree.flatten(_params())
    with torch.no_grad():
        wanted = _ours(_params())
        for path, leaf in flat.items():
            if not path.endswith("k_bias"):
                changed = tree.unflatten({**flat, path: leaf * 1.05 + 0.02})
                assert (_ours(changed) - wanted).abs().max() > 1e-4, path


def test_files_are_read_and_written(tmp_path: Path) -> None:
    wrappers.assert_files(_reference(), CONFIG, tmp_path)
    wrappers.assert_text_alone(CONFIG, tmp_path)
    assert blip.Config.from_hf(CONFIG.to_hf()) == CONFIG
    assert P.count(CONFIG) == sum(leaf.numel() for leaf in tree.leaves(_params()))


def test_files_of_older_releases_are_read() -> None:
    """They repeat the head and its bias, and have a buffer of positions; another bias there is an error."""
    state = on_disk(_reference()) | {"text_decoder.bert.embeddings.position_ids": torch.arange(32)[None]}
    state |= {"text_decoder.cls.predictions.decoder.bias": state["text_decoder.cls.predictions.bias"]}
    words = state["text_decoder.bert.embeddings.word_embeddings.weight"]
    state |= {"text_decoder.cls.predictions.decoder.weight": words}
    found = tree.flatten(P.from_tensors(CONFIG, state.items()))
    assert all(torch.equal(leaf, found[path]) for path, leaf in tree.flatten(_params()).items())
    wrong = state | {"text_decoder.cls.predictions.decoder.bias": torch.zeros(63)}
    with pytest.raises(P.CheckpointError, match=r"cls\.predictions\.decoder\.bias"):
        P.from_tensors(CONFIG, wrong.items())


def test_the_text_is_a_cache_and_a_batch_like_any_other() -> None:
    """Token by token as in one call; under vmap; names of taps."""
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


@pytest.mark.parametrize("slots", [2, 5])
def test_generation_is_that_of_transformers(slots: int) -> None:
    """Captions of several images and prompts, one twice; a text without an image; and another image goes first."""
    texts, images = _documents()
    prompts = [text.tolist() for text in (texts[0], texts[3], texts[0][:2], texts[0], texts[3])]
    own = [images[0], images[3], images[1], images[0], images[0]]
    known: dict[str, Any] = {"max_new": 8, "sampling": train.Sampling(0.0), "kernel": "math", "stop_ids": (END,)}
    found = train.generate(_params(), CONFIG, [*prompts, [4, 8]], images=[*own, []], slots=slots, **known)
    for row, (prompt, seen) in enumerate(zip(prompts, own, strict=True)):
        given = torch.tensor([[*prompt, 1]])  # whose last token transformers drops
        theirs = _reference().generate(seen[0][None], given, max_new_tokens=8, do_sample=False)
        assert found.tokens[row] == theirs[0, len(prompt) :].tolist()
    assert len({tuple(tokens) for tokens in found.tokens}) > 3 and "stop_id" in found.reasons
    bare = train.generate(_params(), CONFIG, [[4, 8]], **known)
    assert bare.tokens[0] == found.tokens[-1]
    exchanged = train.generate(_params(), CONFIG, prompts[:1], images=[images[1]], **known)
    assert (exchanged.logp[0][0] - found.logp[0][0]).abs() > 1e-4  # a planted bug: the image of another prompt


def test_a_picture_is_read_and_captioned_as_by_transformers(forks: Forks, tmp_path: Path) -> None:
    """By a command, whose tokenizer has no image token and adds others around a text; and the caption ends."""
    from PIL import Image
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    wrappers.save(_reference(), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0}))
    settings = {"size": {"height": 12, "width": 12}, "image_mean": [0.4] * 3, "image_std": [0.3] * 3, "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(63) if number != IMAGE}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("w1 $A w2", special_tokens=[("w1", 1), ("w2", 2)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    process, picture = BlipImageProcessorPil(**settings), tmp_path / "one.png"
    down, right, color = torch.meshgrid(*(torch.arange(n) for n in (30, 17, 3)), indexing="ij")
    pixels = (127 + 90 * torch.sin(down / 4 + right / 5 + color)).byte().numpy()
    Image.fromarray(pixels).save(picture)
    reader = ImagePrompts.of(tmp_path, CONFIG, tokenizer)
    (image,), text = reader.read(picture)
    theirs = torch.as_tensor(process([Image.fromarray(pixels)], return_tensors="np")["pixel_values"])
    assert text == "" and reader.ids("w5 w9") == [IMAGE, 5, 9]
    assert float((image - theirs[0]).abs().max()) <= 2.5 / 255 / 0.3  # Pillow rounds between its two passes
    for prompt, ids in (("", [[1, 1]]), ("w5 w9", [[1, 5, 9, 1]])):
        every = _reference().generate(theirs, torch.tensor(ids), max_new_tokens=8, do_sample=False)[0]
        wanted = every[len(ids[0]) - 1 :]
        argv = [str(tmp_path), "--prompt", prompt, "--image", str(picture), "--tokens", "8", "--temperature", "0"]
        done = forks.run(["-m", "train.sample", *argv])
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-len(wanted) + 1 :] == [f"w{token}" for token in wanted if token != END], done.stdout
    for pictures, chat in (([picture], True), ([picture] * 2, False)):
        with pytest.raises(UserError, match="a text of blip is the caption of one picture, and not a chat"):
            reader.with_pictures("w5", pictures, chat=chat)


def test_errors_name_what_does_not_fit() -> None:
    one = torch.zeros(3, 12, 12)
    with pytest.raises(ValueError, match=r"An image is floats \[3, 12, 12\], not \[3, 12, 16\]"):
        blip.tile_rows([torch.zeros(3, 12, 16)], CONFIG.vision)
    tokens = torch.tensor([[1, IMAGE, IMAGE]])
    with pytest.raises(ValueError, match=r"0 documents begin with the image token \(id 60\), but there are 1 images"):
        blip.image_memory(tokens, torch.ones_like(tokens), *_features(_params(), [one]), config=CONFIG)
    with pytest.raises(ValueError, match=r"Request 0: An image is floats \[3, 12, 12\]"):
        train.generate(_params(), CONFIG, [[IMAGE]], max_new=1, images=[[torch.zeros(3, 9, 8)]])
    for name in ("BlipForQuestionAnswering", "BlipForImageTextRetrieval", "BlipModel"):
        with pytest.raises(ValueError, match=f"{name}.* only BlipForConditionalGeneration is supported: BLIP's models"):
            blip.Config.from_hf(VALUES | {"architectures": [name]})
    with pytest.raises(ValueError, match="'is_decoder' is false"):
        blip.Config.from_hf(VALUES | {"text_config": _TEXT | {"is_decoder": False}})
    with pytest.raises(ValueError, match="'qkv_bias' is false"):
        blip.Config.from_hf(VALUES | {"vision_config": _VISION | {"qkv_bias": False}})
