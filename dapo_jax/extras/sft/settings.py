"""Settings of `dapo-jax sft` and `dapo-jax dpo`."""

from typing import Annotated, ClassVar

from dapo_jax.config.checks import Checks, check_row_length, check_table
from dapo_jax.config.experiment import (
    SYSTEM_PROMPT,
    Compute,
    Examples,
    Lora,
    OneMesh,
    Optimizer,
    Packing,
)
from dapo_jax.config.settings import Section, part, setting
from dapo_jax.runtime.storage.output_folder import PREFERRING, TRAINED
from dapo_jax.types.rules import AutoCount, Count, CountOr0, Positive, Range, Seed

GENERATED = ("arithmetic", "multi_digit_sums")  # by position, without an end
OWN_EXAMPLES = """
-> data.source!=: a file, folder or glob of rows
-> start!=: a model folder
-> packing.row_tokens>0
-> data.template!=few_shot: examples are no problems to show before others
data.source!=word_problems|calculator_problems|gym:* -> data.generated_examples
"""


class Architecture(Section):
    """Shape of a new policy (Qwen2 family)."""

    combinations: ClassVar = "-> architecture.kv_heads%architecture.heads"
    layers: Count = setting(3, "Decoder layers.")
    embed: Count = setting(128, "Width of the residual stream.")
    heads: Count = setting(4, "Query heads.")
    kv_heads: Count = setting(2, "Key/value heads; divides heads.")
    head_dim: Count = setting(32, "Width of a head; even.")
    mlp: Count = setting(384, "Width of the gated MLP.")
    rope_theta: Annotated[float, Range(above=1)] = setting(
        10_000.0, "Base of the rotary wavelengths; short texts learn faster with a small one."
    )


class OwnData(Section):
    """A user's own examples, or pairs of them."""

    source: str = setting(
        "arithmetic",
        "A file, folder or glob (also gs://) of jsonl, json, csv, parquet or arrow; a bare name is "
        "looked up in `folder`. For sft also arithmetic, multi_digit_sums: generated (`examples`), "
        "and word_problems, calculator_problems, gym:TASK: `generated_examples` of them.",
    )
    folder: str = setting("data", "Folder for a bare name.")
    fields: str = setting("", "Fields of rows: KEY=FIELD,.., as prompt=question,response=meta.x.")
    bad_rows_limit: CountOr0 = setting(10, "Malformed rows that are skipped.")
    template: str = setting("none", "Template of plain prompts: as for problems, no few_shot.")
    system_prompt: str = setting("", SYSTEM_PROMPT)
    heldout_examples: AutoCount = setting(-1, "Examples for evaluation; -1: 1 in 20, up to 256.")
    generated_examples: Count = setting(400, "Number of generated examples.")
    passes: Positive = setting(3.0, "Passes over the examples, if total_steps is 0.")


class Supervised(Section):
    """What runs on examples and on pairs have in common."""

    needs_file: ClassVar = False
    kind: ClassVar[str]  # 'examples' or 'pairs'
    output: ClassVar[str]  # kind of the folder `out`
    out: str = setting("runs/base", "Model folder to write; replaces an earlier one of sft.")
    seed: Seed = setting(0, "Random seed.")
    start: str = setting("", "Model folder to start from; empty: random weights of `architecture`.")
    total_steps: CountOr0 = setting(0, "Optimizer steps; 0: as data.passes requires.")
    save_every_steps: Count = setting(100, "Steps between checkpoints, next to `out`.")
    lora: Lora = part(Lora)
    compute: Compute = part(Compute)
    data: OwnData = part(OwnData)
    optimizer: Optimizer = part(lambda: Optimizer(schedule="cosine"))
    packing: Packing = part(Packing)
    mesh: OneMesh = part(OneMesh)


class SftConfig(Supervised):
    """A supervised run on examples (`dapo-jax sft`); writes a model folder."""

    combinations: ClassVar = """
        start= -> lora.rank=0: there is no base model to adapt
        start!= -> architecture.
        data.source=arithmetic|multi_digit_sums -> total_steps>0
        data.source=arithmetic|multi_digit_sums -> data.
        data.source!=arithmetic|multi_digit_sums -> examples. max_response_tokens
        examples.direct_share>0 -> examples.errors
    """
    kind, output = "examples", TRAINED
    examples_per_step: Count = setting(32, "Examples per optimizer step.")
    architecture: Architecture = part(Architecture)
    examples: Examples = part(Examples)
    max_response_tokens: Count = setting(160, "Longest example; others are cut.")

    def checks(self) -> Checks:
        """Yield the checks of combinations of settings."""
        if self.data.source not in GENERATED:
            yield from check_table(self, OWN_EXAMPLES)
            return
        longest = 2 * self.examples.max_terms  # a digit and a sign each
        yield from check_row_length(self.packing, longest + self.max_response_tokens)
        yield "architecture.head_dim", self.architecture.head_dim % 2 == 0, "even"


class DpoConfig(Supervised):
    """Preference optimisation on offline pairs (`dapo-jax dpo`); writes a model folder."""

    combinations: ClassVar = OWN_EXAMPLES
    kind, output = "pairs", PREFERRING
    out: str = setting("runs/dpo", "Model folder to write; replaces an earlier one of dpo.")
    start: str = setting("", "Model folder to start from.")
    reference: str = setting("", "The frozen reference policy; empty: `start`.")
    beta: Positive = setting(0.1, "DPO's beta: strength of a margin, in 1 / nats.")
    pairs_per_step: Count = setting(32, "Pairs per optimizer step.")
    data: OwnData = part(lambda: OwnData(source="", passes=1.0))
    optimizer: Optimizer = part(lambda: Optimizer(schedule="linear"))
