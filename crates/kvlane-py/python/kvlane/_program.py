"""The program `kvlane` of this installation."""

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn


def places() -> Iterator[Path]:
    """Where an installer may have put it, the likeliest first."""
    for scheme in (None, sysconfig.get_preferred_scheme("user")):
        scripts = sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts")
        yield Path(scripts) / "kvlane"
    # `pip install --target` and `--prefix`.
    package = Path(__file__).resolve().parent
    yield package.parent / "bin" / "kvlane"
    yield from (above / "bin" / "kvlane" for above in package.parents[2:4])


def run(arguments: list[str]) -> NoReturn:
    """Becomes the program, with these arguments."""
    for place in places():
        if os.access(place, os.X_OK):
            sys.stdout.flush()
            os.execv(place, [os.fspath(place), *arguments])
    looked = ", ".join(map(str, dict.fromkeys(places())))
    sys.exit(f"kvlane: the program is in none of {looked}; reinstall it: pip install --force-reinstall kvlane")
