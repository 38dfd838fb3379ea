"""Generation with images: greedy tokens equal transformers', whatever the slots, chunks and neighbours."""

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from fnmodels import image_text
from fnmodels.cache import captured
from fnmodels.errors import PositionWarning
from fnmodels.image_text import image_grid
from fnmodels.inputs.images import patches_of
from tests.fnmodels.models import test_gemma4, test_llava_next
from tests.support import wrappers
from tests.support.image_texts import ImageCase, image_cases, image_forms
from tests.support.recorded import graphs_on_the_cpu
from train.generation import images as prompt_images
from train.generation.requests import Request

CASES = image_cases()
every_case = pytest.mark.parametrize("case", CASES, ids=str)


every_form = pytest.mark.parametrize("case", image_forms(), ids=str)
NEW = 6
GREEDY = train.Sampling(temperature=0.0)
SQUARE = (
    "blip_2",
    "gemma3",
    "llama4",
    "llava",
    "paligemma",
    "pixel_shuffle",
)  # whose towers read images of one size, but for NaFlex
# Numbers of text tokens, and the (rows, columns) of images in features.
PROMPTS: tuple[list[Any], ...] = (
    [(2, 3), 3, (1, 4), 4],
    [5, (3, 2), 2],
    [9],
    [2, (2, 2)],  # an image last
    [2, (2, 2), 1, (2, 2), 18],
    [2, (2, 2), 1, (2, 2), 18, (3, 2), 1],
)


@functools.cache
def prompts_of(case: ImageCase) -> tuple[list[list[int]], list[list[Any]]]:
    """(prompts, the images of each). The last begins with the whole one before it, images included."""
    generator = torch.Generator().manual_seed(3)
    side = case.config.vision.patch_size * case.family.cell_side(case.config)
    channels = case.config.vision.num_channels // getattr(case.config.vision, "frames", 1)
    prompts: list[list[int]] = []
    images: list[list[Any]] = []
    for parts in PROMPTS:
        begin = prompts[-1] if parts[:5] == PROMPTS[-2] and prompts and len(parts) > 5 else []
        prompts.append(list(begin))
        images.append(list(images[-1]) if begin else [])
        for part in parts[5:] if begin else parts:
            if isinstance(part, int):
                prompts[-1] += torch.randint(1, 40, (part,), generator=generator).tolist()
                continue
            if hasattr(case.family, "arranged"):
                image = test_llava_next.picture(case.config, (6, 12 + 2 * part[0]), generator)
                prompts[-1] += [case.config.image_token] * image_grid(image, config=case.config)[2]
                images[-1].append(image)
                continue
            rows, columns = (3, 3) if is_square(case) else part
            prompts[-1] += [case.config.image_token] * math.prod(wrappers.feature_grid(case.family, (rows, columns)))
            images[-1].append(torch.randn(channels, rows * side, columns * side, generator=generator))
    return prompts, images


def is_square(case: ImageCase) -> bool:
    return case.name.startswith(SQUARE) and not getattr(case.config.vision, "naflex", False)


def sees_prompts(case: ImageCase) -> bool:
    return hasattr(case.family, "prompt_masks")


