"""Tasks of the installed reasoning-gym, and right answers to their items."""

# Their example stands elsewhere in the item than its answer.
EXAMPLES = ("example_answer", "example_correct_answer")
WITHOUT_ANSWER = ("boxnet", "graph_color", "rush_hour")


def every_task(factory) -> list[str]:
    """Names of all tasks but the one that only forwards to others, and has no default."""
    return sorted(set(factory.DATASETS) - {"composite"})


def gold(item: dict) -> str:
    """Right answer to an item; empty where the item brings none."""
    examples = [item["metadata"].get(name) for name in EXAMPLES]
    return str(next(text for text in [item["answer"], *examples, ""] if text is not None))
