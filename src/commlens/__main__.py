"""``python -m commlens``, the same as ``commlens``."""

from __future__ import annotations

import sys

from commlens.commands import main

if __name__ == "__main__":
    sys.exit(main())
