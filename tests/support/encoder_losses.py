"""Losses of encoders, towers, pairs, sounds and flows, with the rows of two ranks; and their steps over a mesh.

Each setting is (config, loss, [rows of a rank, rows of another]), which are packed and hold padding.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import bart, bert, clip, flux, moonshine, mpnet, t5, t5gemma, tree, vit, whisper
from fnmodels.inputs import noise_keys
from fnmodels.inputs.image_places import image_places
from fnmodels.models.common.registry import family_for, model_type_of
from fnmodels.models.vision_language import (
    exaone4_5,
    gemma3,
    gemma4,
    glm4v,
    glm5_next,
    hy_v4_vl,
    kimi_k25,
    llama4,
    llava,
    llava_next,
    mistral3,
    muse_glimmer,
    paddleocr_vl,
    paligemma,
    pixel_shuffle,
    qwen2_5_vl,
    qwen3_5,
    qwen3_vl,
    step3p7,
)
from fnmodels.ops.dropout import Dropout
from tests.fnmodels.models import (
    test_exaone4_5,
    test_gemma3,
    test_gemma4,
    test_glm4v,
    test_glm5_next,
    test_hy_v4_vl,
    test_kimi_k25,
    test_llama4,
    test_llava,
    test_llava_next,
    test_mistral3,
    test_muse_glimmer,
    test_paddleocr_vl,
    test_paligemma,
    test_pixel_shuffle,
    test_qwen2_5_vl,
    test_qwen3_5,
    test_qwen3_vl,
    test_step3p7,
)
from tests.support import wrappers
from tests.support.cases import generic_params
from tests.support.one_process import One, by_one_rank, error, even, gradient_errors, watched
from tests.support.ranks_pool import devices
from tests.support.sense_losses import SENSES
from tests.variants.bart import TINY as BART
from tests.variants.flux import TINY as FLUX
from tests.variants.glm5_next import TINY as GLM5_NEXT
from tests.variants.moonshine import TINY as MOONSHINE
from tests.variants.t5gemma import TINY as T5GEMMA
from tests.variants.vision import pairs
from tests.variants.vision import variants as towers
from tests.variants.whisper import TINY as WHISPER
from train.comm.dtensor import local_tree
from train.gradients import gradient_sums
from train.optim.base import with_paths
from train.parallel import Mesh, Strategy
from train.parallel.pipeline.stages import stage_plan
from train.parallel.placement import rules_of, shardings
from train.update import update

Setting = tuple[Any, Callable[..., Any], list[dict[str, Tensor]]]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PREFIXES = ("", "decoder_")  # of the entries of each stack
HEADS = {"classification": {"num_labels": 4}, "none": {"pooler": 0}}


def setting(head: str) -> Setting:
    """(config, loss, the rows of each rank), which have 5 and 4 documents; two pairs lie on both."""
    config = bert.Config(vocab_size=64, max_position_embeddings=16, head=head, **SIZES, **HEADS[head])
    documents = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [12], [13, 14, 15]]
    values = [
        {"labels": [0, 0, 1, 2, 1], "roles": [0, 1, 0, 0, 2]},
        {"labels": [3, 3, 1, 2], "roles": [0, 1, 1, 1]},
    ]
    halves = [
        train.document_batch([[t + 20 * i for t in d] for d in documents[: 5 - i]], 8, **values[i]) for i in range(2)
    ]
    if head == "classification":
        return config, functools.partial(train.classification_loss, config=config), halves
    embedder = fnmodels.Embedder(("mean", "max"))
    return config, functools.partial(train.contrastive_loss, config=config, embedder=embedder), halves


def pair_setting() -> Setting:
    """(config, loss, the rows of each rank) of T5, with dropout at every place."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    rates = Dropout(*[0.2] * 6)  # of files there is one rate for all places
    return paired(t5.Config(vocab_size=64, num_hidden_layers=2, num_decoder_layers=2, dropout=rates, **sizes))


