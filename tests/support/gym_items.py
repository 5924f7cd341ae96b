"""Tasks and answers of the installed reasoning-gym, and packages that replace it."""

import pathlib

from dapo_jax.extras.gym import RELEASE

# Fields of the metadata that hold an example if the item has no answer.
EXAMPLES = ("example_answer", "example_correct_answer")
WITHOUT_ANSWER = ("boxnet", "graph_color", "rush_hour")


def every_task(factory) -> list[str]:
    """Return the names of all tasks but `composite`, which has no default."""
    return sorted(set(factory.DATASETS) - {"composite"})


def gold(item: dict) -> str:
    """Return a correct answer to an item; empty if the item has none."""
    examples = [item["metadata"].get(name) for name in EXAMPLES]
    return str(next(text for text in [item["answer"], *examples, ""] if text is not None))


# Constant answers that slow tests probe each task with.
QUESTION = "the question's own text"
CONSTANTS = (
    *("", " ", "\n", ".", ",", "-", "=", "0", "1", "-1", "2", "10", "0.5", "1/2", "0,0", "0 0"),
    *("(0, 0)", "i", "NaN", "inf", "-inf", "1e999", "[]", "[[]]", "[NaN]", "{}", "()", "null"),
    *("None", "True", "False", "Yes", "No", "A", "B", "ABC", "I do not know.", "The answer is 42."),
    QUESTION,
)


def write_package(folder: pathlib.Path, source: str, release: str = RELEASE) -> None:
    """Write a module `reasoning_gym` with the metadata of a release."""
    metadata = f"Name: reasoning-gym\nVersion: {release}\n"
    for name, file, text in (
        ("reasoning_gym", "__init__.py", source),
        (f"reasoning_gym-{release}.dist-info", "METADATA", metadata),
    ):
        (folder / name).mkdir()
        (folder / name / file).write_text(text)
