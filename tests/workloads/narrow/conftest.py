"""The casts by brute force (`narrow_reference.py`) are beside the tests that import them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
