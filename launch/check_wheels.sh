#!/usr/bin/env bash
# Resolves a plain installation for some versions of Python from wheels alone: it needs no compiler. Installs nothing.
#
#   bash launch/check_wheels.sh [VERSION ...]       3.11 to 3.14 by default; in the environment of launch/install.sh
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- 3.11 3.12 3.13 3.14
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
status=0
for version in "$@"; do
    if .venv/bin/python -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed \
        --only-binary=:all: --python-version "$version" --target "$folder/none" --report "$folder/report" \
        --no-build-isolation . 2>"$folder/errors"; then
        echo "Python $version: $(grep -c '"download_info"' "$folder/report") packages, all as wheels"
    else
        grep -v '^WARNING' "$folder/errors" >&2 || true
        echo "error: Python $version: no plain installation from wheels alone" >&2
        status=1
    fi
done
exit "$status"
