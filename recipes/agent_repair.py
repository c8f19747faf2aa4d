"""Program repair: the environment of agent-repair.toml. Run as a program, it writes the recipe's data.

python recipes/agent_repair.py data/repair      # train.jsonl and heldout.jsonl; the same rows each time

A row is one of our programs below with one bug, a change of one place in the syntax tree (`mutants`). A program with a bug
loads, ends within a second, and fails at least one hidden test. Held-out programs never occur in training.
"""

from __future__ import annotations

import ast
import copy
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from oncurve.rewards.sandbox.sandbox import Limits, Sandbox, find_sandbox

BUGS_PER_PROGRAM = 8
HELD_OUT = 0.3
"""Fraction of the programs that are held out."""
PROMPT = "This function has one bug: it does not do what its docstring says. Repair it.\n\n```python\n{code}\n```"


class Repair:
    """By TRL's contract. The tests are columns of the row: no tool shows them, and they run outside of the program's process,
    as those of the reward `code` do."""

    def reset(self, code: str, tests: list[str], **columns: object) -> None:
        self.buggy, self.tests, self.submitted = code, tests, ""

    def submit(self, code: str) -> str:
        """
        Hand in the repaired function. It is tested after the conversation. The last submission counts.

        Args:
            code: The complete function.

        Returns:
            That it was received.
        """
        self.submitted = code
        return "Received."

    def get_reward(self) -> float:
        """1 if the submission passes all hidden tests; 0.1 for another program than the given one that runs; else 0."""
        if self.submitted.strip() in ("", self.buggy.strip()):
            return 0.0
        ended, passed = run_tests(find_sandbox("task.environment"), self.submitted, self.tests)
        return 1.0 if passed == [True] * len(self.tests) else 0.1 * (ended == "exit 0")


def run_tests(sandbox: Sandbox, program: str, tests: Sequence[str], seconds: float = 2.0) -> tuple[str, list[bool]]:
    """How the run ended (`exit 0` if the program loaded and no time limit was exceeded), and whether each test passed."""
    job = {"kind": "tests", "program": program, "tests": list(tests), "test_code": None, "setup": "", "entry_point": None}
    outcome = sandbox.run(job, Limits(seconds, memory=512 << 20))
    return outcome["ended"], [verdict["passed"] for verdict in outcome["verdicts"] if "passed" in verdict]


# The bugs.

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def mutants(source: str) -> list[tuple[str, str]]:
    """Every program that differs from this one by one bug, with the bug's kind, in the order of the source."""
    tree = ast.parse(source)
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names = sorted(stored | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)})
    found = {ast.unparse(tree): "none"}
    for index in range(sum(1 for _ in ast.walk(tree))):
        for number in range(len(list(changes(tree, nth(tree, index), names)))):
            changed = copy.deepcopy(tree)
            kind, change = list(changes(changed, nth(changed, index), names))[number]
            change()
            found.setdefault(ast.unparse(ast.fix_missing_locations(changed)), kind)
    return list(found.items())[1:]


def nth(tree: ast.AST, index: int) -> ast.AST:
    return list(ast.walk(tree))[index]


