"""What the `python` tool runs in each fork: the policy's code, once, from an empty namespace."""

import builtins
import linecache
import random
import sys
import traceback
import warnings

FILE = "<python>"
TRACEBACK_CHARS = 2_000


def warm():
    """Once, before the first fork: what is built at first use, and generators that start alike in every call."""
    import numpy
    import sympy

    x = sympy.Symbol("x")
    sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2)
    sympy.solve([x**2 - 2], x), sympy.integrate(x * sympy.exp(x), x), str(sympy.factor(x**2 - 1)), sympy.latex(x / 2)
    sympy.diophantine(x**2 - 4), sympy.factorint(360), sympy.N(sympy.pi, 20), sympy.Matrix([[1, 2], [3, 4]]).inv()
    numpy.linalg.inv(numpy.eye(2)), numpy.random.default_rng(0).random()
    numpy.random.seed(0)
    warnings.simplefilter("ignore")
    vars(builtins).update(exit=sys.exit, quit=sys.exit)


def run(payload):
    code = payload["code"]
    random.seed(0)  # a fork seeds it anew
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    names = {"__name__": "__main__", "__builtins__": builtins}
    try:
        exec(compile(code, FILE, "exec"), names)
    except SystemExit:
        pass
    except BaseException as error:
        own = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, own))
        print(text if len(text) <= TRACEBACK_CHARS else "...\n" + text[-TRACEBACK_CHARS:], end="")
