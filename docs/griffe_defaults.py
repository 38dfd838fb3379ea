"""An extension of griffe: keywords that functions take as `**options: Unpack[...]` show their real defaults.

griffe's own extension makes a parameter of each key of the dict, with the default `...`; this one, listed after it,
puts what the functions that read the keywords have.
"""

import dataclasses
import inspect
from typing import Any

import griffe

import train
from fnmodels.options import ForwardOptions


def defaults() -> dict[str, str]:
    """{keyword: its default as source}: of `ForwardOptions`, and of `train.serve`."""
    fields = {field.name: repr(field.default) for field in dataclasses.fields(ForwardOptions)}
    parameters = inspect.signature(train.serve).parameters.values()
    return {p.name: repr(p.default) for p in parameters if p.default is not inspect.Parameter.empty} | fields


class RealDefaults(griffe.Extension):
    """Puts the defaults into the signature and into the table of parameters."""

    def __init__(self) -> None:
        self.defaults = {name: text.replace("'", '"') for name, text in defaults().items()}

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        rows: list[Any] = [p for p in func.parameters if str(p.default) == "..." and p.name in self.defaults]
        if not rows:
            return
        for row in rows:
            row.default = self.defaults[row.name]
        for section in func.docstring.parsed if func.docstring else ():
            if section.kind is griffe.DocstringSectionKind.parameters:
                for row in section.value:
                    if str(row.value) == "...":
                        row.value = self.defaults[row.name]