def bart_setting() -> Setting:
    """(config, loss, the rows of each rank) of BART, whose logits have a fixed bias, with dropout at its places."""
    rates = {"dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.2}
    return paired(bart.Config.from_hf(BART | rates | {"vocab_size": 64, "decoder_attention_heads": 4}))


def gemma_setting() -> Setting:
    """(config, loss, the rows of each rank) of T5Gemma, whose stacks differ in width."""
    values = {"vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    parts = {name: T5GEMMA[name] | values for name in ("encoder", "decoder")}
    return paired(t5gemma.Config.from_hf(T5GEMMA | parts | {"vocab_size": 64}))


def paired(config: Any) -> Setting:
    """A setting of a model of both stacks, with keys of noise for a config with rates of dropout."""
    pairs = [([3, 4, 5], [6, 7]), ([8, 9], [10, 11, 12])]
    halves = [[([t + 20 * i for t in a], [t + 20 * i for t in b]) for a, b in pairs] for i in range(2)]
    made = [fnmodels.pair_batch(half, 6, 6, start=0) for half in halves]
    for i, batch in enumerate(made):
        of = (
            noise_keys(2 * i + j, batch[f"{at}positions"], batch[f"{at}segment_ids"]) for j, at in enumerate(PREFIXES)
        )
        batch |= {f"{at}rng": keys for at, keys in zip(PREFIXES, of, strict=True)}
    return config, functools.partial(train.losses.pair_loss, config=config), made


def flow_setting() -> Setting:
    """(config, loss, the rows of each rank) of Flux: rows of two images, the second rank's smaller."""
    config = flux.Config.from_hf(FLUX | {"out_channels": 12})
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    made = []
    for height in (4, 2):
        latents, positions, owners = fnmodels.diffusion.latent_rows([draw(3, 2, 2), draw(3, height, 4)], length=8)
        batch = {"latents": latents, "noise": draw(latents.shape), "positions": positions, "segment_ids": owners}
        batch |= {"text": draw(1, 4, 10), "text_segment_ids": torch.tensor([[1, 2, 2, 0]]), "pooled": draw(1, 2, 9)}
        made.append(batch | {"time": draw(1, 2).sigmoid(), "guidance": draw(1, 2).sigmoid()})
    return config, functools.partial(train.flow_matching_loss, config=config), made


def sound_setting() -> Setting:
    """(config, loss, the rows of each rank) of Whisper: two clips with their texts in each row."""
    config, draw = whisper.Config.from_hf(WHISPER | {"decoder_attention_heads": 4, "vocab_size": 64}), _generator()
    clips = [[torch.randn(config.num_mel_bins, frames, generator=draw) for frames in (6, 4)] for _ in range(2)]
    return _spoken(config, [fnmodels.inputs.frame_rows(two, config, length=6) for two in clips])


def wave_setting() -> Setting:
    """(config, loss, the rows of each rank) of Moonshine, likewise."""
    heads = dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4)
    config = moonshine.Config.from_hf(MOONSHINE | heads | {"vocab_size": 64, "partial_rotary_factor": 0.7})
    draw = _generator()
    clips = [[torch.randn(511 + 384 * tokens, generator=draw) for tokens in (3, 2)] for _ in range(2)]
    return _spoken(config, [fnmodels.inputs.sample_rows(two, config, length=6) for two in clips])


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _spoken(config: Any, sounds: list[tuple[Tensor, Tensor, Tensor]]) -> Setting:
    """The setting of rows of two clips, (tokens, positions, segment_ids) for each rank."""
    draw, made = torch.Generator().manual_seed(1), []
    for frames, positions, segment_ids in sounds:
        texts = torch.randint(3, config.vocab_size, (1, 7), generator=draw)
        own = fnmodels.segments_from_lengths([[4, 2]], 7)
        batch = {"tokens": frames, "positions": positions, "segment_ids": segment_ids, "decoder_tokens": texts}
        batch |= {"decoder_segment_ids": own, "decoder_positions": fnmodels.positions_from_segments(own)}
        made.append(batch | {"labels": texts.roll(-1, 1).where(own > 0, -100)})
    return config, functools.partial(train.losses.pair_loss, config=config), made


def image_setting() -> Setting:
    """(config, loss, the rows of each rank) of CLIP: a row of two captions and their images, of two sizes."""
    text = SIZES | {"vocab_size": 64, "max_position_embeddings": 8, "bos_token_id": 62, "eos_token_id": 63}
    vision = SIZES | {"image_size": 12, "patch_size": 6}
    values = {"model_type": "clip", "projection_dim": 20, "text_config": text, "vision_config": vision}
    config = clip.Config.from_hf(values)
    draw, made = torch.Generator().manual_seed(0), []
    for half in range(2):
        images = [torch.randn(3, 12, width, generator=draw) for width in (12, 18)]
        captions = [[62, 5 + half, 63], [62, 7 + half, 9, 63]]
        batch = train.losses.image_text_batch(captions, images, config, pairs=2)
        made.append(batch | {"labels": batch["labels"] + 2 * half})
    return config, functools.partial(train.image_text_loss, config=config), made


def picture_setting() -> Setting:
    """(config, loss, the rows of each rank) of ViT as a classifier: two images in each row."""
    config = vit.Config.from_hf(towers()["vit_labels"])
    draw, made = torch.Generator().manual_seed(0), []
    for half in range(2):
        images = [torch.randn(3, 12, 18, generator=draw) for _ in range(2)]
        patches, positions, image_ids = fnmodels.inputs.patch_rows(images, config, length=14)
        labels = (image_ids + half) % 3
        made.append({"tokens": patches, "positions": positions, "segment_ids": image_ids, "labels": labels})
    return config, functools.partial(train.classification_loss, config=config), made


def shared_setting() -> Setting:
    """(config, loss, the rows of each rank) of MPNet, whose layers share a bias of each head."""
    config = mpnet.Config(vocab_size=64, max_position_embeddings=16, head="classification", num_labels=4, **SIZES)
    return config, functools.partial(train.classification_loss, config=config), setting("classification")[2]


def answer_loss(params: Any, batch: dict[str, Tensor], *, config: Any, family: Any) -> Any:
    """Next-token prediction of texts with images: a loss of one's own."""
    features, *later = image_features(params, batch, config, family)
    where = {name: batch[name] for name in ("positions", "segment_ids")}
    inputs, masks, freqs_cis = fnmodels.prepare(config.text, batch["tokens"], **where)
    if hasattr(family, "arranged"):  # pictures without tiles: the whole one, and a newline
        pictures = features.split(config.vision.side**2, 1)
        features = torch.cat([family.arranged(params, one, (1, 1), config=config) for one in pictures], 1)
    places = image_places(batch["tokens"], config.image_token, features.new_ones(features.shape[:2]) > 0)
    inputs = family.with_images(params, inputs, features, places, config=config)
    if family in (gemma3, gemma4):
        masks = family.image_masks(config.text if family is gemma3 else config, *where.values(), places)
    if "token_types" in batch:
        masks = family.prompt_masks(config, *where.values(), batch["token_types"])
    edits = family.deepstack(later, places) if later else None
    logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text, edits=edits)
    return train.cross_entropy(logits, batch["labels"])


