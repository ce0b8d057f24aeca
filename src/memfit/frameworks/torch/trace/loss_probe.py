"""How the loss of a batch is made of the losses of its parts, found out by running the loss on a few real samples.

Micro-batches give the gradient of the whole batch only if their losses are weighed as the loss function itself would
have done. So the loss of a few samples is computed at once and in two parts of unequal size, and every hypothesis
predicts the one from the other: a mean over samples, a sum, a mean over the elements of a tensor that count. What
predicts it to rounding, for several ways to part and for batches changed so that hypotheses disagree (labels set to
the ignored value, masks shortened), is the answer. Where nothing does, samples are compared with each other.

A loss may add up while its gradient doesn't: where it is divided by its own value, held constant. So gradients along
one direction must add up in the same way. Other runs are forward only, all of them on copies; dropout and batch norm
are set to evaluation mode, because micro-batches treat them apart, and the random numbers of the loss itself are
coupled to samples (`coupled_random`).
"""

import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.core.device import Origin
from memfit.core.oom import recognise
from memfit.core.printing import text_of
from memfit.core.settings import Weighting
from memfit.core.units import MIB
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.micro_batches import tensor_at
from memfit.frameworks.torch.shapes.batch import common_first_dimension, may_be_samples
from memfit.frameworks.torch.shapes.restoration import random_states_kept
from memfit.frameworks.torch.shapes.stand_in import map_tensors, tensors_in
from memfit.frameworks.torch.trace.coupled_random import CoupledRandom
from memfit.frameworks.torch.trace.loss_hypotheses import (
    HOLLOW,
    USUAL_IGNORED,
    Hypothesis,
    Loss,
    Observation,
    all_hypotheses,
    contrasted,
    evened,
    has_empty,
    hollowed,
    numbers_of,
    shortened,
    spread,
)
from memfit.frameworks.torch.trace.loss_slopes import directions, slope
from memfit.frameworks.torch.trace.real_runs import held_by, restoring

MAX_SAMPLES = 8
# Processor time, which other programs of the machine don't lengthen. Up to so many seconds for one sample, so many
# samples are probed; two, where it takes longer.
_SAMPLES_BY_COST = ((0.1, MAX_SAMPLES), (0.5, 4))
_LEAST_SAMPLES = 2
# So many measurements of each sample are looked at to choose samples that differ.
_MOST_MEASUREMENTS = 4096
# Sequences are cut to this length.
_MAX_POSITIONS = 64
# Once this much is spent, no further batches are tried. Of it, this much may go into trying more samples at once.
_LIMIT_SECONDS = 4.0
_MORE_SAMPLES_SECONDS = 1.0
# Models of more than this aren't copied in 64 bits, in which a term of the loss shows that is no smaller than this.
_DOUBLED_BYTES = 256 * MIB
_SMALL_TERM = 1e-6
_MAX_CHANGED_BATCHES = 12
_OTHER_SEED = 24_007
# Two samples are unlike where their losses differ by this share of the greater one: a term of 1e-4 that compares
# samples is then off by more than rounding (1e-5) explains. To find two, so many samples are looked at.
_UNLIKE = 0.3
_MAX_COMPARED = 4
_WHAT_TO_DO = (
    "To split the batch anyway, let the loss function return (loss, weight), where the loss of a batch is the mean of "
    "its parts' losses, weighed by these weights"
)
UNKNOWN_LISTS = (
    "it holds lists of tensors of one shape, which may be samples, and there was no way to try that out on a part. Put "
    "the tensors of a batch side by side, in one tuple or dictionary"
)


@dataclass(frozen=True, slots=True)
class Found:
    """How the losses of parts add up, None where they don't, and how that is known, or why it isn't, in a sentence.

    The origin is measured where the loss was run, assumed otherwise.
    """

    weighting: Weighting | None
    reason: str
    origin: Origin
    is_random: bool = False
    """Whether the loss draws numbers that no part of a batch gets again, such as an order of its samples."""
    ran_out: bool = False
    """Whether memory ran out, so that fewer samples may tell more."""


