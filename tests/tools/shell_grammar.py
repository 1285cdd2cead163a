"""Random scripts of what tools.from_megatron follows, each from a seed.

Templates are bash with letters behind % for what is drawn: %N a variable, %L a list, %o plain text, %v a value,
%w a word, %p a pattern, %q one without a slash, %a arithmetic, %k a number, %n a small one, %s a sign of [,
%c a condition, %b commands, %x a simple command, %r a parameter; ¶ ends a line.
"""

import re
from random import Random

NAMES = ("A", "B", "C", "LONG_NAME")
PATTERNS = "[ab] [!a] *a a* ? [0-9] *. */ _* '*' \"a\" [[:digit:]] -* a . _ 0".split()
PARAMETERS = """
$%N  ${%N}  ${#%N}  ${%N:-%o}  ${%N-%o}  ${%N:+%o}  ${%N+%o}  ${%N:=%o}  ${%N#%p}  ${%N##%p}  ${%N%%p}  ${%N%%%p}
${%N/%q/%o}  ${%N//%q/%o}  ${%N/#%q/%o}  ${%N/%%q/%o}  ${%N//%q}  ${%N: %k}  ${%N: %k:%n}  ${%N^}  ${%N^^}  ${%N,,}
${%L[@]}  ${%L[*]}  ${#%L[@]}  ${%L[1]}  ${%L[-1]}  ${%L[@]:1:2}  ${%L[@]#%p}  ${!%L[@]}  ${%L[$((%N_N % 2))]}
$#  $1  $@  $*  ${@:2}  $((%a))  ${%N:-${%N:-%o}}  ${!%N_R}  $(echo %o | tr a-b x)  $(f_%N %o)  $(dirname %o)
$(echo %o $%N)  $(basename %o.x .x)  $(printf '%s|' $%N)  `echo $%N`  $(seq 1 %n)
"""
CONDITIONS = """
[ "$%N" = "%o" ]  [ -z $%N ]  [ -n "$%N" ]  [[ $%N == %p ]]  [[ $%N != %o ]]  [ ${#%N} %s %k ]  [[ -n $%N && $%N != a ]]
(( %a ))  true  false  ! [ $%N = %o ]  [ -z "$%N" -o 1 %s %k ]  [[ $%N =~ ^[a-b]+$ ]]  [ ${%N:-%o} != %o ]
f_%N %o > /dev/null  [ -z ${%N+x} ]  [[ %o < %o ]]  test -n $%N  [[ ${%N} == "%r" ]]
case $%N in %p) true;; *) false;; esac
"""
SIMPLE = """
%N=%v
%N=%v
%N+=%v
%L=(%w %w)
%L+=(%w)
%L[1]=%v
%N_N=$((%a))
(( %N_N += %a ))
set -- %w %w
set --
shift 2>/dev/null
unset %N
export %N=%w
%N_R=%N
read -r %N %N <<< %t
let %N_N='%a'
f_%N() { local C=x; %N+=f; echo "$1" %w; [ $# -gt 0 ]; }
f_%N %w > /dev/null
IFS=,
IFS=' '
unset IFS
eval "%N=\\$LONG_NAME"
printf -v %N '%s:%s' %w
cat > t.env <<EOF¶%N_E=%w¶EOF¶source ./t.env
%N=$(%N=%v; echo $%N)
"""
COMPOUND = """
if %c; then¶%b¶else¶%b¶fi
%c && %x
%c || %x
for %N in %w %w; do¶%b¶done
for %N in ; do¶%b¶done
case %w in¶%p) %b;;¶*) %b;;¶esac
( %b¶)
{ %b¶}
%I=0¶while [ $%I -lt 2 ]; do¶%I=$((%I+1))¶%b¶%c && continue¶%b¶done
for ((%I=0; %I<2; %I++)); do¶%b¶%c && break¶done
echo %w | while read -r %N; do C+=$%N; done
"""
SIGNS = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")
OPERATORS = "+ - * % / < > <= >= == != && || & | ^ ,".split()
_HOLE = re.compile(r"%([NLovwpqaknscbxrtI])")


def _alternatives(text: str, between: str = "\n") -> list[str]:
    return [one for line in text.strip("\n").split("\n") for one in line.split(between)]


