"""Folders of images, one folder for each class.

Pixels are given as they are stored, 8 bits of red, green and blue each, with rows first: gray becomes three equal
channels, palettes are looked up, transparency is left away, ink (CMYK) becomes light, and of 16 bits the upper 8 are
kept. Orientation that a camera noted beside the pixels (EXIF) isn't applied. All of that is what torchvision's
ImageFolder and Keras' image_dataset_from_directory do too, apart from 16 bits, of which the former keeps the lower 8.
Of animations the first frame is taken.
"""

import contextlib
import functools
import io
import logging
import os
import stat
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from memfit.core.errors import BadFile, reason_of
from memfit.core.units import MIB
from memfit.data.files import drop_pages, is_remote, open_file, read_bytes
from memfit.data.remote_files import shown
from memfit.data.source import Array, Field, Layout, SampleSource, Storage
from memfit.data.sources.image_index import build_index
from memfit.data.sources.tables import load

_log = logging.getLogger("memfit")

# Images whose sizes are looked at when a folder is opened.
_NUM_PROBED = 16
# Images that are tried for one that can be read, where others are to be skipped.
_MOST_TRIED = 1000
_NUM_NAMED = 20
# Of an image that isn't compressed at all: four channels of two bytes.
_MOST_PIXEL_BYTES = 8
_T = TypeVar("_T")


class _Unreadable(Exception):
    """An image that can't be read, and why."""


class ImageSource(SampleSource):
    """The images in a folder, each read by itself: PNG, JPEG, BMP, GIF, WebP and TIFF.

    An image that can't be read raises an error (`on_error="fail"`) or is left out ("skip"). With `image_size`, (height,
    width), all are resized to that, whatever their proportions (bilinear, with antialiasing).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        on_error: str = "fail",
        follow_links: bool = False,
        image_size: tuple[int, int] | None = None,
    ) -> None:
        _pillow()
        self.name = os.fspath(path)
        self._index = index = build_index(self.name, follow_links=follow_links)
        if index.left_out:
            _log.warning("%s: %s.", self.name, index.left_out)
        self._skipped = SkippedSamples() if on_error == "skip" else None
        self._image_size = image_size
        shapes = [(*(image_size or shape[:2]), 3) for shape in self._probe()]
        image = Field("image", np.dtype(np.uint8), shapes[0], is_ragged=len(set(shapes)) > 1)
        label = (Field("label", np.dtype(np.int64), (), is_label=True),) if index.classes else ()
        self.fields = (image, *label)
        self.num_samples = index.num_images
        # Pillow holds four bytes a pixel where the result has three, and gives them out through a copy.
        self.layout = Layout(is_by_sample=True, scratch_bytes=3 * image.sample_bytes)
        self.classes = index.classes

    def _probe(self) -> Iterator[tuple[int, int, int]]:
        """Shapes of some images, at least one, from their first bytes."""
        num = self._index.num_images
        probed = dict.fromkeys(np.linspace(0, num - 1, min(num, _NUM_PROBED)).astype(int).tolist())
        num_readable = 0
        for sample in [*probed, *(number for number in range(min(num, _MOST_TRIED)) if number not in probed)]:
            if num_readable and sample not in probed:
                return
            path = self._index.path(sample)
            try:
                yield _quietly(_shape, _read(path))
                num_readable += 1
            except _Unreadable as error:
                if self._skipped is None:
                    raise _bad(path, error) from None
        if not num_readable:
            raise BadFile(
                f"none of {min(num, _MOST_TRIED)} images in {shown(self._index.root)!r} can be read; the first is "
                f"{self.sample_name(0)!r}."
            )

    @property
    def num_skipped(self) -> int:
        """Different images that were left out because they can't be read, by workers too."""
        return 0 if self._skipped is None else len(self._skipped.numbers())

    @property
    def skipped(self) -> list[str]:
        """Paths of the first of these."""
        numbers = () if self._skipped is None else self._skipped.numbers()[:_NUM_NAMED]
        return [self.sample_name(int(number)) for number in numbers]

    def fingerprint(self) -> str:
        """Changes with names, sizes and times of change of the images, as they were when the folder was opened."""
        return self._index.digest

    def read_sample(self, sample: int) -> tuple[Array, ...] | None:
        path = self._index.path(sample)
        try:
            image = _quietly(functools.partial(_pixels, size=self._image_size), _read(path))
        except _Unreadable as error:
            if self._skipped is not None:
                self._skipped.add(sample)
                return None
            raise _bad(path, error) from None
        if not self.classes:
            return (image,)
        return image, np.array(self._index.numbers[sample], np.int64)

    def stored_bytes(self, sample: int) -> int:
        return int(self._index.sizes[sample])

    def sample_name(self, sample: int) -> str:
        return shown(self._index.path(sample))

    def storage(self) -> Storage:
        return Storage(warnings=self._index.notes)


