"""Measures which way of multiplying matrices is fastest on this machine, when the first large product asks.

torch multiplies fp32 matrices in MKL on x86, and bf16 ones in oneDNN. On AMD processors oneDNN's fp32 products are 1.1
(AVX2) to 2.3 times (AVX-512) as fast as MKL's; on an Intel Xeon of 2023 MKL's are up to 1.8 times as fast as oneDNN's
where both arguments lie transposed. Without AMX, bf16 products of that Xeon run at half the rate of fp32 ones, so that
widening the arguments is faster; on a Zen 4 they run at twice that rate.

The rates are kept in a file, so that all processes of a machine, now and later, choose the same and get the same bits:
$XDG_CACHE_HOME/fnmodels/products-<machine>.json, or below ~/.cache. Processes that start together measure one after
another, and all but the first read what it wrote. On a busy machine a product may not get its cores in any turn, so a
rate is confirmed when two turns reached it. A file with a rate that is not is replaced by a process that starts ten
minutes later or more, so that the processes of one run agree; one that is damaged or lacks a rate is replaced at once.
Where no file can be written, each process measures, and also where another one holds the lock for a minute.

Importing this module measures: the import stands inside of the function that asks, and dynamo runs it while it traces,
so that the choices are constants of a graph.

Row: train_step.
"""

import functools
import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.files import cache_folder, private_folder, read_bytes, remove_abandoned, write_text
from fnmodels.ops.cpu.machine import machine
from fnmodels.ops.torch_internals import has_bf16_products, has_onednn_linear, onednn_linear, undisturbed

Rates = dict[str, float]  # {name: GFLOP/s}
Form = tuple[bool, bool]  # whether x and weight lie transposed in memory

FORMS: dict[Form, str] = {
    (False, False): "forward",
    (False, True): "gradient of the input",
    (True, True): "gradient of the weight",
}
_ROWS, _IN, _OUT = 1024, 512, 512
_TURNS = 6  # at least
_SECONDS = 1.0  # at most, once all have had their turns
_AGREE = 0.95  # of the best rate, for a turn that confirms it
_ONEDNN_GAINS = 1.05  # times the rate of torch's own product; below it, torch's own
_WIDENING_GAINS = 1.25  # the same of fp32 products to bf16 ones: the conversions take a tenth, and memory
_LIMIT = 1_000_000  # bytes of the file, which has about 3,000
_SILENT_WAIT, _LONGEST_WAIT = 2.0, 60.0  # seconds for the lock
_KEPT = 600.0  # seconds that a file with an unconfirmed rate is read
BUSY = " (the machine was busy: a process that starts ten minutes later measures again)"


def table_file(of: dict[str, str]) -> Path:
    """The file of rates of the machine `of`. RuntimeError without a home directory."""
    key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"products-{key}.json"


def candidates() -> dict[str, Callable[[], Tensor]]:
    """{name: a product of 1024 x 512 x 512}, for each form in fp32 by either library, and in bf16."""
    runs: dict[str, Callable[[], Tensor]] = {}
    for (x_lies, weight_lies), name in FORMS.items():
        x, weight = _filled(_ROWS, _IN, x_lies), _filled(_OUT, _IN, weight_lies)
        runs[f"fp32 {name} torch"] = functools.partial(F.linear, x, weight)
        if has_onednn_linear():
            runs[f"fp32 {name} oneDNN"] = functools.partial(onednn_linear, x, weight, None)
        if has_bf16_products():
            runs[f"bf16 {name} torch"] = functools.partial(F.linear, x.bfloat16(), weight.bfloat16())
    return runs


def _filled(rows: int, columns: int, transposed: bool) -> Tensor:
    shape = (columns, rows) if transposed else (rows, columns)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rows), dtype=torch.float32, device="cpu")
    return x.t() if transposed else x


@dataclass(frozen=True)
class Table:
    """The rates of a machine. confirmed: two turns reached each of them."""

    gflops: Rates
    confirmed: bool


def measured() -> Table:
    """The best rates of `candidates`, which take turns until all are confirmed: 0.2 s, on a busy machine up to 1 s."""
    runs = candidates()
    best = {name: [0.0, 0.0] for name in runs}  # the second best and the best of each
    turns, start = 0, time.perf_counter()
    with torch.no_grad():
        while turns < _TURNS or (not _confirmed(best) and time.perf_counter() - start < _SECONDS):
            turns += 1
            for name, run in runs.items():
                best[name] = sorted((*best[name], _rate(run)))[-2:]
    return Table({name: round(two[-1], 1) for name, two in best.items()}, _confirmed(best))


