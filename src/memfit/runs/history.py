"""Memory over time in bounded space: a run of a month leaves no more to keep than one of a minute."""

from dataclasses import replace

from memfit.core.supervised import Sample

_MAX_SAMPLES = 2000


class History:
    """Samples of memory; where there are too many, neighbours become one that has the larger of each figure.

    Args:
        max_samples: how many are kept at most.
    """

    def __init__(self, max_samples: int = _MAX_SAMPLES) -> None:
        self._max = max(4, max_samples)
        self._samples: list[Sample] = []
        self._stride = 1
        self._num_merged = 0

    def add(self, sample: Sample) -> None:
        """Adds the next sample in time."""
        if self._num_merged and self._num_merged < self._stride:
            self._samples[-1] = _larger(self._samples[-1], sample)
            self._num_merged += 1
            return
        if len(self._samples) >= self._max:
            pairs = zip(self._samples[::2], self._samples[1::2], strict=False)
            self._samples = [_larger(first, second) for first, second in pairs]
            self._stride *= 2
        self._samples.append(sample)
        self._num_merged = 1

    def end_stretch(self) -> None:
        """What comes next is not merged with what was before: another attempt begins."""
        self._num_merged = 0

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What is kept, in order."""
        return tuple(self._samples)


def _larger(first: Sample, second: Sample) -> Sample:
    groups = [size for size in (first.group_bytes, second.group_bytes) if size is not None]
    return replace(
        first,
        script_bytes=max(first.script_bytes, second.script_bytes),
        others_bytes=max(first.others_bytes, second.others_bytes),
        group_bytes=max(groups, default=None),
    )
