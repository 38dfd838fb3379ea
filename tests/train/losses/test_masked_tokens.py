"""`mask_tokens`: which tokens are corrupted, into what, and that the loss reads its labels."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fnmodels
import params as P
import train
from fnmodels.errors import UserError
from tests.support.cases import positions_of, segments
from tests.variants.bert import TINY
from train.job.settings import Settings
from train.job.tasks import initial_model

ROWS = segments((-50, 400, 350), (800,))


def test_shares() -> None:
    tokens = torch.randint(3, 61, ROWS.shape, generator=torch.Generator().manual_seed(0))
    tokens[:, 100:110] = 2
    how = {"mask_id": 1, "vocab_size": 61, "special_ids": (2,), "rate": 0.5}
    corrupted, labels = train.mask_tokens(tokens, ROWS, torch.Generator().manual_seed(3), **how)
    again = train.mask_tokens(tokens, ROWS, torch.Generator().manual_seed(3), **how)
    assert torch.equal(again[0], corrupted) and torch.equal(again[1], labels)
    chosen = labels != -100
    assert not chosen[ROWS == 0].any() and not chosen[tokens == 2].any()
    assert torch.equal(labels[chosen], tokens[chosen]) and torch.equal(corrupted[~chosen], tokens[~chosen])
    count = int(((ROWS > 0) & (tokens != 2)).sum())
    assert abs(int(chosen.sum()) / count - 0.5) < 0.05
    masked, same = corrupted[chosen] == 1, corrupted[chosen] == tokens[chosen]
    assert abs(float(masked.float().mean()) - 0.8) < 0.05 and abs(float(same.float().mean()) - 0.1) < 0.04
    with pytest.raises(ValueError, match=r"kept is|kept 0\.6"):
        train.mask_tokens(tokens, ROWS, torch.Generator(), mask_id=1, vocab_size=61, kept=0.6, random=0.6)


def test_the_loss_reads_its_labels() -> None:
    config = fnmodels.family_for("bert").Config.from_hf(TINY)
    weights, segment_ids = P.init(config, 0), segments((-1, 4, 7), (12,))
    tokens = torch.randint(3, 61, segment_ids.shape, generator=torch.Generator().manual_seed(0))
    corrupted, labels = train.mask_tokens(
        tokens, segment_ids, torch.Generator().manual_seed(1), mask_id=1, vocab_size=61, rate=0.4
    )
    types = (segment_ids == 2).long()
    batch = {"tokens": corrupted, "labels": labels, "positions": positions_of(segment_ids), "segment_ids": segment_ids}
    total, count = train.next_token_loss(weights, {**batch, "token_types": types}, config=config)
    prepared = fnmodels.prepare(
        config, corrupted, positions=batch["positions"], segment_ids=segment_ids, token_types=types
    )
    logits = fnmodels.forward(weights, *prepared, config=config)
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    torch.testing.assert_close(total, wanted)
    assert count == (labels != -100).sum() > 0
    assert abs(float(total - train.next_token_loss(weights, batch, config=config)[0])) > 1e-4


def test_the_main_job_refuses_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains next-token prediction, which a model that sees later tokens would learn to copy."""
    config = fnmodels.family_for("bert").Config.from_hf(TINY)
    P.save_pretrained(tmp_path, config, P.init(config, 0))
    monkeypatch.setattr(initial_model.pretrained, "load_tokenizer", lambda source: None)
    with pytest.raises(UserError, match=r"is a bert, whose tokens see later ones.*train\.mask_tokens"):
        initial_model.config_of_checkpoint(tmp_path, Settings())
