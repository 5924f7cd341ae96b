"""Problems to prompts with grain: an endless, shuffled, seekable order.

The order is a function of the seed alone, so the position in it, one integer, is all that a
checkpoint has to hold.
"""

import grain
import numpy as np

from dapo_jax.config import Data
from dapo_jax.data import arithmetic
from dapo_jax.structs import Prompt
from dapo_jax.templates import apply_template
from dapo_jax.tokenizer import Tokenizer

# name: (data settings, split 'train' or 'heldout', seed) -> problems by index
SOURCES = {"arithmetic": arithmetic.Problems}


def _to_prompt(problem, index: int, data: Data, tokenizer: Tokenizer) -> Prompt | None:
    """None for a prompt over the limit where the config says to drop those."""
    text = apply_template(data.template, problem.text)
    tokens = tokenizer.encode(text)
    if len(tokens) > data.max_prompt_tokens:
        if data.overlong_prompts == "drop":
            return None
        tokens = tokens[-data.max_prompt_tokens :]
        text = tokenizer.decode(tokens)
    ids = np.asarray(tokens, np.int32)
    return Prompt(index, problem.id, text, ids, problem.answer, problem.source)


class PromptStream:
    """The endless order of training prompts.

    Attributes:
        position: index of the next problem to read; set it to go on from there.
    """

    def __init__(self, data: Data, seed: int, tokenizer: Tokenizer):
        self._data, self._tokenizer = data, tokenizer
        problems = SOURCES[data.source](data, "train", seed)
        dataset = grain.MapDataset.source(problems).seed(seed).shuffle().repeat()
        read_options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=64)
        self._iterator = iter(dataset.to_iter_dataset(read_options))

    @property
    def position(self) -> int:
        return int(self._iterator.get_state()["next_index"])

    @position.setter
    def position(self, index: int) -> None:
        self._iterator.set_state({"next_index": index})

    def __iter__(self) -> "PromptStream":
        return self

    def __next__(self) -> Prompt:
        """The next prompt that is short enough.

        Raises:
            ValueError: a whole pass held no prompt within `data.max_prompt_tokens`.
        """
        for _ in range(self._data.train_problems):
            index = self.position
            prompt = _to_prompt(next(self._iterator), index, self._data, self._tokenizer)
            if prompt is not None:
                return prompt
        limit = self._data.max_prompt_tokens
        raise ValueError(f"config.data.max_prompt_tokens = {limit}: every prompt is longer")


def heldout_prompts(data: Data, seed: int, tokenizer: Tokenizer) -> list[Prompt]:
    """The evaluation prompts, each once, in a fixed order; overlong ones as configured."""
    problems = SOURCES[data.heldout_source or data.source](data, "heldout", seed)
    prompts = (_to_prompt(problems[i], i, data, tokenizer) for i in range(len(problems)))
    return [prompt for prompt in prompts if prompt is not None]
