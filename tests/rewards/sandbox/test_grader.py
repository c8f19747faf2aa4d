# ruff: noqa: E501  (programs in tables, one to a line)
"""Tests and programs in two processes: wrong programs pass no test by any trick, and right ones pass whatever they return."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oncurve.rewards.sandbox.sandbox import Limits, Sandbox
from oncurve.rewards.verifiers.code import program_in, read_tests
from oncurve.tasks.data.public_datasets import humaneval, mbpp
from tests.rewards.sandbox.levels import PATIENT, QUICK, SANDBOXES


def verdicts(sandbox: Sandbox, program: str, *tests: str, limits: Limits = PATIENT, **job: Any) -> list[bool]:
    outcome = sandbox.run({"kind": "tests", "program": program, "tests": list(tests), **job}, limits)
    return [bool(verdict.get("passed")) for verdict in outcome["verdicts"]]


EQUALS = "class A:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
RETURNS_A = "def f(x): return A()"
SCAN = """
import gc, sys, types
def strings():
    seen, todo = set(), [sys._getframe(), *gc.get_objects(), *gc.get_objects(2)]
    while todo and len(seen) < 300000:
        value = todo.pop()
        if id(value) in seen: continue
        seen.add(id(value))
        if isinstance(value, (str, bytes)): yield value if isinstance(value, str) else value.decode('latin-1')
        elif isinstance(value, types.FrameType): todo += [value.f_locals, value.f_globals, value.f_back]
        else:
            try: todo += gc.get_referents(value)
            except Exception: pass
"""
MEMORY = """
def memory():
    for line in open('/proc/self/maps'):
        if 'rw' in line:
            a, b = (int(n, 16) for n in line.split()[0].split('-'))
            yield ctypes.string_at(a, b - a)
"""
FIND = r"""
import re
def find(texts):
    for text in texts:
        match = re.search(r'f\(1\) == 4242(\d\d)', text)
        if match: return 424200 + int(match[1])
    return 0
