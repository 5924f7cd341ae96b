#!/usr/bin/env bash
# The main job on this machine: installs, makes the base policy, and trains it by DAPO.
#
#   bash launch/local.sh [--cpu | --gpu] [trainer arguments]
#   bash launch/local.sh --config.seed=1 --config.run_dir=runs/seed_1
#
# Trainer arguments are those of `python -m dapo_jax.main`; --config defaults to the embedded task.
set -euo pipefail

extras=""
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 && extras=cuda
config=--config=configs/arithmetic.py
arguments=()
for argument in "$@"; do
    case "$argument" in
        -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --gpu) extras=cuda ;;
        --cpu) extras=""; export JAX_PLATFORMS=cpu ;;
        --config=*) config="$argument" ;;
        *) arguments+=("$argument") ;;
    esac
done
cd "$(dirname "$0")/.."
source launch/environment.sh "$extras"

# Settings are checked before minutes go into a base policy; the answer is the folder they name.
folder="$(.venv/bin/python -m dapo_jax.cli "$config" "${arguments[@]+"${arguments[@]}"}")"

# The embedded task's base policy is made once per recipe.
base=runs/arithmetic_base
# A folder's mark says which files were written when, so that the recipe is that of this very folder.
recipe() { cat configs/arithmetic_base.py dapo_jax/data/arithmetic.py "$base/.dapo_jax.json" 2>/dev/null | cksum; }
if [ "$folder" = "$base" ] && [ "$(cat "$base.recipe" 2>/dev/null)" != "$(recipe)" ]; then
    .venv/bin/python -m dapo_jax.sft --config=configs/arithmetic_base.py
    recipe >"$base.recipe"
fi
exec .venv/bin/python -m dapo_jax.main "$config" "${arguments[@]+"${arguments[@]}"}"