def find_weighting(
    model: torch.nn.Module, loss: Callable[[Any, Any], Any], batch: Any, max_samples: int = MAX_SAMPLES
) -> Found:
    """How the loss of a batch is made of the losses of its parts, by a few samples; the model is left as it was."""
    obstacle = _obstacle(model, batch)
    if obstacle:
        found = _assumed(obstacle)
    else:
        few = _varied(batch, max_samples)
        with restoring(model, loss):
            _switch_batch_effects_off(model)
            probe = _Probe(model, loss, few, batch)
            found = probe.run()
            if probe.found_nothing and (probe.draws or found.origin is Origin.ASSUMED):
                # Randomness inside of modules, such as dropout between layers of an LSTM, is off in evaluation mode.
                # What else differs there, such as a mean over the batch in training alone, is no reason to look there.
                model.eval()
                again = _Probe(model, loss, few, batch)
                other = again.run()
                probe.ran_out |= again.ran_out
                found = other if other.weighting is not None and other.origin is Origin.MEASURED else found
            found = replace(found, ran_out=probe.ran_out)
    if found.origin is Origin.ASSUMED and may_be_samples(batch):
        return replace(found, weighting=None, reason=UNKNOWN_LISTS)
    return found


def part_of(batch: Any, start: int, stop: int) -> Any:
    """Some samples of a batch; tensors are views, those without dimensions stay whole."""
    return map_tensors(batch, lambda tensor: tensor[start:stop] if tensor.dim() else tensor)


def _varied(batch: Any, most: int) -> Any:
    """A few samples of a batch, of which the second differs from the first in as many integers as any.

    Samples of one class, which are most of a batch where classes are rare, hide that a loss weighs classes; samples
    that are all complete hide that it leaves out what is missing.
    """
    num_samples = common_first_dimension(batch) or 0
    first = part_of(batch, 0, min(num_samples, most))
    parted = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    if any(len(tensor) != num_samples or tensor.layout is not torch.strided for tensor in parted):
        return first
    differing = [0] * num_samples
    for tensor in parted:
        if not tensor.is_floating_point() and not tensor.is_complex():
            is_other = (tensor != tensor[:1]).reshape(num_samples, -1).any(1).tolist()
            differing = [number + other for number, other in zip(differing, is_other, strict=True)]
    second = differing.index(max(differing))
    if most < 2:
        return first
    ends = _ends(parted, num_samples) if num_samples > most else []
    order = list(dict.fromkeys([0, second, *ends, *range(num_samples)]))[:most]
    if order == list(range(most)):
        return first
    return map_tensors(batch, lambda tensor: tensor[order] if tensor.dim() else tensor)


def _ends(tensors: list[torch.Tensor], num_samples: int) -> list[int]:
    """The samples with the most and the fewest missing, empty, large and positive measurements of each tensor."""
    figures: list[list[torch.Tensor]] = [[], [], [], []]
    for tensor in tensors:
        if tensor.is_floating_point():
            rows = tensor.detach().reshape(num_samples, -1)[:, :_MOST_MEASUREMENTS]
            known = rows.nan_to_num()
            found = (rows.isnan().sum(1), (known == 0).sum(1), known.mean(1), (known > 0).sum(1))
            for kind, figure in zip(figures, found, strict=True):
                kind.append(figure)
    varied = [figure for kind in figures for figure in kind if bool((figure != figure[0]).any())]
    return [int(end) for figure in varied for end in (figure.argmax(), figure.argmin())]


def _obstacle(model: torch.nn.Module, batch: Any) -> str:
    """Why there is nothing to run, or ""."""
    if callable(batch) and not isinstance(batch, torch.Tensor):
        return "the batch is given as a function, so there are no real samples"
    if any(torch.nn.parameter.is_lazy(p) for p in model.parameters()):
        return "the model has parameters without a shape yet"
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *tensors_in(batch))):
        return "the model or the batch has shapes only, no values"
    num_samples = common_first_dimension(batch)
    if num_samples is None:
        return "the batch's tensors have no first dimension in common"
    if num_samples < 2:
        return f"the batch has {num_samples} sample"
    return ""


def _assumed(why: str) -> Found:
    return Found(Weighting(), f"{why}: a mean over samples is assumed", Origin.ASSUMED)


def _switch_batch_effects_off(model: torch.nn.Module) -> None:
    """Dropout off, batch norm by its running statistics or, before it has any, by each sample's own.

    Attributes of the modules are set here and put back by `restoring`.
    """
    for module in model.modules():
        if isinstance(module, internals.BatchNorm):
            module.training = False
            # Statistics as they begin, 0 and 1, let the outputs of deep models be all alike.
            if module.running_mean is None or not module.num_batches_tracked:
                module.forward = lambda values: torch.nn.functional.group_norm(values, 1)  # type: ignore[method-assign, assignment]
        elif "drop" in type(module).__name__.lower():
            module.training = False


