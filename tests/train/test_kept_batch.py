"""A run keeps what `prepare` made of its last batch: results are those of batches that are prepared anew."""

import functools

import pytest
import torch

import fnmodels
import params as P
import train
from fnmodels import llama
from fnmodels.inputs import noise_keys
from train.batch import KeptBatch

CONFIG = llama.Config(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LENGTH = 8


def batch_of(seed, *documents):
    """Rows of documents of these lengths; the rest of a row is padding."""
    rows = len(documents)
    tokens = torch.randint(97, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    segments, positions = torch.zeros(rows, LENGTH, dtype=torch.int64), torch.zeros(rows, LENGTH, dtype=torch.int64)
    for row, lengths in enumerate(documents):
        start = 0
        for number, length in enumerate(lengths, 1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = torch.arange(length)
            start += length
    labels = tokens.roll(-1, 1).where(segments > 0, -100)
    return {"tokens": tokens, "positions": positions, "segment_ids": segments, "labels": labels}


def plain(seed):
    return batch_of(seed, [8], [8])


def packed(seed):
    return batch_of(seed, [3, 4], [5, 2])


def places(batch, **changes):
    usual = {"positions": batch["positions"], "segment_ids": batch["segment_ids"], "length": None, "rng": None}
    return usual | changes


def check_prepared(kept, batch, config=CONFIG, **changes):
    """Prepares the batch, and compares bit by bit with `fnmodels.prepare`."""
    made = kept.prepare(config, batch["tokens"], **places(batch, **changes))
    want = fnmodels.prepare(config, batch["tokens"], **places(batch, **changes))
    assert fnmodels.tree.flatten(made).keys() == fnmodels.tree.flatten(want).keys()
    for path, leaf in fnmodels.tree.flatten(want).items():
        assert torch.equal(fnmodels.tree.flatten(made)[path], leaf), path
    assert [mask.rule for mask in made[1].values()] == [mask.rule for mask in want[1].values()]
    return made


@pytest.fixture
def prepared(monkeypatch):
    """The calls of `fnmodels.prepare`."""
    calls, prepare = [], fnmodels.prepare
    monkeypatch.setattr(fnmodels, "prepare", lambda *args, **more: (calls.append(args), prepare(*args, **more))[1])
    return calls


def test_batches_of_equal_places_share_masks_and_tables_and_have_their_own_tokens():
    kept = KeptBatch()
    first, second = check_prepared(kept, plain(0)), check_prepared(kept, plain(1))
    assert second[1]["full"] is first[1]["full"] and second[2]["full"] is first[2]["full"]
    assert not torch.equal(second[0]["tokens"], first[0]["tokens"])


@pytest.mark.parametrize(
    "other",
    [packed, lambda seed: batch_of(seed, [8], [7]), lambda seed: batch_of(seed, [8]), lambda seed: batch_of(seed, [0])],
)
def test_batches_of_other_places_are_prepared_anew(other):
    kept = KeptBatch()
    for make in (plain, other, plain, other, other):
        check_prepared(kept, make(0))


def test_other_configs_lengths_and_dtypes_are_prepared_anew():
    scaled = llama.Config.from_hf(
        {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "rope_theta": 50.0}
    )
    kept, batch = KeptBatch(), plain(0)
    check_prepared(kept, batch)
    check_prepared(kept, batch, scaled)
    check_prepared(kept, batch, scaled, length=4)
    check_prepared(kept, batch | {"positions": batch["positions"].int()}, scaled)


def test_writes_of_the_caller_are_noticed():
    kept, batch = KeptBatch(), plain(0)
    made = check_prepared(kept, batch)
    batch["positions"] += 3  # a buffer that is used again
    assert torch.equal(made[0]["positions"], batch["positions"] - 3)
    made = check_prepared(kept, batch)
    made[2]["full"].zero_()
    made = check_prepared(kept, batch)
    made[1]["full"].q_segments.fill_(7)
    made = check_prepared(kept, batch)
    made[1].clear(), made[0].clear()
    check_prepared(kept, batch)


def test_what_follows_from_more_than_places_is_not_kept(prepared, monkeypatch):
    kept, batch = KeptBatch(), plain(0)
    dropping = llama.Config.from_hf(
        {"model_type": "seed_oss", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48}
        | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    )
    keys = noise_keys(0, batch["positions"], batch["segment_ids"])
    for _ in range(2):
        inputs, _, _ = kept.prepare(dropping, batch["tokens"], **places(batch, rng=keys))
        assert torch.equal(inputs["rng"], keys)
    assert len(prepared) == 2
    monkeypatch.setattr("train.batch.MOST", 15)
    for _ in range(2):
        kept.prepare(CONFIG, batch["tokens"], **places(batch))
    assert len(prepared) == 4


def test_transforms_and_inference_mode_leave_nothing_of_theirs():
    kept, batch = KeptBatch(), plain(0)

    def prepared_table(scale):
        return (kept.prepare(CONFIG, batch["tokens"], **places(batch))[2]["full"] * scale).sum()

    torch.func.grad(prepared_table)(torch.tensor(1.0))
    with torch.inference_mode():
        kept.prepare(CONFIG, batch["tokens"], **places(batch))
    table = check_prepared(kept, batch)[2]["full"]
    assert type(table) is torch.Tensor and not table.is_inference() and not table.requires_grad


def test_wrong_batches_are_refused_after_a_kept_one():
    kept, batch = KeptBatch(), plain(0)
    check_prepared(kept, batch)
    with pytest.raises(ValueError, match=r"positions must be \[B, S\]"):
        kept.prepare(CONFIG, batch["tokens"], **places(batch, positions=batch["positions"][:, :4]))
    with pytest.raises(ValueError, match="ids \\[B, S\\] are integers"):
        kept.prepare(CONFIG, batch["tokens"].float(), **places(batch))
    check_prepared(kept, batch)


def run(makers, step_of):
    """The losses and the last params of steps; step_of(): the step of the next one."""
    optimizer = train.adamw(1e-2)
    state, losses = train.init_state(P.init(CONFIG, 0), optimizer), []
    for seed, make in enumerate(makers):
        state, metrics = step_of(optimizer)(state, make(seed))
        losses.append(metrics["loss"])
    return losses, state.params


def test_steps_have_the_bits_of_steps_that_prepare_each_batch(prepared):
    makers = [plain, plain, packed, packed, plain, lambda seed: batch_of(seed, [8], [5]), plain, plain]
    loss = functools.partial(train.next_token_loss, config=CONFIG)
    made = []

    def one(optimizer):
        made.append(made[0] if made else train.make_step(loss, optimizer))
        return made[0]

    have = run(makers, one)
    assert len(prepared) == 5
    want = run(makers, lambda optimizer: train.make_step(loss, optimizer))
    assert len(prepared) == 5 + len(makers)
    assert all(map(torch.equal, fnmodels.tree.leaves(have), fnmodels.tree.leaves(want)))


def test_a_batch_kept_for_other_places_would_be_found(monkeypatch):
    monkeypatch.setattr("train.batch._same", lambda tensor, held: True)
    with pytest.raises(AssertionError):
        test_batches_of_other_places_are_prepared_anew(packed)
