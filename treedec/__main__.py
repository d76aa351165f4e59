"""`python -m treedec`, the same as the command `treedec`."""

import sys

from treedec.cli import main

if __name__ == "__main__":
    sys.exit(main())
