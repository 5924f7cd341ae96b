#!/usr/bin/env bash
# Collects into build/device what a machine without network lacks: a wheel of this project, and the packages that an
# image with Python 3.12, JAX with CUDA 13, Flax, Optax, Orbax, PyTorch and Transformers does not have.
#
#   bash tests/device/pack.sh     needs the network; then run.sh on the machine
set -euo pipefail
cd "$(dirname "$0")/../.."
out=build/device
rm -rf "$out" && mkdir -p "$out"
packages=(annotated-types array-record grain ml-collections portpicker pydantic pydantic-core python-flint starlette typing-inspection uvicorn)
python="${PYTHON:-python3}"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$out" .
platforms=()
for glibc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$out" "${packages[@]}"
size="$(du -sm "$out" | cut -f1)"
echo "$out: $size MB of wheels"
[ "$size" -le 60 ] || { echo "error: more than 60 MB" >&2; exit 1; }
