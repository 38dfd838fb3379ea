"""`python -m params.compare`: see the docstring of the folder."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
