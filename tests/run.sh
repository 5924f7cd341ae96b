#!/usr/bin/env bash
# All tests of this machine, in the environment that launch/local.sh uses.
#
#   bash tests/run.sh                        style, types, and every test that CI runs
#   bash tests/run.sh --quick                style, types, and what takes under a second: before a commit
#   bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/install.sh test
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/dapo_jax_tests}"
source launch/env.sh cpu
export JAX_PLATFORMS=cpu
# Tests of the sandbox are skipped without bubblewrap.
if ! command -v bwrap >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { timeout 120 apt-get update && timeout 120 apt-get install --yes bubblewrap; } >/dev/null 2>&1 </dev/null || true
fi
# Many tests compile the same small programs, some in processes of their own: each is compiled once, and kept for
# later runs, also of other checkouts.
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
find "$JAX_COMPILATION_CACHE_DIR" -type f -mtime +7 -delete 2>/dev/null || true
.venv/bin/ruff check .
.venv/bin/ruff check --quiet --select F821 tests  # which strings of shapes forbid in the library
.venv/bin/ruff format --check .
# Types are checked beside the tests, in the moments in which those wait for a process or a socket.
types="$(mktemp)"
nice -n 10 .venv/bin/basedpyright --pythonpath .venv/bin/python >"$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$types"' EXIT
# Three files at a time on two cores, the longest first: tests also wait, for processes and sockets. The
# fixtures of a file are made once.
[[ $* = "" || $* = --quick || $* = --write-durations ]] && set -- -n 3 --dist loadfile --no-loadscope-reorder "$@"
status=0
.venv/bin/python -m pytest "$@" || status=$?
wait "$checker" || status=1
cat "$types"
command -v bwrap >/dev/null || echo "the sandbox was not tested: install bubblewrap (apt-get install bubblewrap)"
exit "$status"
