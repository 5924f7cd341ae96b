#!/usr/bin/env bash
# One run on TPU slices of a GKE cluster, as a JobSet: creates it, watches it, deletes it; the cluster restarts it.
#
#   bash launch/tpu_gke.sh run --name=N --image=I --type=v5p --topology=4x4x4 --slices=2 [flags] -- --config=F ...
#   bash launch/tpu_gke.sh attach | status | delete   --name=N
#
#   --image=I             has this tree as its working directory, installed with the tpu extra, and bash
#   --type=v6e            v4, v5e, v5p, v6e or tpu7x; --chips-per-host=4 (8 on one-host v5e and v6e slices)
#   --slices=1            of --topology= each; over 1 the gradients cross the data centre's network
#   --tries=10            starts in all; the cluster starts all slices again after a failure or a preemption
#   --samplers=0          machines that sample for the trainer (docs/samplers.md), each one host of --sampler-type=v6e and
#                         --sampler-topology=2x4; --sampler-flag=--config.mesh.decode_tensor=8 is dapo-jax sampler's
#   --sampler-spot        only the samplers on spot nodes
#   --spot                on spot nodes; --service-account=S the Kubernetes account that may use gs://
#   --env=NAME=VALUE      for the trainer; --secret-env=NAME=SECRET/KEY a key of a Kubernetes Secret
#   --namespace=default   and --context= are kubectl's; --queue=Q a Kueue LocalQueue, which admits the JobSet
#   --emit-manifest       prints the manifest alone, for kubectl apply or a repository of manifests
#   --detach              creates and leaves; --yes deletes without asking; --dry-run prints manifest and commands
#   --no-check            leaves out `dapo-jax train --check`, which reads the trainer's arguments here first
#
# Needs JobSet 0.6 or newer in the cluster, and node pools with that topology. --config.run_dir must be on
# gs://. Exit codes 2 (wrong settings), 3 (no signal left) and 4 (numbers not finite) end the JobSet. Ctrl-C deletes
# it: the pods have 5 minutes to save.
set -uo pipefail # no -e: what fails is looked at where it fails
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source launch/lib.sh

action="${1:-}"
case "$action" in
    run | attach | status | delete) shift ;;
    -h | --help) help launch/tpu_gke.sh && exit 0 ;;
    *) help launch/tpu_gke.sh >&2 && exit 2 ;;
esac
name="" image="" type=v6e topology="" slices=1 chips_per_host=4 tries=10 spot="" account=""
namespace=default context="" queue="" detach="" yes="" dry="" emit="" no_check=""
samplers=0 sampler_type=v6e sampler_topology=2x4 sampler_spot=""
environment=() secrets=() arguments=() sampler_flags=()
while [ $# -gt 0 ]; do
    value="${1#*=}"
    case "$1" in
        --name=*) name="$value" ;;
        --image=*) image="$value" ;;
        --type=*) type="$value" ;;
        --topology=*) topology="$value" ;;
        --slices=*) check_number --slices "$value" && slices="$value" ;;
        --chips-per-host=*) chips_per_host="$value" ;;
        --tries=*) check_number --tries "$value" && tries="$value" ;;
        --spot) spot=yes sampler_spot=yes ;;
        --samplers=*) check_number --samplers "$value" && samplers="$value" ;;
        --sampler-type=*) sampler_type="$value" ;;
        --sampler-topology=*) sampler_topology="$value" ;;
        --sampler-spot) sampler_spot=yes ;;
        --sampler-flag=*) sampler_flags+=("$value") ;;
        --service-account=*) account="$value" ;;
        --env=*) check_env "$value" && environment+=("$value") ;;
        --secret-env=*)
            [[ $value =~ ^[A-Za-z_][A-Za-z0-9_]*=[a-z0-9][a-z0-9.-]*/[A-Za-z0-9._-]+$ ]] ||
                die 2 "--secret-env: must be NAME=SECRET/KEY, the name of a secret, not the secret"
            secrets+=("$value")
            ;;
        --namespace=*) namespace="$value" ;;
        --context=*) context="$value" ;;
        --queue=*) queue="$value" ;;
        --emit-manifest) emit=yes ;;
        --detach) detach=yes ;;
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
for value in "$namespace" "${account:-a}" "${queue:-a}"; do
    [[ $value =~ ^[a-z0-9][a-z0-9-]*$ ]] || die 2 "'$value': must be a Kubernetes name"
