"""The installed package's program, and its figures for comparison."""

import subprocess
import sysconfig
from pathlib import Path

PROGRAM = str(Path(sysconfig.get_path("scripts")) / "kvlane")
ROOT = Path(__file__).resolve().parents[2]


def printed(*command):
    """What a command prints."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
