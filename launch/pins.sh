# shellcheck shell=bash
# Sourced: the part of launch/versions.txt that some extras need, each file with its hash.
# Usage: pip install --require-hashes -r <(pins base EXTRA ...)
#
# Names beside the extras of setup.py: base (always), uv, sbom (launch/sbom.sh). jetstream is that package alone.

pins() {
    awk -v wanted="$(echo "$*" | tr , ' ')" '
        BEGIN { split(wanted, names, " "); for (i in names) asked[names[i]] = 1 }
        /^# for / { keep = 0; for (i = 3; i <= NF; i++) if ($i in asked) keep = 1 }
        keep' launch/versions.txt
}
