"""Cases to be priced: layouts of a model under a program, as memory sees them, on a machine. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass

from tools.plan.machine import Machine
from training.memory import cases
from training.memory.cases import Group, codes

GENERATIONS = ("volta", "ampere", "hopper", "blackwell")


@dataclass(kw_only=True, slots=True, frozen=True)
class Case(cases.Case):
    """One layout of one model on one machine under one program."""

    machine: Machine


class Columns(cases.Columns):
    """The same cases, attribute by attribute: ``columns.machine.domain`` is an array over the cases."""

    def __init__(self, priced: Sequence[Case]) -> None:
        super().__init__(priced)
        self.machine = Group([case.machine for case in priced], skip=("generation",))
        self.generation = codes([case.machine.generation for case in priced], GENERATIONS)
