"""What transformers makes of folders: prompts of conversations, texts of ids.

`python hub_templates.py ROOT` reads ROOT/cases.json: for each folder, lists of conversations with
tools, and of ids. It prints the prompts (null if the template fails) and texts as JSON.
"""

import json
import pathlib
import sys


def main(root: pathlib.Path) -> None:
    from transformers import PreTrainedTokenizerFast

    found = {}
    for name, (conversations, rows) in json.loads((root / "cases.json").read_text()).items():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(root / name)

        def write(messages, tools, tokenizer=tokenizer):
            options = {"tokenize": False, "add_generation_prompt": True}
            try:
                return tokenizer.apply_chat_template(messages, tools=tools or None, **options)
            except Exception:
                return None

        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]
        found[name] = [[write(*case) for case in conversations], texts]
    print(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
