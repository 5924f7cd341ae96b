#!/usr/bin/env bash
# Writes launch/versions.txt anew: today's versions of every package that launch/ and tests/ install, with the hashes of
# all their files, for Linux and macOS and every Python that setup.py allows. Run it weekly, then the tests, then commit
# what changed. The registry is that of pip's own settings.
#
#   bash launch/lock.sh
#   bash launch/lock.sh --keep     the same versions as now, of what setup.py asks for now
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/pins.sh
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r <(pins uv)
index="${PIP_INDEX_URL:-$("$folder/bin/python" -m pip config get global.index-url 2>/dev/null || true)}"
[ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
keep=()
case "${1:-}" in
    --keep)
        sed -nE 's/^([a-zA-Z][^\\]*[^ \\]) *\\?$/\1/p' launch/versions.txt >"$folder/keep" # with its markers
        keep=(--constraint "$folder/keep")
        ;;
esac

# 3.11.5 is the oldest that a package of the tests allows. `tinker` asks for transformers, which the tests don't need.
compile() { # FILE ARGUMENTS: what the arguments ask for, into that file
    local file="$1"
    shift
    "$folder/bin/uv" pip compile --quiet --universal --python-version 3.11.5 --system-certs --no-header --no-annotate \
        --no-progress --no-emit-package transformers --output-file "$folder/$file" "$@" >/dev/null
}

echo setuptools >"$folder/build.in" # which launch/install.sh installs this folder with
echo uv >"$folder/uv.in"
echo cyclonedx-bom >"$folder/sbom.in"
grep -oE 'google-jetstream==[0-9.]+' setup.py >"$folder/jetstream.in" # alone: see there
extras=(cuda tpu gcs wandb gguf gym tensorboard docs notebooks test)
compile all --generate-hashes "${extras[@]/#/--extra=}" "${keep[@]}" setup.py "$folder/build.in"
compile uv --generate-hashes "${keep[@]}" "$folder/uv.in"
compile sbom --generate-hashes "${keep[@]}" "$folder/sbom.in"
compile jetstream --generate-hashes --no-deps "$folder/jetstream.in"
compile base --constraint "$folder/all" setup.py "$folder/build.in"
for extra in "${extras[@]}"; do
    compile "$extra" --constraint "$folder/all" --extra "$extra" setup.py
done
"$folder/bin/python" - "$folder" "${extras[@]}" >"$folder/versions.txt" <<'END'
import pathlib, re, sys

folder, extras = pathlib.Path(sys.argv[1]), sys.argv[2:]
entries = lambda name: re.split(r"\n(?=\S)", (folder / name).read_text().strip())
names = lambda name: {entry.split("==")[0] for entry in entries(name)}
base, sections = names("base"), {}
for entry in entries("all"):
    name = entry.split("==")[0]
    wanting = ["base"] if name in base else [extra for extra in extras if name in names(extra)]
    sections.setdefault(" ".join(wanting), []).append(entry)
sections |= {name: entries(name) for name in ("uv", "sbom", "jetstream")}
print("# Made by launch/lock.sh; setup.py has the oldest versions that were tried.")
for wanting, own in sorted(sections.items(), key=lambda item: (item[0] != "base", item[0])):
    print(f"# for {wanting}", *own, sep="\n")
END
mv "$folder/versions.txt" launch/versions.txt
