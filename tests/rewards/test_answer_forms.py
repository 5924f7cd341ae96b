"""Which answers of gym tasks a scorer that evaluates may see; a task that nobody looked at."""

import importlib
import sys
import time
import types

import pytest

from dapo_jax.rewards.gym import answer_forms, tasks
from dapo_jax.runtime.settings import ConfigError

HONEST = {
    "countdown": [
        "82 + 20 + 67 - 50",
        "49*(85 - 1)/14 - 42 - 73",
        " (1+2) * -3 ",
        "((((7))))",
        "+5",
    ],
    "puzzle24": ["2*(5 + 1 + 6)", "8/(3-8/3)"],
    "n_queens": [
        "_ _ Q _\nQ _ _ _\n_ _ _ Q\n_ Q _ _",
        "[['_', 'Q'], ['Q', '_']]",
        '[["_","Q"],\n ["Q","_"]]',
    ],
    "spiral_matrix": ["3 9 5 -6", "[3, 9, 5, -6]", "(3, 9)", "3, 9, 5"],
    "binary_matrix": ["0 1\n1 2", "[[0, 1], [1, 2]]"],
    "string_insertion": ["EEBCEDEAEADC", "['E', 'E', 'B']"],
    "polynomial_multiplication": [
        "189*x**5 + 1638*x**4 + 1281*x**3",
        "-84912*x**7 - z*y**2*12/7 + 0.5",
        "3*x*(x + 1)*(y - 2)",
        "(x**2 + 1)**3",
    ],
    "simple_integration": ["-9*x**8/10 + 3*x**4/2 + C", "X**(3/2)*2/3 + c", "-.5*x**-2 + C1", "x"],
    "intermediate_integration": [
        "2*(-10*x - 10)**(3/2)/3 + C",
        "3*Integral(x**3*cos(3*x), x) + C",
        "E**(7*x**2 - 3*x + 5)/2 + K",
        "exp(x)*sin(x)/2 + exp(-x**2/2 + 3) + C",
        "x*asin(3*x) + sqrt(1 - 9*x**2)/3 + log(abs(x)) + ln(Abs(x + 1)) + pi",
        "-cos(3*x - 10)**3/3 + C",
    ],
    "number_sorting": ["['-69', '-13', '1.5']", "[-69, -13, 1.5]", '["1", "2"]', "-69, -13"],
    "bitwise_arithmetic": ["-0x3d2d", "15661", "0b11", "0x176b9e643680"],
    "coin_flip": ["15/64", "0.234375", "3.051757812e-05", "1,000"],
    "codeio": [
        '{"root": [1.5e-7, null, true], "s": "eval(__import__(\\"os\\"))"}',
        "[[2, 3]]",
        "7",
    ],
    "polynomial_equations": ["-0.7757, 0.0, 1.9717", "", '""', "x = 1.5"],
    "advanced_geometry": ["(7.765, -7.882)", "16.91°", "2.5"],
    "propositional_logic": ["(P ∧ ¬Q) → (R ↔ S)", "P"],
    "rubiks_cube": ["U B' R2 F\nD'", "U U"],
    "gsm_symbolic": ["18", "$18.50", "\\$18", "75%", "18 dollars"],
    "simple_equations": ["61", "h = 61"],
    "basic_arithmetic": ["-131073014"],
    "bf": ["pitch"],
    "decimal_arithmetic": ["-1.25e3"],
}

CALLS = [
    "__import__('os').system('touch F')",
    "open('F','w')",
    "().__class__.__base__.__subclasses__()",
    "[x for x in ().__class__.__mro__]",
    "(lambda: open('F','w'))()",
    "(f := open)('F')",
    "exec('1')",
    "eval('1')",
    "print(1)",
    "exit()",
    "S('1')",
    "N(1)",
    "lambdify(x, 'x')(1)",
    "x.diff(x)",
    "f'{open(1)}'",
    "sqrt.__class__",
    "sqrt(__import__('os'))",
    "sqrt(*[1])",
    "sqrt(x=1)",
    "ｅｖａｌ('1')",
    "𝐨𝐩𝐞𝐧(1)",
    "a\u2028open(1)",
    "[0]*999999999",
    "'a'*999999999",
    "'%999999999d'%1",
    "[[0]]*9",
    "{1: open}",
    "`id`",
    "answer",
    "oracle_answer",
    "entry",
]
# sizes, for what reads arithmetic
BOMBS = [
    "9**9**9**9",
    "(9**99)**99",
    "9**(10**10 + x - x)",
    "9**(99*99*99*99)",
    "(x + 1)**999",
    "x**999999999",
    "9**-(9**9)",
    "1e999999999",
    "1E999999999",
    "1.e-999999999",
    "9999999999999999999*3",
    "99999!",
    "1_000",
    "0x10",
    "1j",
    "True",
    "(" * 100_000 + "1",
    "(" * 100 + "1" + ")" * 100,
    "-" * 500 + "(" * 30,
    "1+" * 500_000 + "1",
    "a" * 599 + "!",
]


