"""The door from a launch script to a run: the script as it was found, its recipe, five optimizer steps."""

import json
from pathlib import Path

import pytest

from programs import Program
from tools.from_megatron.__main__ import main
from training.metrics.jsonl import read_jsonl

SCRIPT = r"""#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
set -euo pipefail
usage() { echo "usage: $0 FOLDER"; exit 1; }
[[ $# -ge 1 ]] || usage
FOLDER=$1; shift
NAME=$(basename ${FOLDER%/}); SIZE=tiny_run
case ${SIZE%%_*} in
  tiny) LAYERS=2; HIDDEN=64;;
  *)    LAYERS=32; HIDDEN=4096;;
esac
HEADS=$((HIDDEN / 16))
MODEL=(--num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads $HEADS --seq-length 64)
MODEL+=(--max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu)
for flag in disable-bias-linear untie-embeddings-and-output-weights; do MODEL+=("--$flag"); done
[ "${MOE:-0}" -eq 1 ] && MODEL+=(--num-experts 4)
cat > job.sh <<EOF
#SBATCH --nodes=1
srun bash -c 'torchrun --nproc_per_node \$GPUS pretrain_gpt.py ${MODEL[@]} --micro-batch-size 2 --global-batch-size 4 \
  --train-iters 5 --lr 1e-3 --eval-iters 1 --eval-interval 100 --hidden-dropout 0 --attention-dropout 0 \
  --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 257 --split 8,1,1 \
  --data-path $FOLDER/text.jsonl --save $FOLDER/${NAME^^}'
EOF
GPUS=1 sbatch --export=ALL job.sh
"""


@pytest.mark.campaign
def test_a_script_becomes_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my"
    folder.mkdir()
    lines = (json.dumps({"text": f"{number} is a number, and {number + 1} follows it."}) for number in range(500))
    (folder / "text.jsonl").write_text("\n".join(lines))
    script, recipe = tmp_path / "launch.sh", tmp_path / "launch.toml"
    script.write_text(SCRIPT)
    assert main([str(script), "--set", f"1={folder}"]) == 0, capsys.readouterr().err
    recipe.write_text(capsys.readouterr().out)
    run = Program([str(recipe), "--device", "cpu", "--data.cache_dir", str(tmp_path / "cache")], tmp_path / "console")
    said = run.communicate()
    assert run.returncode == 0, said
    losses = [line["loss"] for line in read_jsonl(folder / "MY" / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 5 and losses[-1] < losses[0] < 6
