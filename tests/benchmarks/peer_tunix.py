"""Times rollout, update and whole step of Tunix's DAPOLearner on the model and batch of ours.py.

    python tests/benchmarks/peer_tunix.py --new-tokens 128 --repeats 5

- rollout: the cluster's own sampler without log-probs, every response exactly as long as asked.
- update: the trainer's compiled step, the batch at once.
- step: the learner's own rollout, reference pass (which its DAPO always has) and update.

One process, float32. Prints a JSON line per measurement.
"""

import logging
import os

import peers

INSTALL = "pip install google-tunix==0.1.7 jax (Python 3.12)"
PACKAGES = "google-tunix jax flax"
NEVER = peers.VOCAB + 7  # an end token that no draw gives: responses are as long as asked


class Words:
    """A tokenizer whose words are token ids."""

    def encode(self, text: str, **_) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens, **_) -> str:
        return " ".join(str(int(token)) for token in tokens)

    def bos_id(self) -> int:
        return peers.PAD  # falsy: none is added

    def eos_id(self) -> int:
        return peers.END

    def pad_id(self) -> int:
        return peers.PAD


def make_model():
    """A Qwen2 of random matrices; Tunix's own start has zeros in them."""
    import jax
    from flax import nnx
    from tunix.models.qwen2 import model as qwen2

    config = qwen2.ModelConfig(
        num_layers=peers.LAYERS,
        vocab_size=peers.VOCAB,
        embed_dim=peers.HIDDEN,
        hidden_dim=peers.MLP,
        num_heads=peers.HEADS,
        head_dim=peers.HIDDEN // peers.HEADS,
        num_kv_heads=peers.KV_HEADS,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    model = qwen2.Qwen2(config, rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def draw(leaf):
        return 0.02 * jax.random.normal(next(keys), leaf.shape) if leaf.ndim > 1 else leaf

    nnx.update(model, jax.tree.map(draw, nnx.state(model)))
    return model


class Peer:
    """A learner on one device, with the prompts of a step."""

    def __init__(self, new_tokens: int):
        import jax
        import numpy as np
        import optax
        from tunix.rl import rl_cluster
        from tunix.rl.grpo import dapo_learner
        from tunix.rl.rollout import base_rollout

        self.new_tokens = new_tokens
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        rollout = base_rollout.RolloutConfig(
            max_tokens_to_generate=new_tokens,
            max_prompt_length=peers.PROMPT_TOKENS,
            kv_cache_size=peers.PROMPT_TOKENS + new_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            return_logprobs=True,
            eos_tokens=[NEVER],
        )
        training = rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(1e-6, weight_decay=0.1),
            eval_every_n_steps=10**9,
            max_steps=10**9,
            mini_batch_size=peers.PROMPTS,
            train_micro_batch_size=peers.PROMPTS,
        )
        role = rl_cluster.Role
        self.cluster = rl_cluster.RLCluster(
            actor=make_model(),
            reference=make_model(),
            tokenizer=Words(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys((role.ACTOR, role.REFERENCE, role.ROLLOUT), self.mesh),
                rollout_engine="vanilla",
                offload_to_cpu=False,
                training_config=training,
                rollout_config=rollout,
            ),
        )
        self.learner = dapo_learner.DAPOLearner(
            self.cluster,
            algo_config=dapo_learner.DAPOConfig(num_generations=peers.GROUP),
            reward_fns=[lambda completions, **_: [float(i % 2) for i in range(len(completions))]],
        )
        self.random = np.random.default_rng(0)
        rows = self.random.integers(2, peers.VOCAB, (peers.PROMPTS, peers.PROMPT_TOKENS))
        self.prompts = np.repeat(rows, peers.GROUP, axis=0)
        self.texts = [Words().decode(row) for row in self.prompts]

    def ready(self) -> None:
        import jax
        from flax import nnx

        jax.block_until_ready(jax.tree.leaves(nnx.state(self.cluster.actor_trainer.model)))

    def rollout(self, repeats: int) -> list[float]:
        def sample():
            with self.mesh:
                out = self.cluster.rollout._sampler(
                    self.texts,
                    max_generation_steps=self.new_tokens,
                    max_prompt_length=peers.PROMPT_TOKENS,
                    echo=False,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=None,
                    eos_tokens=[NEVER],
                    seed=int(self.random.integers(2**31)),
                    return_logprobs=False,
                )
            assert all(len(tokens) == self.new_tokens for tokens in out.tokens)

        return peers.timed(sample, repeats)

    def update(self, repeats: int) -> list[float]:
        import jax
        import jax.numpy as jnp
        from tunix.rl.grpo.grpo_learner import TrainExample
        from tunix.sft import sharding_utils

        shape = (peers.RESPONSES, self.new_tokens)
        old = jnp.full(shape, -jnp.log(float(peers.VOCAB)))
        example = TrainExample(
            prompt_ids=jnp.asarray(self.prompts, jnp.int32),
            prompt_mask=jnp.ones(self.prompts.shape, bool),
            completion_ids=jnp.asarray(self.random.integers(2, peers.VOCAB, shape), jnp.int32),
            completion_mask=jnp.ones(shape, bool),
            advantages=jnp.asarray(self.random.normal(size=peers.RESPONSES), jnp.float32),
            ref_per_token_logps=None,
            old_per_token_logps=old,
        )
        with self.mesh:
            step, _ = self.cluster.actor_trainer.jit_train_and_eval_step(False, True)
            batch = sharding_utils.shard_input(example, ("fsdp",))

            def update():
                jax.block_until_ready(step(batch))
                self.ready()

            return peers.timed(update, repeats)

    def step(self, repeats: int) -> list[float]:
        self.learner._rollout_micro_batch_size = peers.PROMPTS
        self.learner._compute_logps_micro_batch_size = peers.PROMPTS

        def step():
            example = self.learner._generate_and_compute_advantage({"prompts": self.texts})
            self.cluster.update_actor([example], None, False)
            self.ready()

        return peers.timed(step, repeats)


def main() -> None:
    args = peers.read_arguments(__doc__)
    peers.require("tunix jax flax optax", INSTALL)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.disable(logging.WARNING)
    peer = Peer(args.new_tokens)
    peers.report(args, {name: getattr(peer, name) for name in peers.BENCHES}, PACKAGES)


if __name__ == "__main__":
    main()