def image_features(params: Any, batch: dict[str, Tensor], config: Any, family: Any) -> tuple[Tensor, ...]:
    """Those that replace embeddings, then those that Qwen3-VL adds to later layers."""
    at = {"positions": batch["patch_positions"], "segment_ids": batch["image_ids"]}
    (weights, tower), run = (params["vision"], config.vision), fnmodels.forward
    if hasattr(family, "tower"):
        (weights, tower), run = family.tower(params, config), fnmodels.hidden
    names = family.taps(config) if hasattr(family, "taps") else ()
    x = run(weights, *fnmodels.prepare(tower, batch["patches"], **at), config=tower, taps=names)
    x, tapped = x if names else (x, {})
    found: tuple[Tensor, ...] = family.features_of(
        params, x, tapped, family.cells(*at.values(), family.cell_side(config)), config=config
    )
    return found


_GLM5_NEXT = GLM5_NEXT | {"num_attention_heads": 4, "num_key_value_heads": 4}  # tp shares heads evenly
# {name: (family, its config.json)}. The last layer of LLaVA's tower is not read.
READERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma3": (gemma3, test_gemma3.VALUES | {"vision_config": test_gemma3.VISION | {"vision_use_head": False}}),
    "gemma4": (gemma4, test_gemma4.VARIANTS["gemma4"]),
    "gemma4_e": (gemma4, test_gemma4.VARIANTS["gemma4_e"]),
    "gemma4_unified": (gemma4, test_gemma4.VARIANTS["gemma4_unified"]),
    "llama4_images": (llama4, test_llama4.VALUES),
    "llava": (llava, test_llava.VARIANTS["llama"]),
    "llava_next": (llava_next, test_llava_next.VARIANTS["llava_onevision"]),
    "mistral3": (mistral3, test_mistral3.VARIANTS["mistral3_bias"]),
    "exaone4_5": (exaone4_5, test_exaone4_5.VALUES),
    "glm4v": (glm4v, test_glm4v.VARIANTS["glm_ocr"]),
    "glm5_next_images": (glm5_next, test_glm5_next.VARIANTS["glm5_next"] | {"text_config": _GLM5_NEXT}),
    "hy_v4_vl": (hy_v4_vl, test_hy_v4_vl.VARIANTS["hy_v4_vl"]),
    "internvl": (pixel_shuffle, test_pixel_shuffle.VARIANTS["internvl"]),
    "kimi_k25": (kimi_k25, test_kimi_k25.VALUES),
    "muse_glimmer": (muse_glimmer, test_muse_glimmer.VALUES),
    "paddleocr_vl": (paddleocr_vl, test_paddleocr_vl.VALUES),
    "paligemma": (paligemma, test_paligemma.VARIANTS["paligemma2"]),
    "qwen2_vl": (qwen2_5_vl, test_qwen2_5_vl.VARIANTS["qwen2_vl"]),
    "qwen2_5_vl": (qwen2_5_vl, test_qwen2_5_vl.VALUES),
    "qwen3_vl": (qwen3_vl, test_qwen3_vl.VALUES),
    "qwen3_5_images": (qwen3_5, test_qwen3_5.values_of("qwen3_5")),
    "step3p7": (step3p7, test_step3p7.VARIANTS["step3p7"]),
}


