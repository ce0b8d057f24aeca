"""The largest batch of MobileNetV3 on a 12 GB card, by precision: `python examples/max_batch/max_batch.py`."""

import memfit

DEVICE = "rtx-3060"


def main():
    job = memfit.named_job("torchvision:mobilenet_v3_large", optimizer="sgd-momentum")
    for precision in ("fp32", "amp-fp16"):
        found = memfit.max_batch(job, device=DEVICE, precision=precision)
        even = memfit.max_batch(job, device=DEVICE, precision=precision, candidates=range(8, 4097, 8))
        needed = found.estimate.peak_bytes / 2**30
        print(f"{precision}: {found.batch_size} images are safe ({needed:.1f} GiB), {found.limit} are the limit")
        print(f"  as a multiple of 8: {even.batch_size}")
        for batch_size, peak_bytes, fits in found.tried:
            print(f"  {batch_size:>5}  {peak_bytes / 2**30:6.2f} GiB  {'fits' if fits else 'does not fit'}")


if __name__ == "__main__":
    main()
