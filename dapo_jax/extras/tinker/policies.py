"""Decoders, learners and engines of a server's models, all of one base model."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax

from dapo_jax.config.experiment import Lora, Optimizer
from dapo_jax.extras.serve.logprobs import Scorer
from dapo_jax.extras.serve.policy import open_folder, sampler_settings
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.extras.tinker.losses import loss_learner
from dapo_jax.extras.tinker.requests import ATTENTION, AdamParams, ModelShape
from dapo_jax.learner.update import Learner, apply_gradient, make_optimizer
from dapo_jax.model import load_huggingface, peft_adapters
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.trainable import choose_trained, fresh_adapters
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.engine_programs import EnginePrograms
from dapo_jax.runtime.processes import print_error

ALPHA = 32.0  # of LoRA, as in the service
MAX_PROGRAMS = 8  # compiled learners, engines and optimizer steps of each kind
MAX_WEIGHTS = 4  # decoding weights in memory
BURST_TOKENS = 8  # decode steps between two looks at the queue
ROW_TOKENS = 256  # shortest packed row


class Policies:
    """Everything that models with the same base share.

    The most recently used programs and decoding weights are kept. A shape of None is that of the
    base model without adapters.

    Attributes:
        learner, optimizer_step, engine, scorer: of models of a shape.
        decoding_weights: of a shape, a checkpoint's folder, and its time.
    """

    def __init__(self, config: ServeConfig):
        self.model = model = open_folder(config, ROW_TOKENS)
        self.config, self.mesh, self.decoder = model.config, model.mesh, model.decoder
        self.base = self._read(config.model, self.decoder, cast=True)
        if mapped := config.tinker_stable_reinforce:
            print_error(f"stable_reinforce has no published formula: it is computed as {mapped}")
        self._shared: Any = None  # decoding copy of the base model
        recent = functools.lru_cache(MAX_PROGRAMS)
        self.learner = recent(self._open_learner)
        self.optimizer_step = recent(self._compile_step)
        self.engine = recent(self._open_engine)
        self.scorer = recent(lambda shape: Scorer(self.engine(shape).config))
        self.decoding_weights = functools.lru_cache(MAX_WEIGHTS)(self._load)

    def _read(self, folder: str, decoder: DecoderConfig, cast: bool) -> Any:
        """Return the parameters in a model folder; `cast` to the type of the forward pass."""
        return load_huggingface.load_params(folder, decoder, self.mesh, field="model", cast=cast)

    def decoder_of(self, shape: ModelShape | None) -> DecoderConfig:
        """Return the decoder with the adapters of a model, if it has any."""
        if shape is None:
            return self.decoder
        lora = Lora(rank=shape.rank, alpha=ALPHA, targets=",".join(shape.targets or ATTENTION))
        return choose_trained(self.decoder, 0.0, lora)

    def _open_learner(self, shape: ModelShape) -> Learner:
        frozen = self.base if shape.rank else None
        return loss_learner(self.decoder_of(shape), self.mesh, frozen)

    def first_params(self, shape: ModelShape, seed: int) -> Any:
        """Return the trained parameters of a new model, in float32."""
        decoder = self.decoder_of(shape)
        if shape.rank:
            return fresh_adapters(decoder, self.mesh, seed % 2**32)
        return self._read(self.config.model, decoder, cast=False)

    def _compile_step(self, shape: ModelShape, adam: AdamParams) -> Callable[..., Any]:
        """Return the optimizer step: state, gradient, learning rate -> state, metrics.

        It is compiled for constant parameters of Adam, as in training, and rounds alike.
        """
        constants = adam.model_dump(exclude={"learning_rate", "grad_clip_norm"})
        norm = adam.grad_clip_norm if adam.grad_clip_norm > 0 else math.inf
        optimizer = make_optimizer(Optimizer(**constants, max_grad_norm=norm))
        step = functools.partial(apply_gradient, optimizer)
        places = (self.learner(shape).shardings, None)
        return jax.jit(step, donate_argnums=0, out_shardings=places)

    def _open_engine(self, shape: ModelShape | None) -> PolicyEngine:
        frozen = self.base if shape is None or shape.rank else None
        settings, prompt = sampler_settings(self.config), self.config.max_prompt_tokens
        # One shape of each program, so that a response does not depend on those beside it.
        longest = prompt + settings.max_response_tokens
        settings = dataclasses.replace(
            settings, burst_tokens=BURST_TOKENS, first_window_tokens=longest
        )
        # Requests bring their end tokens.
        options: dict[str, Any] = {"max_prompt_tokens": prompt, "frozen": frozen}
        engine = PolicyEngine(self.decoder_of(shape), self.mesh, settings, **options)
        if frozen is not None:
            weights = cast(EnginePrograms, engine.programs).weights
            self._shared = weights.frozen() if self._shared is None else self._shared
            weights.share_frozen(self._shared)
        return engine

    def _load(self, shape: ModelShape | None, folder: str, created: float) -> Any:
        """Load a checkpoint's folder; one of the same name may be `created` again."""
        decoder = self.decoder_of(shape)
        if shape is None:
            params = {}
        elif shape.rank:
            params = peft_adapters.load_adapters(folder, decoder, self.mesh)
        else:
            params = self._read(folder, decoder, cast=True)
        return self.engine(shape).load_params(params)