def reader_setting(name: str) -> Setting:
    """A text model that reads images: two documents in each row, with images of several sizes where it takes them."""
    family, values = READERS[name]
    config = family.Config.from_hf(values | {"text_config": values["text_config"] | {"vocab_size": 64}})
    square = family in (gemma3, llama4, llava, paligemma, pixel_shuffle)
    side = {llava: 6, paligemma: 4, step3p7: 16}.get(family, 8)
    made = []
    for sizes in (((2, 3), (3, 2)), ((1, 4), (2, 2))):
        one, other = ((3, 3), (3, 3)) if square else sizes
        if hasattr(family, "arranged"):
            one = other = (1, config.vision.side**2 + 1)
        documents = [[2, one, 3], [4, other, 1]] if one == (1, 4) else [[1, one, 2], [5, other]]
        texts, images = wrappers.documents_with_grids(documents, config.image_token, side, family=family)
        tokens, own = wrappers.rows_of((texts,), 30)
        tokens = tokens + len(made) * (tokens < 40)  # else both rows have the same words
        flat = [image for several in images for image in several]
        if hasattr(family, "arranged"):
            side = config.vision.image_size
            flat = [torch.randn(3, side, side, generator=torch.Generator().manual_seed(i)) for i in range(len(flat))]
        frames = getattr(config.vision, "frames", 1)
        flat = [image.repeat_interleave(frames, 0) for image in flat]
        patches, at, image_ids = fnmodels.inputs.patch_rows(
            flat, config.vision, length=200 if family is step3p7 else 80
        )
        positions = fnmodels.positions_from_segments(own)
        if hasattr(family, "image_positions"):
            grids = torch.tensor([(1, *wrappers.feature_grid(family, grid)) for grid in (one, other)])
            positions = family.image_positions(tokens == config.image_token, own, grids)
        batch = {"tokens": tokens, "positions": positions, "segment_ids": own}
        batch["labels"] = tokens.roll(-1, 1).where(own > 0, -100)
        if hasattr(family, "prompt_masks"):
            batch["token_types"] = (positions > 10).long()
        made.append(batch | {"patches": patches, "patch_positions": at, "image_ids": image_ids})
    return config, functools.partial(answer_loss, config=config, family=family), made


