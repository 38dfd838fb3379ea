"""The value of --lora: LoRA rank, alpha, target weights and form as r=8,alpha=16,targets=q_proj+v_proj,rslora,dora."""

from dataclasses import dataclass

LORA_FORM = "adapters as r=8,alpha=16,targets=q_proj+v_proj"


@dataclass(frozen=True)
class LoraSettings:
    """The arguments of `params.lora.add`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool
    dora: bool


def parse_lora(text: str) -> LoraSettings:
    """Parses the value of --lora. r is required, alpha defaults to r. ValueError where the text has another form."""
    items = [tuple(part.strip() for part in item.partition("=")) for item in text.split(",")]
    values = {name: value for name, equals, value in items if equals}
    forms = [name for name, equals, _ in items if not equals]
    if "r" not in values or not values.keys() <= {"r", "alpha", "targets"} or not {*forms} <= {"rslora", "dora"}:
        raise ValueError(LORA_FORM)
    if len(values) + len({*forms}) != len(items):  # a name twice
        raise ValueError(LORA_FORM)
    rank = int(values["r"])
    alpha = float(values.get("alpha", rank))
    targets = tuple(values.get("targets", "q_proj+v_proj").split("+"))
    if rank < 1 or not 0 < alpha < float("inf") or not all(targets):
        raise ValueError(LORA_FORM)
    return LoraSettings(rank, alpha, targets, rslora="rslora" in forms, dora="dora" in forms)


def is_lora(value: object) -> bool:
    try:
        return type(value) is str and parse_lora(value) is not None
    except ValueError:
        return False
