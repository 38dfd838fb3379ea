"""tokenizer.json of a folder, for the optional tokenizers library."""

from pathlib import Path
from typing import TYPE_CHECKING

from fnmodels.errors import FormatError
from fnmodels.files import read_text

from .files import plain_file
from .tokenizer_growth import GROWTH_LIMIT, unbounded_part

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_LIMIT = 500_000_000  # bytes; the largest published ones have 35 MB


def read_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer as the file says, with its padding and truncation.

    Raises:
        FileNotFoundError: The folder has no tokenizer.json.
        FormatError: The library cannot read it, or it could make a text endless.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    text = read_text(plain_file(folder, path.name), TOKENIZER_LIMIT, follow=True)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise FormatError(f"{path} is not a tokenizer that the tokenizers library can read ({error})") from error
    if part := unbounded_part(tokenizer):
        raise FormatError(f"{path}: its {part} could make a text more than {GROWTH_LIMIT:,} times as long")
    return tokenizer
