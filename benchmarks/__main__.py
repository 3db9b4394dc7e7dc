"""What fits in twenty minutes, one benchmark after another: `make bench`, or `python -m benchmarks NAME...`.

Each is a module with `main()` that prints its own table: ours and the peer on the same inputs, in one go, as a ratio.
Without names all but the long ones run, on small inputs (BRIEF); by name, with what each does by itself. `gpu` is among
them where torch sees a CUDA device; vLLM is a peer where `make vllm-env` has been run.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from pathlib import Path

from torch import cuda

import benchmarks

LONG = ("search", "domains")
VLLM = Path(__file__).parent.parent / ".venv-vllm" / "bin" / "python"
BRIEF = {
    "sampling": ["samples", "distinct", "--prompts", "8", "--peer-batch", "64"],
    "training": ["--tasks", "6", "--check"],
    "steps": ["--tasks", "16", "--steps", "2", "--iterations", "2", "--set", "domain.options.harness=32"],
}


def main() -> int:
    known = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_"))
    brief = BRIEF if not sys.argv[1:] else {}
    if brief and VLLM.exists():
        brief = brief | {"sampling": [*brief["sampling"], "--vllm", str(VLLM)]}
    names = sys.argv[1:] or [n for n in known if n not in LONG and (n != "gpu" or cuda.is_available())]
    for name in names:
        if name not in known:
            print(f"no benchmark {name!r}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    for name in names:
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        sys.argv = [name, *brief.get(name, [])]
        importlib.import_module(f"benchmarks.{name}").main()
        print(f"   ({time.perf_counter() - start:.0f} s)\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
