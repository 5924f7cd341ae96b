#!/usr/bin/env bash
# Writes a bill of materials (CycloneDX, JSON): the packages that .venv has, with versions, licences and what needs what.
#
#   bash launch/sbom.sh [FILE]       build/sbom.json by default
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/pins.sh
file="${1:-build/sbom.json}"
if [ ! -x .venv/bin/python ]; then
    echo "error: there is no .venv: bash tests/run.sh, or a script of launch/, makes it" >&2
    exit 2
fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
.venv/bin/python -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r <(pins sbom)
mkdir -p "$(dirname "$file")"
"$folder/bin/cyclonedx-py" environment --output-reproducible --output-format JSON --output-file "$file" .venv/bin/python
