"""`python -m train.plot`: see train/commands/plot.py."""

import sys

from train.commands.plot import main

if __name__ == "__main__":
    sys.exit(main())
