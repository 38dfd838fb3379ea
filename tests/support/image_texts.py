"""Every vision-language family with a tiny config, and rows of text with images as arguments of `forward` and steps."""

import functools
import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels.models import vision_language
from fnmodels.models.common.family import parsed
from params.checkpoint.module_names import module_names
from tests.support.cases import generic_params
from tests.support.naming import fewest, pairs_of

TEXT = 40  # the ids of text are below

# Rows of documents: text of n tokens, and the (rows, columns) of images, in tokens.
Row = Sequence[int | tuple[int, int]]
ROWS: tuple[Row, ...] = (
    ((2, 3), 3, (1, 4), 4),  # an image first
    (5, (3, 2), 1, (2, 2)),  # and last
    (9,),
    (2, (2, 2), (3, 2), 2),  # one after the other
)


@dataclass(frozen=True)
class ImageCase:
    """A family of `fnmodels.models.vision_language` with a tiny config; tests: of the family; label: of the config."""

    name: str
    family: Any
    config: Any
    tests: Any
    label: str

    def __str__(self) -> str:
        return self.name

    def reference(self) -> Any:
        """The model of transformers, in evaluation mode with generic values."""
        return self.tests._reference() if hasattr(self.tests, "CONFIG") else self.tests._reference(self.label)

    def params(self) -> Any:
        """The parameters of `reference`."""
        return self.tests._params() if hasattr(self.tests, "CONFIG") else self.tests._params(self.label)


@functools.cache
def image_cases(*, every: bool = False) -> tuple[ImageCase, ...]:
    """Found by the folder of the families; the configs are those of tests/fnmodels/models/test_FAMILY.py.

    Where these name STRUCTURES, labels of configs whose text or images are read in another way, those alone, unless
    `every` is asked for.
    """
    found = []
    for name in (module.name for module in pkgutil.iter_modules(vision_language.__path__) if not module.ispkg):
        family = importlib.import_module(f"fnmodels.models.vision_language.{name}")
        if not hasattr(family, "with_images"):  # mllama, whose layers attend to images: test_mllama.py has all of it
            continue
        tests = importlib.import_module(f"tests.fnmodels.models.test_{name}")
        for label, config in _configs(tests, family, name).items():
            if not every and label not in getattr(tests, "STRUCTURES", (label,)):
                continue
            shown = label if label.startswith(name) else f"{name}_{label}"
            found.append(ImageCase(shown, family, config, tests, label))
    return tuple(found)


def form(case: ImageCase) -> tuple[Any, ...]:
    """What caches and generation get from a model: positions of several axes, masks of images and of prompts, features
    of several layers, and which kinds of entries the cache of its text has."""
    parts = (hasattr(case.family, name) for name in ("image_positions", "image_masks", "prompt_masks", "deepstack"))
    kinds = parsed(fnmodels.family_of(case.config.text).kinds(case.config.text))
    return (*parts, frozenset((kind.slides, kind.ordered, kind.indexed, kind.compresses) for kind in kinds))


@functools.cache
def image_forms() -> tuple[ImageCase, ...]:
    """One of `image_cases` of each form."""
    return tuple({form(case): case for case in reversed(image_cases())}.values())


def image_cases_of_all_names() -> list[ImageCase]:
    """`image_cases`, and of the others a few that have between them all names of transformers' modules."""
    found, every = image_cases(), image_cases(every=True)
    known = set[str]().union(*(pairs_of(module_names(case.config)) for case in found))
    return [*found, *fewest({case: pairs_of(module_names(case.config)) - known for case in every})]


def _configs(tests: Any, family: Any, name: str) -> dict[str, Any]:
    if hasattr(tests, "CONFIG"):
        return {name: tests.CONFIG}
    values = tests.VARIANTS if hasattr(tests, "VARIANTS") else {each: tests.values_of(each) for each in tests.NAMES}
    return {label: family.Config.from_hf(own) for label, own in values.items()}


PROMPTS_SEEN = (3, 3, 1, 1)  # tokens of each row's documents that see each other, where a model's prompts do


def types_of(case: ImageCase, segment_ids: Tensor) -> Tensor | None:
    """Token types [B, S], 0 for the first tokens of each document; None for a model whose prompts are causal."""
    if not hasattr(case.family, "prompt_masks"):
        return None
    most = torch.tensor(PROMPTS_SEEN)[: len(segment_ids), None]
    return (fnmodels.positions_from_segments(segment_ids) >= most).long()


