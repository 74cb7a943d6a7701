"""Lets PyPI's torch, which is built for CUDA, be imported where no CUDA library is installed.

usage: cuda_stubs.py SITE_PACKAGES

torch's shared objects name libcudart.so.13, libcublas.so.13 and others as needed, and the loader refuses torch
without them. For each one this compiles an empty stand-in which exports what torch wants of it, under the symbol
versions torch wants, and puts it where torch's RPATH looks. Every function answers "no CUDA device" (error 100);
torch then does what it does on any machine without a GPU.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

# Unversioned symbols may belong to any library: these are CUDA's.
CUDA_NAME = re.compile(r"_*(cu([A-Z]|blas|da|dnn|fft|file|pti|rand|solver|sparse)|n(ccl|vrtc|vshmem|vtx))")
# Libraries of the C and C++ runtimes, which every machine has.
SYSTEM = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp))\.so")
# What is called while torch is imported, and what must come back.
CALLED = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *n) { if (n) *n = 0; return 100; }",
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int *v) { if (v) *v = 0; return 0; }",
    "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int *v) { if (v) *v = 13000; return 0; }",
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "cudaErrorNoDevice"; }',
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { return "no CUDA library is installed"; }',
    "__cudaRegisterFatBinary": "static void *kernels; void **__cudaRegisterFatBinary(void *b) { return &kernels; }",
}


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wanted_libraries(objects, present):
    """The missing libraries: name -> the symbol versions asked of it."""
    wanted = defaultdict(set)
    for path in objects:
        required_of = None
        for line in run("objdump", "-p", path).splitlines():
            if needed := re.match(r"\s+NEEDED\s+(\S+)", line):
                if needed[1] not in present and not SYSTEM.match(needed[1]):
                    wanted[needed[1]]
            elif of := re.match(r"\s+required from (\S+):", line):
                required_of = of[1]
            elif version := re.match(r"\s+0x[0-9a-f]+ 0x[0-9a-f]+ \d+ (\S+)", line):
                if required_of is not None and required_of not in present and not SYSTEM.match(required_of):
                    wanted[required_of].add(version[1])
    return wanted


def symbols(objects):
    """All defined names, and all undefined ones as (name, version or nothing)."""
    defined, undefined = set(), set()
    for path in objects:
        for line in run("nm", "-D", "--with-symbol-versions", path).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            if kind == "U":
                undefined.add((name, version.lstrip("@")))
            elif kind not in "wv":
                defined.add(name)
    return defined, {(name, version) for name, version in undefined if name not in defined}


def compile_stub(target, by_version):
    body, script = [], []
    for version, names in sorted(by_version.items()):
        for name in sorted(names):
            result = 0 if name.startswith("__cuda") else 100
            body.append(CALLED.get(name, f"long {name}(void) {{ return {result}; }}"))
        if version:
            exported = "".join(f" {name};" for name in sorted(names))
            script.append(f"{version} {{{' global:' + exported if names else ''} }};")
    with tempfile.TemporaryDirectory() as scratch:
        source, versions = Path(scratch, "stub.c"), Path(scratch, "versions")
        source.write_text("\n".join(body) + "\n")
        versions.write_text("\n".join(script) + "\n")
        options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{target.name}"]
        options += [f"-Wl,--version-script={versions}"] if script else []
        run("gcc", *options, "-o", str(target), str(source))


def main(site_packages):
    objects = sorted(str(path) for path in Path(site_packages, "torch", "lib").iterdir() if ".so" in path.name)
    place = Path(site_packages, "nvidia", "cu13", "lib")
    place.mkdir(parents=True, exist_ok=True)
    wanted = wanted_libraries(objects, {Path(path).name for path in objects})
    library_of = {version: library for library, versions in wanted.items() for version in versions}
    exports = {library: {version: set() for version in versions} for library, versions in wanted.items()}
    for name, version in symbols(objects)[1]:
        if version in library_of:
            exports[library_of[version]][version].add(name)
        elif not version and CUDA_NAME.match(name) and exports:
            # Which of the libraries exports it does not matter to the loader.
            exports[min(exports)].setdefault("", set()).add(name)
    for library, by_version in sorted(exports.items()):
        compile_stub(place / library, by_version)
        print(f"{library}: {sum(map(len, by_version.values()))} symbols")
    run(sys.executable, "-c", "import torch; assert not torch.cuda.is_available()")


if __name__ == "__main__":
    main(sys.argv[1])
