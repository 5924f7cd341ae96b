"""Settings of `dapo-jax serve`."""

from typing import Annotated, ClassVar, Literal

from dapo_jax.config.experiment import Cache, OneMesh
from dapo_jax.config.settings import Section, part, setting
from dapo_jax.types.rules import (
    Count,
    CountOr0,
    Dtype,
    Port,
    Positive,
    PositiveOr0,
    Range,
    Seed,
    Share,
    Temperature,
)


class ServeConfig(Section):
    """A served policy (`dapo-jax serve`)."""

    combinations: ClassVar = """
        -> model!=: a model folder, --model=FOLDER
        -> host!=: an address of this machine; 0.0.0.0: all
        tinker=true -> http_port>0
        tinker=false -> tinker_dir tinker_stable_reinforce tinker_models
    """
    model: str = setting("", "Folder in Hugging Face layout, or a run: its newest checkpoint.")
    served_name: str = setting("", "Model name for HTTP clients; empty: the folder's name.")
    host: str = setting("127.0.0.1", "Address to listen on; the default is this machine only.")
    http_port: Port = setting(8000, "Port of OpenAI's HTTP protocol; 0: any that is free.")
    max_prompt_tokens: Annotated[int, Range(at_least=1, at_most=32_767, also=-1)] = setting(
        -1, "Longest prompt; 'auto' (-1): the context, or what fits into memory."
    )
    max_response_tokens: Annotated[int, Range(above=0, also=-1)] = setting(
        -1, "Largest max_tokens of a request. 'auto' (-1): the remaining context."
    )
    default_max_tokens: Annotated[int, Range(above=0, also=-1)] = setting(
        1024, "max_tokens of a request without it; 'auto' (-1): the largest."
    )
    slots: Count = setting(32, "Responses decoded in parallel.")
    waiting: Count = setting(128, "Responses that wait for a slot; more are rejected.")
    temperature: Temperature = setting(1.0, "Softmax temperature; 0: greedy. Requests may set it.")
    top_p: Share = setting(1.0, "Nucleus fraction. Requests may set it.")
    top_k: CountOr0 = setting(0, "Keep the k likeliest tokens; 0: all. Requests may set it.")
    seed: Seed = setting(0, "Random seed; samples also depend on the order of requests.")
    dtype: Dtype = setting("float32", "Type of the weights, 'float32' or 'bfloat16'.")
    weights_dtype: Literal["auto", "int8"] = setting(
        "auto", "Type of matrices but the embedding: 'auto' (dtype), or 'int8' scaled per channel."
    )
    cache: Cache = setting("auto", "Cache layout: 'auto' (paged on TPU), 'slots' or 'paged'.")
    api_key_file: str = setting("", "File with the clients' key; empty: DAPO_API_KEY, if set.")
    allowed_hosts: str = setting("", "Other names of this server, comma-separated; '*': any.")
    max_body_mb: Positive = setting(1.0, "Largest body of a request, in 10^6 bytes.")
    request_seconds: Positive = setting(10.0, "Seconds for a request's body to arrive.")
    max_connections: Count = setting(800, "Connections; more are rejected.")
    shutdown_seconds: PositiveOr0 = setting(20.0, "Time for running requests after SIGTERM.")
    tinker: bool = setting(False, "Serve Tinker's training API on http_port instead.")
    tinker_dir: str = setting("runs/tinker", "Folder of its models, checkpoints and requests.")
    tinker_stable_reinforce: Literal["", "cispo", "importance_sampling", "ppo"] = setting(
        "", "Loss to compute for 'stable_reinforce'; 'cispo' is the nearest."
    )
    tinker_models: Count = setting(8, "Its trained models in memory; more wait on disk.")
    mesh: OneMesh = part(OneMesh)
