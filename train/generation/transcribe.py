"""Speech to text with Whisper (arXiv 2212.04356): greedy decoding of windows, long clips by their time stamps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels.cache import decode_, encode, prefill, prepare_step
from fnmodels.inputs.audio import HOP, frame_rows, log_mel
from fnmodels.tree import Tree

ENGLISH_VOCABULARY = 51864  # of the published models without languages and tasks
INITIAL = 50  # the first time stamp is at most 50 steps of 20 ms into its window
STEP = 0.02  # seconds between two time stamps, two frames


@dataclass(frozen=True)
class _Tokens:
    """The ids of special tokens. Languages are the range of ids behind `start`, and times all from `times` on.

    initial: The last time stamp with which a window may begin, None for any.
    """

    end: int
    start: int
    translate: int
    transcribe: int
    no_times: int
    times: int
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    initial: int | None


@torch.no_grad()
def transcribe(
    params: Tree,
    config: Any,
    samples: Sequence[Tensor],
    tokenizer: Any,
    *,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: bool = False,
    batch: int = 8,
    generation: Mapping[str, Any] | None = None,
) -> list[str]:
    """The text of each clip, by greedy decoding (Whisper, arXiv 2212.04356).

    A clip that is longer than the model's window (30 s) is read window by window: the next one begins at the last time
    stamp that the model wrote in pairs. Tokens that generation_config.json or config.json suppresses are not generated.

    Args:
        params: The parameters of both stacks.
        config: A whisper config.
        samples: Clips [T] at 16 kHz, floats from -1 to 1.
        tokenizer: The folder's tokenizer, of the tokenizers library.
        language: "en", "de", ...; None takes the likeliest one for each clip. English-only models take none.
        task: "transcribe", or "translate" into English.
        timestamps: Whether times of the clip are written into its text, as <|1.20|>.
        batch: The number of windows that are decoded together.
        generation: The content of the folder's generation_config.json, of which suppress_tokens, begin_suppress_tokens,
            no_timestamps_token_id and max_initial_timestamp_index are read; None: those of config.json and the paper.

    Returns:
        The texts, in the order of the clips.

    Raises:
        ValueError: The model is no Whisper, a clip is not [T], the tokenizer lacks the language or a special token, or
            `generation` has no token ids where they belong.
    """
    if config.model_type != "whisper" or config.stack != "both":
        raise ValueError(f"transcribe needs the config of a whisper of both stacks, not {config.model_type!r}.")
    if task not in ("transcribe", "translate"):
        raise ValueError(f"task is {task!r}; it must be transcribe or translate.")
    if batch < 1:
        raise ValueError(f"batch is {batch}; it must be at least 1.")
    ids = _special_tokens(tokenizer, config, generation or {})
    spoken = None if language is None else _id(tokenizer, f"<|{language}|>")
    clips = [_Clip(clip, config, index, spoken) for index, clip in enumerate(samples)]
    for timed in (False, True):  # windows of one batch have prompts of one length
        some = [clip for clip in clips if (timestamps or clip.is_long) is timed]
        while rest := [clip for clip in some if clip.seek < clip.frames]:
            _read(params, config, rest[:batch], ids, task, timed=timed)
    return [_text(tokenizer, clip, ids.times, timestamps=timestamps) for clip in clips]


class _Clip:
    """A clip, how far it has been read, and the tokens of each window with the frame where the window begins."""

    def __init__(self, samples: Tensor, config: Any, index: int, language: int | None) -> None:
        if samples.ndim != 1 or not len(samples):
            raise ValueError(f"Clip {index} is {list(samples.shape)}; it must be samples [T] at 16 kHz.")
        self.window = 2 * config.max_position_embeddings
        self.is_long = len(samples) > self.window * HOP
        length = None if self.is_long else self.window * HOP
        self.mel = log_mel(samples, bins=config.num_mel_bins, length=length)
        self.frames, self.seek, self.language = self.mel.shape[1], 0, language
        self.windows: list[tuple[int, list[int]]] = []

    def next_window(self) -> Tensor:
        mel = self.mel[:, self.seek : self.seek + self.window]
        return F.pad(mel, (0, self.window - mel.shape[1]))

    def add(self, tokens: list[int], times: int) -> None:
        """Takes the tokens of the window up to the last pair of time stamps, where the next window begins."""
        size, is_time = min(self.frames - self.seek, self.window), [token >= times for token in tokens]
        pairs = [i for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
        begin = self.seek
        self.seek += size
        if pairs and is_time[-2:] != [False, True]:
            tokens = tokens[: pairs[-1] + 1]
            self.seek = begin + 2 * (tokens[-1] - times)
        self.windows.append((begin, tokens))


def _read(params: Tree, config: Any, clips: list[_Clip], ids: _Tokens, task: str, *, timed: bool) -> None:
    """Decodes the next window of each clip."""
    decoder, own = config.decoder, fnmodels.stack_params(params, "decoder")
    device = own["embed_tokens"].device
    mels = [clip.next_window().to(own["embed_tokens"]) for clip in clips]
    frames, positions, segments = frame_rows(mels, config)
    encoder = fnmodels.prepare(config.encoder, frames, positions=positions, segment_ids=segments)
    limit = config.decoder_positions
    cache = encode(params, *encoder, config=config, capacity=limit)
    start = torch.full((len(clips), 1), ids.start, device=device)
    many = config.vocab_size != ENGLISH_VOCABULARY
    if many and any(clip.language is None for clip in clips):
        logits, _ = prefill(own, *prepare_step(decoder, start, cache), cache, config=decoder)
        likeliest = logits[:, ids.start + 1 : ids.translate].argmax(-1) + ids.start + 1
        for clip, token in zip(clips, likeliest.tolist(), strict=True):
            clip.language = token if clip.language is None else clip.language
    prompts = [[ids.start] for _ in clips]
    for prompt, clip in zip(prompts, clips, strict=True):
        prompt += [clip.language or 0, ids.transcribe if task == "transcribe" else ids.translate] if many else []
        prompt += [] if timed else [ids.no_times]
    tokens = torch.tensor(prompts, device=device)
    logits, cache = prefill(own, *prepare_step(decoder, tokens, cache), cache, config=decoder)
    written = tokens[:, :0]
    while True:
        likeliest = _allowed(logits.float(), written, ids, timed=timed).argmax(-1, keepdim=True)
        done = (written == ids.end).any(1, keepdim=True)
        written = torch.cat((written, likeliest.where(~done, ids.end)), 1)
        if (written == ids.end).any(1).all() or written.shape[1] + len(prompts[0]) >= limit:
            break
        step = prepare_step(decoder, written[:, -1:], cache)
        logits, cache = decode_(own, *step, cache, config=decoder)
        logits = logits[:, -1]
    for clip, row in zip(clips, written.tolist(), strict=True):
        clip.add(row[: row.index(ids.end)] if ids.end in row else row, ids.times)


def _allowed(logits: Tensor, written: Tensor, ids: _Tokens, *, timed: bool) -> Tensor:
    """The logits [B, V] with -inf at tokens that may not follow those written [B, n]; rules of the paper's code."""
    never = -torch.inf
    banned = torch.zeros_like(logits, dtype=torch.bool)
    banned[:, list(ids.suppressed)] = True
    first = not written.shape[1]
    if first:
        banned[:, list(ids.suppressed_first)] = True
    token = torch.arange(logits.shape[1], device=logits.device)
    is_time = token >= ids.times
    if not timed:
        return logits.masked_fill(banned | is_time, never)
    banned |= token == ids.no_times
    if first:
        late = torch.zeros_like(is_time) if ids.initial is None else token > ids.times + ids.initial
        return logits.masked_fill(banned | ~is_time | late, never)
    # times come in pairs, but before the end, and do not go back
    last = (written[:, -1:] >= ids.times) & (written[:, -1:] != ids.end)
    before = written[:, -2:-1] >= ids.times if written.shape[1] > 1 else torch.ones_like(last)
    banned |= last & before & is_time
    banned |= last & ~before & (token < ids.end)
    latest = written.where(written >= ids.times, ids.times - 1).amax(1, keepdim=True)
    banned |= is_time & (token < latest + (~(last & ~before)).long())
    logits = logits.masked_fill(banned, never)
    # a time is written where all times together are likelier than any other token
    scores = logits.log_softmax(-1)
    other = scores[:, : ids.times].amax(1, keepdim=True)
    is_likelier = scores[:, ids.times :].logsumexp(1, keepdim=True) > other
    return logits.masked_fill(is_likelier & ~is_time, never)


