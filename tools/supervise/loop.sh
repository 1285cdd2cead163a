#!/usr/bin/env bash
# Runs a command with pretrain_gpt.py in it, and again after a fault as long as it gets further: on machines without
# SLURM, one loop on each, by the rule of slurm/pretrain.sbatch (tools.supervise.decide). See docs/without_slurm.md.
#
#     tools/supervise/loop.sh python pretrain_gpt.py RECIPE.toml [flags]
#     tools/supervise/loop.sh torchrun --nnodes 2 --node-rank 0 ... pretrain_gpt.py RECIPE.toml [flags]
#
# SIGTERM, SIGHUP, Ctrl-C: the run saves and ends, and is not started again. SIGUSR2: it saves, ends and goes on. A
# second Ctrl-C does not wait. Exit code: 0 did what was asked, 2 bad input, 75 stopped on request, saved; else the
# last attempt's. From the environment: PYTHON, RUN_DIR (the command's own), MAX_ATTEMPTS (failures in a row without a
# new checkpoint, 5), BACKOFF_S (before a failure's next attempt, 5; doubled up to MAX_BACKOFF_S, 300, until there is a
# new checkpoint).
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
say() { echo "supervise: $*" >&2; }
tool() { PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "${PYTHON:-python}" -m "$@"; }

[ $# -gt 0 ] || { say "no command. Usage: tools/supervise/loop.sh python pretrain_gpt.py RECIPE.toml"; exit 2; }
for name in MAX_ATTEMPTS BACKOFF_S MAX_BACKOFF_S; do
    [[ ${!name:-1} =~ ^(0|[1-9][0-9]{0,5})$ ]] || { say "$name: expected a whole number, found '${!name}'"; exit 2; }
done
command=("$@")
if [ -z "${RUN_DIR:-}" ]; then
    while [ $# -gt 0 ] && [ "${1##*/}" != pretrain_gpt.py ]; do shift; done
    [ $# -gt 0 ] || { say "no pretrain_gpt.py in the command '${command[*]}': give the run's folder in RUN_DIR"; exit 2; }
    RUN_DIR=$(tool training.cli.parse "${@:2}") || exit     # a bad recipe needs no attempt to be found
fi
type -P -- "${command[0]}" >/dev/null || { say "${command[0]} cannot be started: no such program"; exit 2; }
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
mark=TRIPLANE_EXIT_CODE_FILE=$scratch/exit_code             # tells bad input, which torchrun hides
job=$HOSTNAME-$$-$(date +%s)                                 # failures of an earlier loop do not count
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}   # torchrun's own 30 s are short for a save

stamp() { stat -c %y "$RUN_DIR/$1" 2>/dev/null; }
ours() { grep -lzsFx "$mark" /proc/[0-9]*/environ | cut -d/ -f3; }      # all processes of this attempt, orphans too
of() { sed -n "s/^$2:\s*//p" "/proc/$1/status" 2>/dev/null; }
hears() {   # whether process $1 has a handler for signal $2
    local caught
    caught=$(of "$1" SigCgt)
    (( 0x${caught:-0} >> ($(kill -l "$2") - 1) & 1 ))
}

ended='' asked='' asked_s=0 child=''
ask() {     # the first request is handed on; what comes soon after it says nothing new, what comes later does not wait
    local again=$1$ended pid parent heard=''
    interrupted=1
    [ "$1" = USR2 ] || ended=${ended:-$1}
    [ -n "$child" ] || return
    if [ -n "$asked" ]; then
        if [ "$again" = INTINT ] || [ $((SECONDS - asked_s)) -gt 5 ]; then kill -KILL $(ours) 2>/dev/null; fi
        return
    fi
    asked=1 asked_s=$SECONDS
    if [ "$1" = USR2 ]; then    # goes past torchrun, which would die of it, to the first that hear it
        for pid in $(ours); do
            parent=$(of "$pid" PPid)
            if hears "$pid" USR2 && { [ "$parent" = $$ ] || ! hears "$parent" USR2; }; then
                kill -USR2 "$pid" && heard=1
            fi
        done
    fi
    [ -n "$heard" ] || kill -TERM "$child" 2>/dev/null
}
for name in TERM INT HUP USR2; do trap "ask $name" "$name"; done
follow() {  # until it has ended: bash runs a trap during wait, which it then ends
    interrupted=1
    while [ "$interrupted" = 1 ]; do
        interrupted=0
        wait "$1"
        code=$?
    done
}
end_leftovers() {   # ranks of a torchrun that was killed may save; what writes a checkpoint has the time to end
    local pid end=$((SECONDS + 30))
    for pid in $(ours); do hears "$pid" TERM && kill -TERM "$pid" && say "process $pid was left over: SIGTERM"; done
    while [ -n "$(ours)" ] && [ "$SECONDS" -lt "$end" ]; do sleep 0.2; done
    kill -KILL $(ours) 2>/dev/null
}

pause_s=${BACKOFF_S:-5}
while :; do
    finished=$(stamp done) requeued=$(stamp requeue) newest=$(stamp checkpoints/latest) asked=''
    tool tools.supervise.decide --run_dir "$RUN_DIR" --before "$scratch/before"
    # A session of its own: Ctrl-C reaches it through this loop only. It dies with this loop.
    env "$mark" setsid setpriv --pdeathsig KILL "${command[@]}" &
    child=$!
    [ -z "$ended" ] || kill -TERM "$child"      # asked just before
    follow "$child"
    child=''
    end_leftovers
    if [ "$(stamp done)" != "$finished" ] && [ -e "$RUN_DIR/done" ]; then code=0
    elif [ -e "$scratch/exit_code" ]; then code=2
    elif [ "$(stamp requeue)" != "$requeued" ] && [ -e "$RUN_DIR/requeue" ]; then code=75
    elif [ -n "$asked" ] && [[ $code =~ ^(130|140|143)$ ]]; then code=75     # asked before it could hear
    fi
    why=$(SLURM_JOB_ID=$job tool tools.supervise.decide --run_dir "$RUN_DIR" --exit_code "$code" \
        --before "$scratch/before" --max_attempts "${MAX_ATTEMPTS:-5}")
    again=$?
    [ -z "$ended" ] || { say "ended by SIG$ended; the same command continues $RUN_DIR"; exit "$code"; }
    say "$why"
    [ "$again" = 0 ] || exit "$code"
    [ "$(stamp checkpoints/latest)" = "$newest" ] || pause_s=${BACKOFF_S:-5}
    if [ "$code" != 75 ]; then
        sleep "$pause_s" &
        pause=$!
        [ -n "$ended" ] || wait "$pause"
        kill "$pause" 2>/dev/null
        pause_s=$((pause_s * 2 < ${MAX_BACKOFF_S:-300} ? pause_s * 2 : ${MAX_BACKOFF_S:-300}))
    fi
    [ -z "$ended" ] || { say "ended by SIG$ended between two attempts; the same command continues $RUN_DIR"; exit "$code"; }
done