def pixels_of(case: ImageCase, tokens: Tensor, images: Sequence[Tensor], prompt: int) -> dict[str, Tensor]:
    """What transformers' model takes beside the ids [1, S], the first `prompt` of which are no answer."""
    patch, types = case.config.vision.patch_size, (tokens == case.config.image_token).long()
    if case.name.startswith("gemma"):
        found = {"token_type_ids" if case.name == "gemma3" else "mm_token_type_ids": types}
    else:
        answer = (torch.arange(tokens.shape[1]) >= prompt).long()[None]
        found = {"token_type_ids": answer} if sees_prompts(case) else {}
    if not images:
        return found
    if hasattr(case.family, "arranged"):
        return test_llava_next.pixels(list(images))
    if case.name.startswith(("paddleocr", "hy_v4")):
        return case.tests.pixels(tokens, list(images))
    if case.name.startswith(("kimi", "exaone", "muse", "step")):
        return case.tests.pixels(list(images))
    if case.name.startswith("pixel_shuffle"):
        return wrappers.pixels_for(case.config)(images)
    if case.name.startswith(("qwen", "glm")):
        grids = torch.tensor([(1, image.shape[1] // patch, image.shape[2] // patch) for image in images])
        cells = torch.cat([wrappers.merged_patches(image, patch) for image in images])
        return {"pixel_values": cells, "image_grid_thw": grids, "mm_token_type_ids": types}
    if case.name.startswith("gemma4"):
        own = [patches_of(image, patch, channels_last=True) for image in images]
        most = max(one.shape[0] * one.shape[1] for one in own)
        pixels, places = torch.zeros(len(own), most, own[0].shape[-1]), torch.full((len(own), most, 2), -1)
        for i, one in enumerate(own):
            grid = torch.cartesian_prod(torch.arange(one.shape[0]), torch.arange(one.shape[1]))
            pixels[i, : len(grid)], places[i, : len(grid)] = one.flatten(0, 1), grid.flip(-1)
        return found | {"pixel_values": pixels, "image_position_ids": places}
    if case.name.startswith("mistral3"):
        return wrappers.padded(images)
    return found | {"pixel_values": torch.stack(list(images))}


def compared(case: ImageCase) -> slice:
    """Which prompts: all of a family's first variant, and of its others every other one."""
    return slice(None) if case in CASES else slice(None, None, 2)


@functools.cache
@torch.no_grad()
def theirs(case: ImageCase) -> list[list[int]]:
    """Greedy tokens after each prompt alone."""
    model, found = case.reference(), []
    for prompt, images in zip(*(part[compared(case)] for part in prompts_of(case)), strict=True):
        tokens = torch.tensor([prompt])
        known = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "suppress_tokens": special_ids(case)}
        # transformers' generation of BLIP-2 takes no text without an image
        if case.name in ("llama4", "blip_2") or prompt[-1] == case.config.image_token:
            # 5.24's forward of the whole Llama 4 raises, and its generation after an image goes on from the image's
            # last position: [3, 4, 4] after [2, 3, 3], where its forward has [4, 4, 4]
            found.append(_step_by_step(case, model, tokens, images))
            continue
        model.generation_config.eos_token_id = None
        out = model.generate(input_ids=tokens, **known, **pixels_of(case, tokens, images, len(prompt)))
        found.append(out[0, len(prompt) :].tolist())
    return found


def special_ids(case: ImageCase) -> list[int]:
    """Ids of images, videos and sounds, which transformers takes for those where they are drawn."""
    return [48, 49, 50] if case.name == "llama4" else [56, 57, 58, 59, 60]


def _step_by_step(case: ImageCase, model: Any, tokens: Tensor, images: Sequence[Tensor]) -> list[int]:
    """Greedy tokens without a cache; of Llama 4 by its parts."""
    begin = tokens.shape[1]
    for _ in range(NEW):
        if case.name == "llama4":
            x = model.get_input_embeddings()(tokens)
            if images:
                pixels = torch.stack(list(images))
                seen = model.get_image_features(pixel_values=pixels, return_dict=True).last_hidden_state
                x = x.masked_scatter(
                    (tokens == case.config.image_token)[..., None], model.multi_modal_projector(seen.flatten(0, -2))
                )
            logits = model.language_model(inputs_embeds=x, use_cache=False).logits
        else:
            seen = pixels_of(case, tokens, images, begin)
            if case.name == "gemma4_unified":
                seen |= test_gemma4.masks(model, seen["mm_token_type_ids"])
            logits = model(input_ids=tokens, use_cache=False, **seen).logits
        logits[..., special_ids(case)] = -torch.inf
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
    return tokens[0, begin:].tolist()


def ours(case: ImageCase, **how: Any) -> list[list[int]]:
    prompts, images = (part[compared(case)] for part in prompts_of(case))

    def without_special(logits: Tensor, tokens: list[list[int]]) -> Tensor:
        return logits.index_fill(1, torch.tensor(special_ids(case)), -torch.inf)

    how = {"max_new": NEW, "sampling": GREEDY, "images": images, "logits_fn": without_special} | how
    return train.generate(case.params(), case.config, prompts, **how).tokens


@pytest.mark.parametrize("case", image_cases(every=True), ids=str)
def test_greedy_tokens_equal_transformers(case: ImageCase) -> None:
    """All at once; and of each family in two slots with chunks of a few tokens, which end within images where these
    are causal."""
    assert ours(case) == theirs(case)
    assert case not in CASES or ours(case, slots=2, chunk=5) == theirs(case)


def named(*names: str) -> Any:
    return pytest.mark.parametrize("case", [case for case in CASES if case.name in names], ids=str)


@every_form
def test_rows_alone_streamed_and_served_are_those_of_a_batch(case: ImageCase) -> None:
    """Their noise too; requests come from an iterator, and a slot is filled when another one is free."""
    prompts, images = prompts_of(case)
    wanted = train.generate(case.params(), case.config, prompts, max_new=4, images=images, slots=6, seeds=[*range(6)])
    streamed: list[list[int]] = [[] for _ in prompts]
    for row, token, _ in train.stream(
        case.params(), case.config, prompts, max_new=4, images=images, slots=1, chunk=7, seeds=[*range(6)]
    ):
        streamed[row].append(token)
    assert streamed == wanted.tokens
    requests = (Request(p, 4, seed=i, images=own) for i, (p, own) in enumerate(zip(prompts, images, strict=True)))
    events = list(train.serve(case.params(), case.config, requests, slots=2, capacity=80, kv_dtype=torch.int8))
    assert sorted(event.row for event in events) == sorted([*range(6)] * 4)


@every_form
def test_beams_and_drafts_read_images(case: ImageCase) -> None:
    """One beam is greedy; what a draft that reads images proposes is right, and one of text changes no token."""
    prompts, images = (part[:3] for part in prompts_of(case))
    if sees_prompts(case):
        with pytest.raises(ValueError, match="Prompt 0 ends with an image, or sees all of itself"):
            train.generation.beam_search(case.params(), case.config, prompts[0], beams=1, max_new=2, images=images[0])
        return
    known = {"max_new": NEW, "images": images, "sampling": GREEDY}
    wanted = train.generate(case.params(), case.config, prompts, **known).tokens
    for row in range(3):
        beam = train.generation.beam_search(
            case.params(), case.config, prompts[row], beams=1, max_new=NEW, images=images[row], chunk=4
        )
        assert beam[0].tokens == wanted[row]
    whole, text = (case.params(), case.config), (case.params()["text"], case.config.text)
    for draft, least in ((whole, 0.99), (text, 0.0)):
        found, right = train.generation.speculate(*whole, *draft, prompts, ahead=3, **known)
        assert found.tokens == wanted and right >= least


@every_case
def test_an_image_that_prompts_share_is_computed_once(case: ImageCase, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, images = (part[4:] for part in prompts_of(case))
    seen: list[int] = []
    compute, read = image_text.image_features, prompt_images.Reader.decoded

    def counted(params: Any, pixels: Any, **how: Any) -> Any:
        seen.append(len(pixels))
        return compute(params, pixels, **how)

    def decoded(self: Any, rows: Any, *more: Any, **how: Any) -> Any:
        tokens.append(sum(map(len, rows)))
        return read(self, rows, *more, **how)

    tokens: list[int] = []
    monkeypatch.setattr(prompt_images, "image_features", counted)
    monkeypatch.setattr(prompt_images.Reader, "decoded", decoded)
    found = train.generate(case.params(), case.config, prompts, max_new=2, sampling=GREEDY, images=images)
    # the first prompt is the beginning of the second, unless what it sees is not
    computed = sum(map(len, prompts)) if sees_prompts(case) else len(prompts[1]) - 1
    assert seen == [3] and sum(tokens) == computed
    other = [[copy.deepcopy(image) for image in own] for own in images]
    again = train.generate(case.params(), case.config, prompts, max_new=2, sampling=GREEDY, images=other)
    assert seen == [3, 5] and again.tokens == found.tokens
    assert sum(tokens) > 2 * len(prompts[1])  # equal ids of other images are no shared beginning


@named("gemma3", "qwen3_vl", "llava_llama")
def test_captured_steps_and_invariant_kernels(case: ImageCase, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, images = prompts_of(case)
    known = {"max_new": NEW, "sampling": GREEDY, "images": images}
    wanted = train.generate(case.params(), case.config, prompts, **known)
    one, other = (
        train.generate(case.params(), case.config, prompts, kernel="invariant", slots=slots, **known)
        for slots in (6, 2)
    )
    assert one.tokens == other.tokens == wanted.tokens
    assert all(torch.equal(a, b) for a, b in zip(one.logp, other.logp, strict=True))
    if not torch.cuda.is_available():
        graphs_on_the_cpu(monkeypatch)
        monkeypatch.setattr(captured, "_check_tokens", lambda _: None)
        assert train.generate(case.params(), case.config, prompts, compile="graph", **known).tokens == wanted.tokens


@named("qwen3_vl")
def test_edits_of_the_caller_see_what_deepstack_adds(case: ImageCase) -> None:
    prompts, images = (part[:2] for part in prompts_of(case))
    seen: list[Tensor] = []

    def watch(value: Tensor, name: str) -> Tensor:
        seen.append(value)
        return value

    known = {"max_new": 2, "sampling": GREEDY, "images": images}
    wanted = train.generate(case.params(), case.config, prompts, **known)
    found = train.generate(case.params(), case.config, prompts, edits={"layers.0.output": watch}, **known)
    assert found.tokens == wanted.tokens and len(seen) == 3


@named("gemma3", "qwen2_5_vl")
def test_images_are_any_sequence(case: ImageCase) -> None:
    """A tensor [n, C, H, W] has n of them; an iterator is read once, and not by the check alone."""
    side = 3 * case.config.vision.patch_size * case.family.cell_side(case.config)
    stack = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(5))
    prompt, params = [1, *[case.config.image_token] * 18, 2], case.params()
    known: dict[str, Any] = {"max_new": 4, "sampling": GREEDY}
    wanted = train.generate(params, case.config, [prompt], images=[list(stack)], **known).tokens[0]
    assert wanted != train.generate(params, case.config, [prompt], images=[list(stack.flip(0))], **known).tokens[0]
    assert wanted == train.generate(params, case.config, [prompt], images=stack[None], **known).tokens[0]
    for images in (stack, iter(stack)):
        made = Request(prompt, 4, GREEDY, images=images)  # type: ignore[arg-type]
        events = train.serve(params, case.config, [made], slots=1, capacity=30)
        assert [event.token for event in events] == wanted
    for images in (stack, iter(stack)):
        beams = train.generation.beam_search(params, case.config, prompt, beams=1, max_new=4, images=images)  # type: ignore[arg-type]
        assert beams[0].tokens == wanted


@pytest.mark.filterwarnings("error")
@named("qwen2_5_vl", "qwen3_vl")
def test_positions_of_an_image_are_those_of_its_longer_side(case: ImageCase) -> None:
    """Its tokens do not count where the range of positions ends; those of a text do."""
    side, most = 2 * case.config.vision.patch_size, case.config.text.max_position_embeddings
    image, prompt = torch.randn(3, 8 * side, 9 * side), [1, *[case.config.image_token] * 72, 2]
    known: dict[str, Any] = {"images": [[image]], "sampling": GREEDY}
    train.generate(case.params(), case.config, [prompt], max_new=most - 10, **known)
    with pytest.raises(PositionWarning, match=f"Positions reach {most + 1}"):
        train.generate(case.params(), case.config, [prompt], max_new=most - 9, **known)


def test_errors_name_the_request() -> None:
    case = next(case for case in CASES if case.name.startswith("gemma3"))
    (prompts, images), params = prompts_of(case), case.params()
    known: dict[str, Any] = {"max_new": 2}
    with pytest.raises(
        ValueError, match=r"The prompt of request 1 has 9 image tokens \(id 60\), but its 2 images have 18"
    ):
        train.generate(params, case.config, prompts[:2], images=[images[0], [*images[1], images[1][0]]], **known)
    with pytest.raises(ValueError, match=r"The prompt of request 0 has 18 image tokens .* its 0 images"):
        train.generate(params, case.config, prompts, **known)
    with pytest.raises(ValueError, match=r"images\[1\] is None; it must be a sequence of images, \(\) for none"):
        train.generate(params, case.config, prompts[:2], images=[images[0], None], **known)  # type: ignore[list-item]
    for run in (
        lambda: train.generate(params["text"], case.config, prompts[:1], images=images[:1], **known),
        lambda: train.generation.beam_search(
            params["text"], case.config, prompts[0], beams=1, images=images[0], **known
        ),
        lambda: train.generation.speculate(
            params["text"], case.config, None, None, prompts[:1], images=images[:1], **known
        ),
    ):
        with pytest.raises(
            ValueError, match=r"params has no 'text': pass the params of the full model, or config.text"
        ):
            run()
    with pytest.raises(ValueError, match="images has 1 lists; it must have one for each of 2 prompts"):
        train.generate(params, case.config, prompts[:2], images=images[:1], **known)
    with pytest.raises(ValueError, match=r"Request 1: An image is floats \[3, H, W\] with H and W multiples of 8"):
        train.generate(params, case.config, prompts[:2], images=[images[0], [torch.zeros(3, 20, 24)]], **known)
    with pytest.raises(TypeError, match="reads no images: pass config and params of a full model"):
        train.generate(params["text"], case.config.text, prompts[:1], images=images[:1], **known)
    with pytest.raises(ValueError, match="Prompt 0 ends with an image"):
        train.generation.beam_search(params, case.config, prompts[3], beams=1, max_new=2, images=images[3])
