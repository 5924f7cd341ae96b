"""Prompt templates by name: how a bare problem becomes the text that the policy sees."""

TEMPLATES = {
    "none": "{problem}",
    # The wording of DAPO's released data (arXiv 2503.14476).
    "dapo": (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
        '\n\n{problem}\n\nRemember to put your answer on its own line after "Answer:".'
    ),
}

# A prompt that asks for one format and a verifier that reads another reward nothing: templates that
# ask for a format name the verifier that reads it.
VERIFIER_OF = {"dapo": "dapo"}


def apply_template(name: str, problem: str) -> str:
    """The prompt text. Braces inside the problem are left alone."""
    return TEMPLATES[name].replace("{problem}", problem)
