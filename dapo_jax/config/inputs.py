"""Settings of the problems and examples that a run reads."""

from typing import Annotated, Literal

from dapo_jax.runtime.rules import AutoCount, Count, CountOr0, Positive, Range, When
from dapo_jax.runtime.settings import section, setting

DEFAULT_HELDOUT = 256
# Values of data.source of a supervised run that are no files.
GENERATED = ("arithmetic", "multi_digit_sums")
SHOW_NO_SYSTEM = ("none", "dapo", "r1", "qwen_math", "few_shot")  # templates without such a message


@section
class Examples:
    """Worked examples of the embedded tasks."""

    errors: bool = setting(
        True,
        "Whether examples contain wrong steps and ramble.",
        read=When("examples.direct_share", lambda share: share == 0),
    )
    direct_share: Annotated[float, Range(at_least=0, below=1)] = setting(
        0.0,
        "Share of examples that answer at once. arithmetic: with the sum of the first two "
        "operands; the others make no mistakes, and ramble. multi_digit_sums: rightly; the others "
        "call the calculator.",
    )
    min_terms: int = setting(3, "Fewest operands of a sum.")
    max_terms: int = setting(9, "Most operands of a sum.")


@section
class Data:
    """Problems with known answers."""

    source: str = setting(
        "arithmetic",
        "NAME or NAME=WEIGHT, comma-separated: arithmetic, multi_digit_sums, gym:TASK, or a file, "
        "folder or glob (also gs://) of jsonl, json, csv (.gz too), parquet or arrow; a bare name "
        "is looked up in `folder`.",
    )
    heldout_source: str = setting(
        "", "Names as in `source`, evaluated whole; empty: held-out problems of `source` itself."
    )
    fields: str = setting(
        "",
        "Which field of a row is what, where it is called otherwise: KEY=FIELD, comma-separated, "
        "as in problem=question,answer=meta.gold; keys: formats.FIELDS.",
    )
    folder: str = setting("data", "Where bare names are looked up.")
    bad_rows_limit: CountOr0 = setting(
        10, "Malformed rows of a source that are skipped, not an error."
    )
    template: str = setting(
        "none",
        "Prompt template: a key of templates.TEMPLATES, or a text of your own, or a file of it, "
        "with {problem} in it or with {{ problem }}, as jinja.",
    )
    few_shot: Count = setting(
        4,
        "Worked training examples before the problem (few_shot).",
        read=When("data.template", "few_shot"),
    )
    system_prompt: str = setting(
        "",
        "System message (chat, or jinja of your own) of rows that bring none; empty: none.",
        read=When("data.template", lambda name: name not in SHOW_NO_SYSTEM),
    )
    train_problems: Count = setting(
        20_000, "Generated problems of one pass, which is then shuffled anew."
    )
    heldout_problems: AutoCount = setting(
        -1,
        "Problems generated or taken off for evaluation, never trained on; 0: no evaluation; -1: "
        "256, of a file at most a fifth.",
    )
    min_terms: int = setting(3, "Fewest operands of a sum.")
    max_terms: int = setting(9, "Most operands of a sum.")
    max_prompt_tokens: Count = setting(32, "Longest prompt the sampler accepts.")
    overlong_prompts: Literal["truncate_left", "drop"] = setting(
        "truncate_left", "'truncate_left' keeps the end of a longer prompt, 'drop' skips it."
    )
    changed: Literal["refuse", "allow"] = setting(
        "refuse",
        "A run goes on with other problems or answers than it began with: 'refuse' or 'allow'.",
        may_change=True,
    )

    def heldout_count(self) -> int:
        """Problems to generate or, where there are enough, to take off for evaluation."""
        return DEFAULT_HELDOUT if self.heldout_problems < 0 else self.heldout_problems


@section
class OwnData:
    """A user's own examples, or pairs of them."""

    source: str = setting(
        "arithmetic",
        "A file, folder or glob (also gs://) of jsonl, json, csv, parquet or arrow; a bare name "
        "is looked up in `folder`. For sft also arithmetic, multi_digit_sums: generated, as "
        "`examples` says.",
    )
    folder: str = setting("data", "Where a bare name is looked up.")
    fields: str = setting(
        "",
        "Which fields of a row are read, as prompt=question,response=meta.target; empty: those "
        "of the known forms.",
    )
    bad_rows_limit: CountOr0 = setting(10, "Malformed rows that are skipped, not an error.")
    template: str = setting(
        "none",
        "Of prompts that are plain text: as in reinforcement learning, but few_shot; messages "
        "always get the model's own.",
    )
    system_prompt: str = setting(
        "", "System message (chat, or jinja of your own) of rows that bring none; empty: none."
    )
    heldout_examples: AutoCount = setting(
        -1, "Taken off for evaluation, never trained on; -1: one in 20, at most 256; 0: none."
    )
    passes: Positive = setting(
        3.0,
        "Over the examples, each in an order of its own.",
        read=When("total_steps", lambda steps: steps == 0),
    )
    overlong: Literal["drop", "cut"] = setting(
        "drop", "What exceeds packing.row_tokens: 'drop' it, or 'cut' the end of its answer."
    )
