"""Switch off each rule of the verifier, one after another, and count the verdicts that it decides.

    python tests/verifier/ablation.py DATA/*.json* > rules.tsv    (some minutes)

A rule is a condition or a pattern of `dapo_jax.extras.math`: off, it never holds or matches.
Only pairs on which it held at all are decided again. The pairs are the project's own lists and,
of problem files, each answer with near misses. A row: right verdicts lost, wrong ones of pairs
that are different, pairs on which the rule held, place, source. Exit code 1 if a pair of the lists
is decided wrongly with all rules on.
"""

import ast
import importlib.abc
import importlib.machinery
import json
import pathlib
import re
import signal
import sys
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
PACKAGE = "dapo_jax.extras.math."
CHANGES = ((r"\d", "3"), (r"\+", "-"), (r"\(", "["), (r"\)", "]"), (",", ";"), ("[a-z]$", "w"))
MAX_PROBLEMS = 700
MAX_TRIED = 250  # pairs on which a rule held
SECONDS = 2.0  # of a verdict without a rule
RULES: list[str] = []  # place and source
off = -1
held: set[int] = set()


def rule(number: int, value):
    """Return the condition's value; False if the rule is off."""
    if not value:
        return value
    held.add(number)
    return False if number == off else value


class Pattern:
    """A regular expression that matches nothing if its rule is off."""

    def __init__(self, number: int, pattern: re.Pattern):
        self._number, self._pattern = number, pattern

    def __getattr__(self, name: str):
        function = getattr(self._pattern, name)
        if name not in ("fullmatch", "match", "search", "sub", "split", "findall", "finditer"):
            return function

        def call(*arguments, **options):
            text = arguments[1] if name == "sub" else arguments[0]
            if self._number == off:
                return {"sub": text, "split": [text], "finditer": iter(())}.get(
                    name, [] if name == "findall" else None
                )
            if self._number not in held and self._pattern.search(text):
                held.add(self._number)
            return function(*arguments, **options)

        return call


class Switches(ast.NodeTransformer):
    """Put a switch around each condition and pattern of a module."""

    def __init__(self, name: str):
        self._module = name.removeprefix(PACKAGE)

    def _switch(self, node: ast.expr, function: str = "_rule") -> ast.expr:
        RULES.append(f"{self._module}:{node.lineno}\t{ast.unparse(node)[:110]}")
        arguments = [ast.Constant(len(RULES) - 1), node]
        return ast.copy_location(ast.Call(ast.Name(function, ast.Load()), arguments, []), node)

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        if not isinstance(node.test, ast.BoolOp):
            node.test = self._switch(node.test)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        self.generic_visit(node)
        if not isinstance(node.test, ast.BoolOp):
            node.test = self._switch(node.test)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.BoolOp:
        self.generic_visit(node)
        node.values = list(map(self._switch, node.values))
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        is_pattern = ast.unparse(node.func) == "re.compile"
        return self._switch(node, "_Pattern") if is_pattern else node


class Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, **_options):
        tree = Switches(self.name).visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), path, "exec")

    def get_code(self, fullname):  # no cached bytes
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module):
        vars(module).update(_rule=rule, _Pattern=Pattern)
        super().exec_module(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not name.startswith(PACKAGE):
            return None
        file = f"{path[0]}/{name.removeprefix(PACKAGE)}.py"
        return importlib.machinery.ModuleSpec(name, Loader(name, file), origin=file)


class Pair(NamedTuple):
    """A response, its gold answer and problem, and the verdict that is right."""

    response: str
    gold: str
    problem: str
    is_right: bool
    unfinished: str = "wrong"  # a setting


def own_pairs() -> list[Pair]:
    """Return the pairs of the project's lists."""
    pairs = []
    for name in ("verifier_cases.jsonl", "verifier_readings.jsonl"):
        for row in map(json.loads, (HERE / name).read_text().splitlines()):
            pairs.append(Pair(row["prediction"], row["answer"], "", row["equivalent"], "right"))
    for line in (HERE / "causes.txt").read_text().splitlines():
        if line[:2] in ("+ ", "- "):
            sign, answer, gold, *problem = line.replace("⏎", "\n").split(" ;; ")
            answer = answer[4:] if answer.startswith("RAW:") else rf"\boxed{{{answer}}}"
            pairs.append(Pair(answer, gold.strip(), "".join(problem), sign == "+"))
    for name, is_right in (("finished_answers.jsonl", True), ("unfinished_answers.jsonl", False)):
        for row in map(json.loads, (HERE / name).read_text().splitlines()):
            answers = (rf"\boxed{{{answer} }}" for answer in row["answers"])
            pairs += [Pair(text, row["gold"], row["problem"], is_right) for text in answers]
    return pairs


def near_misses(gold: str) -> set[str]:
    """Return texts that differ a little from an answer."""
    changed = {re.sub(old, new, gold, count=1) for old, new in CHANGES}
    return changed | {f"-{gold}", f"{gold}1", f"2{gold}", f"{gold}+1"} - {gold}


def published_pairs(paths: list[str]) -> list[Pair]:
    """Return answers of problem files beside solutions, near misses and formulas."""
    from dapo_jax.data.sources import read_problems
    from dapo_jax.extras.math.problem import FORMULA

    pairs = []
    for path in paths:
        for problem in read_problems((path,), path, 10).problems[:MAX_PROBLEMS]:
            formulas = {max(pair) for pair in FORMULA.findall(problem.text)}
            for text in sorted({problem.answer, *formulas} | near_misses(problem.answer)):
                pairs.append(Pair(rf"\boxed{{{text}}}", problem.answer, problem.text, False))
            pairs.append(Pair(problem.solution, problem.answer, problem.text, False))
    return pairs


def main() -> int:
    global off
    sys.meta_path.insert(0, Finder())
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]
    from dapo_jax.extras.math.verifier import Settings, make_verifier

    verifiers = {
        choice: make_verifier(Settings("math", unfinished=choice)) for choice in ("right", "wrong")
    }
    modules = [module for name, module in sys.modules.items() if name.startswith(PACKAGE)]
    caches = {f for m in modules for f in vars(m).values() if hasattr(f, "cache_clear")}

    def late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)

    def decide(pair: Pair) -> bool | None:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            return verifiers[pair.unfinished](*pair[:3]).correct
        except Exception:
            return None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    own = own_pairs()
    pairs = own + published_pairs(sys.argv[1:])
    users: dict[int, list[int]] = {}
    wrong = 0
    for i, pair in enumerate(pairs):
        held.clear()
        for cache in caches:
            cache.cache_clear()
        verdict = decide(pair)
        if i < len(own) and verdict is not pair.is_right:
            wrong += 1
            print("wrong", *pair, sep="\t", file=sys.stderr)
        pairs[i] = pair._replace(is_right=bool(verdict))
        for number in held:
            users.setdefault(number, []).append(i)
    print(f"{len(own)} own pairs, {len(pairs)} in all, {len(RULES)} rules", file=sys.stderr)
    for off, text in enumerate(RULES):
        tried, changed = users.get(off, []), [0, 0]
        for cache in caches:
            cache.cache_clear()
        for i in tried[:: max(1, len(tried) // MAX_TRIED)]:
            changed[pairs[i].is_right] += bool(decide(pairs[i])) is not pairs[i].is_right
            if sum(changed) > 3:
                break
        print(*changed[::-1], len(tried), text, sep="\t", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
