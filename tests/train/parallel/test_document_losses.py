"""Losses of documents, pairs and flows over a mesh: a step is that of one process, with pairs of all ranks together."""

import functools
import math
from typing import Any

import pytest
import torch

import fnmodels
import params as P
import train
from fnmodels import bert, clip, flux, mpnet, t5, tree, vit, whisper
from fnmodels.models.vision_language import gemma3
from tests.fnmodels.models.test_gemma3 import TEXT, VISION
from tests.fnmodels.models.test_gemma3 import VALUES as GEMMA3
from tests.support.cases import generic_params
from tests.support.one_process import error, worst
from tests.support.ranks_pool import Ranks, devices
from tests.variants.flux import TINY as FLUX
from tests.variants.vision import variants as towers
from tests.variants.whisper import TINY as WHISPER
from train.dist.dtensor import local_tree
from train.optim.base import with_paths
from train.parallel import Mesh, Strategy, compose
from train.parallel.compose import all_documents
from train.parallel.pipeline.stages import stage_plan
from train.parallel.placement import rules_of, shardings

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
HEADS = {"classification": {"num_labels": 4}, "none": {"pooler": 0}}


def setting(head: str) -> tuple[Any, Any, list[dict[str, torch.Tensor]]]:
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


def pair_setting() -> tuple[Any, Any, list[dict[str, torch.Tensor]]]:
    """(config, loss, the rows of each rank) of T5."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    config = t5.Config(vocab_size=64, num_hidden_layers=2, num_decoder_layers=2, **sizes)
    pairs = [([3, 4, 5], [6, 7]), ([8, 9], [10, 11, 12])]
    halves = [[([t + 20 * i for t in a], [t + 20 * i for t in b]) for a, b in pairs] for i in range(2)]
    made = [fnmodels.pair_batch(half, 6, 6, start=0) for half in halves]
    return config, functools.partial(train.pair_loss, config=config), made


def flow_setting() -> tuple[Any, Any, list[dict[str, torch.Tensor]]]:
    """(config, loss, the rows of each rank) of Flux: rows of two images, the second rank's smaller."""
    config = flux.Config.from_hf(FLUX | {"out_channels": 12})
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    made = []
    for height in (4, 2):
        latents, positions, owners = fnmodels.latent_rows([draw(3, 2, 2), draw(3, height, 4)], length=8)
        batch = {"latents": latents, "noise": draw(latents.shape), "positions": positions, "segment_ids": owners}
        batch |= {"text": draw(1, 4, 10), "text_segment_ids": torch.tensor([[1, 2, 2, 0]]), "pooled": draw(1, 2, 9)}
        made.append(batch | {"time": draw(1, 2).sigmoid(), "guidance": draw(1, 2).sigmoid()})
    return config, functools.partial(train.flow_matching_loss, config=config), made


def sound_setting() -> tuple[Any, Any, list[dict[str, torch.Tensor]]]:
    """(config, loss, the rows of each rank) of Whisper: two clips with their texts in each row."""
    config = whisper.Config.from_hf(WHISPER | {"decoder_attention_heads": 4, "vocab_size": 64})
    draw, made = torch.Generator().manual_seed(0), []
    for _ in range(2):
        clips = [torch.randn(config.num_mel_bins, frames, generator=draw) for frames in (6, 4)]
        frames, positions, segment_ids = fnmodels.frame_rows(clips, config, length=6)
        texts = torch.randint(3, config.vocab_size, (1, 7), generator=draw)
        own = fnmodels.segments_from_lengths([[4, 2]], 7)
        batch = {"tokens": frames, "positions": positions, "segment_ids": segment_ids, "decoder_tokens": texts}
        batch |= {"decoder_segment_ids": own, "decoder_positions": fnmodels.positions_from_segments(own)}
        made.append(batch | {"labels": texts.roll(-1, 1).where(own > 0, -100)})
    return config, functools.partial(train.pair_loss, config=config), made


