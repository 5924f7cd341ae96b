# shellcheck shell=bash
# Sourced: makes .venv once per set of extras, then starts at once. Settings are in launch/env.sh.
# Usage: source launch/install.sh EXTRAS      (comma-separated, may be empty)

extras="$1"
source launch/pins.sh
for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 \
    "$(command -v uv >/dev/null && uv python find '>=3.11,<3.15' 2>/dev/null)"; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
if [ -z "${python:-}" ]; then
    echo "error: no Python 3.11 to 3.14 with venv was found; set PYTHON=/path/to/python" >&2
    exit 1
fi

# One mark per set of extras, holding what setup.py and the versions were: reinstall when they change.
mark=".venv/installed-${extras:-base}"
wanted="$(cat setup.py launch/versions.txt | cksum)"
fit='import sys, pip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'
if [ "$(cat "$mark" 2>/dev/null)" != "$wanted" ]; then
    echo "installing dapo_jax${extras:+[$extras]} into .venv: once, in one to three minutes ..."
    # A half-made environment, or one of another Python, is made anew.
    .venv/bin/python -c "$fit" 2>/dev/null || "$python" -m venv --clear .venv
    # All packages, with hashes, are in launch/versions.txt. This folder has none: it is installed by itself.
    # Python compiles what is imported; compiling all of every package takes a third of the installation.
    pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
    "${pip[@]}" --require-hashes --no-deps -r <(pins base jetstream "$extras") &&
        "${pip[@]}" --no-deps --no-build-isolation -e ".${extras:+[$extras]}" &&
        echo "$wanted" >"$mark"
fi
