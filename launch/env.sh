# shellcheck shell=bash
# Sourced: environment variables and flags of JAX, XLA and libtpu, each with its reason. The one place for flags.
# Usage: source launch/env.sh KIND
#   KIND   cpu, gpu, tpu, or tpu-GENERATION as tpu-v6e or tpu-tpu7x
# A flag or variable that is already set keeps its value.

flag() { # VARIABLE --name=value
    case " ${!1:-} " in
        *" ${2%%=*}="* | *" ${2%%=*} "*) ;;
        *) export "$1=${!1:+${!1} }$2" ;;
    esac
}

# Cache of compiled programs for the next start. tpu_vm.sh and tpu_gke.sh put it into the run's bucket, so that a new
# machine compiles nothing again.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.venv/jax_cache}"

case "$1" in
    tpu*)
        # No TPU is an error, not a run on the CPU that nobody asked for.
        export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}"

        # FSDP gathers a layer's weights while another layer computes: without these five no collective of the
        # compiled loop is asynchronous. They cost the memory of one more layer's gathered weights. MaxText's
        # CF_FOR_ALL_GATHER (benchmarks/xla_flags_library.py); what they change: docs/launch.md.
        flag LIBTPU_INIT_ARGS --xla_enable_async_all_gather=true
        flag LIBTPU_INIT_ARGS --xla_tpu_enable_async_collective_fusion=true
        flag LIBTPU_INIT_ARGS --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
        flag LIBTPU_INIT_ARGS --xla_tpu_enable_async_collective_fusion_multiple_steps=true
        flag LIBTPU_INIT_ARGS --xla_tpu_overlap_compute_collective_tc=true
        ;;
esac
case "$1" in
    tpu-v6e*)
        # One operation may use 96 of v6e's 128 MiB of VMEM, so that larger tiles stay on the chip: MaxText's
        # DENSE_VMEM_LIMIT_FLAG (same file).
        flag LIBTPU_INIT_ARGS --xla_tpu_scoped_vmem_limit_kib=98304
        ;;
    tpu-tpu7x)
        # The same of its 64 MiB: the recipe of Llama-3.1-70B in tpu-recipes (training/ironwood).
        flag LIBTPU_INIT_ARGS --xla_tpu_scoped_vmem_limit_kib=61440
        ;;
esac
case "$1" in
    cpu)
        # A device for each core (the largest power of two): two threads of one device wait for each other in
        # every small product of decoding, two devices hardly ever. Measured: docs/performance.md.
        cores="$(getconf _NPROCESSORS_ONLN)" devices=1
        while [ $((devices * 2)) -le "$cores" ] && [ "$devices" -lt 8 ]; do devices=$((devices * 2)); done
        flag XLA_FLAGS "--xla_force_host_platform_device_count=$devices"
        unset cores devices
        ;;
    gpu)
        # JAX takes 75 % of a GPU by default; policy, optimizer and cache of a run need more. The rest is for
        # NCCL and CUDA themselves (JAX-Toolbox, GPU performance: 0.8 to 0.9).
        export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}"
        # Collectives move beside computing (docs.jax.dev, GPU performance tips).
        flag XLA_FLAGS --xla_gpu_enable_latency_hiding_scheduler=true
        ;;
esac
unset -f flag
