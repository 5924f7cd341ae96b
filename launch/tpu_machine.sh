# shellcheck shell=bash
# Sourced by tpu_vm.sh: what is asked of gcloud, and what its answers mean. Reads name, where, tpu, queue, work,
# errors, dry and the flags; sets found, state, queue_state, workers, why.
# shellcheck disable=SC2034,SC2154 # variables of tpu_vm.sh

save_seconds="${DAPO_LAUNCH_SAVE_SECONDS:-300}" # for a run that was told to stop
found="" state="" queue_state="" workers=0 owner="" request="" request_owner="" why="" final=""
pretended=ABSENT # the machine of a dry run

# Errors that another try can't fix: who asks, what they may, and what they ask for.
never='UNAUTHENTICATED|invalid authentication|invalid_grant|auth login|active account|reauthentication'
never+='|PERMISSION_DENIED|have permission|permission denied on|SERVICE_DISABLED|has not been used in project'
never+='|billing|INVALID_ARGUMENT|invalid value|invalid choice|unrecognized arguments|could not be found'
add_key="an agent with gcloud's key is needed for several workers: eval \"\$(ssh-agent)\" && ssh-add ~/.ssh/google_compute_engine"

# The reason of the command that failed last, for people; sets $final where another try can't fix it.
told_by_gcloud() {
    local text limit
    text="$(grep -E 'ERROR|message|rror:' "$errors" 2>/dev/null | tail -n 1)"
    text="${text:-$(tail -n 1 "$errors" 2>/dev/null)}"
    ! grep -qiE "$never" "$errors" || final=yes
    if grep -qi 'in the ssh agent' "$errors"; then
        final=yes text="$add_key. $text"
    elif grep -qi 'permission denied (publickey' "$errors"; then # a new machine may not have the key yet
        text="$(grep -i 'permission denied (publickey' "$errors" | tail -n 1); $add_key"
    elif grep -qi quota "$errors"; then
        text="the quota does not allow it; ask for more, or take another --zone, --type or --spot. $text"
        limit="$(grep -oiE 'limit:? [0-9]+' "$errors" | grep -oE '[0-9]+' | tail -n 1)"
        [ "${limit:-$chips}" -ge "$chips" ] || final=yes
    elif grep -qiE 'no more capacity|not enough|stockout|resource_exhausted|unavailable' "$errors"; then
        text="no capacity now; --queued waits for it. $text"
    fi
    why+="${why:+: }$text"
}

# state, workers, owner and request of the machine; ABSENT, or UNREACHABLE where gcloud can't tell.
look() {
    local told
    owner=""
    local fields='state,networkEndpoints.len(),labels.dapo_jax,queuedResource'
    local ask=("${tpu[@]}" describe "$name" "${where[@]}" --format="csv[no-heading]($fields)")
    if [ -n "$dry" ]; then
        show "${ask[@]}"
        state=$pretended workers=1 owner="$name" request=""
    elif told="$("${ask[@]}" 2>"$errors")"; then
        IFS=, read -r state workers owner request <<<"$told"
        workers="${workers:-0}"
    else
        request="" workers=0 state=UNREACHABLE
        ! grep -qiE 'not.?found' "$errors" || state=ABSENT
    fi
}

look_queue() {
    local told
    local fields='state.state,tpu.nodeSpec[0].node.labels.dapo_jax'
    local ask=("${queue[@]}" describe "$name" "${where[@]}" --format="csv[no-heading]($fields)")
    if [ -n "$dry" ]; then
        show "${ask[@]}"
        [ "$pretended" = ABSENT ] && queue_state=ABSENT || queue_state=ACTIVE
    elif told="$("${ask[@]}" 2>"$errors")"; then
        IFS=, read -r queue_state request_owner <<<"$told"
    else
        queue_state=UNREACHABLE
        ! grep -qiE 'not.?found' "$errors" || queue_state=ABSENT
    fi
}