def image_setting() -> tuple[Any, Any, list[dict[str, torch.Tensor]]]:
    """(config, loss, the rows of each rank) of CLIP: a row of two captions and their images, of two sizes."""
    text = SIZES | {"vocab_size": 64, "max_position_embeddings": 8, "bos_token_id": 62, "eos_token_id": 63}
    vision = SIZES | {"image_size": 12, "patch_size": 6}
    values = {"model_type": "clip", "projection_dim": 20, "text_config": text, "vision_config": vision}
    config = clip.Config.from_hf(values)
    draw, made = torch.Generator().manual_seed(0), []
    for half in range(2):
        images = [torch.randn(3, 12, width, generator=draw) for width in (12, 18)]
        captions = [[62, 5 + half, 63], [62, 7 + half, 9, 63]]
        batch = train.image_text_batch(captions, images, config, pairs=2)
        made.append(batch | {"labels": batch["labels"] + 2 * half})
    return config, functools.partial(train.image_text_loss, config=config), made


def picture_setting() -> tuple[Any, Any, list[dict[str, torch.Tensor]]]:
    """(config, loss, the rows of each rank) of ViT as a classifier: two images in each row."""
    config = vit.Config.from_hf(towers()["vit_labels"])
    draw, made = torch.Generator().manual_seed(0), []
    for half in range(2):
        images = [torch.randn(3, 12, 18, generator=draw) for _ in range(2)]
        patches, positions, image_ids = fnmodels.patch_rows(images, config, length=14)
        labels = (image_ids + half) % 3
        made.append({"tokens": patches, "positions": positions, "segment_ids": image_ids, "labels": labels})
    return config, functools.partial(train.classification_loss, config=config), made


def shared_setting() -> tuple[Any, Any, list[dict[str, torch.Tensor]]]:
    """(config, loss, the rows of each rank) of MPNet, whose layers share a bias of each head."""
    config = mpnet.Config(vocab_size=64, max_position_embeddings=16, head="classification", num_labels=4, **SIZES)
    return config, functools.partial(train.classification_loss, config=config), setting("classification")[2]


def answer_loss(params: Any, batch: dict[str, torch.Tensor], *, config: Any) -> Any:
    """Next-token prediction of texts with images by Gemma 3: a loss of one's own."""
    given = {"positions": batch["patch_positions"], "segment_ids": batch["image_ids"]}
    prepared = fnmodels.prepare(config.vision, batch["patches"], **given)
    x = fnmodels.forward(params["vision"], *prepared, config=config.vision)
    cells = gemma3.cells(batch["patch_positions"], batch["image_ids"], config.pooled)
    features = gemma3.project(params, x, cells, config=config)
    where = {name: batch[name] for name in ("positions", "segment_ids")}
    inputs, _, freqs_cis = fnmodels.prepare(config.text, batch["tokens"], **where)
    places = gemma3.image_places(batch["tokens"], config.image_token, features.new_ones(features.shape[:2]) > 0)
    inputs = gemma3.with_images(params, inputs, features, places, config=config)
    masks = gemma3.image_masks(config.text, *where.values(), places)
    logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
    return train.cross_entropy(logits, batch["labels"])


def reader_setting() -> tuple[Any, Any, list[dict[str, torch.Tensor]]]:
    """(config, loss, the rows of each rank) of Gemma 3: two documents in each row, with an image each."""
    vision = VISION | {"vision_use_head": False}
    config = gemma3.Config.from_hf(GEMMA3 | {"vision_config": vision, "text_config": TEXT | {"vocab_size": 64}})
    draw, made = torch.Generator().manual_seed(0), []
    for _ in range(2):
        own = fnmodels.segments_from_lengths([[14, 12]], 28)
        tokens = torch.randint(1, 58, own.shape, generator=draw)
        tokens[0, 2:11] = tokens[0, 15:24] = config.image_token
        images = list(torch.randn(2, 3, 24, 24, generator=draw))
        patches, places, image_ids = fnmodels.patch_rows(images, config.vision, length=72)
        batch = {"tokens": tokens, "positions": fnmodels.positions_from_segments(own), "segment_ids": own}
        batch |= {"patches": patches, "patch_positions": places, "image_ids": image_ids}
        made.append(batch | {"labels": tokens.roll(-1, 1).where(own > 0, -100)})
    return config, functools.partial(answer_loss, config=config), made


SETTINGS = {"pairs": pair_setting, "flow": flow_setting, "sound": sound_setting, "images": image_setting}
SETTINGS |= {"pictures": picture_setting, "shared": shared_setting, "reader": reader_setting}


