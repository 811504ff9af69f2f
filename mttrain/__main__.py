"""`python -m mttrain` is the command `mttrain`."""

from __future__ import annotations

import sys

from mttrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
