"""Script in the sandbox that calls a solution's functions, or runs tests that call them elsewhere.

    python driver.py serve   replies to the calls on standard input, a JSON line each
    python driver.py test    runs /code/tests; a proxy sends the calls of the solution's names
                                  to standard output, and standard error has a line per test: 1 or 0

The solution and its tests are in different sandboxes, and only plain data pass between them: the
solution can't read a test, replace what a test uses, or return an object that equals everything.
It is not imported by the library, and imports nothing of it.
"""

import builtins
import importlib.machinery
import json
import math
import os
import sys
import types

SOLUTION, TESTS = "/code/program", "/code/tests"
MAX_LINE = 1 << 20  # characters of a call or a reply
# A test's iteration would end early, and pass.
NEVER_RAISED = ("StopIteration", "StopAsyncIteration")


def encode(value, other):
    """Return plain data as JSON values, tagging types that JSON lacks; else `other(value)`."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {"dict": [[encode(k, other), encode(v, other)] for k, v in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    kinds = {"": list, "tuple": tuple, "set": set | frozenset, "bytes": bytes}
    for tag, kind in kinds.items():
        if isinstance(value, kind):
            items = [encode(item, other) for item in value]
            return {tag: items} if tag else items
    return other(value)


def decode(value, other):
    """Invert `encode`; `other` makes the object of what was no plain data."""
    if isinstance(value, list):
        return [decode(item, other) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    kinds = {"dict": dict, "tuple": tuple, "set": set, "bytes": bytes}
    kinds["complex"] = lambda parts: complex(*parts)
    return kinds[tag](decode(content, other)) if tag in kinds else other(content)


def take_channel():
    """Return private files of standard input, output and error, and disconnect those."""
    files = [os.fdopen(os.dup(number), mode) for number, mode in enumerate(("r", "w", "w"))]
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    return files


# --- the solution's side --------------------------------------------------------------------


class Server:
    """The solution: calls its functions by name and its objects by number."""

    def __init__(self):
        self.module = types.ModuleType("solution")
        sys.modules["solution"] = self.module
        importlib.machinery.SourceFileLoader("solution", SOLUTION).exec_module(self.module)
        self.objects = []

    def keep(self, value):
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def find(self, target):
        """Return an object by number, or a function, also as method of a class `Solution`."""
        if isinstance(target, int):
            return self.objects[target]
        if not hasattr(self.module, target) and hasattr(self.module, "Solution"):
            return getattr(self.module.Solution(), target)
        return getattr(self.module, target)

    def answer(self, line):
        """Return the JSON of the reply to `[target, attribute, arguments, named arguments]`."""
        try:
            target, attribute, arguments, named = json.loads(line)
            value = self.find(target)
            if attribute is not None:
                value = getattr(value, attribute)
            if arguments is not None:
                arguments = [decode(item, self.find) for item in arguments]
                named = {name: decode(item, self.find) for name, item in named.items()}
                value = value(*arguments, **named)
            return json.dumps({"value": encode(value, self.keep)})
        except Exception as error:
            return json.dumps({"raised": type(error).__name__, "text": str(error)[:1000]})


def serve():
    """Reply to the calls on standard input."""
    requests, replies, _ = take_channel()
    server = Server()
    for line in requests:
        replies.write(server.answer(line) + "\n")
        replies.flush()


# --- the tests' side ------------------------------------------------------------------------


class Remote:
    """Function or object of the solution, or an attribute of one."""

    def __init__(self, call, target, attribute=None):
        self._parts = call, target, attribute

    def __call__(self, *arguments, **named):
        call, target, attribute = self._parts
        items = [encode(item, reference) for item in arguments]
        return call(target, attribute, items, {k: encode(v, reference) for k, v in named.items()})

    def __getattr__(self, name):
        call, target, attribute = self._parts
        if name.startswith("_") or attribute is not None:
            raise AttributeError(name)
        value = call(target, name, None, {})
        return Remote(call, target, name) if isinstance(value, Remote) else value


def reference(value):
    """Return the JSON of an argument that came from the solution. Raises TypeError for others."""
    if isinstance(value, Remote) and value._parts[2] is None:
        return {"object": value._parts[1]}
    raise TypeError(f"{type(value).__name__} is no plain data, so it can't reach the solution")


def make_call(requests, replies):
    """Return the function that sends a call and returns its value, or raises its error."""

    def call(*request):
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        line = replies.readline(MAX_LINE)
        if not line.endswith("\n"):
            raise RuntimeError("the solution ended, or replied too much")
        reply = json.loads(line)
        if "raised" in reply:
            kind = getattr(builtins, str(reply["raised"]), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                if kind.__name__ not in NEVER_RAISED:
                    raise kind(reply["text"])
            raise RuntimeError(reply["raised"], reply["text"])
        return decode(reply["value"], lambda number: Remote(call, number))

    return call


def is_same(value, expected):
    """Test a value for equality with JSON; tuples are lists, and floats agree to 9 digits."""
    if isinstance(expected, dict) and isinstance(value, dict):
        texts = {key if isinstance(key, str) else json.dumps(key): v for key, v in value.items()}
        same = len(texts) == len(value) and texts.keys() == expected.keys()
        return same and all(is_same(texts[key], expected[key]) for key in expected)
    if isinstance(expected, list) and isinstance(value, list | tuple):
        return len(value) == len(expected) and all(map(is_same, value, expected))
    if isinstance(expected, float) and (type(value) is float or type(value) is int):
        return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
    return type(value) is type(expected) and value == expected


class Names(dict):
    """Built-in names of tests; those that Python lacks are the solution's."""

    def __init__(self, call):
        super().__init__(vars(builtins), __returns__=self._returns)
        self._call = call

    def _returns(self, function, pair):
        """Test what a function returns; `pair` is the JSON of its arguments and a value."""
        arguments, expected = json.loads(pair)
        return is_same(Remote(self._call, function)(*arguments), expected)

    def __missing__(self, name):
        return Remote(self._call, name)


def run_tests():
    """Run each test, and its functions `test_...`; write whether it passed."""
    replies, requests, results = take_channel()
    with open(TESTS) as file:
        tests = json.load(file)
    call = make_call(requests, replies)
    solution = types.ModuleType("solution")
    solution.__getattr__ = lambda name: Remote(call, name)
    sys.modules["solution"] = solution
    space: dict = {"__builtins__": Names(call), "__name__": "tests"}
    for text in tests:
        before = set(space)
        try:
            exec(text, space)
            for name in [name for name in space if name not in before]:
                if name.startswith("test_"):
                    space[name]()
            passed = True
        except BaseException:
            passed = False
        results.write(f"{passed:d}\n")
        results.flush()


if __name__ == "__main__":
    {"serve": serve, "test": run_tests}[sys.argv[1]]()
