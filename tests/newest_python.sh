#!/usr/bin/env bash
# The tests with the newest release of every package, which launch/versions.txt does not hold back, for any Python.
# They are installed into build/newest-VERSION.
#
#   bash tests/newest_python.sh PYTHON                       every test that CI runs
#   bash tests/newest_python.sh PYTHON --smoke               two steps of training, the sampler, checkpoints, an export
#   bash tests/newest_python.sh PYTHON [pytest arguments]
#   JAX=0.11.2 bash tests/newest_python.sh PYTHON ...        with that release of JAX
#   PINNED=1 bash tests/newest_python.sh PYTHON ...          with the versions of launch/versions.txt, as CI
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/pins.sh
folder="build/newest-$("$1" -c 'import platform; print(platform.python_version())')${JAX:+-jax-$JAX}${PINNED:+-pinned}"
python="$PWD/$folder/bin/python"
wanted="$(cat setup.py launch/versions.txt | cksum) ${JAX:-}"
if [ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ]; then
    "$1" -m venv --clear "$folder"
    pip=("$python" -m pip install --quiet --disable-pip-version-check --no-compile)
    if [ -n "${PINNED:-}" ]; then
        "${pip[@]}" --require-hashes --no-deps -r <(pins base jetstream test)
        "${pip[@]}" --no-deps --no-build-isolation -e .
    else
        "${pip[@]}" -e '.[test]' ${JAX:+"jax==$JAX"}
        "${pip[@]}" --no-deps "$(grep -oE 'google-jetstream==[0-9.]+' setup.py)"
    fi
    echo "$wanted" >"$folder/installed"
fi
shift
export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR="$PWD/$folder/jax_cache" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
"$python" -c 'import jax, sys; print("Python", sys.version.split()[0], "jax", jax.__version__)'
case "$*" in
    --smoke)
        run="$(mktemp -d)"
        trap 'rm -rf "$run"' EXIT
        export XLA_FLAGS="${XLA_FLAGS:-} --xla_backend_optimization_level=0"
        "$python" -m dapo_jax train arithmetic --config.total_steps=2 --config.data.heldout_problems=8 \
            --config.run_dir="$run/run"
        "$python" -m dapo_jax export "$run/run" --out="$run/model"
        set -- tests/rollout/test_jetstream.py tests/run/test_checkpoints.py
        ;;
    "") set -- -n 3 --dist loadfile --no-loadscope-reorder ;;
esac
"$python" -m pytest -p no:cacheprovider "$@"
