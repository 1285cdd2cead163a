"""Cases to be priced: layouts of a model under a program, as memory sees them, on a machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.costs import cases
from models.costs.cases import ColumnGroup, codes, matrices_of
from tools.plan.cost.hardware import Hardware
from tools.plan.cost.kinds import dealt

GENERATIONS = ("volta", "ampere", "hopper", "blackwell")


@dataclass(kw_only=True, slots=True, frozen=True)
class PricedCase(cases.MemoryCase):
    """One layout of one model on one machine under one program."""

    machine: Hardware


class PricedColumns(cases.MemoryColumns):
    """The same cases, attribute by attribute: ``columns.machine.domain`` is an array over the cases."""

    def __init__(self, priced: Sequence[PricedCase]) -> None:
        super().__init__(priced)
        self.machine = ColumnGroup([case.machine for case in priced], skip=("generation",))
        self.kinds = dealt(priced)
        self.whole_matrices = matrices_of(priced, whole=True) if any(one.software.muon_steps for one in priced) else []
        self.generation = codes([case.machine.generation for case in priced], GENERATIONS)
