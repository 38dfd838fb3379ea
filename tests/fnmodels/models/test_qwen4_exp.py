"""Qwen 3.8 Flash Next: its choices of blocks replayed, gathered and cached, its names on disk, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import qwen4_exp, tree
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.ops.indexers.pooled import PooledIndexer
from tests.support.cases import batch_of, generic, generic_params, gradients, off, segments, trainable
from tests.support.oracle import model_of
from tests.support.status import Shows
from tests.variants.qwen4_exp import NGRAMS as OF_NGRAMS
from tests.variants.qwen4_exp import TINY

NGRAMS = TINY | OF_NGRAMS

TWO = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"]}
CONFIG = qwen4_exp.Config.from_hf(TINY | TWO)
PARAMS = generic_params(CONFIG, torch.float64)
ROWS = segments((-2, 7, 19), (22, 6), (2, 20, -6))


def logits_of(config: Any = CONFIG, kernel: str = "math", **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    batch = batch_of(CONFIG, ROWS)
    inputs, masks, freqs = fnmodels.prepare(config, batch.tokens, positions=batch.positions, segment_ids=ROWS)
    how: dict[str, Any] = {"config": config, "kernel": kernel, "taps": ("layers.*.choices",)}
    found: tuple[Tensor, dict[str, Tensor]] = fnmodels.forward(PARAMS, inputs | more, masks, freqs, **how)
    return found


def test_a_choice_is_replayed_and_names_blocks_of_the_document() -> None:
    free, tapped = logits_of()
    choices, seen = torch.stack([tapped[f"layers.{i}.choices"] for i in (1, 2)], 2), ROWS > 0
    batch, size, count = batch_of(CONFIG, ROWS), CONFIG.indexer_compress_ratio, CONFIG.index_topk - 2
    whole = (batch.positions + 1) // size
    for layer in (0, 1):
        complete, ends = choices[:, :, layer, :count], choices[:, :, layer, count:]
        assert torch.equal((complete >= 0).sum(-1)[seen], whole.clamp(max=count)[seen])
        assert (complete < whole[..., None])[seen].all()
        assert torch.equal(ends[..., 0][seen], torch.where((batch.positions + 1) % size > 0, whole, -1)[seen])
        assert (ends[..., 1] == -1).all()
    assert (choices[~seen] == -1).all() and torch.equal(logits_of(choices=choices)[0], free)
    assert off(logits_of(choices=choices.flip(2))[0][seen], free[seen]) > 1e-3, "a choice applied to the wrong layer"
    fewer = choices.where(choices != choices[..., :count].amax(-1, keepdim=True), -1)
    assert off(logits_of(choices=fewer)[0][seen], free[seen]) > 1e-3, "another choice"
    assert off(logits_of(replace(CONFIG, indexer_budget=60))[0][seen], free[seen]) > 1e-3, (
        "the choice leaves nothing out"
    )


def test_gathered_blocks_equal_a_mask() -> None:
    """Logits and gradients of packed rows."""
    batch, leaves = batch_of(CONFIG, ROWS), trainable(PARAMS)
    found = []
    for kernel in ("math", "sparse", "sdpa"):
        logits = batch.forward(leaves, kernel=kernel)
        found.append((logits.detach(), gradients(logits[ROWS > 0].square().mean(), leaves)))
    assert off(found[1], found[0]) < 1e-10 and off(found[2], found[0]) < 1e-10


def test_steps_on_a_cache_choose_alike() -> None:
    """In chunks and by every kernel; block keys that are rotated for the wrong position are found."""
    row = batch_of(CONFIG, segments((26,)))
    whole = row.forward(PARAMS)

    def difference(kernel: str) -> float:
        cache, steps = fnmodels.init_cache(CONFIG, 1, 28, dtype=torch.float64, length=28), []
        for tokens in row.tokens.split([10, 1, 1, 14], dim=1):
            step = fnmodels.prepare_step(CONFIG, tokens, cache)
            logits, cache = fnmodels.decode(PARAMS, *step, cache, config=CONFIG, kernel=kernel)
            steps.append(logits)
        return off(torch.cat(steps, 1), whole)

    assert difference("math") < 1e-10 and difference("sparse") < 1e-10
    with pytest.MonkeyPatch.context() as patch:
        right = PooledIndexer.index
        patch.setattr(
            PooledIndexer, "index", lambda how, w, x, freqs: right(how, w, x, {**freqs, "start": freqs["table"]})
        )
        assert difference("math") > 1e-3


def test_published_names_are_those_of_transformers(tmp_path: Path, shows: Shows) -> None:
    """A model with images, saved by transformers: its text is read, and gives the text model's logits."""
    shows("qwen4_exp", "parity")
    vision = {"hidden_size": 16, "intermediate_size": 20, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    values = {"text_config": TINY, "vision_config": vision, "image_token_id": 9, "video_token_id": 8}
    values |= {"vision_start_token_id": 7, "vision_end_token_id": 6}
    config = transformers.AutoConfig.for_model("qwen4_exp", **values)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(generic(name, tensor))
    model.save_pretrained(tmp_path)
    config, params = P.load_pretrained(tmp_path, part="text")
    tokens = torch.randint(10, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    ours = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        theirs = model(input_ids=tokens, use_cache=False).logits
    assert off(ours, theirs) < 2e-5 and config.model_type == "qwen4_exp"
    P.save_pretrained(tmp_path / "again", config, params)
    saved = P.load_pretrained(tmp_path / "again")[1]
    assert off(saved, params) == 0


def test_tables_are_read_from_their_parts(tmp_path: Path) -> None:
    """Also beside the numbers of the hash, which transformers writes too; any range of rows is read from its parts."""
    model = model_of(NGRAMS)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".ple_embedding." in name]  # noqa: SIM118
    assert len([name for name in names if ".shard_" in name]) == 6 and len(names) == 12
    config, params = P.load_pretrained(tmp_path, check_finite=True)
    tokens = torch.randint(10, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    ours = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        assert off(ours, model(input_ids=tokens, use_cache=False).logits) < 2e-5
    stack = qwen4_exp.hf_names(config)["layers.1.ngrams.table"]
    table = params["layers"][1]["ngrams"]["table"]
    parts = dict(zip(stack.tensors, table.split(stack.rows), strict=True))
    assert stack.entries == len(table) and len({len(part) for part in parts.values()}) == 2  # the last is smaller
    for low, high in ((0, len(table)), (3, 4), (50, 120), (len(table) - 1, len(table))):
        found = torch.full((high - low, table.shape[1]), torch.nan)
        for name, rows, at in stack.places(slice(low, high)):
            found[at] = parts[name][rows]
        assert torch.equal(found, table[low:high])


def test_a_part_of_a_table_with_nan_is_named(tmp_path: Path) -> None:
    config = qwen4_exp.Config.from_hf(NGRAMS)
    params = tree.map(torch.clone, generic_params(config))
    params["layers"][0]["ngrams"]["table"][40] = torch.nan
    P.save_pretrained(tmp_path, config, params)
    with pytest.raises(P.MismatchError, match=r"layers\.0\.ple\.ple_embedding\.ngram_embedding\.shard_1\.weight in"):
        P.load_pretrained(tmp_path, check_finite=True)


def test_what_is_not_read_is_refused() -> None:
    read = qwen4_exp.Config.from_hf
    assert read(TINY | NGRAMS | {"ple_embed_dim": None}).ngram_width == TINY["hidden_size"]
    with pytest.raises(UnsupportedError, match="'indexer_kv_heads' is 2; all heads share one choice"):
        read(TINY | {"indexer_kv_heads": 2})
    for change, words in (
        ({"indexer_budget": 10}, "indexer_budget 10 is not a multiple of indexer_compress_ratio"),
        ({"indexer_head_dim": 4}, "indexer_head_dim 4 is below the 8 dimensions that rotate"),
        ({"hc_count": 1}, "'hc_count' is 1"),
        (NGRAMS | {"ple_layer_ids": [4]}, r"'ple_layer_ids' is \[4\]; layers are numbers from 1 to 3"),
        (NGRAMS | {"ple_layer_ids": [3]}, "layer_kinds must name 3 layers"),
        (NGRAMS | {"eos_token_id": None}, "'eos_token_id' is null; n-grams end at a token id"),
        (NGRAMS | {"ple_embed_dim": 26}, "make 4 heads, whose number must be above 0 and divide ngram_width 26"),
        (NGRAMS | {"ngram_size": 1}, "make 0 heads, whose number must be above 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            read(TINY | change)
    with pytest.raises(ValueError, match=r"positions are \[1, 4, 3\], with axes of images"):
        qwen4_exp.freqs_cis(CONFIG, torch.zeros(1, 4, 3, dtype=torch.long))


def test_the_mtp_head_is_as_the_published_file_describes_it() -> None:
    read = qwen4_exp.Config.from_hf
    head = {"hybrid": True, "layer_types": ["full_attention"], "mtp_use_hidden_state_from_layer": None}
    head |= {"num_hidden_layers": 1, "rope_theta": 50.0}
    published = TINY | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mtp": head}
    assert read(published) == replace(read(TINY), num_nextn_predict_layers=1) != read(TINY)
    for change in (
        {"mtp_use_dedicated_embeddings": True},
        {"mtp": head | {"num_hidden_layers": 2}},
        {"mtp": head | {"rope_theta": 60.0}},
        {"mtp": head | {"layer_types": ["linear_attention"]}},
        {"mtp": head | {"mtp_use_hidden_state_from_layer": 1}},
        {"mtp": head | {"hybrid": False}},
    ):
        with pytest.raises(UnsupportedError, match=next(reversed(change))):
            read(published | change)
    with pytest.raises(ConfigError, match="has none that attends like it"):
        read(published | {"layer_types": ["linear_attention"] * 2})


def test_a_mixer_that_writes_nothing_is_left_out(tmp_path: Path) -> None:
    """The last mixture of a head has no sublayer after it, for whose result files may have a weight."""
    config = replace(CONFIG, num_nextn_predict_layers=1)
    params = generic_params(config)
    P.save_pretrained(tmp_path, config, params)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mtp.hyper_connection_mixer.block_inject_weight.weight"] = torch.zeros(3, 96)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert off(P.load_pretrained(tmp_path)[1], params) == 0
    tensors["mtp.other.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(P.MismatchError, match=r"mtp\.other"):
        P.load_pretrained(tmp_path)
    assert "mtp" not in P.load_pretrained(tmp_path, drop=("mtp",))[1]
