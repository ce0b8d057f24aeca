"""What memfit asks of a framework: the one interface behind which frameworks differ.

Drivers (`estimator`, `planner`, `guard`) know frameworks through these Protocols alone; `memfit.api.jobs` picks the
adapter of a job. Each framework has one `adapter.py`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from memfit.core.device import Device
from memfit.core.errors import BadInput
from memfit.core.guarding import BatchSize, Blame, Fallbacks, MemoryFailure, Splitting
from memfit.core.job import Job
from memfit.core.plan import Plan
from memfit.core.profile import Measurement, Profile
from memfit.core.settings import Settings
from memfit.core.stack import Stack
from memfit.core.step_facts import StepFacts
from memfit.core.trace import Tracer


class ProfiledStep(Protocol):
    """A step that is quick to trace: the planner has it profiled as often as it likes."""

    @property
    def batch_size(self) -> int | None:
        """Samples of one update; None where the batch can't be split."""

    @property
    def gives_weight(self) -> bool:
        """Whether the loss function returns (loss, weight)."""

    @property
    def num_samples(self) -> int | None:
        """Samples of the batch that was given, which may be fewer than those of one update."""

    @property
    def is_compiled(self) -> bool:
        """Whether the step, as it is, runs compiled code."""

    def profile(self, batch_size: int | None, settings: Settings) -> Profile:
        """The step at a batch size, closely observed, as settings run it."""

    def why_not_split(self) -> str:
        """Why the batch can't be split into micro-batches."""

    def find_weighting(self) -> Any:
        """How the losses of micro-batches add up."""

    def place(self) -> str:
        """Where model and batch have values: the name of a device, or "" where they have none."""

    def measure(
        self, sizes: list[int], *, precision: str | None = None, limit_seconds: float = 4.0
    ) -> tuple[Measurement, ...]:
        """Short real passes at some micro-batch sizes; none where they fail."""

    def measure_updates(self) -> dict[str, float]:
        """Seconds of an update by kind of kernels; empty where the optimizer isn't at hand."""

    def time_passes(self, plans: Sequence[Settings], limit_seconds: float) -> list[float | None]:
        """Seconds of all passes of an update as each of these settings runs them."""

    def host_rates(self) -> tuple[float, float]:
        """(floating-point operations, bytes moved) per second of this machine's processor, measured."""


class Ranks(Protocol):
    """The processes that train a model together; what isn't said otherwise holds for one on its own."""

    num_ranks: int = 1
    is_first: bool = True
    """Whether this is the one that speaks and writes for all."""

    def share(self, text: str) -> str:
        """The text of the first process."""
        return text

    def any(self, value: bool) -> bool:
        """True if true on any process."""
        return value

    def agreed(self, value: bool) -> bool:
        """True if true on all processes."""
        return value

    def agree(self, numbers: list[int]) -> list[int]:
        """The least of each number over all processes."""
        return numbers


class SingleProcess(Ranks):
    """A process on its own."""


