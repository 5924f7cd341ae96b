# shellcheck shell=bash
# Sourced by tpu_vm.sh, tpu_gke.sh and gpu.sh: speaking, quoting, locks, tries, and what may be said to a run.

# Seconds between two looks at a machine; also the unit in which waits between tries grow.
poll="${DAPO_LAUNCH_POLL_SECONDS:-20}"

say() { printf 'launch: %s\n' "$*" >&2; }

die() { # CODE TEXT: 2 is a wrong setting, 1 anything else
    printf 'error: %s\n' "${*:2}" >&2
    exit "$1"
}

# The comment at the head of a script.
help() { awk 'NR > 1 {if (!/^#/) exit; sub(/^# ?/, ""); print}' "$1"; }

# The words as one line that any POSIX shell reads back as the same words.
quote() {
    local word line=""
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
            line+="$word "
        else
            line+="'${word//\'/\'\\\'\'}' "
        fi
    done
    printf '%s' "${line% }"
}

show() { printf '%s\n' "$(quote "$@")"; }

# Does it, or, with --dry-run, only prints it.
call() {
    if [ -n "$dry" ]; then show "$@"; else "$@"; fi
}

nap() { [ -n "$dry" ] || sleep "$poll" || true; }

# Before try N + 1: twice as long each time, 16 times the unit at most.
back_off() { # N
    local times=$((1 << ($1 < 5 ? $1 - 1 : 4)))
    [ -n "$dry" ] || sleep "$(awk "BEGIN {print $poll * $times}")" || true
}

confirm() { # QUESTION; false without a terminal
    local answer=""
    [ -t 0 ] || return 1
    read -r -p "$1 [y/N] " answer || true
    [[ $answer == [yY]* ]]
}

check_name() {
    [[ ${name:-} =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
        die 2 "--name = '${name:-}': must be up to 40 of a-z, 0-9 and -, and begin with a letter"
}

check_number() { # FLAG VALUE
    [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || die 2 "$1 = '$2': must be a whole number from 1 to 99999"
}

# The trainer's arguments, and whether they are for the machine, before it costs money. Exits if they are wrong.
check_trainer() { # GENERATION CHIPS ARGUMENT...
    local python
    for python in .venv/bin/python "${DAPO_LAUNCH_PYTHON:-python3}"; do
        if "$python" -c 'import importlib.util as u; assert u.find_spec("dapo_jax") and u.find_spec("jax")' 2>/dev/null; then
            JAX_PLATFORMS=cpu "$python" -m dapo_jax train "${@:3}" "--check=$1:$2" >/dev/null || exit 2
            return 0
        fi
    done
    say "warning: the trainer's settings are not checked: dapo_jax is not installed on this machine"
}

# A value that everybody may see. What looks like a secret has another way in.
check_env() { # NAME=VALUE
    [[ $1 =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || die 2 "--env = '$1': must be NAME=VALUE"
    [[ ! ${1%%=*} =~ (TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL) ]] ||
        die 2 "--env = '${1%%=*}=...': a secret must not stand on a command line; use --secret-env"
}

# The last run_dir that the trainer's arguments name; empty: the config file's.
run_dir() {
    local argument found="" next=""
    for argument in "$@"; do
        [ -z "$next" ] || found="$argument"
        next=""
        case "$argument" in
            --config.run_dir=* | -config.run_dir=*) found="${argument#*=}" ;;
            --config.run_dir | -config.run_dir) next=yes ;;
        esac
    done
    printf '%s' "$found"
}

# One job at a time per name, on this machine. The lock goes when this process does.
lock() { # WHAT
    local folder="${XDG_STATE_HOME:-$HOME/.local/state}/dapo_jax"
    [ -z "$dry" ] || return 0
    command -v flock >/dev/null || die 1 "flock is needed (util-linux)"
    mkdir -p "$folder"
    exec 7>>"$folder/$1.lock"
    flock -n 7 || die 1 "another launch of $1 is going on (process $(cat "$folder/$1.lock.pid" 2>/dev/null)); only one at a time"
    echo $$ >"$folder/$1.lock.pid"
}

# Ends this script with the trainer's exit code, said in words.
explain() { # CODE
    case "$1" in
        0) say "done" ;;
        130 | 143) say "stopped before its end (exit code $1): the same command resumes it" ;;
        2) say "a setting is wrong (exit code 2, see the line above): not tried again" ;;
        3) say "no learning signal was left (exit code 3): not tried again" ;;
        4) say "numbers are not finite (exit code 4, see the line above): not tried again" ;;
        74) say "what the run ended with could not be saved (exit code 74): is the disk full?" ;;
        *) say "ended with exit code $1" ;;
    esac
}
