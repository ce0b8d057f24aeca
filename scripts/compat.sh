#!/usr/bin/env bash
# The contract suite against the oldest and the newest frameworks that pyproject.toml promises, each set in an
# environment of its own: compat.sh PYTHON FOLDER [oldest|newest ...]. Builds of PyTorch from the registry bring
# gigabytes of CUDA libraries; no GPU is needed. A run of both sets writes docs/results/compat.md.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
folder=$2
shift 2

# One line of requirements each. The oldest are the lower bounds in pyproject.toml, with what was current beside them.
oldest="torch==2.6.0 keras==3.5.0 tensorflow-cpu==2.18.0 jax==0.4.35 jaxlib==0.4.35 optax==0.2.4 transformers==4.48.0 timm==1.0.12 torchvision==0.21.0 numpy==2.0.2"
newest="torch keras tensorflow-cpu jax jaxlib optax transformers timm torchvision"

mkdir -p "$folder"
failed=()
bars=()
rows=()
sets=("$@")
[ ${#sets[@]} -gt 0 ] || sets=(oldest newest)
for set in "${sets[@]}"; do
    environment=$folder/$set
    echo "== $set"
    if [ ! -e "$environment/.ready" ]; then
        "$python" -m venv "$environment"
        # shellcheck disable=SC2086 # a list of requirements
        "$environment/bin/python" -m pip install --quiet --disable-pip-version-check ${!set} \
            safetensors h5py pyarrow pillow fsspec highspy psutil rich pytest hypothesis
        touch "$environment/.ready"
    fi
    versions=$("$environment/bin/python" -m pip list --format=freeze --disable-pip-version-check |
        grep -iE '^(torch|keras|tensorflow_cpu|tensorflow-cpu|jax|numpy|transformers|timm)==' | sed 's/==/ /' | paste -sd, | sed 's/,/, /g')
    echo "$versions"
    log=$folder/$set.log
    "$environment/bin/python" -m pytest -o addopts= --import-mode=importlib -p no:cacheprovider -q -rs tests/contract |
        tee "$log" && met=yes || { met="**no**" && failed+=("$set"); }
    bars+=("| contract of the $set frameworks promised | $(tail -n 1 "$log" | sed 's/ in .*//') | no failure | $met |")
    rows+=("| $set | $versions |")
done
if [ ${#sets[@]} = 2 ]; then
    {
        echo "# Oldest and newest frameworks"
        echo
        echo "Written by \`make compat\`: the contract suite, in an environment of its own for each set of versions."
        echo
        echo "- Date: $(date +%F)"
        echo "- Commit: $(git rev-parse --short HEAD)"
        echo
        echo "## Bars"
        echo
        echo "| claim | measured | bar | met |"
        echo "| --- | --: | --: | --: |"
        printf '%s\n' "${bars[@]}"
        echo
        echo "| set | versions |"
        echo "| --- | --- |"
        printf '%s\n' "${rows[@]}"
    } >docs/results/compat.md
fi
if [ ${#failed[@]} -gt 0 ]; then
    echo "contract broken with: ${failed[*]}" >&2
    exit 1
fi
