#!/usr/bin/env bash
# One run on a Cloud TPU VM or pod slice: creates or reuses it, watches, restarts, fetches results, deletes.
#
#   bash launch/tpu_vm.sh run --name=N --zone=Z --type=v6e-64 [flags] -- --config=F --config.run_dir=gs://...
#   bash launch/tpu_vm.sh attach | status | stop | fetch | delete   --name=N --zone=Z
#
#   --type=v6e-8        accelerator type (v4-8, v5litepod-16, v5p-128, ...); --version= its runtime, by generation
#   --spot, --queued    spot capacity; wait in the queue for capacity, --wait-hours=24 at most
#   --flex-start=4h     waits in the queue for a machine of that time (7d at most), then it is gone; --tries=1
#   --model=M, --data=D OWNER/NAME of the Hugging Face hub, downloaded by each worker into models/ and data/, or gs://...
#   --token-file=F      the hub's token, otherwise the variable HF_TOKEN; copied by scp, on no command line
#   --project=P         otherwise gcloud's own; --create-flag=F and --ssh-flag=F go to gcloud as they are
#   --tries=10          starts in all: after a preemption, a failure, a refused request
#   --ref=HEAD          the commit that is sent; changes that are not committed stay here
#   --env=NAME=VALUE    for the trainer; --secret-env=NAME=projects/P/secrets/S/versions/V is read on the workers
#   --detach            starts and leaves; --keep never deletes; --yes deletes without asking
#   --dry-run           prints every command and runs none
#   --no-check          leaves out `dapo-jax train --check`, which reads the trainer's arguments here first
#
# With run_dir on gs:// a new machine resumes where the last one was; otherwise worker 0's runs/ is copied to
# runs/N. Ctrl-C stops the run, which saves, and deletes the machine if this command made it. Exit codes are
# the trainer's (0 done, 2 wrong settings, 3 no signal left, 4 numbers not finite), 1 where tries ran
# out, 130 after Ctrl-C.
set -uo pipefail # no -e: what fails is looked at where it fails
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source launch/lib.sh
source launch/tpu_machine.sh

action="${1:-}"
case "$action" in
    run | attach | status | stop | fetch | delete) shift ;;
    -h | --help) help launch/tpu_vm.sh && exit 0 ;;
    *) help launch/tpu_vm.sh >&2 && exit 2 ;;
esac
name="" zone="" project="" type=v6e-8 version="" spot="" queued="" flex_start="" wait_hours=24 tries="" ref=HEAD
model="" data="" token_file=""
detach="" keep="" yes="" dry="" no_check=""
create_flags=() ssh_flags=(--ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oConnectTimeout=30)
run_flags=() arguments=()
while [ $# -gt 0 ]; do
    value="${1#*=}"
    case "$1" in
        --name=*) name="$value" ;;
        --zone=*) zone="$value" ;;
        --project=*) project="$value" ;;
        --type=*) type="$value" ;;
        --version=*) version="$value" ;;
        --spot) spot=--spot ;;
        --queued) queued=yes ;;
        --flex-start=*)
            [[ $value =~ ^[1-9][0-9]{0,5}[smhd]$ ]] && seconds=${value%?} || seconds=0
            case "$value" in *m) ((seconds *= 60)) ;; *h) ((seconds *= 3600)) ;; *d) ((seconds *= 86400)) ;; esac
            [[ $seconds -gt 0 && $seconds -le 604800 ]] ||
                die 2 "--flex-start = '$value': must be the machine's time, as 4h, 7d at most"
            queued=yes flex_start="$value"
            ;;
        --model=*) model="$value" ;;
        --data=*) data="$value" ;;
        --token-file=*) token_file="$value" ;;
        --wait-hours=*) check_number --wait-hours "$value" && wait_hours="$value" ;;
        --tries=*) check_number --tries "$value" && tries="$value" ;;
        --ref=*) ref="$value" ;;
        --create-flag=*) create_flags+=("$value") ;;
        --ssh-flag=*) ssh_flags+=("$value") ;;
        --env=*) check_env "$value" && run_flags+=("$1") ;;
        --secret-env=*)
            [[ $value =~ ^[A-Za-z_][A-Za-z0-9_]*=projects/[a-zA-Z0-9_:.-]+/secrets/[A-Za-z0-9_-]+/versions/[a-z0-9]+$ ]] ||
                die 2 "--secret-env: must be NAME=projects/P/secrets/S/versions/V, the name of a secret, not the secret"
            run_flags+=("$1")
            ;;
        --detach) detach=yes ;;
        --keep) keep=yes ;;
        --yes) yes=yes ;;
        --dry-run) dry=yes ;;
        --no-check) no_check=yes ;;
        --) shift && arguments+=("$@") && break ;;
        --config*) arguments+=("$1") ;;
        *) die 2 "$1: there is no such flag; the trainer's arguments come after --" ;;
    esac
    shift
