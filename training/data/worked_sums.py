"""Templated maths problems with written-out solutions: this project's own, and plain puzzles of reasoning-gym.

Nothing here derives from GSM8K; reasoning-gym's `gsm_symbolic`, which does, is never asked.
"""

import random
from collections.abc import Callable, Iterator

Problem = tuple[str, list[str], str]  # question, steps, answer


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    """
    Ada Amir Anna Ben Bianca Carlos Chen Clara Daniel Dora Elif Emma Felix Grace Hana Hugo Ines Ivan Jonas Julia
    Kofi Lara Leo Lina Marco Maya Mila Nadia Noah Olga Omar Paul Petra Rosa Ruth Sam Sofia Tariq Tess Uma Victor
    Wei Yara Zoe
    """
)
THINGS = _words(
    """
    apples pencils marbles stickers books cards shells coins stamps buttons cookies oranges candles ribbons
    tickets beads bottles plums tiles flowers pebbles postcards badges notebooks
    """
)
PLACES = ["a box", "a bag", "a basket", "a crate", "a drawer", "a tray", "a jar", "a shelf"]
SHOPS = ["the market", "a bakery", "the school shop", "a small store", "the fair", "the station kiosk"]

PUZZLES = _words(
    """
    base_conversion basic_arithmetic calendar_arithmetic chain_sum count_bits decimal_chain_sum
    fraction_simplification gcd lcm leg_counting letter_counting number_filtering number_format number_sequence
    number_sorting power_function prime_factorization products simple_equations simple_geometry spell_backward
    time_intervals word_sequence_reversal word_sorting
    """
)


def _boxes(r: random.Random) -> Problem:
    name, thing, place = r.choice(NAMES), r.choice(THINGS), r.choice(PLACES)
    n, each, gone = r.randint(2, 24), r.randint(3, 40), 0
    gone = r.randint(1, n * each - 1)
    verb, past = r.choice([("gives away", "giving away"), ("sells", "selling"), ("loses", "losing"), ("uses", "using")])
    noun = place.split(" ", 1)[1]
    plural = noun[:-1] + "ves" if noun == "shelf" else noun + ("es" if noun == "box" else "s")
    question = r.choice(
        [
            f"{name} has {n} {plural} of {each} {thing} each. {name} {verb} {gone} {thing}. How many {thing} are left?",
            f"There are {each} {thing} in each of {n} {plural}. If {name} {verb} {gone}, how many {thing} remain?",
        ]
    )
    total = n * each
    steps = [
        f"In total there are {n} * {each} = {total} {thing}.",
        f"After {past} {gone}, {total} - {gone} = {total - gone} {thing} are left.",
    ]
    return question, steps, str(total - gone)


def _shopping(r: random.Random) -> Problem:
    name, shop = r.choice(NAMES), r.choice(SHOPS)
    a, b = r.sample(THINGS, 2)
    na, nb, pa, pb = r.randint(2, 12), r.randint(2, 12), r.randint(1, 15), r.randint(1, 15)
    cost_a, cost_b = na * pa, nb * pb
    paid = (cost_a + cost_b) // 10 * 10 + r.choice([10, 20, 50])
    question = (
        f"At {shop}, {name} buys {na} {a} at {pa} dollars each and {nb} {b} at {pb} dollars each. "
        f"{name} pays with {paid} dollars. How much change does {name} get?"
    )
    total = cost_a + cost_b
    steps = [
        f"The {a} cost {na} * {pa} = {cost_a} dollars.",
        f"The {b} cost {nb} * {pb} = {cost_b} dollars.",
        f"Together that is {cost_a} + {cost_b} = {total} dollars.",
        f"The change is {paid} - {total} = {paid - total} dollars.",
    ]
    return question, steps, str(paid - total)


