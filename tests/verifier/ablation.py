"""Switch off each rule of the verifier, one after another, and count the verdicts that it decides.

    python tests/verifier/ablation.py DATA/*.json* > rules.tsv    (some minutes)

A rule is a condition or a pattern of `dapo_jax.extras.math`: off, it never holds or matches.
Only pairs on which it held at all are decided again. The pairs are the project's own lists and,
of problem files, answers with near misses. A row: right verdicts lost, other verdicts that became
right, pairs on which the rule held, place, source.
"""

import ast
import builtins
import importlib.machinery
import re
import signal
import sys
import tempfile

PACKAGE = "dapo_jax.extras.math."
MAX_TRIED = 100  # pairs on which a rule held
SECONDS = 2.0  # of a verdict without a rule
CALLS = set("fullmatch match search sub subn split findall finditer".split())
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

    def __init__(self, place: str, pattern: re.Pattern):
        self._number, self._pattern = len(RULES), pattern
        self._never = re.compile("(?!)" if isinstance(pattern.pattern, str) else b"(?!)")
        RULES.append(f"{place}\t{pattern.pattern!s:.110}")

    def __getattr__(self, name: str):
        if name not in CALLS:
            return getattr(self._pattern, name)

        def call(*arguments, **options):
            text = arguments[name in ("sub", "subn")]
            if self._number not in held and self._pattern.search(text):
                held.add(self._number)
            pattern = self._never if self._number == off else self._pattern
            return getattr(pattern, name)(*arguments, **options)

        return call


class Switches(ast.NodeTransformer):
    """Put a switch around each condition and pattern of a module."""

    def __init__(self, name: str):
        self._module = name.removeprefix(PACKAGE)

    def _switch(self, node: ast.expr) -> ast.expr:
        RULES.append(f"{self._module}:{node.lineno}\t{ast.unparse(node)[:110]}")
        arguments = [ast.Constant(len(RULES) - 1), node]
        return ast.copy_location(ast.Call(ast.Name("_rule", ast.Load()), arguments, []), node)

    def visit_If(self, node: ast.If | ast.IfExp) -> ast.If | ast.IfExp:
        self.generic_visit(node)
        if not isinstance(node.test, ast.BoolOp):
            node.test = self._switch(node.test)
        return node

    visit_IfExp = visit_If

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.BoolOp:
        self.generic_visit(node)
        node.values = list(map(self._switch, node.values))
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.func) != "re.compile":
            return node
        arguments = [ast.Constant(f"{self._module}:{node.lineno}"), node]
        return ast.copy_location(ast.Call(ast.Name("_Pattern", ast.Load()), arguments, []), node)


def compile_with_switches(loader, data, path, **_options):
    """Compile a module of any package, one of the verifier with its switches."""
    tree = ast.parse(data)
    if loader.name.startswith(PACKAGE):
        tree = ast.fix_missing_locations(Switches(loader.name).visit(tree))
    return compile(tree, path, "exec")


def main() -> None:
    global off
    vars(builtins).update(_rule=rule, _Pattern=Pattern)
    sys.pycache_prefix, sys.dont_write_bytecode = tempfile.mkdtemp(), True  # no cached bytes
    importlib.machinery.SourceFileLoader.source_to_code = compile_with_switches
    from pairs import Pair, own_pairs, published_pairs  # beside this script

    from dapo_jax.extras.math.verifier import Settings, make_verifier

    verifiers = {
        choice: make_verifier(Settings("math", unfinished=choice)) for choice in ("right", "wrong")
    }
    modules = [module for name, module in sys.modules.items() if name.startswith(PACKAGE)]
    caches = {f for m in modules for f in vars(m).values() if hasattr(f, "cache_clear")}
    signal.signal(signal.SIGALRM, signal.default_int_handler)

    def decide(pair: Pair) -> bool | None:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            return verifiers[pair.unfinished](*pair[:3]).correct
        except (Exception, KeyboardInterrupt):
            return None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    pairs = own_pairs() + [pair for path in sys.argv[1:] for pair in published_pairs(path)]
    users: dict[int, list[int]] = {}
    for i, pair in enumerate(pairs):
        held.clear()
        for cache in caches:
            cache.cache_clear()
        pairs[i] = pair._replace(is_right=bool(decide(pair)))
        for number in held:
            users.setdefault(number, []).append(i)
    for off, text in enumerate([*RULES]):
        tried, changed = users.get(off, []), [0, 0]
        for cache in caches:
            cache.cache_clear()
        for i in tried[:: max(1, len(tried) // MAX_TRIED)]:
            changed[pairs[i].is_right] += bool(decide(pairs[i])) is not pairs[i].is_right
            if sum(changed) > 3:
                break
        print(*changed[::-1], len(tried), text, sep="\t", flush=True)
    print(f"{len(pairs)} pairs, {len(RULES)} rules", file=sys.stderr)


if __name__ == "__main__":
    main()
