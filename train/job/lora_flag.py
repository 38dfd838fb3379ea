"""Which adapters a run trains, in one line: r=8,alpha=16,targets=q_proj+v_proj."""

from dataclasses import dataclass

FORM = "adapters as r=8,alpha=16,targets=q_proj+v_proj"


@dataclass(frozen=True)
class Adapters:
    """As `params.lora.add` takes them."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


def parse(text: str) -> Adapters:
    """Adapters of a line in which r must stand; alpha is r without it. ValueError where the line is none."""
    parts = [part.partition("=") for part in text.split(",")]
    given = {name.strip(): value.strip() for name, _, value in parts}
    if len(given) != len(parts) or "r" not in given or not given.keys() <= {"r", "alpha", "targets"}:
        raise ValueError(FORM)
    rank = int(given["r"])
    alpha = float(given.get("alpha", rank))
    targets = tuple(given.get("targets", "q_proj+v_proj").split("+"))
    if rank < 1 or not 0 < alpha < float("inf") or not all(targets):
        raise ValueError(FORM)
    return Adapters(rank, alpha, targets)


def are_adapters(value: object) -> bool:
    try:
        return type(value) is str and parse(value) is not None
    except ValueError:
        return False
