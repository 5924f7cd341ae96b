# Sourced by launch/local.sh and tests/run.sh: makes .venv once per set of extras, then starts at once.
# Usage: source launch/environment.sh EXTRAS      (comma-separated, may be empty)

extras="$1"
for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
if [ -z "${python:-}" ]; then
    echo "error: no Python 3.11 to 3.13 with venv was found; set PYTHON=/path/to/python" >&2
    exit 1
fi

# One mark per set of extras, holding what setup.py was: reinstall when it changes.
mark=".venv/installed-${extras:-base}"
wanted="$(cksum <setup.py)"
fit='import sys, pip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
if [ "$(cat "$mark" 2>/dev/null)" != "$wanted" ]; then
    echo "installing dapo_jax${extras:+[$extras]} into .venv (once) ..."
    # A half-made environment, or one of another Python, is made anew.
    .venv/bin/python -c "$fit" 2>/dev/null || "$python" -m venv --clear .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}"
    echo "$wanted" >"$mark"
fi

# Compiled programs are kept between runs.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.venv/jax_cache}"
