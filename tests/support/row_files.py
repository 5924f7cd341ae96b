"""Files of problems, and of the tables of a test."""

import ast
import json
from pathlib import Path


def write_lines(path, rows) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def read_table(test: str, name: str) -> list:
    """Return rows below `== name` in the text file beside a test: of cells, or its only cell."""
    text = Path(test).with_suffix(".txt").read_text()
    rows = text.split(f"== {name}\n")[1].split("\n== ")[0].strip().splitlines()
    cells = [tuple(map(_read_cell, row.split(" | "))) for row in rows]
    return [row if len(row) > 1 else row[0] for row in cells]


def _read_cell(text: str):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


CHATML = (
    "{%- for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