class SkippedSamples:
    """Which samples were left out because they can't be read; copies of it in other processes are the same set.

    Workers, which find what can't be read, may be forked or started anew, may be killed, and belong to whichever loader
    made them, so nothing is sent: each marks what it left out in a small file that all of them know, one byte a sample.
    It is mostly holes, and is removed with the object that made it.
    """

    def __init__(self) -> None:
        self._path = ""
        # What couldn't be written down, such as on a full disk, is known to this process alone.
        self._own: set[int] = set()
        with contextlib.suppress(OSError):
            descriptor, self._path = tempfile.mkstemp(prefix="memfit-skipped-")
            os.close(descriptor)
            weakref.finalize(self, _remove, self._path, os.getpid())

    def add(self, sample: int) -> None:
        """Notes that a sample was left out."""
        try:
            with open(self._path, "r+b", buffering=0) as file:
                file.seek(sample)
                file.write(b"\1")
        except OSError:
            self._own.add(sample)

    def numbers(self) -> Array:
        """Those that were left out so far, by any process, ascending."""
        noted: Array = np.empty(0, np.int64)
        with contextlib.suppress(OSError):
            noted = np.flatnonzero(np.fromfile(self._path, np.uint8))
        return np.union1d(noted, np.array(list(self._own), np.int64)) if self._own else noted

    def __getstate__(self) -> tuple[str]:
        return (self._path,)

    def __setstate__(self, state: tuple[str]) -> None:
        (self._path,) = state
        self._own = set()


def _remove(path: str, process: int) -> None:
    # A forked process has the same object, and ends before the one that reads the count.
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _bad(path: str, error: Exception) -> BadFile:
    return BadFile(
        f"the image {shown(path)!r} can't be read: {str(error).rstrip('.')}. Replace or remove it; a stream leaves "
        'such images out with --on-error skip (on_error="skip").'
    )


@functools.cache
def _pillow() -> Any:
    return load("PIL.Image", "this is a folder of images")


def _read(path: str) -> bytes:
    """All bytes of a file, of which the kernel keeps none."""
    if is_remote(path):
        try:
            file = open_file(path)
            return read_bytes(file, 0, file.size)
        except BadFile as error:
            raise _Unreadable(str(error)) from None
    try:
        # What would be read for ever, such as a pipe, or would fill the memory.
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise _Unreadable("it is a pipe, a device or a folder, and no file")
        limit = _pillow().MAX_IMAGE_PIXELS
        # Notes beside the pixels may take as much as those of a small image.
        if limit is not None and status.st_size > _MOST_PIXEL_BYTES * limit + MIB:
            raise _Unreadable(
                f"its file has {status.st_size:,} bytes, more than {_MOST_PIXEL_BYTES} for each of "
                f"PIL.Image.MAX_IMAGE_PIXELS = {limit:,}"
            )
        with open(path, "rb", buffering=0) as local:
            content = local.readall()
            drop_pages(local.fileno())
    except OSError as error:
        raise _Unreadable(reason_of(error)) from None
    return content


@contextlib.contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """An image whose first bytes were understood; whatever goes wrong in the block makes it unreadable."""
    if not data:
        raise _Unreadable("the file is empty")
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(data)) as image:
            num_pixels, limit = image.width * image.height, pillow.MAX_IMAGE_PIXELS
            # Pillow itself only warns up to twice its limit.
            if limit is not None and num_pixels > limit:
                raise _Unreadable(
                    f"it has {num_pixels:,} pixels, more than PIL.Image.MAX_IMAGE_PIXELS = {limit:,}, against which "
                    "files made to exhaust memory are checked"
                )
            yield image
    except (_Unreadable, MemoryError, Warning):
        raise
    except pillow.UnidentifiedImageError:
        raise _Unreadable("it isn't an image of a kind that Pillow knows, or its beginning is damaged") from None
    except pillow.DecompressionBombError as error:
        raise _Unreadable(str(error)) from None
    except Exception as error:
        # Decoders of damaged files raise nearly everything.
        raise _Unreadable(str(error) or type(error).__name__) from None


_warnings_lock = threading.Lock()
os.register_at_fork(
    before=_warnings_lock.acquire, after_in_parent=_warnings_lock.release, after_in_child=_warnings_lock.release
)


def _quietly(action: Callable[[bytes], _T], data: bytes) -> _T:
    """What `action` makes of an image, whatever the program does about warnings."""
    try:
        return action(data)
    except Warning:
        # The program has made errors of warnings, such as those about damaged notes beside the pixels. Only then are
        # filters touched, which belong to all threads.
        with _warnings_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return action(data)


def _shape(data: bytes) -> tuple[int, int, int]:
    with _opened(data) as image:
        return image.height, image.width, 3


def _pixels(data: bytes, size: tuple[int, int] | None = None) -> Array:
    """An array of (height, width, 3)."""
    with _opened(data) as image:
        image.load()
        # Older versions of Pillow open PNG files of 16 bits as of 32.
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
            image = _pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise _Unreadable(f"its pixels are of 32 bits (mode {image.mode}), which 8 can't stand for")
        if "transparency" in image.info and image.mode == "P":
            # Pillow warns of a palette with transparency that is lost at once.
            image = image.convert("RGBA")
        image = image if image.mode == "RGB" else image.convert("RGB")
        if size is not None and size != (image.height, image.width):
            image = image.resize(size[::-1], _pillow().Resampling.BILINEAR)
        return np.array(image)
