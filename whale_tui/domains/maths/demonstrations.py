"""Worked problems for the brief, made for it: problem, program, what it prints, answer."""

from __future__ import annotations

from whale_tui.records import Demonstration

_WORKED = (
    (
        "How many whole numbers from 1 to 500 are divisible by 6 or by 15?",
        "print(sum(1 for n in range(1, 501) if n % 6 == 0 or n % 15 == 0))",
        "100\n",
        "100",
    ),
    (
        "Find the sum of the real solutions of $x^3 - 7x + 6 = 0$ that are greater than 0.",
        "from sympy import *\nx = symbols('x')\nprint(sum(s for s in solve(x**3 - 7*x + 6, x) if s > 0))",
        "3\n",
        "3",
    ),
    (
        "A fair die is thrown three times. What is the probability that the three numbers add up to 10?",
        "from fractions import Fraction\nfrom itertools import product\n"
        "good = sum(1 for t in product(range(1, 7), repeat=3) if sum(t) == 10)\nprint(Fraction(good, 6**3))",
        "1/8\n",
        "\\frac{1}{8}",
    ),
    (
        "What is the remainder when $3^{2024}$ is divided by 1000?",
        "print(pow(3, 2024, 1000))",
        "481\n",
        "481",
    ),
    (
        "Compute $\\int_0^1 x^2 e^x \\, dx$.",
        "from sympy import *\nx = symbols('x')\nprint(simplify(integrate(x**2 * exp(x), (x, 0, 1))))",
        "-2 + E\n",
        "e - 2",
    ),
    (
        "How many ways are there to seat 5 people in a row so that two of them, Ana and Ben, are not neighbours?",
        "from itertools import permutations\n"
        "print(sum(1 for p in permutations('ABxyz') if abs(p.index('A') - p.index('B')) > 1))",
        "72\n",
        "72",
    ),
    (
        "A triangle has sides 13, 14 and 15. What is the radius of its inscribed circle?",
        "from sympy import *\na, b, c = 13, 14, 15\ns = Rational(a + b + c, 2)\n"
        "print(sqrt(s * (s - a) * (s - b) * (s - c)) / s)",
        "4\n",
        "4",
    ),
    (
        "Find the smallest positive whole number with exactly 18 divisors.",
        "from sympy import divisor_count\nn = 1\nwhile divisor_count(n) != 18:\n    n += 1\nprint(n)",
        "180\n",
        "180",
    ),
    (
        "For how many pairs of whole numbers $(a, b)$ with $1 \\le a < b \\le 30$ is $ab$ a square?",
        "from math import isqrt\n"
        "print(sum(1 for b in range(1, 31) for a in range(1, b) if isqrt(a * b) ** 2 == a * b))",
        "19\n",
        "19",
    ),
    (
        "What is the largest prime factor of $2^{24} - 1$?",
        "from sympy import factorint\nprint(max(factorint(2**24 - 1)))",
        "241\n",
        "241",
    ),
    (
        "The sequence $a_1 = 1$, $a_{n+1} = 2a_n + n$ is given. Find $a_{10}$.",
        "a = 1\nfor n in range(1, 10):\n    a = 2 * a + n\nprint(a)",
        "1525\n",
        "1525",
    ),
    (
        "Write $\\sqrt{7 + 4\\sqrt{3}}$ without a nested root.",
        "from sympy import *\nprint(sqrtdenest(sqrt(7 + 4 * sqrt(3))))",
        "sqrt(3) + 2\n",
        "2 + \\sqrt{3}",
    ),
)

DEMONSTRATIONS = [
    Demonstration({"question": question}, [{"name": "python", "args": {"code": code}, "result": printed}], answer)
    for question, code, printed, answer in _WORKED
]
