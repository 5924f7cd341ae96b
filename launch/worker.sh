#!/usr/bin/env bash
# Commands for one worker of a TPU VM. launch/tpu_vm.sh sends this file there and calls it by ssh. Every command
# may be repeated, since gcloud repeats one whose connection broke. The last line is "@done CODE".
#
#   install TREE                     unpacks ~/dapo_jax.tgz, whose content is called TREE, and installs it
#   start ID [--env=NAME=VALUE] [--secret-env=NAME=RESOURCE] [--flags=KIND] [--model=M] [--data=D] -- ARGUMENTS
#   follow BYTES MARK                the log from there on, until the run ends
#   status                           "@state none", "@state running ID" or "@state exited ID CODE WHY"
#   stop SECONDS                     SIGTERM, so that the run saves; after so many seconds SIGKILL
set -uo pipefail
self="$(readlink -f "$0")"
base="$HOME/dapo_jax_run" # tree/ the code, runs/ results, ID.* one start each
mkdir -p "$base/runs"
cd "$base" || exit 1

is_running() { ! flock -n -s "$base/lock" true; } # the run holds the lock as long as it lives

# What no commit brought goes from tree.old to tree, then tree.old goes: .venv, models/, data/, and what somebody
# put there. One that was interrupted goes on.
keep_others() {
    local entry name
    [ -d tree.old ] || return 0
    for entry in tree.old/* tree.old/.[!.]*; do
        name="${entry#tree.old/}"
        if { [ -e "$entry" ] || [ -L "$entry" ]; } && [ ! -e "tree/$name" ] && ! grep -qsxF -e "$name" tree.old/.names; then
            mv "$entry" tree/ || return 1
        fi
    done
    rm -rf tree.old
}

install() { # TREE
    exec 8>install.lock
    flock 8
    if [ "$(cat tree.id 2>/dev/null)" != "$1" ]; then
        is_running && echo "a run is going on here; it keeps its code" && return 5
        rm -rf tree.new tree.id
        mkdir tree.new && tar -xzf "$HOME/dapo_jax.tgz" -C tree.new || return 1
        tar -tzf "$HOME/dapo_jax.tgz" | cut -d / -f 1 | sort -u >tree.new/.names || return 1
        if [ -d tree ]; then
            keep_others && mv tree tree.old || return 1
        fi
        mv tree.new tree && keep_others && ln -sfn ../runs tree/runs && echo "$1" >tree.id || return 1
    fi
    # Ubuntu 22.04, which TPU images are made of, has Python 3.10: uv brings a newer one.
    PATH="$HOME/.local/bin:$PATH"
    if ! python3 -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        (cd tree && source launch/pins.sh && python3 -m pip install --quiet --user --require-hashes -r <(pins uv)) &&
            uv python install --quiet 3.12 || return 1
    fi
    (cd tree && set -eu && source launch/install.sh tpu)
}

start() { # ID ...
    local id="$1"
    if [ ! -e "$id.started" ]; then
        if is_running; then
            echo "another run is going on here: $(cat current 2>/dev/null)"
            return 5
        fi
        setsid nohup bash "$self" supervise "$@" </dev/null >/dev/null 2>>"$id.log" &
        for _ in $(seq 100); do
            [ ! -e "$id.started" ] || break
            sleep 0.1
        done
    fi
    [ -e "$id.started" ] && echo "started $id"
}

end() { # ID CODE WHY
    echo "$2 $3" >"$1.exit.new" && mv "$1.exit.new" "$1.exit"
}

# The one process that outlives the connection.
supervise() { # ID ...
    local id="$1" why=self flags=tpu child code again name value
    local train=(.venv/bin/python -m dapo_jax train) fetched=()
    shift
    exec 9>lock
    flock -w 5 9 || exit 5
    echo "$id" >current
    echo $$ >"$id.session" # which setsid made this the leader of
    touch "$id.started"
    exec >>"$id.log" 2>&1
    while [ $# -gt 0 ]; do
        case "$1" in
            --env=*) value="${1#--env=}" && export "${value%%=*}=${value#*=}" ;;
            --secret-env=*) # read here, by this machine's service account: it is never in a file or an argument
                name="${1#--secret-env=}"
                if ! value="$(gcloud secrets versions access "${name#*=}")"; then
                    echo "error: ${name%%=*}: this machine's service account can't read ${name#*=}"
                    end "$id" 2 self
                    exit 2
                fi
                export "${name%%=*}=$value"
                ;;
            --model=* | --data=*) fetched+=("$1") ;;
            --flags=*) flags="${1#--flags=}" ;;
            --) shift && break ;;
        esac
        shift
    done
    cd tree || exit 1
    source launch/env.sh "$flags"
    [ ! -e "$base/$id.stop" ] || { cd "$base" && end "$id" 143 stopped && exit 143; }
    trap 'why=signal' TERM INT # of a machine that shuts down; the trainer gets its own, and saves
    if [ ${#fetched[@]} -gt 0 ]; then # one process, which becomes the trainer
        [ ! -e "$HOME/dapo_jax_token" ] || export HF_TOKEN_PATH="$HOME/dapo_jax_token"
        train=(.venv/bin/python launch/download.py "${fetched[@]}" -- "${train[@]}")
    fi
    "${train[@]}" "$@" &
    child=$!
    echo "$child" >"$base/$id.pid"
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ends `wait`, not the trainer
        wait "$child"
        code=$?
    done
    cd "$base" || exit 1
    # `wait` that a signal ended while the trainer ended too: ask once more, 127 says that it was right.
    if [ "$why" = signal ] && [ "$code" -gt 128 ]; then
        wait "$child"
        again=$?
        [ "$again" -eq 127 ] || code=$again
    fi
    [ ! -e "$id.stop" ] || why=stopped
    end "$id" "$code" "$why"
}

follow() { # BYTES MARK: the mark tells a connection that begins again from what the log says
    local id
    id="$(cat current)"
    printf '%s %s\n' "$2" "$1"
    until [ -e "$id.exit" ] || ! is_running; do
        [ ! -s "$id.log" ] || break
        sleep 0.2
    done
    # tail goes with the shell around it, which waits for the end of the run.
    (
        until [ -e "$id.exit" ] || ! is_running; do sleep 0.3; done
    ) &
    tail -c "+$(($1 + 1))" -s 0.2 --pid=$! -f "$id.log"
}

status() {
    local id
    id="$(cat current 2>/dev/null)"
    if [ -z "$id" ]; then
        echo "@state none"
    elif [ -e "$id.exit" ]; then
        [[ $(cat "$id.exit") == 0* ]] || tail -n 15 "$id.log"
        echo "@state exited $id $(cat "$id.exit")"
    elif is_running; then
        echo "@state running $id"
    else # the supervisor itself was killed
        echo "@state exited $id 137 lost"
    fi
}

stop() { # SECONDS
    local id late=0 deadline=$((SECONDS + $1))
    id="$(cat current 2>/dev/null)"
    if is_running; then
        # Once only: the trainer saves at the first SIGTERM and dies of the second.
        if [ ! -e "$id.stop" ]; then
            touch "$id.stop"
            kill -TERM "$(cat "$id.pid")" 2>/dev/null
        fi
        while is_running && [ "$SECONDS" -lt "$deadline" ]; do sleep 0.2; done
        if is_running; then
            echo "did not save within $1 s: killed"
            late=1
            [[ $(cat "$id.session") =~ ^[0-9]+$ ]] && pkill -KILL -s "${BASH_REMATCH[0]}"
            end "$id" 137 stopped
        fi
    fi
    return "$late"
}

case "${1:-}" in
    follow | supervise) "$@" ;;
    install | start | status | stop)
        "$@"
        code=$?
        echo "@done $code"
        exit "$code"
        ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