class Grammar:
    """What a script is made of, drawn at random."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.loops = 0

    def characters(self, alphabet: str, least: int, most: int) -> str:
        return "".join(self.draw.choices(alphabet, k=self.draw.randint(least, most)))

    def filled(self, template: str, depth: int = 0) -> str:
        """A template with everything drawn. %I is one counter of its own, which nothing else sets."""
        if "%I" in template:
            self.loops += 1
            template = template.replace("%I", f"I{self.loops}")
        return _HOLE.sub(lambda hole: self.drawn(hole[1], depth), template)

    def drawn(self, what: str, depth: int) -> str:
        text = self.characters("ab01-_./:= ,*?[]{}~x\\'\"", 0, 6)
        plain = self.characters("ab01-_./:=,x+@%", 1, 5)
        match what:
            case "N":
                return self.draw.choice(NAMES)
            case "L":
                return self.draw.choice(("L", "M"))
            case "o":
                return plain
            case "t":
                return "'" + text.replace("'", "") + "'"
            case "k":
                return str(self.draw.randint(-9, 40))
            case "n":
                return str(self.draw.randint(0, 4))
            case "s":
                return self.draw.choice(SIGNS)
            case "p":
                return self.draw.choice([*PATTERNS, self.characters("ab01-_./*?", 1, 3)])
            case "q":
                return self.drawn("p", 0).replace("/", "") or "a"
            case "a":
                return self.arithmetic(2)
            case "r":
                return self.filled(self.draw.choice(_alternatives(PARAMETERS, "  ")))
            case "w":
                return "".join(self.part() for _ in range(self.draw.randint(1, 3)))
            case "v":
                return self.draw.choice([self.part, self.part, lambda: self.drawn("w", 0)])()
            case "c":
                return self.filled(self.draw.choice(_alternatives(CONDITIONS, "  ")))
            case "x":
                return self.command(0)
        return "\n".join(self.command(depth - 1) for _ in range(self.draw.randint(1, 2)))

    def part(self) -> str:
        quoted = '"' + self.drawn("t", 0)[1:-1].replace("\\", "").replace('"', "") + '"'
        parameter = self.drawn("r", 0)
        mixed = f'"{self.drawn("o", 0)} {parameter}{self.drawn("r", 0)}"'
        fixed = self.draw.choice(["{a,b}", "{1..3}", "\\ ", "\\$", "{x", "a{,b}c"])
        return self.draw.choice(
            [self.drawn("o", 0), self.drawn("t", 0), quoted, parameter, parameter, f'"{parameter}"', mixed, fixed]
        )

    def arithmetic(self, depth: int) -> str:
        if not depth:
            return self.draw.choice([f"({self.drawn('k', 0)})", f"{self.drawn('N', 0)}_N"])
        one, two, three = (self.arithmetic(depth - 1) for _ in range(3))
        name = self.drawn("N", 0)
        return self.draw.choice(
            [one, f"{one} {self.draw.choice(OPERATORS)} {two}", f"({one})", f"! {one}", f"({one} ? {two} : {three})",
             f"{name}_N++", f"{name}_N += {one}"]
        )  # fmt: skip

    def command(self, depth: int) -> str:
        """A command that sets variables."""
        simple = depth < 1 or self.draw.random() < 0.6
        template = self.draw.choice(_alternatives(SIMPLE if simple else COMPOUND))
        return self.filled(template.replace("¶", "\n"), depth)

    def script(self) -> str:
        """Variables, commands that change them, and the program with some words."""
        head = ["set -- one 'two words'", *(self.filled(f"{name}=%t") for name in NAMES)]
        head += [self.filled(f"{name}_N=%k\n{name}_R=B\nf_{name}() {{ echo $1; }}") for name in NAMES]
        head += [self.filled(f"{name}=(%w %w)") for name in ("L", "M")]
        head += [self.command(2) for _ in range(self.draw.randint(0, 6))]
        words = " ".join(self.drawn("w", 0) for _ in range(self.draw.randint(0, 4)))
        return "\n".join([*head, f"torchrun pretrain_gpt.py --first {words}"])


def script(seed: int) -> str:
    """A script."""
    return Grammar(seed).script()
