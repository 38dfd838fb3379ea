"""`python -m train`: the main job."""

import sys

from train.cli import main

if __name__ == "__main__":  # the processes of a mesh import this module as well
    sys.exit(main())