done
# The flag's name, a type of TPU: sets `node`, GKE's name of it.
find_node() {
    case "$2" in
        v4) node=tpu-v4-podslice ;;
        v5e) node=tpu-v5-lite-podslice ;;
        v5p) node=tpu-v5p-slice ;;
        v6e) node=tpu-v6e-slice ;;
        tpu7x) node=tpu7x ;;
        *) die 2 "$1 = '$2': must be v4, v5e, v5p, v6e or tpu7x" ;;
    esac
}
# The flag's name, a type of TPU, a topology: as many dimensions as the type's torus has, and sizes that exist.
check_topology() {
    case "$2" in
        v5e | v6e)
            [[ " 1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16 " == *" $3 "* ]] ||
                die 2 "$1 = '$3': must be 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16 or 16x16 with $2"
            ;;
        *) [[ $3 == *x*x* ]] || die 2 "$1 = '$3': must have three dimensions with $2, as 4x4x4" ;;
    esac
}
if [ "$action" = run ]; then
    [[ $image =~ ^[A-Za-z0-9][A-Za-z0-9./:@_-]*$ ]] || die 2 "--image = '$image': must be an image, as REGION-docker.pkg.dev/P/R/I:TAG"
    [[ $topology =~ ^[1-9][0-9]*x[1-9][0-9]*(x[1-9][0-9]*)?$ ]] || die 2 "--topology = '$topology': must be that of the node pools, as 4x4x4 or 16x16"
    [[ $chips_per_host =~ ^[1248]$ ]] || die 2 "--chips-per-host = '$chips_per_host': must be 1, 2, 4 or 8"
    chips=$((${topology//x/*}))
    [ $((chips % chips_per_host)) = 0 ] || die 2 "--topology = '$topology': its $chips chips must be a multiple of --chips-per-host = $chips_per_host"
    hosts=$((chips / chips_per_host))
    find_node --sampler-type "$sampler_type" && sampler_node="$node"
    find_node --type "$type" && check_topology --topology "$type" "$topology"
    [ ${#arguments[@]} -gt 0 ] || die 2 "the trainer's arguments are missing: -- --config=configs/..."
    folder="$(run_dir "${arguments[@]}")"
    [[ $folder == gs://?* ]] || die 2 "--config.run_dir = '$folder': must be gs://..., which all pods see"
    if [ "$samplers" -gt 0 ]; then
        sampler_chips=0
        [[ $sampler_topology =~ ^[1-9]x[1-9](x[1-9])?$ ]] && sampler_chips=$((${sampler_topology//x/*}))
        [[ $sampler_chips =~ ^[1248]$ ]] || die 2 "--sampler-topology = '$sampler_topology': must be that of one host, as 2x4"
        check_topology --sampler-topology "$sampler_type" "$sampler_topology"
        for word in --config.sampler.engine=samplers --config.extras.samplers.host=0.0.0.0; do
            [[ " ${arguments[*]} " == *" ${word%%=*}="* ]] || arguments+=("$word")
        done
    fi
    [ -n "$no_check" ] || check_trainer "$type" $((chips * slices)) "${arguments[@]}"
    bucket="${folder#gs://}"
    if [[ " ${environment[*]}" != *" JAX_COMPILATION_CACHE_DIR="* ]]; then
        environment+=("JAX_COMPILATION_CACHE_DIR=gs://${bucket%%/*}/jax_cache") # a new pod compiles nothing again
    fi
fi
kubectl=(kubectl --namespace="$namespace" ${context:+--context="$context"})
me="--name=$name --namespace=$namespace${context:+ --context=$context}"
[ -n "$dry$emit" ] || command -v kubectl >/dev/null || die 1 "kubectl is not installed"

# A string that YAML reads back as it is: JSON's form, which YAML has too.
yaml() {
    local text="$1"
    text="${text//\\/\\\\}" text="${text//\"/\\\"}"
    text="${text//$'\n'/\\n}" text="${text//$'\t'/\\t}" text="${text//$'\r'/\\r}"
    [[ ! $text =~ [[:cntrl:]] ]] || die 2 "an argument has a control character: $(quote "$1")"
    printf '"%s"' "$text"
}

# Kubernetes would replace $(NAME) in what it hands to a container; $$ is how it writes a plain $.
plain() { yaml "${1//\$/\$\$}"; }

manifest() {
    local word
    cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
  namespace: $namespace
YAML
    [ -z "$queue" ] || echo "  labels: {kueue.x-k8s.io/queue-name: $queue}"
    cat <<YAML
spec:
YAML
    [ "$samplers" -eq 0 ] || echo "  successPolicy: {operator: All, targetReplicatedJobs: [slice]}"
    cat <<YAML
  failurePolicy:
    maxRestarts: $((tries - 1))
    rules: # what a pod's policy failed is final; all else starts every slice again
      - action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: slice
      replicas: $slices
      template:
        metadata:
          annotations: # a slice is a node pool, and has it alone
            alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
        spec:
          completions: $hosts
          parallelism: $hosts
          completionMode: Indexed
          backoffLimit: 0
          podFailurePolicy:
            rules: # 2: wrong settings, 3: no signal left, 4: numbers not finite
              - action: FailJob
                onExitCodes: {containerName: trainer, operator: In, values: [2, 3, 4]}
          template:
            spec:
              restartPolicy: Never
              hostNetwork: true # slices talk to each other without the pods' network in between
              dnsPolicy: ClusterFirstWithHostNet
              terminationGracePeriodSeconds: 300
YAML
    place "$node" "$topology" "$spot"
    cat <<YAML
              containers:
                - name: trainer
                  image: $image
                  resources: {limits: {google.com/tpu: $chips_per_host}}
                  command:
                    - bash
                    - -c
                    - |
                      # The first process of a pod ignores signals without a handler, as the trainer does
                      # while it starts. After SIGTERM it saves and exits 143: the JobSet starts again.
                      trap 'kill -TERM "\$child"' TERM
                      [ -e launch/env.sh ] || cd /opt/dapo_jax # as in the image of launch/Dockerfile
                      source launch/env.sh tpu-$type
                      python -m dapo_jax train "\$@" &
                      child=\$!
                      wait "\$child"; code=\$?
                      while kill -0 "\$child" 2>/dev/null; do wait "\$child"; code=\$?; done
                      exit "\$code"
                    - trainer
YAML
    for word in "${arguments[@]}"; do
        echo "                    - $(plain "$word")"
    done
    variables
    [ "$samplers" -eq 0 ] || sampler_job
}

# Account, node type, topology, and spot nodes if the third word is not empty.
place() {
    [ -z "$account" ] || echo "              serviceAccountName: $account"
    cat <<YAML
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: $1
                cloud.google.com/gke-tpu-topology: $2
YAML
    [ -n "$3" ] || return 0
    cat <<YAML
                cloud.google.com/gke-spot: "true"
              tolerations:
                - {key: cloud.google.com/gke-spot, operator: Equal, value: "true", effect: NoSchedule}
YAML
}

# Samplers come and go: none of them ends the run or starts its slices again.
sampler_job() {
    local word
    cat <<YAML
    - name: sampler
      replicas: $samplers
      template:
        spec:
          completions: 1
          parallelism: 1
          completionMode: Indexed
          backoffLimit: 1000000
          podFailurePolicy:
            rules: # a preemption: start again at once
              - action: Ignore
                onPodConditions: [{type: DisruptionTarget}]
          template:
            spec:
              restartPolicy: Never
              hostNetwork: true
              dnsPolicy: ClusterFirstWithHostNet
YAML
    place "$sampler_node" "$sampler_topology" "$sampler_spot"
    cat <<YAML
              containers:
                - name: sampler
                  image: $image
                  resources: {limits: {google.com/tpu: $sampler_chips}}
                  command:
                    - bash
                    - -c
                    - |
                      # Each sampler is a program of its own, not a slice of a larger one.
                      unset \${!MEGASCALE_@}
                      [ -e launch/env.sh ] || cd /opt/dapo_jax
                      source launch/env.sh tpu-$sampler_type
                      exec python -m dapo_jax sampler "\$@"
                    - sampler
                    - $(plain "--run=$folder")
                    - --trainer=http://$name-slice-0-0.$name:8200
YAML
    for word in ${sampler_flags[@]+"${sampler_flags[@]}"}; do
        echo "                    - $(plain "$word")"
    done
    variables
}

variables() {
    local word
    [ ${#environment[@]} -gt 0 ] || [ ${#secrets[@]} -gt 0 ] || return 0
    echo "                  env:"
    for word in ${environment[@]+"${environment[@]}"}; do
        echo "                    - {name: ${word%%=*}, value: $(plain "${word#*=}")}"
    done
    for word in ${secrets[@]+"${secrets[@]}"}; do
        value="${word#*=}"
        echo "                    - {name: ${word%%=*}, valueFrom: {secretKeyRef: {name: ${value%%/*}, key: ${value#*/}}}}"
    done
}

# state: Running, Completed, Failed, absent or unreachable; restarts so far.
look() {
    local told error
    error="$(mktemp)"
    state=unreachable
    if told="$("${kubectl[@]}" get jobset "$name" -o jsonpath='{.status.terminalState},{.status.restarts}' 2>"$error")"; then
        IFS=, read -r state restarts <<<"$told"
        state="${state:-Running}" restarts="${restarts:-0}"
    elif grep -qiE 'not.?found' "$error"; then
        state=absent
    fi
    rm -f "$error"
}

# The logs of process 0, of one pod after the other, until the JobSet has ended.
watch_run() {
    local pod before="" shown=0 count known=0 line silent=0
    local first="jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    local pods=("${kubectl[@]}" get pods -l "$first" --sort-by=.metadata.creationTimestamp -o name)
    if [ -n "$dry" ]; then
        show "${pods[@]}"
        show "${kubectl[@]}" logs --follow POD
        show "${kubectl[@]}" get jobset "$name" -o jsonpath='{.status.terminalState},{.status.restarts}'
        return 0
    fi
    while :; do
        look
        if [ "$restarts" != "$known" ]; then
            say "started again by the cluster: $restarts of $((tries - 1)) times"
            known=$restarts
        fi
        pod="$("${pods[@]}" 2>/dev/null | tail -n 1)"
        [ "$pod" = "$before" ] || shown=0
        before="$pod"
        if [ -n "$pod" ]; then # each line once, also where the connection broke
            count=0
            while IFS= read -r line; do
                count=$((count + 1))
                [ "$count" -le "$shown" ] || printf '%s\n' "$line"
            done < <("${kubectl[@]}" logs --follow "$pod" 2>/dev/null)
            [ "$count" -le "$shown" ] || shown=$count
        fi
        case "$state" in
            Completed) return 0 ;;
            Failed) break ;;
            absent) say "$name was deleted by somebody" && exit 1 ;;
            unreachable)
                silent=$((silent + 1))
                [ "$silent" -lt 20 ] || die 1 "the cluster does not answer; the run goes on there. Attach later: bash launch/tpu_gke.sh attach $me"
                ;;
            *) silent=0 ;;
        esac
        nap
    done
    return "$(final_code)"
}

# The exit code that a failed JobSet ended with: 2, 3 or 4 of any pod, otherwise 1.
final_code() {
    local code codes
    codes="$("${kubectl[@]}" get pods -l "jobset.sigs.k8s.io/jobset-name=$name" \
        -o jsonpath='{.items[*].status.containerStatuses[*].state.terminated.exitCode}' 2>/dev/null)"
    for code in 2 3 4; do
        case " $codes " in *" $code "*) echo "$code" && return ;; esac
    done
    echo 1
}

remove() {
    call "${kubectl[@]}" delete jobset "$name" --ignore-not-found --cascade=foreground
}

interrupted() {
    trap 'say "left as it is"; exit 130' INT TERM
    say "interrupted: deleting $name; its pods save first"
    remove && say "nothing of this run is running; the same command goes on from $folder"
    exit 130
}

run() {
    local code word
    for word in "${arguments[@]}" "${environment[@]}" ${sampler_flags[@]+"${sampler_flags[@]}"}; do yaml "$word" >/dev/null; done # here an error ends the script
    [ -z "$emit" ] || { manifest; exit; }
    lock "gke-$name"
    [ -n "$detach" ] || trap interrupted INT TERM
    if [ -n "$dry" ]; then
        show "${kubectl[@]}" create -f -
        manifest
    elif ! manifest | "${kubectl[@]}" create -f - >&2; then # the cluster refuses a second of that name
        die 1 "$name was not created; if it is there already: bash launch/tpu_gke.sh attach or delete $me"
    fi
    if [ -n "$detach" ]; then
        say "left running; the cluster starts it again by itself. bash launch/tpu_gke.sh attach | status | delete $me"
        exit 0
    fi
    watch_run
    code=$?
    explain "$code"
    say "results are in $folder"
    # A JobSet that has ended holds no TPU; its pods are kept for their logs.
    [ -z "$yes" ] || remove
    exit "$code"
}

state="" restarts=0
case "$action" in
    run) run ;;
    attach)
        watch_run
        code=$?
        explain "$code"
        exit "$code"
        ;;
    status)
        look
        echo "$name: $state, started again $restarts times"
        "${kubectl[@]}" get pods -l "jobset.sigs.k8s.io/jobset-name=$name"
        ;;
    delete)
        [ -n "$yes" ] || [ -n "$dry" ] || confirm "delete $name?" || die 1 "not deleted (say y, or --yes where there is no terminal)"
        remove
        ;;
esac
