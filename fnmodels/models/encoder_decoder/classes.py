"""The class of an encoder-decoder model that config.json names."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import Fields, shown


def headless(architecture: str) -> str:
    """The class without a head beside one that has it: T5Model for T5ForConditionalGeneration."""
    return re.sub("For[A-Z].*|MTModel$", "", architecture) + "Model"


def declared_class(fields: Fields, *known: str, older: Mapping[str, str] = MappingProxyType({})) -> str:
    """The class that config.json names in "architectures", by default the first that is known.

    Args:
        fields: of the file.
        known: classes that are read beside the one without a head, T5Model: T5ForConditionalGeneration first.
        older: {a class's name in older files: its name}.

    Returns:
        One of `known`, or `headless` of the first.

    Raises:
        UnsupportedError: it is another one.
    """
    declared = fields.take("architectures", [known[0]])
    name = declared[0] if isinstance(declared, list) and len(declared) == 1 and isinstance(declared[0], str) else ""
    name = older.get(name, name)
    every = (*known, headless(known[0]))
    if name in every:
        return name
    raise UnsupportedError(f"{fields.where}: 'architectures' has {shown(declared)}; supported are {', '.join(every)}.")
