"""The value of --lora: LoRA rank, alpha and target weights as r=8,alpha=16,targets=q_proj+v_proj."""

from dataclasses import dataclass

LORA_FORM = "adapters as r=8,alpha=16,targets=q_proj+v_proj"


@dataclass(frozen=True)
class LoraSettings:
    """The arguments of `params.lora.add`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


def parse_lora(text: str) -> LoraSettings:
    """Parses the value of --lora. r is required, alpha defaults to r. ValueError where the text has another form."""
    items = [item.partition("=") for item in text.split(",")]
    values = {name.strip(): value.strip() for name, _, value in items}
    if len(values) != len(items) or "r" not in values or not values.keys() <= {"r", "alpha", "targets"}:
        raise ValueError(LORA_FORM)
    rank = int(values["r"])
    alpha = float(values.get("alpha", rank))
    targets = tuple(values.get("targets", "q_proj+v_proj").split("+"))
    if rank < 1 or not 0 < alpha < float("inf") or not all(targets):
        raise ValueError(LORA_FORM)
    return LoraSettings(rank, alpha, targets)


def is_lora(value: object) -> bool:
    try:
        return type(value) is str and parse_lora(value) is not None
    except ValueError:
        return False
