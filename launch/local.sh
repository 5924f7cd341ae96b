#!/usr/bin/env bash
# The main job on this machine: installs, and trains the embedded task's base policy by DAPO.
#
#   bash launch/local.sh [--cpu | --gpu | --tpu[=GENERATION]] [trainer arguments]
#   bash launch/local.sh --config.seed=1 --config.run_dir=runs/seed_1
#   bash launch/local.sh --processes=2 --devices=4 --config.total_steps=2
#
# Trainer arguments are those of `dapo-jax train`; --config defaults to the embedded task. Without --cpu, --gpu
# or --tpu the script takes --gpu if nvidia-smi finds one, else --cpu. --tpu is for the TPUs of one host;
# --tpu=v6e also sets the flags of that generation (launch/env.sh). For pods see launch/tpu_vm.sh.
# --devices=N gives each process N virtual CPU devices; --processes=N starts N processes, as on a pod.
# --samplers=N starts N processes that sample beside the trainer (docs/samplers.md); needs --config.run_dir.
# If one process fails, the others are ended too; nothing is started again.
set -euo pipefail

kind=cpu
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 && kind=gpu
config=--config=configs/arithmetic.py
arguments=()
processes=1
samplers=0
run_dir=""
devices=""
for argument in "$@"; do
    case "$argument" in
        -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --gpu) kind=gpu ;;
        --cpu) kind=cpu; export JAX_PLATFORMS=cpu ;;
        --tpu) kind=tpu ;;
        --tpu=v[2-6]* | --tpu=tpu7x) kind="tpu-${argument#*=}" ;;
        --tpu=*) echo "error: $argument: must be a generation, as --tpu=v6e or --tpu=tpu7x" >&2; exit 2 ;;
        --processes=*) processes="${argument#*=}" ;;
        --samplers=*) samplers="${argument#*=}" ;;
        --config.run_dir=*) run_dir="${argument#*=}" && arguments+=("$argument") ;;
        --devices=*) devices="${argument#*=}" ;;
        --config=*) config="$argument" ;;
        *) arguments+=("$argument") ;;
    esac
done
for count in "$processes" "${devices:-1}"; do
    case "$count" in
        "" | *[!0-9]* | 0*) echo "error: --processes and --devices must be whole numbers above 0" >&2; exit 2 ;;
    esac
done
case "$samplers" in
    "" | *[!0-9]*) echo "error: --samplers must be a whole number" >&2; exit 2 ;;
esac
if [ "$samplers" -gt 0 ] && [ -z "$run_dir" ]; then
    echo "error: --samplers needs --config.run_dir=FOLDER" >&2
    exit 2
fi
if [ "$processes" -gt 1 ] || [ -n "$devices" ]; then
    case "$kind" in
        tpu*) echo "error: --processes and --devices are of virtual CPU devices, not of a TPU" >&2; exit 2 ;;
    esac
    kind=cpu
    export JAX_PLATFORMS=cpu XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=${devices:-1}"
fi
cd "$(dirname "$0")/.."
extras="${kind%%-*}"
case "$extras" in
    cpu) extras="" ;;
    gpu) extras=cuda ;;
esac
source launch/install.sh "$extras"
source launch/env.sh "$kind"

train=(.venv/bin/python -m dapo_jax train "$config" "${arguments[@]+"${arguments[@]}"}")
[ "$((processes + samplers))" -gt 1 ] || exec "${train[@]}"

# Several: they meet at ports of this machine that are free now.
free='import socket; s = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]; print(*(x.getsockname()[1] for x in s))'
read -r port joined <<<"$(.venv/bin/python -c "$free")"
[ "$samplers" -eq 0 ] || train+=(--config.sampler.engine=samplers "--config.extras.samplers.port=$port")
export DAPO_COORDINATOR="127.0.0.1:$joined" DAPO_PROCESSES="$processes"
set -m # a process group each, so that Ctrl-C comes once, from here
children=()
for ((i = 0; i < processes; i++)); do
    DAPO_PROCESS_ID=$i "${train[@]}" &
    children+=($!)
done
for ((i = 0; i < samplers; i++)); do
    .venv/bin/python -m dapo_jax sampler "--run=$run_dir" "--trainer=http://127.0.0.1:$port" &
    children+=($!)
done
# shellcheck disable=SC2329 # called by the traps
tell() { kill "-$1" "${children[@]}" 2>/dev/null || true; }
trap 'tell TERM' TERM
trap 'tell INT' INT
trap 'tell KILL' EXIT

code=0
deadline=""
while [ ${#children[@]} -gt 0 ]; do
    left=()
    for child in "${children[@]}"; do
        if kill -0 "$child" 2>/dev/null; then
            left+=("$child")
            continue
        fi
        status=0
        wait "$child" || status=$?
        if [ "$status" -ne 0 ] && [ "$code" -eq 0 ]; then
            code=$status
            deadline=$((SECONDS + 30)) # time for the rest to find out by themselves, and say why
        fi
    done
    children=("${left[@]+"${left[@]}"}")
    [ -z "$deadline" ] || [ "$SECONDS" -lt "$deadline" ] || break
    sleep 0.5 || true
done
exit "$code"
