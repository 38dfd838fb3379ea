"""`python -m train.compare`: see train/commands/compare.py."""

import sys

from train.commands.compare import main

if __name__ == "__main__":
    sys.exit(main())