@dataclass(frozen=True)
class ImageBatch:
    """Rows of text with images: tokens, segment_ids [B, S], places [B, S, 2]; grids [images, 3]; features [1, N, D].

    token_types: [B, S], see `types_of`.
    """

    case: ImageCase
    tokens: Tensor
    segment_ids: Tensor
    places: Tensor
    grids: Tensor
    features: tuple[Tensor, ...]
    token_types: Tensor | None = None

    def positions(self) -> Tensor:
        """[B, S], or [B, S, 3] of a model with several axes."""
        if hasattr(self.case.family, "image_positions"):
            found: Tensor = self.case.family.image_positions(self.places[..., 0] >= 0, self.segment_ids, self.grids)
            return found
        return fnmodels.positions_from_segments(self.segment_ids)

    def types(self) -> dict[str, Tensor]:
        """{"token_types": [B, S]} for a model whose prompts see all of themselves."""
        return {} if self.token_types is None else {"token_types": self.token_types}

    def arguments(self, params: Any, prepared: Any) -> tuple[Any, dict[str, Any]]:
        """(inputs, masks, freqs_cis) with the features in them, and options of the call."""
        family, config = self.case.family, self.case.config
        inputs, *rest = prepared
        inputs = family.with_images(params, inputs, self.features[0], self.places, config=config)
        later = {} if len(self.features) == 1 else {"edits": family.deepstack(self.features[1:], self.places)}
        return (inputs, *rest), later

    def forward(self, params: Any, kernel: str = "math") -> Tensor:
        """Logits [B, S, V] of one pass over all tokens."""
        config, known = self.case.config, {"segment_ids": self.segment_ids, "places": self.places} | self.types()
        axes = hasattr(self.case.family, "image_positions")
        more = {"grids": self.grids} if axes else {"positions": self.positions()}
        prepared, options = self.arguments(params, fnmodels.prepare(config, self.tokens, **known, **more))
        logits: Tensor = fnmodels.forward(params["text"], *prepared, config=config.text, kernel=kernel, **options)
        return logits

    def part(self, starts: Sequence[int], ends: Sequence[int]) -> tuple["ImageBatch", Tensor]:
        """(tokens starts[b] to ends[b] of each row b, which may end with padding; their positions)."""
        width = max(end - start for start, end in zip(starts, ends, strict=True))
        at = torch.tensor(starts)[:, None] + torch.arange(width)
        inside = at < torch.tensor(ends)[:, None]
        rows, at = torch.arange(len(at))[:, None], at.clamp(max=self.tokens.shape[1] - 1)
        positions = self.positions()[rows, at]
        begun = [int(number) for number in self.places[rows, at][..., 1][inside & (self.places[rows, at][..., 0] >= 0)]]
        offsets = self.grids.prod(-1).cumsum(0) - self.grids.prod(-1)
        images = [image for image, first in enumerate(offsets.tolist()) if first in begun]
        found = replace(
            self,
            tokens=self.tokens[rows, at],
            segment_ids=self.segment_ids[rows, at].where(inside, 0),
            places=self.places[rows, at].where(inside[..., None], -1),
            token_types=None if self.token_types is None else self.token_types[rows, at],
            grids=self.grids[images],
        )
        return found, positions


def image_batch(
    case: ImageCase, rows: Sequence[Row] = ROWS, *, left: Sequence[int] = (), dtype: torch.dtype = torch.float64
) -> ImageBatch:
    """A batch of one document per row, padded on the right, and with left[b] tokens of padding before row b."""
    generator = torch.Generator().manual_seed(1)
    left = left or [0] * len(rows)
    sizes = [[one if isinstance(one, int) else one[0] * one[1] for one in row] for row in rows]
    width = max(pad + sum(size) for pad, size in zip(left, sizes, strict=True))
    tokens, segment_ids = torch.zeros(2, len(rows), width, dtype=torch.int64)
    places = torch.full((len(rows), width, 2), -1)
    grids: list[tuple[int, int, int]] = []
    count = 0
    for b, (pad, row, size) in enumerate(zip(left, rows, sizes, strict=True)):
        at = pad
        segment_ids[b, pad : pad + sum(size)] = 1
        tokens[b, pad : pad + sum(size)] = torch.randint(1, TEXT, (sum(size),), generator=generator)
        for one, length in zip(row, size, strict=True):
            if not isinstance(one, int):
                grids.append((1, *one))
                places[b, at : at + length, 0] = 0
                places[b, at : at + length, 1] = torch.arange(count, count := count + length)
            at += length
    tokens = tokens.where(places[..., 0] < 0, case.config.image_token)
    layers = len(getattr(case.config.vision, "deepstack", ()))
    width = case.config.text.hidden_size
    features = [torch.randn(1, max(count, 1), width, generator=generator, dtype=dtype) for _ in range(1 + layers)]
    return ImageBatch(
        case,
        tokens,
        segment_ids,
        places,
        torch.tensor(grids).reshape(-1, 3),
        tuple(features),
        types_of(case, segment_ids),
    )


def image_params(case: ImageCase, dtype: torch.dtype = torch.float64) -> Any:
    """{"text": ...} with generic values."""
    return {"text": generic_params(case.config.text, dtype)}
