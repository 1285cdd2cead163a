"""Draw docs/pictures/*.svg: plain SVG, no script, colours for light and dark.

    python -m docs.pictures

Each picture brings its own background, so that it is readable where a page is dark and the reader's system is light.
"""

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "pictures"

STYLE = """
svg { --page: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #818b98; --box: #f6f8fa; --one: #0b61c4; --two: #b35900;
  --three: #1a7f37; --one-box: #ddeeff; --two-box: #ffe9d1; --three-box: #dcf5e1; --four-box: #f0e4fb; --four: #7a3eb1 }
@media (prefers-color-scheme: dark) {
  svg { --page: #161b22; --ink: #e6edf3; --soft: #a0aab5; --line: #7d8590; --box: #21262d; --one: #79b8ff;
    --two: #ffb86b; --three: #6fdd8b; --one-box: #12304f; --two-box: #4a2c0a; --three-box: #11391d; --four-box: #35204c;
    --four: #d2a8ff }
}
text { font-family: -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: 14px;
  fill: var(--ink) }
.page { fill: var(--page) } .box { fill: var(--box); stroke: var(--line) } .soft { fill: var(--soft); font-size: 13px }
.head { font-weight: 600; font-size: 15px } .mono { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace;
  font-size: 13px }
.one { fill: var(--one) } .two { fill: var(--two) } .three { fill: var(--three) } .four { fill: var(--four) }
.one-box { fill: var(--one-box); stroke: var(--one) } .two-box { fill: var(--two-box); stroke: var(--two) }
.three-box { fill: var(--three-box); stroke: var(--three) } .four-box { fill: var(--four-box); stroke: var(--four) }
.one-line { stroke: var(--one) } .two-line { stroke: var(--two) } .three-line { stroke: var(--three) }
.plain-line { stroke: var(--line) } line { stroke-width: 2 } .dashed { fill: none; stroke: var(--soft);
  stroke-dasharray: 5 4 }
""".strip()


