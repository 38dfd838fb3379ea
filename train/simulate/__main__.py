"""`python -m train.simulate`: memory and traffic of a mesh without the machine."""

import sys

from .cli import main

sys.exit(main())
