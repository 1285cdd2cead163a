"""What a script can do while bash reads it: compute, read what lies beside it, and spend its time. Nothing else."""

import _thread
import contextlib
import fcntl
import mmap
import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from campaign import param
from tools.from_megatron.shell import seal
from tools.from_megatron.shell.programs import SHELLS
from tools.from_megatron.shell.run import Ran, Setting, run

MARK = "_4207001_"


def ran(text: str, folder: Path, seconds: float = 20.0) -> Ran:
    """A script of that text, in a folder."""
    path = folder / "script.sh"
    path.write_text(text)

    def answer(words: list[str], given: bool, content: Callable[[str], str | None]) -> list[str]:
        del given
        if words[2] in SHELLS and "-c" in words:
            return ["script", "0", "/@/nested/1", "bash", "0", "0", words[-1]]
        return ["print", f"{MARK}\n", "0"]

    return run(Setting(text, path), answer, lambda file, line: MARK, "_420700_", seconds)


def values(found: Ran) -> dict[str, str]:
    """Variables as they were set at last."""
    pairs = [step.text.partition("=") for step in found.steps if "=" in step.text.split(" ")[0]]
    return {name: value.strip("'") for name, _, value in pairs}


def left_over(found: Ran) -> list[str]:
    """Processes of a run that are still there."""
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    return [stat for stat in stats if stat.rpartition(")")[2].split()[2] == str(found.pid)]


WRITES = r"""
echo x > {there}
echo x >> {there}
echo x >| {there}
echo x &> {there}
: > {kept}
echo more >> {kept}
exec 5> {there}
exec 5<> {there}; echo x >&5
builtin exec 5> {there}
builtin exec /bin/touch {there}
exec /bin/touch {there}
/bin/touch {there}
/usr/bin/touch {there}
touch {there}
command touch {there}
command -p touch {there}
builtin command -p touch {there}
env touch {there}
bash -c 'touch {there}; /bin/touch {there}; echo x > {there}'
/bin/bash -c 'echo x > {there}'
/bin/sh -c 'echo x > {there}'
eval '/bin/touch {there}'
A=/bin/touch; $A {there}
unset -f command_not_found_handle; touch {there}
command_not_found_handle() { /bin/"$@"; }; touch {there}
PATH=/bin:/usr/bin:/sbin touch {there}
export PATH=$PATH:/usr/local/bin; python3 -c 'open("{there}", "w")'
hash -p /bin/touch cat; cat {there}
builtin hash -p /bin/touch x; x {there}
set +r; /bin/touch {there}
BASH_ENV=/dev/null /bin/touch {there}
enable -f {folder}/x.so x; x {there}
enable -n command; command touch {there}
trap '/bin/touch {there}' EXIT DEBUG ERR RETURN
coproc /bin/touch {there}; wait
cat <(/bin/touch {there})
echo x > >(cat > {there})
mapfile -t -c 1 -C '/bin/touch {there} #' < {kept}
source <(echo /bin/touch {there})
/bin/touch {there} &
(/bin/touch {there})
history -w {there}
fc -l; compgen -C '/bin/touch {there}' x
complete -C /bin/touch x
echo x | tee {there}
echo x | tee -a {kept}
sed -n 'w {there}' {kept}
sed -i s/kept/lost/ {kept}
sed '1e /bin/touch {there}' {kept}
echo x | sed 's/x/touch \/tmp/e'
awk 'BEGIN {{ system("/bin/touch {there}") }}'
awk 'BEGIN {{ print "x" > "{there}" }}'
awk 'BEGIN {{ "/bin/touch {there}" | getline }}'
awk 'BEGIN {{ print "x" | "/bin/tee {there}" }}'
sort -o {there} {kept}
sort --compress-program=/bin/touch -S 1 {kept}
echo x | tee /proc/self/fd/7 7< {kept}
echo x | tee /dev/fd/7 7< {kept}
exec 7< {kept}; builtin exec 7< {kept}; echo x > /dev/fd/7
printf x > /proc/self/cwd/there
printf x > /proc/$PPID/cwd/there
printf x > /dev/fd/../../..{there}
cat {kept} > {folder}/a/../there
cp {kept} {there}
ln -s {kept} {there}
mkdir {there}
rm -f {kept}
/bin/rm -f {kept}
mv {kept} {there}
truncate -s 0 {kept}
chmod 0 {kept}
find . -exec /bin/touch {there} \;
xargs /bin/touch {there} < /dev/null
python3 -c 'open("{there}", "w")'
perl -e 'open(F, ">{there}")'
/usr/bin/env python3 -c 'open("{there}", "w")'
/lib64/ld-linux-x86-64.so.2 /bin/touch {there}
basename $(/bin/touch {there})
A[$(/bin/touch {there})0]=1
[[ $(/bin/touch {there}) ]]
cat > x.sh <<EOF
/bin/touch {there}; echo x > {there}
EOF
. ./x.sh; bash x.sh; ./x.sh
""".strip()