done
check_name

# A model or data: of the hub for the workers to download, or of a bucket for the trainer to read.
bring() { # WHAT VALUE SETTING
    [ -n "$2" ] || return 0
    [[ " ${arguments[*]} " != *" $3"[=\ ]* ]] || die 2 "--$1 = '$2': must be without $3, which says the same"
    case "$2" in
        gs://?*) arguments+=("$3=$2") ;;
        *)
            [[ $2 =~ ^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
                die 2 "--$1 = '$2': must be OWNER/NAME of the Hugging Face hub, or gs://..."
            run_flags+=("--$1=$2")
            ;;
    esac
}
# The config's file has to be in the commit that is sent.
check_sent() {
    local word file
    for word in "${arguments[@]}"; do
        file="${word#--config=}" file="${file%%:*}"
        if [[ $word == --config=* && -f $file ]] && ! git cat-file -e "$ref:./$file" 2>/dev/null; then
            die 2 "--config = '$file': must be a file of --ref = $ref, which is sent: commit it"
        fi
    done
}
[[ $zone =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || die 2 "--zone = '$zone': must be a zone that has --type, as us-east5-b"
[[ $project =~ ^[a-z0-9:.-]*$ ]] || die 2 "--project = '$project': must be a project's ID"
case "$type" in
    v6e-*) default="v2-alpha-tpuv6e" ;;
    v5p-*) default="v2-alpha-tpuv5" ;;
    v5litepod-*) default="v2-alpha-tpuv5-lite" ;;
    v2-* | v3-* | v4-*) default="tpu-ubuntu2204-base" ;;
    *) die 2 "--type = '$type': must be v2 to v4, v5litepod, v5p or v6e, and a size; later ones are on GKE (launch/tpu_gke.sh)" ;;
esac
[[ $type =~ ^[a-z0-9]+-[1-9][0-9]{0,4}$ ]] || die 2 "--type = '$type': must be a generation and a size, as v6e-64"
size="${type#*-}"
case "$type" in
    v6e-* | v5litepod-*)
        [[ " 1 4 8 16 32 64 128 256 " == *" $size "* ]] || die 2 "--type = '$type': its size must be 1, 4, 8, 16, 32, 64, 128 or 256 chips"
        ;;
    *)
        [[ " 8 16 32 64 " == *" $size "* ]] || [ $((size % 128)) = 0 ] ||
            die 2 "--type = '$type': its size must be 8, 16, 32, 64 or a multiple of 128 cores, two a chip"
        ;;