def _travel(r: random.Random) -> Problem:
    name, kind = r.choice(NAMES), r.choice(["bus", "train", "bicycle", "boat", "car"])
    v1, t1, v2, t2 = r.randint(6, 90), r.randint(2, 9), r.randint(6, 90), r.randint(2, 9)
    question = (
        f"{name} travels by {kind} for {t1} hours at {v1} kilometres an hour, then for {t2} hours at {v2} kilometres "
        "an hour. How far is that in all?"
    )
    d1, d2 = v1 * t1, v2 * t2
    steps = [
        f"The first part is {v1} * {t1} = {d1} kilometres.",
        f"The second part is {v2} * {t2} = {d2} kilometres.",
        f"In all that is {d1} + {d2} = {d1 + d2} kilometres.",
    ]
    return question, steps, str(d1 + d2)


def _sharing(r: random.Random) -> Problem:
    name, thing = r.choice(NAMES), r.choice(THINGS)
    friends, each, rest = r.randint(2, 12), r.randint(2, 30), 0
    rest = r.randint(0, friends - 1)
    total = friends * each + rest
    question = (
        f"{name} shares {total} {thing} equally among {friends} friends and keeps what cannot be shared. "
        f"How many {thing} does each friend get, and how many does {name} keep?"
    )
    steps = [
        f"Dividing, {total} / {friends} gives {each} for each friend.",
        f"That uses {friends} * {each} = {friends * each} {thing}.",
        f"So {name} keeps {total} - {friends * each} = {rest} {thing}.",
    ]
    return question, steps, f"{each} each, {rest} kept"


def _saving(r: random.Random) -> Problem:
    name = r.choice(NAMES)
    start, weekly, weeks, spent = r.randint(5, 90), r.randint(3, 25), r.randint(3, 20), 0
    saved = start + weekly * weeks
    spent = r.randint(1, saved)
    question = (
        f"{name} has {start} euros and saves {weekly} euros every week. After {weeks} weeks {name} spends {spent} "
        "euros. How many euros are left?"
    )
    steps = [
        f"In {weeks} weeks {name} saves {weeks} * {weekly} = {weeks * weekly} euros.",
        f"With the first {start} euros that makes {start} + {weeks * weekly} = {saved} euros.",
        f"After spending {spent}, {saved} - {spent} = {saved - spent} euros are left.",
    ]
    return question, steps, str(saved - spent)


def _percent(r: random.Random) -> Problem:
    name, thing = r.choice(NAMES), r.choice(["coat", "lamp", "chair", "phone", "guitar", "tent", "camera", "desk"])
    price, percent = r.randint(2, 40) * 20, r.choice([5, 10, 15, 20, 25, 30, 40, 50])
    off = price * percent // 100
    question = f"A {thing} costs {price} dollars. {name} gets {percent}% off. What does {name} pay?"
    steps = [
        f"{percent}% of {price} is {price} * {percent} / 100 = {off} dollars.",
        f"The price is {price} - {off} = {price - off} dollars.",
    ]
    return question, steps, str(price - off)


def _ages(r: random.Random) -> Problem:
    a, b, c = r.sample(NAMES, 3)
    young, gap, times = r.randint(4, 15), r.randint(2, 12), r.randint(2, 4)
    second, third = young + gap, (young + gap) * times
    question = (
        f"{a} is {young} years old. {b} is {gap} years older than {a}, and {c} is {times} times as old as {b}. "
        "What is the sum of their ages?"
    )
    steps = [
        f"{b} is {young} + {gap} = {second} years old.",
        f"{c} is {times} * {second} = {third} years old.",
        f"The sum is {young} + {second} + {third} = {young + second + third}.",
    ]
    return question, steps, str(young + second + third)