@pytest.mark.parametrize("every", [3, param(1)])
def test_nothing_is_written_and_no_program_starts(tmp_path: Path, every: int) -> None:
    """Each line by itself, as whole scripts: what was there is as it was, and nothing else is there."""
    folder = tmp_path / "folder"
    folder.mkdir()
    kept, there = folder / "kept", folder / "there"
    kept.write_text("kept\n")
    lines = WRITES.replace("cat > x.sh <<EOF\n", "cat > x.sh <<EOF\\n").replace("{there}\nEOF\n", "{there}\\nEOF\\n")
    attacks = [line.replace("\\nEOF\\n", "\nEOF\n").replace("<<EOF\\n", "<<EOF\n") for line in lines.split("\n")]
    assert len(attacks) > 70
    for attack in attacks[::every]:
        text = attack.replace("{there}", str(there)).replace("{kept}", str(kept)).replace("{folder}", str(folder))
        found = ran(text.replace("{{", "{").replace("}}", "}"), folder)
        assert sorted(path.name for path in folder.iterdir()) == ["kept", "script.sh"], attack
        assert (kept.read_text(), oct(kept.stat().st_mode & 0o777)) == ("kept\n", oct(0o644)), attack
        assert not left_over(found), attack


LIBRARY = next(Path("/usr/lib").glob("*/libm.so.6"), Path("/usr/lib64/libm.so.6"))


@pytest.mark.parametrize(
    "line", ["enable -f ./x.so x", "cat x.so > y.so; enable -f ./y.so x", "LD_PRELOAD=./x.so seq 1"]
)
def test_no_code_beside_it_is_loaded(line: str, tmp_path: Path) -> None:
    """A whole library: of the system's own, bash says that it has no such builtin."""
    (tmp_path / "x.so").write_bytes(LIBRARY.read_bytes())
    said = ran(line, tmp_path).said
    assert "failed to map segment" in said or ("LD_PRELOAD" in line and "cannot be preloaded" in said), said
    if "enable" in line:
        assert "cannot find x_struct" in ran(f"enable -f {LIBRARY} x", tmp_path).said


def test_what_the_caller_has_open_is_closed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    file = os.open(kept, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 40, inheritable=True)
    try:
        ran("echo x >&40; builtin echo x 1>&40", tmp_path)
    finally:
        os.close(40)
        os.close(file)
    assert kept.read_text() == ""