esac
version="${version:-$default}" tries="${tries:-${flex_start:+1}}" tries="${tries:-10}"
chips="$size" workers_asked=$((size > 8 ? 2 : 1))
case "$type" in v2-* | v3-* | v4-* | v5p-*) chips=$((chips / 2)) ;; esac # these types count cores
folder="$(run_dir ${arguments[@]+"${arguments[@]}"})"
if [ "$action" = run ]; then
    tree="$(git rev-parse --verify --quiet "$ref^{tree}")" || die 2 "--ref = '$ref': must be a commit of this repository"
    [ ${#arguments[@]} -gt 0 ] || die 2 "the trainer's arguments are missing: -- --config=configs/..."
    [ -z "$spot" ] || [ -z "$flex_start" ] || die 2 "--spot: not with --flex-start, which is a capacity of its own"
    if [[ $folder != gs://?* ]]; then
        [ -z "$spot$flex_start" ] ||
            die 2 "--config.run_dir = '$folder': must be gs://... with --spot and --flex-start, whose machines take their disk along"
        [ "$size" -le 16 ] || die 2 "--config.run_dir = '$folder': must be gs://... on a slice of several hosts"
    fi
    bring model "$model" --config.model.folder
    bring data "$data" --config.data.folder
    generation="${type%%-*}"
    [ -n "$no_check" ] || check_trainer "${generation/v5litepod/v5e}" "$chips" "${arguments[@]}"
    check_sent
    [ -z "$token_file" ] || [ -r "$token_file" ] || die 2 "--token-file = '$token_file': must be a file that can be read"
    bucket="${folder#gs://}"
    if [[ $folder == gs://?* && " ${run_flags[*]}" != *" --env=JAX_COMPILATION_CACHE_DIR="* ]]; then
        run_flags+=("--env=JAX_COMPILATION_CACHE_DIR=gs://${bucket%%/*}/jax_cache") # a new machine compiles nothing again
    fi
fi
where=(--zone="$zone" ${project:+--project="$project"} --quiet)
tpu=(gcloud compute tpus tpu-vm)
queue=(gcloud compute tpus queued-resources)
me="--name=$name --zone=$zone${project:+ --project=$project}"
if [ -n "$dry" ]; then
    work="${TMPDIR:-/tmp}/dapo_jax" errors=/dev/null
else
    command -v gcloud >/dev/null || die 1 "gcloud is not installed"
    work="$(mktemp -d)" errors="$work/error"
    trap 'rm -rf "$work"' EXIT
fi
made="" begun="" ran="" stream=""

# Code and worker.sh to every worker, installed there once per content. Sets $why where it fails.
prepare() {
    local sent=("$work/dapo_jax.tgz" "$work/dapo_jax_worker.sh")
    if [ "$ref" = HEAD ] && [ -n "$(git status --porcelain)" ]; then
        say "warning: changes that are not committed are not sent"
    fi
    call git archive --format=tar.gz --output="$work/dapo_jax.tgz" "$ref" || die 1 "git archive failed"
    call cp launch/worker.sh "$work/dapo_jax_worker.sh"
    why="the code could not be copied"
    if [[ " ${run_flags[*]}" =~ \ --(model|data)= && -n $token_file${HF_TOKEN:-} ]]; then # not for a bucket's
        sent+=("$work/dapo_jax_token")
        if [ -z "$dry" ]; then
            (umask 077 && if [ -n "$token_file" ]; then cat "$token_file"; else printf '%s' "$HF_TOKEN"; fi >"${sent[-1]}") ||
                die 1 "the token could not be copied"
        fi
    fi
    call "${tpu[@]}" scp "${sent[@]}" "$name:" --worker=all "${where[@]}" \
        "${ssh_flags[@]/#--ssh-flag/--scp-flag}" 2>"$errors" || { told_by_gcloud && return 1; }
    why="installing failed"
    everywhere "$(quote bash dapo_jax_worker.sh install "$tree")"
}

# One start: 0 done, 2 to 4 final; 130 stopped by somebody; 1 worth another try, $why says what happened.
attempt() {
    local id
    ensure || return 1
    if [ "$workers" -gt 1 ] && [[ $folder != gs://?* ]] && [ -z "$dry" ]; then
        say "run_dir must be gs://... : $name has $workers workers"
        return 2
    fi
    why="asking for runs failed"
    everywhere "if [ -f dapo_jax_worker.sh ]; then bash dapo_jax_worker.sh status; else echo '@done 0'; fi" || return 1
    if grep -qs '^@state running' "$work"/out/*.log; then
        say "a run is going on there already: attach to it or stop it (bash launch/tpu_vm.sh attach $me)"
        made="" && exit 1
    fi
    prepare || return 1
    id="$(date +%Y%m%d-%H%M%S)-$$"
    [ -z "$dry" ] || id=ID
    begun=yes ran=yes
    why="starting failed"
    if ! everywhere "$(quote bash dapo_jax_worker.sh start "$id" --flags="tpu-${type%%-*}" \
        ${run_flags[@]+"${run_flags[@]}"} -- "${arguments[@]}")"; then
        [ "$found" != ready ] || stop_run
        return 1
    fi
    [ -n "$dry" ] || say "started on $workers workers; what follows is worker 0's log"
    [ -z "$detach" ] || return 0
    watch_run
}

# Until the run has ended everywhere; then as `attempt`.
watch_run() {
    local code
    if ! stream_log; then
        situation
        [ "$found" != absent ] || { say "$name was deleted by somebody: not made again" && made="" && exit 1; }
        why="$(as_seen)"
        return 1
    fi
    verdict
    code=$?
    if [ "$action" = run ] && grep -qs '^@state running' "$work"/out/*.log; then
        stop_run # what did not end with the others
    fi
    begun=""
    return "$code"
}

stop_run() {
    local before="$why"
    say "stopping the run on every worker; it saves, for $save_seconds s at most"
    why="saving failed"
    everywhere "$(quote bash dapo_jax_worker.sh stop "$save_seconds")" || say "warning: $why"
    begun="" why="$before"
}

fetch() {
    [[ $folder != gs://?* ]] || { say "results are in $folder" && return 0; }
    call mkdir -p "runs/$name"
    call "${tpu[@]}" scp --recurse "$name:dapo_jax_run/runs" "runs/$name" --worker=0 "${where[@]}" \
        "${ssh_flags[@]/#--ssh-flag/--scp-flag}" && say "worker 0's runs/ is in runs/$name"
}

# After the run: results come here, the machine goes if this command made it and may delete it.
finish() { # CODE
    explain "$1"
    [ -z "$ran" ] || [ "$found" != ready ] || fetch
    if [ -n "$dry" ]; then
        say "and, once you said yes, or after Ctrl-C, which stops the run first:"
        stop_run
        [ -n "$keep" ] || remove
    elif [ -n "$made" ] && [ -z "$keep" ] && { [ -n "$yes" ] || confirm "delete $name?"; }; then
        remove && say "$name is deleted"
    else
        say "$name is still there and costs money: bash launch/tpu_vm.sh delete $me"
    fi
    exit "$1"
}

interrupted() {
    trap 'say "left as it is"; exit 130' INT TERM
    [ -z "$stream" ] || kill "$stream" 2>/dev/null
    say "interrupted"
    situation
    if [ "$found" = ready ] && [ -n "$begun" ]; then
        stop_run
        fetch
    fi
    if [ -z "$made" ] || [ "$found" = absent ]; then
        say "nothing of this run is running"
    elif [ -n "$keep" ] || { [ -t 0 ] && [ -z "$yes" ] && ! confirm "delete $name?"; }; then
        say "$name is still there and costs money: bash launch/tpu_vm.sh delete $me"
    else # asked for by Ctrl-C where nobody can answer: nothing is left
        remove && say "$name is deleted"
    fi
    exit 130
}

run() {
    lock "tpu-$name"
    check_key
    trap interrupted INT TERM
    [ -z "$spot" ] || say "spot: the notice may be 30 s. A checkpoint that takes longer to write is lost"
    local try code
    for ((try = 1; ; try++)); do
        why="" final=""
        attempt
        code=$?
        case "$code" in
            0 | 2 | 3 | 4 | 130) break ;;
        esac
        say "try $try of $tries: $why"
        if [ -n "$final" ]; then
            [ -n "$made" ] || [ "$found" = ready ] || die 1 "another try can't fix that"
            say "another try can't fix that"
            finish 1
        elif [ "$try" -ge "$tries" ]; then
            say "no tries are left"
            finish 1
        fi
        back_off "$try"
        say "trying again${folder:+; the run goes on from $folder}"
    done
    if [ -n "$detach" ] && [ "$code" = 0 ]; then
        say "left running; nobody starts it again. From here on:"
        for action in attach status stop fetch delete; do
            say "  bash launch/tpu_vm.sh $action $me"
        done
        exit 0
    fi
    finish "$code"
}

if [ "$action" = run ]; then
    run
fi
situation
case "$action" in
    attach | status | stop | fetch)
        [ "$found" = ready ] || die 1 "$(as_seen)"
        ;;
esac
case "$action" in
    attach)
        watch_run
        code=$?
        [ "$code" != 1 ] || say "$why; start it again with the same command as before"
        explain "$code"
        exit "$code"
        ;;
    status)
        everywhere "bash dapo_jax_worker.sh status"
        for ((i = 0; i < workers; i++)); do
            echo "worker $i: $(grep -s '^@state' "$work/out/$i.log" | tail -n 1 | cut -c8-)"
        done
        ;;
    stop) stop_run ;;
    fetch) fetch ;;
    delete)
        [ "$found" != absent ] || die 1 "there is no $name in $zone"
        say "$(as_seen); what is on its disks is lost with it"
        [ -n "$yes" ] || [ -n "$dry" ] || confirm "delete $name?" || die 1 "not deleted (say y, or --yes where there is no terminal)"
        remove && say "$name is deleted"
        ;;
esac