def _rectangle(r: random.Random) -> Problem:
    what, a, b = r.choice(["garden", "field", "room", "yard", "floor", "wall"]), r.randint(3, 60), r.randint(3, 60)
    question = f"A rectangular {what} is {a} metres long and {b} metres wide. What are its area and its perimeter?"
    steps = [
        f"The area is {a} * {b} = {a * b} square metres.",
        f"The perimeter is 2 * ({a} + {b}) = 2 * {a + b} = {2 * (a + b)} metres.",
    ]
    return question, steps, f"area {a * b}, perimeter {2 * (a + b)}"


def _average(r: random.Random) -> Problem:
    name, n = r.choice(NAMES), r.randint(3, 5)
    mean = r.randint(5, 60)
    values = [mean + r.randint(-4, 4) for _ in range(n - 1)]
    values.append(mean * n - sum(values))
    total = sum(values)
    question = f"{name} writes down the numbers {', '.join(map(str, values))}. What is their average?"
    steps = [
        f"The sum is {' + '.join(map(str, values))} = {total}.",
        f"There are {n} numbers, so the average is {total} / {n} = {mean}.",
    ]
    return question, steps, str(mean)


def _equation(r: random.Random) -> Problem:
    a, x, b = r.randint(2, 15), r.randint(-12, 30), r.randint(1, 60)
    letter = r.choice("xyznt")
    right = a * x + b
    question = f"Solve {a}{letter} + {b} = {right} for {letter}."
    steps = [
        f"Subtract {b} from both sides: {a}{letter} = {right} - {b} = {right - b}.",
        f"Divide by {a}: {letter} = {right - b} / {a} = {x}.",
    ]
    return question, steps, f"{letter} = {x}"


def _long_sum(r: random.Random) -> Problem:
    a, b = r.randint(101, 9999), r.randint(101, 9999)
    question = r.choice([f"What is {a} + {b}?", f"Add {a} and {b}.", f"Compute {a} + {b}."])
    steps, carry, place = [], 0, 1
    while a >= place or b >= place:
        x, y = a // place % 10, b // place % 10
        s = x + y + carry
        steps.append(f"{x} + {y}{f' + {carry}' if carry else ''} = {s}, write {s % 10}, carry {s // 10}.")
        carry, place = s // 10, place * 10
    return question, steps, str(a + b)


def _product(r: random.Random) -> Problem:
    a, b = r.randint(12, 999), r.randint(12, 99)
    tens, ones = b // 10 * 10, b % 10
    question = r.choice([f"What is {a} * {b}?", f"Multiply {a} by {b}.", f"Work out {a} times {b}."])
    steps = [f"{a} * {tens} = {a * tens}."]
    if ones:
        steps += [f"{a} * {ones} = {a * ones}.", f"{a * tens} + {a * ones} = {a * b}."]
    return question, steps, str(a * b)


TEMPLATES: tuple[Callable[[random.Random], Problem], ...] = (
    *(_boxes, _shopping, _travel, _sharing, _saving, _percent, _ages),
    *(_rectangle, _average, _equation, _long_sum, _product),
)


def worked_sums(count: int, seed: int) -> Iterator[str]:
    """Yield `count` problems of this project's own templates, each with its solution and `The answer is ...`."""
    r = random.Random(seed)
    for i in range(count):
        question, steps, answer = TEMPLATES[i % len(TEMPLATES)](r)
        joint = r.choice([" ", "\n"])
        yield f"Question: {question}\nAnswer: {joint.join(steps)}{joint}The answer is {answer}.\n"


def puzzles(count_each: int, seed: int) -> Iterator[str]:
    """Yield `count_each` problems of each of the reasoning-gym generators in PUZZLES, with their answers.

    Raises:
        ModuleNotFoundError: reasoning-gym is not installed.
    """
    import reasoning_gym

    assert "gsm_symbolic" not in PUZZLES
    for name in PUZZLES:
        for item in reasoning_gym.create_dataset(name, size=count_each, seed=seed):
            if len(item["question"]) < 800 and item["answer"] is not None:
                yield f"Question: {item['question'].strip()}\nAnswer: {item['answer']}\n"