def test_a_path_through_a_link_of_the_systems_leads_nowhere_else(tmp_path: Path) -> None:
    """The kernel goes through a link before it goes up, a text does not."""
    links = (each for each in Path("/usr/lib").glob("*/*") if each.is_symlink() and each.is_dir())
    outside = [each for each in links if not each.resolve().is_relative_to("/usr")]
    paths = [f"{each}{'/..' * len(each.resolve().parts[1:])}/etc/passwd" for each in outside]
    for path in [*paths, "/library/../etc/passwd"]:
        found = ran(f"A=$(sed -n 1p {path}); builtin cd ..; B=$(echo *); C=$(readlink /proc/$PPID/cwd)", tmp_path)
        assert not values(found)["A"].startswith("root"), path
        assert values(found)["B"] == "script.sh" and not values(found)["C"]


def test_what_it_writes_it_reads_again(tmp_path: Path) -> None:
    text = "mkdir -p logs; echo a > logs/x; echo b >> logs/x; sed s/a/c/ < logs/x > y 2>&1; A=$(cat y); [ -f y ] && B=1"
    text += "\necho z > /no/such/folder/file; C=$(< /no/such/folder/file); cat > $C.json <<EOF\n{}\nEOF\n"
    text += "D=$(wc -l < z.json)"
    found = values(ran(text, tmp_path))
    assert (found["A"], found["B"], found["C"], found["D"]) == ("c\nb", "1", "z", "1")
    assert [path.name for path in tmp_path.iterdir()] == ["script.sh"]


def test_it_reads_what_lies_beside_it_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "beside").write_text("beside\n")
    (tmp_path / "secret").write_text("secret\n")
    (folder / "link").symlink_to(tmp_path / "secret")
    text = "A=$(cat beside); B=$(cat ../secret); C=$(< link); D=$(cat /etc/passwd); E=$(cat /proc/self/environ)\n"
    text += f"F=$(sed -n p {tmp_path}/secret); cd /; G=$(cat {tmp_path.name}/secret); H=$(echo /etc/* ../*)"
    text += f"; [ -f {tmp_path}/secret ] && I=seen; read -r J < /etc/hostname; J=$J"
    found = values(ran(text, folder))
    assert found.pop("A") == "beside" and "I" not in found
    assert found.pop("H") == "/etc/* ../*"
    assert {found[name] for name in "BCEFGJ"} == {MARK} and not found["D"]


def test_no_connection_is_opened(tmp_path: Path) -> None:
    with socket.socket() as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        for one in (server, datagrams):
            one.bind(("127.0.0.1", 0))
            one.settimeout(0.2)
        server.listen()
        tcp, udp = f"/dev/tcp/127.0.0.1/{server.getsockname()[1]}", f"/dev/udp/127.0.0.1/{datagrams.getsockname()[1]}"
        ran(
            f"exec 3<> {tcp}; echo x > {tcp}; cat < {tcp}; echo x > {udp}; builtin exec 3> {tcp}; nc 127.0.0.1",
            tmp_path,
        )
        with pytest.raises(TimeoutError):
            server.accept()
        with pytest.raises(TimeoutError):
            datagrams.recv(1)


@pytest.mark.parametrize(
    "text",
    [
        param("while :; do :; done"),
        param("(while :; do :; done) & disown"),
        "set -m; (while :; do :; done) & exit",
        "trap '' TERM INT HUP; (trap '' TERM; while :; do :; done) & ",
        "f() { f | f & }; f",
        param("f() { f & f & }; f; wait"),
        param("while :; do echo flood >&2; done"),
        "A=xxxxxxxxxxxxxxxx; while :; do A=$A$A; done",
        param("while :; do echo flood > file$((N++)); done"),
        "while :; do echo flooooooooooooooooooooooooooooood; done > file",
        param("awk 'BEGIN { while (1) print 1 }' > file"),
        "f() { f; }; f",
        param("read -r < <(while :; do :; done)"),
        "coproc cat; cat <&${COPROC[0]}",
    ],
)
def test_it_ends_and_leaves_nothing_behind(text: str, tmp_path: Path) -> None:
    found = ran(text, tmp_path, seconds=0.5)
    assert not left_over(found)
    assert [path.name for path in tmp_path.iterdir()] == ["script.sh"]


