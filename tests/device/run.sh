#!/usr/bin/env bash
# Measures this library on one GPU in at most eight minutes, without network: lines of JSON in device.jsonl.
# Each part is a process with a time limit; a part that fails or is too slow costs no other part.
#
#   bash tests/device/run.sh [FOLDER]       on a GPU, with the wheels of pack.sh in build/device
#   TOY=1 bash tests/device/run.sh [FOLDER] tiny sizes, on any device
# Variables: PYTHON (python3), PARTS ("part=seconds ..."), LIMIT (seconds of everything, 480).
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
wheels="$here/../../build/device"
out="$(mkdir -p "${1:-build/device_results}" && cd "${1:-build/device_results}" && pwd)"
python="${PYTHON:-python3}" lines="$out/device.jsonl" end=$((SECONDS + ${LIMIT:-480}))
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
parts="${PARTS:-versions=30 attention=110 decoding=30 steps=110 rows_0p6b=230 resume=90 rows_4b=150}"

export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$work/jax_cache}" PYTHONUNBUFFERED=1
: >"$lines"
note() { printf '{"part": "%s", "%s": %s}\n' "$@" | tee -a "$lines"; }

if [ -z "${TOY:-}" ]; then
    # The versions of the machine's own packages stay: --no-deps, and nothing is upgraded.
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "$wheels"/*.whl ||
        note install error "\"the wheels of $wheels were not installed\""
    # shellcheck source=launch/env.sh
    cd "$here/../.." && source launch/env.sh gpu
    export PYTHONPATH="$PWD:$work/site" # the checkout's code, if the wheel is older
fi

for entry in $parts; do
    part="${entry%=*}" seconds="${entry#*=}" left=$((end - SECONDS)) started=$SECONDS
    if [ "$left" -lt 10 ]; then
        note "$part" error '"no time was left"'
        continue
    fi
    [ "$seconds" -lt "$left" ] || seconds=$left
    timeout --signal=KILL "$seconds" "$python" "$here/parts.py" "$part" "$lines" "$work/$part" ${TOY:+toy} \
        2>"$out/$part.err"
    code=$?
    [ "$code" = 0 ] || note "$part" error "\"exit code $code, limit $seconds s\""
    note "$part" part_seconds $((SECONDS - started))
done
cp "$work"/*/output "$out" 2>/dev/null || true
