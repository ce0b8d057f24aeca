"""Predicted against measured peaks of training steps of JAX on the CPU.

    python -m benchmarks.jax_accuracy

How the truth is measured: benchmarks/measuring_jax.py. Steps that no rule for the scratch memory of kernels was made
from are marked.
"""

import sys

from benchmarks.jax_steps import CASES, HELD_OUT
from benchmarks.measuring_jax import measure
from benchmarks.reporting import Bar, percent, publish, table
from memfit.core.units import MIB

LIMIT = 0.03


def main() -> int:
    """Measures all steps and publishes."""
    rows, errors = [], {}
    for name in (*CASES, *HELD_OUT):
        found = measure(f"benchmarks.jax_steps:{name}")
        errors[name] = found["predicted"] / found["measured"] - 1
        sizes = (f"{found['measured'] / MIB:,.1f}", f"{found['predicted'] / MIB:,.1f}")
        rows.append((name, "yes" if name in HELD_OUT else "", *sizes, percent(errors[name])))
        print(" | ".join(rows[-1]), flush=True)
    bars = []
    for words, names in (("all steps", tuple(errors)), ("steps that no rule was made from", HELD_OUT)):
        worst = max(names, key=lambda name: abs(errors[name]))
        measured = f"{abs(errors[worst]):.2%} ({worst})"
        bars.append(
            Bar(f"greatest error, {len(names)} {words}", measured, f"at most {LIMIT:.0%}", abs(errors[worst]) <= LIMIT)
        )
    head = ("step", "held out", "measured, MiB", "predicted, MiB", "error")
    publish("jax_accuracy", "JAX: predicted against measured memory", bars, [table(head, rows)], save=True)
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