def stepped(head: str, over: str) -> dict[str, float]:
    config, loss, halves = SETTINGS[head]() if head in SETTINGS else setting(head)
    optimizer, mesh, params = train.adamw(1e-2, eps=1e-3), Mesh.parse(over), generic_params(config)
    batch = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    one, expected = train.make_step(loss, optimizer, clip=0.5, accumulate=mesh.pp)(
        train.init_state(params, optimizer), batch
    )
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
    plan = stage_plan(plan, config, devices(mesh), Strategy()) if mesh.pp > 1 else plan
    whole = tree.flatten(params)
    held = with_paths(lambda path, how: how.distribute(whole[path][how.local_box()].clone()), plan)
    step = train.make_step(loss, optimizer, clip=0.5, mesh=mesh, accumulate=mesh.pp)
    state, metrics = step(train.init_state(held, optimizer), batch)
    after, shards = tree.flatten(one.params), tree.flatten(shardings(state.params))
    local = tree.flatten(local_tree(state.params))
    found = {path: error(leaf, after[path][shards[path].local_box()]) for path, leaf in local.items()}
    return found | {key: error(metrics[key].double(), expected[key].double()) for key in ("loss", "count", "grad_norm")}


@pytest.mark.parametrize(
    ("head", "over"),
    [
        *((head, "fsdp=2") for head in (*HEADS, *SETTINGS)),
        *((head, "tp=2") for head in ("none", *SETTINGS)),
        ("classification", "pp=2"),
        ("pictures", "pp=2"),
        ("pairs", "fsdp=2,tp=2"),
        ("none", "dp=2,fsdp=2"),
        ("none", "dp=2,tp=2"),
    ],
)
def test_a_step_over_a_mesh_is_that_of_one_process(ranks: Ranks, head: str, over: str) -> None:
    found = ranks(math.prod(Mesh.parse(over).sizes.values()))(stepped, head, over)
    assert worst(found)[0] < 1e-5, worst(found)
    assert sum(map(len, found)) > 20 * math.prod(Mesh.parse(over).sizes.values()) // Mesh.parse(over).pp


@pytest.mark.parametrize(
    ("setting", "over", "words"),
    [
        (pair_setting, "pp=2", "A t5 has two stacks of layers with rows of different lengths"),
        (image_setting, "cp=2", "A clip has two stacks of layers"),
        (shared_setting, "pp=2", "The layers of a mpnet read tensors of whole rows beside the residual stream"),
        (flow_setting, "cp=2", "The layers of a FluxTransformer2DModel read tensors of whole rows"),
    ],
)
def test_meshes_that_do_not_divide_a_model(setting: Any, over: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compose.check_family(setting()[0], Mesh.parse(over), sequence=False)
    compose.check_family(setting()[0], Mesh.parse("fsdp=2,tp=2"), sequence=False)
    with pytest.raises(ValueError, match="nor sequence=True"):
        compose.check_family(setting()[0], Mesh.parse("fsdp=2"), sequence=True)


def stepped_without_others() -> dict[str, float]:
    """A planted error: the candidates of other ranks get no gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "all_documents", lambda groups, x: all_documents(groups, x).detach())
        return stepped("none", "fsdp=2")


def test_candidates_of_other_ranks_have_gradients(ranks: Ranks) -> None:
    assert worst(ranks(2)(stepped_without_others))[0] > 1e-3


def refused(over: str, labels: tuple[int, ...] | None = None) -> str:
    """The error of a step, on every rank."""
    config, loss, halves = setting("none")
    batch = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    if labels is not None:
        batch["labels"] = batch["labels"].where(batch["labels"] != labels[0], labels[1])
    optimizer, mesh, params = train.adamw(1e-2), Mesh.parse(over), generic_params(config)
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
    held = tree.map(lambda how, leaf: how.distribute(leaf[how.local_box()].clone()), plan, params)
    try:
        train.make_step(loss, optimizer, mesh=mesh)(train.init_state(held, optimizer), batch)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "no error"


def test_all_ranks_refuse_alike(ranks: Ranks) -> None:
    """The pairs of one rank have two positives; documents of which a rank has a part."""
    assert set(ranks(2)(refused, "fsdp=2", (2, 0))) == {
        "The query of pair 0 has 2 positives here; it needs exactly one, in the same microbatch."
    }
    assert all("leave cp out" in message for message in ranks(2)(refused, "cp=2"))