"""

# Each defines f, whose tests are `f(1) == 424242` and `f(2) == 5`; none of them solves anything.
WRONG_PROGRAMS = {
    # ends the process, or raises what tests might take for an end
    "ends the process": "import os\ndef f(x): os._exit(0)",
    "exits when loaded": "raise SystemExit(0)",
    "exits when called": "def f(x): raise SystemExit(0)",
    "interrupts": "def f(x): raise KeyboardInterrupt",
    "stops an iteration": "def f(x): raise StopIteration(424242)",
    "closes a generator": "def f(x): raise GeneratorExit",
    "kills itself": "import os\ndef f(x): os.kill(os.getpid(), 9)",
    "recurses": "def f(x): return f(x)",
    "hangs": "def f(x):\n    while True: pass",
    "prints for ever": "def f(x):\n    while True: print('x' * 9999)",
    # objects that compare as they like
    "equals everything": EQUALS + RETURNS_A,
    "an int that equals everything": "class A(int):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef f(x): return A(0)",
    "a str that equals everything": "class A(str):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef f(x): return A()",
    "a list that equals everything": "class A(list):\n    def __eq__(self, o): return True\ndef f(x): return A()",
    "a tuple that equals everything": "class A(tuple):\n    def __eq__(self, o): return True\ndef f(x): return A()",
    "a dict that equals everything": "class A(dict):\n    def __eq__(self, o): return True\ndef f(x): return A()",
    "a fraction that equals everything": (
        "from fractions import Fraction\nclass A(Fraction):\n    def __eq__(self, o): return True\n    __hash__ = None\n"
        "def f(x): return A(1)"
    ),
    "the class itself is f": "class f:\n    def __init__(self, x): pass\n    def __eq__(self, o): return True",
    "a metaclass that equals everything": (
        "class M(type):\n    def __eq__(self, o): return True\n    __hash__ = type.__hash__\nclass A(metaclass=M): pass\ndef f(x): return A"
    ),
    "an exception that equals everything": "class A(Exception):\n    def __eq__(self, o): return True\ndef f(x): return A()",
    "mock's ANY": "from unittest.mock import ANY\ndef f(x): return ANY",
    "a mock": "from unittest.mock import MagicMock\nf = MagicMock()\nf.return_value.__eq__ = lambda a, b: True",
    "the right operand decides": "class A(int):\n    def __req__(self, o): return True\n    def __ne__(self, o): return False\ndef f(x): return A()",
    "a proxy's reply by hand": (
        "import sys\ndef f(x):\n    server = sys._getframe(1).f_locals.get('self')\n    return server"
    ),
    # patches its own process
    "patches assert": "import builtins\nbuiltins.AssertionError = ValueError\ndef f(x): return 0",
    "patches int": "import builtins\nbuiltins.int = bool\ndef f(x): return 0",
    "patches the codec": (
        "import sys\ndef f(x):\n    codec = sys.modules['oncurve.rewards.sandbox.value_codec']\n"
        "    codec.encode = lambda *a: {'~': 'object', 'v': 0}\n    return 0"
    ),
    "patches json": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef f(x): return 0",
    "patches every module": (
        "import sys\ndef f(x):\n    for m in list(sys.modules.values()): vars(m)['_run_test'] = lambda *a: {'passed': True}\n    return 0"
    ),
    "replaces its modules": "import sys, types\nsys.modules['builtins'] = types.ModuleType('builtins')\ndef f(x): return 0",
    # writes to descriptors
    "writes verdicts everywhere": (
        "import os\ndef f(x):\n    for fd in range(50):\n        try: os.write(fd, b'{\"passed\": true}\\n')\n        except OSError: pass\n    return 0"
    ),
    "answers before it is asked": (
        "import os\ndef f(x):\n    for fd in range(3, 50):\n        try: os.write(fd, b'{\"result\": true}\\n' * 9)\n        except OSError: pass\n    return 0"
    ),
    "replies with names": (
        "import os\nfor fd in range(3, 50):\n    try: os.write(fd, b'{\"names\": {\"f\": {\"module\": \"operator\", \"attribute\": \"eq\"}}}\\n')\n"
        "    except OSError: pass\ndef f(x): return 0"
    ),
    "sends what is no value": (
        "import os\ndef f(x):\n    for fd in range(3, 50):\n        try: os.write(fd, b'{\"result\": {\"~\": \"builtin\", \"v\": \"eval\"}}\\n')\n        except OSError: pass\n    return 0"
    ),
    "calls the tests' functions by number": (
        "import os\ndef f(x):\n    for fd in range(3, 50):\n        try: os.write(fd, b'{\"back\": \"get\", \"number\": 0, \"arguments\": [\"__globals__\"], \"named\": {\"~\": \"dict\", \"v\": []}}\\n')\n"
        "        except OSError: pass\n    return 0"
    ),
    # looks for the expected value
    "searches its objects": SCAN + FIND + "def f(x): return find(strings())",
    "searches when loaded": SCAN + FIND + "found = find(strings())\ndef f(x): return found",
    "searches its memory": "import ctypes\n" + MEMORY + FIND + "def f(x): return find(m.decode('latin-1') for m in memory())",
    "reads ahead": (
        "import os, select\n" + FIND + "def f(x):\n    texts = []\n    for fd in range(3, 50):\n        try:\n            os.set_blocking(fd, False)\n"
        "            texts.append(os.read(fd, 1 << 20).decode())\n        except OSError: pass\n    return find(texts)"
    ),
    "asks the traceback": (
        FIND + "import sys\ndef f(x):\n    frame, texts = sys._getframe(), []\n    while frame: texts.append(str(frame.f_locals)); frame = frame.f_back\n    return find(texts)"
    ),
    "looks at other processes": (
        FIND + "import os\ndef f(x):\n    texts = []\n    for pid in (os.getppid(), 1, os.getpid() + 1):\n        for name in ('mem', 'environ', 'cmdline'):\n"
        "            try: texts.append(open(f'/proc/{pid}/{name}', 'rb').read(1 << 20).decode('latin-1'))\n            except OSError: pass\n    return find(texts)"
    ),
    "waits in another thread": (
        SCAN + FIND + "import threading\nfound = []\ndef watch():\n    while True: found.append(find(strings()))\n"
        "threading.Thread(target=watch, daemon=True).start()\ndef f(x): return max(found, default=0)"
    ),
    "defines the tests' names": "f = check = test = candidate = lambda *a: 0\ntests = ['assert True']",
    "defines dunders": "__builtins__ = {'AssertionError': ValueError}\n__name__ = 'tests'\ndef f(x): return 0",
    # values that break the channel
    "returns an endless nest": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "returns a deep nest": "def f(x):\n    a = 0\n    for _ in range(10**5): a = [a]\n    return a",
    "returns a huge text": "def f(x): return 'x' * (1 << 27)",
    "returns a lone surrogate": "def f(x): return '\\ud800'",
    "returns nan": "def f(x): return float('nan')",
    "returns a function": "def f(x): return lambda *a: True",
    "returns a generator": "def f(x): yield 424242",
    "returns a coroutine": "async def f(x): return 424242",
    "raises a liar": "class E(BaseException):\n    def __str__(self): raise KeyError\ndef f(x): raise E",
    "raises an assertion": "def f(x): raise AssertionError",
    "returns NotImplemented": "def f(x): return NotImplemented",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("program", list(WRONG_PROGRAMS))
def test_no_test_is_passed_without_being_solved(sandbox: Sandbox, program: str) -> None:
    assert True not in verdicts(sandbox, WRONG_PROGRAMS[program], "assert f(1) == 424242", "assert f(2) == 5", limits=QUICK)
    assert verdicts(sandbox, "def f(x): return x", "assert f(1) == 1") == [True]  # the next program is graded as ever


def test_a_few_wrong_programs_at_every_run(sandbox: Sandbox) -> None:
    """The classes of attacks that once succeeded: reading the tests, objects that equal everything, leaving early."""
    for name in ("searches its objects", "asks the traceback", "equals everything", "ends the process"):
        assert True not in verdicts(sandbox, WRONG_PROGRAMS[name], "assert f(1) == 424242", "assert f(2) == 5", limits=QUICK), (
            name
        )


# (program, tests): the program replaces what the tests use around it.
SHADOWS = {
    "abs": ("def f(x): return 0\ndef abs(x): return 0", "assert abs(f(1) - 3.14) < 0.01"),
    "set": ("def f(x): return 1\ndef set(x): return 1", "assert set(f(1)) == set([1, 2])"),
    "range": ("def f(x): return 0\ndef range(*a): return []", "for i in range(3):\n    assert f(i) == i + 7"),
    "all": ("def f(x): return 0\nall = lambda x: True", "assert all(f(i) == 7 for i in range(3))"),
    "len": ("def f(x): return []\ndef len(x): return 3", "assert len(f(1)) == 3"),
    "sorted": ("def f(x): return []\ndef sorted(x): return 0", "assert sorted(f(1)) == sorted([1, 2])"),
    "isinstance": ("def f(x): return 0\nisinstance = lambda *a: True", "assert isinstance(f(1), str)"),
    "AssertionError": ("class AssertionError(Exception): pass\ndef f(x): return 0", "assert f(1) == 3"),
    "int": ("class int:\n    def __new__(cls, *a): return 3\ndef f(x): return 0", "assert int(f(1)) == 3"),
    "str": ("def str(x): return 'ok'\ndef f(x): return 0", "assert str(f(1)) == 'ok'"),
    "round": ("def round(*a): return 3\ndef f(x): return 0", "assert round(f(1), 2) == 3"),
    "a module": ("class math:\n    isclose = lambda *a, **k: True\ndef f(x): return 0", "assert math.isclose(f(1), 3.0)"),
    "a module imported by the tests": ("class math:\n    isclose = lambda *a: True\ndef f(x): return 0", "import math\nassert math.isclose(f(1), 3.0)"),
    "a module's function": ("def isclose(*a, **k): return True\ndef f(x): return 0", "assert isclose(f(1), 3.0)"),
    "a patched module": ("import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0", "assert math.isclose(f(1), 3.0)"),
    "a false module": ("import types\nmath = types.ModuleType('math')\nmath.isclose = lambda *a: True\ndef f(x): return 0", "assert math.isclose(f(1), 3.0)"),
    "a false name of a module": ("import unittest.mock as math\ndef f(x): return math.ANY", "assert math.isclose(f(1), 3.0)"),
    "Counter": ("def Counter(x): return 0\ndef f(x): return 'z'", "assert Counter(f(1)) == Counter('ab')"),
    "the tests' own helper": ("def near(a, b): return True\ndef f(x): return 0", "def near(a, b): return abs(a - b) < 1\nassert near(f(1), 9)"),
    "subtraction": ("class A:\n    def __sub__(self, o): return 0\ndef f(x): return A()", "assert abs(f(1) - 3.14) < 0.01"),
    "subtraction from the right": ("class A:\n    def __rsub__(self, o): return 0\ndef f(x): return A()", "assert abs(3.14 - f(1)) < 0.01"),
    "order": ("class A:\n    def __lt__(self, o): return True\n    def __gt__(self, o): return True\ndef f(x): return A()", "assert 3 < f(1) < 5"),
    "membership": ("class A:\n    def __contains__(self, o): return True\n    def __iter__(self): return iter(())\ndef f(x): return A()", "assert 5 in f(1)"),
    "startswith": ("class A:\n    def startswith(self, o): return True\ndef f(x): return A()", "assert f(1).startswith('abc')"),
    "issubset": ("class A:\n    def issubset(self, o): return True\ndef f(x): return A()", "assert f(1).issubset({1})"),
    "an iterator that ends at once": ("def f(x): raise StopIteration", "assert all(map(f, [1, 2, 3]))\nassert list(map(f, [1])) == []"),
    "a result in a set": ("class A:\n    def __eq__(self, o): return True\n    def __hash__(self): return hash(5)\ndef f(x): return A()", "assert f(1) in {5}"),
    "a result in a list": ("class A:\n    def __eq__(self, o): return True\ndef f(x): return [A()]", "assert f(1) == [5]"),
    "a result in a dict": ("class A(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\ndef f(x): return {'k': A('no')}", "assert f(1) == {'k': 'yes'}"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SHADOWS))
def test_programs_can_t_replace_what_tests_use(name: str) -> None:
    program, test = SHADOWS[name]
    (first, *_) = SANDBOXES.values()
    assert verdicts(first, program, test) == [False]


def test_a_prompt_s_helper_is_the_tests_own(sandbox: Sandbox) -> None:
    """HumanEval/32 checks `poly(coefficients, candidate(coefficients))` with a `poly` that the prompt defines."""
    columns = {
        "prompt_code": "import math\n\ndef poly(xs, x):\n    return sum(c * x ** i for i, c in enumerate(xs))\n\ndef root(xs):\n",
        "entry_point": "root",
        "test_code": "def check(candidate):\n    assert math.fabs(poly([-4, 2], candidate([-4, 2]))) < 1e-6\n",
    }
    tests = read_tests(columns, 10)
    assert tests is not None
    for text, passes in (("    return -xs[0] / xs[1]\n", True), ("    return 0\ndef poly(*a): return 0\n", False)):
        outcome = sandbox.run({"kind": "tests", "program": program_in(text, tests), **tests.job}, PATIENT)
        assert [v["passed"] for v in outcome["verdicts"]] == [passes]


def test_a_function_with_the_name_of_a_builtin(sandbox: Sandbox) -> None:
    """MBPP/126 asks for a function `sum`."""
    program = "def sum(a, b): return a * b"
    assert verdicts(sandbox, program, "assert sum(10, 15) == 150", "assert sum(2, 3) == 6") == [True, True]
    assert verdicts(sandbox, program, "def check(c):\n    assert c(2, 3) == 6\ncheck(sum)", entry_point="sum") == [True]
    shadowed = "def abs(x): return 0\n" + program
    assert verdicts(sandbox, shadowed, "assert abs(sum(2, 3) - 9) < 1", "assert abs(sum(1, 1)) == 1") == [False, True]
    assert verdicts(sandbox, program + "\ndef f(x): return 7", "assert sum([f(1), 1]) == 8") == [True]


# (program, tests): right programs of every shape.
RIGHT_PROGRAMS = {
    "prints to stderr": ("import sys\ndef f(x):\n    print('log', file=sys.stderr)\n    return x", "assert f(1) == 1"),
    "prints": ("def f(x):\n    print('log')\n    return x", "assert f(1) == 1"),
    "warns": ("def f(x): return x is 3", "assert f(4) == False"),
    "a large integer": ("def f(x): return 10 ** x", "assert f(20000) == 10 ** 20000", "assert f(-1) == 0.1"),
    "a large negative integer": ("def f(x): return -x", "assert f(7 ** 9999) == -(7 ** 9999)"),
    "Fraction": ("from fractions import Fraction\ndef f(x): return Fraction(x, 3)", "from fractions import Fraction\nassert f(2) == Fraction(2, 3)", "assert f(3) == 1"),
    "Decimal": ("from decimal import Decimal\ndef f(x): return Decimal(x) / 4", "from decimal import Decimal\nassert f(1) == Decimal('0.25')", "assert str(f(2)) == '0.5'"),
    "complex": ("def f(x): return complex(x, 1)", "assert f(2) == 2 + 1j", "assert abs(f(0)) == 1.0"),
    "infinity": ("def f(x): return float('inf')", "assert f(1) == float('inf')"),
    "bytes": ("def f(x): return bytes([x]), bytearray([x])", "assert f(200) == (b'\\xc8', bytearray([200]))"),
    "nested containers": ("def f(x): return {(x, x): [{x}, frozenset([x])]}", "assert f(1) == {(1, 1): [{1}, frozenset([1])]}"),
    "Counter": ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}", "assert f('aab').most_common(1) == [('a', 2)]"),
    "Counter used by tests": ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == Counter('aba')"),
    "OrderedDict": ("from collections import OrderedDict\ndef f(x): return OrderedDict(a=x)", "assert list(f(1)) == ['a'] and f(2) == {'a': 2}"),
    "defaultdict": ("from collections import defaultdict\ndef f(x):\n    d = defaultdict(list)\n    d[x].append(1)\n    return d", "assert f(2) == {2: [1]} and f(2)[9] == []"),
    "deque": ("from collections import deque\ndef f(x): return deque([x], maxlen=2)", "assert list(f(1)) == [1] and f(1).maxlen == 2"),
    "named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(x): return P(x, 2)\ndef g(p): return isinstance(p, P) and p.a", "assert f(1) == (1, 2) and f(1).b == 2 and g(f(4)) == 4"),
    "dates": ("import datetime\ndef f(y): return datetime.date(y, 2, 3), datetime.timedelta(1)", "import datetime\nassert f(2020) == (datetime.date(2020, 2, 3), datetime.timedelta(days=1))"),
    "range and slice": ("def f(x): return range(x), slice(1, x)", "assert f(3) == (range(3), slice(1, 3))"),
    "None": ("def f(x): pass", "assert f(1) is None"),
    "types": ("def f(x): return type(x)", "assert f(1) is int and f('') is str"),
    "an enum": ("from enum import Enum\nclass C(Enum):\n    RED = 1\ndef f(x): return C.RED", "assert f(1) == C.RED and f(1).name == 'RED' and f(1) is C.RED"),
    "a data class": ("from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int\ndef f(x): return P(x)", "assert f(1) == P(1) and f(1) != P(2) and f(3).a == 3"),
    "own exception": ("class TooLow(ValueError): pass\ndef f(x): raise TooLow('low')", "try:\n    f(1)\n    assert False\nexcept TooLow as e:\n    assert str(e) == 'low'", "try:\n    f(1)\nexcept ValueError:\n    pass"),
    "own exception of two levels": ("class A(Exception): pass\nclass B(A):\n    def __init__(self, code):\n        self.code = code\n    def __str__(self): return 'code %d' % self.code\ndef f(x): raise B(x)", "try:\n    f(7)\n    assert False\nexcept A as e:\n    assert e.code == 7 and str(e) == 'code 7'"),
    "built-in exception": ("def f(x): return {}[x]", "try:\n    f(1)\n    assert False\nexcept KeyError as e:\n    assert e.args == (1,)"),
    "exit": ("import sys\ndef f(x): sys.exit(3)", "try:\n    f(1)\n    assert False\nexcept SystemExit:\n    pass"),
    "length of an object": ("class Bag:\n    def __init__(self, xs): self.xs = xs\n    def __len__(self): return len(self.xs)\n    def __getitem__(self, i): return self.xs[i]", "b = Bag([1, 2])\nassert len(b) == 2 and b[1] == 2 and list(b) == [1, 2]"),
    "a changing object": ("class Stack:\n    def __init__(self): self.xs = []\n    def push(self, x): self.xs.append(x)\n    def pop(self): return self.xs.pop()", "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and s.pop() == 1 and s.xs == []"),
    "operators between objects": ("class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n    def __eq__(self, o): return self.x == o.x\n    def __lt__(self, o): return self.x < o.x\n    def __hash__(self): return hash(self.x)\n    def __repr__(self): return f'V({self.x})'", "assert V(1) + V(2) == V(3) and V(1) < V(2) and repr(V(5)) == 'V(5)' and len({V(1), V(1)}) == 1 and sorted([V(2), V(1)])[0].x == 1"),
    "a class of objects": ("class Dog:\n    kind = 'dog'\n    @staticmethod\n    def bark(): return 'wau'\n    @classmethod\n    def new(cls): return cls()\ndef f(x): return Dog()", "assert isinstance(f(1), Dog) and Dog.bark() == 'wau' and isinstance(Dog.new(), Dog) and Dog.kind == 'dog' and not isinstance(1, Dog)"),
    "a trie": ("class Trie:\n    def __init__(self): self.w = set()\n    def insert(self, w): self.w.add(w)\n    def search(self, w): return w in self.w\n    def startswith(self, p): return any(w.startswith(p) for w in self.w)", "t = Trie()\nt.insert('abc')\nassert t.search('abc') and t.startswith('ab') and not t.startswith('x')"),
    "a tree": ("class Node:\n    def __init__(self, v): self.v, self.left, self.right = v, None, None\ndef f(n): return 0 if n is None else 1 + max(f(n.left), f(n.right))", "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)\nassert f(root) == 3 and root.left.v == 2"),
    "a generator": ("def f(n):\n    for i in range(n): yield i * i", "assert list(f(4)) == [0, 1, 4, 9]", "g = f(3)\nassert next(g) == 0 and next(g) == 1 and list(g) == [4]", "assert sum(f(2000)) == sum(i * i for i in range(2000))"),
    "an endless generator": ("def f():\n    n = 0\n    while True:\n        yield n\n        n += 1", "from itertools import islice\nassert list(islice(f(), 40)) == list(range(40))"),
    "an iterator": ("class f:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return self\n    def __next__(self):\n        self.n -= 1\n        if self.n < 0: raise StopIteration\n        return self.n", "assert list(f(3)) == [2, 1, 0]"),
    "a lambda as argument": ("def f(g, x): return g(g(x))", "assert f(lambda x: x + 3, 1) == 7"),
    "a function of the tests": ("def f(g): return sorted([3, 1, 2], key=g)", "def minus(x): return -x\nassert f(minus) == [3, 2, 1]"),
    "a built-in function as argument": ("def f(g, xs): return list(map(g, xs))", "assert f(len, ['a', 'bb']) == [1, 2] and f(str, [1]) == ['1']", "import math\nassert f(math.sqrt, [4]) == [2.0]", "import operator\nassert f(operator.neg, [4]) == [-4]"),
    "a callback that raises": ("def f(g):\n    try: g()\n    except ValueError: return 'caught'", "def bad(): raise ValueError('x')\nassert f(bad) == 'caught'"),
    "a callback that calls the program": ("def f(g, n): return 1 if n == 0 else n * g(n - 1)\ndef h(n): return n", "def fact(n): return f(fact, n)\nassert fact(5) == 120"),
    "an iterator as argument": ("def f(xs): return sum(xs)", "assert f(iter([1, 2])) == 3 and f(x for x in (1, 2, 3)) == 6 and f(map(int, '12')) == 3"),
    "an object of the tests' class": ("def f(p):\n    p.x += 1\n    return p.x * p.double(2)", "class P:\n    def __init__(self): self.x = 1\n    def double(self, n): return 2 * n\np = P()\nassert f(p) == 8 and p.x == 2"),
    "a decorator": ("def f(g):\n    def inner(*a): return g(*a) + 1\n    return inner", "@f\ndef three(): return 3\nassert three() == 4"),
    "a closure": ("def f(n):\n    def add(x): return x + n\n    return add", "assert f(2)(3) == 5 and callable(f(1))"),
    "changes its argument": ("def f(x): x.append(1)\ndef g(d): d['k'] = 1\ndef h(s): s.add(3)\ndef k(m): m[0][0] = 9", "x = [0]\nf(x)\nassert x == [0, 1]", "d = {}\ng(d)\nassert d == {'k': 1}", "s = set()\nh(s)\nassert s == {3}", "m = [[1]]\nk(m)\nassert m == [[9]]"),
    "an async function": ("import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 2"),
    "a context manager": ("class f:\n    def __enter__(self):\n        self.open = True\n        return self\n    def __exit__(self, *a): self.open = False", "with f() as c:\n    assert c.open\nassert not c.open"),
    "keyword arguments": ("def f(a, *, b=2, **c): return a + b + sum(c.values())", "assert f(1, b=3, z=4) == 8"),
    "constants": ("LIMIT = 7\ndef f(x): return x < LIMIT", "assert f(LIMIT - 1) and not f(LIMIT)"),
    "a module under another name": ("import math as m\ndef f(x): return m.floor(x)", "assert f(2.5) == m.floor(2.5)"),
    "a thread": ("import threading\ndef f(x):\n    out = []\n    t = threading.Thread(target=out.append, args=(x,))\n    t.start()\n    t.join()\n    return out", "assert f(1) == [1]"),
    "a file": ("def f(x):\n    with open('a.txt', 'w') as file: file.write(x)\n    return open('a.txt').read()", "assert f('hi') == 'hi'"),
    "main block": ("def f(x): return x\nif __name__ == '__main__':\n    print(f(1))", "assert f(1) == 1"),
    "type hints": ("from __future__ import annotations\nfrom typing import List\ndef f(x: List[int]) -> int: return x[0]", "assert f([1]) == 1"),
    "documentation": ("def f(x):\n    'Adds.'\n    return x", "assert f.__doc__ == 'Adds.' and f.__name__ == 'f'"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(RIGHT_PROGRAMS))
def test_right_programs_pass(name: str, tmp_path: Path) -> None:
    """As in one process: first the tests pass under plain `exec`, then here."""
    program, *tests = RIGHT_PROGRAMS[name]
    command = [sys.executable, "-W", "ignore", "-c", "\n".join([program, *tests])]
    plain = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    (first, *_) = SANDBOXES.values()
    outcome = first.run({"kind": "tests", "program": program, "tests": tests}, PATIENT)
    assert outcome["verdicts"] == [{"passed": True}] * len(tests)


def test_tests_of_every_kind(sandbox: Sandbox) -> None:
    square = "def f(x):\n    return x * x"
    assert verdicts(sandbox, square, "assert f(2) == 4", "assert f(3) == 8", "assert f(x=5) == 25") == [True, False, True]
    assert verdicts(sandbox, square, test_code="def check(candidate):\n    assert candidate(3) == 9", entry_point="f") == [True]
    both = "def test_a():\n    assert f(2) == 4\ndef test_b():\n    assert f(2) == 5"
    assert verdicts(sandbox, square, test_code=both) == [True, False]
    assert verdicts(sandbox, square, "assert f(two) == 4", setup="two = 2") == [True]


def test_an_earlier_job_is_not_in_memory(sandbox: Sandbox) -> None:
    """A zygote lives long and grades many completions of one problem."""
    verdicts(sandbox, "def f(x): return 0", "assert f(1) == 424242")
    sandbox.run({"kind": "program", "program": "print('f(1) == 424242')", "stdin": "f(1) == 424242"}, PATIENT)
    search = SCAN + FIND + "def f(x): return find(strings())"
    assert verdicts(sandbox, search, "assert f(1) == 0") == [True]


def solutions(folder: Path) -> list[dict[str, Any]]:
    """The problems of MBPP (both editions) and HumanEval with their published solutions, as columns."""
    lines = (folder / "mbpp" / "mbpp.jsonl").read_text().splitlines()
    edited = json.loads((folder / "mbpp" / "sanitized-mbpp.json").read_text())
    with gzip.open(folder / "humaneval" / "HumanEval.jsonl.gz") as file:
        return [
            *(mbpp(json.loads(line)) for line in lines),
            *map(mbpp, edited),
            *(humaneval(json.loads(line)) for line in file),
        ]


@pytest.mark.slow
@pytest.mark.skipif(
    "ONCURVE_DATA" not in os.environ,
    reason="no published solutions are included: set ONCURVE_DATA to a folder with mbpp/mbpp.jsonl, mbpp/sanitized-mbpp.json "
    "and humaneval/HumanEval.jsonl.gz",
)
def test_published_solutions_pass() -> None:
    """Every published solution passes: 974 and 427 of MBPP's editions, and 164 of HumanEval."""
    (first, *_) = SANDBOXES.values()
    failed = []
    problems = solutions(Path(os.environ["ONCURVE_DATA"]))
    assert len(problems) == 974 + 427 + 164, "the files are not complete"
    for columns in problems:
        tests = read_tests(columns, 100)
        assert tests is not None
        job = {"kind": "tests", "program": program_in(columns["completion"], tests), **tests.job}
        outcome = first.run(job, Limits(seconds=60.0))
        if [v.get("passed") for v in outcome["verdicts"]] != [True] * tests.count:
            failed.append((columns["prompt"][:60], outcome))
    assert failed == []