class GuardedLoop(Protocol):
    """A training loop whose steps can be undone, as `memfit.guard.driver` drives it."""

    ranks: Ranks = SingleProcess()
    """The processes that train the model."""
    model_name: str
    """The class of the model."""
    owner: object
    """Whose checkpoints are written: another guard of the same one takes over."""
    learns_from_start: bool = True
    """Whether good steps are counted before memory first runs out: not where looking at a model takes long."""
    batch: Any
    """The batch whose step was tried last."""
    happened: bool | None = None
    """Whether the last step updated the parameters; None where no update was due, False where it was left out."""
    in_update: bool = False
    """Whether memory ran out in the update, after all passes."""
    num_halvings: int = 1
    """How often the micro-batch that didn't fit has to be halved at least."""
    broken: str = ""
    """Why model and optimizer are between two steps, from which nothing goes on; "" where they aren't."""

    # One step.

    def size_of(self, batch: Any) -> BatchSize:
        """Samples and elements of a batch."""

    def fallbacks(self) -> Fallbacks:
        """What can be tried where memory runs out."""

    def attempt(self, settings_of: Callable[[Any], Settings], *, again: bool) -> MemoryFailure | None:
        """Runs the step in work once; what ran out.

        Args:
            settings_of: how to run a batch.
            again: whether it ran out before, and was rolled back.
        """

    def roll_back(self) -> None:
        """Everything is as it was before the step.

        Raises:
            BrokenUpdate: that isn't possible.
        """

    def blame(self, error: Exception, *, again: bool) -> Blame | None:
        """What is wrong with the settings in use, where an attempt ended with an error; None: they are not to blame."""
        return None

    def splitting(self) -> Splitting:
        """How the batch in work can be split."""
        return Splitting()

    def why_not_split(self) -> str:
        """Why it can't be, where it has no number of samples."""
        return ""

    def differences(self, settings: Settings) -> str:
        """What differs from the step with the whole batch at once, or ""."""
        return ""

    def explain(self, failure: MemoryFailure, settings: Settings, why_whole: str) -> str:
        """What was tried, what would be needed and what to do, where nothing is left to try."""

    # Plans and findings.

    def identity(self, batch: Any, host_bytes: int | None) -> Sequence[object]:
        """Everything that a finding about memory depends on."""
        return ()

    def usable_bytes(self, budget_bytes: int, share: float) -> int:
        """What a plan may use of a budget."""
        return int(budget_bytes * share)

    def room_bytes(self, host_bytes: int | None, budget_bytes: int | None) -> int | None:
        """What a step may take, for a plan when memory first runs out; None: none is made then."""
        return None

    def plan(self, make_plan: Callable[..., Plan], budget_bytes: int) -> Settings:
        """Settings that are expected to fit, from the planner."""
        raise BadInput(f"{self.model_name} must be planned with memfit.plan before it is guarded.")

    # Checkpoints.

    def mark(self) -> Any:
        """Where the run is, after an update."""
        return True

    def is_at(self, mark: Any) -> bool:
        """True while the loop is still at `mark`, so that a checkpoint of that update can be written."""
        return True

    @property
    def is_connected(self) -> bool:
        """Whether the processes can still talk to each other."""
        return False

    def write_state(self, directory: Path, progress: dict[str, Any]) -> None:
        """Writes everything that a resume needs into a directory."""
        raise BadInput(f"there are no checkpoints of {self.model_name}.")

    def read_state(self, directory: Path, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Takes over what `write_state` wrote; the progress that it was given, once `check` has not refused it."""
        raise BadInput(f"there are no checkpoints of {self.model_name}.")

    def resumed(self, directory: Path) -> Sequence[str]:
        """Messages to log after `read_state`."""
        return ()

    def close(self) -> None:
        """Leaves the model as it was without a guard."""


class Adapter(Protocol):
    """A framework."""

    name: str
    """As it is imported: "torch", "keras", "jax"."""

    title: str
    """As people write it: "PyTorch"."""

    def stack(self) -> Stack | None:
        """The versions of PyTorch and its libraries that are installed; None where it doesn't run on PyTorch."""

    def open_job(self, job: Job, device: Device, batch_size: int | None = None) -> Tracer:
        """The job, checked and ready to be traced, at its own batch size or the given one."""

    def planned_job(self, job: Job, precision: str) -> Job:
        """The job as it is planned: with the precision that must be used; refuses what can't be planned.

        Args:
            job: what to plan.
            precision: "keep", "auto", or one by its name.
        """

    def planning(self, tracer: Any, target: Device) -> ProfiledStep | StepFacts:
        """What the planner needs to know of an open job."""

    def apply(self, plan: Plan, model: Any, optimizer: Any) -> Any:
        """Model and optimizer, run as a plan says."""

    def named_job(self, name: str, optimizer: str, sequence_length: int | None, image_size: int | None) -> Job:
        """The usual job of a model that the framework's libraries know by name."""

    def guarded_loop(self, *subject: Any, **options: Any) -> GuardedLoop:
        """The training loop of a model, or of a loss function, as a guard drives it."""
