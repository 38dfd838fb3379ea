"""Counters, gauges and histograms in the text format of Prometheus."""

import threading
from bisect import bisect_left
from dataclasses import dataclass, field

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
HELP = {
    "requests_total": ("counter", "Requests by route and status."),
    "prompt_tokens_total": ("counter", "Tokens of prompts that were taken."),
    "generated_tokens_total": ("counter", "Tokens drawn."),
    "scored_tokens_total": ("counter", "Tokens of prompts whose log-probabilities were computed."),
    "cancelled_total": ("counter", "Requests whose clients left before the end."),
    "queue": ("gauge", "Requests that wait."),
    "running": ("gauge", "Requests for which tokens are drawn."),
    "step_seconds": ("histogram", "Time of a step of all slots."),
    "first_token_seconds": ("histogram", "Time from a request's arrival to its first token."),
    "request_seconds": ("histogram", "Time from a request's arrival to the end of its answer."),
}


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0


class Metrics:
    """Counters, gauges and histograms of the server; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, float] = {}
        self._histograms: dict[str, _Histogram] = {}

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Adds to a counter."""
        key = _key(name, labels)
        with self._lock:
            self._numbers[key] = self._numbers.get(key, 0) + value

    def set(self, name: str, value: float) -> None:
        """Sets a gauge."""
        with self._lock:
            self._numbers[name] = value

    def observe(self, name: str, seconds: float) -> None:
        """Adds a time to a histogram."""
        with self._lock:
            own = self._histograms.setdefault(name, _Histogram())
            own.counts[bisect_left(SECONDS, seconds)] += 1
            own.total += seconds

    def step(self, seconds: float, tokens: int) -> None:
        """A step of all slots and the tokens that it drew."""
        self.observe("step_seconds", seconds)
        self.add("generated_tokens_total", tokens)

    def text(self) -> str:
        """All of them, as Prometheus reads it."""
        with self._lock:
            numbers = dict(self._numbers)
            histograms = {name: (list(own.counts), own.total) for name, own in self._histograms.items()}
        lines = []
        for name, (kind, words) in HELP.items():
            full = f"fnmodels_{name}"
            lines += [f"# HELP {full} {words}", f"# TYPE {full} {kind}"]
            lines += [f"fnmodels_{key} {value:.12g}" for key, value in numbers.items() if key.partition("{")[0] == name]
            if name in histograms:
                counts, total = histograms[name]
                for i, limit in enumerate(("0", *map(str, SECONDS), "+Inf")[1:]):
                    lines.append(f'{full}_bucket{{le="{limit}"}} {sum(counts[: i + 1])}')
                lines += [f"{full}_sum {total:.12g}", f"{full}_count {sum(counts)}"]
        return "\n".join((*lines, ""))


def _key(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inside}}}" if inside else name