@pytest.mark.parametrize("task", answer_forms.FORMS)
def test_honest_spellings_pass(task):
    assert [text for text in HONEST[task] if not answer_forms.is_harmless(task, text)] == []


@pytest.mark.parametrize("task", answer_forms.EVALUATING)
def test_no_call_no_attribute_and_no_large_number_passes(task):
    began = time.monotonic()
    assert [text for text in CALLS if answer_forms.is_harmless(task, text)] == []
    if isinstance(answer_forms.EVALUATING[task], answer_forms.Expression):
        assert [text for text in BOMBS if answer_forms.is_harmless(task, text)] == []
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("task", sorted(set(answer_forms.READING) - {"codeio"}))
def test_what_is_only_read_could_do_no_harm_evaluated(task):
    words = ("answer", "entry")  # which a scorer that only reads may see
    assert [text for text in CALLS if answer_forms.is_harmless(task, text)] in ([], list(words))


def test_exponents_repetitions_and_lengths_are_bounded_where_answers_are_read():
    assert not answer_forms.is_harmless("coin_flip", "1e999999999")
    assert not answer_forms.is_harmless("rubiks_cube", "U999999999")
    assert not answer_forms.is_harmless("codeio", "[" * 5_000)
    assert not answer_forms.is_harmless("leg_counting", "1" * 10_001)
    assert answer_forms.is_harmless("leg_counting", "__import__('os')")  # its scorer compares


def test_powers_and_functions_are_for_the_tasks_that_need_them():
    assert not answer_forms.is_harmless("countdown", "2**3")
    assert not answer_forms.is_harmless("countdown", "sqrt(4)")
    assert not answer_forms.is_harmless("countdown", "x + 1")
    assert not answer_forms.is_harmless("polynomial_multiplication", "exp(x)")


# --- a release that nobody looked at ---------------------------------------------------------

SCORERS = {
    "eval": "def score(answer):\n    return eval(answer)",
    "exec": "score = exec",
    "compile": "def score(answer):\n    return compile(answer, '', 'eval')",
    "literal_eval": "import types\n\nscore = lambda tools: tools.literal_eval",
    "sympy": "import sympy as s\n\ndef score(answer):\n    return s.simplify(answer)",
    "subprocess": "def score(answer):\n    from subprocess import run",
    "import_module": "import importlib\n\nscore = importlib.import_module",
    "Fraction": "import fractions\n\ndef score(answer):\n    return fractions.Fraction(answer)",
}


@pytest.fixture
def open_newer(tmp_path, monkeypatch):
    """Opens the task `invented` of a package with these two modules."""

    def open_task(task: str, helper: str = ""):
        name = f"newer{time.monotonic_ns()}"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("from .task import Task")
        (folder / "task.py").write_text(f"{task}\n\nclass Task:\n    pass\n")
        (folder / "helper.py").write_text(helper)
        monkeypatch.syspath_prepend(tmp_path)
        dataset = importlib.import_module(name).Task
        factory = types.SimpleNamespace(
            create_dataset=lambda task, **settings: dataset(), DATASETS={"invented": dataset}
        )
        monkeypatch.setattr(tasks, "_factory", lambda *_: factory)
        tasks._scorer.cache_clear()
        return tasks.open_task("data.source", "invented", 0, 10)

    yield open_task
    tasks._scorer.cache_clear()


@pytest.mark.parametrize("name", SCORERS)
def test_a_task_that_evaluates_and_has_no_rule_is_refused_by_name(name, open_newer):
    """Also where what evaluates stands in another module of the package, loaded or not."""
    refused = rf"config.data.source = 'gym:invented': its scorer evaluates text \(.*{name}.*\) and"
    with pytest.raises(ConfigError, match=refused):
        open_newer(SCORERS[name])
    for task in (
        "from .helper import score",
        "from . import helper",
        "def f(): from . import helper",
    ):
        with pytest.raises(ConfigError, match=refused):
            open_newer(task, SCORERS[name])
    with pytest.raises(ConfigError, match="evaluates text"):  # the worker does not ask it either
        tasks.gym_score("invented", "{}", "1")


def test_a_task_that_compares_is_opened(open_newer):
    task = "import json, re\nfrom .helper import f\n\nPATTERN = re.compile('a')"
    assert open_newer(task, "def f(a): return json.loads(a)") is not None


def test_a_task_without_source_is_refused(open_newer, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "__file__", "gone.so")
    dataset = type("Task", (), {"__module__": __name__})()
    answer_forms._read_module.cache_clear()
    assert "can't be read" in tasks.refusal("invented", dataset)


@pytest.mark.parametrize(
    ("answer", "gold", "copied"),
    [
        ("Integral(2*x, x)", "x**2 + C", True),
        ("Integral(f, x)", "Integral(f, x) + C", False),
        ("x**2 + C", "x**2 + C", False),
        ("(x + 1)*(x - 1)", "x**2 - 1", True),
        ("x**2-1", "x**2 - 1", False),
    ],
)
def test_the_questions_own_expression_is_no_answer(answer, gold, copied):
    item = {"question": "Calculate the following: (x + 1)*(x - 1)", "answer": gold}
    assert tasks.is_copied(answer, item) is copied