def _rate(run: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    run()
    return 2e-9 * _ROWS * _IN * _OUT / (time.perf_counter() - start)


def _confirmed(best: dict[str, list[float]]) -> bool:
    return all(second >= _AGREE * first for second, first in best.values())


def rate_names() -> set[str]:
    """The names of `candidates`."""
    names = {f"fp32 {name} torch" for name in FORMS.values()}
    names |= {f"fp32 {name} oneDNN" for name in FORMS.values() if has_onednn_linear()}
    return names | {f"bf16 {name} torch" for name in FORMS.values() if has_bf16_products()}


def read(file: Path) -> Table | None:
    """The table in `file`; None if it is missing, damaged or lacks a rate, or not confirmed and ten minutes old."""
    try:
        content = json.loads(read_bytes(file, _LIMIT))
        rates = {str(name): float(rate) for name, rate in content["gflops"].items()}
        table = Table(rates, content.get("confirmed") is True)
        if rates.keys() != rate_names() or not all(0 < rate < math.inf for rate in rates.values()):
            return None
        return table if table.confirmed or abs(time.time() - file.stat().st_mtime) < _KEPT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def table_of(of: dict[str, str]) -> Table:
    """The table of the machine `of`, which is this one: that of its file, which is written if its rates are missing."""
    try:
        file = table_file(of)
        if (stored := read(file)) is not None:
            return stored
        private_folder(file.parent)
        with _alone_in(file.parent):
            if (stored := read(file)) is not None:  # of a process that measured while this one waited
                return stored
            table = undisturbed(measured)
            write(file, of, table)
            return table
    except (OSError, RuntimeError):
        return undisturbed(measured)


def write(file: Path, of: dict[str, str], table: Table) -> None:
    """Replaces the table of the machine `of`, and removes what killed processes left of theirs."""
    remove_abandoned(file.parent)
    write_text(file, json.dumps({"machine": of, **asdict(table)}, indent=1) + "\n")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other process is inside of this block with the same folder, on systems with fcntl.

    BlockingIOError: another has been for a minute, as one that was stopped; a warning says so after two seconds.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        start, warned = time.monotonic(), False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - start
                if waited > _LONGEST_WAIT:
                    raise
                if waited > _SILENT_WAIT and not warned:
                    warnings.warn(
                        f"Another process holds the lock of {folder} to measure products of matrices; it is waited for "
                        f"{_LONGEST_WAIT:.0f} s at most.",
                        stacklevel=2,
                    )
                    warned = True
                time.sleep(0.02)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a forked child may hold the handle too
        os.close(handle)


def forms_of_onednn(rates: Rates) -> frozenset[Form]:
    """The forms in which oneDNN's fp32 products are faster than torch's own."""
    return frozenset(
        form
        for form, name in FORMS.items()
        if rates.get(f"fp32 {name} oneDNN", 0.0) > _ONEDNN_GAINS * rates[f"fp32 {name} torch"]
    )


def widening_gains(rates: Rates) -> bool:
    """Whether bf16 products are faster by fp32 ones, all three forms in sum; True if this CPU has no bf16 products."""
    names = FORMS.values()
    if not all(f"bf16 {name} torch" in rates for name in names):
        return True
    narrow = sum(1 / rates[f"bf16 {name} torch"] for name in names)
    wide = sum(1 / max(rates[f"fp32 {name} torch"], rates.get(f"fp32 {name} oneDNN", 0.0)) for name in names)
    return narrow > _WIDENING_GAINS * wide


def explained() -> dict[str, str]:
    """`fnmodels.explain_products`."""
    choices: dict[str, str] = {}
    for form, name in FORMS.items():
        rates = {by: RATES[key] for by in ("torch", "oneDNN") if (key := f"fp32 {name} {by}") in RATES}
        chosen = "oneDNN" if form in ONEDNN else "torch"
        choices[f"fp32 {name}"] = f"{_listed(rates)}: {chosen}"
        narrow = {"torch": RATES[key]} if (key := f"bf16 {name} torch") in RATES else {}
        choices[f"bf16 {name}"] = f"{_listed(narrow)}: {f'fp32, by {chosen}' if WIDENS else 'torch'}"
    with suppress(RuntimeError):
        choices["file"] = str(table_file(machine())) + ("" if CONFIRMED else BUSY)
    return choices


def _listed(rates: Rates) -> str:
    return ", ".join(f"{by} {rate:.0f} GFLOP/s" for by, rate in rates.items()) or "no instructions"


BF16 = has_bf16_products()
_TABLE = table_of(machine())
RATES, CONFIRMED = _TABLE.gflops, _TABLE.confirmed
ONEDNN = forms_of_onednn(RATES)
WIDENS = widening_gains(RATES)
