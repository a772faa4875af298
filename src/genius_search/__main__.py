"""``python -m genius_search``: the command ``genius``."""

import sys

from genius_search.cli import main

if __name__ == "__main__":
    sys.exit(main())
