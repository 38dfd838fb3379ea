"""python -m train.commands.documents --run DIR --data FILE --init FOLDER --loss KIND: trains encoders on lines of JSON.

    --loss pairs      an embedder, by in-batch negatives: {"query", "positive"} and {"negatives"} if there are some
    --loss labels     a classifier of texts: {"text", "label"}
    --loss masked     masked language modeling: {"text"}
    --loss captions   CLIP or SigLIP on pictures: {"image", "text"}

    DIR/model         a folder that transformers reads, of pairs sentence-transformers too

--init is a folder with a tokenizer.json; an encoder or a decoder, with or without a head. The loop is that of
`python -m train`, with its flags and the other files of its run folder.
"""

import sys
from collections.abc import Sequence

from train.cli import Program, train
from train.command_line import NEEDS
from train.job.tasks.settings import DocumentSettings

PROGRAM = Program(
    "fnmodels-documents",
    "Train an encoder on pairs, labels, masked tokens or captions.",
    "train.job.tasks.documents",
    NEEDS,
)


def main(argv: Sequence[str] | None = None) -> int:
    return train(PROGRAM, DocumentSettings(), argv)


if __name__ == "__main__":
    sys.exit(main())