# found: absent, ready, waiting, stopped, broken or unreachable.
situation() {
    queue_state="" request_owner=""
    [ -z "$queued" ] || look_queue # before its machine, which is there once the request is ACTIVE
    look
    [ -n "$queued" ] || [[ $request != *queuedResources/* ]] || look_queue
    owner="${owner:-$request_owner}"
    case "$state" in
        READY) found=ready ;;
        ABSENT) found=absent ;;
        UNREACHABLE) found=unreachable ;;
        CREATING | STARTING | RESTARTING | REPAIRING | REIMAGING | UNHIDING | DELETING) found=waiting ;;
        STOPPED | STOPPING | HIDING | HIDDEN) found=stopped ;;
        *) found=broken ;; # PREEMPTED, TERMINATED, and what nobody has heard of
    esac
    case "$queue_state" in
        ACTIVE) [ "$found" != absent ] || found=broken ;;
        "" | ABSENT) ;;
        UNREACHABLE) found=unreachable ;;
        CREATING | ACCEPTED | PROVISIONING | WAITING_FOR_RESOURCES | DELETING | SUSPENDING) found=waiting ;;
        *) found=broken ;; # SUSPENDED after a preemption, FAILED
    esac
}

as_seen() { echo "$name is ${state}${queue_state:+, its request $queue_state}"; }

create() {
    local label="--labels=dapo_jax=$name"
    made=yes
    if [ -n "$flex_start" ]; then # for which the other commands have no flag
        call gcloud alpha "${queue[@]:1}" create "$name" --node-id="$name" --accelerator-type="$type" \
            --runtime-version="$version" --provisioning-model=flex-start --max-run-duration="$flex_start" \
            --valid-until-duration="${wait_hours}h" "$label" "${where[@]}" \
            ${create_flags[@]+"${create_flags[@]}"} 2>"$errors"
    elif [ -n "$queued" ]; then
        call "${queue[@]}" create "$name" --node-id="$name" --accelerator-type="$type" \
            --runtime-version="$version" ${spot:+"$spot"} "$label" "${where[@]}" \
            ${create_flags[@]+"${create_flags[@]}"} 2>"$errors"
    else
        call "${tpu[@]}" create "$name" --accelerator-type="$type" --version="$version" \
            ${spot:+"$spot"} "$label" "${where[@]}" ${create_flags[@]+"${create_flags[@]}"} 2>"$errors"
    fi
}

# Ends this script where gcloud would not reach several workers, before they are paid for.
check_key() {
    local key="$HOME/.ssh/google_compute_engine" known print
    [ -z "$dry" ] && [ "$workers_asked" -gt 1 ] || return 0
    if known="$(ssh-add -l 2>&1)"; then
        print="$(ssh-keygen -lf "$key" 2>/dev/null | cut -d ' ' -f 2)"
        [ -f "$key" ] || die 1 "$key is missing: ssh-keygen -t rsa -f $key && ssh-add $key"
        [[ -z $print || $known == *"$print"* ]] || die 1 "the ssh-agent lacks gcloud's key: ssh-add $key"
    elif [ -f "$key" ] && ! ssh-keygen -y -P '' -f "$key" >/dev/null 2>&1; then
        die 1 "$key has a passphrase, and ssh-add -l says: ${known:-nothing}; $add_key"
    fi
}

# A queued machine goes with its request. Some tries: what is being made can't be deleted at once.
remove() {
    local command i
    command=("${tpu[@]}" delete "$name" "${where[@]}")
    if { [ -n "$queue_state" ] || [ -n "$queued" ]; } && [ "$queue_state" != ABSENT ]; then
        command=("${queue[@]}" delete "$name" "${where[@]}" --force)
    fi
    for i in 1 2 3 4 5; do
        call "${command[@]}" 2>"$errors" && return 0
        ! grep -qiE 'not.?found' "$errors" || return 0
        ! grep -qiE "$never" "$errors" || break
        back_off "$i"
    done
    why="$name could not be deleted"
    told_by_gcloud
    say "warning: $why"
    return 1
}

# Waits, deletes what is broken and creates, until the machine is ready; otherwise $why.
ensure() {
    local created="" before="" deadline=$((SECONDS + wait_hours * 3600)) silent=0
    while :; do
        situation
        [ "$found" = "$before" ] || say "$name: ${state}${queue_state:+, request $queue_state}"
        before="$found"
        case "$found" in
            ready) return 0 ;;
            waiting)
                if [ "$SECONDS" -ge "$deadline" ]; then
                    why="not ready after $wait_hours hours"
                    return 1
                fi
                nap
                ;;
            unreachable)
                silent=$((silent + 1))
                why="gcloud can't tell what $name is"
                told_by_gcloud
                [ "$silent" -lt 5 ] && [ -z "$final" ] || return 1
                nap
                ;;
            stopped) die 1 "$name is $state: start it (gcloud compute tpus tpu-vm start) or delete it" ;;
            broken)
                if [ -n "$created" ]; then
                    why="$name became ${state}${queue_state:+, request $queue_state}"
                    return 1
                fi
                [ "$owner" = "$name" ] || die 1 "$name is $state and was not made by this script: delete it yourself"
                say "deleting what is left of $name"
                made=yes
                remove || return 1
                ;;
            absent)
                if [ -n "$created" ]; then
                    why="$name vanished while it was made"
                    return 1
                fi
                say "creating $name: $type, ${spot:+spot, }${flex_start:+flex-start for $flex_start, }${queued:+queued, }$version"
                if ! create; then
                    why="$name was not created"
                    told_by_gcloud
                    ! grep -q NOT_FOUND "$errors" || final=yes # of a zone, a type or a version
                    [ -z "$final" ] || die 1 "$why"
                    return 1
                fi
                created=yes
                [ -z "$dry" ] || pretended=READY
                ;;
        esac
    done
}

# A command on every worker, its replies in $work/out/N.log. False, with $why, where one did not end well.
everywhere() { # COMMAND, already quoted
    local i text failed="" silent="" what="$why"
    local full=("${tpu[@]}" ssh "$name" --worker=all "${where[@]}" "${ssh_flags[@]}"
        --output-directory="$work/out" --command="$1")
    if [ -n "$dry" ]; then
        show "${full[@]}"
        return 0
    fi
    rm -rf "$work/out"
    mkdir "$work/out"
    "${full[@]}" >/dev/null 2>"$errors"
    for ((i = 0; i < workers; i++)); do
        if [ "$(grep -s '^@done ' "$work/out/$i.log" | tail -n 1)" != "@done 0" ]; then
            failed+=" $i"
            text="$(grep -vs '^@' "$work/out/$i.log" | tail -n 5)"
            [ -n "$text" ] && say "worker $i: $text" || silent+=" $i"
        fi
    done
    [ -n "$failed" ] || return 0
    why="${what:-a command failed} on worker$failed of $workers"
    if [ -n "$silent" ]; then
        say "no answer of worker$silent; gcloud said:"
        tail -n 5 "$errors" >&2
        told_by_gcloud
    fi
    situation
    [ "$found" = ready ] || { why="$(as_seen)" final=""; }
    return 1
}

# Worker 0's log until the run ends. False where the machine is no longer ready.
stream_log() {
    local seen=0 before code lost=0
    while :; do
        before=$seen
        follow_once
        code=$?
        [ "$code" != 0 ] || return 0
        situation
        [ "$found" = ready ] || [ "$found" = unreachable ] || return 1
        [ "$seen" = "$before" ] && lost=$((lost + 1)) || lost=0
        if [ "$lost" -ge 20 ]; then
            say "no connection to $name; the run goes on there. Attach later: bash launch/tpu_vm.sh attach $me"
            made="" begun=""
            exit 1
        fi
        say "the connection was lost; the run goes on. Attaching again"
        nap
    done
}

# One connection. $seen counts bytes, so that what gcloud or we repeat is shown once.
follow_once() {
    local LC_ALL=C line part="" at=$seen mark code
    [ -n "$dry" ] && mark=MARK || mark="@follow-$RANDOM$RANDOM"
    local full=("${tpu[@]}" ssh "$name" --worker=0 "${where[@]}" "${ssh_flags[@]}"
        --command="bash dapo_jax_worker.sh follow $seen $mark")
    if [ -n "$dry" ]; then
        show "${full[@]}"
        return 0
    fi
    exec 3< <(exec "${full[@]}" 2>"$errors")
    stream=$!
    while :; do
        IFS= read -r -t "$poll" -u 3 line
        code=$?
        line="$part$line"
        part=""
        if [ "$code" -gt 128 ]; then # silence: is the machine still there?
            part="$line"
            situation
            [ "$found" = ready ] || [ "$found" = unreachable ] || { kill "$stream" 2>/dev/null && break; }
        elif [[ $line == "$mark "* ]]; then
            at="${line##* }"
        elif [ "$code" = 0 ]; then
            at=$((at + ${#line} + 1))
            [ "$at" -le "$seen" ] || { printf '%s\n' "$line" && seen=$at; }
        else
            break
        fi
    done
    exec 3<&-
    wait "$stream"
    code=$?
    stream=""
    [ "$code" != 0 ] || [ -z "$line" ] || printf '%s\n' "$line"
    return "$code"
}

# How the run ended, from every worker: 0, 2, 3, 4; 130 stopped by hand; 1 to be tried again, with $why.
verdict() {
    local i word code reason codes="" reasons=""
    if [ -n "$dry" ]; then
        everywhere "bash dapo_jax_worker.sh status"
        return 0
    fi
    for _ in 1 2 3 4 5 6; do # the others of a run are gone half a minute after the first
        everywhere "bash dapo_jax_worker.sh status" 2>"$errors" ||
            [ "$found" = ready ] || [ "$found" = unreachable ] || return 1
        [ "$(cat "$work"/out/*.log | grep -c '^@state exited')" -lt "$workers" ] || break
        nap
    done
    for ((i = 0; i < workers; i++)); do
        read -r _ word _ code reason <<<"$(grep -s '^@state' "$work/out/$i.log" | tail -n 1)"
        [ "$word" = exited ] || { code=lost reason=lost; }
        codes+=" $code" reasons+=" $reason"
        case "$i $code" in # worker 0's log was shown; 130 and 143: stopped by a signal
            "0 "* | *" 0" | *" 130" | *" 143") ;;
            *) say "worker $i ended with $code: $(grep -v '^@' "$work/out/$i.log" 2>/dev/null)" ;;
        esac
    done
    case "$codes " in *" 2 "*) return 2 ;; *" 3 "*) return 3 ;; *" 4 "*) return 4 ;; esac
    [ -n "${codes//[ 0]/}" ] || return 0
    case "$codes $reasons" in *" 130 "* | *stopped*) return 130 ;; esac # Ctrl-C there, or `stop`
    why="the run failed (exit codes$codes)"
    case "$codes " in *" 75 "*) why="a process died or stood still (exit codes$codes)" ;; esac
    case "$reasons" in *signal*) why="the machine was told to shut down; the run has saved" ;; esac
    return 1
}
