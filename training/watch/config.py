"""The ``fault`` section of a recipe. No torch here."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class FaultConfig:
    """What is watched for while training, and what is done about it."""

    step_timeout_s: float = 600.0
    """Seconds without any progress, in a step, an evaluation or a save, after which a run hangs: every rank leaves
    its stack, one line says which rank stands where, and all end."""

    start_timeout_s: float = 1800.0
    """The same until the first step of a process has ended: imports, data, rendezvous, loading, compilation."""

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        timeouts = {"step_timeout_s": self.step_timeout_s, "start_timeout_s": self.start_timeout_s}
        return [f"fault.{name} must be above 0, found {value}." for name, value in timeouts.items() if value <= 0]