def _is_on_host(model: torch.nn.Module, batch: Any) -> bool:
    return all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *tensors_in(batch)))


def _are_unlike(one: float, other: float) -> bool:
    return math.isfinite(one) and math.isfinite(other) and abs(one - other) >= _UNLIKE * max(abs(one), abs(other), 1e-9)


class _Failed(Exception):
    """The user's loss raised, or gave what is no loss."""


class _Probe:
    """Runs the loss on parts of a few samples and asks which hypotheses survive."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[Any, Any], Any], batch: Any, whole: Any) -> None:
        self._model = model
        self._loss = loss
        self._batch = batch
        self._whole = whole  # the batch that the samples are from
        self._num_samples = common_first_dimension(batch) or 0
        self._needs_gradients = False
        self._checks_indices = True
        self._weighs_classes = False
        self._num_classes = 0
        self.found_nothing = False
        self.draws = False
        """Whether numbers were drawn, by the loss or within modules."""
        self.ran_out = False
        """Whether memory ran out with few samples."""
        self._num_positions: int | None = None  # to which sequences are cut
        self._directions: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """Parameters and a direction in which the slope of the loss is taken instead of the loss."""
        self._started = time.process_time()

    def run(self) -> Found:
        try:
            # The samples, cut short, at once and in two parts; fewer of them where the model is slow.
            self._cut_sequences()
            begun = time.process_time()
            # Two at once, because some models can't run one alone.
            self._evaluate(self._batch, 0, 2)
            cost = (time.process_time() - begun) / 2
            most = next((number for limit, number in _SAMPLES_BY_COST if cost <= limit), _LEAST_SAMPLES)
            num_samples = min(self._num_samples, most)
            self._batch = part_of(self._batch, 0, num_samples)
            observation = self._observe(self._batch, max(1, 3 * num_samples // 8))
        except _Failed as failure:
            # The step itself was traced: what fails is the part.
            return Found(None, f"{failure}, so that the batch can't be split", Origin.MEASURED)
        if not observation.is_finite:
            return _assumed(f"the loss of {observation.num_samples} samples is not finite")
        hypotheses = all_hypotheses(observation)
        survivors = [hypothesis for hypothesis in hypotheses if hypothesis.holds(observation)]
        if not survivors:
            return self._explain(observation)
        return self._choose(survivors, [observation])

    def _cut_sequences(self) -> None:
        """Leaves the beginnings of the samples where they are sequences of tokens that can be cut."""
        wide = [tensor for tensor in tensors_in(self._batch) if tensor.dim() > 1]
        lengths = {tensor.shape[1] for tensor in wide}
        if len(lengths) != 1 or max(lengths) <= _MAX_POSITIONS or any(tensor.is_floating_point() for tensor in wide):
            return
        whole, self._num_positions = self._batch, _MAX_POSITIONS
        self._batch = self._beginnings(whole)
        try:
            # Beginnings may be all padding.
            is_usable = math.isfinite(self._evaluate(self._batch, 0, 2).value)
        except _Failed:
            is_usable = False
        if not is_usable:
            self._batch, self._num_positions = whole, None

    def _beginnings(self, batch: Any) -> Any:
        length = self._num_positions
        return batch if length is None else map_tensors(batch, lambda t: t[:, :length] if t.dim() > 1 else t)

    def _observe(self, batch: Any, cut: int, whole: Loss | None = None) -> Observation:
        num_samples = common_first_dimension(batch) or 0
        return Observation(
            batch,
            cut,
            num_samples,
            first=self._evaluate(batch, 0, cut),
            second=self._evaluate(batch, cut, num_samples),
            whole=whole or self._evaluate(batch, 0, num_samples),
        )

    def _evaluate(self, batch: Any, start: int, stop: int) -> Loss:
        num_samples = common_first_dimension(batch) or 0
        # Losses may change what they are given.
        part = map_tensors(part_of(batch, start, stop), lambda tensor: tensor.detach().clone())
        mode = CoupledRandom(start, stop, num_samples)
        needs_gradients = self._needs_gradients or bool(self._directions)
        with random_states_kept(), torch.set_grad_enabled(needs_gradients), warnings.catch_warnings(), mode:
            # What a user's code has to say about a part is no news for the user.
            warnings.simplefilter("ignore")
            try:
                result = self._loss(self._model, part)
                value = Loss.read(result, mode.narrowest)
                if value is not None and self._directions:
                    value = slope(result, value, self._directions)
            except Exception as error:
                self.ran_out |= recognise(error) is not None
                text = text_of(error)[:200]
                number = "" if start == 0 and stop == num_samples else f" on a part of {stop - start} samples"
                failure, value = f"the loss can't be computed{number} ({type(error).__name__}: {text})", None
            else:
                self._checks_indices &= mode.checks_indices
                self._weighs_classes |= mode.weighs_classes
                self.draws |= mode.num_draws > 0
                self._num_classes = mode.num_classes or mode.num_picked
                failure = f"the loss function returned {type(result).__name__}, not a scalar tensor"
        if value is not None:
            return value
        if needs_gradients:
            raise _Failed(failure)
        # Losses with a gradient penalty differentiate on their way.
        self._needs_gradients = True
        return self._evaluate(batch, start, stop)

    def _try(self, batch: Any, cut: int, whole: Loss | None = None) -> Observation | None:
        """A further observation; None where the loss can't be run on that or isn't finite."""
        try:
            found = self._observe(batch, cut, whole=whole)
        except _Failed:
            return None
        return found if found.is_finite else None

    def _has_time(self) -> bool:
        return time.process_time() - self._started < _LIMIT_SECONDS

    def _choose(self, survivors: list[Hypothesis], observations: list[Observation]) -> Found:
        """Further observations until one hypothesis is left or there are no more to make."""
        real = observations[0]
        for observation in self._further(survivors, real):
            observations.append(observation)
            before = survivors
            survivors = [hypothesis for hypothesis in survivors if hypothesis.holds(observation)]
            if not survivors:
                return self._explain(observation, counts=all(one.weighting.kind == "count" for one in before))
        plainest_first = sorted(survivors, key=lambda hypothesis: hypothesis.order)
        best = next((one for one in plainest_first if self._is_told_apart(one, observations)), None)
        mean = next((one for one in survivors if one.weighting.kind == "samples"), None)
        likeliest = best or mean
        if likeliest is not None and self._gradient_differs(likeliest, real):
            self.found_nothing = True
            text = (
                f"the loss may be {likeliest.describe()}, but its gradient isn't: a part of it is held constant, as "
                f"where it is divided by its own value (loss / loss.detach()). {_WHAT_TO_DO}"
            )
            return Found(None, text, Origin.MEASURED)
        if best is None and mean is not None:
            return _assumed("the losses of the probed samples are too much alike to tell how they add up")
        if best is None or (self._weighs_classes and best.weighting.kind != "given"):
            return self._explain(real)
        for observation in self._closer_looks(real):
            if not best.holds(observation):
                return self._explain(observation)
        number = f"found with {real.num_samples} samples: the loss is {best.describe()}"
        return Found(best.weighting, number, Origin.MEASURED)

    def _gradient_differs(self, best: Hypothesis, real: Observation) -> bool:
        """Whether slopes of a few samples don't add up as their losses do; False where that can't be told."""
        ran_out = self.ran_out
        self._directions = directions(self._modules()) if self._has_time() else []
        if not self._directions:
            return False
        try:
            for few, cut in ((part_of(real.batch, 0, 2), 1), (real.batch, real.cut)):
                found = self._try(few, cut)
                if found is not None and best.weighs_both(found):
                    floor = max(loss.floor for loss in (found.first, found.second, found.whole))
                    return not best.holds(replace(found, whole=replace(found.whole, rounding=0.0, floor=floor)))
            return False
        finally:
            self._directions, self.ran_out = [], ran_out

    def _modules(self) -> list[torch.nn.Module]:
        """The model, and what modules the loss function holds."""
        return [self._model, *(held for held in held_by(self._loss) if isinstance(held, torch.nn.Module))]

    def _closer_looks(self, real: Observation) -> Iterator[Observation]:
        """More samples at once, by whose number a loss may branch; and 64 bits, in which small terms show.

        They are extra: where memory runs out in them, or they can't be run, the answer is that of few samples.
        """
        ran_out = self.ran_out
        total, number = common_first_dimension(self._whole) or 0, real.num_samples
        begun = cost = 0.0
        while number < total and not self._needs_gradients and 4 * cost < _MORE_SAMPLES_SECONDS and self._has_time():
            number, begun = min(4 * number, total), time.process_time()
            found = self._try(self._beginnings(part_of(self._whole, 0, number)), max(1, 3 * number // 8))
            cost, self.ran_out = time.process_time() - begun, ran_out
            if found is None:
                break
            yield found
        modules = self._modules()
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        # Of others there are no copies: the user's own would become others.
        are_copied = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors) and not any(
            isinstance(part, torch.jit.ScriptModule) for module in modules for part in module.modules()
        )
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if not are_copied or size_bytes > _DOUBLED_BYTES or not self._has_time():
            return
        with restoring(self._model, self._loss):
            try:
                for module in modules:
                    module.double()
                batch = map_tensors(real.batch, lambda t: t.double() if t.is_floating_point() else t)
            except Exception:
                return  # a device or a kind of tensor that has no such numbers, or no memory for them
            for few, cut in ((part_of(batch, 0, 2), 1), (batch, real.cut)):
                found, self.ran_out = self._try(few, cut) if self._has_time() else None, ran_out
                if found is not None:
                    rounding = max(found.whole.rounding, _SMALL_TERM)
                    yield replace(found, whole=replace(found.whole, rounding=rounding))

    def _is_told_apart(self, hypothesis: Hypothesis, observations: list[Observation]) -> bool:
        if any(map(hypothesis.is_told_apart, observations)):
            return True
        if hypothesis.weighting.kind != "count" or any(map(hypothesis.weighs_both, observations)):
            return False
        real = observations[0]
        further = self._try(evened(real.batch, hypothesis.weighting), real.cut)
        return further is not None and hypothesis.holds(further) and hypothesis.is_told_apart(further)

    def _further(self, survivors: list[Hypothesis], real: Observation) -> Iterator[Observation]:
        batch = real.batch
        on_host = _is_on_host(self._model, batch)
        two = part_of(batch, 0, 2)
        # Values that an operator refuses poison a CUDA context, so elsewhere numbers are changed with care.
        found = self._try(contrasted(two, num_classes=None if on_host else self._num_classes), 1)
        is_compared, second = False, math.nan
        if found is not None:
            second = found.second.value
            is_compared = _are_unlike(found.first.value, found.second.value)
            yield found
        if on_host:
            for changed in self._changed_batches(survivors, real):
                is_compared |= _are_unlike(changed.first.value, changed.second.value)
                yield changed
        found = None if is_compared else self._most_unlike(batch, second)
        if found is not None:
            yield found
        other_cut = max(1, 5 * real.num_samples // 8)
        if other_cut != real.cut and self._has_time():
            found = self._try(batch, other_cut, real.whole)
            if found is not None:
                yield found
        yield from self._hollowed_batches(batch, two, on_host=on_host)

    def _hollowed_batches(self, batch: Any, two: Any, *, on_host: bool) -> Iterator[Observation]:
        """Batches in which other elements count, where a loss leaves some out by their value."""
        for value in HOLLOW:
            found = self._try(hollowed(two, value), 1) if self._has_time() else None
            if found is not None:
                yield found
        # A number may be refused beside others of its sample, which on CUDA is the end of everything.
        changed = spread(batch, numbers_of(self._whole)) if on_host and self._has_time() else None
        if changed is not None:
            found = self._try(changed, max(1, 3 * (common_first_dimension(changed) or 0) // 8))
            if found is not None:
                yield found

    def _most_unlike(self, batch: Any, second: float = math.nan) -> Observation | None:
        """The first two samples that are unlike, or those that differ most: a small term shows that compares samples.

        `second` is the loss of the second sample, where it is known.
        """
        num_samples = common_first_dimension(batch) or 0
        if num_samples < 3:
            return None
        values = {1: second} if math.isfinite(second) else {}
        others = [number for number in range(num_samples) if number not in values]
        for number in others[:_MAX_COMPARED]:
            if not self._has_time() or (values and _are_unlike(min(values.values()), max(values.values()))):
                break
            try:
                value = self._evaluate(batch, number, number + 1).value
            except _Failed:
                return None
            if math.isfinite(value):
                values[number] = value
        if len(set(values.values())) < 2:
            return None
        ends = [min(values, key=values.__getitem__), max(values, key=values.__getitem__)]
        return self._try(map_tensors(batch, lambda tensor: tensor[ends] if tensor.dim() else tensor), 1)

    def _changed_batches(self, survivors: list[Hypothesis], real: Observation) -> Iterator[Observation]:
        batch = part_of(real.batch, 0, 2)
        # The most usual value first, for every tensor.
        testable = sorted((w for w in survivors if w.can_be_tested), key=lambda hypothesis: hypothesis.rank)
        # What no count explains may still depend on lengths that these samples have in common.
        testable = testable or [w for w in all_hypotheses(real) if w.can_be_tested and not w.rank]
        suspects = list(dict.fromkeys((w.weighting.tensor, w.weighting.ignored) for w in testable))
        remaining = list(survivors)
        if not self._checks_indices:
            tensors = {place: tensor_at(batch, place) for place, _ in suspects}
            suspects = [(at, value) for at, value in suspects if tensors[at].min() <= value <= tensors[at].max()]
        # Where nothing of a sample counts, any mean over what counts would have passed until now.
        is_untested = any(has_empty(batch, place, ignored) for place, ignored in suspects)
        for place, ignored in suspects[:_MAX_CHANGED_BATCHES]:
            # Once one tensor's count is left of all hypotheses, nothing more can be learned. Labels that are ignored
            # by PyTorch's own convention come up in later batches even where this one has none: always tried.
            kinds = {(w.weighting.kind, w.weighting.tensor) for w in remaining}
            is_settled = not is_untested and len(kinds) == 1 and any(w.can_be_tested for w in remaining)
            if is_settled or not (self._has_time() or ignored == USUAL_IGNORED):
                return
            found = self._try(shortened(batch, place, ignored), 1)
            if found is not None:
                is_untested = False
                remaining = [hypothesis for hypothesis in remaining if hypothesis.holds(found)]
                yield found

    def _explain(self, observation: Observation, *, counts: bool = False) -> Found:
        """Why no hypothesis holds."""
        self.found_nothing = True
        if self._is_random(observation):
            return replace(_assumed("the loss draws random numbers that can't be held still"), is_random=True)
        number = observation.num_samples
        if observation.whole.weight is not None:
            text = f"the (loss, weight) of {number} samples is not the weighed mean of those of its parts: check weight"
        elif counts:
            text = (
                f"the loss of {number} samples is a mean over something that is not the count of one tensor of the "
                f"batch. {_WHAT_TO_DO}"
            )
        elif self._has_constant(observation):
            text = (
                f"the loss of {number} samples is a sum over samples plus a term of its own, such as weight "
                "regularisation, which every part would add again. Use the mean over samples, or the optimizer's "
                "weight_decay"
            )
        else:
            text = (
                f"the loss of {number} samples is neither the mean nor the sum of the losses of its parts: samples "
                "are compared with each other (in-batch negatives, contrastive losses), weighed by their classes, or "
                f"normalised as a whole. {_WHAT_TO_DO}"
            )
        return Found(None, text, Origin.MEASURED)

    def _is_random(self, observation: Observation) -> bool:
        """Whether the same samples have another loss with other seeds, though coupled draws stay the same."""
        with random_states_kept():
            # Other numbers; not by `torch.manual_seed`, which imports the compiler: that takes seconds.
            torch.default_generator.manual_seed(_OTHER_SEED)
            random.seed(_OTHER_SEED)
            if "numpy.random" in sys.modules:
                sys.modules["numpy.random"].seed(_OTHER_SEED)
            try:
                again = self._evaluate(observation.batch, 0, observation.num_samples)
            except _Failed:
                return False
        return abs(again.value - observation.whole.value) > observation.noise

    def _has_constant(self, observation: Observation) -> bool:
        """Whether two ways to part the samples leave the same excess."""
        other = max(1, 5 * observation.num_samples // 8)
        found = self._try(observation.batch, other, observation.whole) if other != observation.cut else None
        if found is None:
            return False
        excess, again = (o.first.value + o.second.value - o.whole.value for o in (observation, found))
        # A mean of unequal parts may look like that by chance, a sum with a constant does at every cut.
        return math.isclose(excess, again, rel_tol=1e-3, abs_tol=0) and abs(excess - again) <= 4 * observation.noise
