#!/usr/bin/env bash
# One run on this machine's NVIDIA GPUs: checks them, installs, trains, and restarts the run when it dies.
#
#   bash launch/gpu.sh --name=N [--tries=3] [--dry-run] -- --config=F --config.run_dir=runs/N
#   CUDA_VISIBLE_DEVICES=0,1 bash launch/gpu.sh ...
#
# Needs a driver for CUDA 12 (525 or newer); the wheels include the rest of CUDA. Ctrl-C and SIGTERM let the run
# save. Exit codes are the trainer's; after wrong settings (2), no signal left (3) and Ctrl-C (130) there is no
# further try.
# One run at a time per name.
set -uo pipefail # no -e: what fails is looked at where it fails
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source launch/lib.sh

name=gpu tries=3 dry=""
arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) help launch/gpu.sh && exit 0 ;;
        --name=*) name="${1#*=}" ;;
        --tries=*) check_number --tries "${1#*=}" && tries="${1#*=}" ;;
        --dry-run) dry=yes ;;
        --) shift && arguments+=("$@") && break ;;
        --config*) arguments+=("$1") ;;
        *) die 2 "$1: there is no such flag; the trainer's arguments come after --" ;;
    esac
    shift
done
check_name
[ ${#arguments[@]} -gt 0 ] || die 2 "the trainer's arguments are missing: -- --config=configs/..."

if [ -n "$dry" ]; then
    show nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
else
    gpus="$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>&1)" ||
        die 1 "no NVIDIA GPU is at hand: ${gpus:-nvidia-smi was not found}"
    say "$(wc -l <<<"$gpus") GPU(s):"$'\n'"$gpus"
    driver="${gpus##*, }"
    [ "${driver%%.*}" -ge 525 ] 2>/dev/null || die 1 "driver $driver: CUDA 12 needs 525 or newer"
fi
lock "gpu-$name"
if [ -n "$dry" ]; then
    show source launch/install.sh cuda
else
    (set -eu && source launch/install.sh cuda) || die 1 "installing failed"
fi
source launch/env.sh gpu
train=(.venv/bin/python -m dapo_jax train "${arguments[@]}")
if [ -n "$dry" ]; then
    show env JAX_COMPILATION_CACHE_DIR="$JAX_COMPILATION_CACHE_DIR" XLA_FLAGS="$XLA_FLAGS" \
        XLA_PYTHON_CLIENT_MEM_FRACTION="$XLA_PYTHON_CLIENT_MEM_FRACTION" "${train[@]}"
    exit 0
fi

# A signal comes once, from here: the trainer saves at the first and dies of the second.
set -m # a process group of its own
asked="" child=""
trap 'asked=yes; kill -INT "$child" 2>/dev/null' INT
trap 'asked=yes; kill -TERM "$child" 2>/dev/null' TERM
for ((try = 1; ; try++)); do
    "${train[@]}" &
    child=$!
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ends `wait`, not the trainer
        wait "$child"
        code=$?
    done
    if [ -n "$asked" ] && [ "$code" -gt 128 ]; then # of `wait`, where both ended together
        wait "$child"
        again=$?
        [ "$again" -eq 127 ] || code=$again
    fi
    case "$code" in 0 | 2 | 3 | 4 | 130) break ;; esac
    [ -z "$asked" ] || break
    say "try $try of $tries: ended with exit code $code"
    if [ "$try" -ge "$tries" ]; then
        say "no tries are left"
        break
    fi
    back_off "$try"
done
explain "$code"
exit "$code"
