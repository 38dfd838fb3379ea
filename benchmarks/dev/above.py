"""Puts benchmarks/ on the path, whose modules the scripts of this folder use: each imports it first."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
