#!/usr/bin/env bash
# The main job on this machine: installs, makes the base policy, and trains it by DAPO.
#
#   bash launch/local.sh [--cpu | --gpu] [trainer arguments]
#   bash launch/local.sh --config.seed=1 --config.run_dir=runs/seed_1
#
# Trainer arguments are those of `python -m dapo_jax.main`; --config defaults to the embedded task.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --gpu) extras=cuda; shift ;;
    --cpu) extras=""; export JAX_PLATFORMS=cpu; shift ;;
    *) extras=""; command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 && extras=cuda ;;
esac
source launch/environment.sh "$extras"

case " $* " in *" --config="*) ;; *) set -- --config=configs/arithmetic.py "$@" ;; esac
if [ ! -f runs/arithmetic_base/model.safetensors ]; then
    .venv/bin/python -m dapo_jax.sft --config=configs/arithmetic_base.py
fi
exec .venv/bin/python -m dapo_jax.main "$@"