def _special_tokens(tokenizer: Any, config: Any, generation: Mapping[str, Any]) -> _Tokens:
    kept = {name: json.loads(value) for name, value in config.extra} | dict(generation)
    end = _id(tokenizer, "<|endoftext|>")
    space = tokenizer.encode(" ", add_special_tokens=False).ids
    no_times = kept.get("no_timestamps_token_id", _id(tokenizer, "<|notimestamps|>"))
    initial = kept.get("max_initial_timestamp_index", INITIAL)
    (no_times,) = _token_ids("no_timestamps_token_id", [no_times], config)
    return _Tokens(
        end=end,
        start=_id(tokenizer, "<|startoftranscript|>"),
        translate=_id(tokenizer, "<|translate|>"),
        transcribe=_id(tokenizer, "<|transcribe|>"),
        no_times=no_times,
        times=no_times + 1,
        suppressed=_token_ids("suppress_tokens", kept.get("suppress_tokens"), config),
        suppressed_first=_token_ids(
            "begin_suppress_tokens", kept.get("begin_suppress_tokens", (*space[:1], end)), config
        ),
        initial=None if initial is None else _token_ids("max_initial_timestamp_index", [initial], config)[0],
    )


def _token_ids(name: str, values: Any, config: Any) -> tuple[int, ...]:
    """A list of generation_config.json; null is an empty one."""
    values = () if values is None else values
    if not isinstance(values, (list, tuple)) or not all(
        type(one) is int and 0 <= one < config.vocab_size for one in values
    ):
        raise ValueError(f"{name} is {values!r}; it must have numbers from 0 to {config.vocab_size - 1}.")
    return tuple(values)


def _id(tokenizer: Any, name: str) -> int:
    token: int | None = tokenizer.token_to_id(name)
    if token is None:
        raise ValueError(f"The tokenizer has no token {name}: it must be that of a whisper which knows it.")
    return token


def _text(tokenizer: Any, clip: _Clip, times: int, *, timestamps: bool) -> str:
    """The text of all windows, in which time stamps count from the beginning of the clip."""
    if not timestamps:
        ids = [token for _, tokens in clip.windows for token in tokens if token < times]
        return str(tokenizer.decode(ids)).strip()
    text, words = "", []
    for begin, tokens in clip.windows:
        for token in tokens:
            if token < times:
                words.append(token)
                continue
            text += tokenizer.decode(words) + f"<|{begin * HOP / 16000 + (token - times) * STEP:.2f}|>"
            words = []
        text += tokenizer.decode(words)
        words = []
    return text
