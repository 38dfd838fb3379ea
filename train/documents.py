"""`python -m train.documents`: see train/commands/documents.py."""

import sys

from train.commands.documents import main

if __name__ == "__main__":
    sys.exit(main())
