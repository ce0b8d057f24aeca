"""Will it fit before I rent the GPU? `python examples/will_it_fit/will_it_fit.py [PAGE.html]`."""

import sys
from dataclasses import replace

import train

import memfit

DEVICE = "rtx-3060"
GIB = 2**30


def main():
    job = train.job()
    estimate = memfit.estimate(job, device=DEVICE, precision="amp-bf16", batch_size=16)
    print(estimate)

    print("\nBy operator, largest first:")
    for op, size_bytes in list(estimate.breakdown.by_op.items())[:3]:
        print(f"  {op:<30}{size_bytes / 2**20:8.0f} MiB")

    print("\nOther batch sizes, from a few traces:")
    for batch_size in (1, 16, 64):
        other = estimate.at_batch(batch_size)
        print(f"  {batch_size:>4}  {other.peak_bytes / GIB:6.2f} GiB  {'fits' if other.fits else 'does not fit'}")

    print(f"\nThe largest batch on an {estimate.device.title}:")
    for precision in ("fp32", "amp-bf16"):
        largest = memfit.max_batch(job, device=DEVICE, precision=precision)
        print(f"  {precision}: {largest.batch_size} fits with 95%, {largest.limit} at best")
    even = memfit.max_batch(job, device=DEVICE, precision="amp-bf16", candidates=range(8, 4097, 8))
    print(f"  amp-bf16, in multiples of 8: {even.batch_size}")

    print("\nHost memory, with batches of 256:")
    for num_workers, pin_memory in ((0, False), (4, True), (32, True)):
        loading = replace(job, num_workers=num_workers, prefetch_factor=2, pin_memory=pin_memory)
        host = memfit.estimate(loading, device=DEVICE, batch_size=256).host
        print(f"  {num_workers} workers: {host.total_bytes / GIB:.2f} GiB")
        for part, size_bytes in host.parts.items():
            print(f"    {part:<60}{size_bytes / 2**20:9.1f} MiB")

    if len(sys.argv) > 1:
        estimate.report(sys.argv[1])
        print(f"\npage: {sys.argv[1]}")


if __name__ == "__main__":
    main()
