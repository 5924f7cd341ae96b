#!/usr/bin/env bash
# Writes launch/versions.txt anew: the versions of every package that launch/ and tests/ install, as an empty
# environment gets them today. Run it weekly, then the tests, then commit what changed.
#
#   bash launch/lock.sh
set -euo pipefail
cd "$(dirname "$0")/.."
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check ".[test]"
{
    echo "# Made by launch/lock.sh; setup.py has the oldest versions that were tried."
    "$folder/bin/python" -m pip freeze --exclude dapo_jax
} >"$folder/versions.txt"
mv "$folder/versions.txt" launch/versions.txt