def tower_loss(params: Any, batch: dict[str, Tensor], *, config: Any) -> Any:
    """The squared distance of a tower's hidden states from a wave: a loss of one's own."""
    given = {name: batch[name] for name in ("positions", "segment_ids")}
    prepared = fnmodels.prepare(config, batch["tokens"], **given)
    x = fnmodels.forward(params, *prepared, config=config)
    wave = torch.linspace(0, 3, x.shape[-1]) + batch["positions"][..., :2].sum(-1, keepdim=True)
    square, valid = (x - wave.sin()).square().mean(-1), batch["segment_ids"] > 0
    return square.where(valid, 0).sum(), valid.sum()


def tower_setting(name: str) -> Setting:
    """A vision tower: rows of images of several sizes."""
    values = towers()[name]
    config = family_for(model_type_of(values)).Config.from_hf(values)
    draw, made = torch.Generator().manual_seed(0), []
    for width in (18, 24):
        images = [torch.randn(3, 12, width, generator=draw), torch.randn(3, 24, 24, generator=draw)]
        patches, positions, image_ids = fnmodels.inputs.patch_rows(images, config, length=40)
        made.append({"tokens": patches, "positions": positions, "segment_ids": image_ids})
    return config, functools.partial(tower_loss, config=config), made


def text_setting(name: str) -> Setting:
    """Masked language modeling by a text encoder, on packed documents."""
    config = even(name)
    draw, made = torch.Generator().manual_seed(0), []
    for lengths in ((5, 2, 4), (1, 9)):
        own = fnmodels.segments_from_lengths([list(lengths)], 12)
        tokens = torch.randint(4, 60, own.shape, generator=draw)
        corrupted, labels = train.mask_tokens(tokens, own, draw, mask_id=3, vocab_size=64, rate=0.5)
        positions = fnmodels.positions_from_segments(own)
        batch = {"tokens": corrupted, "labels": labels, "segment_ids": own, "positions": positions}
        made.append(batch | ({"rng": noise_keys(0, positions, own)} if name == DROPPED else {}))
    if name == DROPPED:
        config = dataclasses.replace(config, dropout=Dropout(*[0.2] * 5))
    return config, functools.partial(train.next_token_loss, config=config), made


def siglip_setting() -> Setting:
    """SigLIP, whose loss has a bias: a row of two captions and their images."""
    values = pairs()["siglip"]
    values = values | {"text_config": values["text_config"] | {"vocab_size": 64, "max_position_embeddings": 4}}
    config = family_for("siglip").Config.from_hf(values)
    draw, made = torch.Generator().manual_seed(0), []
    for half in range(2):
        images = [torch.randn(3, 24, 24, generator=draw) for _ in range(2)]
        captions = [[5 + half, 6, 7, 2], [8 + half, 9, 10, 2]]
        batch = train.losses.image_text_batch(captions, images, config, pairs=2)
        made.append(batch | {"labels": batch["labels"] + 2 * half})
    return config, functools.partial(train.image_text_loss, config=config), made


SETTINGS: dict[str, Callable[[], Setting]] = {
    "classification": functools.partial(setting, "classification"),
    "none": functools.partial(setting, "none"),
    "pairs": pair_setting,
    "bart": bart_setting,
    "t5gemma": gemma_setting,
    "flow": flow_setting,
    "sound": sound_setting,
    "waves": wave_setting,
    "images": image_setting,
    "siglip": siglip_setting,
    "pictures": picture_setting,
    "shared": shared_setting,
}
TEXTS = (
    "bert",
    "roberta",
    "distilbert",
    "mpnet",
    "modernbert",
    "eurobert",
    "nomic_bert",
    "electra",
    "albert",
    "deberta_v2",
    "gte",
)
TOWERS = ("dinov2_registers", "dinov3", "clip_vision", "siglip_vision", "siglip2_vision", "pixtral")
DROPPED = "gte"  # of the encoders, the one that trains with dropout here, also inside of its MLPs
SETTINGS |= {name: functools.partial(text_setting, name) for name in TEXTS}
SETTINGS |= {name: functools.partial(tower_setting, name) for name in TOWERS}
SETTINGS |= {name: functools.partial(reader_setting, name) for name in READERS}
TWO_TOWERS = ("images", "siglip", *READERS)
EVERY = SETTINGS | SENSES  # of tests of meshes, see tests/train/parallel/test_senses.py
CLIP = 0.01  # below the norms
# Parameters of towers that the losses do not read.
UNREAD: dict[str, str | tuple[str, ...]] = {"dinov2_registers": "mask_token", "dinov3": "mask_token"}
UNREAD |= {"clip_vision": "norm", "llava": ("vision.layers.2", "vision.norm"), "llava_next": "vision.norm"}
UNREAD |= {"siglip_vision": "pooler", "siglip2_vision": "pooler"}
UNREAD["video_llava"] = ("vision", "video.layers.2", "video.norm")  # there are frames alone


