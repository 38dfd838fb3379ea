"""`train.transcribe` writes what transformers' Whisper generates: short and long clips, times, languages, batches."""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor

import train
from fnmodels import tree
from fnmodels.inputs.audio import log_mel
from fnmodels.models.encoder_decoder import whisper
from tests.variants.whisper import TINY
from train.generation import transcribe

SPECIAL = ("endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startoflm", "startofprev")
SPECIAL += ("nospeech", "notimestamps")
NAMES = [f"w{i}" for i in range(39)] + [" "] + [f"<|{name}|>" for name in SPECIAL]
NAMES += [f"<|{0.02 * i:.2f}|>" for i in range(11)]
TIMES, END = 50, 40
VALUES = TINY | {"vocab_size": 61, "suppress_tokens": [3, 41, 42, 43, 44, 45, 46, 47, 48], "eos_token_id": END}
VALUES |= {"decoder_start_token_id": 41, "bos_token_id": END, "pad_token_id": END, "begin_suppress_tokens": [39, END]}
CONFIG = whisper.Config.from_hf(VALUES)
WINDOW = 20 * 160  # samples


def tokenizer() -> Tokenizer:
    return Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="w0"))


@functools.cache
def reference(seed: int) -> Any:
    """transformers' model, whose weights are large enough for texts that differ."""
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**VALUES)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, leaf in model.named_parameters():
            noise = torch.randn(leaf.shape, generator=generator)
            if path.endswith("bias"):
                leaf.copy_(0.1 * noise)
            elif "norm" in path:
                leaf.copy_(1 + 0.1 * noise)
            elif "decoder.embed_positions" in path:
                leaf.copy_(4 * noise)
            elif leaf.ndim > 1 and "embed" not in path:
                leaf.copy_(2 * noise / leaf[0].numel() ** 0.5)
            else:
                leaf.copy_(noise)
    settings = model.generation_config
    values: dict[str, Any] = {name: VALUES[name] for name in VALUES if name.endswith(("token_id", "suppress_tokens"))}
    values |= {"is_multilingual": True, "lang_to_id": {"<|en|>": 42, "<|de|>": 43}, "no_timestamps_token_id": 49}
    values |= {"task_to_id": {"translate": 44, "transcribe": 45}, "max_initial_timestamp_index": 50, "max_length": 20}
    for name, value in values.items():
        setattr(settings, name, value)
    return model


def clip(samples: int, seed: int) -> Tensor:
    time, generator = torch.arange(samples) / 16_000, torch.Generator().manual_seed(seed)
    tone = torch.sin(2 * torch.pi * (200 + 300 * seed + 4000 * time) * time)
    return 0.3 * tone + 0.05 * torch.randn(samples, generator=generator)


def theirs(model: Any, samples: Tensor, *, timestamps: bool, **options: Any) -> list[int]:
    """The ids that transformers generates, without the end and the prompt."""
    is_long = len(samples) > WINDOW
    mel = log_mel(samples, bins=6, length=None if is_long else WINDOW)[None]
    mask = torch.ones(1, mel.shape[-1], dtype=torch.long)
    if is_long:
        options["condition_on_prev_tokens"] = False
    timed = timestamps or is_long
    more = [] if timed else list(range(TIMES, 61))  # transformers does not suppress times where none are wanted
    model.generation_config.suppress_tokens = [*VALUES["suppress_tokens"], *more]
    with torch.no_grad():
        ids = model.generate(mel, attention_mask=mask, return_timestamps=timed, **options)
    return [token for token in ids[0].tolist() if token < END or token > 49]


def words(ids: list[int]) -> str:
    return str(tokenizer().decode([token for token in ids if token < END])).strip()


@pytest.mark.parametrize(
    ("options", "seed"),
    [({"language": "en"}, 0), ({"language": "de", "task": "translate"}, 3), ({"task": "transcribe"}, 0)],
    ids=str,
)
def test_transcribe_writes_what_transformers_generates(seed: int, options: dict[str, str]) -> None:
    model = reference(seed)
    state, stored = dict(model.named_parameters()), whisper.hf_names(CONFIG)
    params = tree.unflatten({path: state[name].detach() for path, name in stored.items()})
    clips = [clip(size, seed + i) for i, size in enumerate((WINDOW, 1600, 3 * WINDOW, 2 * WINDOW + 640, 320))]
    for timestamps in (False, True):
        wanted = [theirs(model, one, timestamps=timestamps, **options) for one in clips]
        for batch in (1, 8):
            given: Any = {"timestamps": timestamps, "batch": batch, **options}
            found = train.transcribe(params, CONFIG, clips, tokenizer(), **given)
            if not timestamps:
                assert found == [words(ids) for ids in wanted]
                continue
            spoken = [" ".join(re.sub(r"<\|[\d.]+\|>", " ", text).split()) for text in found]
            assert spoken == [words(ids) for ids in wanted]
    assert len({tuple(ids) for ids in wanted}) > 2
    assert any(ids[i] >= TIMES and ids[i + 1] >= TIMES for ids in wanted for i in range(len(ids) - 1))


