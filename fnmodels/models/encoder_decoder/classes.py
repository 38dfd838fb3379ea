"""The class of an encoder-decoder model that config.json names."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import Fields, shown


def declared_class(fields: Fields, *known: str, older: Mapping[str, str] = MappingProxyType({})) -> str:
    """The class that config.json names in "architectures", by default the first that is known.

    Args:
        fields: of the file.
        known: classes that are read, the one with a head first: T5ForConditionalGeneration.
        older: {a class's name in older files: its name}.

    Returns:
        One of `known`.

    Raises:
        UnsupportedError: it is another one.
    """
    declared = fields.take("architectures", [known[0]])
    name = declared[0] if isinstance(declared, list) and len(declared) == 1 and isinstance(declared[0], str) else ""
    name = older.get(name, name)
    if name in known:
        return name
    message = f"{fields.where}: 'architectures' has {shown(declared)}"
    if name == re.sub("For[A-Z].*|MTModel$", "", known[0]) + "Model":
        raise UnsupportedError(
            f"{message}, the class without a head, which is not read: {known[0]}.from_pretrained and save_pretrained "
            "of transformers write the model with one."
        )
    raise UnsupportedError(f"{message}; supported {'is' if len(known) == 1 else 'are'} {', '.join(known)}.")
