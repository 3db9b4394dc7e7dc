"""Every benchmark that fits in twenty minutes, one after another: `make bench`, or `python -m benchmarks NAME...`.

Each is a module with `main()` that prints its own table: ours and the peer on the same inputs, in one go, as a ratio.
`gpu` is among them where torch sees a CUDA device.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time

from torch import cuda

import benchmarks


def main() -> int:
    known = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_"))
    names = sys.argv[1:] or [name for name in known if name != "gpu" or cuda.is_available()]
    for name in names:
        if name not in known:
            print(f"no benchmark {name!r}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    for name in names:
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        sys.argv = [name]
        importlib.import_module(f"benchmarks.{name}").main()
        print(f"   ({time.perf_counter() - start:.0f} s)\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