def test_no_other_process_is_touched(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        ran(f"kill -9 {other.pid}; kill {other.pid}; kill -9 -1; kill 0; builtin kill -9 {os.getpid()}", tmp_path)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


FORBIDDEN: dict[str, Callable[[], object]] = {
    "execve": lambda: os.execv("/bin/true", ["true"]),
    "socket": lambda: socket.socket(),
    "socketpair": lambda: socket.socketpair(),
    "open to write": lambda: os.open("/dev/null", os.O_WRONLY),
    "create": lambda: os.open("/tmp/closed-shell", os.O_CREAT),
    "mkdir": lambda: Path("/tmp/closed-shell").mkdir(),
    "rename": lambda: Path("/tmp/closed-shell").rename("/tmp/closed-shell-2"),
    "link": lambda: os.link("/bin/true", "/tmp/closed-shell"),
    "symlink": lambda: Path("/tmp/closed-shell").symlink_to("/bin/true"),
    "chmod": lambda: Path("/tmp").chmod(0o1777),
    "truncate": lambda: os.truncate("/dev/null", 0),
    "times": lambda: os.utime("/tmp"),
    "kill": lambda: os.kill(os.getppid(), 0),
    "group": lambda: os.setpgid(0, 0),
    "session": lambda: os.setsid(),
    "priority": lambda: os.nice(1),
    "namespaces": lambda: os.unshare(os.CLONE_NEWUSER) if hasattr(os, "unshare") else os.setsid(),
    "memory file": lambda: os.memfd_create("x"),
    "chroot": lambda: os.chroot("/"),
    "terminal": lambda: os.tcsetpgrp(0, os.getpgrp()),
    "thread": lambda: _thread.start_new_thread(lambda: None, ()),
    "signals of a descriptor": lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid()),
    "code": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
    "folder": lambda: os.chdir("/"),
}


def test_the_kernel_refuses_what_bash_does_not_ask_for() -> None:
    """Behind bash stands a filter of system calls: each of these fails in a process of Python's that it closes."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            done = []
            os.close(seal.seal())  # without answers, what would be asked for fails
            for name, call in FORBIDDEN.items():
                with contextlib.suppress(OSError, RuntimeError):  # the latter of a thread
                    call()
                    done.append(name)
            os.write(writer, "\n".join(done or ["none"]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    said = os.read(reader, 4096).decode()
    os.waitpid(child, 0)
    os.close(reader)
    assert said == "none"


def test_numbers_of_system_calls_are_the_kernel_s() -> None:
    """By its headers, where they are installed: both machines have all that bash needs."""
    tables = {**seal.ALLOWED, **seal.WITHOUT_EFFECT, **seal.ASKED}
    assert not {name for name, (x86, _) in tables.items() if x86 is None}
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip(f"no {header}")
    lines = [line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR_")]
    known = {words[1].removeprefix("__NR_"): int(words[2]) for words in lines}
    assert {name: x86 for name, (x86, _) in tables.items()} == {name: known[name] for name in tables}
    generic = Path("/usr/include/asm-generic/unistd.h").read_text().splitlines()
    arm = [line.split() for line in generic if re.match(r"#define __NR(3264)?_\w+ \d+$", line)]
    numbers = {words[1].removeprefix("__NR_").removeprefix("__NR3264_"): words[2] for words in arm}
    numbers["newfstatat"] = numbers["fstatat"]
    assert {name: str(number) for name, (_, number) in tables.items() if number} == {
        name: numbers[name] for name, (_, number) in tables.items() if number
    }


def test_without_a_closed_process_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal.platform, "machine", lambda: "riscv64")
    with pytest.raises(Exception, match=r"made for Linux on x86_64 and aarch64, and this is riscv64.*--arguments FILE"):
        ran(f"echo x > {tmp_path}/there", tmp_path)
    assert not (tmp_path / "there").exists()
