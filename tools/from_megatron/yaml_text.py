"""YAML from outside: every scalar as the text that stands there, with its line; no tags, and a bounded number of
values."""

from dataclasses import dataclass
from typing import Any

import yaml

from program.errors import UserError

MOST_BYTES, MOST_NODES = 1 << 20, 50_000


@dataclass(frozen=True, slots=True)
class YamlText:
    """A scalar."""

    text: str
    line: int
    quoted: bool = False

    @property
    def value(self) -> Any:
        """None, a truth value, a number, or the text."""
        if self.text.lower() in ("true", "false"):  # in quotes, too, where a configuration wants a truth value
            return self.text.lower() == "true"
        if self.quoted:
            return self.text
        if self.text.lower() in ("", "null", "~") or self.text == "None":  # none is a word: of positions, of losses
            return None
        for kind in (int, float):
            try:
                return kind(self.text)
            except ValueError:
                continue
        return self.text


type YamlValue = YamlText | list["YamlValue"] | dict[str, "YamlValue"]


def read_yaml(text: str, where: str, again: list[str] | None = None) -> YamlValue:
    """The first document of a text. again: gets sentences on keys that stand in it more than once.

    Raises UserError for what is no YAML, and for more than a configuration has.
    """
    if len(text) > MOST_BYTES:
        raise UserError(f"{where}: expected at most {MOST_BYTES:,} characters of YAML, found {len(text):,}.")
    try:
        node = next(iter(yaml.compose_all(text, Loader=yaml.SafeLoader)), None)
        return {} if node is None else _Nodes(where, again if again is not None else []).value(node)
    except yaml.MarkedYAMLError as error:
        at = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise UserError(f"{where}: {at}not YAML: {error.problem or 'something is never closed'}.") from None
    except RecursionError:
        raise UserError(f"{where}: not YAML: it nests too deep, or an alias (*) stands within what it names.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: not YAML: {str(error).partition(chr(10))[0][:200] or 'unreadable'}.") from None


class _Nodes:
    """Nodes as values, and how many there were."""

    def __init__(self, where: str, again: list[str]) -> None:
        self.where, self.count, self.again = where, 0, again

    def value(self, node: yaml.Node) -> YamlValue:
        self.count += 1
        if self.count > MOST_NODES:
            raise UserError(f"{self.where}: more than {MOST_NODES:,} values.")
        if isinstance(node, yaml.ScalarNode):
            return YamlText(node.value, node.start_mark.line + 1, node.style is not None)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(each) for each in node.value]
        found: dict[str, YamlValue] = {}
        merged: dict[str, YamlValue] = {}
        for key, each in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for source in each.value if isinstance(each, yaml.SequenceNode) else [each]:
                    inner = self.value(source)
                    merged = {**(inner if isinstance(inner, dict) else {}), **merged}
            else:
                name, before = str(getattr(key, "value", "")), len(found)
                found[name] = self.value(each)
                if len(found) == before:
                    self.again.append(f"line {key.start_mark.line + 1}: {name} stands here again, and this one counts.")
        return {**merged, **found}


def plain(value: YamlValue) -> Any:
    """As Python has it."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value.value
