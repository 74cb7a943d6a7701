"""`python -m kvlane.launch_router`: `kvlane serve`, with the flags of `python -m sglang_router.launch_router`."""

import sys

from ._program import run

if __name__ == "__main__":
    run(["serve", *sys.argv[1:]])
