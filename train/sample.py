"""`python -m train.sample`: see train/commands/sample.py."""

import sys

from train.commands.sample import main

if __name__ == "__main__":
    sys.exit(main())