def spec_of(name: str) -> Any:
    """The spec of a setting's model; what its loss does not read is frozen."""
    config = EVERY[name]()[0]
    unread = UNREAD.get(name, "-")

    def leaf(path: str, leaf: Any) -> Any:
        return dataclasses.replace(leaf, trainable=False) if path.startswith(unread) else leaf

    return with_paths(leaf, fnmodels.family_of(config).spec(config))


def optimizer_of(name: str) -> train.Optimizer:
    return train.adamw(1e-2, eps=1e-3, weight_decay=0.1, spec=spec_of(name))


def weights_of(config: Any) -> Any:
    """In fp64: gradients of query biases are far smaller than the rounding errors of fp32 that are in them.

    Limits of Gemma 4's layers are such that a part of the values exceeds them. Variances of batch norms are above 0.
    """
    params = tree.flatten(generic_params(config, torch.float64))
    params |= {path: leaf.abs() + 0.1 for path, leaf in params.items() if path.endswith(".variance")}
    limits = [path for path in params if "_limits." in path]
    return tree.unflatten(
        params | {path: torch.full_like(params[path], -0.7 if path.endswith("min") else 0.9) for path in limits}
    )


def placed(config: Any, mesh: Mesh, how: Strategy) -> Any:
    """`weights_of` over a mesh: this rank's shards."""
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
    plan = stage_plan(plan, config, devices(mesh), how) if mesh.pp > 1 else plan
    whole = tree.flatten(weights_of(config))
    return with_paths(lambda path, how: how.distribute(whole[path][how.local_box()].clone()), plan)


@functools.cache
def one_process(name: str) -> One:
    return by_one_rank(f"encoder-{name}", lambda: _computed(name))


def _computed(name: str) -> One:
    config, loss, halves = EVERY[name]()
    batch, params = {entry: torch.cat([half[entry] for half in halves]) for entry in halves[0]}, weights_of(config)
    optimizer = optimizer_of(name)
    sums = gradient_sums(loss, optimizer)(params, [batch], divide=False)
    paths = [path for path, leaf in tree.flatten(spec_of(name)).items() if leaf.trainable]
    grads = {path: grad.clone() for path, grad in zip(paths, sums.grads, strict=True)}
    state, metrics = update(optimizer, train.init_state(params, optimizer), sums, clip=CLIP)
    assert metrics["grad_norm"] > CLIP
    return One(grads, tree.flatten(state.params), metrics)


def errors_over(name: str, over: str, strategy: dict[str, Any] | None = None, **options: Any) -> dict[str, float]:
    """{name: error against one process} of a step: this rank's gradients and parameters, loss, count, gradient norm.

    options: the step's.
    """
    (config, loss, halves), mesh, how = EVERY[name](), Mesh.parse(over), Strategy(**strategy or {})
    one, grads, optimizer = one_process(name), list[Tensor](), optimizer_of(name)
    batch = {entry: torch.cat([half[entry] for half in halves]) for entry in halves[0]}
    held = placed(config, mesh, how)
    step = train.make_step(loss, optimizer, clip=CLIP, mesh=mesh, strategy=how, **options)
    with watched(grads):
        state, metrics = step(train.init_state(held, optimizer), batch)
    shards, local = tree.flatten(shardings(state.params)), tree.flatten(local_tree(state.params))
    mine = dict(zip([path for path in local if path in one.grads], grads, strict=True))
    found = gradient_errors(mine, one, {path: how.local_box() for path, how in shards.items()})
    found |= {
        f"{path} after a step": error(leaf, one.after[path][shards[path].local_box()]) for path, leaf in local.items()
    }
    return found | {
        key: error(metrics[key].double(), one.metrics[key].double()) for key in ("loss", "count", "grad_norm")
    }