class Picture:
    """Elements of an SVG, in the order in which they are drawn."""

    def __init__(self, width: int, height: int, title: str) -> None:
        """Sizes in pixels; the title is what a screen reader says."""
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, kind: str = "box") -> None:
        """A rectangle with round corners."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>')

    def text(self, x: int, y: int, words: str, kind: str = "", anchor: str = "start") -> None:
        """One line; y is its base line."""
        self.parts.append(f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def arrow(self, x1: int, y1: int, x2: int, y2: int, kind: str = "plain", both: bool = False) -> None:
        """A line with a head at its end, or at both ends."""
        start = f' marker-start="url(#{kind})"' if both else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{kind}-line" marker-end="url(#{kind})"{start}/>'
        )

    def svg(self) -> str:
        """The file."""
        heads = "\n".join(
            f'<marker id="{kind}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="6" markerHeight="6" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="var(--{colour})"/></marker>'
            for kind, colour in (("plain", "line"), ("one", "one"), ("two", "two"), ("three", "three"))
        )
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{heads}</defs>",
            f'<rect width="{self.width}" height="{self.height}" rx="10" class="page"/>',
            *self.parts,
            "</svg>",
            "",
        ])  # fmt: skip


def grid() -> str:
    """TP 2 x PP 2 x DP 2: eight ranks, and one step through them."""
    picture = Picture(960, 560, "The grid of TP 2 x PP 2 x DP 2 ranks, and one optimizer step through it")
    picture.text(24, 34, "Eight ranks: TP 2 x PP 2 x DP 2", "head")
    picture.text(24, 56, "rank = tp + 2 dp + 4 pp", "soft mono")
    for stage in range(2):
        x = 150 + 270 * stage
        picture.text(x + 90, 92, f"pipeline stage {stage}", "two", "middle")
        layers = "embedding, layers 0-1" if stage == 0 else "layers 2-3, output, loss"
        picture.text(x + 90, 110, layers, "soft", "middle")
        for replica in range(2):
            _cell(picture, x, 124 + 170 * replica, 2 * replica + 4 * stage)
    for replica in range(2):
        y = 124 + 170 * replica
        picture.text(24, y + 50, f"replica {replica}", "three")
        picture.text(24, y + 70, "its own half", "soft")
        picture.text(24, y + 87, "of the batch", "soft")
        picture.arrow(340, y + 38, 408, y + 38, "two")
        picture.arrow(408, y + 72, 340, y + 72, "two")
    for stage in range(2):
        x = 150 + 270 * stage
        picture.arrow(x + 48, 244, x + 48, 290, "three", both=True)
        picture.arrow(x + 132, 244, x + 132, 290, "three", both=True)
    picture.text(375, 150, "activations", "soft", "middle")
    picture.text(375, 216, "gradients", "soft", "middle")
    picture.text(24, 448, "TP", "one head")
    picture.text(60, 448, "each matrix is cut over two ranks; collectives in every layer: keep within a node")
    picture.text(24, 474, "PP", "two head")
    picture.text(60, 474, "the layers are cut into stages; small sends between neighbours")
    picture.text(24, 500, "DP", "three head")
    picture.text(60, 500, "the batch is cut; gradients are reduced once per step")
    picture.text(24, 532, "CP cuts the sequence, EP the experts: more axes of the same grid.", "soft")
    _step(picture, 640)
    return picture.svg()


def _cell(picture: Picture, x: int, y: int, first: int) -> None:
    """The TP ranks of one stage of one replica."""
    picture.box(x, y, 180, 112)
    for tp in range(2):
        picture.box(x + 12 + 84 * tp, y + 12, 72, 60, "one-box")
        picture.text(x + 48 + 84 * tp, y + 39, f"rank {first + tp}", "", "middle")
        picture.text(x + 48 + 84 * tp, y + 58, f"tp {tp}", "one", "middle")
    picture.arrow(x + 40, y + 90, x + 140, y + 90, "one", both=True)


STEPS = (
    ("forward", "microbatch by microbatch, stage by stage", "two"),
    ("backward", "the same way back (1F1B)", "two"),
    ("reduce", "gradients, over the replicas", "three"),
    ("measure", "norm and loss, the same on all ranks", ""),
    ("decide", "NaN, Inf, spikes: update or skip", ""),
    ("clip", "by the norm of the whole model", ""),
    ("update", "AdamW, each replica its share (ZeRO-1)", "three"),
    ("gather", "new weights, over the replicas", "three"),
)


def _step(picture: Picture, x: int) -> None:
    """The parts of a step, from above to below."""
    picture.text(x, 34, "One optimizer step", "head")
    picture.text(x, 56, "training/step.py", "soft mono")
    for number, (name, about, kind) in enumerate(STEPS):
        y = 74 + 58 * number
        picture.box(x, y, 296, 46, f"{kind}-box" if kind else "box")
        picture.text(x + 12, y + 20, f"{number + 1}  {name}", "head")
        picture.text(x + 12, y + 38, about, "soft")
        if number:
            picture.arrow(x + 148, y - 12, x + 148, y)


def checkpoint() -> str:
    """Pieces of a global tensor: written by four ranks, read by three in another layout."""
    picture = Picture(960, 430, "How a checkpoint is written, committed, and read in another layout")
    picture.text(24, 34, "1  every rank writes", "head")
    picture.text(24, 56, "its own pieces; nothing is gathered", "soft")
    kinds = ("one", "two", "three", "four")
    for rank, kind in enumerate(kinds):
        x, y = 24 + 100 * (rank % 2), 78 + 70 * (rank // 2)
        picture.box(x, y, 96, 66, f"{kind}-box")
        picture.text(x + 48, y + 30, f"rank {rank}", kind, "middle")
        picture.text(x + 48, y + 50, f"tp {rank % 2} dp {rank // 2}", "soft", "middle")
    picture.text(122, 242, "one matrix, as TP 2 x DP 2 holds", "soft", "middle")
    picture.text(122, 260, "its optimizer state", "soft", "middle")
    picture.arrow(232, 144, 330, 144)
    picture.text(346, 34, "2  one process commits", "head")
    picture.text(346, 56, "before the rename there is no checkpoint", "soft")
    picture.box(346, 78, 268, 170, "dashed")
    picture.text(360, 102, "iter_0000100.tmp-9f3a/", "mono")
    for rank, kind in enumerate(kinds):
        picture.text(380, 126 + 20 * rank, f"rank_0000{rank}.bin", f"mono {kind}")
    picture.text(380, 206, "pieces.jsonl  index.json", "mono")
    picture.text(380, 228, "manifest.json   written last", "mono")
    picture.arrow(480, 254, 480, 286)
    picture.text(494, 276, "rename", "soft")
    picture.box(346, 290, 268, 40)
    picture.text(360, 315, "iter_0000100/", "mono")
    picture.arrow(480, 334, 480, 362)
    picture.text(494, 354, "then", "soft")
    picture.box(346, 366, 268, 40)
    picture.text(360, 391, "latest", "mono")
    picture.arrow(622, 310, 700, 220)
    picture.text(716, 34, "3  any layout reads", "head")
    picture.text(716, 56, "all bytes verified first", "soft")
    for rank, kind in enumerate(kinds):
        picture.box(716 + 84 * (rank % 2), 78 + 70 * (rank // 2), 80, 66, f"{kind}-box")
    for reader in range(3):
        y = 74 + 48 * reader
        picture.box(710, y, 176, 46, "dashed")
        picture.text(894, y + 29, f"rank {reader}")
    picture.text(826, 242, "the same matrix, cut otherwise:", "soft", "middle")
    picture.text(826, 260, "each rank reads the parts it needs", "soft", "middle")
    picture.text(24, 315, "Training goes on meanwhile:", "")
    picture.text(24, 337, "what is written is a copy in shared memory.", "soft")
    picture.text(24, 369, "After a kill at any moment:", "")
    picture.text(24, 391, "the newest committed checkpoint is whole.", "soft")
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {"grid.svg": grid, "checkpoint.svg": checkpoint}


def main() -> int:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main())
