"""`python -m kvlane`: the program."""

import sys

from ._program import run

if __name__ == "__main__":
    run(sys.argv[1:])