def changes(tree: ast.AST, node: Any, names: Sequence[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """What can be changed at a node: the kind of bug, and a function that makes the change."""

    def put(name: str, value: Any, owner: Any = node) -> Callable[[], None]:
        return lambda: setattr(owner, name, value)

    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison", put("ops", [COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield "operator", put("op", OPERATORS[type(node.op)]())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        kind = "initial value" if any(isinstance(n, ast.Assign) and n.value is node for n in ast.walk(tree)) else "off by one"
        yield kind, put("value", node.value + 1)
        yield kind, put("value", node.value - 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "initial value", put("value", not node.value)
    if isinstance(node, ast.Call) and len(node.args) == 2:
        yield "swapped arguments", put("args", node.args[::-1])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OPPOSITES:
        yield "wrong function", put("id", OPPOSITES[node.func.id], node.func)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "negated condition", put("test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.comprehension) and node.ifs:
        yield "missing condition", put("ifs", node.ifs[1:])
    if isinstance(node, ast.BoolOp):
        yield "and/or", put("op", ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        if len(node.values) > 2:
            yield "missing condition", put("values", node.values[1:])
            yield "missing condition", put("values", node.values[:-1])
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
        for name in names:
            yield "return variable", put("value", ast.Name(name, ast.Load()))


# The rows.


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows for training and the held-out ones."""
    held_out = set(random.Random(0).sample(sorted(TESTS), round(HELD_OUT * len(TESTS))))
    sandbox, programs = find_sandbox("agent_repair.py"), sources()
    with ThreadPoolExecutor(sandbox.workers.count) as threads:
        of_programs = threads.map(lambda name: rows_of(sandbox, name, programs[name]), programs)
        found = [row for rows in of_programs for row in rows]
    train = [row for row in found if row["program"] not in held_out]
    return train, [row for row in found if row["program"] in held_out]


def rows_of(sandbox: Sandbox, name: str, source: str) -> list[dict[str, Any]]:
    """The rows of one program. A change that no test notices, or with which a loop does not end, is no bug."""
    tests = tests_of(name, source)
    if run_tests(sandbox, source, tests) != ("exit 0", [True] * len(tests)):
        raise RuntimeError(f"{name} fails its own tests")
    rows: list[dict[str, Any]] = []
    for code, kind in mixed(mutants(source), random.Random(name)):
        ended, passed = run_tests(sandbox, code, tests, seconds=1.0)
        if ended == "exit 0" and len(passed) == len(tests) and not all(passed):
            row = {"prompt": PROMPT.format(code=code), "id": f"{name}/{len(rows)}", "program": name, "bug": kind}
            rows.append({**row, "code": code, "tests": tests})
        if len(rows) == BUGS_PER_PROGRAM:
            break
    return rows


def mixed(bugs: Sequence[tuple[str, str]], dice: random.Random) -> list[tuple[str, str]]:
    """The bugs in random order: first one of each kind, then a second one of each, and so on."""
    shuffled = dice.sample(bugs, len(bugs))
    kinds = [kind for _, kind in shuffled]
    return [shuffled[i] for i in sorted(range(len(shuffled)), key=lambda i: kinds[:i].count(kinds[i]))]


def sources() -> dict[str, str]:
    """The programs by name, as the syntax tree is printed: the same layout with and without a bug."""
    tree = ast.parse(PROGRAMS)
    return {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


def tests_of(name: str, source: str) -> list[str]:
    """The hidden tests: the program's calls, with the results of the correct program."""
    names: dict[str, Any] = {}
    exec(source, names)
    calls = [f"{name}{arguments}" for arguments in TESTS[name]]
    return [f"assert {call} == {eval(call, names)!r}" for call in calls]


PROGRAMS = r'''
def clamp(value, low, high):
    """Return value, but at least low and at most high.

    >>> clamp(7, 0, 5)
    5
    """
    if value < low:
        return low
    if value > high:
        return high
    return value

def sum_of_digits(number):
    """Return the sum of the decimal digits of an integer; the sign does not count.

    >>> sum_of_digits(-204)
    6
    """
    number = abs(number)
    total = 0
    while number > 0:
        total += number % 10
        number //= 10
    return total

def is_prime(number):
    """Return True if number is a prime. Numbers below 2 are not prime.

    >>> is_prime(7)
    True
    """
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True

def greatest_common_divisor(a, b):
    """Return the greatest common divisor of two non-negative integers; that of 0 and n is n.

    >>> greatest_common_divisor(12, 18)
    6
    """
    while b != 0:
        a, b = b, a % b
    return a

def fibonacci(count):
    """Return the first count Fibonacci numbers as a list, beginning with 0 and 1.

    >>> fibonacci(5)
    [0, 1, 1, 2, 3]
    """
    numbers = []
    a, b = 0, 1
    for _ in range(count):
        numbers.append(a)
        a, b = b, a + b
    return numbers

def collatz_length(number):
    """Return how many steps it takes to reach 1: an even number is halved, an odd one is multiplied by 3, plus 1.

    >>> collatz_length(6)
    8
    """
    steps = 0
    while number != 1:
        if number % 2 == 0:
            number = number // 2
        else:
            number = 3 * number + 1
        steps += 1
    return steps

def to_base(number, base):
    """Return a non-negative integer as a text in a base from 2 to 10.

    >>> to_base(10, 2)
    '1010'
    """
    if number == 0:
        return "0"
    digits = ""
    while number > 0:
        digits = str(number % base) + digits
        number //= base
    return digits

def is_leap_year(year):
    """Return True for leap years: divisible by 4, but not by 100 unless also by 400.

    >>> is_leap_year(1900)
    False
    """
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)

def proper_divisors(number):
    """Return the divisors of a positive integer in increasing order, without the number itself.

    >>> proper_divisors(12)
    [1, 2, 3, 4, 6]
    """
    found = []
    for divisor in range(1, number // 2 + 1):
        if number % divisor == 0:
            found.append(divisor)
    return found

def integer_square_root(number):
    """Return the largest integer whose square is at most number, a non-negative integer.

    >>> integer_square_root(17)
    4
    """
    low, high = 0, number
    while low < high:
        middle = (low + high + 1) // 2
        if middle * middle <= number:
            low = middle
        else:
            high = middle - 1
    return low

def triangle_kind(a, b, c):
    """Return 'equilateral', 'isosceles' or 'scalene', or 'none' if no triangle has these sides.

    One side must be shorter than the other two together; sides that only touch are no triangle.

    >>> triangle_kind(3, 4, 5)
    'scalene'
    """
    if a + b <= c or a + c <= b or b + c <= a:
        return "none"
    if a == b and b == c:
        return "equilateral"
    if a == b or b == c or a == c:
        return "isosceles"
    return "scalene"

def count_change(amount, coins):
    """Return in how many ways coins of the given values, each as often as you like, add up to amount.

    >>> count_change(5, [1, 2, 5])
    4
    """
    ways = [1] + [0] * amount
    for coin in coins:
        for total in range(coin, amount + 1):
            ways[total] += ways[total - coin]
    return ways[amount]

def days_between(first, second):
    """Return the number of days from one day of a year of 365 days to another, both given as (month, day).

    >>> days_between((1, 30), (2, 2))
    3
    """
    lengths = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    start = sum(lengths[:first[0] - 1]) + first[1]
    end = sum(lengths[:second[0] - 1]) + second[1]
    return end - start

def second_largest(numbers):
    """Return the second largest of the different values in a list, or None if there are fewer than two.

    >>> second_largest([4, 9, 9, 7])
    7
    """
    largest = second = None
    for number in numbers:
        if largest is None or number > largest:
            largest, second = number, largest
        elif number != largest and (second is None or number > second):
            second = number
    return second

def running_total(numbers):
    """Return a list in which each item is the sum of all numbers up to and including its place.

    >>> running_total([1, 2, 3])
    [1, 3, 6]
    """
    totals = []
    total = 0
    for number in numbers:
        total += number
        totals.append(total)
    return totals

def rotate_left(items, count):
    """Return the list with its first count items moved to the end; count may exceed the length.

    >>> rotate_left([1, 2, 3, 4], 1)
    [2, 3, 4, 1]
    """
    if len(items) == 0:
        return []
    count = count % len(items)
    return items[count:] + items[:count]

def chunks(items, size):
    """Return a list of consecutive parts of the given size; the last one may be shorter.

    >>> chunks([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4], [5]]
    """
    parts = []
    for start in range(0, len(items), size):
        parts.append(items[start:start + size])
    return parts

def remove_duplicates(items):
    """Return the different items in the order of their first occurrence.

    >>> remove_duplicates([3, 1, 3, 2, 1])
    [3, 1, 2]
    """
    result = []
    for item in items:
        if item not in result:
            result.append(item)
    return result

def flatten(items):
    """Return the items of a list whose items may be lists themselves, at any depth, as one flat list.

    >>> flatten([1, [2, [3]], 4])
    [1, 2, 3, 4]
    """
    flat = []
    for item in items:
        if isinstance(item, list):
            flat.extend(flatten(item))
        else:
            flat.append(item)
    return flat

def binary_search(items, target):
    """Return the index of target in a sorted list of different numbers, or -1 if it is not in it.

    >>> binary_search([2, 5, 8, 11], 8)
    2
    """
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1

def merge_sorted(first, second):
    """Return one sorted list with all items of two sorted lists.

    >>> merge_sorted([1, 4], [2, 3, 5])
    [1, 2, 3, 4, 5]
    """
    merged = []
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i] <= second[j]:
            merged.append(first[i])
            i += 1
        else:
            merged.append(second[j])
            j += 1
    return merged + first[i:] + second[j:]

def longest_run(items):
    """Return the length of the longest sequence of equal neighbours in a list; 0 for an empty list.

    >>> longest_run([1, 1, 2, 2, 2, 1])
    3
    """
    best = current = 0
    for index, item in enumerate(items):
        if index > 0 and item == items[index - 1]:
            current += 1
        else:
            current = 1
        best = max(best, current)
    return best

def largest_sum(numbers):
    """Return the largest sum of a non-empty range of consecutive numbers in a non-empty list.

    >>> largest_sum([2, -5, 3, 4, -1])
    7
    """
    best = current = numbers[0]
    for number in numbers[1:]:
        current = max(number, current + number)
        best = max(best, current)
    return best

def pairs_with_sum(numbers, target):
    """Return how many pairs of places i < j have numbers that add up to target.

    >>> pairs_with_sum([1, 2, 3, 2], 4)
    2
    """
    count = 0
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            if numbers[i] + numbers[j] == target:
                count += 1
    return count

def transpose(rows):
    """Return a table (a list of rows of equal length) with rows and columns exchanged.

    >>> transpose([[1, 2, 3], [4, 5, 6]])
    [[1, 4], [2, 5], [3, 6]]
    """
    if len(rows) == 0:
        return []
    return [[row[column] for row in rows] for column in range(len(rows[0]))]

def diagonal_sum(square):
    """Return the sum of both diagonals of a square table. A middle cell that is on both counts once.

    >>> diagonal_sum([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    25
    """
    size = len(square)
    total = 0
    for i in range(size):
        total += square[i][i]
        if i != size - 1 - i:
            total += square[i][size - 1 - i]
    return total

def is_sorted(items):
    """Return True if no item is smaller than the one before it.

    >>> is_sorted([1, 2, 2, 5])
    True
    """
    for i in range(1, len(items)):
        if items[i] < items[i - 1]:
            return False
    return True

def move_zeros(numbers):
    """Return the numbers with all zeros at the end; the others keep their order.

    >>> move_zeros([0, 3, 0, 1])
    [3, 1, 0, 0]
    """
    others = [number for number in numbers if number != 0]
    return others + [0] * (len(numbers) - len(others))

def median(numbers):
    """Return the median of a non-empty list: the middle number, or the mean of the two middle ones.

    >>> median([5, 1, 3])
    3
    """
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

def insertion_place(items, value):
    """Return the first index at which value can be inserted into a sorted list so that it stays sorted.

    >>> insertion_place([1, 3, 3, 6], 3)
    1
    """
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low

def water_between(heights):
    """Return how much rain a row of walls holds: each place fills up to the lower of the highest walls left and right of it.

    >>> water_between([3, 0, 2])
    2
    """
    total = 0
    for i in range(len(heights)):
        left = max(heights[:i + 1])
        right = max(heights[i:])
        total += min(left, right) - heights[i]
    return total

def majority(items):
    """Return the item that makes up more than half of the list, or None if there is none.

    >>> majority([2, 1, 2])
    2
    """
    for item in items:
        if items.count(item) * 2 > len(items):
            return item
    return None

def best_profit(prices):
    """Return the largest profit of buying once and selling once later; 0 if no sale gains anything.

    >>> best_profit([5, 2, 6, 1])
    4
    """
    best = 0
    lowest = None
    for price in prices:
        if lowest is None or price < lowest:
            lowest = price
        best = max(best, price - lowest)
    return best

def is_palindrome(text):
    """Return True if a text reads the same backwards. Only letters and digits count, and not their case.

    >>> is_palindrome("Never odd, or even")
    True
    """
    letters = [letter.lower() for letter in text if letter.isalnum()]
    return letters == letters[::-1]

def count_vowels(text):
    """Return the number of vowels (a, e, i, o, u, in upper or lower case) in a text.

    >>> count_vowels("Apple pie")
    4
    """
    count = 0
    for letter in text.lower():
        if letter in "aeiou":
            count += 1
    return count

def caesar(text, shift):
    """Return the text with each lower-case letter a to z moved by shift places in the alphabet, around its end.

    Other characters stay as they are.

    >>> caesar("xyz!", 2)
    'zab!'
    """
    result = ""
    for letter in text:
        if "a" <= letter <= "z":
            place = (ord(letter) - ord("a") + shift) % 26
            result += chr(ord("a") + place)
        else:
            result += letter
    return result

def run_length(text):
    """Return the text with each run of equal letters as the letter and its length.

    >>> run_length("aaab")
    'a3b1'
    """
    result = ""
    i = 0
    while i < len(text):
        j = i
        while j < len(text) and text[j] == text[i]:
            j += 1
        result += text[i] + str(j - i)
        i = j
    return result

def longest_word(text):
    """Return the longest word of a text, the first one of several; words are separated by spaces. '' if there is none.

    >>> longest_word("the quick brown fox")
    'quick'
    """
    longest = ""
    for word in text.split():
        if len(word) > len(longest):
            longest = word
    return longest

def title_case(text):
    """Return the words of a text, each with a capital first letter and the others small, separated by one space.

    >>> title_case("hELLO  big world")
    'Hello Big World'
    """
    words = []
    for word in text.split():
        words.append(word[:1].upper() + word[1:].lower())
    return " ".join(words)

def are_anagrams(first, second):
    """Return True if two texts have the same letters, each as often, ignoring case and spaces.

    >>> are_anagrams("Dirty room", "dormitory")
    True
    """
    counts = {}
    for letter in first.lower().replace(" ", ""):
        counts[letter] = counts.get(letter, 0) + 1
    for letter in second.lower().replace(" ", ""):
        counts[letter] = counts.get(letter, 0) - 1
    return all(count == 0 for count in counts.values())

def is_balanced(text):
    """Return True if every bracket (), [] or {} is closed in the right order. Other characters do not matter.

    >>> is_balanced("(a[b])")
    True
    """
    opened = []
    partner = {")": "(", "]": "[", "}": "{"}
    for letter in text:
        if letter in "([{":
            opened.append(letter)
        elif letter in partner:
            if len(opened) == 0 or opened.pop() != partner[letter]:
                return False
    return len(opened) == 0

def common_prefix(words):
    """Return the longest text with which all words of a non-empty list begin.

    >>> common_prefix(["flower", "flow", "flight"])
    'fl'
    """
    shortest = min(len(word) for word in words)
    for i in range(shortest):
        if any(word[i] != words[0][i] for word in words):
            return words[0][:i]
    return words[0][:shortest]

def edit_distance(first, second):
    """Return the least number of letters to insert, remove or replace to get from one text to the other.

    >>> edit_distance("cat", "cut")
    1
    """
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            cost = 0 if a == b else 1
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + cost)
    return row[len(second)]

def roman_to_int(text):
    """Return the value of a Roman numeral. A letter before one of a larger value is subtracted.

    >>> roman_to_int("XIV")
    14
    """
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    total = 0
    for i in range(len(text)):
        value = values[text[i]]
        if i + 1 < len(text) and value < values[text[i + 1]]:
            total -= value
        else:
            total += value
    return total

def mask(text, visible):
    """Return a text with all letters but the last visible ones replaced by stars.

    >>> mask("12345", 2)
    '***45'
    """
    hidden = max(len(text) - visible, 0)
    return "*" * hidden + text[hidden:]

def to_minutes(clock):
    """Return the minutes since midnight of a time such as '9:05 am' or '12:30 pm'. 12 am is midnight, 12 pm is noon.

    >>> to_minutes("1:10 pm")
    790
    """
    time, half = clock.split(" ")
    hours, minutes = time.split(":")
    hour = int(hours) % 12
    if half == "pm":
        hour += 12
    return hour * 60 + int(minutes)

def first_unique(text):
    """Return the index of the first letter that occurs only once in a text, or -1 if there is none.

    >>> first_unique("aabcb")
    3
    """
    for index, letter in enumerate(text):
        if text.count(letter) == 1:
            return index
    return -1

def word_counts(text):
    """Return a dict with how often each word occurs in a text, ignoring case; words are separated by spaces.

    >>> word_counts("The cat the dog")
    {'the': 2, 'cat': 1, 'dog': 1}
    """
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts

def invert(table):
    """Return a dict from each value of a dict to the sorted list of the keys that have it.

    >>> invert({"a": 1, "b": 2, "c": 1})
    {1: ['a', 'c'], 2: ['b']}
    """
    inverted = {}
    for key in sorted(table):
        value = table[key]
        if value not in inverted:
            inverted[value] = []
        inverted[value].append(key)
    return inverted

def merge_prices(first, second):
    """Return a dict with the keys of both dicts; a key that is in both gets the lower of its two values.

    >>> merge_prices({"tea": 3}, {"tea": 2, "cup": 5})
    {'tea': 2, 'cup': 5}
    """
    merged = dict(first)
    for key, price in second.items():
        if key not in merged or price < merged[key]:
            merged[key] = price
    return merged

def passing_students(grades, limit):
    """Return the sorted names of those whose mean grade is at least limit; who has no grades is left out.

    >>> passing_students({"Ann": [5, 7], "Bob": [4]}, 6)
    ['Ann']
    """
    passing = []
    for name, marks in grades.items():
        if len(marks) > 0 and sum(marks) / len(marks) >= limit:
            passing.append(name)
    return sorted(passing)

def group_by_length(words):
    """Return a dict from each length to the words of this length, in their order.

    >>> group_by_length(["a", "to", "b"])
    {1: ['a', 'b'], 2: ['to']}
    """
    groups = {}
    for word in words:
        groups.setdefault(len(word), []).append(word)
    return groups

def most_common(items):
    """Return the most frequent item of a non-empty list; of several, the smallest.

    >>> most_common([3, 1, 3, 1, 2])
    1
    """
    best = None
    for item in sorted(set(items)):
        if best is None or items.count(item) > items.count(best):
            best = item
    return best

def final_balance(start, changes):
    """Return the balance after deposits (positive) and withdrawals (negative), in order.

    A withdrawal of more than the balance is refused and costs a fee of 2, but the balance never falls below 0.

    >>> final_balance(10, [-15, 5])
    13
    """
    balance = start
    for change in changes:
        if balance + change >= 0:
            balance += change
        else:
            balance = max(balance - 2, 0)
    return balance

def overlap(first, second):
    """Return the length that two ranges (start, end) on a line have in common; 0 if they do not overlap.

    >>> overlap((1, 5), (3, 9))
    2
    """
    start = max(first[0], second[0])
    end = min(first[1], second[1])
    return max(end - start, 0)

def merge_ranges(ranges):
    """Return ranges [start, end] sorted, with those that overlap or touch joined to one.

    >>> merge_ranges([[5, 7], [1, 3], [2, 4]])
    [[1, 4], [5, 7]]
    """
    merged = []
    for start, end in sorted(ranges):
        if len(merged) > 0 and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged

def shipping_cost(weight, is_express):
    """Return the price of a parcel: 5 up to 2 kg, and 3 more for each further kilogram that has begun. Express doubles it.

    >>> shipping_cost(3.5, False)
    11
    """
    cost = 5
    while weight > 2:
        cost += 3
        weight -= 1
    if is_express:
        cost *= 2
    return cost

def evaluate_postfix(text):
    """Return the value of a formula in which operators (+, -, *) follow their two operands, separated by spaces.

    >>> evaluate_postfix("7 2 -")
    5
    """
    stack = []
    for word in text.split():
        if word in ("+", "-", "*"):
            right = stack.pop()
            left = stack.pop()
            if word == "+":
                stack.append(left + right)
            elif word == "-":
                stack.append(left - right)
            else:
                stack.append(left * right)
        else:
            stack.append(int(word))
    return stack[0]

def count_neighbours(grid, row, column):
    """Return how many of the up to eight cells around a cell of a table are 1.

    >>> count_neighbours([[1, 1], [0, 1]], 0, 0)
    2
    """
    count = 0
    for i in range(max(row - 1, 0), min(row + 2, len(grid))):
        for j in range(max(column - 1, 0), min(column + 2, len(grid[0]))):
            if (i, j) != (row, column) and grid[i][j] == 1:
                count += 1
    return count

def check_digit(digits):
    """Return the last digit that makes a number pass the Luhn check, given the text of all digits before it.

    From the right, every second digit is doubled, beginning with the last one; of a result above 9, subtract 9.

    >>> check_digit("7992739871")
    3
    """
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit)
        if place % 2 == 0:
            value *= 2
            if value > 9:
                value -= 9
        total += value
    return (10 - total % 10) % 10
'''
"""The programs. Their docstrings are what the agent gets as the specification."""

# The arguments of the hidden tests.
TESTS: dict[str, list[str]] = {
    "clamp": ["(3, 0, 5)", "(-1, 0, 5)", "(9, 0, 5)", "(0, 0, 5)", "(5, 0, 5)", "(2, 2, 2)", "(-7, -5, -3)", "(1.5, 1, 2)"],
    "sum_of_digits": ["(0)", "(7)", "(10)", "(-999)", "(12345)", "(100001)", "(90)"],
    "is_prime": ["(-3)", "(0)", "(1)", "(2)", "(3)", "(4)", "(9)", "(25)", "(97)", "(91)", "(49)"],
    "greatest_common_divisor": ["(0, 5)", "(5, 0)", "(7, 13)", "(100, 75)", "(36, 36)", "(270, 192)", "(1, 9)"],
    "fibonacci": ["(0)", "(1)", "(2)", "(3)", "(8)", "(12)"],
    "collatz_length": ["(1)", "(2)", "(3)", "(7)", "(16)", "(27)"],
    "to_base": ["(0, 2)", "(1, 2)", "(8, 2)", "(8, 3)", "(99, 10)", "(63, 8)", "(123, 5)"],
    "is_leap_year": ["(2000)", "(1900)", "(2024)", "(2023)", "(2100)", "(1600)", "(2001)", "(4)"],
    "proper_divisors": ["(1)", "(2)", "(6)", "(7)", "(16)", "(28)", "(30)"],
    "integer_square_root": ["(0)", "(1)", "(2)", "(3)", "(4)", "(24)", "(25)", "(26)", "(1000000)"],
    "triangle_kind": ["(2, 2, 2)", "(2, 2, 3)", "(3, 2, 2)", "(2, 3, 2)", "(4, 5, 6)", "(1, 2, 3)", "(3, 1, 2)", "(1, 9, 2)"],
    "count_change": [
        "(0, [1, 2])",
        "(1, [2])",
        "(10, [1, 2, 5])",
        "(7, [3, 4])",
        "(12, [5, 3])",
        "(6, [1])",
        "(100, [25, 10, 5])",
    ],
    "days_between": [
        "((1, 1), (1, 1))",
        "((1, 1), (12, 31))",
        "((2, 28), (3, 1))",
        "((3, 5), (3, 25))",
        "((5, 1), (2, 1))",
        "((7, 31), (9, 2))",
        "((10, 3), (11, 3))",
        "((6, 30), (12, 1))",
    ],
    "second_largest": [
        "([])",
        "([4])",
        "([4, 4])",
        "([1, 2])",
        "([2, 1])",
        "([5, 5, 3, 4])",
        "([-1, -2, -3])",
        "([1, 3, 2, 3])",
    ],
    "running_total": ["([])", "([5])", "([1, -1, 1])", "([0, 0])", "([10, 20, 30, 40])", "([-2, -3])"],
    "rotate_left": ["([], 3)", "([1], 5)", "([1, 2, 3], 0)", "([1, 2, 3], 2)", "([1, 2, 3], 3)", "([1, 2, 3, 4, 5], 8)"],
    "chunks": ["([], 2)", "([1], 2)", "([1, 2], 2)", "([1, 2, 3], 1)", "([1, 2, 3, 4], 3)", "([1, 2, 3, 4, 5, 6], 3)"],
    "remove_duplicates": ["([])", "([1])", "([1, 1, 1])", "([2, 1, 2, 3])", "(['b', 'a', 'b'])", "([0, None, 0, None])"],
    "flatten": ["([])", "([1, 2])", "([[1], [2]])", "([[], [[]]])", "([[[1, 2], 3], [4, [5, [6]]]])", "([1, ['a', [2]]])"],
    "binary_search": [
        "([], 1)",
        "([1], 1)",
        "([1], 2)",
        "([1, 3], 3)",
        "([1, 3, 5, 7, 9], 1)",
        "([1, 3, 5, 7, 9], 9)",
        "([1, 3, 5, 7, 9], 4)",
        "([1, 3, 5, 7, 9], 10)",
        "([1, 3, 5, 7, 9, 11], 7)",
    ],
    "merge_sorted": [
        "([], [])",
        "([1], [])",
        "([], [2, 3])",
        "([1, 3, 5], [2, 4, 6])",
        "([1, 1], [1])",
        "([5, 6], [1, 2])",
        "([1, 2, 9], [3])",
    ],
    "longest_run": ["([])", "([7])", "([1, 2, 3])", "([4, 4])", "([1, 1, 1, 2, 2])", "([3, 1, 1, 1, 1])", "([0, 0, 1, 0, 0])"],
    "largest_sum": [
        "([5])",
        "([-3])",
        "([-3, -1, -2])",
        "([1, 2, 3])",
        "([4, -1, 5])",
        "([3, -10, 8, -1, 2])",
        "([-2, 1, -3, 4, -1])",
    ],
    "pairs_with_sum": [
        "([], 1)",
        "([2], 4)",
        "([2, 2], 4)",
        "([1, 3, 5], 6)",
        "([0, 0, 0], 0)",
        "([4, 1, -1, 2, 3], 3)",
        "([1, 2], 5)",
    ],
    "transpose": ["([])", "([[1]])", "([[1, 2]])", "([[1], [2]])", "([[1, 2], [3, 4]])", "([['a', 'b', 'c'], [1, 2, 3]])"],
    "diagonal_sum": [
        "([])",
        "([[5]])",
        "([[1, 2], [3, 4]])",
        "([[1, 0, 0], [0, 1, 0], [0, 0, 1]])",
        "([[2, 3, 4], [5, 6, 7], [8, 9, 1]])",
        "([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]])",
    ],
    "is_sorted": ["([])", "([1])", "([2, 1])", "([1, 1])", "([1, 3, 2])", "([3, 4, 5, 9])", "([2, 3, 1, 4])"],
    "move_zeros": ["([])", "([0])", "([1])", "([0, 0, 1])", "([1, 0, 2, 0, 3])", "([4, 5])", "([0, -1, 0])"],
    "median": ["([4])", "([1, 2])", "([9, 1, 5])", "([4, 1, 3, 2])", "([7, 7, 1, 1, 5])", "([10, 2, 38, 23, 21, 16])"],
    "insertion_place": [
        "([], 4)",
        "([5], 4)",
        "([5], 5)",
        "([5], 6)",
        "([1, 3, 5, 7], 4)",
        "([2, 2, 2], 2)",
        "([1, 2, 3, 9], 9)",
    ],
    "water_between": ["([])", "([4])", "([1, 2, 3])", "([2, 0, 2])", "([4, 2, 0, 3, 2, 5])", "([0, 1, 0, 2, 1, 0, 1, 3])"],
    "majority": ["([])", "([1])", "([1, 2])", "([1, 1, 2, 2])", "([3, 1, 3, 3])", "([2, 2, 1, 3, 2])", "(['a', 'b', 'b'])"],
    "best_profit": ["([])", "([3])", "([5, 4, 1])", "([1, 5])", "([7, 1, 5, 3, 6, 4])", "([2, 9, 1, 5])", "([3, 3, 8])"],
    "is_palindrome": [
        "('')",
        "('a')",
        "('ab')",
        "('Anna')",
        "('A man, a plan: Panama')",
        "('No lemon, no melon!')",
        "('12 21')",
    ],
    "count_vowels": ["('')", "('xyz')", "('AEIOU')", "('hello world')", "('a')", "('Queue')"],
    "caesar": ["('', 3)", "('abc', 1)", "('abc', -1)", "('hello, World', 13)", "('zoo', 27)", "('az {`', 0)", "('tv', 5)"],
    "run_length": ["('')", "('a')", "('ab')", "('aabbcc')", "('zzzzz')", "('abba')", "('  x')"],
    "longest_word": ["('')", "('one')", "('a bb ccc')", "('ccc bb a')", "('same size word here')", "('  to   be  ')"],
    "title_case": ["('')", "('a')", "('ABC')", "('the end')", "('x  y z')", "('mcDonald had a farm')"],
    "are_anagrams": [
        "('', '')",
        "('a', '')",
        "('', 'a')",
        "('ab', 'ba')",
        "('aab', 'abb')",
        "('Listen', 'Silent')",
        "('a b c', 'cab')",
        "('abc', 'abcc')",
    ],
    "is_balanced": ["('')", "('(')", "(')')", "('([])')", "('([)]')", "('{[()]}()')", "('a(b')", "('x')", "('(()')"],
    "common_prefix": [
        "(['a'])",
        "(['ab', 'ab'])",
        "(['abc', 'abd'])",
        "(['x', 'y'])",
        "(['', 'a'])",
        "(['car', 'cart', 'care'])",
    ],
    "edit_distance": [
        "('', '')",
        "('a', '')",
        "('', 'abc')",
        "('kitten', 'sitting')",
        "('abc', 'abc')",
        "('ab', 'ba')",
        "('flaw', 'lawn')",
    ],
    "roman_to_int": ["('I')", "('III')", "('IV')", "('IX')", "('XL')", "('LVIII')", "('MCMXCIV')", "('CD')", "('MMXXVI')"],
    "mask": ["('', 2)", "('a', 0)", "('abc', 3)", "('abc', 5)", "('secret', 2)", "('4242424242', 4)"],
    "to_minutes": [
        "('12:00 am')",
        "('12:00 pm')",
        "('12:30 am')",
        "('1:00 am')",
        "('11:59 pm')",
        "('9:05 am')",
        "('12:45 pm')",
        "('6:20 pm')",
    ],
    "first_unique": ["('')", "('a')", "('aa')", "('aab')", "('abca')", "('leetcode')", "('xxyyz')"],
    "word_counts": ["('')", "('a')", "('a a A')", "('one two one')", "('Dog cat DOG dog')", "('x  y   x')"],
    "invert": [
        "({})",
        "({'a': 1})",
        "({'b': 1, 'a': 1})",
        "({'x': 'y', 'y': 'x'})",
        "({'c': 0, 'b': 2, 'a': 0, 'd': 0})",
        "({3: 'odd', 2: 'even', 1: 'odd'})",
    ],
    "merge_prices": [
        "({}, {})",
        "({'a': 1}, {})",
        "({}, {'a': 1})",
        "({'a': 1}, {'a': 2})",
        "({'a': 2}, {'a': 1})",
        "({'a': 5, 'b': 3}, {'b': 1, 'c': 9, 'a': 7})",
    ],
    "passing_students": [
        "({}, 5)",
        "({'Ann': []}, 0)",
        "({'Ann': [5]}, 5)",
        "({'Bob': [4], 'Ann': [6, 6]}, 4)",
        "({'Zoe': [9, 1], 'Max': [5, 6]}, 5.5)",
        "({'Eva': [1, 2, 3], 'Tom': [3], 'Ida': []}, 2)",
    ],
    "group_by_length": [
        "([])",
        "(['a'])",
        "(['a', 'b'])",
        "(['one', 'two', 'three'])",
        "(['', 'x', ''])",
        "(['bb', 'a', 'cc', 'ddd'])",
    ],
    "most_common": ["([1])", "([1, 2])", "([2, 2, 1])", "([5, 3, 3, 5, 1])", "(['b', 'a', 'b'])", "([4, 4, 4, 9, 9])"],
    "final_balance": [
        "(0, [])",
        "(10, [-10])",
        "(10, [-11])",
        "(1, [-5])",
        "(5, [5, -3])",
        "(10, [-15, 5, -13, -1])",
        "(3, [-4, -4, 10])",
        "(2, [-3])",
    ],
    "overlap": [
        "((0, 1), (2, 3))",
        "((0, 2), (2, 3))",
        "((0, 9), (3, 4))",
        "((3, 4), (0, 9))",
        "((5, 8), (1, 6))",
        "((2, 7), (2, 7))",
    ],
    "merge_ranges": [
        "([])",
        "([[1, 2]])",
        "([[1, 2], [2, 3]])",
        "([[1, 9], [2, 3]])",
        "([[4, 5], [1, 2]])",
        "([[1, 3], [2, 6], [8, 10], [9, 12]])",
        "([[1, 2], [3, 4]])",
    ],
    "shipping_cost": [
        "(1, False)",
        "(2, False)",
        "(2.1, False)",
        "(3, False)",
        "(3.2, True)",
        "(0.5, True)",
        "(10, False)",
        "(4, True)",
    ],
    "evaluate_postfix": ["('5')", "('1 2 +')", "('5 3 -')", "('4 6 *')", "('2 3 + 4 *')", "('10 2 3 * -')", "('1 2 3 + -')"],
    "count_neighbours": [
        "([[1]], 0, 0)",
        "([[1, 1], [1, 1]], 1, 1)",
        "([[1, 1, 1], [1, 1, 1], [1, 1, 1]], 1, 1)",
        "([[1, 0, 1], [0, 0, 0], [1, 0, 1]], 1, 1)",
        "([[0, 1, 0], [1, 1, 0]], 0, 2)",
        "([[1, 1, 1], [1, 0, 1], [1, 1, 1]], 2, 0)",
        "([[1, 1, 1, 1]], 0, 1)",
    ],
    "check_digit": ["('')", "('0')", "('1')", "('5')", "('18')", "('4539148803436')", "('123456789')", "('9')"],
}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train", "heldout"), rows(), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(part)} bugs in {len({row['program'] for row in part})} programs")
