"""``[[stage]]``: the parts of a run in which another recipe holds, as their writer gives them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from program.schema import JSON, Count
from training.config.lr_schedule import Schedule


@dataclass(kw_only=True, slots=True, frozen=True)
class StageConfig:
    """One table ``[[stage]]``: where the stage ends, counted from the run's beginning, and what it changes."""

    name: str
    """What metrics, messages and the history call it."""

    until_iterations: int | None = None
    """Iterations of the run after which the stage ends. One of the three is given."""

    until_samples: int | None = None
    """The same in samples: the first iteration that reaches them is the stage's last."""

    until_tokens: int | None = None
    """The same in tokens, which are a sample's seq_length in each stage."""

    parallel: Mapping[str, JSON] = field(default_factory=dict)
    model: Mapping[str, JSON] = field(default_factory=dict)
    kernels: Mapping[str, JSON] = field(default_factory=dict)
    precision: Mapping[str, JSON] = field(default_factory=dict)
    data: Mapping[str, JSON] = field(default_factory=dict)
    optimizer: Mapping[str, JSON] = field(default_factory=dict)
    train: Mapping[str, JSON] = field(default_factory=dict)
    eval: Mapping[str, JSON] = field(default_factory=dict)
    checkpoint: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def sections(self) -> dict[str, Mapping[str, JSON]]:
        """What it changes, by section."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value and isinstance(value, Mapping)}


@dataclass(kw_only=True, slots=True, frozen=True)
class BegunStage:
    """A stage that a run has begun, as its checkpoints keep it: what is over stays as it was, whatever the recipe says
    by now."""

    name: str
    iteration: Count
    """Iterations before it; likewise the others."""
    samples: Count
    tokens: Count


RUN_BEGIN = BegunStage(name="", iteration=0, samples=0, tokens=0)


@dataclass(kw_only=True, slots=True, frozen=True)
class RunPosition:
    """How far a run has come, as far as stages are counted from there."""

    now: BegunStage
    """As a stage without a name would begin here."""
    begun: tuple[BegunStage, ...] = ()
    """Empty of a run that had no stages until now."""
    schedule: Schedule | None = None
    """The curve that held until now."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Begin:
    """Where in a run a configuration takes over. Made by training/config/stages.py, never given."""

    begun: tuple[BegunStage, ...] = (RUN_BEGIN,)
    """All stages until this one, itself included."""
    end: BegunStage = RUN_BEGIN
    """As a stage would begin after its last iteration."""
    count: int = 0
    """Of all stages; 0: the run has none."""
    data_iteration: int = 0
    """Iterations before the order of its data: where the last stage that changed data began."""
    curve: BegunStage = RUN_BEGIN
    """The stage with which its curve of the learning rate began."""

    @property
    def first(self) -> BegunStage:
        """This stage."""
        return self.begun[-1]

    @property
    def ends(self) -> tuple[int, ...]:
        """Iterations at which this stage and those before it end."""
        return tuple(one.iteration for one in (*self.begun[1:], self.end) if one.iteration)

    @property
    def title(self) -> str:
        """For a line of text; quoted, since a pipeline has stages too."""
        return f'stage "{self.first.name}" ({len(self.begun)} of {self.count})'

    @property
    def is_last(self) -> bool:
        return len(self.begun) >= self.count


WHOLE_RUN = Begin()
"""Of a run without stages."""