def test_bad_use_is_a_sentence() -> None:
    model = reference(0)
    state, stored = dict(model.named_parameters()), whisper.hf_names(CONFIG)
    params = tree.unflatten({path: state[name].detach() for path, name in stored.items()})
    samples = [clip(320, 0)]
    for options, message in (
        ({"language": "xx"}, r"no token <\|xx\|>"),
        ({"task": "sing"}, "task is 'sing'; it must be transcribe or translate"),
        ({"batch": 0}, "batch is 0; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            train.transcribe(params, CONFIG, samples, tokenizer(), **options)
    with pytest.raises(ValueError, match=r"Clip 0 is \[1, 320\]; it must be samples \[T\]"):
        train.transcribe(params, CONFIG, [samples[0][None]], tokenizer())
    with pytest.raises(ValueError, match="the config of a whisper of both stacks"):
        train.transcribe(params, CONFIG.encoder, samples, tokenizer())
    assert train.transcribe(params, CONFIG, [], tokenizer()) == []


def settings(**changes: Any) -> Any:
    found = transformers.GenerationConfig(no_timestamps_token_id=49, eos_token_id=END, max_initial_timestamp_index=6)
    found.update(suppress_tokens=[3, 41, 42], begin_suppress_tokens=[39, END, 52], **changes)
    return found


def allowed_by_transformers(logits: Tensor, written: Tensor, *, timed: bool) -> Tensor:
    """Its processors, one after the other; without times it leaves them, which nobody wants in a text."""
    prompt = torch.full((len(written), 3 if timed else 4), 41)
    ids, config = torch.cat((prompt, written), 1), settings()
    first = transformers.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, prompt.shape[1])
    scores = transformers.SuppressTokensLogitsProcessor(config.suppress_tokens)(ids, first(ids, logits.clone()))
    if timed:
        rules = transformers.WhisperTimeStampLogitsProcessor(config, begin_index=prompt.shape[1])
        return rules(ids, scores)
    return scores.index_fill(1, torch.arange(TIMES, 61), -torch.inf)


def disagreements(allowed: Any, ids: Any) -> int:
    """Rows of random logits after random tokens that may be written, of which other tokens are allowed."""
    generator, found = torch.Generator().manual_seed(2), 0
    for timed in (False, True):
        written = torch.empty(64, 0, dtype=torch.long)
        for _ in range(7):
            logits = 3 * torch.randn(64, 61, generator=generator)
            logits[:, TIMES:] += 2 * torch.randn(64, 1, generator=generator)
            ours = allowed(logits, written, ids, timed=timed)
            expected = allowed_by_transformers(logits, written, timed=timed)
            found += int((ours.isinf() != expected.isinf()).any(1).sum())
            chosen = torch.multinomial(expected[:, :].softmax(-1), 1, generator=generator)
            written = torch.cat((written, chosen.where(chosen != END, 7)), 1)
    return found


def test_tokens_that_may_follow_are_those_of_transformers() -> None:
    """After nothing, words, one time and two, by the lists of generation_config.json; a mistake in a rule shows."""
    kept = settings().to_dict()
    ids = transcribe._special_tokens(tokenizer(), CONFIG, kept)
    assert disagreements(transcribe._allowed, ids) == 0
    for change in ({"suppressed_first": ()}, {"suppressed": ()}, {"initial": 5}, {"initial": None}):
        assert disagreements(transcribe._allowed, dataclasses.replace(ids, **change)) > 0, change

    def third_time(logits: Tensor, written: Tensor, ids: Any, *, timed: bool) -> Tensor:
        """As if no pair of times were complete: a third one may follow two."""
        right = transcribe._allowed(logits, written, ids, timed=timed)
        if not timed or written.shape[1] < 2:
            return right
        pair = (written[:, -2:] >= TIMES).all(1, keepdim=True)
        return torch.where(pair & (torch.arange(61) >= written[:, -1:]) & (torch.arange(61) >= TIMES), logits, right)

    assert disagreements(third_time, ids) > 0


def test_generation_config_is_read_over_config_json() -> None:
    for name, value in (("suppress_tokens", [61]), ("begin_suppress_tokens", "x"), ("no_timestamps_token_id", None)):
        with pytest.raises(ValueError, match=rf"{name} is .*; it must have numbers from 0 to 60"):
            transcribe._special_tokens(tokenizer(), CONFIG, {name: value})
    ids = transcribe._special_tokens(tokenizer(), CONFIG, {"suppress_tokens": [5], "begin_suppress_tokens": None})
    assert ids.suppressed == (5,) and ids.suppressed_first == () and ids.initial == 50
    model = reference(0)
    state, stored = dict(model.named_parameters()), whisper.hf_names(CONFIG)
    params = tree.unflatten({path: state[name].detach() for path, name in stored.items()})
    clips = [clip(WINDOW, 3)]
    plain = train.transcribe(params, CONFIG, clips, tokenizer(), language="en")
    spoken = [NAMES.index(word) for word in plain[0].split()]
    assert spoken
    other = train.transcribe(params, CONFIG, clips, tokenizer(), language="en", generation={"suppress_tokens": spoken})
    assert not set(other[0].split()) & set(plain[0].split())
