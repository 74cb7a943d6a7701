"""Divides the runs of a kvlane command among the workers of a Ray cluster, and shows what one machine would show.

    pip install ray==2.60.0
    python deploy/ray/distribute.py --parts 64 -- kvlane simulate --scenario seed-001 --seeds 40 --jobs 1 --json out.json

The command is any that has --part and --merge: `kvlane simulate`, `kvlane bench`, and the example `placement` of kvlane-lab. Each
part is a Ray task, which runs the command with `--part I/N` on any node; then the command runs once more here, with --merge. The
program and the files that the command reads must be at the same paths on every node.

A part whose worker or node dies, or whose program is killed by a signal, is run again. An error of the program is not: it would
occur again. With --keep, completed parts are kept in a directory, and those that are there are not run again.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import ray


class Killed(Exception):
    """The program was ended by a signal."""


def run_part(command, part, kept_stderr=2000):
    """The file of a part, as the program writes it to stdout."""
    process = subprocess.run([*command, "--part", part], stdin=subprocess.DEVNULL, capture_output=True)
    said = process.stderr[-kept_stderr:].decode(errors="replace").strip()
    if process.returncode < 0:
        raise Killed(f"part {part}: signal {-process.returncode}: {said}")
    if process.returncode:
        raise RuntimeError(f"part {part}: exit code {process.returncode}: {said}")
    return process.stdout


def distribute(command, parts, directory, options):
    """Runs the parts that are not in `directory` yet, and writes each to a file there when it has ended."""
    task = ray.remote(run_part).options(
        num_cpus=options.cpus, max_retries=options.retries, retry_exceptions=[Killed], name="kvlane-part"
    )
    files = {f"{number}/{parts}": directory / f"{number}-of-{parts}.jsonl" for number in range(1, parts + 1)}
    running = {task.remote(command, part): part for part, file in files.items() if not file.exists()}
    while running:
        (ended, *_), _ = ray.wait(list(running), num_returns=1)
        file = files[running.pop(ended)]
        # A file is there whole, or not at all.
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_bytes(ray.get(ended))
        unfinished.replace(file)
        print(f"{parts - len(running)} of {parts} parts", file=sys.stderr, flush=True)
    return [str(file) for file in files.values()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, required=True, help="number of parts: several for each core, as their runs take unequal times")
    parser.add_argument("--address", help="the cluster's address [default: RAY_ADDRESS, or Ray is started on this machine]")
    parser.add_argument("--cpus", type=float, default=1, help="cores of a part, as the command's --jobs or --threads [default: 1]")
    parser.add_argument("--retries", type=int, default=3, help="how often a part is run again [default: 3]")
    parser.add_argument("--keep", type=Path, help="directory for the parts, created if necessary [default: a temporary one]")
    parser.add_argument("command", nargs="+", help="after --: the command, as for one machine")
    options = parser.parse_args()
    if options.parts < 1:
        parser.error("--parts: must be at least 1")
    ray.init(address=options.address, log_to_driver=False, logging_level="warning")
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            files = distribute(options.command, options.parts, directory, options)
        except ray.exceptions.RayError as error:
            sys.exit(f"error: {getattr(error, 'cause', None) or error}")
        ray.shutdown()
        sys.exit(subprocess.run([*options.command, "--merge", *files]).returncode)


if __name__ == "__main__":
    main()
